"""Lesson 08, the puzzle: a tile of ROWS rows for each program.

The tile is [ROWS, BLOCK_N]. The number of rows need not be a multiple of ROWS, and n_cols need not be BLOCK_N. Each row
has its own maximum and its own sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096


@triton.jit
def many_rows_kernel(y_ptr, x_ptr, n_rows, n_cols, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    # write: the mask of the tile, one load, each row's softmax, one store
    mask = (rows < n_rows) & (cols < n_cols)
    x = tl.load(x_ptr + rows * n_cols + cols, mask=mask, other=-float("inf")).to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=1)[:, None])
    denominator = tl.sum(numerator, axis=1)[:, None]
    tl.store(y_ptr + rows * n_cols + cols, numerator / denominator, mask=mask)
    # end


def softmax(x: Tensor) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    n_rows, n_cols = x.shape
    block_n = triton.next_power_of_2(n_cols)
    rows = max(1, TILE // block_n)
    grid = (triton.cdiv(n_rows, rows),)
    num_warps = 4 if block_n <= TILE else 16
    many_rows_kernel[grid](y, x, n_rows, n_cols, ROWS=rows, BLOCK_N=block_n, num_warps=num_warps)
    return y
