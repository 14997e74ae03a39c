"""linear_token_logprobs against token_logprobs of all logits: values, gradients, options, and torch.compile."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from cases import dtype_id
from linear import assert_as_torch, layer, of_logits

import fused_softmax as fs
from fused_softmax.lab import reference, torch_ways

pytestmark = pytest.mark.interpreted


def check(dtype: torch.dtype, ids: torch.Tensor, bias: bool = False, chunk_rows: int | None = 3, **options) -> None:
    tensors = layer(7, 16, 131, dtype, bias=bias)
    x, weight, linear_bias = tensors
    given = dict(return_entropy=True, return_logsumexp=True) | options
    found = fs.linear_token_logprobs(x, weight, ids, linear_bias=linear_bias, chunk_rows=chunk_rows, **given)
    upstream = [torch.randn(t.shape) for t in found]

    def mixed(way):
        # one number of all outputs, so that one gradient holds all of theirs
        return lambda z: sum((t * g.to(t.dtype)).sum() for t, g in zip(way(z, ids, **given), upstream, strict=True))

    total = sum((t * g.to(t.dtype)).sum() for t, g in zip(found, upstream, strict=True))
    grads = torch.autograd.grad(total, [t for t in tensors if t is not None])
    exact = of_logits(mixed(reference.token_logprobs), torch.float64, tensors, None)
    own = of_logits(mixed(torch_ways.token_logprobs), dtype, tensors, None)
    assert_as_torch(list(grads), own[1:], exact[1:], dtype)
    with torch.no_grad():
        z = F.linear(*(None if t is None else t.double() for t in tensors))
        torchs_z = F.linear(*tensors)
        exact_parts = reference.token_logprobs(z, ids, **given)
        own_parts = torch_ways.token_logprobs(torchs_z, ids, **given)
    assert_as_torch(list(found), list(own_parts), list(exact_parts), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=dtype_id)
def test_values_and_gradients(dtype):
    check(dtype, torch.randint(0, 131, (7,)))
    check(dtype, torch.randint(0, 131, (7, 3)), bias=True, chunk_rows=None)


def test_temperatures():
    ids = torch.randint(0, 131, (7,))
    for temperature in (0.7, torch.tensor(2.0), torch.rand(7) + 0.5):
        check(torch.float32, ids, temperature=temperature)


def test_what_is_returned():
    x, weight, _ = layer(6, 8, 20, torch.float32)
    ids = torch.randint(0, 20, (2, 3))
    logprobs = fs.linear_token_logprobs(x.view(2, 3, 8), weight, ids)
    want = fs.token_logprobs(F.linear(x, weight).view(2, 3, 20), ids)
    torch.testing.assert_close(logprobs, want)
    found = fs.linear_token_logprobs(x.view(2, 3, 8), weight, ids, return_entropy=True)
    assert isinstance(found, fs.TokenStatistics) and found.logsumexp is None and found.entropy.shape == (2, 3)
    found.entropy.sum().backward()  # of the entropy alone
    assert x.grad is not None and weight.grad is not None
    assert fs.linear_token_logprobs(x[:0], weight, ids.view(-1)[:0]).shape == (0,)


def test_a_temperature_with_a_gradient_is_torchs():
    x, weight, _ = layer(6, 8, 20, torch.float32)
    temperature = torch.tensor(1.5, requires_grad=True)
    fs.linear_token_logprobs(x, weight, torch.arange(6), temperature=temperature).sum().backward()
    got = temperature.grad.clone()
    temperature.grad = None
    torch.log_softmax(F.linear(x, weight) / temperature, -1).gather(1, torch.arange(6)[:, None]).sum().backward()
    torch.testing.assert_close(got, temperature.grad)


def test_a_gradient_of_the_gradient_is_an_error():
    x, weight, _ = layer(3, 8, 20, torch.float32)
    loss = fs.linear_token_logprobs(x, weight, torch.arange(3)).sum()
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_compile_takes_one_operator():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def loss(x, weight, ids, temperature):
        found = fs.linear_token_logprobs(x, weight, ids, temperature=temperature, return_entropy=True)
        return (found.logprobs * 2 - found.entropy).sum()

    compiled = torch.compile(loss, backend=counter, fullgraph=True, dynamic=True)
    for n_rows in (6, 7, 9):
        x, weight, _ = layer(n_rows, 8, 20, torch.float32)
        given = (torch.randint(0, 20, (n_rows,)), torch.rand(n_rows) + 0.5)
        got = torch.autograd.grad(compiled(x, weight, *given), (x, weight))
        for ours, own in zip(got, torch.autograd.grad(loss(x, weight, *given), (x, weight)), strict=True):
            torch.testing.assert_close(ours, own)
    assert counter.frame_count == 1
    with torch.no_grad():
        compiled(x.detach(), weight, *given)


def test_operators_pass_opcheck():
    x, weight, _ = layer(4, 8, 20, torch.float32)
    torch.library.opcheck(
        torch.ops.fused_softmax.linear_token_logprobs,
        (x, weight, None, torch.zeros(4, 1, dtype=torch.int64), None, 0.5, True, torch.float32, 3, [True, True, False]),
        test_utils=("test_schema", "test_faketensor"),
    )
