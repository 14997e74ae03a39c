"""Lesson 09, the puzzle: the CTAs of a cluster hold a line each, and merge.

x is [CTAS, BLOCK], one line for each CTA. A line may hold -inf only, or lie outside the row. Compute each line's
maximum and sum, merge them with cluster_reduce_max_sum(line_max, line_sum, CTAS, PTX), which gives row_max and row_sum,
and compute y. Start from a finite maximum: LOWEST is the lowest finite float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_softmax.kernels.common.cluster import cluster_reduce_max_sum, init_cluster_barrier
from fused_softmax.kernels.common.numerics import LOWEST, exp
from fused_softmax.lab.lessons.l09_row_on_a_cluster import LINE, MIN_LINE, device_of


@triton.jit
def cluster_kernel(y_ptr, x_ptr, n_cols, CTAS: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr):
    init_cluster_barrier(CTAS, 2, PTX)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, CTAS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = cols < n_cols
    x = tl.load(x_ptr + row * n_cols + cols, mask=mask, other=-float("inf")).to(tl.float32)
    # write: each line's maximum, exponentials and sum, the merge, and y, which is [CTAS, BLOCK]
    line_max = tl.maximum(tl.max(x, axis=1), LOWEST)
    numerator = exp(x - line_max[:, None])
    line_sum = tl.sum(numerator, axis=1)
    row_max, row_sum = cluster_reduce_max_sum(line_max, line_sum, CTAS, PTX)
    scale = exp(line_max - row_max) / row_sum
    y = numerator * scale[:, None]
    # end
    tl.store(y_ptr + row * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


def softmax(x: Tensor) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    n_rows, n_cols = x.shape
    device = device_of(x)
    ctas = min(max(2, triton.next_power_of_2(triton.cdiv(n_cols, LINE))), device.max_cluster)
    block = max(MIN_LINE, triton.next_power_of_2(triton.cdiv(n_cols, ctas)))
    meta = {"CTAS": ctas, "BLOCK": block, "PTX": device.ptx, "num_warps": 4 if block <= 4096 else 8}
    if device.ptx:
        meta["num_ctas"] = ctas
    cluster_kernel[(n_rows,)](y, x, n_cols, **meta)
    return y
