"""Lesson 11, the puzzle: what a GPU sends of its columns, and how all merge it.

Four GPUs hold a row's columns; here they are simulated. Each keeps the maximum m_r of its columns and the sum s_r of
exp(x - m_r), as lesson 07 does, and sends both. The merged maximum is m = max(m_r), and the sum is that of
s_r * exp(m_r - m). A GPU's columns may all be -inf, or it may have none: then it sends (-inf, 0). If a row is -inf as a
whole, `shift` is 0, so that its sum is 0 and its result NaN. The kernel that writes is given.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

RANKS = 4
BLOCK = 512


@triton.jit
def pair_kernel(pair_ptr, x_ptr, x_stride, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    lanes = tl.arange(0, BLOCK)
    # write: one loop over the tiles, and the stores of the maximum and of the sum
    row_max = -float("inf")
    row_sum = 0.0
    for start in range(0, n_cols, BLOCK):
        x = tl.load(x_ptr + start + lanes, mask=start + lanes < n_cols, other=-float("inf")).to(tl.float32)
        new_max = tl.maximum(row_max, tl.max(x, axis=0))
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        row_sum = row_sum * tl.exp(row_max - shift) + tl.sum(tl.exp(x - shift), axis=0)
        row_max = new_max
    tl.store(pair_ptr + 2 * row, row_max)
    tl.store(pair_ptr + 2 * row + 1, row_sum)
    # end


def merged(maxima: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """(shift, sum) of whole rows, (n_rows,), from those of all GPUs, (RANKS, n_rows)."""
    # write: the shift and the sum
    row_max = maxima.amax(0)
    shift = row_max.masked_fill(row_max == -math.inf, 0.0)
    row_sum = (sums * (maxima - shift).exp()).sum(0)
    # end
    return shift, row_sum


@triton.jit
def part_kernel(y_ptr, x_ptr, shift_ptr, sum_ptr, y_stride, x_stride, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    shift = tl.load(shift_ptr + row)
    by_sum = 1.0 / tl.load(sum_ptr + row)
    for start in range(0, n_cols, BLOCK):
        mask = start + lanes < n_cols
        x = tl.load(x_ptr + row * x_stride + start + lanes, mask=mask, other=-float("inf")).to(tl.float32)
        tl.store(y_ptr + row * y_stride + start + lanes, tl.exp(x - shift) * by_sum, mask=mask)


def softmax(x: Tensor) -> Tensor:
    x = x.contiguous()
    y, n_rows = torch.empty_like(x), x.shape[0]
    shards, parts = x.tensor_split(RANKS, dim=1), y.tensor_split(RANKS, dim=1)
    pairs = torch.tensor([-math.inf, 0.0], device=x.device).repeat(RANKS, n_rows, 1)
    for shard, pair in zip(shards, pairs, strict=True):
        if shard.numel():
            pair_kernel[(n_rows,)](pair, shard, shard.stride(0), shard.shape[1], BLOCK=BLOCK, num_warps=1)
    shift, row_sum = merged(*pairs.unbind(2))
    for shard, part in zip(shards, parts, strict=True):
        if shard.numel():
            strides = y.stride(0), x.stride(0)
            part_kernel[(n_rows,)](part, shard, shift, row_sum, *strides, shard.shape[1], BLOCK=BLOCK, num_warps=1)
    return y
