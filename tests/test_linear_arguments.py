"""The errors of the linear losses, the weights that they refuse, and the chunks that they plan."""

from __future__ import annotations

import pytest
import torch
from linear import layer

import fused_softmax as fs
from fused_softmax.planning.linear_losses import plan_chunks

X, WEIGHT, _ = layer(4, 8, 20, torch.float32)
TARGET = torch.tensor([0, 1, -100, 19])


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        (dict(chunk_rows=0), ValueError, "chunk_rows must be at least 1"),
        (dict(chunk_rows=2.5), TypeError, "chunk_rows must be an int"),
        (dict(accumulate="bfloat16"), ValueError, "accumulate must be"),
        (dict(logits_dtype=torch.float16), ValueError, "logits_dtype must be"),
        (dict(reduction="average"), ValueError, "average"),
        (dict(softcap=-1.0), ValueError, "softcap must be positive"),
        (dict(z_loss=float("nan")), ValueError, "z_loss must be finite"),
        (dict(label_smoothing=1.5), RuntimeError, "label_smoothing must be between"),
        (dict(input=X[:, :7]), RuntimeError, "last dimension of input"),
        (dict(input=X.long()), NotImplementedError, "not implemented for torch.int64"),
        (dict(input=X.bfloat16()), RuntimeError, "expected linear_weight to have input's dtype"),
        (dict(input=[1.0]), TypeError, "input must be a Tensor"),
        (dict(linear_weight=WEIGHT[0]), RuntimeError, r"linear_weight must be \(V, H\)"),
        (dict(linear_bias=torch.zeros(19)), RuntimeError, r"linear_bias must have shape \(20,\)"),
        (dict(linear_bias=torch.zeros(20).double()), RuntimeError, "expected linear_bias to have input's dtype"),
        (dict(target=TARGET[:3]), ValueError, "must have the shape"),
        (dict(target=TARGET.int()), RuntimeError, "must hold int64 class indices"),
        (dict(target=torch.tensor([0, 1, 2, 20])), IndexError, "Target 20 is out of bounds"),
        (dict(target=TARGET.to("meta")), RuntimeError, "same device"),
        (dict(weight=torch.ones(19)), RuntimeError, r"weight must have shape \(20,\)"),
        (dict(weight=torch.ones(20).half()), RuntimeError, "weight must be torch.float32"),
        (dict(weight=torch.ones(20, requires_grad=True)), NotImplementedError, "derivative for 'weight'"),
    ],
)
def test_errors(wrong, error, says):
    given = dict(input=X, linear_weight=WEIGHT, target=TARGET) | wrong
    with pytest.raises(error, match=says):
        fs.linear_cross_entropy(given.pop("input"), given.pop("linear_weight"), given.pop("target"), **given)


class Wrapped(torch.Tensor):
    """A weight that only its own class can multiply by."""


@pytest.mark.parametrize(
    ("weight", "says"),
    [
        (WEIGHT.detach().to(torch.int8), "a quantized weight"),
        (WEIGHT.detach().to(torch.float8_e4m3fn), "a quantized weight"),
        (WEIGHT.detach().as_subclass(Wrapped), "Wrapped, a subclass of Tensor"),
        (torch.nn.Linear(8, 20), "not the module Linear: pass its .weight"),
        (None, "linear_weight must be a Tensor"),
    ],
)
def test_weights_that_are_refused(weight, says):
    with pytest.raises(TypeError, match=says):
        fs.linear_cross_entropy(X, weight, TARGET)
    with pytest.raises(TypeError, match=says):
        fs.linear_token_logprobs(X, weight, TARGET.clamp(min=0))


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        (dict(token_ids=torch.zeros(3, dtype=torch.int64)), ValueError, "token_ids"),
        (dict(token_ids=torch.zeros(4)), TypeError, "token_ids must be integers"),
        (dict(token_ids=torch.full((4,), 20)), IndexError, "out of bounds for 20 columns"),
        (dict(temperature=0.0), ValueError, "temperature must be positive"),
        (dict(temperature=True), TypeError, "temperature must be a number"),
        (dict(return_entropy=1), TypeError, "return_entropy must be True or False"),
        (dict(chunk_rows=-1), ValueError, "chunk_rows must be at least 1"),
    ],
)
def test_errors_of_log_probabilities(wrong, error, says):
    given = dict(token_ids=torch.zeros(4, dtype=torch.int64)) | wrong
    with pytest.raises(error, match=says):
        fs.linear_token_logprobs(X, WEIGHT, given.pop("token_ids"), **given)


