"""The site's pages of the lessons, from their modules' docstrings and code."""

from __future__ import annotations

import inspect
from pathlib import Path

from fused_softmax.lab import lessons

FOLDER = Path("docs") / "lessons"


def page(n: int) -> str:
    """The page of lesson n as Markdown."""
    parts = "\n\n".join(f"## {heading}\n\n{text}" for heading, text in lessons.parts(n).items())
    code = inspect.getsource(lessons.load(n)).rstrip()
    return f"# {lessons.title(n)}\n\n{parts}\n\n## The file\n\n```python\n{code}\n```\n"


def write(root: Path) -> list[Path]:
    """Write a page for each lesson; returns the files."""
    files = [root / FOLDER / f"{name}.md" for name in lessons.LESSONS]
    for n, file in zip(lessons.numbers(), files, strict=True):
        file.write_text(page(n), encoding="utf-8")
    return files
