"""The record of a run: a header as bench's, one row for each cell, what was reached. Runs of one kernel hash add up."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import fused_softmax
from fused_softmax.lab.record import header, write_atomically
from fused_softmax.launch.device import interpreting

from . import coverage

if TYPE_CHECKING:
    from .session import Findings, Request

# what decides a kernel's code: the kernels, how they are launched, and the plans
_SOURCES = ("kernels/*.py", "kernels/common/*.py", "launch/*.py", "planning/*.py")


class OtherKernels(ValueError):
    """The record is of other kernels."""


def kernel_hash() -> str:
    """sha256 over the sources of kernels, launches and plans."""
    root = Path(fused_softmax.__file__).parent
    found = sorted({path for pattern in _SOURCES for path in root.glob(pattern)})
    digest = hashlib.sha256()
    for path in found:
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _load(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): give a file that `fuzz --record` wrote") from None
    if not (isinstance(content, dict) and {"header", "kernel_hash", "rows"} <= content.keys()):
        raise ValueError(f"{path} is no record of the fuzzer: give a file that `fuzz --record` wrote")
    return content


def check(path: Path, seed: int | None = None) -> None:
    """Raise where the file cannot take a run of these kernels, with this seed: before the run, not after it."""
    if path.exists():
        known = _load(path)
        if any(seed in row["seeds"] for row in known["rows"]):
            raise ValueError(f"{path} has a run of seed {seed}: its cases would count twice. Give another --seed")
        if known["kernel_hash"] != kernel_hash():
            raise OtherKernels(
                f"{path} is a record of other kernels ({known['kernel_hash'][:12]}, these are {kernel_hash()[:12]}):"
                " only runs of the same kernels add up. Give another file, or delete this one"
            )


def read(path: Path) -> dict[str, Any] | None:
    """What the file has before a run; None where there is none."""
    check(path)
    return _load(path) if path.exists() else None


def counted(known: dict[str, Any] | None) -> Counter:
    """How many cases of each cell a file has."""
    rows = [] if known is None else known["rows"]
    return Counter({(row["op"], row["way"], row["dtype"]): row["cases"] for row in rows})


def write(path: Path, request: Request, findings: Findings, known: dict[str, Any] | None) -> None:
    """Write the run, added to `known`, which the file had before it: a second write of a run replaces the first."""
    made = _content(request, findings)
    write_atomically(path, _dump(made if known is None else _added(known, made)))


def add_records(path: Path, others: Sequence[Path]) -> Counter:
    """Write the sum of `path`, where it exists, and of other records to `path`; returns the cases of each cell.

    ValueError where they are of different kernels or devices, or have a seed in common.
    """
    total: dict[str, Any] | None = None
    for file in [*([path] if path.exists() else []), *others]:
        content = _load(file)
        if total is not None:
            if content["kernel_hash"] != total["kernel_hash"]:
                raise OtherKernels(f"{file} is a record of other kernels: only runs of the same kernels add up")
            if content["header"]["device"] != total["header"]["device"]:
                raise ValueError(f"{file} is a record of {content['header']['device']}, not of the same device")
            if again := _seeds(content) & _seeds(total):
                raise ValueError(f"{file} has a run of seed {min(again)}, which would count twice")
        total = content if total is None else _added(total, content)
    if total is None:
        raise ValueError("--add: no record is given")
    write_atomically(path, _dump(total))
    return counted(total)


def _seeds(content: dict[str, Any]) -> set[int]:
    return {seed for row in content["rows"] for seed in row["seeds"]}


def _content(request: Request, findings: Findings) -> dict[str, Any]:
    """One run as a record has it."""
    head = asdict(header(torch.device("cuda" if torch.cuda.is_available() else "cpu"), interpreting()))
    wanted = coverage.everything()
    return {
        "header": {k: v for k, v in head.items() if k not in ("ceilings", "unavailable", "stopped", "finished")},
        "kernel_hash": kernel_hash(),
        "rows": [
            {
                "op": op, "way": way, "dtype": dtype, "cases": cases, "wrong": findings.wrong[op, way, dtype],
                "errors": findings.errors[op, way, dtype], "seeds": [request.seed],
                "seconds": round(findings.seconds.get((op, way, dtype), 0.0), 2),
            }
            for (op, way, dtype), cases in sorted(findings.cases.items())
        ],
        "coverage": {
            "reached": sorted(findings.reached & wanted),
            "not_reached": sorted(wanted - findings.reached),
        },
        "failures": [{"problems": f.problems, "case": json.loads(f.smallest)} for f in findings.distinct],
    }  # fmt: skip


def _added(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """The sum of two records of the same kernels."""
    runs = [run for r in (a, b) for run in r["header"].get("runs", [r["header"]["date"]])]
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in (*a["rows"], *b["rows"]):
        cell = row["op"], row["way"], row["dtype"]
        rows[cell] = _sum(rows[cell], row) if cell in rows else row
    reached, missing = (
        {(kernel, flag) for r in (a, b) for kernel, flag in r["coverage"][name]} for name in ("reached", "not_reached")
    )
    content = {
        "header": {**a["header"], "runs": runs},
        "kernel_hash": a["kernel_hash"],
        "rows": [rows[cell] for cell in sorted(rows)],
        "coverage": {"reached": sorted(reached), "not_reached": sorted(missing - reached)},
        "failures": a["failures"] + b["failures"],
    }
    if sanitizers := [*a.get("sanitizers", ()), *b.get("sanitizers", ())]:
        content["sanitizers"] = sanitizers
    return content


def add_sanitizer(path: Path, request: Request, row: dict[str, Any]) -> None:
    """Add what a sanitizer's run gave: one row for each tool and seed; a row of the same seed is replaced."""
    from .session import Findings

    if not path.exists():
        write(path, request, Findings(), None)
    content = read(path)
    assert content is not None
    kept = [r for r in content.get("sanitizers", []) if (r["tool"], r["seed"]) != (row["tool"], request.seed)]
    content["sanitizers"] = [*kept, {**row, "seed": request.seed}]
    write_atomically(path, _dump(content))


def _sum(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    summed = {k: round(a[k] + b[k], 2) for k in ("cases", "wrong", "errors", "seconds")}
    return {**a, **summed, "seeds": sorted({*a["seeds"], *b["seeds"]})}


def _dump(content: dict[str, Any]) -> str:
    """JSON with one row a line."""
    parts = []
    for name, value in content.items():
        if isinstance(value, list):
            body = ",\n    ".join(json.dumps(row) for row in value)
            parts.append(f'  "{name}": [\n    {body}\n  ]' if value else f'  "{name}": []')
        elif name == "coverage":
            sets = (f'    "{k}": {json.dumps(v)}' for k, v in value.items())
            parts.append(f'  "{name}": {{\n' + ",\n".join(sets) + "\n  }")
        else:
            parts.append(f'  "{name}": ' + json.dumps(value, indent=2).replace("\n", "\n  "))
    return "{\n" + ",\n".join(parts) + "\n}\n"
