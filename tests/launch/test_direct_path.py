"""The direct path without a GPU: prepared calls over CPU tensors that claim one, against torch in float64."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from tests.support.pretended_gpu import pretend

import fused_softmax as fs
from fused_softmax.launch.layout import allocator

pytestmark = pytest.mark.interpreted
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture
def launches(monkeypatch):
    return pretend(monkeypatch)


def logits(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


IDS = torch.tensor([3, 0, 10, 7, 4, 1])
KEEPS = logits(6, 11, seed=5) > -0.5
# (ours, torch's own way), for logits (n_rows, 11), n_rows up to 6
OPS = {
    "softmax": (lambda p, x: p.softmax(x, -1), lambda x: torch.softmax(x, -1)),
    "log_softmax": (lambda p, x: p.log_softmax(x, 1), lambda x: torch.log_softmax(x, 1)),
    "logsumexp": (lambda p, x: p.logsumexp(x, -1), lambda x: torch.logsumexp(x, -1)),
    "cross_entropy": (lambda p, x: p.cross_entropy(x, IDS[: len(x)]), lambda x: F.cross_entropy(x, IDS[: len(x)])),
    "token_logprobs": (
        lambda p, x: p.token_logprobs(x, IDS[: len(x)]),
        lambda x: torch.log_softmax(x, -1).gather(-1, IDS[: len(x), None]).squeeze(-1),
    ),
    "masked_softmax": (
        lambda p, x: p.masked_softmax(x, KEEPS[: len(x)]),
        lambda x: torch.softmax(x.masked_fill(~KEEPS[: len(x)], -float("inf")), -1),
    ),
}


def is_close(got, exact, dtype):
    return (got.double() - exact).abs().max() <= TOLERANCE[dtype] * exact.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("op", OPS)
def test_forward_and_backward_for_new_numbers_of_rows(launches, op, dtype):
    ours, own = OPS[op]
    kernels = []
    for n_rows, upstream in ((4, 1.0), (6, 0.25), (1, 1.0), (4, -2.0)):
        launches.clear()
        x = logits(n_rows, 11, dtype=dtype).requires_grad_()
        exact = x.detach().double().requires_grad_()
        y, z = ours(fs, x), own(exact)
        assert launches and is_close(y, z, dtype)
        g = upstream * torch.ones_like(y) if y.dim() < 2 else upstream * logits(n_rows, 11, seed=1).to(y.dtype)
        (dx,), (dz,) = torch.autograd.grad(y, x, g), torch.autograd.grad(z, exact, g.double())
        assert dx.dtype is dtype and is_close(dx, dz, dtype)
        kernels.append([name for name, *_ in launches])
    assert kernels[0] == kernels[1] == kernels[2] == kernels[3]


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize(
    "x, dim",
    [
        (logits(4, 33), 0),
        (logits(33, 4).t(), -1),
        (logits(2, 3, 16), -1),
        (logits(2, 16, 3), 1),
        (logits(6, 40)[::2, 1:20], 1),
        (logits(1, 40), 0),
        (logits(9, 1), -1),
        (logits(1, 64)[:, :16], -1),
        (logits(16), 0),
    ],
)
def test_any_dim_and_strides_also_with_dtype_and_out(launches, op, x, dim):
    function, own = getattr(fs, op), getattr(torch, op)
    exact = own(x.double(), dim)
    for _ in range(2):
        y = function(x, dim)
        assert y.is_contiguous() and is_close(y, exact, torch.float32)
        out = torch.full(x.shape, float("nan"))
        version = out._version
        assert function(x, dim, out=out) is out and is_close(out, exact, torch.float32)
        assert out._version > version
        half = x.bfloat16()
        assert is_close(function(half, dim, dtype=torch.float32), own(half.double(), dim), torch.float32)


def test_out_that_overlaps_in_part_is_written_after_all_is_read(launches):
    memory = logits(3 * 40)
    x, out = memory[:80].view(2, 40), memory[40:].view(2, 40)
    fs.softmax(logits(2, 40), -1, out=torch.empty(2, 40))  # the call is prepared
    exact = torch.softmax(x.double(), -1)
    assert is_close(fs.softmax(x, -1, out=out), exact, torch.float32)
    x = memory[:80].view(2, 40)
    exact = torch.softmax(x.double(), -1)
    assert is_close(fs.softmax(x, -1, out=x), exact, torch.float32)


def test_a_single_rows_stride_is_no_promise_for_more_rows(launches):
    x, out = logits(4, 64), torch.full((4, 64), float("nan"))
    for n_rows in (1, 3):
        rows, into = x[:n_rows, :16], out[:n_rows, :16]
        exact = torch.softmax(rows.double(), -1)
        assert is_close(fs.softmax(rows, -1), exact, torch.float32)
        assert is_close(fs.softmax(rows, -1, out=into), exact, torch.float32)
        y, dy = exact.float(), torch.ones(n_rows, 64)[:, :16]
        made = rows.detach().requires_grad_()
        (dx,) = torch.autograd.grad(fs.softmax(made, -1), made, dy)
        assert dx.abs().max() < 1e-6 and y.shape == dx.shape
    assert out[:, 16:].isnan().all() and out[3].isnan().all()


def test_batched_gradients_have_no_memory_and_take_the_dispatcher(launches):
    x = logits(2, 3).requires_grad_()
    exact = x.detach().double().requires_grad_()
    every = torch.eye(6).view(6, 2, 3)
    (jacobian,) = torch.autograd.grad(fs.softmax(x, -1), x, every, is_grads_batched=True)
    (wanted,) = torch.autograd.grad(torch.softmax(exact, -1), exact, every.double(), is_grads_batched=True)
    assert is_close(jacobian, wanted, torch.float32)


@pytest.mark.parametrize("op", ["logsumexp", "cross_entropy", "token_logprobs", "softmax", "masked_softmax"])
@pytest.mark.parametrize("upstream", [1.0, 0.25])
def test_hooks_may_give_saved_tensors_back_with_other_strides(launches, op, upstream):
    ours, own = OPS[op]
    x = logits(6, 11).requires_grad_()
    exact = x.detach().double().requires_grad_()
    transposed = lambda t: t.t().contiguous().t() if t.dim() == 2 else t.clone()  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), transposed):
        y = ours(fs, x)
    z = own(exact)
    g = upstream * logits(*y.shape, seed=1) if y.dim() else torch.tensor(upstream)
    (dx,), (dz,) = torch.autograd.grad(y, x, g), torch.autograd.grad(z, exact, g.double())
    assert is_close(dx, dz, torch.float32)


@pytest.mark.parametrize("op", ["cross_entropy", "token_logprobs", "linear_cross_entropy"])
def test_a_hook_that_changes_a_dtype_spoils_no_later_gradient(launches, op):
    """A prepared gradient takes addresses: targets in int32, or moments in float16, must not reach it."""
    weight = torch.eye(11)
    ours, own = OPS.get(op) or (
        lambda p, x: p.linear_cross_entropy(x, weight, IDS, reduction="none"),
        lambda x: F.cross_entropy(x, IDS, reduction="none"),
    )
    exact = logits(6, 11).double().requires_grad_()
    (dz,) = torch.autograd.grad(own(exact).sum() * 0.5, exact)

    def half(t):
        return t.int() if t.dtype is torch.int64 else t.half() if t.numel() < 40 else t

    for back in (half, lambda t: t, half):
        x = logits(6, 11).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, back):
            y = ours(fs, x).sum() * 0.5
        (dx,) = torch.autograd.grad(y, x)
        assert (dx - dz).abs().max() < 3e-3


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (1, 7), (3, 1), (0, 4), (3, 0), (2, 3, 5), (2, 1, 1)])
def test_gradients_of_tensors_of_any_rank(launches, op, shape):
    x = torch.randn(shape, requires_grad=True)
    leaf = x.detach().requires_grad_()
    y, expected = getattr(fs, op)(x, -1), getattr(torch, op)(leaf, -1)
    upstream = torch.randn(shape)
    y.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(x.grad, leaf.grad)


@pytest.mark.parametrize("op", OPS)
def test_cached_calls_keep_no_tensor_alive(launches, op):
    ours = OPS[op][0]
    for _ in range(2):  # prepared, then found in the cache
        x = logits(4, 11).requires_grad_()
        ours(fs, x).sum().backward()
        gone = weakref.ref(x)
        del x
        gc.collect()
        assert gone() is None


def test_an_allocator_keeps_no_tensor_alive():
    x = logits(2, 6000)
    new, gone = allocator(x), weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None and new((2, 3), (3, 1), torch.float64).shape == (2, 3)
