"""Writes the tables of docs/compatibility.md between their markers, from recorded runs and from the plans.

python -m fused_softmax.lab.compatibility_page           rewrites the page
python -m fused_softmax.lab.compatibility_page --check   fails where the page is not what the records give
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fused_softmax.availability import MIN_TORCH, MIN_TRITON, NEWEST_TRITON
from fused_softmax.lab.compatibility import measured_targets, targets_table
from fused_softmax.lab.version_runs import RECORDS, load, measured, version_table

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


def filled(page: str, found: dict[str, str]) -> str:
    """The page with its tables replaced; ValueError where a pair of markers is missing."""
    for name, text in found.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, found_begin, rest = page.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found_begin and found_end):
            raise ValueError(f"{PAGE} has no markers {begin} and {end}")
        page = f"{before}{begin}\n{text}\n{end}{after}"
    return page


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail where the page is stale")
    parser.add_argument("--root", type=Path, default=Path("."), help="the repository's root")
    asked = parser.parse_args(arguments)
    file = asked.root / PAGE
    now = file.read_text(encoding="utf-8")
    wanted = filled(now, tables(asked.root))
    if now == wanted:
        print(f"{PAGE} is what the records give")
        return 0
    if asked.check:
        print(f"{PAGE} is not what the records give: python -m fused_softmax.lab.compatibility_page rewrites it")
        return 1
    file.write_text(wanted, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
