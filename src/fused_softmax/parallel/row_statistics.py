"""logsumexp and token_logprobs of logits whose columns are spread over ranks.

Forward: one read of the local logits, one all_gather of O(rows). Backward: no collective, one read and one write.
Keeps the logits and O(rows).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..launch.row_statistics import check_ids
from ..torch_ops.arguments import expect_flag, expect_tensors, expect_token_ids, least_positive, scale_of
from ..torch_ops.outputs import TokenStatistics
from .agreement import Call
from .exchange import gather
from .gradients import Upstream, expect_once, statistics_gradient
from .rows import read_statistics
from .shards import Shard, rows_and_shard
from .whole_rows import merge_statistics


def logsumexp(
    local_logits: Tensor,
    *,
    group: Any = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    keepdim: bool = False,
    check: bool = False,
) -> Tensor:
    """Return logsumexp over the columns of all ranks, from this rank's columns, (..., width).

    group, vocab_start, vocab_size and check are as in `parallel.cross_entropy`.

    Returns: (...), or (..., 1) with keepdim, the same on every rank; float32, or float64 for float64 logits. The
    gradient of this rank's logits takes no collective.

    Raises: as `parallel.cross_entropy`.
    """
    x, shard = rows_and_shard("logsumexp", local_logits, group, vocab_start, vocab_size, check)
    expect_flag("parallel.logsumexp", "keepdim", keepdim)
    lse = RowStatistics.apply(x, None, 1.0, False, shard, check)[2]
    return lse.view(*local_logits.shape[:-1], 1) if keepdim else lse.view(local_logits.shape[:-1])


def token_logprobs(
    local_logits: Tensor,
    token_ids: Tensor,
    *,
    group: Any = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    temperature: float | Tensor = 1.0,
    return_entropy: bool = False,
    return_logsumexp: bool = False,
    check: bool = False,
) -> Tensor | TokenStatistics:
    """Return `fused_softmax.token_logprobs` of logits whose columns are spread over the ranks of a group.

    Args:
        local_logits: (..., width), this rank's columns.
        token_ids: Integers of shape (...), or (..., K), in [0, vocab_size); the same on every rank.
        group: As in `parallel.cross_entropy`, and so are vocab_start, vocab_size and check.
        temperature: A positive number, or a tensor that broadcasts to (...); the same on every rank.
        return_entropy: Also return -sum(p*log p) over all columns.
        return_logsumexp: Also return logsumexp over all columns.

    Returns:
        As `fused_softmax.token_logprobs`, the same on every rank. An id outside the vocabulary gives NaN on a GPU.

    Raises: as `parallel.cross_entropy` and `fused_softmax.token_logprobs`.
    """
    name = "parallel.token_logprobs"
    expect_tensors(name, local_logits=local_logits, token_ids=token_ids)
    expect_flag(name, "return_entropy", return_entropy)
    expect_flag(name, "return_logsumexp", return_logsumexp)
    x, shard = rows_and_shard("token_logprobs", local_logits, group, vocab_start, vocab_size, check)
    batch = local_logits.shape[:-1]
    expect_token_ids(name, token_ids, "local_logits", local_logits)
    ids = token_ids.long().reshape(x.shape[0], -1 if token_ids.numel() else token_ids.shape[-1])
    if ids.device.type == "cpu" and not torch.compiler.is_compiling():
        check_ids(ids, shard.size)
    scale = scale_of(name, temperature, batch, local_logits)
    if isinstance(scale, Tensor):
        if scale.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{name}(): the temperature gets no gradient; temperature.detach() it")
        # an infinite temperature gives 0, and 0 times -inf would show hidden columns
        scale = scale.masked_fill(scale == 0.0, least_positive(scale.dtype)).reshape(-1).contiguous()
    picked, entropy, lse = RowStatistics.apply(x, ids, scale, return_entropy, shard, check)
    logprobs = picked.view(token_ids.shape)
    if not (return_entropy or return_logsumexp):
        return logprobs
    return TokenStatistics(
        logprobs, entropy.view(batch) if return_entropy else None, lse.view(batch) if return_logsumexp else None
    )


class RowStatistics(torch.autograd.Function):
    """(log-probabilities or a 0, entropy or a 0, logsumexp) of rows (n_rows, width). Keeps the logits and O(rows)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ids: Tensor | None, scale: float | Tensor, entropy: bool, shard: Shard, check: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        by_row, number = (scale, float("nan")) if isinstance(scale, Tensor) else (None, scale)
        call = Call(
            "logsumexp" if ids is None else "token_logprobs", x.dtype, shard.size, shard.segments,
            picks=0 if ids is None else ids.shape[1], scale=number, entropy=entropy,
        )  # fmt: skip
        words = call.words(shard.start, shard.width)
        payload = read_statistics(x, ids, scale, words, shard, entropy)
        gathered, compares = gather(payload, words, x.shape[0], call, shard, check)
        found = merge_statistics(gathered, ids, x.shape[0], compares, shard, entropy)
        ctx.save_for_backward(x, ids, found.moments, found.entropy if entropy else None, by_row)
        ctx.described = shard, number
        ctx.set_materialize_grads(False)
        return found.logprobs, found.entropy.clone(), found.logsumexp

    @staticmethod
    def backward(
        ctx: Any, g_picked: Tensor | None, g_entropy: Tensor | None, g_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, ids, moments, entropies, by_row = ctx.saved_tensors
        expect_once("logsumexp" if ids is None else "token_logprobs")
        shard, scale = ctx.described
        if ids is None:
            g_picked = None
        if entropies is None:
            g_entropy = None
        if g_picked is None and g_entropy is None and g_lse is None:
            return (None,) * 6
        upstream = Upstream(g_picked, g_entropy, g_lse)
        of_ids = None if g_picked is None else ids
        scaled = scale if by_row is None else by_row
        return statistics_gradient(x, moments, scaled, of_ids, entropies, upstream, shard), *(None,) * 5
