"""These tests run in environments of their own, which tests/extended/programs.py makes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("FUSED_SOFTMAX_PROGRAMS") == "1":
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="runs by `make programs`"))
