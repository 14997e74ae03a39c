"""The front of the direct path: what a guard of tensors tells apart, and calls that are like recent ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.launch.test_direct_path import is_close, logits
from tests.support.pretended_gpu import pretend
from torch.autograd import forward_ad
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

import fused_softmax as fs
from fused_softmax.launch import recent_calls, recent_softmax
from fused_softmax.launch.torch_private import is_watched, tensor_guard

pytestmark = pytest.mark.interpreted


class Subclass(torch.Tensor):
    pass


@pytest.fixture
def launches(monkeypatch):
    return pretend(monkeypatch)


def guard(*tensors, any_rows=True):
    check = tensor_guard(tensors, any_rows)
    assert check is not None
    return check


def test_a_guard_takes_any_number_of_rows():
    x = torch.zeros(4, 6)
    check = guard(x)
    assert check(x) and check(torch.ones(9, 6)) and check(torch.zeros(0, 6)) and check(x[1:2])
    assert guard(x, any_rows=False)(x) and not guard(x, any_rows=False)(torch.ones(9, 6))


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(4, 7),
        torch.zeros(4, 6, dtype=torch.float64),
        torch.zeros(4, 6, dtype=torch.float16),
        torch.zeros(4, 12)[:, ::2],
        torch.zeros(4, 8)[:, :6],
        torch.zeros(6, 4).t(),
        torch.zeros(4, 6, 1),
        torch.zeros(6),
        torch.zeros(4, 6, requires_grad=True),
        torch.zeros(4, 6, device="meta"),
        torch.zeros(4, 6).as_subclass(Subclass),
        torch.nn.Parameter(torch.zeros(4, 6), requires_grad=False),
        torch._neg_view(torch.zeros(4, 6)),
        torch.zeros(4, 6, dtype=torch.complex64).conj(),
        torch.zeros(4, 6).to_sparse(),
        torch._efficientzerotensor(4, 6),
    ],
)
def test_a_guard_tells_tensors_apart(other):
    assert not guard(torch.zeros(4, 6))(other)


def test_a_guard_of_several_takes_none_twice():
    x, y = torch.zeros(4, 6), torch.zeros(4, 6)
    check = guard(x, y)
    assert check(x, y) and check(y, x)
    assert not check(x, x)


def test_a_guard_sees_what_sees_a_call():
    x, seen = torch.zeros(4, 6), []
    check = guard(x)

    def under_vmap(row):
        seen.append(check(x))
        return row

    with TorchDispatchMode():
        seen.append(check(x))
    with torch.autocast("cpu"):
        seen.append(check(x))
    with torch.inference_mode():
        seen.append(check(torch.zeros(4, 6)))
    torch.vmap(under_vmap)(x)
    torch.func.grad(lambda z: under_vmap(z).sum())(x)
    torch.jit.trace(under_vmap, (torch.zeros(2),), check_trace=False)
    assert seen == [False] * 6 and check(x)


def test_what_a_guard_does_not_see():
    assert not is_watched()
    with forward_ad.dual_level():
        assert is_watched()
    with profile():
        assert is_watched()
    assert not is_watched()


def test_a_torch_without_guards_takes_the_full_key(launches, monkeypatch):
    monkeypatch.setattr(recent_calls, "tensor_guard", lambda tensors, any_rows: None)
    x = logits(4, 11)
    for _ in range(2):
        assert is_close(fs.softmax(x, -1), torch.softmax(x.double(), -1), torch.float32)
    assert len(launches) == 2 and not recent_softmax._forwards


def test_a_key_keeps_its_first_calls_and_others_are_right_too(launches):
    memory = logits(1, 4 * 64)
    for shift in range(2 * recent_calls.MOST):
        x = memory[0, shift : shift + 44].view(4, 11)
        for _ in range(2):
            assert is_close(fs.softmax(x, -1), torch.softmax(x.double(), -1), torch.float32)
    assert len(launches) == 4 * recent_calls.MOST
    assert [len(entries) for entries in recent_softmax._forwards.values()] == [recent_calls.MOST]


def test_calls_of_one_width_in_turn(launches):
    """Rows, strides, dtypes, gradients, dims and options that share a width get each their own call."""
    wide, xs = logits(6, 40), []
    for n in (4, 1):
        xs += [logits(n, 11, seed=n), wide[:n, :11], wide[:n, 1:12], logits(n, 11, dtype=torch.bfloat16)]
    xs += [logits(11, 5).t(), logits(6, 11).requires_grad_(), logits(0, 11)]
    for _ in range(2):
        for x in xs:
            for dim, dtype in ((-1, None), (1, torch.float32), (0, None)):
                y, exact = fs.log_softmax(x, dim, dtype), torch.log_softmax(x.detach().double(), dim)
                assert y.shape == x.shape and y.dtype is (dtype or x.dtype) and y.requires_grad == x.requires_grad
                assert not x.numel() or is_close(y.detach(), exact, x.dtype)
        with torch.no_grad():
            assert not fs.log_softmax(xs[-2], -1).requires_grad
        with fs.batch_invariant():
            assert is_close(fs.log_softmax(xs[2], -1), torch.log_softmax(xs[2].double(), -1), torch.float32)


def test_out_of_one_width_in_turn(launches):
    x, wide = logits(6, 11), logits(7, 11)
    trained = x.clone().requires_grad_()
    for _ in range(3):
        for n in (6, 3, 1, 0):
            out = torch.full((n, 11), 7.0)
            version = out._version
            assert fs.softmax(x[:n], -1, out=out) is out and out._version == version + 1
            assert n == 0 or is_close(out, torch.softmax(x[:n].double(), -1), torch.float32)
        resized = torch.empty(0, 11)
        assert fs.softmax(x, -1, out=resized).shape == x.shape
        over = wide.clone()
        fs.softmax(over[:6], -1, out=over[1:])
        assert is_close(over[1:], torch.softmax(wide[:6].double(), -1), torch.float32)
        same = x.clone()
        assert torch.equal(fs.softmax(same, -1, out=same), fs.softmax(x, -1))
        own, out = torch.empty(6, 11), torch.empty(6, 11)
        launches.clear()
        torch.softmax(trained, -1, out=own)
        assert fs.softmax(trained, -1, out=out).requires_grad == own.requires_grad and not launches
        with pytest.raises(RuntimeError):
            fs.softmax(x, -1, out=torch.empty(6, 11, dtype=torch.float64))


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_gradients_of_one_width_in_turn(launches, op):
    for _ in range(2):
        for n, seed in ((4, 0), (6, 1), (1, 2)):
            x, g = logits(n, 11, seed=seed).requires_grad_(), logits(n, 11, seed=9)
            exact = x.detach().double().requires_grad_()
            for upstream in (g, logits(11, n, seed=9).t(), torch.ones(1).expand(n, 11)):
                (dx,) = torch.autograd.grad(getattr(fs, op)(x, -1), x, upstream)
                (dz,) = torch.autograd.grad(getattr(torch, op)(exact, -1), exact, upstream.double())
                assert is_close(dx, dz, torch.float32) or dz.abs().max() < 1e-6


def test_a_hook_that_gives_back_fewer_rows_is_an_error_and_reads_no_more(launches):
    for pack in (lambda t: t, lambda t: t[:2]):
        x = logits(4, 11).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = fs.softmax(x, -1)
        launches.clear()
        if pack(y).shape == y.shape:
            y.backward(torch.ones_like(y))
        else:
            with pytest.raises(RuntimeError, match="shape"):
                y.backward(torch.ones_like(y))
            assert [args[3] for _, _, args in launches] == [2]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_of_one_layout_in_turn(launches, reduction):
    for smoothing in (0.0, 0.1, 0.0):
        options = dict(reduction=reduction, label_smoothing=smoothing, ignore_index=2)
        for n, upstream in ((4, 1.0), (6, 0.5), (2, -1.0)):
            x, ids = logits(n, 11, seed=n).requires_grad_(), torch.arange(n) % 5
            exact = x.detach().double().requires_grad_()
            loss, z = fs.cross_entropy(x, ids, **options), F.cross_entropy(exact, ids, **options)
            assert is_close(loss.detach(), z.detach(), torch.float32)
            for again in (True, False):  # a further backward of one graph makes its gradient anew
                (dx,) = torch.autograd.grad(loss, x, torch.tensor(upstream), retain_graph=again)
                (dz,) = torch.autograd.grad(z, exact, torch.tensor(upstream).double(), retain_graph=again)
                assert is_close(dx, dz, torch.float32)
                dx.zero_()


def test_a_hook_that_gives_back_other_logits_of_a_loss(launches):
    x, ids = logits(4, 11).requires_grad_(), torch.tensor([1, 0, 3, 10])
    fs.cross_entropy(x, ids).backward()
    wanted, x.grad = x.grad, None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loss = fs.cross_entropy(x, ids)
    loss.backward()
    assert torch.equal(x.grad, wanted)
