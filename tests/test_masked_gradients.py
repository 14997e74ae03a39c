"""The gradient of masked_softmax where a row sees nothing, holds NaN, or is sent an infinity: torch's masked_fill.

What a boolean mask or causality hides has a gradient of exactly 0, in every way in.
"""

from __future__ import annotations

import pytest
import torch

import fused_softmax as fs

pytestmark = pytest.mark.interpreted

INF, NAN = float("inf"), float("nan")
MASKS = ["bool", "one value a query", "one value a column", "every second column", "additive", "none"]
# narrow, unaligned, and on a cluster; rows that do not fit on chip have kernels of their own
WIDTHS = [8, 37, 5001]


def mask_of(kind: str, n_rows: int, n_cols: int) -> torch.Tensor | None:
    keep = torch.rand(n_rows, n_cols) > 0.4
    keep[0] = False
    if kind == "one value a query":
        return keep[:, 1:2]
    if kind == "one value a column":
        return keep[1:2]
    if kind == "every second column":
        return keep.repeat_interleave(2, 1)[:, ::2]
    if kind == "additive":
        return torch.where(keep, torch.randn(n_rows, n_cols), -INF)
    return None if kind == "none" else keep


def theirs(x: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
    z = x * 0.5
    if mask is not None:
        z = z.masked_fill(~mask, -INF) if mask.dtype is torch.bool else z + mask
    if causal:
        z = z.masked_fill(torch.ones(z.shape[-2:], dtype=torch.bool).triu(1), -INF)
    return torch.softmax(z, -1)


def scores(n_rows: int, n_cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x with a NaN, a +inf and a row of -inf, and an upstream gradient with a NaN and an infinity."""
    x, dy = torch.randn(2, n_rows, n_cols)
    x[1, 0], x[2, 1], x[3] = NAN, INF, -INF
    dy[4, 0], dy[5, 2] = NAN, -INF
    return x, dy


@pytest.mark.sampled(3)
@pytest.mark.parametrize("n_cols", WIDTHS)
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("kind", MASKS)
def test_against_torch(kind, causal, n_cols):
    x, dy = scores(8, n_cols)
    mask = mask_of(kind, 8, n_cols)
    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(theirs(leaf, mask, causal), leaf, dy)
    for dtype in (torch.float32, torch.float64):
        leaf = x.to(dtype).requires_grad_()
        y = fs.masked_softmax(leaf, mask, scale=0.5, causal=causal)
        (got,) = torch.autograd.grad(y, leaf, dy.to(dtype), retain_graph=True)
        torch.testing.assert_close(got.float(), want, equal_nan=True, atol=1e-6, rtol=1e-5)
        (again,) = torch.autograd.grad(y, leaf, dy.to(dtype), create_graph=True)
        torch.testing.assert_close(again.float(), want, equal_nan=True, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("kind", ["bool", "one value a query", "additive"])
def test_the_operator(kind, causal):
    x, dy = scores(8, 37)
    mask, leaf = mask_of(kind, 8, 37), x.clone().requires_grad_()
    (want,) = torch.autograd.grad(theirs(leaf, mask, causal), leaf, dy)
    (got,) = torch.autograd.grad(torch.ops.fused_softmax.masked_softmax(leaf, mask, 0.5, causal, False), leaf, dy)
    torch.testing.assert_close(got, want, equal_nan=True, atol=1e-6, rtol=1e-5)


def test_a_padded_row_does_not_poison_the_others():
    """What a projection before the scores gets of a row that sees nothing is 0, so its weight has no NaN."""
    q, k = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    keep = torch.ones(4, 4, dtype=torch.bool)
    keep[2] = False
    y = fs.masked_softmax(q @ k.t(), keep)
    y[keep.any(1)].square().sum().backward()
    assert q.grad.isfinite().all() and k.grad.isfinite().all() and not q.grad[2].any()
