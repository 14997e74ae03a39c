"""Signatures are torch's: names, order, deprecated arguments; torch.fx, `__torch_function__`, and plan_for's answer."""

from __future__ import annotations

import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F

import fused_softmax as fs
from fused_softmax.integrations import causal_lm_loss, selective_log_softmax
from fused_softmax.lab.registry import LINEAR_OPS, OPS
from fused_softmax.torch_ops.route import PLANNED

pytestmark = pytest.mark.interpreted

X, T, W = torch.linspace(-2.0, 2.0, 15).view(3, 5), torch.tensor([1, 2, 0]), torch.arange(1.0, 6.0)


def test_cross_entropy_has_torchs_parameters_and_then_its_own():
    for ours, torchs in ((fs.cross_entropy, F.cross_entropy), (fs.nn.CrossEntropyLoss, torch.nn.CrossEntropyLoss)):
        mine, theirs = (list(inspect.signature(f).parameters.values()) for f in (ours, torchs))
        assert [(p.name, p.default, p.kind) for p in mine[: len(theirs)]] == [
            (p.name, p.default, p.kind) for p in theirs
        ]
        assert {p.kind for p in mine[len(theirs) :]} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.filterwarnings("ignore:size_average and reduce")
@pytest.mark.parametrize(
    "more",
    [
        (),
        (W,),
        (None, False),
        (W, True),
        (None, None, 1),
        (W, None, 1, False),
        (W, None, 2, None, "sum", 0.1),
        (None, -1),
    ],
    ids=repr,
)
def test_positional_order(more):
    torch.testing.assert_close(fs.cross_entropy(X, T, *more), F.cross_entropy(X, T, *more))
    torch.testing.assert_close(fs.nn.CrossEntropyLoss(*more)(X, T), torch.nn.CrossEntropyLoss(*more)(X, T))


def test_keywords_and_deprecated_arguments():
    torch.testing.assert_close(fs.cross_entropy(input=X, target=T), F.cross_entropy(X, T))
    for legacy in (dict(size_average=False), dict(reduce=False), dict(size_average=True, reduce=True)):
        with pytest.warns(UserWarning, match="will be deprecated"):
            want = F.cross_entropy(X, T, **legacy)
        with pytest.warns(UserWarning, match="will be deprecated"):
            got = fs.cross_entropy(X, T, **legacy)
        torch.testing.assert_close(got, want)
    # before, ignore_index was fourth and reduction fifth
    with pytest.raises(TypeError, match="ignore_index must be an int, not 'sum'"):
        fs.cross_entropy(X, T, W, -100, "sum")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(5, 5)
        self.softmax, self.log_softmax = fs.nn.Softmax(-1), fs.nn.LogSoftmax(0)
        self.loss = fs.nn.CrossEntropyLoss(weight=W, z_loss=0.1)

    def forward(self, x, target):
        y = self.linear(x)
        parts = [
            self.softmax(y),
            self.log_softmax(y),
            self.loss(y, target),
            fs.softmax(self.linear.weight, x.dim() - 1),
            fs.log_softmax(y, dim=y.dim() - 1, dtype=torch.float32),
            fs.logsumexp(y, -1, keepdim=True),
            fs.cross_entropy(input=y, target=target, softcap=3.0),
            fs.token_logprobs(y, target, temperature=0.5),
            fs.masked_softmax(y, causal=True, scale=0.5),
            selective_log_softmax(y, target),
            causal_lm_loss({"logits": y[None]}, target[None], 7),
        ]
        return [p.sum() for p in parts]


OURS = {
    fs.softmax,
    fs.log_softmax,
    fs.logsumexp,
    fs.cross_entropy,
    fs.token_logprobs,
    fs.masked_softmax,
    selective_log_softmax,
    causal_lm_loss,
}


def test_torch_fx_keeps_our_functions():
    model = Model()
    traced = torch.fx.symbolic_trace(model)
    called = {node.target for node in traced.graph.nodes if node.op == "call_function"}
    assert called >= OURS
    assert not {torch.softmax, torch.log_softmax, torch.logsumexp, F.cross_entropy, F.softmax} & called
    for module in (traced, pickle.loads(pickle.dumps(traced))):
        torch.testing.assert_close(module(X, T), model(X, T))


