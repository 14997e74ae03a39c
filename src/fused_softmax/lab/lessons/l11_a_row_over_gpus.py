"""11. A row over GPUs: each one reads its columns, and all exchange two numbers.

Problem
    A vocabulary can outgrow one GPU. The last layer is then cut by columns, and each GPU holds a part of every row.
    Gathering the logits moves MN elements over links that are ten times slower than memory. Exchanging the maximum,
    then the sum, then the target's logit takes three rounds, and each of them waits for the slowest GPU.

Mechanism
    Each GPU reads its shard once and keeps the pair of lesson 07: the maximum m_r and the sum s_r of exp(x - m_r). One
    all_gather brings the pairs of all R GPUs to each of them: 2MR numbers, however wide the rows are. Each GPU merges
    them in the order of the ranks: m = max(m_r), s = sum of s_r * exp(m_r - m). So all have the same bits. Each then
    writes exp(x - m) / s for its own columns. The merge is that of lesson 07, where it joined tiles of one program.
    For the gradient of a cross-entropy m and s are all that a GPU needs, so backward exchanges nothing.

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

import torch
from torch import Tensor

SYSTEM = "11_over_gpus"
RANKS = 4


def pair_of(x: Tensor, guard: bool = True) -> Tensor:
    """What one GPU sends of its columns x: each row's (maximum, sum of exponentials), float32.  # (n_rows, 2)"""
    x = x.float()
    if not x.shape[1]:
        return x.new_tensor([-math.inf, 0.0]).expand(x.shape[0], 2)
    row_max = x.amax(1, keepdim=True)
    # exponentials are taken below the maximum, or below 0 while that is -inf
    shift = row_max.masked_fill(row_max == -math.inf, 0.0) if guard else row_max
    return torch.cat((row_max, (x - shift).exp().sum(1, keepdim=True)), 1)


def merged(pairs: Tensor, rescale: bool = True, guard: bool = True) -> tuple[Tensor, Tensor]:
    """(maximum, sum) of whole rows from the pairs of all GPUs, (ranks, n_rows, 2), in rank order."""
    maxima, sums = pairs.unbind(2)
    row_max = maxima.amax(0)
    shift = row_max.masked_fill(row_max == -math.inf, 0.0) if guard else row_max
    # s = s_a * exp(a - m) + s_b * exp(b - m)
    factors = (maxima - shift).exp() if rescale else torch.ones_like(maxima)
    return shift, (sums * factors).sum(0)


def part_of(x: Tensor, row_max: Tensor, row_sum: Tensor) -> Tensor:
    """One GPU's columns of the result."""
    return ((x.float() - row_max.unsqueeze(1)).exp() / row_sum.unsqueeze(1)).to(x.dtype)


def softmax(x: Tensor, rescale: bool = True, guard: bool = True) -> Tensor:
    """Softmax of the rows of x (n_rows, n_cols), whose columns RANKS simulated GPUs share."""
    shards = x.tensor_split(RANKS, dim=1)
    row_max, row_sum = merged(torch.stack([pair_of(shard, guard) for shard in shards]), rescale, guard)
    return torch.cat([part_of(shard, row_max, row_sum) for shard in shards], 1)


def on_rank(shard: Tensor) -> Tensor:
    """This process's columns of the result, from its own columns: one all_gather over the default group."""
    pairs = pair_of(shard).contiguous()
    gathered = pairs.new_empty((torch.distributed.get_world_size(), *pairs.shape))
    torch.distributed.all_gather(list(gathered.unbind(0)), pairs)
    return part_of(shard, *merged(gathered))


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


MISTAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "the shards' sums are added as they are": functools.partial(softmax, rescale=False),
    "no guard for a shard of -inf": functools.partial(softmax, guard=False),
}

if __name__ == "__main__":
    from fused_softmax.lab.lessons import run

    run(11)
