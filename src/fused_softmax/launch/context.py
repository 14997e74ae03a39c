"""Batch invariance: whether a row's bits may depend on its place in the batch, for the current thread and context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
row_invariance: ContextVar[bool] = ContextVar("batch_invariant", default=False)
_outer: ContextVar[tuple[bool, ...]] = ContextVar("batch_invariant_outer", default=())  # what each block found


class batch_invariant:
    """Make a row's bits independent of its place in the batch, also for rows that start unaligned.

    A row's bits never depend on the number of rows. For rows that start on 16 bytes they do not depend on the place,
    either. Within this block unaligned rows, such as an odd number of 16-bit columns, are read element by element
    instead of in vectors, which is slower.

    It holds for the current thread and context, nests, and decorates functions, coroutine functions and generator
    functions, also asynchronous ones, whose bodies it then holds for, and not the callers between two steps.

    >>> with batch_invariant():
    ...     y = fused_softmax.softmax(torch.zeros(2, 3), -1)
    """

    def __enter__(self) -> None:
        _outer.set((*_outer.get(), row_invariance.get()))
        row_invariance.set(True)

    def __exit__(self, *exception: object) -> None:
        # nothing was entered where a generator is closed in another context than its own
        if _outer.get():
            *outer, before = _outer.get()
            _outer.set(tuple(outer))
            row_invariance.set(before)

    def __call__(self, function: F) -> F:
        from .decorated import run_within

        return run_within(type(self), function)


@contextmanager
def as_in_forward(invariant: bool) -> Iterator[None]:
    """Set batch invariance as the forward had it: autograd runs backward in another thread, which does not know."""
    with _as(invariant):
        yield


@contextmanager
def _as(invariant: bool) -> Iterator[None]:
    token = row_invariance.set(invariant)
    try:
        yield
    finally:
        row_invariance.reset(token)


def is_batch_invariant() -> bool:
    """Whether the caller is within `batch_invariant()`."""
    return row_invariance.get()
