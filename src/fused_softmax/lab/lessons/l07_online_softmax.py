"""07. Online softmax: maximum and sum in one pass, the result in a second.

Problem
    Lesson 06 reads the row three times, the first time only for the maximum.

Mechanism
    Keep the maximum so far and the sum of exponentials below it. When a tile raises the maximum, rescale the sum: m =
    max(a, b); s = s_a * exp(a - m) + s_b * exp(b - m). The pair is right after every tile. So one pass gives both
    numbers, and a second pass stores (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). The
    same formula merges pairs of lanes, of programs or of GPUs, in any order, and all later lessons use it. As long as
    only -inf was seen, the sum is 0 for any maximum, so it is computed relative to 0. A row of -inf alone is 0 / 0,
    NaN, as it should be.

Resource trade-off
    One multiplication and one exponential for each tile save a whole read of the row: 2MN + MN elements instead of
    3MN + MN, 25 per cent fewer. The pass is serial: each step waits for the maximum of the step before. The steps of
    lesson 06 are independent until the end. Each element still has two exponentials.

Common failure mode
    No rescaling. Terms from before the maximum rose are then too large, by exp of the rise, and the row sums to less
    than 1. A row that falls from its first tile on hides this. The other failure is tiles of -inf before the first
    finite one: -inf - -inf is NaN, which never leaves the sum.

Measurement
    Two reads, three reads and one:
    $ fused-softmax bench --systems 03_driver,06_three_pass,07_online --widths 4096,50257,131072
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

SYSTEM = "07_online"
BLOCK = 2048  # 8 columns (16 bytes of bfloat16) for each of 256 threads


@triton.jit
def online_kernel(y_ptr, x_ptr, n_cols, BLOCK: tl.constexpr, RESCALE: tl.constexpr, GUARD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * n_cols
    y_ptr += row * n_cols
    lanes = tl.arange(0, BLOCK)

    row_max = -float("inf")
    shift = -float("inf")
    row_sum = 0.0
    for start in range(0, n_cols, BLOCK):
        x = tl.load(x_ptr + start + lanes, mask=start + lanes < n_cols, other=-float("inf")).to(tl.float32)  # [BLOCK]
        new_max = tl.maximum(row_max, tl.max(x, axis=0))
        # exponentials are taken below the maximum, or below 0 while that is -inf
        shift = tl.where(new_max == -float("inf"), 0.0, new_max) if GUARD else new_max
        # m = max(a, b); s = s_a * exp(a - m) + s_b * exp(b - m)
        if RESCALE:
            row_sum *= tl.exp(row_max - shift)
        row_sum += tl.sum(tl.exp(x - shift), axis=0)
        row_max = new_max

    for start in range(0, n_cols, BLOCK):
        mask = start + lanes < n_cols
        x = tl.load(x_ptr + start + lanes, mask=mask, other=-float("inf")).to(tl.float32)
        tl.store(y_ptr + start + lanes, tl.exp(x - shift) / row_sum, mask=mask)


def launches(x: Tensor, y: Tensor, rescale: bool = True, guard: bool = True) -> list[Launch]:
    """One launch for contiguous x, y (n_rows, n_cols) of any width."""
    n_rows, n_cols = x.shape
    if not x.numel():
        return []
    meta = {"BLOCK": BLOCK, "RESCALE": rescale, "GUARD": guard, "num_warps": 8}
    return [Launch(online_kernel, (n_rows,), (y, x, n_cols), meta)]


def softmax(x: Tensor) -> Tensor:
    """Softmax of the rows of x (n_rows, n_cols), float16, bfloat16 or float32, of any width."""
    x = x.contiguous()
    y = torch.empty_like(x)
    for launch in launches(x, y):
        launch()
    return y


def without(part: str, x: Tensor) -> Tensor:
    """The kernel with one of its two precautions ("rescale" or "guard") left out."""
    y = torch.full_like(x, math.nan)
    for launch in launches(x, y, **{part: False}):
        launch()
    return y


MISTAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "the running sum is not rescaled": functools.partial(without, "rescale"),
    "no guard for tiles of -inf": functools.partial(without, "guard"),
}

if __name__ == "__main__":
    from fused_softmax.lab.lessons import run

    run(7)
