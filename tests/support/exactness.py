"""The rule of accuracy for results that are more than one softmax: gradients, losses, attention.

error against float64 <= 2 x torch's own error + 4 x eps x scale, all over the whole tensor: scale is the largest number
that the result was made from. Triton's interpreter truncates where it stores bfloat16, so each such store that a result
went through may cost one more ulp of that scale.
"""

from __future__ import annotations

import torch
from cases import INTERPRETED


def assert_as_exact(
    got: torch.Tensor,
    own: torch.Tensor,
    want: torch.Tensor,
    *,
    eps: float = torch.finfo(torch.float32).eps,
    scale: float | None = None,
    bfloat16_stores: int = 1,
) -> None:
    """got is as close to want (float64) as own, PyTorch's result, within the rule; shape, dtype, NaN as own's."""
    assert got.shape == own.shape
    assert got.dtype == own.dtype
    if got.numel() == 0:
        return
    odd = ~own.isfinite()
    assert torch.equal(got[odd].nan_to_num(), own[odd].nan_to_num()), "other infinities than torch's"
    assert torch.equal(got.isnan(), own.isnan()), "other NaN than torch's"

    def largest(t: torch.Tensor) -> float:
        return t.masked_fill(odd, 0.0).abs().max().item()

    scale = max(largest(want), 0.0 if scale is None else scale)
    allowed = 2 * largest(own.double() - want) + 4 * eps * scale
    if INTERPRETED and got.dtype == torch.bfloat16:
        allowed += bfloat16_stores * torch.finfo(torch.bfloat16).eps * scale
    error = largest(got.double() - want)
    assert error <= allowed, f"error {error:.3g}, the rule allows {allowed:.3g}"
