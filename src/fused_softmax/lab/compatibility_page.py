"""Writes the tables of docs/compatibility.md between their markers, from recorded runs and from the plans.

python -m fused_softmax.lab.compatibility_page           rewrites the page
python -m fused_softmax.lab.compatibility_page --check   fails where the page is not what the records give
"""

from __future__ import annotations

from pathlib import Path

from fused_softmax.lab import pages
from fused_softmax.lab.compatibility import measured_targets, targets_table
from fused_softmax.lab.version_runs import RECORDS, load, measured, version_table
from fused_softmax.launch.availability import MIN_TORCH, MIN_TRITON, NEWEST_TRITON

PAGE = Path("docs") / "compatibility.md"


def floors() -> str:
    """The floors in one sentence, from the numbers that the package checks."""
    oldest, triton, newest = (".".join(map(str, pair)) for pair in (MIN_TORCH, MIN_TRITON, NEWEST_TRITON))
    return (
        f"The kernels need torch {oldest} and Triton {triton} or later. The newest Triton that is tested is {newest}."
    )


def tables(root: Path) -> dict[str, str]:
    """What stands between each pair of markers."""
    results = root / "benchmarks" / "results"
    runs = [*load(root / RECORDS), *measured(results)]
    return {
        "floors": floors(),
        "versions": version_table(runs),
        "targets": targets_table(measured_targets(results)),
    }


def main(arguments: list[str] | None = None) -> int:
    return pages.main("fused_softmax.lab.compatibility_page", __doc__, PAGE, tables, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
