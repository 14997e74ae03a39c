"""Lesson 13, the puzzle: the loss of a row and its gradient, from one read of the row.

A row's loss is log(sum) - (x_t - max), where t is its target, and 0 if the target is -100. Its gradient is
(softmax(x) - onehot(t)) / count, where count is the number of rows whose target is not -100, and 0 in every column if
the row does not count. The row, the logit x_t and 1 / count are loaded for you.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def loss_kernel(loss_ptr, dx_ptr, x_ptr, target_ptr, count_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    target = tl.load(target_ptr + row)
    counts = target != -100
    column = tl.minimum(tl.maximum(target, 0), n_cols - 1)
    x_target = tl.load(x_ptr + row * n_cols + column).to(tl.float32)
    weight = 1.0 / tl.load(count_ptr)
    x = tl.load(x_ptr + row * n_cols + cols, mask=mask, other=-float("inf")).to(tl.float32)
    # write: the sum, the loss and its store, the gradient and its store
    row_max = tl.max(x, axis=0)
    numerator = tl.exp(x - row_max)
    row_sum = tl.sum(numerator, axis=0)
    tl.store(loss_ptr + row, tl.where(counts, tl.log(row_sum) - (x_target - row_max), 0.0))
    dx = numerator * (weight / row_sum)
    dx = tl.where(cols == target, dx - weight, dx)
    dx = tl.where(counts, dx, 0.0)
    tl.store(dx_ptr + row * n_cols + cols, dx, mask=mask)
    # end


def cross_entropy(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    dx, rows = torch.empty_like(x), torch.empty(x.shape[0], device=x.device)
    count = (target != -100).sum().to(torch.float32)
    n_rows, n_cols = x.shape
    block = triton.next_power_of_2(n_cols)
    num_warps = 32 if block > 16384 else 8 if block > 4096 else 4
    loss_kernel[(n_rows,)](rows, dx, x, target, count, n_cols, BLOCK=block, num_warps=num_warps)
    return rows.sum() / count, dx
