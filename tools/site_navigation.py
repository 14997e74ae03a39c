"""A hook of mkdocs: adds the pages that `python -m pages --site` wrote to the site's navigation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# section of the navigation -> folder under docs/, and the names of its generated pages
GENERATED = {"Performance": ("performance", "op-*.md"), "Lessons": ("lessons", "l*.md")}


def on_config(config: Any) -> Any:
    """Called by mkdocs once, before it reads the pages."""
    docs = Path(config["docs_dir"])
    for section in config["nav"]:
        for name, pages in section.items():
            if name in GENERATED:
                folder, pattern = GENERATED[name]
                pages += [file.relative_to(docs).as_posix() for file in sorted((docs / folder).glob(pattern))]
    return config
