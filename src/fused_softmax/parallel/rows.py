"""What a rank reads of its own columns: each row's numbers, in one read, in O(rows) memory.

The kernels are those of the one-GPU ops. The logits of targets are gathered by PyTorch; a target in another rank's
columns adds nothing here. Where there are no kernels, or one does not compile, `formulas` has the same in PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..launch import cross_entropy as losses
from ..launch import row_statistics
from ..launch.availability import KernelUnavailable
from ..launch.context import as_in_forward, is_batch_invariant
from ..launch.layout import rows_of
from ..launch.options import CrossEntropy
from ..torch_ops.arguments import LossOptions
from ..torch_ops.decompositions import capped, result_dtype, widened
from ..torch_ops.library import define, not_differentiable
from ..torch_ops.route import is_supported
from . import formulas
from .agreement import constant
from .loss import Smoothing, smoothing_of
from .shards import Shard

COUNTS, IGNORED = 0, -1  # targets of a smoothed loss's kernel: the first column, or none


def _canonical(x: Tensor, invariant: bool) -> Tensor:
    """x, as a copy where equal bits need it: the kernels read vectors as wide as the address and the stride allow."""
    if not invariant:
        if is_batch_invariant():
            raise RuntimeError("fused_softmax.parallel: within batch_invariant() call it outside of torch.compile")
        return x
    if not x.numel():
        return x
    item = x.element_size()
    row = x.shape[1] * item
    vector = min(16, row & -row)
    return x.clone(memory_format=torch.contiguous_format) if (x.data_ptr() | x.stride(0) * item) % vector else x


def _statistics_kernel(x: Tensor, scales: Tensor | None, scale: float, entropy: bool, invariant: bool) -> Any:
    x, by = _canonical(x, invariant), scale if scales is None else scales.contiguous()
    if is_supported(x):
        try:
            _, entropies, lse, moments = row_statistics.statistics(
                rows_of(x, x.shape[1]), None, by, entropy, invariant=invariant
            )
            assert moments is not None
            return moments, lse.new_empty(0) if entropies is None else entropies
        except KernelUnavailable:
            pass
    return formulas.statistics(x, by, entropy)


def _smoothed_kernel(x: Tensor, weight: Tensor | None, softcap: float | None, smooth: bool, invariant: bool) -> Any:
    n_rows, n_cols = x.shape
    x = _canonical(x, invariant)
    if is_supported(x):
        target = torch.full((n_rows,), COUNTS if smooth else IGNORED, dtype=torch.int64, device=x.device)
        total = None if weight is None or not smooth else weight.sum().view(1)
        loss = CrossEntropy(
            target, weight if smooth else None, total, IGNORED, "none", 1.0 if smooth else 0.0, softcap, 0.0
        )
        try:
            with as_in_forward(invariant):
                found, moments = losses.losses_of_chunk(rows_of(x, n_cols), loss)
        except KernelUnavailable:
            pass
        else:
            if not smooth:
                return moments, found.new_empty(0)
            # the kernel's loss is a mean over the columns; at -inf its target's part is 0*inf
            first = x[:, 0] == -float("inf")
            at_first = float("inf") if weight is None else torch.where(weight[0] == 0.0, float("nan"), float("inf"))
            return moments, torch.where(first, at_first, found * n_cols)
    return formulas.smoothed(x, weight, softcap, smooth)


def _two_fake(extra: bool, x: Tensor) -> tuple[Tensor, Tensor]:
    moments = x.new_empty((x.shape[0], 2), dtype=result_dtype(x))
    return moments, moments.new_empty(x.shape[0] if extra else 0)


_statistics = define(
    "parallel_statistics(Tensor x, Tensor? scales, float scale, bool entropy, bool invariant) -> (Tensor, Tensor)",
    _statistics_kernel,
    lambda x, scales, scale, entropy, invariant: _two_fake(entropy, x),
)
_smoothed = define(
    "parallel_smoothed(Tensor x, Tensor? weight, float? softcap, bool smooth, bool invariant) -> (Tensor, Tensor)",
    _smoothed_kernel,
    lambda x, weight, softcap, smooth, invariant: _two_fake(smooth, x),
)
not_differentiable("parallel_statistics")
not_differentiable("parallel_smoothed")


def statistics(x: Tensor, scale: float | Tensor, entropy: bool, invariant: bool) -> tuple[Tensor, Tensor]:
    """((row_max, row_sum) of x*scale, (n_rows, 2); the entropy over these columns, (n_rows,), or nothing)."""
    scales, number = (scale, 1.0) if isinstance(scale, Tensor) else (None, scale)
    given = (x, scales, number, entropy, invariant)
    return _statistics(*given) if torch.compiler.is_compiling() else _statistics_kernel(*given)


def smoothed(x: Tensor, how: Smoothing, invariant: bool) -> tuple[Tensor, Tensor]:
    """((row_max, row_sum) of the capped logits; the sum of w*(lse - z) over these columns, or nothing)."""
    given = (x, how.weight, how.softcap, how.smooth, invariant)
    return _smoothed(*given) if torch.compiler.is_compiling() else _smoothed_kernel(*given)


def picked(x: Tensor, ids: Tensor, scale: float | Tensor, softcap: float | None, like: Tensor) -> Tensor:
    """The logits z at ids of these columns, 0 at others, in the moments' dtype.  # ids, result: (n_rows, n_picks)"""
    if not x.shape[1]:
        return x.new_zeros(ids.shape, dtype=result_dtype(x))
    at = ids.clamp(0, x.shape[1] - 1)
    z = x.gather(1, at)
    if softcap is not None:
        z = capped(z, softcap)
    if isinstance(scale, Tensor):
        z = z * scale.unsqueeze(1)
    elif scale != 1.0:
        z = widened(z) * scale
    # where() widens 16-bit logits in the same pass
    return torch.where(at == ids, z, constant(0.0, like))


