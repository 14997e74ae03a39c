"""A loss writes its gradient for the upstream gradient that came last: right, and of equal bits, whatever comes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from tests.support.pretended_gpu import pretend
from torch.utils.checkpoint import checkpoint

import fused_softmax as fs
from fused_softmax.launch import last_upstream

pytestmark = pytest.mark.interpreted
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
IDS = torch.tensor([3, 2, -100, 9, 0, 7])


@pytest.fixture
def launches(monkeypatch):
    return pretend(monkeypatch)


def logits(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def is_close(got, exact, dtype=torch.float32):
    return (got.double() - exact).abs().max() <= TOLERANCE[dtype] * exact.abs().max()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "options", [{"z_loss": 0.01}, {"label_smoothing": 0.1, "z_loss": 0.01}, {"softcap": 5.0, "reduction": "sum"}]
)
@pytest.mark.parametrize("n_cols", [16, 37])
def test_a_forward_writes_the_gradient_for_the_last_upstream_gradient(launches, n_cols, options, dtype):
    made = {}
    losses, last = [], 1.0
    for upstream in (1.0, 0.3, 0.3, 1.0, -2.0, -2.0, 1.0):
        x = logits(6, n_cols, dtype=dtype).requires_grad_()
        loss = fs.cross_entropy(x, IDS, **options)
        written = loss.grad_fn.saved_tensors[-1].clone()
        first, second = (torch.autograd.grad(loss, x, torch.tensor(upstream), retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, written) == (upstream == last)
        assert torch.equal(first, second) and torch.equal(first, made.setdefault(upstream, first))
        losses.append(loss.detach())
        # with smoothing, backward's kernel may have other bits, and so none is expected
        last = 1.0 if "label_smoothing" in options else upstream
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    assert all(is_close(dx, made[1.0].double() * upstream, dtype) for upstream, dx in made.items())


def test_backwards_of_one_graph_take_other_upstream_gradients(launches):
    x = logits(6, 11).requires_grad_()
    exact = x.detach().double().requires_grad_()
    for g in (0.5, 0.5):
        loss, want = fs.cross_entropy(x, IDS), F.cross_entropy(exact, IDS)
        for upstream in (g, 1.0, g, 3.0):
            (dx,) = torch.autograd.grad(loss, x, torch.tensor(upstream), retain_graph=True)
            (dz,) = torch.autograd.grad(want, exact, torch.tensor(upstream).double(), retain_graph=True)
            assert is_close(dx, dz)


@pytest.mark.parametrize("upstream", [0.0, math.inf, math.nan])
def test_extreme_upstream_gradients_are_not_expected_again(launches, upstream):
    x = logits(6, 11).requires_grad_()
    for g in (upstream, upstream, 1.0):
        loss = fs.cross_entropy(x, IDS)
        assert is_close(
            loss.grad_fn.saved_tensors[-1], torch.autograd.grad(F.cross_entropy(x.double(), IDS), x)[0].double()
        )
        (dx,) = torch.autograd.grad(loss, x, torch.tensor(g))
        rows = dx[IDS != -100]
        assert rows.eq(0).all() if g == 0 else rows.isfinite().any() == math.isfinite(g)
        assert not dx[2].any()


def test_a_gradient_over_its_logits_is_for_1(launches):
    for _ in range(2):
        x, exact = (logits(6, 11).to(dtype).requires_grad_() for dtype in (torch.float32, torch.float64))
        loss = fs.cross_entropy(x.clone(), IDS, inplace_backward=True)
        (dx,) = torch.autograd.grad(loss, x, torch.tensor(0.5))
        assert is_close(dx, torch.autograd.grad(F.cross_entropy(exact, IDS), exact)[0] / 2)


def test_without_memory_of_the_host_gradients_are_for_1(launches, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert last_upstream.new_slot() is None
    x = logits(6, 11).requires_grad_()
    exact = x.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(F.cross_entropy(exact, IDS), exact)
    for upstream in (0.5, 0.5, 1.0):
        loss = fs.cross_entropy(x, IDS)
        assert is_close(loss.grad_fn.saved_tensors[-1], want)
        assert is_close(torch.autograd.grad(loss, x, torch.tensor(upstream))[0], want * upstream)


def test_a_recomputed_forward_may_expect_another_upstream_gradient(launches):
    x = logits(6, 16).requires_grad_()  # whose chunks lie alike
    exact = x.detach().double().requires_grad_()
    wanted = [F.cross_entropy(exact[i : i + 2], IDS[i : i + 2]) for i in (0, 2, 4)]
    for upstream in ((1.0, 0.25, 1.0), (0.25, 1.0, 0.25)):
        losses = [
            checkpoint(lambda x, i=i: fs.cross_entropy(x[i : i + 2], IDS[i : i + 2]), x, use_reentrant=False)
            for i in (0, 2, 4)
        ]
        # the backward of one chunk comes before the second forward of another
        (dx,) = torch.autograd.grad(sum(g * loss for g, loss in zip(upstream, losses, strict=True)), x)
        (dz,) = torch.autograd.grad(
            sum(g * loss for g, loss in zip(upstream, wanted, strict=True)), exact, retain_graph=True
        )
        assert is_close(dx, dz)
