"""A rank's part of the logits' gradient: one read and one write of its own columns, and no collective.

Both are of z = softcap(x*scale), with known (row_max, row_sum) of all columns:

    dx_j = scale*(p_j*a - g_H*p_j*(log p_j + H)) + [j = id_k]*g_k           `statistics_gradient`
    dx_j = (p_j*a - c*w_j - [j = t]*b) * (1 - tanh(x_j/cap)^2)              `smoothed_gradient`

An id or target in another rank's columns is not written here, and counts in a. The kernels are those of the one-GPU
ops; where there are none, or one does not compile, `formulas` has the same in PyTorch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..launch import row_statistics
from ..launch.availability import KernelUnavailable
from ..launch.cross_entropy_gradient import cross_entropy_gradient
from ..launch.layout import gradient_buffer, rows_of
from ..launch.options import CrossEntropy
from ..torch_ops.arguments import LossOptions
from ..torch_ops.library import define, not_differentiable
from ..torch_ops.route import is_supported
from . import formulas
from .loss import Factors, Smoothing, smoothing_of
from .shards import Shard

IGNORED = -1  # the target of a row that does not count


def expect_once(function: str) -> None:
    """RuntimeError where a gradient is to be differentiated again."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(f"parallel.{function}(): its gradient cannot be differentiated again")


class Upstream(NamedTuple):
    """The gradients of a row's numbers: of log-probabilities (n_rows, n_picks), of the others (n_rows,)."""

    picked: Tensor | None = None
    entropy: Tensor | None = None
    lse: Tensor | None = None


def _statistics_gradient_kernel(
    dx: Tensor, x: Tensor, moments: Tensor, scales: Tensor | None, scale: float, ids: Tensor | None,
    g_picked: Tensor | None, entropy: Tensor | None, g_entropy: Tensor | None, g_lse: Tensor | None,
) -> None:  # fmt: skip
    if not x.numel():
        return
    by = scale if scales is None else scales.contiguous()
    if ids is not None and g_picked is not None:
        # the kernel takes the gradients of its own columns' ids from g_lse; those of others are taken here
        elsewhere = torch.where(ids.clamp(0, x.shape[1] - 1) == ids, 0.0, g_picked)
        elsewhere = elsewhere.squeeze(1) if ids.shape[1] == 1 else elsewhere.sum(1)
        g_lse = -elsewhere if g_lse is None else g_lse - elsewhere
    if is_supported(x):
        try:
            row_statistics.statistics_backward(
                x, dx, moments.contiguous(), by,
                ids=None if ids is None else ids.contiguous(), g_picked=g_picked, entropy=entropy, g_entropy=g_entropy,
                g_lse=g_lse,
            )  # fmt: skip
            return
        except KernelUnavailable:
            pass
    assert g_lse is not None
    dx.copy_(formulas.statistics_gradient(x, moments, by, ids, g_picked, entropy, g_entropy, g_lse))


def _smoothed_gradient_kernel(
    dx: Tensor, x: Tensor, moments: Tensor, ids: Tensor, counts: Tensor, a: Tensor, b: Tensor, c: Tensor | None,
    weight: Tensor | None, softcap: float | None,
) -> None:  # fmt: skip
    if not x.numel():
        return
    at = ids.clamp(0, x.shape[1] - 1)
    # the target's column is written again, in O(rows); read it before dx, which may be x
    x_at = x.gather(1, at)
    if not (is_supported(x) and _by_loss_kernel(dx, x, moments, at, counts, a, c, weight, softcap)):
        dz = formulas.smoothed_gradient(x, moments, a, c, weight, softcap)
        dx.copy_(torch.where(counts.unsqueeze(1), dz, 0.0))
    b = torch.where(at == ids, b.unsqueeze(1), 0.0)
    of_column = None if weight is None else weight[at]
    dx_at = formulas.smoothed_gradient(x_at, moments, a, c, of_column, softcap, b)
    dx.scatter_(1, at, torch.where(counts.unsqueeze(1), dx_at, 0.0).to(dx.dtype))


def _by_loss_kernel(
    dx: Tensor, x: Tensor, moments: Tensor, at: Tensor, counts: Tensor, a: Tensor, c: Tensor | None,
    weight: Tensor | None, softcap: float | None,
) -> bool:  # fmt: skip
    """Writes all columns by cross_entropy's gradient kernel, right except at the target; False where it cannot run.

    The kernel's own factor of p is what its upstream gradient makes: g without smoothing, and c*sum(w) with it. row_sum
    is divided by the rest, because p = exp(z - row_max)/row_sum.
    """
    n_cols = x.shape[1]
    if c is None:
        smoothing, g, weight, total, row_sum = 0.0, a, None, None, moments[:, 1]
    else:
        # a smoothing of 1 leaves the target nothing, and divides by the columns that the kernel knows of
        smoothing, g = 1.0, c * n_cols
        total = None if weight is None else torch.ones(1, dtype=torch.float32, device=x.device)
        made = g if weight is None else c
        row_sum = torch.where(c == 0.0, moments[:, 1], moments[:, 1] * (made / a))
    target = torch.where(counts, at[:, 0], IGNORED)
    loss = CrossEntropy(target, weight, total, IGNORED, "none", smoothing, softcap, 0.0)
    of_rows = torch.stack((moments[:, 0], row_sum), 1)
    try:
        cross_entropy_gradient(x, dx, loss, of_rows, None, g.contiguous(), unless_one=False)
    except KernelUnavailable:
        return False
    return True