def joined(parts: list[Tensor]) -> Tensor:
    """torch.stack, which copies, unless there is one part."""
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)


def read_loss(
    x: Tensor, ids: Tensor, weight: Tensor | None, shard: Shard, options: LossOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a rank adds to a loss's payload for each row.

    (segments, n_rows, 2) moments; (n_rows,) logits of targets; (segments, n_rows) sums of w*(lse - z), where smoothing
    takes them; (n_rows,) weights of targets, where there are weights. Every op's payload is as long, so that ranks that
    call different ones meet in one collective. ids: (n_rows, 1), from the rank's first column.
    """
    moments, spreads = [], []
    for columns, _ in shard.pieces():
        how = smoothing_of(options, weight, columns)
        if how is None:
            found, extra = statistics(x[:, columns], 1.0, False, shard.invariant)
        else:
            found, extra = smoothed(x[:, columns], how, shard.invariant)
            if options.label_smoothing:  # -inf only: each term is infinite. No columns: there are no terms
                extra = torch.where(found[:, 1] == 0.0, float("inf") if shard.width else 0.0, extra)
        moments.append(found)
        spreads.append(extra if options.label_smoothing else found[:, 0])
    z = picked(x, ids, 1.0, options.softcap, moments[0]).squeeze(1)
    weights = z
    if weight is not None:
        target = ids.squeeze(1)
        at = target.clamp(0, max(shard.width - 1, 0))
        weights = torch.where(at == target, weight[at], 0.0).to(z.dtype) if shard.width else torch.zeros_like(z)
    return joined(moments), z, joined(spreads), weights


def weight_sums(weight: Tensor | None, shard: Shard, like: Tensor) -> Tensor:
    """The weights' sum in each of the rank's segments, or its number of columns.  # (segments,)"""
    if weight is None:
        return constant(shard.width / shard.segments, like).expand(shard.segments)
    if not shard.width:
        return like.new_zeros(shard.segments)
    return torch.stack([weight[columns].to(like.dtype).sum() for columns, _ in shard.pieces()])
