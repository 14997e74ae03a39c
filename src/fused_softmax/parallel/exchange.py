"""The collectives: one all_gather of a payload, whose header says what was called, and one sum over the ranks.

Both are functional collectives, so torch.compile, profilers and CommDebugMode see them. Nothing here reads logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..launch.cache import Cache
from ..launch.torch_private import all_gather_into_tensor, all_reduce, wait_tensor
from ..torch_ops.library import define
from .agreement import WORDS, Call, expect_agreement, header_tensor, words_of
from .merge import added
from .shards import Shard

_COMMON = WORDS - 2  # words that must be equal on all ranks
_agreed = Cache()


def _header(like: Tensor, words: list[int]) -> Tensor:
    return header_tensor(words, like).clone()


header = define(
    "parallel_header(Tensor like, int[] words) -> Tensor",
    _header,
    lambda like, words: like.new_empty(len(words) * 8 // like.dtype.itemsize),
)


def gather(pieces: Sequence[Tensor], call: Call, shard: Shard, check: bool) -> tuple[list[Tensor], Tensor | None]:
    """Each piece of all ranks, (ranks, *its shape), and whether a rank made another call, a bool on the device or None.

    pieces: of one real dtype; the first is (segments, n_rows, 2). On a CPU, with `check`, and at the first call of a
    kind, the host compares the headers, and RuntimeError is raised on every rank. Later calls on a GPU do not wait for
    the device, which compares them instead.
    """
    words = call.words(shard.start, shard.width)
    like = pieces[0]
    if check:
        counted = call._replace(n_rows=like.shape[1]).words(shard.start, shard.width)
        expect_agreement(words_of(_all_gather(header_tensor(counted, like), shard)))
    compiling = torch.compiler.is_compiling()
    head = header(like, words) if compiling else header_tensor(words, like)
    flat = _all_gather(torch.cat([head, *(p.reshape(-1) for p in pieces)]), shard)
    sizes = [head.numel(), *(p.numel() for p in pieces)]
    headers, *parts = flat.split(sizes, 1)
    disagrees = None
    if shard.ranks > 1 and not check:
        key = (shard.group, shard.ranks, like.device, *words)
        if compiling or key in _agreed or (like.is_cuda and torch.cuda.is_current_stream_capturing()):
            common = _COMMON * 8 // like.dtype.itemsize
            disagrees = (headers[:, :common].view(torch.int32) != head[:common].view(torch.int32)).any()
        else:
            expect_agreement(words_of(headers))
            if like.is_cuda:
                _agreed.remember(key, True)
    return [part.reshape(shard.ranks, *p.shape) for part, p in zip(parts, pieces, strict=True)], disagrees


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
