"""The collectives: one all_gather of a payload, whose header says what was called, and one sum over the ranks.

Both are functional collectives, so torch.compile, profilers and CommDebugMode see them. Nothing here reads logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..launch.cache import Cache
from ..launch.torch_private import all_gather_into_tensor, all_reduce, wait_tensor
from .agreement import Call, expect_agreement, header_tensor, words_of
from .merge import added
from .shards import Shard

_agreed = Cache()


def gather(
    payload: Tensor, words: Sequence[int], n_rows: int, call: Call, shard: Shard, check: bool
) -> tuple[Tensor, bool]:
    """(every rank's payload, (ranks, length); whether the headers are still to be compared, on the device).

    words: of the payload's header, which says what `call` is.

    On a CPU, with `check`, and at the first call of a kind, the host compares the headers, and RuntimeError is raised
    on every rank. Later calls on a GPU do not wait for the device, which compares them instead.
    """
    if check:
        counted = call._replace(n_rows=n_rows).words(shard.start, shard.width)
        expect_agreement(words_of(_all_gather(header_tensor(counted, 1, payload), shard)))
    gathered = _all_gather(payload, shard)
    if shard.ranks == 1 or check:
        return gathered, False
    on_gpu = payload.is_cuda
    key = (shard.group, shard.ranks, payload.device, *words)
    if torch.compiler.is_compiling() or key in _agreed or (on_gpu and torch.cuda.is_current_stream_capturing()):
        return gathered, True
    expect_agreement(words_of(gathered))
    if on_gpu:
        _agreed.store(key, True)
    return gathered, False


def _all_gather(t: Tensor, shard: Shard) -> Tensor:
    """(ranks, n) of each rank's t, (n,)."""
    if shard.ranks == 1:
        return t.unsqueeze(0)
    return wait_tensor(all_gather_into_tensor(t, shard.ranks, shard.group)).view(shard.ranks, -1)


def sum_over_ranks(t: Tensor, shard: Shard) -> Tensor:
    """The sum of each rank's t; one all_reduce."""
    return t if shard.ranks == 1 else wait_tensor(all_reduce(t.contiguous(), "sum", shard.group))


def sum_of_segments(t: Tensor, shard: Shard) -> Tensor:
    """The sum of (segments, n) of all ranks, added in the vocabulary's order; one all_gather."""
    return added(_all_gather(t.reshape(-1), shard).reshape(-1, t.shape[1]))
