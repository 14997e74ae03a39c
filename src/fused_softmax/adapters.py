"""Deprecated: import from fused_softmax.integrations. This name goes with the release after next."""

import importlib
import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("fused_softmax.adapters is fused_softmax.integrations now", DeprecationWarning, stacklevel=2)
    return getattr(importlib.import_module(".integrations", __package__), name)
