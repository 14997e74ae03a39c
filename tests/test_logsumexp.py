"""logsumexp's kernels, which the operators call: against float64, over any dims, with gradients."""

from __future__ import annotations

import random

import pytest
import torch

import fused_softmax as fs
from fused_softmax.lab import reference
from fused_softmax.launch import logsumexp as over_planes
from fused_softmax.launch.device import device_of
from fused_softmax.launch.row_statistics import logsumexp_backward, logsumexp_forward

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n_cols", [1, 7, 255, 1000, 4097, 9000])
def test_against_float64(n_cols, dtype):
    x = (torch.randn(3, n_cols) * 4).to(dtype)
    want = reference.logsumexp(x)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(logsumexp_forward(x, (1,), False).double(), want, rtol=2 * eps, atol=2 * eps)
    g = torch.randn(3).to(dtype)
    dx = logsumexp_backward(g, x, want.float(), (1,))
    exact = g.double()[:, None] * (x.double() - want[:, None]).exp()
    torch.testing.assert_close(dx.double(), exact, rtol=4 * eps + 1e-5, atol=1e-6)


@pytest.mark.parametrize("dims", [(0,), (1,), (3,), (0, 1), (1, 3), (2, 3), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("keepdim", [False, True])
def test_dims(dims, keepdim):
    x = torch.randn(2, 3, 4, 5)
    for view in (x, x.transpose(0, 3), x[:, :, ::2]):
        leaf = view.detach().requires_grad_()
        want = torch.logsumexp(leaf, dims, keepdim)
        got = logsumexp_forward(view, dims, keepdim)
        torch.testing.assert_close(got, want.detach())
        g = torch.randn_like(want)
        dx = logsumexp_backward(g, view, got, dims)
        assert dx.is_contiguous()
        torch.testing.assert_close(dx, torch.autograd.grad(want, leaf, g)[0], rtol=1e-5, atol=1e-6)


AROUND = 1 << 14  # numbers around a tensor: more than a program's tile has


def _guarded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(a tensor, the memory around it): AROUND numbers of -7 in front of it and behind it."""
    size = torch.Size(shape).numel()
    memory = torch.full((size + 2 * AROUND,), -7.0, dtype=dtype)
    return memory[AROUND : AROUND + size].view(shape), memory


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.extended) for n in range(2, 8))])
def test_random_planes(seed):
    """Programs of several planes, of one, and of parts of one: next to float64, and nothing else is written."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    several, parts = 0, 0
    for _ in range(40):
        n_cols, inner = round(2 ** rng.uniform(0, 8)), round(2 ** rng.uniform(1, 7))
        if rng.random() < 0.15:
            n_cols, inner = rng.randint(1025, 2500), rng.randint(2, 12)
        outer = rng.randint(1, max(1, min(200, 20000 // (n_cols * inner))))
        dtype = rng.choice((torch.float32, torch.bfloat16))
        x, _ = _guarded((outer, n_cols, inner), dtype)
        x.copy_(torch.randn(x.shape, generator=generator) * 3)
        x[0, rng.randrange(n_cols)] = float("-inf")
        if n_cols == 1:
            x[0] = 0.5
        plan = over_planes.lse_plan(x, False, device_of(x))
        several, parts = several + (plan.outers > 1), parts + (plan.part_cols < n_cols)
        lse, memory = _guarded((outer, inner), dtype)
        over_planes._forward(x, lse)
        want, eps = torch.logsumexp(x.double(), 1), torch.finfo(dtype).eps
        torch.testing.assert_close(lse.double(), want, rtol=2 * eps, atol=2 * eps)
        assert (torch.cat((memory[:AROUND], memory[-AROUND:])) == -7).all(), "written outside of the output"

        g, _ = _guarded((outer, inner), dtype)
        g.copy_(torch.randn(g.shape, generator=generator))
        dx, memory = _guarded(x.shape, dtype)
        over_planes._backward(x, dx, lse.view(-1), g.view(-1))
        exact = g.double()[:, None] * (x.double() - lse.double()[:, None]).exp()
        torch.testing.assert_close(dx.double(), exact, rtol=4 * eps + 1e-5, atol=1e-6)
        assert (torch.cat((memory[:AROUND], memory[-AROUND:])) == -7).all(), "written outside of the gradient"
    assert several > 10 and parts > 0


@pytest.mark.parametrize("layout", ["steps", "cropped"])
def test_what_folds_to_nothing_is_copied_in_its_order(layout, monkeypatch):
    """Into rows it would be copied transposed."""
    wide = torch.randn(3, 5, 4, 18)
    x = (wide[..., ::2] if layout == "steps" else wide[..., :9]).requires_grad_()
    read: list[torch.Size] = []
    forward = over_planes._forward
    monkeypatch.setattr(over_planes, "_forward", lambda x, lse: (read.append(x.shape), forward(x, lse)))
    got = fs.logsumexp(x, 1)
    want = torch.logsumexp(x, 1)
    torch.testing.assert_close(got, want)
    assert read == [(3, 5, 36)]
    g = torch.randn_like(want)
    torch.testing.assert_close(*(torch.autograd.grad(lse, x, g)[0] for lse in (got, want)))
    assert fs.plan_for(x.detach(), 1, op="logsumexp").why.startswith("after a copy")
    assert fs.plan_for(x.detach(), 1, op="logsumexp", backward=True).why.startswith("after a copy")


def test_the_public_function_takes_these_kernels():
    x = torch.randn(4, 33, requires_grad=True)
    fs.logsumexp(x, -1).sum().backward()
    torch.testing.assert_close(x.grad, torch.softmax(x.detach(), -1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dim", (0, -1, (0, 2)))
def test_results_are_no_views(dim):
    """torch refuses to change or detach some views in place."""
    x = torch.randn(3, 4, 5)
    fs.logsumexp(x.clone().requires_grad_(), dim).add_(1)
    fs.logsumexp(x, dim).detach_()
    fs.cross_entropy(x[0], torch.tensor([0, 1, 2, 3]), reduction="none").detach_()
