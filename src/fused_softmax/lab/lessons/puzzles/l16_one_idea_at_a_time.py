"""Lesson 16, the puzzle: a row in chunks of any number, with one reduction.

The row is CHUNKS chunks of VECTORS x VEC columns, and stays on chip: a tuple holds the chunks. Only the last chunk may
lie partly outside the row. Each lane keeps its own maximum over the chunks, then its own sum, and is reduced once. A
tuple grows by xs = xs + (x,), and tl.static_range unrolls the loop.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def chunks_kernel(y_ptr, x_ptr, n_cols, VECTORS: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, VECTORS)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    # write: load the chunks into a tuple, the maximum, the exponentials and their sum, store the chunks
    xs = ()
    for c in tl.static_range(CHUNKS):
        cols = c * (VECTORS * VEC) + lanes
        x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
        xs = xs + (x,)  # type: ignore[assignment]
    lane_max = xs[0]  # type: ignore[misc]
    for c in tl.static_range(1, CHUNKS):
        lane_max = tl.maximum(lane_max, xs[c])
    row_max = tl.max(lane_max)
    lane_sum = tl.zeros((VECTORS, VEC), tl.float32)
    for c in tl.static_range(CHUNKS):
        lane_sum += tl.exp(xs[c] - row_max)
    row_sum = tl.sum(lane_sum)
    for c in tl.static_range(CHUNKS):
        cols = c * (VECTORS * VEC) + lanes
        tl.store(y_ptr + row * n_cols + cols, tl.exp(xs[c] - row_max) / row_sum, mask=cols < n_cols)
    # end


def softmax(x: Tensor) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    n_rows, n_cols = x.shape
    vec, num_warps = 16 // x.element_size(), 4 if n_cols <= 4096 else 16
    vectors = min(32 * num_warps, triton.next_power_of_2(triton.cdiv(n_cols, vec)))
    # write: chunks, so that all of them cover the row
    chunks = triton.cdiv(n_cols, vectors * vec)
    # end
    chunks_kernel[(n_rows,)](y, x, n_cols, VECTORS=vectors, VEC=vec, CHUNKS=chunks, num_warps=num_warps)
    return y
