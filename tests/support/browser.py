"""Pages in a real browser; conftest has the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def open_within(seconds: float, page: Any, file: Path) -> None:
    """Open a file from disk; fails where its page is complete only after so many seconds.

    They are seconds of a core that the page's own thread has: other tests share the cores.
    """
    client = page.context.new_cdp_session(page)
    client.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(file.as_uri(), wait_until="load")
    metrics = {metric["name"]: metric["value"] for metric in client.send("Performance.getMetrics")["metrics"]}
    client.detach()
    assert 0 < metrics["ThreadTime"] < seconds, f"{file} took {metrics['ThreadTime']} s"
