"""The rule of accuracy, element by element, in tensors: nothing here waits for a device.

    error <= 2 x torch's own error + 4 x eps(float32) x scale + half an ulp of the output's dtype

torch's own error is its worst row's, in units of that row's scale. NaN and infinities are where torch has them, or
where float64 has them. A gradient's errors are also added up over each row: one large entry would hide the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EPS = torch.finfo(torch.float32).eps
# a number for a whole row comes from a sum in float32
ROW_EPS = 64 * EPS


@dataclass(frozen=True)
class Rule:
    """How one result is judged. `dims` are those of a row; () where each element is a row's number.

    scale: a row's (broadcasts), where that is not its largest result; size: what its entries are made of, added up,
    where that is a stored output. stores: how many times a bfloat16 number was
    stored on the way; in Triton's interpreter a store truncates and may cost an ulp.
    """

    dims: tuple[int, ...]
    scale: Tensor | None = None
    summed: bool = False
    size: float = 0.0
    stores: int = 1
    roundings: int = 0  # of numbers of the row's scale, in the output's dtype, by torch's formulas
    interpreted: bool = False
    coarsest: torch.dtype | None = None  # a dtype that a gradient went through
    # allowed in addition, for each element (broadcasts) and, added up, for a row
    extra: Tensor | None = None
    extra_sum: Tensor | None = None


def rounding(dtype: torch.dtype, rule: Rule) -> float:
    """What a store may cost, as a part of the number stored."""
    eps = torch.finfo(dtype).eps
    if dtype == torch.bfloat16 and rule.interpreted:
        return eps
    return eps / 2 if dtype in (torch.float16, torch.bfloat16) else 0.0


def wrong(got: Tensor, own: Tensor, ref: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """(which elements are wrong, error over what the rule allows), each with got's shape."""
    dtype = got.dtype
    coarsest = rule.coarsest or dtype
    got, own, ref = got.detach().double(), own.detach().double(), ref.detach().double()
    eps = torch.finfo(torch.float64).eps if dtype == torch.float64 else EPS
    finite = ref.isfinite()
    magnitude = ref.abs().where(finite, 0.0)
    if rule.dims:
        scale = magnitude.amax(rule.dims, keepdim=True) if ref.dim() else magnitude
        if rule.scale is not None:
            scale = torch.maximum(scale, rule.scale.where(rule.scale.isfinite(), 0.0))
    else:
        scale = magnitude
    own_error = (own - ref).abs().where(finite & own.isfinite(), 0.0)
    error = (got - ref).abs().where(got != ref, 0.0)
    once = rounding(dtype, rule)
    tiny = torch.finfo(torch.float32).tiny * 4 + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    if rule.dims:
        relative = (own_error / scale.where(scale > 0, 1.0)).amax() if ref.numel() else 0.0
        allowed = (2 * relative + 4 * eps) * scale
    else:
        worst = own_error.amax() if ref.numel() else 0.0
        allowed = 2 * worst + 4 * eps * scale + ROW_EPS * eps / EPS
        if rule.scale is not None:
            allowed = allowed + eps * rule.scale
    allowed = allowed + rule.roundings * rounding(coarsest, rule) * scale
    # what a store rounds is as far off as it may be
    stored = magnitude if rule.extra is None else magnitude + rule.extra
    if coarsest != dtype:
        allowed = allowed + rounding(coarsest, rule) * stored + torch.finfo(coarsest).smallest_normal
    if rule.interpreted and torch.bfloat16 in (dtype, coarsest):
        allowed = allowed + (rule.stores - 1) * torch.finfo(torch.bfloat16).eps * scale
    allowed = allowed + once * stored + tiny
    if rule.extra is not None:
        allowed = allowed + rule.extra
    same = (got == own) | (got.isnan() & own.isnan())
    bad = ~((error <= allowed) | same)
    excess = (error / allowed).masked_fill(same, 0.0)
    if rule.summed and rule.dims and ref.dim():
        total = error.where(finite & ~same, 0.0).sum(rule.dims, keepdim=True)
        size = magnitude.sum(rule.dims, keepdim=True) + rule.size
        of_own = own_error.sum(rule.dims, keepdim=True)
        steps = (rule.stores if rule.interpreted else 1) * rounding(coarsest, rule) + 4 * eps
        n = 1
        for d in rule.dims:
            n *= ref.shape[d]
        most = 2 * of_own + steps * size + 64 * eps * scale + n * tiny
        if rule.extra_sum is not None:
            most = most + (1 + steps) * rule.extra_sum
        bad = bad | (total > most) & finite
    return bad, excess
