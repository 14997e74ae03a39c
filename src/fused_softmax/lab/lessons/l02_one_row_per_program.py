"""02. One row per program: the whole row in one block, read once.

Problem
    The five passes of lesson 01 move four times the bytes that softmax needs, because each pass ends in memory. A row
    is only a few kilobytes: one program can hold it.

Mechanism
    Program i loads row i into registers, computes the maximum and the sum on chip, and stores the result: MN elements
    read, MN written. A Triton block has a power of two of lanes, so BLOCK is the next power of two from n_cols on. A
    mask turns off the lanes past the row's end, in the load and in the store. These lanes still take part in the
    reductions, so they hold -inf: it never raises a maximum, and its exponential is 0. A row of -inf alone is NaN, as
    in PyTorch: -inf - -inf is NaN.

Resource trade-off
    Registers replace traffic. The row lives in one program's registers: BLOCK / (32 * num_warps) values for each
    thread, of at most 255. Rows just above a power of two waste up to half the lanes. Rows that exceed the registers
    spill to memory: with 4 warps 65,536 columns are 512 values for each thread, and compiled for an H200 each thread
    spills 3,464 bytes. Above 2^20 columns Triton allows no block at all.

Common failure mode
    A wrong fill value of the masked load. With +inf the fill becomes the maximum: every exponent is -inf, inf - inf
    is NaN in the masked lanes, and so the sum and the row are NaN. Without a fill those lanes are undefined. If they
    hold 0, each adds exp(0 - max) to the sum, and the row sums to less than 1. Widths that are a power of two hide
    both.

Measurement
    The wrong fills at 1000 columns, and the time next to the five passes:
    $ fused-softmax bench --systems 01_naive,02_one_row --widths 1000,1024
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_softmax.launch.compile import Launch

SYSTEM = "02_one_row"
MAX_BLOCK = 2**20  # triton's limit on the elements of a block


@triton.jit
def one_row_kernel(y_ptr, x_ptr, n_cols, BLOCK: tl.constexpr, FILL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * n_cols + cols, mask=mask, other=FILL).to(tl.float32)  # [BLOCK]
    numerator = tl.exp(x - tl.max(x, axis=0))
    denominator = tl.sum(numerator, axis=0)
    tl.store(y_ptr + row * n_cols + cols, numerator / denominator, mask=mask)


def launches(x: Tensor, y: Tensor, fill: float | None = -math.inf) -> list[Launch]:
    """One launch for contiguous x, y (n_rows, n_cols); ValueError above 2^20 columns."""
    n_rows, n_cols = x.shape
    if n_cols > MAX_BLOCK:
        raise ValueError(f"a row of {n_cols} columns does not fit one block: at most {MAX_BLOCK}")
    if not x.numel():
        return []
    meta = {"BLOCK": triton.next_power_of_2(n_cols), "FILL": fill, "num_warps": 4}
    return [Launch(one_row_kernel, (n_rows,), (y, x, n_cols), meta)]


def softmax(x: Tensor) -> Tensor:
    """Softmax of the rows of x (n_rows, n_cols), float16, bfloat16 or float32; ValueError above 2^20 columns."""
    x = x.contiguous()
    y = torch.empty_like(x)
    for launch in launches(x, y):
        launch()
    return y


def with_fill(fill: float | None, x: Tensor) -> Tensor:
    """The same kernel with another value in the masked lanes; None leaves them undefined."""
    y = torch.full_like(x, math.nan)
    for launch in launches(x, y, fill):
        launch()
    return y


MISTAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "masked lanes filled with +inf": functools.partial(with_fill, math.inf),
    "masked lanes not filled": functools.partial(with_fill, None),
}

if __name__ == "__main__":
    from fused_softmax.lab.lessons import run

    run(2)
