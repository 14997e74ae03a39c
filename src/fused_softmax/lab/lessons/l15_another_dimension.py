"""15. Another dimension: neighbors in memory are other softmaxes.

Problem
    Softmax over the classes of an image (classes, pixels) runs along the first dimension. The elements of one softmax
    are n_pixels elements apart. A program that takes one pixel reads one element out of each sector of 32 bytes: of
    bfloat16 a sixteenth of what moves is used. A transposed copy before and after moves three times the bytes.

Mechanism
    The neighbors in memory are the same class of neighboring pixels. So a program takes INNER pixels next to each
    other, and all classes: a tile [BLOCK, INNER]. Each line of the tile is one run of memory, and a warp's load uses
    every byte of its sectors: it is coalesced. The reduction runs along axis 0, and each of the INNER columns of the
    tile has its own maximum and its own sum. Nothing is transposed: the kernel only holds another part of the tensor.

Resource trade-off
    The tile has BLOCK * INNER elements, and all of them are on chip. With many classes INNER must be small, and below
    32 bytes for each line sectors are wasted again. Few warps with many elements for each thread are fastest here: a
    reduction along axis 0 that stays in a thread or a warp needs no barrier. Longer columns need a cluster, or two
    reads.

Common failure mode
    One program for each pixel. Every result is right, and most of what moves is not used: a test of results sees
    nothing, the counter of sectors does. The other failure is a reduction along the wrong axis of the
    tile, which gives a softmax over the pixels.

Measurement
    Softmax over the last dimension, as a fraction of the copy; docs/other-dims.md has the same for other dimensions:
    $ fused-softmax bench --systems fused_softmax,08_many_rows --widths 64,256
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_softmax.lab import reference
from fused_softmax.lab.grading.subjects import Subject, columns
from fused_softmax.lab.traffic import Traffic
from fused_softmax.launch.compile import Launch

SYSTEM = "15_another_dimension"
TILE = 16384  # elements of a program
MAX_INNER = 64
MAX_BLOCK = 2**20  # triton's limit on the elements of a block


@triton.jit
def columns_kernel(y_ptr, x_ptr, n_classes, n_pixels, BLOCK: tl.constexpr, INNER: tl.constexpr, AXIS: tl.constexpr):
    classes = tl.arange(0, BLOCK)[:, None].to(tl.int64)  # [BLOCK, 1]
    pixels = tl.program_id(0) * INNER + tl.arange(0, INNER)[None, :]  # [1, INNER], neighbors in memory
    mask = (classes < n_classes) & (pixels < n_pixels)
    x = tl.load(x_ptr + classes * n_pixels + pixels, mask=mask, other=-float("inf")).to(tl.float32)  # [BLOCK, INNER]
    numerator = tl.exp(x - tl.expand_dims(tl.max(x, axis=AXIS), AXIS))
    denominator = tl.expand_dims(tl.sum(numerator, axis=AXIS), AXIS)
    tl.store(y_ptr + classes * n_pixels + pixels, numerator / denominator, mask=mask)


def launches(x: Tensor, y: Tensor, axis: int = 0) -> list[Launch]:
    """One launch for contiguous x, y (n_classes, n_pixels); ValueError above 2^20 classes."""
    n_classes, n_pixels = x.shape
    if n_classes > MAX_BLOCK:
        raise ValueError(f"{n_classes} classes do not fit one block: at most {MAX_BLOCK}")
    if not x.numel():
        return []
    block = triton.next_power_of_2(n_classes)
    inner = min(MAX_INNER, max(1, TILE // block), triton.next_power_of_2(n_pixels))
    meta: dict[str, Any] = {"BLOCK": block, "INNER": inner, "AXIS": axis}
    meta["num_warps"] = min(8, max(1, block * inner // 2048))  # 64 elements or more for each thread
    return [Launch(columns_kernel, (triton.cdiv(n_pixels, inner),), (y, x, n_classes, n_pixels), meta)]


def launches_for(x: Tensor) -> list[Launch]:
    """The launch for as many classes as x has columns: to be compiled, not to be run."""
    classes = x.new_empty(x.shape[1], 4096)
    return launches(classes, torch.empty_like(classes))


def softmax_over_classes(x: Tensor) -> Tensor:
    """Softmax of x (n_classes, n_pixels) over its first dimension."""
    x = x.contiguous()
    y = torch.empty_like(x)
    for launch in launches(x, y):
        launch()
    return y


def over_pixels(x: Tensor) -> Tensor:
    """The tile reduced along its other axis."""
    y = torch.full_like(x, math.nan)
    for launch in launches(x.contiguous(), y, axis=1):
        launch()
    return y


SUBJECT = Subject(
    "softmax_over_classes",
    lambda n_classes, n_pixels: Traffic(n_classes * n_pixels, n_classes * n_pixels),
    columns,
    functools.partial(reference.softmax, dim=0),
    coalesced=True,
    timed=(2**20, 64),
)
MISTAKES: dict[str, Callable[[Tensor], Tensor]] = {"the tile is reduced along its pixels": over_pixels}

if __name__ == "__main__":
    from fused_softmax.lab.lessons import run

    run(15)
