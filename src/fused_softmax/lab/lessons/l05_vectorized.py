"""05. Vectorized, as published and fixed: a time counts only after the check.

Problem
    One instruction moves at most 16 bytes for each thread. A kernel that loads single elements issues up to eight
    times the instructions, and has fewer bytes in flight for each of them.

Mechanism
    The block is written as BLOCK_SIZE lanes of VEC adjacent columns each, in the hope of one wide access for each
    lane. The source's shape does not decide this. Triton chooses the layout by what it can prove about contiguity and
    divisibility. The pointers, the row stride and the mask's bound must be multiples of 16. For an H200 and 4,096
    bfloat16 columns the fixed launch loads 16 bytes at a time. The published one loads 8, because 512 columns leave
    no more for each thread. At 1,000 or 4,097 columns both load 2 bytes, for every VEC.

Resource trade-off
    As in lesson 02 registers hold the row. The published version has VEC = 4 for every width. It uses few registers
    and has many programs on a multiprocessor, because it holds little of the row. In the fixed version VEC grows with
    the row.

Common failure mode
    The published version skips columns: a grid of rows, a block of 128 x 4 columns, and no loop. Columns from 512 on
    are never read and never written. For 4,096 columns it does an eighth of the work. It was the fastest in its table
    (0.0655 ms) and differed by 5.0, which no probability can: the output still held the memory's old content. Fill
    outputs with NaN, compare, and only then time.

Measurement
    The published launch appears as wrong and has no time. The fixed launch has one:
    $ fused-softmax bench --systems 05_published,05_vectorized --widths 512,4096
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_softmax.launch.compile import Launch

SYSTEM = "05_vectorized"
BLOCK_SIZE = 128
PUBLISHED_VEC = 4
MAX_BLOCK = 2**20  # triton's limit on the elements of a block


@triton.jit
def vectorized_kernel(y_ptr, x_ptr, n_cols, BLOCK_SIZE: tl.constexpr, VEC: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_SIZE)[:, None] * VEC + tl.arange(0, VEC)[None, :]  # [BLOCK_SIZE, VEC]
    mask = cols < n_cols
    x = tl.load(x_ptr + row * n_cols + cols, mask=mask, other=-float("inf")).to(tl.float32)
    numerator = tl.exp(x - tl.max(x))
    denominator = tl.sum(numerator)
    tl.store(y_ptr + row * n_cols + cols, numerator / denominator, mask=mask)


def launches(x: Tensor, y: Tensor, vec: int | None = None) -> list[Launch]:
    """One launch for contiguous x, y (n_rows, n_cols): VEC wide enough for the row (None), or as given.

    ValueError above 2^20 columns.
    """
    n_rows, n_cols = x.shape
    if n_cols > MAX_BLOCK:
        raise ValueError(f"a row of {n_cols} columns does not fit one block: at most {MAX_BLOCK}")
    if not x.numel():
        return []
    if vec is None:
        vec = triton.next_power_of_2(triton.cdiv(n_cols, BLOCK_SIZE))
    meta = {"BLOCK_SIZE": BLOCK_SIZE, "VEC": vec, "num_warps": 4}
    return [Launch(vectorized_kernel, (n_rows,), (y, x, n_cols), meta)]


def published_launches(x: Tensor, y: Tensor) -> list[Launch]:
    """The launch as published: BLOCK_SIZE x 4 columns of each row, and the rest of y as it was."""
    return launches(x, y, vec=PUBLISHED_VEC)


def softmax(x: Tensor) -> Tensor:
    """Softmax of the rows of x (n_rows, n_cols), float16, bfloat16 or float32: the fixed version covers the row."""
    x = x.contiguous()
    y = torch.empty_like(x)
    for launch in launches(x, y):
        launch()
    return y


def published(x: Tensor) -> Tensor:
    """The published launch into an output of NaN: what it leaves NaN, and the sums it takes, beyond 512 columns."""
    x = x.contiguous()
    y = torch.full_like(x, math.nan)
    for launch in published_launches(x, y):
        launch()
    return y


MISTAKES: dict[str, Callable[[Tensor], Tensor]] = {"as published: 512 columns of the row": published}

if __name__ == "__main__":
    from fused_softmax.lab.lessons import run

    run(5)
