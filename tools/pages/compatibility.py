"""The tables of docs/compatibility.md, from recorded runs and from the plans."""

from __future__ import annotations

from pathlib import Path

from fused_softmax.launch.availability import MIN_TORCH, MIN_TRITON, NEWEST_TRITON
from pages.targets import measured_targets, targets_table
from pages.version_runs import RECORDS, load, measured, version_table

PAGE = Path("docs") / "compatibility.md"


def floors() -> str:
    """The floors in one sentence, from the numbers that the package checks."""
    oldest, triton, newest = (".".join(map(str, pair)) for pair in (MIN_TORCH, MIN_TRITON, NEWEST_TRITON))
    return (
        f"The kernels need torch {oldest} and Triton {triton} or later. The newest Triton that is tested is {newest}."
    )


def tables(root: Path) -> dict[str, str]:
    """The text between each pair of markers."""
    results = root / "benchmarks" / "results"
    runs = [*load(root / RECORDS), *measured(results)]
    return {
        "floors": floors(),
        "versions": version_table(runs),
        "targets": targets_table(measured_targets(results)),
    }
