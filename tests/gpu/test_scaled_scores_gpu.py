"""Scores near the largest numbers: scale*x is rounded once, before a row's maximum is subtracted."""

from __future__ import annotations

import pytest
import torch

import fused_softmax as fs

pytestmark = pytest.mark.gpu
MASKS = {"none": None, "boolean": torch.bool, "additive": torch.float32}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("n_cols", [3, 31, 200, 2154, 9000, 40_000, 2_000_003])
def test_as_torch_has_them(kind, n_cols):
    """One more rounding, or one less, is a factor of e or more at 2^26; beyond the largest float32 it is NaN."""
    torch.manual_seed(n_cols)
    mask = None
    if kind != "none":
        mask = torch.rand(n_cols, device="cuda") < 0.7
        mask[0] = True
        if kind == "additive":
            mask = torch.zeros(n_cols, device="cuda").masked_fill(~mask, -float("inf"))
    near = torch.randint(1 << 24, (1 << 24) + 5, (5, n_cols), device="cuda") * 4.0
    large = torch.full((5, n_cols), -3.3e38, device="cuda")
    large[2] = 3.3e38
    large[3, 0], large[4] = 3.3e38, 1e38
    for x, scale in ((near, 3.0), (near, 0.7), (large, 2.0), (large, 0.5)):
        z = x * scale
        if mask is not None:
            z = z.masked_fill(~mask, -float("inf")) if kind == "boolean" else z + mask
        for zero in ("nan", "zero"):
            unseen = (z == -float("inf")).all(-1, keepdim=True)
            want = torch.softmax(z, -1)
            want = want.masked_fill(unseen, 0.0) if zero == "zero" else want
            got = fs.masked_softmax(x, mask, scale=scale, fully_masked=zero)
            torch.testing.assert_close(got, want, rtol=2e-5, atol=0.0, equal_nan=True)
