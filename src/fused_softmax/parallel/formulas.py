"""The kernels' formulas in plain PyTorch: for float64, for tensors that no kernel takes, and without Triton.

z = softcap(x*scale). 16-bit logits are widened to float32, in memory of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..torch_ops.decompositions import capped, result_dtype


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


def local_ids(ids: Tensor, start: int, width: int) -> Tensor:
    """Ids of all columns as places among `width` columns from `start` on; -1 for others."""
    at = ids - start
    return torch.where((at >= 0) & (at < width), at, -1)


def picked(x: Tensor, local: Tensor, scale: float | Tensor, softcap: float | None) -> Tensor:
    """The logits z at local ids, 0 for -1, in float32 at least.  # local, result: (n_rows, n_picks)"""
    if not x.shape[1]:
        return torch.zeros(local.shape, dtype=result_dtype(x), device=x.device)
    z = capped(x.gather(1, local.clamp(min=0)), softcap) * _by_row(scale)
    return torch.where(local >= 0, z, 0.0)


def statistics_gradient(
    x: Tensor, moments: Tensor, scale: float | Tensor, ids: Tensor | None, g_picked: Tensor | None,
    entropy: Tensor | None, g_entropy: Tensor | None, g_lse: Tensor | None, start: int, size: int,
) -> Tensor:  # fmt: skip
    """dx in float32 at least of columns from `start` on of `size`. ids: (n_rows, n_picks), of all columns."""
    by_row = _by_row(scale)
    log_p = (capped(x, None) * by_row - moments[:, :1]) - moments[:, 1:].log()
    p = log_p.exp()
    a = torch.zeros_like(moments[:, :1]) if g_lse is None else g_lse.unsqueeze(1).to(p.dtype)
    inside = None
    if ids is not None and g_picked is not None:
        inside = torch.where((ids >= 0) & (ids < size), g_picked, 0.0).to(p.dtype)
        a = a - inside.sum(1, keepdim=True)
    if ids is not None or g_entropy is not None:
        # the log-probabilities of a row with +inf are NaN
        a = torch.where(moments[:, 1:] == float("inf"), float("nan"), a)
    dz = p * a
    if ids is not None and inside is not None:
        local = local_ids(ids, start, x.shape[1])
        dz = dz.scatter_add(1, local.clamp(min=0), torch.where(local >= 0, inside, 0.0))
    if g_entropy is not None and entropy is not None:
        dz = dz - g_entropy.unsqueeze(1) * p * (log_p.clamp(min=-1e4) + entropy.unsqueeze(1))
    return dz * by_row


def loss_gradient(
    x: Tensor, moments: Tensor, target: Tensor, counts: Tensor, factors: Tensor, weight: Tensor | None, start: int,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    """dx in float32 at least of columns from `start` on, whose weights are `weight`; 0 in rows that do not count."""
    a, b, c = factors.to(moments.dtype).split(1, 1)
    z = capped(x, softcap)
    dz = (z - moments[:, :1]).exp() * (a / moments[:, 1:]) - (c if weight is None else c * weight.to(z.dtype))
    local = local_ids(target, start, x.shape[1]).unsqueeze(1)
    dz = dz.scatter_add(1, local.clamp(min=0), torch.where(local >= 0, -b, 0.0))
    if softcap is not None:
        u = (capped(x, None) / softcap).clamp(-40.0, 40.0)
        dz = (dz * u.cosh().reciprocal().square()).masked_fill(z == -float("inf"), 0.0)
    return torch.where(counts.unsqueeze(1), dz, 0.0)
