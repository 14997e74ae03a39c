"""A rank's part of the logits' gradient: one read and one write of its own columns, and no collective.

Both are of z = softcap(x*scale), with known (row_max, row_sum) of all columns:

    dx_j = scale*(p_j*a - g_H*p_j*(log p_j + H)) + [j = id_k]*g_k           `statistics_gradient`
    dx_j = (p_j*a - c*w_j - [j = t]*b) * (1 - tanh(x_j/cap)^2)              `loss_gradient`

An id or target in another rank's columns is not written here, and counts in a. The kernels are those of the one-GPU
ops; where there are none, or one does not compile, `formulas` has the same in PyTorch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..launch import row_statistics, vocab_shards
from ..launch.availability import KernelUnavailable
from ..launch.cross_entropy_gradient import shard_gradient
from ..launch.layout import gradient_buffer, rows_of
from ..torch_ops.arguments import LossOptions
from ..torch_ops.library import define, not_differentiable
from ..torch_ops.route import is_supported
from . import formulas
from .loss import factors_of
from .shards import Shard, canonical


def expect_once(function: str) -> None:
    """RuntimeError where a gradient is to be differentiated again."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(f"parallel.{function}(): its gradient cannot be differentiated again")


def buffer(x: Tensor, dtype: torch.dtype, invariant: bool) -> Tensor | None:
    """Memory for what is written for rows x; None in a trace, where an operator returns memory of its own.

    invariant: its rows start alike on every number of ranks, so that they have one plan.
    """
    if torch.compiler.is_compiling():
        return None
    return (
        gradient_buffer(x) if dtype is x.dtype and not invariant else torch.empty(x.shape, dtype=dtype, device=x.device)
    )


def _in_rows(x: Tensor) -> Tensor:
    return rows_of(x, x.shape[1]) if x.numel() else x


# --- statistics -------------------------------------------------------------------------------------------------------


class Upstream(NamedTuple):
    """The gradients of a row's numbers: of log-probabilities (n_rows, n_picks), of the others (n_rows,)."""

    picked: Tensor | None = None
    entropy: Tensor | None = None
    lse: Tensor | None = None


def _write_statistics_gradient(
    dx: Tensor, x: Tensor, moments: Tensor, scales: Tensor | None, scale: float, ids: Tensor | None,
    g_picked: Tensor | None, entropy: Tensor | None, g_entropy: Tensor | None, g_lse: Tensor | None, start: int,
    size: int, invariant: bool = False,
) -> None:  # fmt: skip
    if not x.numel():
        return
    by = scale if scales is None else scales.contiguous()
    if is_supported(x):
        try:
            row_statistics.statistics_backward(
                x, dx, moments.contiguous(), by,
                ids=None if ids is None else ids.contiguous(), g_picked=g_picked, entropy=entropy, g_entropy=g_entropy,
                g_lse=g_lse, shard=(start, size), invariant=invariant,
            )  # fmt: skip
            return
        except KernelUnavailable:
            pass
    dx.copy_(
        formulas.statistics_gradient(x, moments, by, ids, g_picked, entropy, g_entropy, g_lse, start, size)
    )  # fmt: skip


def _new_statistics_gradient(x: Tensor, *rest: Any) -> Tensor:
    *given, dtype = rest
    dx = torch.empty(x.shape, dtype=dtype, device=x.device)
    _write_statistics_gradient(dx, _in_rows(x), *given)
    return dx


_statistics_gradient = define(
    "parallel_statistics_gradient(Tensor x, Tensor moments, Tensor? scales, float scale, Tensor? ids, "
    "Tensor? g_picked, Tensor? entropy, Tensor? g_entropy, Tensor? g_lse, SymInt start, SymInt size, "
    "ScalarType dtype) -> Tensor",
    _new_statistics_gradient,
    lambda x, *rest: x.new_empty(x.shape, dtype=rest[-1]),
)
not_differentiable("parallel_statistics_gradient")