def test_a_module_owns_its_layer():
    loss = fs.nn.LinearCrossEntropyLoss(8, 20, bias=True, label_smoothing=0.1)
    want = fs.linear_cross_entropy(
        X, loss.linear.weight, TARGET, linear_bias=loss.linear.bias, label_smoothing=0.1
    )  # fmt: skip
    assert torch.equal(loss(X, TARGET), want)
    assert "label_smoothing=0.1" in repr(loss)
    embedding = torch.nn.Embedding(20, 8)
    loss.linear.weight = embedding.weight
    loss(X, TARGET).backward()
    assert embedding.weight.grad is not None
    torchs = getattr(torch.nn, "LinearCrossEntropyLoss", None)
    if torchs is not None:
        other = torchs(8, 20, bias=True, label_smoothing=0.1)
        assert isinstance(loss, torchs)
        other.load_state_dict(loss.state_dict())
        torch.testing.assert_close(other(X, TARGET), loss(X, TARGET))


def chunks(n_rows: int, hidden: int, n_cols: int, sums: bool = True, itemsize: int = 2, **given):
    spare = 4 * hidden * n_cols if sums else 0
    return plan_chunks(n_rows, n_cols, itemsize * n_cols, itemsize, sums, spare, **given)


def test_chunks_of_shapes():
    """Golden: what the recorded measurements ran with."""
    assert [chunks(n, 4096, 128256).rows for n in (1, 2048, 4096, 8192, 12288)] == [1, 2048, 4096, 8192, 12288]
    assert chunks(16384, 4096, 128256).rows == 4096
    assert chunks(131072, 4096, 128256).rows == 4096
    assert chunks(8192, 4096, 128256, sums=False).rows == 2048
    assert chunks(8192, 2048, 151936).rows == 8192
    assert chunks(16384, 1024, 50257).rows == 8192
    assert chunks(10**6, 64, 1000).count == 2
    # chunks have one size, in whole tiles
    found = chunks(17000, 4096, 128256)
    assert found.rows % 128 == 0 and found.count == 5 and 17000 - 4 * found.rows > 0.9 * found.rows
    assert chunks(100, 64, 1000, chunk_rows=7).count == 15
    assert chunks(100, 64, 1000, chunk_rows=1000).rows == 100


@pytest.mark.parametrize("sums", [False, True])
def test_a_chunk_is_bounded(sums):
    for n_cols in (1, 100, 32000, 50257, 128256, 262144, 1048576):
        for hidden in (64, 1024, 8192):
            for n_rows in (1, 1000, 10**5, 10**7):
                found = chunks(n_rows, hidden, n_cols, sums)
                logits = found.rows * n_cols * 2
                most = (1 << 30) + 4096 * n_cols * 2 + (4 * hidden * n_cols if sums else 0)
                assert logits <= most and found.rows * found.count >= n_rows > found.rows * (found.count - 1)


@pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_token_logprobs"])
def test_transforms_of_torch_func(name):
    """vmap over rows and over weights, and torch.func.grad, by torch's formula on all logits."""
    made = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 5, 8, generator=made), torch.randn(2, 11, 8, generator=made)
    ids, function = torch.randint(0, 11, (3, 5), generator=made), getattr(fs, name)

    def call(x, weight, ids):
        return function(x, weight, ids).sum()

    got = torch.vmap(call, in_dims=(0, None, 0))(x, weight[0], ids)
    torch.testing.assert_close(got, torch.stack([call(x[i], weight[0], ids[i]) for i in range(3)]))
    got = torch.vmap(call, in_dims=(None, 0, None))(x[0], weight, ids[0])
    torch.testing.assert_close(got, torch.stack([call(x[0], w, ids[0]) for w in weight]))
    leaf = weight[0].clone().requires_grad_()
    call(x[0], leaf, ids[0]).backward()
    torch.testing.assert_close(torch.func.grad(call, argnums=1)(x[0], weight[0], ids[0]), leaf.grad)
    of_each = torch.vmap(torch.func.grad(call, argnums=1), in_dims=(0, None, 0))(x, weight[0], ids)
    torch.testing.assert_close(of_each[0], leaf.grad)


def test_exported_losses_keep_the_gradients_of_what_they_are_called_with():
    """Nothing requires a gradient while a program is exported."""
    target, hidden = torch.tensor([1, 2, 0]), torch.randn(3, 4)
    head, trunk = fs.nn.LinearCrossEntropyLoss(5, 7), torch.nn.Linear(4, 5)
    with torch.no_grad():
        exported = torch.export.export(head, (torch.randn(3, 5), target)).module()
    found = torch.autograd.grad(exported(trunk(hidden), target), trunk.weight)
    wanted = torch.autograd.grad(head(trunk(hidden), target), trunk.weight)
    torch.testing.assert_close(found, wanted)


def test_meta_tensors_and_a_hidden_size_of_0():
    target = torch.tensor([1, 2, 0])
    meta = [torch.empty(3, 5, device="meta"), torch.empty(7, 5, device="meta"), target.to("meta")]
    assert fs.linear_cross_entropy(*meta).device.type == "meta" and fs.linear_token_logprobs(*meta).shape == (3,)
    x, weight = torch.randn(3, 0), torch.randn(7, 0)
    torch.testing.assert_close(fs.linear_cross_entropy(x, weight, target), torch.tensor(7.0).log())
    torch.testing.assert_close(fs.linear_token_logprobs(x, weight, target), -torch.tensor(7.0).log().expand(3))
