"""Where a drawn tensor lies: inside a larger buffer whose other bytes are known, so that a stray access shows.

The buffer is filled with NaN of a known bit pattern: what reads outside the tensor computes NaN, and what writes there
changes the pattern. Layouts that overlap read the buffer's values more than once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

GUARD = 1024  # elements before and after; a multiple of 16 bytes for every dtype
KINDS = ("contiguous", "offset", "padded", "cut", "step", "transposed", "expanded", "overlapping", "channels_last")
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# float32: a NaN whose payload no instruction makes; 16 bits: NaN in both formats
_PATTERN = {1: 1, 2: 0x7FD5, 4: 0x7FC0DEAD, 8: 0x7FF8DEADBEEF1234}


@dataclass(frozen=True)
class Placed:
    """A tensor, and the buffer that it lies in."""

    tensor: Tensor
    buffer: Tensor  # of integers
    before: Tensor

    def changed(self) -> Tensor:
        """Whether any byte of the buffer has changed, as a tensor of one element."""
        return (self.buffer != self.before).any()

    def changed_outside(self) -> Tensor:
        """Whether a byte next to the tensor has changed."""
        inside = torch.zeros_like(self.buffer, dtype=torch.bool)
        t = self.tensor
        if t.untyped_storage().data_ptr() != self.buffer.untyped_storage().data_ptr():
            return self.changed()
        inside.as_strided(t.shape, t.stride(), t.storage_offset()).fill_(True)
        return ((self.buffer != self.before) & ~inside).any()


def draw_layout(rng: Random, n_dims: int) -> tuple[str, int]:
    """(kind, number); the number says how far, or in which order."""
    kind = rng.choice(("contiguous", "contiguous", "contiguous", "offset", "offset", "padded", "padded", *KINDS))
    if kind == "channels_last" and n_dims not in (4, 5):
        kind = "transposed"
    return kind, rng.choice((1, 1, 2, 3, 4, 5, 7, 8, 16))


def strides_of(shape: tuple[int, ...], kind: str, number: int) -> tuple[int, ...]:
    """The strides of this layout, in elements."""
    order = list(range(len(shape)))
    if kind == "transposed" and shape:
        Random(number).shuffle(order)
        if order == sorted(order):
            order.reverse()
    elif kind == "channels_last" and len(shape) > 2:
        order = [0, *range(2, len(shape)), 1]
    step = number + 1 if kind == "step" else 1
    strides = [0] * len(shape)
    for position, d in enumerate(reversed(order)):
        strides[d] = step
        step *= max(1, shape[d])
        if kind == "padded" and position == 0:
            step += number
        if kind == "cut" and position == 1:  # from more columns of a dimension that is not the last
            step += number * strides[d]
    if kind == "expanded" and shape:
        strides[0] = 0
    elif kind == "overlapping" and len(shape) > 1:
        strides[-2] = max(1, shape[-1] // 2)
    return tuple(strides)


def onto(t: Tensor, device: torch.device | str) -> Tensor:
    """A CPU tensor on `device`, through pinned memory: a copy from other memory waits for the GPU, which many processes
    share."""
    pins = torch.device(device).type == "cuda" and t.numel() > 0
    return t.pin_memory().to(device, non_blocking=True) if pins else t.to(device)


def place(values: Tensor, layout: tuple[str, int], device: torch.device | str) -> Placed:
    """A tensor like `values` (on the CPU), in this layout, on `device`; one that overlaps has others of its kind."""
    kind, number = layout
    shape = tuple(values.shape)
    strides = strides_of(shape, kind, number)
    first = GUARD + (number if kind == "offset" else 0)
    overlaps = kind in ("expanded", "overlapping")
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if values.numel() else 0
    size, item = first + span + GUARD, values.element_size()
    memory = torch.full((size,), _PATTERN[item], dtype=_INTEGER[item])
    floats = memory.view(values.dtype)
    if overlaps and values.numel():
        flat = values.reshape(-1)
        floats[first : first + span] = flat[:span] if span <= len(flat) else flat.repeat(-(-span // len(flat)))[:span]
    else:
        floats.as_strided(shape, strides, first).copy_(values)
    memory = onto(memory, device)
    return Placed(memory.view(values.dtype).as_strided(shape, strides, first), memory, memory.clone())


def place_output(shape: tuple[int, ...], dtype: torch.dtype, layout: tuple[str, int], device: str) -> Placed:
    """An output to be written: the pattern throughout."""
    kind, number = layout
    kind = kind if kind not in ("expanded", "overlapping") else "contiguous"
    strides = strides_of(shape, kind, number)
    first = GUARD + (number if kind == "offset" else 0)
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if math.prod(shape) else 0
    item = dtype.itemsize
    memory = torch.full((first + span + GUARD,), _PATTERN[item], dtype=_INTEGER[item], device=device)
    return Placed(memory.view(dtype).as_strided(shape, strides, first), memory, memory.clone())
