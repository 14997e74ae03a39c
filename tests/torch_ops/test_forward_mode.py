"""Forward-mode AD and torch.func through the operators themselves, as an exported program holds them."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as fwad
import torch.nn.functional as F
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import fused_softmax as fs

pytestmark = [pytest.mark.interpreted, pytest.mark.filterwarnings("ignore:There is a performance drop")]

ops = torch.ops.fused_softmax
IDS, WEIGHT, MASK = torch.tensor([1, 4, 2]), torch.randn(5, 5), torch.rand(3, 5) > 0.3
FIELDS = (None, None, -100, "mean", 0.0, None, 0.0, None)
LINEAR = (-100, "mean", 0.0, None, 0.0, torch.float32, torch.float32, "float32", None, [True, True, False])
Y, DY = torch.randn(3, 5).softmax(-1), torch.randn(3, 5)


def picked(x: torch.Tensor) -> torch.Tensor:
    return x.log_softmax(-1).gather(1, IDS[:, None])


# the operator, and what it is in torch's own; each is a function of (3, 5)
CASES = {
    "softmax": (lambda x: ops.softmax(x, -1), lambda x: x.softmax(-1)),
    "log_softmax": (lambda x: ops.log_softmax(x, 0, torch.float32), lambda x: x.log_softmax(0)),
    "logsumexp": (lambda x: ops.logsumexp(x, [1]), lambda x: x.logsumexp(1)),
    "masked_softmax": (
        lambda x: ops.masked_softmax(x, MASK, 0.5, False, True),
        lambda x: (x * 0.5).masked_fill(~MASK, -torch.inf).softmax(-1).where(MASK.any(-1, keepdim=True), 0.0),
    ),
    "cross_entropy": (lambda x: ops.cross_entropy(x, IDS, *FIELDS)[0], lambda x: F.cross_entropy(x, IDS)),
    "token_logprobs": (lambda x: ops.token_logprobs(x, IDS[:, None], None, 1.0, False)[0], picked),
    "linear_cross_entropy": (
        lambda x: ops.linear_cross_entropy(x, WEIGHT, None, IDS, None, None, None, *LINEAR)[0],
        lambda x: F.cross_entropy(x @ WEIGHT.T, IDS),
    ),
    "linear_token_logprobs": (
        lambda x: ops.linear_token_logprobs(
            x, WEIGHT, None, IDS[:, None], None, 1.0, False, torch.float32, None, [True, True, False]
        )[0],
        lambda x: picked(x @ WEIGHT.T),
    ),
}
GRADIENTS = {
    "softmax_backward": (
        lambda dy: ops.softmax_backward(dy, Y, -1, torch.float32),
        lambda dy: Y * (dy - (dy * Y).sum(-1, keepdim=True)),
    ),
    "log_softmax_backward": (
        lambda dy: ops.log_softmax_backward(dy, Y.log(), -1, torch.float32),
        lambda dy: dy - Y * dy.sum(-1, keepdim=True),
    ),
    "logsumexp_backward": (
        lambda x: ops.logsumexp_backward(DY[:, 0], x, x.logsumexp(1), [1]),
        lambda x: DY[:, :1] * x.softmax(1),
    ),
    "masked_softmax_backward": (
        lambda dy: ops.masked_softmax_backward(Y, dy, None, 1.0, False),
        lambda dy: Y * (dy - (dy * Y).sum(-1, keepdim=True)),
    ),
    "cross_entropy_backward": (
        lambda x: ops.cross_entropy_backward(torch.ones(()), torch.ones(3, 2), x, IDS, *FIELDS),
        lambda x: (x.softmax(-1) - F.one_hot(IDS, 5)) / 3,
    ),
    "token_logprobs_backward": (
        lambda x: ops.token_logprobs_backward(
            DY[:, :1], None, None, torch.ones(3, 2), torch.ones(0), x, IDS[:, None], None, 1.0
        ),
        lambda x: DY[:, :1] * (F.one_hot(IDS, 5) - x.softmax(-1)),
    ),
}


@pytest.mark.parametrize("name", [*CASES, *GRADIENTS])
def test_tangents_go_through_an_operator(name):
    ours, own = {**CASES, **GRADIENTS}[name]
    x, t = torch.randn(3, 5), torch.randn(3, 5)
    want = jvp(own, (x,), (t,))
    assert want[1].abs().max() > 0
    torch.testing.assert_close(jvp(ours, (x,), (t,)), want)
    for needs_gradient in (False, True):
        with fwad.dual_level():
            got = fwad.unpack_dual(ours(fwad.make_dual(x.clone().requires_grad_(needs_gradient), t)))
            torch.testing.assert_close((got.primal, got.tangent), want)


@pytest.mark.parametrize("name", CASES)
def test_transforms_of_an_operator(name):
    ours, own = CASES[name]
    x, t = torch.randn(3, 5), torch.randn(3, 5)
    two, of_two = torch.stack([x, x * 2]), torch.stack([t, t * 3])
    for transform in (
        lambda f: grad(lambda x: f(x).square().sum())(x),
        lambda f: vmap(grad(lambda x: f(x).square().sum()))(two),
        lambda f: hessian(lambda x: f(x).square().sum())(x),
        lambda f: jacfwd(f)(x),
        lambda f: jacrev(f)(x),
        lambda f: vmap(lambda v: jvp(f, (x,), (v,))[1])(of_two),
        lambda f: jvp(vmap(f), (two,), (of_two,))[1],
    ):
        torch.testing.assert_close(transform(ours), transform(own))


@pytest.mark.parametrize("name", ["cross_entropy", "token_logprobs", "masked_softmax", "linear_cross_entropy"])
def test_an_exported_program_has_the_derivatives_of_torchs(name):
    function, own = {
        "cross_entropy": (lambda x: fs.cross_entropy(x, IDS), CASES["cross_entropy"][1]),
        "token_logprobs": (lambda x: fs.token_logprobs(x, IDS[:, None]), picked),
        "masked_softmax": (lambda x: fs.masked_softmax(x, scale=0.5), lambda x: torch.softmax(x * 0.5, -1)),
        "linear_cross_entropy": (
            lambda x: fs.linear_cross_entropy(x, WEIGHT, IDS), CASES["linear_cross_entropy"][1]
        ),
    }[name]  # fmt: skip

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x)

    x, t = torch.randn(3, 5), torch.randn(3, 5)
    program = torch.export.export(Model(), (x,))
    assert name in str(program.graph)
    run = program.module()
    torch.testing.assert_close(jvp(run, (x,), (t,)), jvp(own, (x,), (t,)))
    torch.testing.assert_close(grad(lambda x: run(x).sum())(x), grad(lambda x: own(x).sum())(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_all_results_of_the_linear_operator_have_tangents(reduction, dtype):
    """A graph of forward and backward takes the gradients that the forward returns, and has tangents of them."""
    x, weight, bias, t = (torch.randn(*n, dtype=dtype) for n in ((3, 5), (7, 5), (7,), (3, 5)))
    options = (-100, reduction, 0.0, None, 0.0, dtype, dtype, "float32", None, [True, True, True])

    def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss, moments, *gradients, divisor = ops.linear_cross_entropy(x, weight, bias, IDS, *(None,) * 3, *options)
        if divisor.numel():
            gradients = [g / divisor[1 - (i == 1)] for i, g in enumerate(gradients)]
        return loss, moments, *gradients

    def gradients_by_torch(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = lambda *given: F.cross_entropy(F.linear(*given).float(), IDS)  # noqa: E731
        return grad(loss, (0, 1, 2))(x, weight, bias)

    found, tangents = jvp(call, (x,), (t,))
    tolerance = {} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 2e-3}
    torch.testing.assert_close(found, call(x), **tolerance)
    assert [a.shape for a in tangents] == [a.shape for a in found]
    if reduction == "mean":
        want = jvp(gradients_by_torch, (x,), (t,))[1]
        torch.testing.assert_close([a.to(dtype) for a in tangents[2:]], [*want], **tolerance)


def test_gradients_without_a_formula_refuse_tangents_only():
    given = (torch.ones(3), torch.ones(3, 2), torch.randn(3, 5), WEIGHT, None, IDS, None, None, None, -100, "none")
    given += LINEAR[2:]
    with fwad.dual_level():
        want = ops.linear_cross_entropy_backward(*given)  # in a level, without a tangent
        assert want[0].shape == (3, 5)
        dual = fwad.make_dual(torch.ones(3), torch.ones(3))
        with pytest.raises(NotImplementedError, match="linear_cross_entropy_backward does not support forward-mode"):
            ops.linear_cross_entropy_backward(dual, *given[1:])
