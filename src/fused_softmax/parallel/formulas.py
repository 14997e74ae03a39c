"""The kernels' formulas in plain PyTorch: for float64, for tensors that no kernel takes, and without Triton.

z = softcap(x*scale). 16-bit logits are widened to float32, in memory of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..torch_ops.decompositions import capped


def statistics(x: Tensor, scale: float | Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
    """((row_max, row_sum), (n_rows, 2); the entropy over these columns, (n_rows,), or nothing)."""
    z = capped(x, None) * _by_row(scale)
    moments = _moments(z)
    if not entropy:
        return moments, moments.new_empty(0)
    if not x.shape[1]:
        return moments, moments.new_zeros(x.shape[0])
    # (z - row_max)*exp(z - row_max) is 0 at -inf
    d = (z - moments[:, :1]).clamp(min=torch.finfo(z.dtype).min)
    return moments, moments[:, 1].log() - (d.exp() * d).sum(1) / moments[:, 1]


def smoothed(x: Tensor, weight: Tensor | None, softcap: float | None, smooth: bool) -> tuple[Tensor, Tensor]:
    """((row_max, row_sum) of capped logits; the sum of w*(lse - z) over these columns, or nothing)."""
    z = capped(x, softcap)
    moments = _moments(z)
    if not smooth:
        return moments, moments.new_empty(0)
    above = (moments[:, :1] + moments[:, 1:].log()) - z
    return moments, (above if weight is None else above * weight.to(z.dtype)).sum(1)


def _moments(z: Tensor) -> Tensor:
    """(row_max, row_sum), as the kernels have them: row_max is finite or NaN.  # (n_rows, 2)"""
    limits = torch.finfo(z.dtype)
    if not z.shape[1]:
        return z.new_tensor([limits.min, 0.0]).expand(z.shape[0], 2).contiguous()
    row_max = z.amax(1, keepdim=True).clamp(limits.min, limits.max)
    return torch.cat((row_max, (z - row_max).exp().sum(1, keepdim=True)), 1)


def _by_row(scale: float | Tensor) -> float | Tensor:
    return scale.unsqueeze(1) if isinstance(scale, Tensor) else scale


def statistics_gradient(
    x: Tensor, moments: Tensor, scale: float | Tensor, ids: Tensor | None, g_picked: Tensor | None,
    entropy: Tensor | None, g_entropy: Tensor | None, g_lse: Tensor,
) -> Tensor:  # fmt: skip
    """dx in float32 at least; g_lse is without the gradients of ids in other columns."""
    by_row = _by_row(scale)
    log_p = (capped(x, None) * by_row - moments[:, :1]) - moments[:, 1:].log()
    p, a = log_p.exp(), g_lse.unsqueeze(1)
    if ids is not None or g_entropy is not None:
        # the log-probabilities of a row with +inf are NaN
        a = torch.where(moments[:, 1:] == float("inf"), float("nan"), a)
    dz = p * a
    if ids is not None and g_picked is not None:
        at = ids.clamp(0, x.shape[1] - 1)
        inside = torch.where(at == ids, g_picked, 0.0).to(p.dtype)
        dz = (dz - p * inside.sum(1, keepdim=True)).scatter_add(1, at, inside)
    if g_entropy is not None and entropy is not None:
        dz = dz - g_entropy.unsqueeze(1) * p * (log_p.clamp(min=-1e4) + entropy.unsqueeze(1))
    return dz * by_row


def smoothed_gradient(
    x: Tensor, moments: Tensor, a: Tensor, c: Tensor | None, weight: Tensor | None, softcap: float | None,
    b: float | Tensor = 0.0,
) -> Tensor:  # fmt: skip
    """dx in float32 at least of columns x, whose weights are `weight`."""
    z = capped(x, softcap)
    dz = (z - moments[:, :1]).exp() * (a.unsqueeze(1) / moments[:, 1:]) - b
    if c is not None:
        dz = dz - (c.unsqueeze(1) if weight is None else c.unsqueeze(1) * weight.to(z.dtype))
    if softcap is not None:
        u = (capped(x, None) / softcap).clamp(-40.0, 40.0)
        dz = (dz * u.cosh().reciprocal().square()).masked_fill(z == -float("inf"), 0.0)
    return dz
