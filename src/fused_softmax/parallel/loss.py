"""Cross-entropy's formulas of O(rows), for cross_entropy and linear_cross_entropy: from merged rows to the loss, and
from an upstream gradient to the factors of the logits' gradient.

    loss_i = -(1 - eps)*w_t*log p_t + eps/V*sum(w*(lse - z)) + z_loss*lse^2,   V columns of all ranks
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..torch_ops.arguments import LossOptions
from .merge import Rows, spread, surprise


class Targets(NamedTuple):
    """Where the rows' targets lie."""

    ids: Tensor  # (n_rows, 1), from the rank's first column; outside of its columns too
    counts: Tensor  # (n_rows,), whether the row counts


class Smoothing(NamedTuple):
    """How a rank's columns are capped, and whether the sum that label smoothing takes is needed."""

    softcap: float | None
    smooth: bool
    weight: Tensor | None  # of these columns, float32, where smoothing weighs them


def smoothing_of(options: LossOptions, weight: Tensor | None, columns: slice) -> Smoothing | None:
    """What a loss makes of these of the rank's columns besides their logsumexp; None for nothing."""
    smooth = options.label_smoothing > 0.0
    if not smooth and options.softcap is None:
        return None
    return Smoothing(options.softcap, smooth, weight[columns] if smooth and weight is not None else None)


class Factors(NamedTuple):
    """dx = p*a - c*w - [j = t]*b, each (n_rows,); c is None without smoothing."""

    a: Tensor
    b: Tensor
    c: Tensor | None
    of_lse: Tensor | None  # a's part of the z_loss

    def of_rows(self, rows: slice) -> Factors:
        """The factors of some of the rows."""
        c, of_lse = self.c, self.of_lse
        return Factors(
            self.a[rows], self.b[rows], None if c is None else c[rows], None if of_lse is None else of_lse[rows]
        )


def targets_of(target: Tensor, ignore_index: int, start: int, size: int, zero: Tensor) -> Targets:
    """Where the targets lie; on a GPU a target outside [0, size) is a device assertion, of torch.gather's.

    zero: one 0 on the device.
    """
    counts = target != ignore_index
    at = torch.where(counts, target, 0)
    if size and (target.is_cuda or torch.compiler.is_compiling()):
        found = zero.expand(size).gather(0, at)
        if torch.compiler.is_compiling():  # which drops what nothing uses
            at = at + found.to(at.dtype)
    return Targets((at - start).unsqueeze(1), counts)


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
    g: Tensor, moments: Tensor, counts: Tensor, weight: Tensor | None, total: Tensor | None, weight_sum: Tensor | None,
    options: LossOptions, size: int,
) -> Factors:  # fmt: skip
    """The factors for the upstream gradient g of the loss. weight_sum: of all columns, where there are weights."""
    g = g.to(moments.dtype)
    g = torch.where(counts, g if total is None else g / total, 0.0)
    eps, b, c = options.label_smoothing, g if weight is None else g * weight, None
    a, of_lse = b, None
    if eps:
        b, c = (1.0 - eps) * b, eps / size * g
        a = b + (c * size if weight_sum is None else c * weight_sum)
    if options.z_loss:
        lse = moments[:, 0] + moments[:, 1].log()
        # a row that does not count may be -inf
        of_lse = torch.where(counts, 2.0 * options.z_loss * lse * g, 0.0)
        a = a + of_lse
    return Factors(a, b, c, of_lse)
