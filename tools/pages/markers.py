"""Text between markers of a page that is kept in the repository, and the check for staleness."""

from __future__ import annotations

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


def update(root: Path, name: Path, tables: Callable[[Path], Mapping[str, str]], check: bool) -> bool:
    """Rewrite a page from the records; with `check` write nothing. Returns whether the page is current now."""
    file = root / name
    now = file.read_text(encoding="utf-8")
    wanted = filled(now, tables(root), name)
    if now == wanted:
        print(f"{name} is what the records give")
        return True
    if check:
        print(f"{name} is not what the records give: `make pages` rewrites it")
        return False
    file.write_text(wanted, encoding="utf-8")
    print(f"wrote {name}")
    return True
