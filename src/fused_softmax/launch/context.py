"""Batch invariance: whether a row's bits may depend on the row's place in the batch, for this thread and context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

row_invariance: ContextVar[bool] = ContextVar("batch_invariant", default=False)


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Makes a row's bits independent of its place in the batch, for rows that start unaligned too.

    Without it, a row's bits never depend on the number of rows. For rows that start on 16 bytes they do not depend on
    the place either. Within it, unaligned rows (an odd number of 16-bit columns, say) are read element by element
    instead of in vectors; the documentation's page on batch invariance has the measured cost.

    >>> with batch_invariant():
    ...     y = torch.softmax(torch.zeros(2, 3), -1)
    """
    with _as(True):
        yield


@contextmanager
def as_in_forward(invariant: bool) -> Iterator[None]:
    """Batch invariance as a forward had it: autograd runs backward in a thread of its own, which does not know."""
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
