"""The record of a run: a header as bench's, one row for each cell, what was reached. Runs of one kernel hash add up."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
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


def check(path: Path, seed: int | None = None) -> None:
    """Raise where the file cannot take a run of these kernels, with this seed: before the run, not after it."""
    if path.exists():
        known = json.loads(path.read_text())
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
    return json.loads(path.read_text()) if path.exists() else None


def counted(known: dict[str, Any] | None) -> Counter:
    """How many cases of each cell a file has."""
    rows = [] if known is None else known["rows"]
    return Counter({(row["op"], row["way"], row["dtype"]): row["cases"] for row in rows})


def write(path: Path, request: Request, findings: Findings, known: dict[str, Any] | None) -> None:
    """Write the run, added to `known`, which the file had before it: a second write of a run replaces the first."""
    on_gpu = torch.cuda.is_available()
    head = asdict(header(torch.device("cuda" if on_gpu else "cpu"), interpreting()))
    rows = {
        cell: {"cases": cases, "wrong": findings.wrong[cell], "errors": findings.errors[cell],
               "seeds": [request.seed], "seconds": round(findings.seconds.get(cell, 0.0), 2)}
        for cell, cases in findings.cases.items()
    }  # fmt: skip
    reached = findings.reached
    failures = [{"problems": f.problems, "case": json.loads(f.smallest)} for f in findings.distinct]
    if known is not None:
        head = {**known["header"], "runs": [*known["header"].get("runs", [known["header"]["date"]]), head["date"]]}
        for row in known["rows"]:
            rows[row["op"], row["way"], row["dtype"]] = _sum(row, rows.get((row["op"], row["way"], row["dtype"])))
        reached = reached | {(kernel, flag) for kernel, flag in known["coverage"]["reached"]}
        failures = known["failures"] + failures
    wanted = coverage.everything()
    content = {
        "header": {k: v for k, v in head.items() if k not in ("ceilings", "unavailable", "stopped", "finished")},
        "kernel_hash": kernel_hash(),
        "rows": [{"op": op, "way": way, "dtype": dtype, **rows[op, way, dtype]} for op, way, dtype in sorted(rows)],
        "coverage": {
            "reached": sorted(reached & wanted),
            "not_reached": sorted(wanted - reached),
        },
        "failures": failures,
    }
    if known is not None and "sanitizers" in known:
        content["sanitizers"] = known["sanitizers"]
    write_atomically(path, _dump(content))


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


def _sum(a: dict[str, Any], b: dict[str, Any] | None) -> dict[str, Any]:
    if b is None:
        return {k: v for k, v in a.items() if k not in ("op", "way", "dtype")}
    summed = {k: round(a[k] + b[k], 2) for k in ("cases", "wrong", "errors", "seconds")}
    return {**summed, "seeds": sorted({*a["seeds"], *b["seeds"]})}


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
