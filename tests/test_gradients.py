"""Gradients, and their gradients: numerically in float64, and the kernels' against float64 by the rule."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, dtype_id, logits
from exactness import assert_as_exact
from torch.autograd import gradcheck, gradgradcheck

import fused_softmax as fs
from fused_softmax.launch import softmax as rows
from fused_softmax.launch.device import describe
from fused_softmax.launch.layout import problem_of
from fused_softmax.launch.softmax import softmax_launch
from fused_softmax.planning.rows import WARP_MAX_COLS
from fused_softmax.planning.softmax import plan
from fused_softmax.planning.types import REGIMES

pytestmark = pytest.mark.interpreted

INF = float("inf")
ops = torch.ops.fused_softmax
OPERATORS = [ops.softmax, ops.log_softmax]
PAIRS = [(fs.softmax, torch.softmax), (fs.log_softmax, torch.log_softmax)]
both = pytest.mark.parametrize(("ours", "torchs"), PAIRS, ids=["softmax", "log_softmax"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
either_log = pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])


def double(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


# --- the formulas, numerically: float64 goes through our autograd and torch's kernels ---------------------------------


@pytest.mark.parametrize("operator", OPERATORS, ids=["softmax", "log_softmax"])
@pytest.mark.parametrize(("shape", "dim"), [((3, 4), -1), ((3, 4), 0), ((2, 3, 2), 1), ((), 0), ((5,), 0), ((3, 1), 1)])
def test_gradcheck_in_float64(operator, shape, dim):
    x = double(*shape)
    assert gradcheck(lambda x: operator(x, dim), x)
    assert gradgradcheck(lambda x: operator(x, dim), x)


@pytest.mark.parametrize("operator", [ops.softmax_backward, ops.log_softmax_backward], ids=["softmax", "log_softmax"])
def test_gradcheck_of_the_backward_operators(operator):
    """They are functions of dy and y, whatever y came from; three times over."""
    arguments = (double(3, 4), double(3, 4))
    assert gradcheck(lambda dy, y: operator(dy, y, -1, torch.float64), arguments)
    assert gradgradcheck(lambda dy, y: operator(dy, y, -1, torch.float64), arguments)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(("shape", "dims"), [((3, 4), [1]), ((2, 3, 2), [0, 2]), ((2, 3), [0, 1]), ((), [0])])
def test_gradcheck_of_logsumexp(shape, dims, keepdim):
    x = double(*shape)
    assert gradcheck(lambda x: ops.logsumexp(x, dims, keepdim), x)
    assert gradgradcheck(lambda x: ops.logsumexp(x, dims, keepdim), x)


@pytest.mark.extended
@both
@pytest.mark.filterwarnings("ignore:.*not a double precision:UserWarning")
def test_gradcheck_through_the_kernels(ours, torchs):
    """float32, so loose: the kernels themselves, and what is differentiated on their results."""
    for shape, dim in (((2, 6), -1), ((4, 3), 0)):
        x = torch.randn(*shape, requires_grad=True)
        assert gradcheck(lambda x, dim=dim: ours(x, dim), x, eps=1e-2, atol=2e-3, rtol=2e-2)
        assert gradgradcheck(lambda x, dim=dim: ours(x, dim), x, eps=1e-2, atol=5e-3, rtol=5e-2)


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:.*not a double precision:UserWarning")
def test_gradcheck_of_logsumexp_through_the_kernels():
    x = torch.randn(3, 5, requires_grad=True)
    for dim in (1, (0, 1)):
        assert gradcheck(lambda x, dim=dim: fs.logsumexp(x, dim), x, eps=1e-2, atol=2e-3, rtol=2e-2)
        assert gradgradcheck(lambda x, dim=dim: fs.logsumexp(x, dim), x, eps=1e-2, atol=5e-3, rtol=5e-2)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=dtype_id)
def test_double_backward_agrees_with_torchs(ours, torchs, dtype):
    x = torch.randn(3, 6).to(dtype)
    dy = torch.randn(3, 6).to(dtype)

    def penalty(function, x):
        x = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(function(x, -1), x, dy.to(x.dtype), create_graph=True)
        return torch.autograd.grad((dx**2).sum(), x)[0]

    want = penalty(torchs, x.double())
    eps = torch.finfo(dtype).eps
    assert_as_exact(penalty(ours, x), penalty(torchs, x), want, eps=eps, scale=dy.abs().max().item() ** 2)


# --- the kernels ------------------------------------------------------------------------------------------------------


def judged(dx: torch.Tensor, dy: torch.Tensor, y: torch.Tensor, dim: int, log: bool) -> None:
    """dx, of the output's own numbers y, beside torch's kernel and float64."""
    own = torch._log_softmax_backward_data if log else torch._softmax_backward_data
    want = own(dy.double(), y.double(), dim, torch.float64)
    p = y.double().exp() if log else y.double()
    terms = (p * dy.double().sum(dim, keepdim=True), dy.double()) if log else (p * dy.double(), p)
    scale = max(t.nan_to_num(0, 0, 0).abs().max().item() if t.numel() else 0.0 for t in terms)
    assert_as_exact(dx, own(dy, y, dim, y.dtype).to(dx.dtype), want, scale=scale)


@pytest.mark.sampled(3)
@either_log
@every_dtype
@pytest.mark.parametrize("n_cols", [1, 2, 31, 33, 1000, 1023, 4097])
def test_every_regime(n_cols, dtype, log):
    for regime in REGIMES:
        if regime == "warp" and n_cols > WARP_MAX_COLS:
            continue
        for n_rows in (1, 3):
            x, dy = logits(n_rows, n_cols, dtype=dtype), torch.randn(n_rows, n_cols).to(dtype)
            y = torch.log_softmax(x, -1) if log else torch.softmax(x, -1)
            dx = torch.empty_like(y)
            forced = plan(problem_of(y, dy, dx, backward=True), describe(x.device), regime=regime)
            assert forced.regime == regime
            softmax_launch((y, dy, dx), forced, log=log, backward=True)()
            judged(dx, dy, y, -1, log)


@either_log
@every_dtype
def test_any_dim_and_any_strides(dtype, log):
    x, dy = logits(3, 4, 6, dtype=dtype), torch.randn(3, 4, 6).to(dtype)
    for dim in (0, 1, 2, -1):
        y = torch.log_softmax(x, dim) if log else torch.softmax(x, dim)
        layouts = [
            (dy, y),
            (dy.transpose(0, 2).contiguous().transpose(0, 2), y),
            (dy, y.transpose(0, 1).contiguous().transpose(0, 1)),
            (torch.randn(3, 4, 9).to(dtype)[:, :, 2:8], y),
            (dy[:, :1, :1].expand(3, 4, 6), y),
            (torch.ones((), dtype=dtype).expand(3, 4, 6), y),
            (dy.flip(2), y),
        ]
        for gradient, output in layouts:
            dx = rows.softmax_backward(gradient, output, dim, dtype, log)
            assert dx.is_contiguous()
            judged(dx, gradient, output, dim, log)


@either_log
def test_empty_and_zero_dim(log):
    for shape in ((0, 5), (3, 0), ()):
        y, dy = torch.rand(shape), torch.randn(shape)
        judged(rows.softmax_backward(dy, y, -1, torch.float32, log), dy, y, -1, log)


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
def test_half_in_and_float_out(ours, torchs, dtype):
    """dtype=float32: the gradient arrives in float32 and leaves in the input's own dtype."""
    x, dy = logits(3, 33, dtype=dtype), torch.randn(3, 33)
    mine, theirs, exact = (t.clone().requires_grad_() for t in (x, x, x.double()))
    y = ours(mine, -1, dtype=torch.float32)
    assert y.dtype == torch.float32
    y.backward(dy)
    torchs(theirs, -1, dtype=torch.float32).backward(dy)
    torchs(exact, -1).backward(dy.double())
    assert_as_exact(mine.grad, theirs.grad, exact.grad)


