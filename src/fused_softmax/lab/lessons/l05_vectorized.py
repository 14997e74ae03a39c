"""05. Vectorized, as published and mended: a time counts only after the check.

Problem
    A GPU moves 16 bytes a thread in one instruction at best. A kernel that asks for single elements issues up to
    eight times the instructions, and has less in flight for each of them.

Mechanism
    The block is written as BLOCK_SIZE lanes of VEC adjacent columns each, in the hope of one wide access a lane.
    It is not the source's shape that decides: Triton lays the block out by what it can prove of contiguity and
    divisibility. The pointers and the row stride must be multiples of 16, and so must the mask's bound. For an
    H200 and 4,096 bfloat16 columns the mended launch loads 16 bytes at a time, the published one 8, all that 512
    columns leave a thread; at 1,000 or 4,097 both load 2, whatever VEC says.

Resource trade-off
    As in lesson 02 the row is held in registers. As published VEC = 4, whatever the width: little register use,
    many programs a multiprocessor, because little of the row is there. Mended, VEC grows with the row.

Common failure mode
    A grid of rows, a block of 128 x 4 columns, and no loop: columns from 512 on are never read and never written.
    Of 4,096 columns it does an eighth of the work, was the fastest in its table (0.0655 ms) and differed by 5.0,
    which no probability can: that is what the output's memory held before. Fill outputs with NaN, compare, and
    only then time.

Measurement
    The published launch appears as wrong and is not timed, the mended one is:
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
    """Softmax of the rows of x (n_rows, n_cols), float16, bfloat16 or float32: mended, so that it covers the row."""
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
