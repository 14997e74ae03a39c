"""Lesson 05, the puzzle: each lane holds VEC adjacent columns, and the block covers the row.

The block is [BLOCK_SIZE, VEC]. Choose VEC so that BLOCK_SIZE * VEC covers n_cols, and write the kernel. The published
version has VEC = 4 for every width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_SIZE = 128


@triton.jit
def vectorized_kernel(y_ptr, x_ptr, n_cols, BLOCK_SIZE: tl.constexpr, VEC: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    # write: the columns [BLOCK_SIZE, VEC] of the lanes, their mask, and the row's softmax over both axes
    cols = tl.arange(0, BLOCK_SIZE)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    mask = cols < n_cols
    x = tl.load(x_ptr + row * n_cols + cols, mask=mask, other=-float("inf")).to(tl.float32)
    numerator = tl.exp(x - tl.max(x))
    denominator = tl.sum(numerator)
    tl.store(y_ptr + row * n_cols + cols, numerator / denominator, mask=mask)
    # end


def softmax(x: Tensor) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    n_rows, n_cols = x.shape
    # write: vec, a power of two, so that the block covers the row
    vec = triton.next_power_of_2(triton.cdiv(n_cols, BLOCK_SIZE))
    # end
    vectorized_kernel[(n_rows,)](y, x, n_cols, BLOCK_SIZE=BLOCK_SIZE, VEC=vec, num_warps=4)
    return y