@both
@every_dtype
def test_dtype_that_needs_a_cast(ours, torchs, dtype):
    x, dy = torch.randn(3, 9, dtype=torch.float64), torch.randn(3, 9).to(dtype)
    for source in (torch.float64, torch.float32):
        mine, theirs = (x.to(source, copy=True).requires_grad_() for _ in range(2))
        ours(mine, -1, dtype=dtype).backward(dy)
        torchs(theirs, -1, dtype=dtype).backward(dy)
        assert mine.grad.dtype == source
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=4 * eps, atol=4 * eps)


@both
@every_dtype
def test_infinities_and_nan(ours, torchs, dtype):
    """Rows of nothing but -inf, with +inf or NaN have NaN for a gradient; -inf among finite values has a finite one."""
    x = torch.tensor([[1, 2, 3], [-INF] * 3, [1, INF, 2], [1, float("nan"), 2], [-INF, 0, 1]], dtype=dtype)
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    dy = torch.randn(5, 3).to(dtype)
    ours(mine, -1).backward(dy)
    torchs(theirs, -1).backward(dy)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(mine.grad, theirs.grad, equal_nan=True, rtol=8 * eps, atol=8 * eps)
    assert mine.grad[[0, 4]].isfinite().all()
    assert mine.grad[1:4].isnan().any(1).all()


