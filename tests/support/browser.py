"""Pages in a real browser; conftest has the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def open_within(seconds: float, page: Any, file: Path) -> None:
    """Open a file from disk; fails where its page is complete only after so many seconds, three times in turn."""
    for _ in range(3):  # other tests share the cores
        page.goto(file.as_uri())
        taken = page.evaluate("performance.getEntriesByType('navigation')[0].domComplete") / 1000
        if taken < seconds:
            return
    raise AssertionError(f"{file} took {taken} s")
