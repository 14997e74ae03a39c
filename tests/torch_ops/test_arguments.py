"""Wrong arguments: an error of torch's type, raised before any kernel is launched or anything is written."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fused_softmax as fs
from fused_softmax.launch import compile as launch
from fused_softmax.launch import cross_entropy as row_losses
from fused_softmax.launch import launcher as loss_launch
from fused_softmax.launch import masked_softmax as masked_rows
from fused_softmax.launch import softmax as rows
from fused_softmax.torch_ops import arguments

pytestmark = [pytest.mark.interpreted, pytest.mark.filterwarnings("ignore")]

X, T = torch.linspace(-2.0, 2.0, 15).view(3, 5), torch.tensor([1, 2, 0])
NAN, INF = float("nan"), float("inf")
LEAF = torch.tensor(0.5, requires_grad=True)


@pytest.fixture
def no_launch(monkeypatch):
    """A launch of any kernel fails the test."""

    def launched(*args, **kwargs):
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(launch.Launch, "__call__", launched)
    for module in (rows, row_losses, masked_rows, loss_launch):
        for name in ("launch_rows", "prepare_rows", "prepare_flat"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, launched)


def same(ours, torchs) -> None:
    """Both raise errors of one type, or both return the same."""
    try:
        want = torchs()
    except Exception as error:
        with pytest.raises(type(error)) as raised:
            ours()
        assert raised.type is type(error)
    else:
        torch.testing.assert_close(ours(), want)


CROSS_ENTROPY = [
    *(("ignore_index", v) for v in (1.0, None, "a", True, 2**63, -(2**70), torch.tensor(1.0), np.int64(1), -5)),
    ("ignore_index", torch.tensor(1)),
    *(("label_smoothing", v) for v in ("a", None, True, False, torch.tensor(0.5), torch.tensor([0.5]), LEAF, 1, 1j)),
    *(("label_smoothing", v) for v in (NAN, -0.5, 1.5, INF, np.float32(0.5), torch.tensor(1))),
    *(("reduction", v) for v in ("a", None, True, 1, ["mean"], "elementwise_mean")),
    *(("weight", v) for v in ([1.0] * 5, 1.0, torch.ones(4), torch.ones(1, 5), torch.ones(5, device="meta"))),
    *(("weight", torch.ones(5, dtype=dtype)) for dtype in (torch.int64, torch.bool, torch.float16, torch.float64)),
    *(("target", T.to(dtype)) for dtype in (torch.int32, torch.int16, torch.bool, torch.float32, torch.complex64)),
    *(("target", v) for v in ([1, 2, 0], None, T[:2], T[0], T[None], T.to("meta"))),
    *(("input", X.to(dtype)) for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)),
    *(("input", v) for v in (None, 1.0, X[0, 0], X[:0], X[:, :0])),
]


@pytest.mark.parametrize(("name", "value"), CROSS_ENTROPY, ids=repr)
def test_cross_entropy_as_torch(name, value):
    given = {"input": X, "target": T, name: value}
    same(lambda: fs.cross_entropy(**given), lambda: F.cross_entropy(**given))


@pytest.mark.parametrize(("name", "value"), CROSS_ENTROPY, ids=repr)
def test_cross_entropy_with_its_own_options_raises_the_same(name, value, request):
    """With z_loss and softcap the errors stay, and nothing is launched before."""
    given = {"input": X, "target": T, name: value}
    try:
        F.cross_entropy(**given)
    except Exception as error:
        request.getfixturevalue("no_launch")
        with pytest.raises(type(error)):
            fs.cross_entropy(**given, z_loss=0.1)
        with pytest.raises(type(error)):
            fs.cross_entropy(**given, softcap=2.0)


NUMBERS = ("a", True, False, 1j, [1.0], torch.tensor([2.0]), torch.tensor(True), torch.tensor(1j), LEAF)
OWN = [
    *(("cross_entropy", dict(softcap=v), TypeError) for v in NUMBERS),
    *(("cross_entropy", dict(softcap=v), ValueError) for v in (0, 0.0, -1.0, NAN, INF, -INF)),
    *(("cross_entropy", dict(z_loss=v), TypeError) for v in (*NUMBERS, None)),
    *(("cross_entropy", dict(z_loss=v), ValueError) for v in (NAN, INF, -INF)),
    *(("cross_entropy", dict(inplace_backward=v), TypeError) for v in (1, None, "a", torch.tensor(True))),
    *(("token_logprobs", dict(temperature=v), TypeError) for v in (*NUMBERS[:5], None, torch.tensor(True))),
    *(("token_logprobs", dict(temperature=torch.ones(3, dtype=d)), TypeError) for d in (torch.bool, torch.complex64)),
    *(("token_logprobs", dict(temperature=v), ValueError) for v in (0, 0.0, -1.0, NAN, -INF)),
    *(("token_logprobs", dict(temperature=v), RuntimeError) for v in (torch.ones(2), torch.ones(3, device="meta"))),
    *(("token_logprobs", dict(return_entropy=v), TypeError) for v in (1, None, "a")),
    *(("token_logprobs", dict(return_logsumexp=v), TypeError) for v in (1, None, "a")),
    *(("token_logprobs", dict(token_ids=T.to(d)), TypeError) for d in (torch.float32, torch.bool, torch.complex64)),
    *(("token_logprobs", dict(token_ids=v), TypeError) for v in ([1, 2, 0], None, 1)),
    *(("masked_softmax", dict(scale=v), TypeError) for v in (*NUMBERS, None)),
    *(("masked_softmax", dict(causal=v), TypeError) for v in (1, None, "a", torch.tensor(True))),
    *(("masked_softmax", dict(fully_masked=v), ValueError) for v in (1, None, "a", ["nan"])),
    *(("masked_softmax", dict(mask=v), TypeError) for v in ([True] * 5, 1.0, True)),
    *(
        ("masked_softmax", dict(mask=torch.ones(5).to(d)), TypeError)
        for d in (torch.uint8, torch.int64, torch.complex64)
    ),
    *(("masked_softmax", dict(mask=torch.ones(5, dtype=d, device="meta")), RuntimeError) for d in (torch.bool, None)),
]
GIVEN = {
    "cross_entropy": lambda x: {"input": x, "target": T},
    "token_logprobs": lambda x: {"logits": x, "token_ids": T},
    "masked_softmax": lambda x: {"x": x},
}


@pytest.mark.parametrize(("function", "option", "error"), OWN, ids=repr)
def test_options_that_torch_has_not(function, option, error, no_launch):
    with pytest.raises(error):
        getattr(fs, function)(**{**GIVEN[function](X), **option})


@pytest.mark.parametrize("function", GIVEN)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_logits_that_softmax_has_not(function, dtype, no_launch):
    with pytest.raises(NotImplementedError, match=f"{dtype}.*cast it first"):
        getattr(fs, function)(**GIVEN[function](X.to(dtype)))


@pytest.mark.parametrize("function", GIVEN)
def test_logits_that_are_no_tensor(function, no_launch):
    for wrong in (None, 1.0, [[1.0, 2.0]]):
        with pytest.raises(TypeError, match="must be a Tensor"):
            getattr(fs, function)(**GIVEN[function](wrong))


def test_numbers_that_torch_takes_for_a_float():
    for two in (2, np.float32(2.0), np.int64(2), torch.tensor(2.0), torch.tensor(2)):
        torch.testing.assert_close(fs.cross_entropy(X, T, softcap=two), fs.cross_entropy(X, T, softcap=2.0))
        torch.testing.assert_close(fs.cross_entropy(X, T, z_loss=two), fs.cross_entropy(X, T, z_loss=2.0))
        torch.testing.assert_close(fs.masked_softmax(X, scale=two), fs.masked_softmax(X, scale=2.0))
        own = fs.token_logprobs(X, T, temperature=2.0)
        torch.testing.assert_close(fs.token_logprobs(X, T, temperature=two), own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_targets_of_uint8_are_classes_not_a_mask(reduction, dtype):
    x, weight = X.to(dtype), torch.arange(1.0, 6.0)
    options = dict(reduction=reduction, z_loss=0.1, ignore_index=2)
    want = fs.cross_entropy(x, T, weight, **options)
    torch.testing.assert_close(fs.cross_entropy(x, T.to(torch.uint8), weight, **options), want)


def test_messages_name_what_was_given():
    for call, words in (
        (lambda: fs.cross_entropy(X, T, ignore_index=1.0), "ignore_index must be an int, not 1.0"),
        (lambda: fs.cross_entropy(X, T, z_loss=LEAF), "requires grad.*detach"),
        (lambda: fs.masked_softmax(X, causal=1), "causal must be True or False, not 1"),
        (lambda: arguments.integer("f", "n", 2**64), "fit in 64 bits"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            call()


def test_numbers_that_torch_compile_makes_dynamic():
    torch._dynamo.reset()

    def loss(x, cap, z_loss, ignored):
        return fs.cross_entropy(x, T, softcap=cap, z_loss=z_loss, ignore_index=ignored)

    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    for numbers in ((3.0, 0.1, -100), (4.0, 0.2, 1), (5.0, 0.3, 2)):
        torch.testing.assert_close(compiled(X, *numbers), loss(X, *numbers))
