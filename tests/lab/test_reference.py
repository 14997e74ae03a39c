"""The float64 specification against torch's own float64 ops and autograd, and the naive passes' traffic as counted."""

from __future__ import annotations

import doctest
import math

import pytest
import torch
import torch.nn.functional as F

from fused_softmax.lab import reference

torch64 = {"rtol": 1e-12, "atol": 1e-14, "equal_nan": True}


def edge_rows() -> torch.Tensor:
    x = torch.randn(6, 33)
    x[1] = -math.inf
    x[2, 3] = math.inf
    x[3, 3] = math.nan
    x[4, :5] = -math.inf
    x[5] *= 1e30
    return x


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_agrees_with_torch_in_float64(name, dim):
    x = edge_rows()
    theirs = {"softmax": F.softmax, "log_softmax": F.log_softmax, "logsumexp": torch.logsumexp}[name]
    torch.testing.assert_close(getattr(reference, name)(x, dim), theirs(x.double(), dim), **torch64)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), ()], ids=str)
def test_empty_and_0_dim_keep_their_shape(shape):
    x = torch.randn(shape)
    torch.testing.assert_close(reference.softmax(x), F.softmax(x.double(), -1), **torch64)
    torch.testing.assert_close(reference.log_softmax(x), F.log_softmax(x.double(), -1), **torch64)


def test_dtype_casts_the_input_first():
    assert reference.softmax(torch.tensor([70000.0, 0.0]), dtype=torch.float16).isnan().all()


def test_right_beyond_2_to_24_columns():
    # float32 counts no further than 2^24 = 16,777,216 by ones
    y = reference.softmax(torch.zeros(1, 2**24 + 8, dtype=torch.float16))
    torch.testing.assert_close(y[0, :3], torch.full((3,), 1 / (2**24 + 8), dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_backward_is_autograd(name):
    x, dy = torch.randn(4, 9, dtype=torch.float64, requires_grad=True), torch.randn(4, 9, dtype=torch.float64)
    y = getattr(F, name)(x, -1)
    (dx,) = torch.autograd.grad(y, x, dy)
    torch.testing.assert_close(getattr(reference, f"{name}_backward")(dy, y.detach()), dx, **torch64)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_is_torchs(reduction, smoothing, weighted):
    logits, target = torch.randn(4, 9, dtype=torch.float64), torch.tensor([0, -100, 3, 8])
    weight = torch.rand(9, dtype=torch.float64) if weighted else None
    settings = {"ignore_index": -100, "reduction": reduction, "label_smoothing": smoothing}
    ours, theirs = (f(logits, target, weight, **settings) for f in (reference.cross_entropy, F.cross_entropy))
    torch.testing.assert_close(ours, theirs, **torch64)


def test_cross_entropy_of_small_integers_ignores_what_they_cannot_hold():
    logits, target = torch.randn(3, 5), torch.tensor([1, 2, 0])
    want = reference.cross_entropy(logits, target, softcap=1.0)
    got = reference.cross_entropy(logits, target.to(torch.uint8), ignore_index=2**40, softcap=1.0)
    assert torch.equal(got, want)


def test_cross_entropy_softcap_and_z_loss():
    logits, target = torch.randn(4, 9, dtype=torch.float64) * 30, torch.tensor([0, 1, 3, 8])
    capped = 5 * torch.tanh(logits / 5)
    expected = F.cross_entropy(capped, target) + 1e-2 * (torch.logsumexp(capped, 1) ** 2).mean()
    torch.testing.assert_close(reference.cross_entropy(logits, target, softcap=5.0, z_loss=1e-2), expected, **torch64)


def test_token_logprobs_and_masked_softmax():
    x, ids = torch.randn(2, 5, 5, dtype=torch.float64), torch.randint(5, (2, 5))
    expected = F.log_softmax(x / 0.7, -1).gather(-1, ids[..., None])[..., 0]
    torch.testing.assert_close(reference.token_logprobs(x, ids, temperature=0.7), expected, **torch64)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    expected = F.softmax((x * 0.5).masked_fill(hidden, -math.inf), -1)
    torch.testing.assert_close(reference.masked_softmax(x, scale=0.5, causal=True), expected, **torch64)
    none = torch.zeros(5, dtype=torch.bool)
    assert reference.masked_softmax(x, none).isnan().all()
    assert (reference.masked_softmax(x, none, fully_masked="zero") == 0).all()


@pytest.mark.parametrize("m, n", [(1, 1), (3, 1000), (17, 4)])
def test_naive_passes_move_what_they_are_said_to(m, n):
    x = torch.randn(m, n)
    passes = reference.traffic(reference.naive_softmax, x)
    assert [p.op for p in passes] == ["amax", "sub", "exp", "sum", "div"]
    assert sum(p.reads for p in passes) == 5 * m * n + 2 * m
    assert sum(p.writes for p in passes) == 3 * m * n + 2 * m
    torch.testing.assert_close(reference.naive_softmax(x).double(), reference.softmax(x), rtol=1e-5, atol=1e-7)


def test_examples_in_docstrings_run():
    assert doctest.testmod(reference).failed == 0
