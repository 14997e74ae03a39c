"""Parameters of which a few run by default, and the others with `make test-extended`."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def few(by_default: Container[Any], of: Iterable[Any]) -> list[Any]:
    """All of them; those that are not `by_default` are marked `extended`."""
    return [value if value in by_default else pytest.param(value, marks=pytest.mark.extended) for value in of]
