"""The versions of other packages that the integrations were tested with, and the checks of what they replace.

A replacement that finds another name or another signature than it knows raises: a patch that does nothing is worse than
none.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Sequence
from typing import Any

# tested: tests/extended/programs.py runs each adapter with the pinned and the newest release
TRANSFORMERS = "5.17.0 to 5.23.0"
TRL = "1.14.2 to 1.16.0"


def installed(package: str) -> str:
    """The installed version of a package, or "none"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def expect_signature(name: str, function: Any, wanted: Sequence[str], package: str, known: str) -> None:
    """RuntimeError where `function` is None, or its parameters have other names or another order than `wanted`."""
    have = f"{package} {installed(package)}"
    told = f"this adapter knows {package} {known}, and {have} is installed"
    if function is None:
        raise RuntimeError(f"{name} does not exist: {told}")
    found = list(inspect.signature(function).parameters)
    if found != list(wanted):
        raise RuntimeError(f"{name} takes ({', '.join(found)}), not ({', '.join(wanted)}): {told}")
