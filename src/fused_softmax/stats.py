"""stats: which path each call took, counted while it is asked for."""

from __future__ import annotations

import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from . import functional, losses
from .plan_for import plan_for
from .torch_ops import aten_kernels

# what enters the routes of torch_ops: the op; where it is called; the functions that return None to hand a call on
# to the next, and those that do not
_ROUTES: tuple[tuple[str, ModuleType, tuple[str, ...], tuple[str, ...]], ...] = (
    ("softmax", functional, ("direct_softmax", "direct_out"), ("softmax_of",)),
    ("logsumexp", functional, ("direct_logsumexp",), ("logsumexp_of",)),
    ("masked_softmax", functional, (), ("masked_softmax_of",)),
    ("cross_entropy", losses, ("direct_cross_entropy",), ("cross_entropy_of",)),
    ("token_logprobs", losses, ("direct_token_logprobs",), ("token_logprobs_of",)),
)
_INPUTS = ("x", "logits", "input")

_lock = threading.Lock()
_active: list[stats] = []
_replaced: list[tuple[ModuleType, str, Callable[..., Any]]] = []


class stats:
    """Counts the calls of this package by op and path: a context manager, for a look at a program.

    A path is the regime of the kernel that ran ("warp", "block", "cluster", "two_pass", "strided", "transposed", and
    over a dimension that is not the last "spatial", "spatial_cluster", "spatial_two_pass"), "torch" where PyTorch's
    own kernel ran, "empty", or "called" where our kernel ran over several dimensions. Calls that `patch()` takes over
    are counted as "softmax, patched" and the like, their gradients as "softmax gradient, patched"; those with out= are
    not. Neither are the losses of linear layers, the ops of `parallel`, and what torch.compile has traced when its
    graph runs.
    Counting asks `plan_for` about each call, so it costs host time while it is active, and nothing before and after.
    It counts the calls of all threads.

    Attributes:
        calls: the number of calls by (op, path).
        reasons: why PyTorch's own kernel ran, by op, each reason once.

    >>> with stats() as counted:
    ...     y = functional.softmax(torch.zeros(2, 8, dtype=torch.float64))
    >>> counted.calls["softmax", "torch"]
    1
    """

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.reasons: dict[str, list[str]] = {}

    def __enter__(self) -> stats:
        with _lock:
            _active.append(self)
            if len(_active) == 1:
                _install()
        return self

    def __exit__(self, *exception: object) -> None:
        with _lock:
            _active.remove(self)
            if not _active:
                _restore()

    def __str__(self) -> str:
        lines = [f"{op:32} {path:10} {count:>10,}" for (op, path), count in sorted(self.calls.items())]
        lines += [f"{op}: {reason}" for op, reasons in sorted(self.reasons.items()) for reason in reasons]
        return "\n".join(lines) or "no calls"

    def __repr__(self) -> str:
        return f"stats(calls={dict(self.calls)})"


def _count(name: str, op: str, x: Any, given: dict[str, Any]) -> None:
    """Count one call of `op`, whose path is that of such arguments."""
    known = {key: given[key] for key in ("dim", "dtype", "mask", "backward") if given.get(key) is not None}
    several = isinstance(given.get("dim"), (tuple, list))
    if several:  # plan_for takes one, which says whose kernel runs
        known["dim"], several = given["dim"][-1] if given["dim"] else -1, len(given["dim"]) != 1
    found = plan_for(x, op=op, **known)
    path = "called" if several and found.regime != "torch" else found.regime
    with _lock:
        for counted in _active:
            counted.calls[name, path] += 1
            if path == "torch":
                reasons = counted.reasons.setdefault(name, [])
                if found.why not in reasons:
                    reasons.append(found.why)


def _watched(op: str, function: Callable[..., Any], direct: bool) -> Callable[..., Any]:
    """`function`, whose calls are counted; a direct one that returns None hands its call on to the other."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if torch.compiler.is_compiling() or (direct and result is None):
            return result
        given = signature.bind(*args, **kwargs).arguments
        x = next(given[name] for name in _INPUTS if name in given)
        named = f"log_{op}" if given.get("log") else op
        _count(named, named, x, given)
        return result

    return call


def _watch_patched(op: str, x: Any, **given: Any) -> None:
    """Count one call that PyTorch's dispatcher sent to `patch()`."""
    _count(f"{op}{' gradient' if given.get('backward') else ''}, patched", op, x, given)


def _install() -> None:
    for op, module, direct, others in _ROUTES:
        for name in (*direct, *others):
            function = getattr(module, name)
            _replaced.append((module, name, function))
            setattr(module, name, _watched(op, function, name in direct))
    aten_kernels.watch = _watch_patched


def _restore() -> None:
    while _replaced:
        setattr(*_replaced.pop())
    aten_kernels.watch = None
