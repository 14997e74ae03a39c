"""From the payloads of all ranks to whole rows: losses, log-probabilities, entropies, and what a gradient takes.

A kernel merges in O(rows). Where there is none, `merge` and `loss` have the same in PyTorch. The operators stand for
both in a graph. Every rank makes the same choice, which depends on the payloads alone, so all have the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..launch import cross_entropy as rows
from ..launch import vocab_shards
from ..launch.availability import KernelUnavailable
from ..launch.options import CrossEntropy
from ..torch_ops.arguments import LossOptions
from ..torch_ops.library import define, not_differentiable
from ..torch_ops.route import is_supported
from . import merge
from .agreement import COMMON
from .loss import loss_of
from .payload import layout_of, parts_of
from .shards import Shard


class Loss(NamedTuple):
    """A loss, and what its gradient takes of the rows of all columns. A part that is not there has no elements."""

    loss: Tensor  # reduced, or (n_rows,)
    moments: Tensor  # (n_rows, 2): row_max, and row_sum, which is NaN where a rank made another call
    weights: Tensor  # (n_rows,), of targets
    denominator: Tensor  # (1,), of a mean
    weight_sum: Tensor  # (1,), of all columns, where smoothing takes it


class Statistics(NamedTuple):
    """What `parallel.token_logprobs` returns, and the moments. A part that is not there has no elements."""

    logprobs: Tensor  # (n_rows, picks)
    entropy: Tensor  # (n_rows,)
    logsumexp: Tensor  # (n_rows,)
    moments: Tensor  # (n_rows, 2)


def _common(gathered: Tensor) -> int:
    """The numbers of a payload that must be equal on all ranks."""
    return COMMON * 8 // gathered.dtype.itemsize


def _disagrees(gathered: Tensor, compares: bool) -> Tensor | None:
    """Whether a rank made another call, on the device."""
    if not compares:
        return None
    words = gathered[:, : _common(gathered)].contiguous().view(torch.int32)
    return (words != words[:1]).any()


def _merge_loss(
    gathered: Tensor, target: Tensor, segments: int, size: int, compares: bool, weighted: bool, ignore_index: int,
    reduction: str, label_smoothing: float, z_loss: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    n_rows = target.shape[0]
    layout = layout_of(gathered.dtype, n_rows, segments)
    part, options = parts_of(gathered, layout), LossOptions(ignore_index, reduction, label_smoothing, None, z_loss)
    nothing = gathered.new_empty(0)
    weight_sum = merge.added(merge.in_order(part.sums)).view(1) if weighted and label_smoothing else nothing
    if n_rows and is_supported(gathered):
        losses, moments = gathered.new_empty(n_rows), gathered.new_empty(n_rows, 2)
        weights = gathered.new_empty(n_rows) if weighted else nothing
        try:
            vocab_shards.merge_loss(
                gathered, layout, target, losses, moments, weights if weighted else None,
                _common(gathered) if compares else 0, size, ignore_index, label_smoothing, z_loss,
            )  # fmt: skip
            if reduction == "none":
                return losses, moments, weights, nothing, weight_sum
            if not weighted:
                op = CrossEntropy(target, None, None, ignore_index, reduction, 0.0, None, 0.0)
                loss, count = rows.reduce_losses(losses, op, size)
                return loss, moments, weights, nothing if count is None else count, weight_sum
            loss, count = losses.sum(), nothing
            if reduction == "mean":
                count = weights.sum().view(1)
                loss = torch.where(count[0] == 0.0, float("nan"), loss / count[0])
            return loss, moments, weights, count, weight_sum
        except KernelUnavailable:
            pass
    merged = merge.merge(part.moments, _disagrees(gathered, compares))
    counts = target != ignore_index
    of_target = torch.where(counts, part.weights.sum(0), 0.0) if weighted else None
    loss, count = loss_of(
        merged, part.picked.sum(0).squeeze(1), of_target, part.spreads, part.sums, counts, options, size
    )  # fmt: skip
    weights = nothing if of_target is None else of_target
    return loss, merged.moments, weights, nothing if count is None else count.view(1), weight_sum


def _fake_loss(gathered: Tensor, target: Tensor, *rest: object) -> tuple[Tensor, ...]:
    _, _, _, weighted, _, reduction, label_smoothing, _ = rest
    n_rows, new = target.shape[0], gathered.new_empty
    return (
        new(n_rows) if reduction == "none" else new(()), new((n_rows, 2)), new(n_rows if weighted else 0),
        new(1 if reduction == "mean" else 0), new(1 if weighted and label_smoothing else 0),
    )  # fmt: skip


_merge_loss_operator = define(
    "parallel_merge_loss(Tensor gathered, Tensor target, int segments, SymInt size, bool compares, bool weighted, "
    "int ignore_index, str reduction, float label_smoothing, float z_loss) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _merge_loss,
    _fake_loss,
)
not_differentiable("parallel_merge_loss")


def merge_loss(
    gathered: Tensor, target: Tensor, weighted: bool, compares: bool, shard: Shard, options: LossOptions
) -> Loss:
    """The loss of gathered payloads (ranks, length), reduced. compares: the headers, whose difference makes NaN."""
    run = _merge_loss_operator if torch.compiler.is_compiling() else _merge_loss
    return Loss(*run(
        gathered, target, shard.segments, shard.size, compares, weighted, options.ignore_index, options.reduction,
        options.label_smoothing, options.z_loss,
    ))  # fmt: skip


def _merge_statistics(
    gathered: Tensor,
    ids: Tensor | None,
    n_rows: int,
    segments: int,
    size: int,
    compares: bool,
    entropy: bool,
    infinite: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    layout = layout_of(gathered.dtype, n_rows, segments, 1 if ids is None else ids.shape[1])
    nothing, ids = gathered.new_empty(0), None if ids is None else ids.contiguous()
    if n_rows and is_supported(gathered):
        picked = nothing if ids is None else gathered.new_empty(ids.shape)
        entropies = gathered.new_empty(n_rows if entropy else 0)
        lse, moments = gathered.new_empty(n_rows), gathered.new_empty(n_rows, 2)
        try:
            vocab_shards.merge_statistics(
                gathered, layout, ids if picked.numel() else None, picked if picked.numel() else None,
                entropies if entropy else None, lse, moments, infinite,
                _common(gathered) if compares else 0, size,
            )  # fmt: skip
            return picked, entropies, lse, moments
        except KernelUnavailable:
            pass
    part = parts_of(gathered, layout)
    merged = merge.merge(part.moments, _disagrees(gathered, compares), infinite=infinite)
    picked = nothing
    if ids is not None:
        valid = ids.clamp(0, max(size - 1, 0)) == ids
        picked = torch.where(valid, merge.log_probability(merged, part.picked.sum(0)), float("nan"))
    return picked, merge.entropy(merged, part.spreads) if entropy else nothing, merged.lse, merged.moments


def _fake_statistics(gathered: Tensor, ids: Tensor | None, n_rows: int, *rest: object) -> tuple[Tensor, ...]:
    new, entropy = gathered.new_empty, rest[-2]
    return new(0) if ids is None else new(ids.shape), new(n_rows if entropy else 0), new(n_rows), new((n_rows, 2))


_merge_statistics_operator = define(
    "parallel_merge_statistics(Tensor gathered, Tensor? ids, SymInt n_rows, int segments, SymInt size, bool compares, "
    "bool entropy, bool infinite) -> (Tensor, Tensor, Tensor, Tensor)",
    _merge_statistics,
    _fake_statistics,
)
not_differentiable("parallel_merge_statistics")


def merge_statistics(
    gathered: Tensor,
    ids: Tensor | None,
    n_rows: int,
    compares: bool,
    shard: Shard,
    entropy: bool,
    infinite: bool = True,
) -> Statistics:
    """The statistics of gathered payloads (ranks, length); an id outside the vocabulary has NaN.

    infinite: a row with +inf keeps its infinite sum; otherwise it is NaN, as its probabilities are.
    """
    run = _merge_statistics_operator if torch.compiler.is_compiling() else _merge_statistics
    return Statistics(*run(gathered, ids, n_rows, shard.segments, shard.size, compares, entropy, infinite))
