"""Cross-entropy's formulas of O(rows), for cross_entropy and linear_cross_entropy: from merged rows to the loss, and
from an upstream gradient to the factors of the logits' gradient.

    loss_i = -(1 - eps)*w_t*log p_t + eps/V*sum(w*(lse - z)) + z_loss*lse^2,   V columns of all ranks
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..torch_ops.arguments import LossOptions
from .merge import Rows, spread, surprise


def loss_of(
    rows: Rows, z: Tensor, weight: Tensor | None, spreads: Tensor | None, weights: Tensor, counts: Tensor,
    options: LossOptions, size: int,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(the loss, reduced; what a mean divides by, of no dimensions, or None).

    z: (n_rows,), the targets' logits; weight: (n_rows,), their weights; spreads, weights: as `merge.spread` takes them.
    """
    eps = options.label_smoothing
    loss = surprise(rows, z)
    if weight is not None:
        loss = loss * weight
    if eps:
        assert spreads is not None
        loss = (1.0 - eps) * loss + eps / size * spread(rows, spreads, weights)
    if options.z_loss:
        loss = loss + options.z_loss * rows.lse.square()
    loss = torch.where(counts, loss, 0.0)
    if options.reduction == "none":
        return loss, None
    if options.reduction == "sum":
        return loss.sum(), None
    total = counts.sum(dtype=loss.dtype) if weight is None else torch.where(counts, weight, 0.0).sum()
    mean = loss.sum() / total
    return (mean if weight is None else torch.where(total == 0.0, float("nan"), mean)), total


def factors_of(
    g: Tensor, moments: Tensor, counts: Tensor, weights: Tensor | None, count: Tensor | None,
    weight_sum: Tensor | None, options: LossOptions, size: int,
) -> Tensor:  # fmt: skip
    """(a, b, c) of dx = p*a - c*w - [j = t]*b for the upstream gradient g of the loss.  # (n_rows, 3)

    weights: (n_rows,), of targets; count: what a mean divides by; weight_sum: of all columns, where there are weights.
    """
    g = g.to(moments.dtype)
    g = torch.where(counts, g if count is None else g / count, 0.0)
    eps, b = options.label_smoothing, g if weights is None else g * weights
    a, c = b, torch.zeros_like(b)
    if eps:
        b, c = (1.0 - eps) * b, eps / size * g
        a = b + (c * size if weight_sum is None else c * weight_sum)
    if options.z_loss:
        lse = moments[:, 0] + moments[:, 1].log()
        # a row that does not count may be -inf
        a = a + torch.where(counts, 2.0 * options.z_loss * lse * g, 0.0)
    return torch.stack((a, b, c), 1)
