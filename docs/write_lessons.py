"""Writes docs/lessons/NN_name.md from the lessons' docstrings, so that the site says what the code says.

Run by `make docs`. The pages are generated: they are not kept in the repository.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from fused_softmax.lab import lessons

HERE = Path(__file__).resolve().parent / "lessons"


def page(n: int) -> str:
    parts = "\n\n".join(f"## {heading}\n\n{text}" for heading, text in lessons.parts(n).items())
    code = inspect.getsource(lessons.load(n)).rstrip()
    return f"# {lessons.title(n)}\n\n{parts}\n\n## The file\n\n```python\n{code}\n```\n"


def main() -> None:
    for n, name in enumerate(lessons.LESSONS, start=1):
        (HERE / f"{name}.md").write_text(page(n), encoding="utf-8")
    print(f"{len(lessons.LESSONS)} pages in docs/lessons")


if __name__ == "__main__":
    main()