def test_an_argument_that_stands_in_takes_the_call_from_any_position():
    class Stand:
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return function

    stand = Stand()
    assert fs.softmax(stand, 0) is fs.softmax
    assert fs.log_softmax(stand, dim=0, out=torch.empty(0)) is fs.log_softmax
    assert fs.logsumexp(stand, 0) is fs.logsumexp
    for given in ((stand, T), (X, stand), (X, T, stand)):
        assert fs.cross_entropy(*given) is fs.cross_entropy
    assert fs.token_logprobs(stand, T) is fs.token_logprobs(X, stand) is fs.token_logprobs
    assert fs.token_logprobs(X, T, temperature=stand) is fs.token_logprobs
    assert fs.masked_softmax(stand) is fs.masked_softmax(X, stand) is fs.masked_softmax
    assert selective_log_softmax(X, stand) is selective_log_softmax
    assert causal_lm_loss({"logits": X}, stand) is causal_lm_loss


def test_a_subclass_of_tensor_sees_the_call_from_any_position():
    class Seen(torch.Tensor):
        names: list[str] = []

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            cls.names.append(function.__name__)
            return super().__torch_function__(function, types, args, kwargs or {})

    def seen(t):
        return t.as_subclass(Seen)

    x, two, zeros = seen(X), torch.tensor(2.0), torch.zeros(5)
    for call, own in (
        (lambda: fs.softmax(x), "softmax"),
        (lambda: fs.logsumexp(x, 0), "logsumexp"),
        (lambda: fs.cross_entropy(x, T), "cross_entropy"),
        (lambda: fs.cross_entropy(X, seen(T)), "cross_entropy"),
        (lambda: fs.cross_entropy(X, T, seen(W)), "cross_entropy"),
        (lambda: fs.token_logprobs(X, seen(T)), "gather"),
        (lambda: fs.token_logprobs(X, T, temperature=seen(two)), "log_softmax"),
        (lambda: fs.masked_softmax(X, seen(zeros)), "softmax"),
        (lambda: fs.softmax(X, -1, out=seen(torch.empty(3, 5))), "copy_"),
    ):
        Seen.names.clear()
        assert type(call()) is Seen
        assert own in Seen.names


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_plan_for_raises_what_the_call_raises(dtype):
    x = X.to(dtype)
    for given in ((x,), (X, -1, dtype), (x, 5), (x[0, 0],)):
        with pytest.raises((NotImplementedError, IndexError)) as call:
            fs.softmax(*given)
        with pytest.raises(call.type, match=str(call.value).split("(")[0][:20]):
            fs.plan_for(*given)
    assert fs.plan_for(x[:0]).regime == "torch"
    assert fs.softmax(x[:0]).shape == (0, 5)


def test_plan_for_says_where_nothing_is_launched():
    for shape in ((0, 5), (3, 0), (0,)):
        for dtype in (None, torch.float32):
            found = fs.plan_for(torch.empty(shape), 0, dtype)
            assert found.regime == "empty" and "nothing is launched" in found.why
    assert fs.plan_for(torch.empty(0, 5, dtype=torch.float64)).regime == "torch"
    assert isinstance(fs.plan_for(X.long(), -1, torch.float32), fs.Plan)  # cast first, then ours
    assert fs.plan_for(X, -1, float).regime == "torch"


def test_plan_for_knows_every_op_of_the_registry():
    with pytest.raises(ValueError, match="not 'softplus'"):  # which imports what imports itself late
        fs.plan_for(X, op="softplus")
    assert PLANNED.keys() == OPS.keys() | LINEAR_OPS.keys()
    with pytest.raises(ValueError, match=f"plan_for\\(\\) knows {', '.join(sorted(PLANNED))}, not 'softplus'"):
        fs.plan_for(X, op="softplus")


def test_plan_for_linear_losses_is_the_plan_of_a_chunk():
    x, weight = torch.empty(9000, 16), torch.empty(50257, 16)
    for op, of_logits in (("linear_cross_entropy", "cross_entropy"), ("linear_token_logprobs", "token_logprobs")):
        for backward in (False, True):
            found = fs.plan_for(x, op=op, linear_weight=weight, backward=backward)
            of_chunk = fs.plan_for(torch.empty(1, 50257), op=of_logits, backward=backward)
            assert found.why.endswith(f"rows of logits: {of_chunk.why}") and found.chunks == of_chunk.chunks
        found = fs.plan_for(x.double(), op=op, linear_weight=weight.double())
        assert found.regime == "torch" and "torch.float64" in found.why
        assert fs.plan_for(x[:0], op=op, linear_weight=weight).regime == "empty"
        with pytest.raises(ValueError, match=rf'plan_for\(op="{op}"\) needs linear_weight'):
            fs.plan_for(x, op=op)
        with pytest.raises(RuntimeError, match="the last dimension of input"):
            fs.plan_for(x[:, :8], op=op, linear_weight=weight)