@both
def test_gradients_that_are_none(ours, torchs):
    x = torch.randn(3, 5, requires_grad=True)
    y = ours(x, -1)

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dz):
            return None

    Nothing.apply(y).sum().backward()
    assert x.grad is None


@both
def test_in_place_changes_are_noticed(ours, torchs):
    x = torch.randn(3, 5, requires_grad=True)
    y = ours(x, -1)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = ours(x, -1)
    x.data.zero_()  # the input is not kept, so it may change
    y.sum().backward()


@both
def test_checkpointing_and_retained_graphs(ours, torchs):
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(3, 5, requires_grad=True)
    own = torch.autograd.grad(torchs(x * 2, -1)[:, 0].sum(), x)[0]
    y = checkpoint(lambda x: ours(x * 2, -1), x, use_reentrant=False)[:, 0].sum()
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(y, x, retain_graph=True)[0], own)


def test_a_second_gradient_that_float16_holds_is_finite():
    """The gradient of log_softmax's output overflows here; that of its input, which it leads to, does not."""
    x = torch.zeros(2, 3000, dtype=torch.float16)
    x[:, 5] = 12.0
    probe = torch.linspace(1.0, 2.0, 3000).expand(2, 3000)
    found = []
    for function, dtype in ((fs.log_softmax, torch.float16), (torch.log_softmax, torch.float64)):
        leaf = x.to(dtype).requires_grad_()
        upstream = torch.full_like(leaf, 30.0)
        (dx,) = torch.autograd.grad(function(leaf, -1), leaf, upstream, create_graph=True)
        found.append(torch.autograd.grad(dx, leaf, probe.to(dtype))[0].double())
    assert (30.0 * 3000 * torch.softmax(x.double(), -1) * probe).max() > torch.finfo(torch.float16).max
    torch.testing.assert_close(*found, rtol=0.02, atol=0.02 * found[1].abs().max().item())


@pytest.mark.parametrize("name", ("softmax", "log_softmax", "logsumexp"))
def test_forward_mode_over_a_gradient(name):
    """A tangent of the upstream gradient, as a Hessian-vector product has it."""
    x = torch.randn(2, 7, requires_grad=True)
    found = []
    for call in (getattr(fs, name), getattr(torch, name)):
        y = call(x, -1)
        torch.manual_seed(1)
        primal, tangent = torch.randn_like(y), torch.randn_like(y)
        of_upstream = lambda g, y=y: torch.autograd.grad(y, x, g, retain_graph=True)[0]  # noqa: E731
        found.append(torch.func.jvp(of_upstream, (primal,), (tangent,))[1])
        with torch.autograd.forward_ad.dual_level():
            dual = of_upstream(torch.autograd.forward_ad.make_dual(primal, tangent))
            found.append(torch.autograd.forward_ad.unpack_dual(dual).tangent)
    for other in found[1:]:
        torch.testing.assert_close(found[0], other)
