"""Lesson 03, the puzzle: rows are read where they lie.

The rows of x may be a slice of a wider tensor: from one row to the next it is x_row_stride elements, not n_cols. The
output has a stride of its own. Write the kernel, and choose the number of warps for a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def strided_row_kernel(y_ptr, x_ptr, y_row_stride, x_row_stride, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    # write: the load and the store at their own strides, and the softmax between them
    x = tl.load(x_ptr + row * x_row_stride + cols, mask=mask, other=-float("inf")).to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=0))
    denominator = tl.sum(numerator, axis=0)
    tl.store(y_ptr + row * y_row_stride + cols, numerator / denominator, mask=mask)
    # end


def softmax(x: Tensor) -> Tensor:
    if x.stride(1) != 1:
        x = x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n_rows, n_cols = x.shape
    block = triton.next_power_of_2(n_cols)
    num_warps = 16 if block > 4095 else 8 if block > 2047 else 4
    strided_row_kernel[(n_rows,)](y, x, y.stride(0), x.stride(0), n_cols, BLOCK=block, num_warps=num_warps)
    return y
