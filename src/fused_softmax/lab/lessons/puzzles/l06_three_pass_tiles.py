"""Lesson 06, the puzzle: a row of any width in tiles of BLOCK columns, in three passes.

The first pass finds the row's maximum, the second sums the exponentials below it, the third stores the quotients. The
last tile may lie partly outside the row. The row is read three times and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def three_pass_kernel(y_ptr, x_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * n_cols
    y_ptr += row * n_cols
    lanes = tl.arange(0, BLOCK)
    # write: three loops over the tiles: maximum, sum, result
    lane_max = tl.full((BLOCK,), -float("inf"), tl.float32)
    for start in range(0, n_cols, BLOCK):
        x = tl.load(x_ptr + start + lanes, mask=start + lanes < n_cols, other=-float("inf")).to(tl.float32)
        lane_max = tl.maximum(lane_max, x)
    row_max = tl.max(lane_max, axis=0)

    lane_sum = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n_cols, BLOCK):
        x = tl.load(x_ptr + start + lanes, mask=start + lanes < n_cols, other=-float("inf")).to(tl.float32)
        lane_sum += tl.exp(x - row_max)
    row_sum = tl.sum(lane_sum, axis=0)

    for start in range(0, n_cols, BLOCK):
        mask = start + lanes < n_cols
        x = tl.load(x_ptr + start + lanes, mask=mask, other=-float("inf")).to(tl.float32)
        tl.store(y_ptr + start + lanes, tl.exp(x - row_max) / row_sum, mask=mask)
    # end


def softmax(x: Tensor) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    n_rows, n_cols = x.shape
    three_pass_kernel[(n_rows,)](y, x, n_cols, BLOCK=BLOCK, num_warps=8)
    return y
