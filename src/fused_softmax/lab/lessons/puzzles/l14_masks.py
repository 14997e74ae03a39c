"""Lesson 14, the puzzle: a causal softmax that does not read what is hidden.

Row r of the scores x (n_rows, n_cols) is query q = r % n_queries. The queries are the last n_queries of the n_cols
places, so query q sees the columns j <= n_cols - n_queries + q. Hidden columns are 0 in the result. Read the visible
columns once, in whole groups of 8: a limit that is a multiple of 8 lets the compiler load 16 bytes at a time. Write all
columns once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def causal_kernel(y_ptr, x_ptr, n_cols, n_queries, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    # write: the number of visible columns, the load, the softmax, the store
    visible = (n_cols - n_queries + row % n_queries + 1).to(tl.int32)
    hidden = cols >= visible
    needed = (visible + 7) // 8 * 8
    loaded = (cols < needed) & (cols < n_cols)
    x = tl.load(x_ptr + row * n_cols + cols, mask=loaded, other=-float("inf")).to(tl.float32)
    x = tl.where(hidden, -float("inf"), x)
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator * (1.0 / tl.sum(numerator, axis=0))
    tl.store(y_ptr + row * n_cols + cols, y, mask=cols < n_cols)
    # end


def causal_softmax(x: Tensor, n_queries: int) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    n_rows, n_cols = x.shape
    block = triton.next_power_of_2(n_cols)
    num_warps = 32 if block > 16384 else 8 if block > 4096 else 4
    causal_kernel[(n_rows,)](y, x, n_cols, n_queries, BLOCK=block, num_warps=num_warps)
    return y
