"""The last upstream gradient of a loss: the device writes it, and the host reads it without waiting.

A loss writes its gradient in the pass that reads the logits, for one upstream gradient. If another one arrives, all of
it is written again. Programs repeat themselves, so the next forward expects what came last. A number that is late or
wrong costs time and changes no result: the device compares what arrives with what the gradient is for.
"""

from __future__ import annotations

import ctypes
import math
import threading

import torch
from torch import Tensor

SLOTS = 1024  # two layouts that share one are at most slower


class LastUpstream:
    """vector: the address of one float32, for a kernel to write to."""

    __slots__ = ("_seen", "vector")

    def __init__(self, address: int) -> None:
        self.vector, self._seen = address, ctypes.c_float.from_address(address)

    def expected(self) -> float:
        """The upstream gradient to expect: the last one that was seen, where it is an ordinary number; else 1."""
        value = self._seen.value
        return value if 0.0 < abs(value) < math.inf else 1.0


_lock = threading.Lock()
_memory: list[Tensor] = []
_taken = 0


def new_slot() -> LastUpstream | None:
    """A slot that holds 1, for losses on any GPU; None where it cannot be had, as while a first graph is captured."""
    global _taken
    with _lock:
        if not _memory:
            if torch.cuda.is_current_stream_capturing():
                return None
            try:
                _memory.append(torch.ones(SLOTS).pin_memory())
            except RuntimeError:  # the device cannot write to the host's memory
                return None
        address = _memory[0].data_ptr() + 4 * (_taken % SLOTS)
        _taken += 1
    return LastUpstream(address)
