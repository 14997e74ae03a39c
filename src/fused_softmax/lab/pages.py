"""Pages of the site whose tables are made from records: text between markers, and the check for staleness."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path


def filled(page: str, found: Mapping[str, str], name: Path) -> str:
    """The page with its tables replaced; ValueError where a pair of markers is missing."""
    for table, text in found.items():
        begin, end = f"<!-- {table}:begin -->", f"<!-- {table}:end -->"
        before, found_begin, rest = page.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found_begin and found_end):
            raise ValueError(f"{name} has no markers {begin} and {end}")
        page = f"{before}{begin}\n{text}\n{end}{after}"
    return page


def main(
    module: str, about: str, name: Path, tables: Callable[[Path], Mapping[str, str]], arguments: list[str] | None
) -> int:
    """The command of a page's module: rewrites the page `name`, or with --check fails where it is stale."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail where the page is stale")
    parser.add_argument("--root", type=Path, default=Path("."), help="the repository's root")
    asked = parser.parse_args(arguments)
    file = asked.root / name
    now = file.read_text(encoding="utf-8")
    wanted = filled(now, tables(asked.root), name)
    if now == wanted:
        print(f"{name} is what the records give")
        return 0
    if asked.check:
        print(f"{name} is not what the records give: python -m {module} rewrites it")
        return 1
    file.write_text(wanted, encoding="utf-8")
    print(f"wrote {name}")
    return 0
