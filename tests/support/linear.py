"""What the tests of linear losses share: inputs, torch's own way on all logits, and the rule of accuracy.

The rule: the norm of an error against float64 is at most twice that of torch's own error with logits of the same dtype,
plus some roundings of float32. Triton's interpreter truncates when it stores bfloat16, so it has three times as much.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from cases import INTERPRETED
from torch import Tensor

SLACK = 2e-6


def layer(
    n_rows: int, hidden: int, n_cols: int, dtype: torch.dtype, device: str = "cpu", bias: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states, weight and bias that need gradients; the logits have a standard deviation of 2."""
    x = torch.randn(n_rows, hidden, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(n_cols, hidden, device=device) * 2 / hidden**0.5).to(dtype).requires_grad_()
    return x, weight, torch.randn(n_cols, device=device).to(dtype).requires_grad_() if bias else None


def of_logits(loss: Any, dtype: torch.dtype, tensors: tuple[Tensor | None, ...], g: Tensor | None) -> list[Tensor]:
    """[what loss(logits) returns, the gradients of x, weight and bias], where all of it is computed in `dtype`."""
    leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in tensors]
    found = loss(F.linear(*leaves))
    given = [t for t in leaves if t is not None]
    upstream = None if g is None else g.to(found.dtype)
    return [found.detach(), *torch.autograd.grad(found, given, upstream)]


def error(got: Tensor, exact: Tensor) -> float:
    """The norm of the error over that of the exact result; inf where one has a NaN that the other has not."""
    got, exact = got.detach().double(), exact.double()
    if not torch.equal(got.isnan(), exact.isnan()):
        return float("inf")
    return ((got - exact).nan_to_num().norm() / exact.nan_to_num().norm().clamp(min=1e-30)).item()


def assert_as_torch(got: list[Tensor], torchs: list[Tensor], exact: list[Tensor], dtype: torch.dtype) -> None:
    allowed = 3.0 if INTERPRETED and dtype is torch.bfloat16 else 2.0
    for ours, own, reference_ in zip(got, torchs, exact, strict=True):
        assert ours.shape == reference_.shape
        found, torchs_own = error(ours, reference_), error(own, reference_)
        assert found <= allowed * torchs_own + SLACK, (found, torchs_own)
