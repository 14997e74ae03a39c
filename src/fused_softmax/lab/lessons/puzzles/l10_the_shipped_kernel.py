"""Lesson 10, the puzzle: rows that start anywhere, read in vectors.

This is one idea of the shipped kernel, for one program. A row of an odd width starts between two 16-byte boundaries. So
it has a head of less than VEC columns, a body of whole vectors, and a tail of less than VEC columns. The columns of
each are given. Read each column once, and write each column once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def unaligned_kernel(y_ptr, x_ptr, n_cols, VECTORS: tl.constexpr, VEC: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * n_cols
    head = tl.minimum((VEC - start % VEC) % VEC, n_cols)
    body = tl.multiple_of((n_cols - head) // VEC * VEC, VEC)
    first = tl.multiple_of(start + head, VEC)  # the first aligned element
    lanes = tl.arange(0, VECTORS)[:, None] * VEC + tl.arange(0, VEC)[None, :]  # columns of the body
    ends = tl.arange(0, 2 * VEC)  # VEC lanes for the head, VEC for the tail
    end_cols = tl.where(ends < VEC, ends, head + body + ends - VEC)  # columns of the row
    in_ends = tl.where(ends < VEC, ends < head, end_cols < n_cols)
    # write: load the body (at x_ptr + first + lanes) and the ends (at x_ptr + start + end_cols), compute, store both
    in_body = lanes < body
    x = tl.load(x_ptr + first + lanes, mask=in_body, other=-float("inf")).to(tl.float32)
    x_end = tl.load(x_ptr + start + end_cols, mask=in_ends, other=-float("inf")).to(tl.float32)
    row_max = tl.maximum(tl.max(x), tl.max(x_end))
    numerator = tl.exp(x - row_max)
    numerator_end = tl.exp(x_end - row_max)
    row_sum = tl.sum(numerator) + tl.sum(numerator_end)
    tl.store(y_ptr + first + lanes, numerator / row_sum, mask=in_body)
    tl.store(y_ptr + start + end_cols, numerator_end / row_sum, mask=in_ends)
    # end


def softmax(x: Tensor) -> Tensor:
    x = x.contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    y = torch.empty_like(x)
    n_rows, n_cols = x.shape
    vec = 16 // x.element_size()
    vectors = triton.next_power_of_2(triton.cdiv(n_cols, vec))
    num_warps = 4 if n_cols <= 4096 else 16
    unaligned_kernel[(n_rows,)](y, x, n_cols, VECTORS=vectors, VEC=vec, num_warps=num_warps)
    return y
