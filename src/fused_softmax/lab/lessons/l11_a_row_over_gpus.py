"""11. A row over GPUs: each one reads its columns, and all exchange two numbers.

Problem
    A vocabulary can outgrow one GPU. The last layer is then cut by columns, and each GPU holds a part of every row.
    Gathering the logits moves MN elements over links that are ten times slower than memory. Exchanging the maximum,
    then the sum, then the target's logit takes three rounds, and each of them waits for the slowest GPU.

Mechanism
    Each GPU reads its shard and keeps the pair of lesson 07: the maximum m_r and the sum s_r of exp(x - m_r). One
    all_gather brings the pairs of all R GPUs to each of them: 2MR numbers, however wide the rows are. Each GPU merges
    them in the order of the ranks: m = max(m_r), s = sum of s_r * exp(m_r - m). So all have the same bits. Each then
    reads its columns again, and writes exp(x - m) / s. The merge is that of lesson 07, where it joined tiles of one
    program. For the gradient of a cross-entropy m and s are all that a GPU needs, so backward exchanges nothing.

Resource trade-off
    Time is that of 1/R of the row, plus one exchange of O(M) numbers, which takes tens of microseconds at any size.
    With more GPUs the read shrinks and the exchange does not: there is a number of GPUs from which on it dominates.
    Sums are cut at other places for each R, so the last bits differ, unless the row is always cut into the same
    segments and these are merged in one order (`fused_softmax.batch_invariant`).

Common failure mode
    The sums are added as they are. They are relative to different maxima, so the GPU with the small logits counts far
    too much. Random logits of one scale hide this: their maxima are nearly equal. The other failure is a GPU whose
    shard is -inf alone, as a padded vocabulary has it. Its maximum is -inf, and -inf - -inf is NaN, which then is in
    every GPU's result.

Measurement
    `fused-softmax parallel` times it on the GPUs of one host. The read of one shard of 4, next to the whole row:
    $ fused-softmax bench --op token_logprobs --systems fused_softmax,torch --widths 32768,131072
"""

from __future__ import annotations

import functools
import math
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_softmax.lab.grading.subjects import Subject
from fused_softmax.lab.traffic import Traffic
from fused_softmax.launch.compile import Launch

SYSTEM = "11_over_gpus"
RANKS = 4
MOST_BLOCK = 2048


