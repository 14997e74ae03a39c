"""torch.compile, torch.export, torch.func, forward mode and autocast: what they make of a call."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, dtype_id
from torch._subclasses.fake_tensor import FakeTensorMode
from watched import both, close, watch

import fused_softmax as fs

pytestmark = pytest.mark.interpreted

ops = torch.ops.fused_softmax


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    return watch(monkeypatch)


# --- torch.compile ----------------------------------------------------------------------------------------------------


def everything(x: torch.Tensor) -> torch.Tensor:
    return fs.softmax(x, -1) * fs.log_softmax(x * 2, dim=0) + fs.logsumexp(x, dim=1, keepdim=True)


def everything_by_torch(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1) * torch.log_softmax(x * 2, dim=0) + torch.logsumexp(x, dim=1, keepdim=True)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_in_one_graph(backend, calls):
    torch._dynamo.reset()
    compiled = torch.compile(everything, backend=backend, fullgraph=True)
    x = torch.randn(5, 9, requires_grad=True)
    own = x.detach().clone().requires_grad_()
    y, want = compiled(x), everything_by_torch(own)
    close(y, want)
    dy = torch.randn_like(y)
    y.backward(dy)
    want.backward(dy)
    torch.testing.assert_close(x.grad, own.grad, rtol=1e-5, atol=1e-5)
    assert set(calls) == {"softmax_forward", "softmax_backward", "forward_by_kernel", "backward_by_kernel"}


@both
def test_compiled_widths_share_one_graph(ours, torchs):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: ours(x, dim=-1) + 1, backend=counter, fullgraph=True)
    for n_rows, n_cols in ((3, 17), (4, 33), (5, 1000), (2, 64), (7, 129)):
        x = torch.randn(n_rows, n_cols, requires_grad=True)
        for dim in (0, 1):
            torch._dynamo.mark_dynamic(x, dim)
        y = compiled(x)
        close(y.detach(), torchs(x.detach(), -1) + 1)
        y.sum().backward()
    assert counter.frame_count == 1


@both
def test_compiled_transforms(ours, torchs):
    torch._dynamo.reset()
    x = torch.randn(3, 5)

    def per_row(function):
        return lambda x: torch.func.vmap(torch.func.grad(lambda t: function(t, -1)[0]))(x)

    close(torch.compile(per_row(ours), backend="aot_eager", fullgraph=True)(x), per_row(torchs)(x))


def test_compiled_dtypes_and_modules():
    torch._dynamo.reset()
    x = torch.randn(4, 12).half()
    compiled = torch.compile(lambda x: fs.softmax(x, -1, dtype=torch.float32), backend="aot_eager", fullgraph=True)
    close(compiled(x), torch.softmax(x, -1, dtype=torch.float32))
    double = torch.randn(4, 12, dtype=torch.float64)
    close(torch.compile(fs.nn.LogSoftmax(-1), backend="aot_eager", fullgraph=True)(double), double.log_softmax(-1))


def test_export_and_make_fx_keep_one_op():
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda x: fs.softmax(x, -1), tracing_mode="symbolic")(torch.randn(2, 3)).graph
    assert ops.softmax.default in [node.target for node in graph.nodes]
    exported = torch.export.export(fs.nn.Softmax(-1), (torch.randn(2, 3),))
    x = torch.randn(2, 3)
    close(exported.module()(x), x.softmax(-1))


# --- torch.func, forward mode and autocast ----------------------------------------------------------------------------


@both
def test_vmap(ours, torchs):
    x = torch.randn(3, 4, 5)
    for in_dim in (0, 1, 2):
        for dim in (0, 1, -1, -2):
            got = torch.vmap(lambda t, dim=dim: ours(t, dim), in_dims=in_dim)(x)
            close(got, torch.vmap(lambda t, dim=dim: torchs(t, dim), in_dims=in_dim)(x))
    close(torch.vmap(lambda t: ours(t, -1))(x[0, 0]), torch.vmap(lambda t: torchs(t, -1))(x[0, 0]))
    nested = torch.vmap(torch.vmap(lambda t: ours(t, 0)))(x)
    close(nested, torchs(x, 2))
    with pytest.raises(IndexError):
        torch.vmap(lambda t: ours(t, 2))(x)


@both
def test_per_sample_gradients_and_jacobians(ours, torchs):
    x, w = torch.randn(3, 5), torch.randn(5)

    def loss(function):
        return lambda t: (function(t, -1) * w).sum()

    close(torch.func.vmap(torch.func.grad(loss(ours)))(x), torch.func.vmap(torch.func.grad(loss(torchs)))(x))
    jacobian, own = (torch.func.jacrev(lambda t, f=f: f(t, -1))(x) for f in (ours, torchs))
    close(jacobian, own)
    hessian, own = (torch.func.hessian(loss(f))(x[0]) for f in (ours, torchs))
    torch.testing.assert_close(hessian, own)


@both
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_batched_gradients_of_one_graph(ours, torchs):
    x = torch.randn(3, 5, requires_grad=True)
    dy = torch.randn(4, 3, 5)
    got, own = (torch.autograd.grad(f(x, -1), x, dy, is_grads_batched=True)[0] for f in (ours, torchs))
    close(got, own)


@both
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_jacobian_of_autograd(ours, torchs):
    x = torch.randn(2, 5)
    for vectorize in (False, True):
        got, own = (
            torch.autograd.functional.jacobian(lambda t, f=f: f(t, 0), x, vectorize=vectorize) for f in (ours, torchs)
        )
        close(got, own)


def test_vmap_of_logsumexp():
    x = torch.randn(3, 4, 5)
    for dim in (0, -1, (0, 1)):
        got = torch.func.vmap(torch.func.grad(lambda t, dim=dim: fs.logsumexp(t, dim).sum()))(x)
        close(got, torch.func.vmap(torch.func.grad(lambda t, dim=dim: torch.logsumexp(t, dim).sum()))(x))


# The dispatcher leaves trailing defaults out of what it hands to a vmap rule.
DEFAULTS = {
    "fs.logsumexp": (lambda r: fs.logsumexp(r, 0), lambda r: torch.logsumexp(r, 0)),
    "logsumexp": (lambda r: ops.logsumexp(r, [-1]), lambda r: torch.logsumexp(r, -1)),
    "logsumexp over all": (lambda r: ops.logsumexp(r, []), lambda r: r.flatten().logsumexp(0)),
    "softmax": (lambda r: ops.softmax(r, 0), lambda r: torch.softmax(r, 0)),
    "log_softmax": (lambda r: ops.log_softmax(r, 0), lambda r: torch.log_softmax(r, 0)),
    "logsumexp_backward": (
        lambda r: ops.logsumexp_backward(r.sum(0), r, torch.logsumexp(r, 0), [0]),
        lambda r: r.sum(0, keepdim=True) * torch.softmax(r, 0),
    ),
}


@pytest.mark.parametrize("randomness", ["error", "different", "same"])
@pytest.mark.parametrize("name", DEFAULTS)
def test_vmap_without_the_default_arguments(name, randomness):
    ours, torchs = DEFAULTS[name]
    x = torch.randn(2, 3, 4)
    for in_dim in (0, 1, 2, -1):
        got, want = (torch.func.vmap(f, in_dims=in_dim, randomness=randomness)(x) for f in (ours, torchs))
        close(got, want)
    for outer, inner in ((0, 0), (2, 1), (1, -1)):
        nested = [torch.func.vmap(torch.func.vmap(f, in_dims=inner), in_dims=outer)(x) for f in (ours, torchs)]
        close(*nested)
    close(*(torch.func.vmap(f)(x[:, 0, 0]) for f in (ours, torchs)))  # of numbers


def test_vmap_of_a_number_names_the_range():
    for function in (lambda r: ops.logsumexp(r, [1]), lambda r: ops.softmax(r, 1)):
        with pytest.raises(IndexError, match=r"\[-1, 0\]"):
            torch.func.vmap(function)(torch.randn(3))


def test_every_operator_with_a_default_has_it_in_its_vmap_rule():
    """A rule that lacks one fails in the call above; this names operators that the table has not."""
    with_defaults = {
        name.removeprefix("fused_softmax::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("fused_softmax::")
        and any(
            a.has_default_value() for a in getattr(ops, name.removeprefix("fused_softmax::")).default._schema.arguments
        )
    }
    assert with_defaults == {name for name in DEFAULTS if hasattr(ops, name)}


def test_vmap_over_losses_and_masks():
    x, ids, weight = torch.randn(6, 3, 5), torch.tensor([1, 2, 0]), torch.rand(5)
    each, mask = torch.randint(5, (6, 3)), torch.rand(6, 3, 5) > 0.3
    cases = [
        (fs.cross_entropy, torch.nn.functional.cross_entropy, (x, each, weight), (0, 0, None)),
        (fs.cross_entropy, torch.nn.functional.cross_entropy, (x, ids), (0, None)),
        (fs.cross_entropy, torch.nn.functional.cross_entropy, (x[0], each), (None, 0)),
        (fs.cross_entropy, torch.nn.functional.cross_entropy, (x.movedim(0, 2), ids), (2, None)),
        (fs.token_logprobs, gathered, (x, each), (0, 0)),
        (fs.token_logprobs, gathered, (x.movedim(0, 1), ids), (1, None)),
        (fs.token_logprobs, gathered, (x[0], each), (None, 0)),
        (fs.masked_softmax, filled, (x, mask), (0, 0)),
        (fs.masked_softmax, filled, (x[0], mask), (None, 0)),
        (fs.masked_softmax, filled, (x.movedim(0, 2), mask[0]), (2, None)),
    ]
    for ours, torchs, arguments, in_dims in cases:
        got, want = (torch.func.vmap(f, in_dims=in_dims)(*arguments) for f in (ours, torchs))
        torch.testing.assert_close(got, want, equal_nan=True)
    twice = [torch.func.vmap(torch.func.vmap(f))(x, each) for f in (fs.token_logprobs, gathered)]
    torch.testing.assert_close(*twice)


def gathered(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return x.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def filled(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(~mask, -float("inf")).softmax(-1)


@pytest.mark.parametrize("in_dim", [0, 1, 2])
def test_vmap_under_patch(in_dim):
    x = torch.randn(4, 4, 4)
    want = torch.func.vmap(torch.func.vmap(lambda r: torch.softmax(r, 0)), in_dims=in_dim)(x)
    with fs.patch():
        close(torch.func.vmap(torch.func.vmap(lambda r: torch.softmax(r, 0)), in_dims=in_dim)(x), want)
        grads = torch.func.vmap(torch.func.grad(lambda r: torch.log_softmax(r, 0)[0, 0]), in_dims=in_dim)(x)
    own = torch.func.vmap(torch.func.grad(lambda r: torch.log_softmax(r, 0)[0, 0]), in_dims=in_dim)(x)
    torch.testing.assert_close(grads, own)


@both
def test_forward_mode_is_torchs(ours, torchs):
    x, t = torch.randn(3, 5), torch.randn(3, 5)
    close(torch.func.jvp(lambda x: ours(x, -1), (x,), (t,))[1], torch.func.jvp(lambda x: torchs(x, -1), (x,), (t,))[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_the_autocast_rule(dtype):
    """The kernels of the CUDA autocast key: float32 unless another dtype is asked for, and float64 left alone."""
    x = torch.randn(3, 5).to(dtype)
    key = torch._C.DispatchKey.AutocastCUDA
    for operator, torchs in ((ops.softmax, torch.softmax), (ops.log_softmax, torch.log_softmax)):
        close(operator.default._op_dk(key, x, -1), torchs(x, -1, dtype=torch.float32))
        close(operator.default._op_dk(key, x, -1, torch.float16), torchs(x, -1, dtype=torch.float16))
        assert operator.default._op_dk(key, x.double(), -1).dtype == torch.float64
    close(ops.logsumexp.default._op_dk(key, x, [1]), torch.logsumexp(x.float(), 1))


def test_autocast_on_cpu_changes_nothing_as_in_torch():
    x = torch.randn(3, 5).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert fs.softmax(x).dtype == torch.softmax(x, -1).dtype == torch.bfloat16


@pytest.mark.parametrize("loss", ["cross_entropy", "none", "token_logprobs", "masked_softmax"])
def test_losses_take_gradients_that_are_batched(loss):
    """autograd.grad(is_grads_batched=True) hands all upstream gradients in as one tensor without memory."""
    ids = torch.tensor([1, 5, 2])
    run = {
        "cross_entropy": lambda x: fs.cross_entropy(x, ids),
        "none": lambda x: fs.cross_entropy(x, ids, reduction="none"),
        "token_logprobs": lambda x: fs.token_logprobs(x, ids, return_entropy=True).entropy,
        "masked_softmax": lambda x: fs.masked_softmax(x, causal=True),
    }[loss]
    x = torch.randn(3, 8, requires_grad=True)
    upstream = torch.randn(4, *run(x).shape)
    (got,) = torch.autograd.grad(run(x), x, upstream, is_grads_batched=True)
    one_by_one = [torch.autograd.grad(run(x), x, g)[0] for g in upstream]
    torch.testing.assert_close(got, torch.stack(one_by_one))


def test_batched_gradients_of_an_additive_mask():
    x, mask = torch.randn(3, 8, requires_grad=True), torch.randn(1, 8, requires_grad=True)
    upstream = torch.randn(4, 3, 8)
    got = torch.autograd.grad(fs.masked_softmax(x, mask, scale=0.5), (x, mask), upstream, is_grads_batched=True)
    own = torch.autograd.grad(torch.softmax(x * 0.5 + mask, -1), (x, mask), upstream, is_grads_batched=True)
    torch.testing.assert_close(got, own)


def test_jacobians_and_hessians_of_losses_are_vectorized():
    x, ids = torch.randn(3, 8), torch.tensor([1, 5, 2])
    functions = {
        "cross_entropy": (lambda x: fs.cross_entropy(x, ids), lambda x: torch.nn.functional.cross_entropy(x, ids)),
        "token_logprobs": (lambda x: fs.token_logprobs(x, ids), lambda x: torch.log_softmax(x, -1)[range(3), ids]),
        "masked_softmax": (lambda x: fs.masked_softmax(x, scale=0.5), lambda x: torch.softmax(x * 0.5, -1)),
    }
    for ours, own in functions.values():
        got, want = (torch.autograd.functional.jacobian(f, x, vectorize=True) for f in (ours, own))
        torch.testing.assert_close(got, want)
        got, want = (
            torch.autograd.functional.hessian(lambda x, f=f: f(x).square().sum(), x, vectorize=True)
            for f in (ours, own)
        )
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_token_ids_without_values_are_not_asked_for_them():
    x, ids = torch.randn(3, 8), torch.tensor([1, 5, 2])
    close(torch.func.vmap(fs.token_logprobs)(x, ids), fs.token_logprobs(x, ids))
    with FakeTensorMode() as mode:
        assert fs.token_logprobs(mode.from_tensor(x), mode.from_tensor(ids)).shape == (3,)


def test_vmap_of_entropies_with_hidden_tokens():
    """0*log(0) is 0 under an upstream gradient above 1 too."""
    x = torch.tensor([[-0.5, -torch.inf, -torch.inf], [1.0, 2.0, -3e38]], requires_grad=True)
    ids = torch.tensor([[1], [2]])
    entropy = torch.vmap(lambda t, i: fs.token_logprobs(t, i, return_entropy=True).entropy)(x[:, None], ids)
    (dx,) = torch.autograd.grad(entropy, x, torch.full_like(entropy, 3.0))
    wide = x.detach().double().clamp(min=-1e4).requires_grad_()
    p = torch.softmax(wide, -1)
    (want,) = torch.autograd.grad(-(p * p.clamp(min=1e-300).log()).sum(-1), wide, torch.full((2,), 3.0).double())
    torch.testing.assert_close(dx.double(), want, atol=1e-6, rtol=1e-5)
