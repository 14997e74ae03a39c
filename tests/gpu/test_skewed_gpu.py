"""Random softmaxes over columns that start anywhere, and their gradients, large enough for skewed tiles on a GPU."""

from __future__ import annotations

import random

import pytest
import torch

import fused_softmax as fs

pytestmark = pytest.mark.gpu

GUARD = 512  # elements before and after the output


def guarded(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of NaN, and the memory around it, which holds 7."""
    n = shape[0] * shape[1] * shape[2]
    memory = torch.full((n + 2 * GUARD,), 7.0, device="cuda", dtype=dtype)
    inside = memory[GUARD : GUARD + n].view(shape)
    inside.fill_(float("nan"))
    return inside, memory


def expect_untouched(memory: torch.Tensor) -> None:
    assert (memory[:GUARD] == 7).all() and (memory[-GUARD:] == 7).all(), "written outside the output"


def check_random(seed: int) -> bool:
    """Checks one random problem; whether its tiles are skewed."""
    rng = random.Random(seed)
    dtype = rng.choice((torch.bfloat16, torch.float16, torch.float32))
    n_cols = round(2 ** rng.uniform(2.8, 12.3))
    inner = rng.choice((rng.randint(512, 1200), rng.randint(1024, 9000), 8 * rng.randint(128, 1100)))
    outer = max(1, min(rng.randint(1, 5), (1 << 24) // (n_cols * inner)))
    log, shape = rng.random() < 0.4, (outer, n_cols, inner)
    torch.manual_seed(seed)
    more = rng.choice((0, 0, 0, 1, 8, 16))  # elements behind each column, or none
    x = torch.randn(outer, n_cols, inner + more, device="cuda").mul_(3).to(dtype)[..., :inner]
    x[0, 1, 0] = -float("inf")
    ours, torchs = (fs.log_softmax, torch.log_softmax) if log else (fs.softmax, torch.softmax)
    eps = torch.finfo(dtype).eps

    y, memory = guarded(shape, dtype)
    ours(x, 1, out=y)
    expect_untouched(memory)
    exact = torchs(x.double(), 1)
    assert torch.allclose(y.double(), exact, rtol=2 * eps + 2e-6, atol=3e-6 * (1 + log)), (seed, shape, dtype, log)
    assert torch.equal(ours(x[:1], 1), y[:1]), f"bits depend on outer: {(seed, shape, dtype, log)}"

    x[0, 1, 0] = 0.0
    leaf = x.detach().requires_grad_()
    dy = torch.randn(shape, device="cuda").to(dtype)
    result = ours(leaf, 1)
    result.backward(dy)
    g, p = dy.double(), result.detach().double()
    want = g - p.exp() * g.sum(1, keepdim=True) if log else p * (g - (g * p).sum(1, keepdim=True))
    if log:  # what a sum of n numbers is rounded by grows as their norm; torch's own error is as large
        scale = g.abs() + p.exp() * (1 + (g * g).sum(1, keepdim=True).sqrt())
    else:
        scale = p * (1 + g.abs() + (g * p).abs().sum(1, keepdim=True))
    within = (leaf.grad.double() - want).abs() <= (3e-6 + 2 * eps) * scale + 1e-7
    assert within.all(), ("gradient", seed, shape, dtype, log)
    return bool(fs.plan_for(x.detach(), dim=1).skewed)


def test_random_columns():
    skewed = sum(check_random(seed) for seed in range(12))
    assert skewed >= 6, f"{skewed} of 12 plans are skewed"