@triton.jit
def pair_kernel(pair_ptr, x_ptr, x_stride, n_cols, BLOCK: tl.constexpr, GUARD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    lanes = tl.arange(0, BLOCK)
    row_max = -float("inf")
    row_sum = 0.0
    for start in range(0, n_cols, BLOCK):  # lesson 07's first loop
        x = tl.load(x_ptr + start + lanes, mask=start + lanes < n_cols, other=-float("inf")).to(tl.float32)  # [BLOCK]
        new_max = tl.maximum(row_max, tl.max(x, axis=0))
        # exponentials are taken below the maximum, or below 0 while that is -inf
        shift = tl.where(new_max == -float("inf"), 0.0, new_max) if GUARD else new_max
        row_sum = row_sum * tl.exp(row_max - shift) + tl.sum(tl.exp(x - shift), axis=0)
        row_max = new_max
    # what this GPU sends
    tl.store(pair_ptr + 2 * row, row_max)
    tl.store(pair_ptr + 2 * row + 1, row_sum)


@triton.jit
def part_kernel(y_ptr, x_ptr, merged_ptr, y_stride, x_stride, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    shift = tl.load(merged_ptr + 2 * row)
    by_sum = 1.0 / tl.load(merged_ptr + 2 * row + 1)
    for start in range(0, n_cols, BLOCK):  # lesson 07's second loop
        mask = start + lanes < n_cols
        x = tl.load(x_ptr + row * x_stride + start + lanes, mask=mask, other=-float("inf")).to(tl.float32)
        tl.store(y_ptr + row * y_stride + start + lanes, tl.exp(x - shift) * by_sum, mask=mask)


def launches(x: Tensor, y: Tensor, pairs: Tensor, row_merged: Tensor, guard: bool = True) -> list[Launch]:
    """One GPU's two launches, before and after the exchange, for its columns x and y (n_rows, n_cols).

    pairs, row_merged: (n_rows, 2) float32, what it sends, and what `merged` gives.
    """
    n_rows, n_cols = x.shape
    if not x.numel():
        return []
    # of a narrow shard a tile holds no more lanes than it needs, and each thread has 16 or more elements
    block = min(MOST_BLOCK, max(32, triton.next_power_of_2(n_cols)))
    meta: dict[str, Any] = {"BLOCK": block, "num_warps": max(1, block // 512)}
    read = Launch(pair_kernel, (n_rows,), (pairs, x, x.stride(0), n_cols), {**meta, "GUARD": guard})
    return [read, Launch(part_kernel, (n_rows,), (y, x, row_merged, y.stride(0), x.stride(0), n_cols), meta)]


def launches_for(x: Tensor) -> list[Launch]:
    """The launch before the exchange for rows like x: to be compiled, not to be run."""
    pairs = x.new_empty(x.shape[0], 2, dtype=torch.float32)
    return launches(x, torch.empty_like(x), pairs, pairs)[:1]


def pair_of(x: Tensor, guard: bool = True) -> Tensor:
    """What one GPU sends of its columns x: each row's (maximum, sum of exponentials), float32.  # (n_rows, 2)"""
    pairs = x.new_tensor([-math.inf, 0.0], dtype=torch.float32).repeat(x.shape[0], 1)
    for launch in launches(x, x, pairs, pairs, guard)[:1]:
        launch()
    return pairs


def merged(pairs: Tensor, rescale: bool = True, guard: bool = True) -> Tensor:
    """(maximum, sum) of whole rows, (n_rows, 2), from the pairs of all GPUs, (ranks, n_rows, 2), in rank order."""
    maxima, sums = pairs.unbind(2)
    row_max = maxima.amax(0)
    shift = row_max.masked_fill(row_max == -math.inf, 0.0) if guard else row_max
    # s = s_a * exp(a - m) + s_b * exp(b - m)
    factors = (maxima - shift).exp() if rescale else torch.ones_like(maxima)
    return torch.stack((shift, (sums * factors).sum(0)), 1)


def write_part(x: Tensor, row_merged: Tensor, y: Tensor) -> None:
    """Write one GPU's columns of the result into y."""
    for launch in launches(x, y, row_merged, row_merged)[1:]:
        launch()


def softmax(x: Tensor, rescale: bool = True, guard: bool = True) -> Tensor:
    """Softmax of the rows of x (n_rows, n_cols), whose columns RANKS simulated GPUs share."""
    x = x.contiguous()
    y, shards = torch.empty_like(x), x.tensor_split(RANKS, dim=1)
    row_merged = merged(torch.stack([pair_of(shard, guard) for shard in shards]), rescale, guard)
    for shard, part in zip(shards, y.tensor_split(RANKS, dim=1), strict=True):
        write_part(shard, row_merged, part)
    return y


def on_rank(shard: Tensor) -> Tensor:
    """This process's columns of the result, from its own columns: one all_gather over the default group."""
    pairs, y = pair_of(shard), torch.empty_like(shard)
    gathered = pairs.new_empty((torch.distributed.get_world_size(), *pairs.shape))
    torch.distributed.all_gather(list(gathered.unbind(0)), pairs)
    write_part(shard, merged(gathered), y)
    return y


def _process(rank: int, ranks: int, where: str, x: Tensor, y: Tensor) -> None:
    torch.distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks)
    try:
        y.tensor_split(ranks, dim=1)[rank].copy_(on_rank(x.tensor_split(ranks, dim=1)[rank]))
    finally:
        torch.distributed.destroy_process_group()


def over_processes(x: Tensor, ranks: int = 2) -> Tensor:
    """The same by processes that exchange over gloo, without a GPU. x: on the CPU."""
    y = torch.empty_like(x).share_memory_()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, f"file://{os.path.join(folder, 'store')}", x.clone().share_memory_(), y)
        torch.multiprocessing.spawn(_process, arguments, nprocs=ranks)
    return y


def moves(n_rows: int, n_cols: int) -> Traffic:
    """Each GPU reads its columns twice and writes them once; its pairs are written, and what they give is read."""
    pairs = 2 * min(RANKS, n_cols)  # of the GPUs with columns
    return Traffic(n_rows * (2 * n_cols + pairs), n_rows * (n_cols + pairs))


SUBJECT = Subject("softmax", moves, timed=(8192, 65536))
MISTAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "the shards' sums are added as they are": functools.partial(softmax, rescale=False),
    "no guard for a shard of -inf": functools.partial(softmax, guard=False),
}

if __name__ == "__main__":
    from fused_softmax.lab.lessons import run

    run(11)