def statistics_gradient(
    x: Tensor, moments: Tensor, scale: float | Tensor, ids: Tensor | None, entropy: Tensor | None, g: Upstream,
    shard: Shard, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of a row's numbers in this rank's columns, in dtype or x's. ids are of all columns."""
    scales, number = (scale, 1.0) if isinstance(scale, Tensor) else (None, scale)
    dtype = x.dtype if dtype is None else dtype
    given = (moments, scales, number, ids, g.picked, entropy, g.entropy, g.lse)
    dx = buffer(x, dtype, shard.invariant)
    if dx is None:
        return _statistics_gradient(x, *given, shard.start, shard.size, dtype)
    for columns, first in shard.pieces():
        piece = canonical(x[:, columns], shard.invariant)
        _write_statistics_gradient(dx[:, columns], piece, *given, first, shard.size, shard.invariant)
    return dx


# --- losses -----------------------------------------------------------------------------------------------------------

OfRows = tuple[Tensor, Tensor, Tensor]  # (weights, denominator, weight_sum), as `whole_rows.Loss` has them


def loss_factors(
    g: Tensor, moments: Tensor, target: Tensor, of_rows: OfRows, options: LossOptions, size: int
) -> Tensor:
    """Each row's (a, b, c), as `loss.factors_of`."""
    weights, count, weight_sum = (t if t.numel() else None for t in of_rows)
    if target.numel() and is_supported(moments):
        try:
            return vocab_shards.loss_factors(
                g,
                target,
                moments,
                weights,
                count,
                weight_sum,
                options.ignore_index,
                size,
                options.label_smoothing,
                options.z_loss,
            )
        except KernelUnavailable:
            pass
    return factors_of(g, moments, target != options.ignore_index, weights, count, weight_sum, options, size)


def write_loss_gradient(
    dx: Tensor, x: Tensor, moments: Tensor, target: Tensor, factors: Tensor, weight: Tensor | None, start: int,
    options: LossOptions, invariant: bool = False,
) -> None:  # fmt: skip
    """Into dx, which may be x, a loss's gradient in columns from `start` on."""
    if not x.numel():
        return
    smooth = options.label_smoothing > 0.0
    if is_supported(x):
        try:
            shard_gradient(
                x, dx, target, moments, factors, weight, start, options.ignore_index, smooth, options.softcap,
                invariant,
            )  # fmt: skip
            return
        except KernelUnavailable:
            pass
    counts = target != options.ignore_index
    of_columns = weight if smooth else None
    dx.copy_(formulas.loss_gradient(x, moments, target, counts, factors, of_columns, start, options.softcap))


def _new_loss_gradient(
    x: Tensor, g: Tensor, moments: Tensor, target: Tensor, weights: Tensor, count: Tensor, weight_sum: Tensor,
    weight: Tensor | None, start: int, size: int, ignore_index: int, label_smoothing: float, softcap: float | None,
    z_loss: float,
) -> Tensor:  # fmt: skip
    options = LossOptions(ignore_index, "", label_smoothing, softcap, z_loss)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    factors = loss_factors(g, moments, target, (weights, count, weight_sum), options, size)
    write_loss_gradient(dx, _in_rows(x), moments, target, factors, weight, start, options)
    return dx


_loss_gradient = define(
    "parallel_loss_gradient(Tensor x, Tensor g, Tensor moments, Tensor target, Tensor weights, Tensor count, "
    "Tensor weight_sum, Tensor? weight, SymInt start, SymInt size, int ignore_index, float label_smoothing, "
    "float? softcap, float z_loss) -> Tensor",
    _new_loss_gradient,
    lambda x, *rest: x.new_empty(x.shape),
)
not_differentiable("parallel_loss_gradient")


def loss_gradient(
    x: Tensor, g: Tensor, moments: Tensor, target: Tensor, of_rows: OfRows, weight: Tensor | None, shard: Shard,
    options: LossOptions, inplace: bool = False,
) -> Tensor:  # fmt: skip
    """The gradient of a loss in this rank's columns for upstream g; over x where `inplace`.

    weight: of these columns.
    """
    dx = x.detach() if inplace else buffer(x, x.dtype, shard.invariant)
    if dx is None:
        return _loss_gradient(
            x, g, moments, target, *of_rows, weight, shard.start, shard.size, options.ignore_index,
            options.label_smoothing, options.softcap, options.z_loss,
        )  # fmt: skip
    factors = loss_factors(g, moments, target, of_rows, options, shard.size)
    for columns, first in shard.pieces():
        of_piece = None if weight is None else weight[columns]
        piece = x[:, columns] if inplace else canonical(x[:, columns], shard.invariant)
        given = (moments, target, factors, of_piece, first, options, shard.invariant)
        write_loss_gradient(dx[:, columns], piece, *given)
    return dx