def _new_statistics_gradient(x: Tensor, *rest: Any) -> Tensor:
    *given, dtype = rest
    dx = torch.empty(x.shape, dtype=dtype, device=x.device)
    _statistics_gradient_kernel(dx, rows_of(x, x.shape[1]) if x.numel() else x, *given)
    return dx


def _new_smoothed_gradient(x: Tensor, *rest: Any) -> Tensor:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _smoothed_gradient_kernel(dx, rows_of(x, x.shape[1]) if x.numel() else x, *rest)
    return dx


_statistics_gradient = define(
    "parallel_statistics_gradient(Tensor x, Tensor moments, Tensor? scales, float scale, Tensor? ids, "
    "Tensor? g_picked, Tensor? entropy, Tensor? g_entropy, Tensor? g_lse, ScalarType dtype) -> Tensor",
    _new_statistics_gradient,
    lambda x, *rest: x.new_empty(x.shape, dtype=rest[-1]),
)
_smoothed_gradient = define(
    "parallel_smoothed_gradient(Tensor x, Tensor moments, Tensor ids, Tensor counts, Tensor a, Tensor b, Tensor? c, "
    "Tensor? weight, float? softcap) -> Tensor",
    _new_smoothed_gradient,
    lambda x, *rest: x.new_empty(x.shape),
)
not_differentiable("parallel_statistics_gradient")
not_differentiable("parallel_smoothed_gradient")


def buffer(x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Memory for what is written for rows x; None in a trace, where an operator returns memory of its own."""
    if torch.compiler.is_compiling():
        return None
    return gradient_buffer(x) if dtype is x.dtype else torch.empty(x.shape, dtype=dtype, device=x.device)


def statistics_gradient(
    x: Tensor, dx: Tensor | None, moments: Tensor, scale: float | Tensor, ids: Tensor | None, entropy: Tensor | None,
    g: Upstream, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of a row's numbers in these columns, in dx, which may be x; in a trace, new, in dtype or x's.

    ids: from the first of the columns.
    """
    scales, number = (scale, 1.0) if isinstance(scale, Tensor) else (None, scale)
    g_lse = moments.new_zeros(moments.shape[0]) if g.lse is None and g.picked is None else g.lse
    given = (x, moments, scales, number, ids, g.picked, entropy, g.entropy, g_lse)
    if dx is None:
        return _statistics_gradient(*given, x.dtype if dtype is None else dtype)
    _statistics_gradient_kernel(dx, *given)
    return dx


def smoothed_gradient(
    x: Tensor, dx: Tensor | None, moments: Tensor, ids: Tensor, counts: Tensor, a: Tensor, b: Tensor, c: Tensor | None,
    how: Smoothing,
) -> Tensor:  # fmt: skip
    """The gradient of a smoothed or capped loss in these columns, as `statistics_gradient`. ids: (n_rows, 1).

    a, b, c: (n_rows,), the formula's factors times the upstream gradient; c is None without smoothing.
    """
    given = (x, moments, ids, counts, a, b, c, how.weight, how.softcap)
    if dx is None:
        return _smoothed_gradient(*given)
    _smoothed_gradient_kernel(dx, *given)
    return dx


def loss_gradient(
    x: Tensor, dx: Tensor | None, moments: Tensor, ids: Tensor, counts: Tensor, f: Factors, weight: Tensor | None,
    shard: Shard, options: LossOptions,
) -> Tensor:  # fmt: skip
    """The gradient of a loss in a rank's columns, in dx, which may be x; in a trace, new, of one piece.

    ids: (n_rows, 1), from the first of the columns.
    """
    found = dx
    for columns, first in shard.pieces():
        at = ids - (first - shard.start) if first > shard.start else ids
        x_, dx_ = x[:, columns], None if dx is None else dx[:, columns]
        how = smoothing_of(options, weight, columns)
        if how is None:
            upstream = Upstream(picked=-f.b.unsqueeze(1), lse=f.of_lse)
            piece = statistics_gradient(x_, dx_, moments, 1.0, at, None, upstream)
        else:
            piece = smoothed_gradient(x_, dx_, moments, at, counts, f.a, f.b, f.c, how)
        found = piece if dx is None else dx
    assert found is not None
    return found
