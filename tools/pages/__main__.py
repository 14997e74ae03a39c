"""The command: `python -m pages [--check | --site]`."""

from __future__ import annotations

import argparse
from pathlib import Path

import pages
from pages import (
    command,
    compatibility,
    install,
    lessons,
    markers,
    notebook,
    numerics,
    parallel,
    performance,
    readme,
    shapes,
)

KEPT = {module.PAGE: module.tables for module in (readme, install, numerics, compatibility, parallel, shapes)}


def main(arguments: list[str] | None = None) -> int:
    """Rewrite or check the pages; the exit status."""
    parser = argparse.ArgumentParser(description=pages.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail where a page is stale")
    parser.add_argument("--site", action="store_true", help="write the pages that only the site has")
    parser.add_argument("--root", type=Path, default=Path("."), help="the repository's root")
    asked = parser.parse_args(arguments)
    if asked.site:
        for file in (*performance.write(asked.root), *lessons.write(asked.root), *command.write(asked.root)):
            print(f"wrote {file}")
        return 0
    stale = [page for page, tables in KEPT.items() if not markers.update(asked.root, page, tables, asked.check)]
    if not notebook.update(asked.root, asked.check):
        stale.append(notebook.NOTEBOOK)
    if asked.check and (why := readme.stale_plot(asked.root)):
        stale.append(readme.PLOT)
        print(why)
    if not asked.check and (made := readme.write_plot(asked.root)):
        print(f"wrote {made}")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
