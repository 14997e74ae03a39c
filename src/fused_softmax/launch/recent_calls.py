"""The front of the direct path: calls that were prepared before, found by a short key and one check of their tensors.

A full key takes a dozen attributes of a tensor, one by one. Here torch compares them all at once (`tensor_guard`), also
the state that decides whether the dispatcher may be bypassed. Where nothing is found, the full key decides.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from .cache import Cache
from .torch_private import tensor_guard

# of one key: other dtypes, strides, alignments, requires_grad, with and without autocast; more take the full key
MOST = 6


class RecentCalls(Cache):
    """(check, ...) tuples by key. Entries hold no tensor and no address."""

    def add(self, key: Hashable, tensors: tuple[Tensor, ...], any_rows: bool, *call: Any) -> None:
        """Puts (check, *call) in, for tensors like these; nothing where this torch has no such check."""
        entries = self.get(key, ())
        if len(entries) < MOST and (check := tensor_guard(tensors, any_rows)) is not None:
            self.store(key, (*entries, (check, *call)))
