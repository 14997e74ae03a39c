"""How a kernel is loaded: when it is first needed, and with one key in Triton's cache on disk.

Triton's key of a function has the constants of the functions that it calls, but only of those whose own keys were asked
for before. So a process that compiled kernels in another order than the last one found few of them on disk, and
compiled the others again: 0.5 to 6 seconds each. `settle_key` asks for the keys of called functions first. It comes
before all else, because a kernel's hash, in any dictionary, is its key.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from . import availability

Kernel = Callable[[], Any]  # imports a kernel when it is first needed: the package imports without Triton
_settled: set[int] = set()
_lock = threading.RLock()


def kernel_loader(load: Kernel) -> Kernel:
    """`load`, with the kernel's key settled; KernelUnavailable where this Triton cannot even decorate the kernel."""

    @functools.wraps(load)
    def loaded() -> Any:
        availability.raise_if_failed(load)
        try:
            kernel = load()
            settle_key(kernel)  # before the kernel is part of any key
            return kernel
        except Exception as error:
            raise availability.failed(load, f"the kernel of {load.__module__}.{load.__name__}", error) from error

    return loaded


def kernel_of(module: str, name: str) -> Kernel:
    """The loader of a kernel of `module`."""

    def load() -> Any:
        return getattr(importlib.import_module(f"{__name__.rsplit('.', 2)[0]}.kernels.{module}"), name)

    load.__name__ = name
    return kernel_loader(load)


def settle_key(function: Any) -> None:
    """Computes Triton's keys of all functions that `function` calls, and then its own; once."""
    if id(function) not in _settled:
        with _lock:
            _settle(function, set())


def _settle(function: Any, begun: set[int]) -> None:
    # asked of the type: to ask the function would compute its key. An interpreted function has none
    done = id(function) in _settled or id(function) in begun
    if done or not hasattr(type(function), "cache_key"):
        return
    begun.add(id(function))
    raw = function.fn
    for name in _names(raw.__code__):
        _settle(raw.__globals__.get(name), begun)
    function.cache_key  # noqa: B018
    _settled.add(id(function))  # only now: another thread may compile what calls it


def _names(code: CodeType) -> Iterator[str]:
    """The global names of a function, and of what is defined in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
