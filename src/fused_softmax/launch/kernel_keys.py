"""One key for each kernel in Triton's cache on disk, whatever a process compiled before it.

Triton's key of a function has the constants of the functions that it calls, but only of those whose own keys were asked
for before. So a process that compiled kernels in another order than the last one found few of them on disk, and
compiled the others again: 2 to 6 seconds each. `settle_key` asks for the keys of called functions first.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType
from typing import Any


def settle_key(function: Any) -> None:
    """Computes Triton's keys of all functions that `function` calls, and then its own."""
    _settle(function, set())


def _settle(function: Any, settled: set[int]) -> None:
    settled.add(id(function))
    raw = function.fn
    for name in _names(raw.__code__):
        called = raw.__globals__.get(name)
        # asked of the type: to ask the function would compute its key
        if hasattr(type(called), "cache_key") and id(called) not in settled:
            _settle(called, settled)
    function.cache_key  # noqa: B018


def _names(code: CodeType) -> Iterator[str]:
    """The global names of a function, and of what is defined in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
