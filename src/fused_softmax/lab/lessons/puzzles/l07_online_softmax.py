"""Lesson 07, the puzzle: maximum and sum in one pass.

Keep the maximum of the tiles so far, and the sum of exponentials below it. A tile that raises the maximum rescales the
sum. A row may begin with tiles of -inf. The second pass, which stores, is given. It needs `shift` (the row's maximum,
or 0 where that is -inf) and `row_sum`. The row is read twice in all and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def online_kernel(y_ptr, x_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * n_cols
    y_ptr += row * n_cols
    lanes = tl.arange(0, BLOCK)
    # write: one loop over the tiles that ends with shift and row_sum
    row_max = -float("inf")
    shift = 0.0
    row_sum = 0.0
    for start in range(0, n_cols, BLOCK):
        x = tl.load(x_ptr + start + lanes, mask=start + lanes < n_cols, other=-float("inf")).to(tl.float32)
        new_max = tl.maximum(row_max, tl.max(x, axis=0))
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        row_sum *= tl.exp(row_max - shift)
        row_sum += tl.sum(tl.exp(x - shift), axis=0)
        row_max = new_max
    # end

    for start in range(0, n_cols, BLOCK):
        mask = start + lanes < n_cols
        x = tl.load(x_ptr + start + lanes, mask=mask, other=-float("inf")).to(tl.float32)
        tl.store(y_ptr + start + lanes, tl.exp(x - shift) / row_sum, mask=mask)


def softmax(x: Tensor) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    n_rows, n_cols = x.shape
    online_kernel[(n_rows,)](y, x, n_cols, BLOCK=BLOCK, num_warps=8)
    return y
