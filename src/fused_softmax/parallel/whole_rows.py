"""From the payloads of all ranks to whole rows: losses, log-probabilities, entropies, and what a gradient takes.

A kernel merges in O(rows). Where there is none, `merge` and `loss` have the same in PyTorch. The operators stand for
both in a graph. Every rank makes the same choice, which depends on the payloads alone, so all have the same bits.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from ..launch import cross_entropy as rows
from ..launch import vocab_shards
from ..launch.availability import KernelUnavailable
from ..launch.options import CrossEntropy
from ..launch.payload import Layout
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
    found, common = None, _common(gathered) if compares else 0
    if n_rows and is_supported(gathered):
        with suppress(KernelUnavailable):
            of_loss = weighted, ignore_index, reduction, label_smoothing, z_loss
            found = _by_kernels(gathered, layout, target, size, common, *of_loss)
    if found is None:
        part, options = parts_of(gathered, layout), LossOptions(ignore_index, reduction, label_smoothing, None, z_loss)
        merged = merge.merge(part.moments, _disagrees(gathered, compares))
        counts = target != ignore_index
        weights = torch.where(counts, part.weights.sum(0), 0.0) if weighted else None
        z = part.picked.sum(0).squeeze(1)
        loss, count = loss_of(merged, z, weights, part.spreads, part.sums, counts, options, size)
        found = loss, merged.moments, weights, None if count is None else count.view(1)
    weight_sum = None
    if weighted and label_smoothing:
        weight_sum = merge.added(merge.in_order(parts_of(gathered, layout).sums)).view(1)
    loss, moments, *others = *found, weight_sum
    weights, count, weight_sum = (gathered.new_empty(0) if t is None else t for t in others)
    return loss, moments, weights, count, weight_sum


def _by_kernels(
    gathered: Tensor, layout: Layout, target: Tensor, size: int, common: int, weighted: bool, ignore_index: int,
    reduction: str, label_smoothing: float, z_loss: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(the loss, moments, weights of targets, what a mean divides by)."""
    n_rows = layout.n_rows
    losses, moments = gathered.new_empty(n_rows), gathered.new_empty(n_rows, 2)
    weights = gathered.new_empty(n_rows) if weighted else None
    vocab_shards.merge_loss(
        gathered, layout, target, losses, moments, weights, common, size, ignore_index, label_smoothing, z_loss
    )
    if reduction == "none":
        return losses, moments, weights, None
    if weights is None:
        op = CrossEntropy(target, None, None, ignore_index, reduction, 0.0, None, 0.0)
        loss, count = rows.reduce_losses(losses, op, size)
        return loss, moments, None, count
    if reduction == "sum":
        return losses.sum(), moments, weights, None
    count = weights.sum().view(1)
    return torch.where(count[0] == 0.0, float("nan"), losses.sum() / count[0]), moments, weights, count


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
    new, ids = gathered.new_empty, None if ids is None else ids.contiguous()
    if n_rows and is_supported(gathered):
        picked, entropies = new(0) if ids is None else new(ids.shape), new(n_rows if entropy else 0)
        lse, moments, has_picks = new(n_rows), new(n_rows, 2), picked.numel() > 0
        try:
            vocab_shards.merge_statistics(
                gathered, layout, ids if has_picks else None, picked if has_picks else None,
                entropies if entropy else None, lse, moments, infinite, _common(gathered) if compares else 0, size,
            )  # fmt: skip
            return picked, entropies, lse, moments
        except KernelUnavailable:
            pass
    part = parts_of(gathered, layout)
    merged = merge.merge(part.moments, _disagrees(gathered, compares), infinite=infinite)
    picked = new(0)
    if ids is not None:
        valid = ids.clamp(0, max(size - 1, 0)) == ids
        picked = torch.where(valid, merge.log_probability(merged, part.picked.sum(0)), float("nan"))
    return picked, merge.entropy(merged, part.spreads) if entropy else new(0), merged.lse, merged.moments


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
