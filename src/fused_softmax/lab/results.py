"""Reads the results that a run has written: a file, a folder of them, and where a repository keeps its own."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from fused_softmax.lab.bench.inputs import DTYPES
from fused_softmax.lab.record import Header, Record, from_json

# types that a value of JSON may have, by the name in a field's annotation
JSON_TYPES: dict[str, Any] = {"str": str, "int": int, "bool": bool, "float": (int, float), "dict": dict}
JSON_TYPES["None"] = type(None)


class NotResults(ValueError):
    """A file of JSON that a benchmark did not write."""


def read_results(file: Path) -> tuple[Header, list[Record]]:
    """Read a results file; raises OSError where it cannot be read, NotResults or ValueError where it is none."""
    give = "give a .json file of `fused-softmax bench`"
    try:
        text = file.read_text(encoding="utf-8")
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error}): {give}") from None
    if not (isinstance(content, dict) and isinstance(content.get("header"), dict) and "records" in content):
        raise NotResults(f"{file} has no header and records: {give}")
    records = content["records"]
    if not (isinstance(records, list) and all(isinstance(r, dict) and "system" in r for r in records)):
        raise NotResults(f"{file} has records that name no system: {give}")
    try:
        head, found = from_json(text)
        _examine(head)
        for record in found:
            _examine(record)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is a damaged results file ({error}): {give}") from None
    return head, found


def _examine(part: Header | Record) -> None:
    """Raise ValueError where a field is not what its annotation says."""
    for f in fields(part):
        value, declared = getattr(part, f.name), re.findall(r"\w+", re.sub(r"\[.*\]", "", str(f.type)))
        if not any(isinstance(value, JSON_TYPES[name]) for name in declared):
            raise ValueError(f"{f.name} is {value!r}")
    if isinstance(part, Record) and part.dtype not in DTYPES:
        raise ValueError(f"dtype is {part.dtype!r}")


def gpu_folder(root: Path) -> Path:
    """benchmarks/results/h200 of a repository."""
    return root / "benchmarks" / "results" / "h200"


def result_files(folder: Path) -> list[Path]:
    """Result files of one GPU, by name; none when the folder is not there."""
    return sorted(folder.glob("*.json")) if folder.is_dir() else []


def read_folder(folder: Path) -> dict[Path, tuple[Header, list[Record]]]:
    """The benchmark's runs in a folder, by file; records of other commands, such as a fuzzer's, are passed over."""
    found = {}
    for file in result_files(folder):
        with suppress(NotResults):
            found[file] = read_results(file)
    return found


def results_folder() -> Path | None:
    """benchmarks/results of the repository that this package or the current folder lies in, if there is one."""
    for start in (Path(__file__).resolve(), Path.cwd().resolve() / "-"):
        for parent in start.parents:
            if (parent / "benchmarks" / "results").is_dir():
                return parent / "benchmarks" / "results"
    return None
