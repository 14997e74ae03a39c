"""Batch invariance: whether a row's bits may depend on its place in the batch, for the current thread and context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

row_invariance: ContextVar[bool] = ContextVar("batch_invariant", default=False)


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Make a row's bits independent of its place in the batch, also for rows that start unaligned.

    A row's bits never depend on the number of rows. For rows that start on 16 bytes they do not depend on the place,
    either. Within this block unaligned rows, such as an odd number of 16-bit columns, are read element by element
    instead of in vectors, which is slower.

    >>> with batch_invariant():
    ...     y = torch.softmax(torch.zeros(2, 3), -1)
    """
    with _as(True):
        yield


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
