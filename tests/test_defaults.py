"""torch's default dtype and default device: no result depends on either."""

from __future__ import annotations

import pytest
import torch
from cases import dtype_id

import fused_softmax as fs
from fused_softmax.integrations import causal_lm_loss, selective_log_softmax

pytestmark = pytest.mark.interpreted

IDS, WEIGHT = torch.tensor([1, 2, 0]), torch.tensor([0.5, 1.0, 2.0, 0.25, 3.0])
MASK = torch.tensor([[True, False, True, True, False]])
TEMPERATURE, TWO = torch.tensor([0.5, 1.0, 2.0]), torch.tensor(2.0)
LABELS, ITEMS = torch.tensor([[0, 1, 2]]), torch.tensor(70000)
OPS = {
    "softmax": lambda x: fs.softmax(x, 0),
    "log_softmax": lambda x: fs.log_softmax(x),
    "logsumexp": lambda x: fs.logsumexp(x, 1),
    "softmax, out": lambda x: fs.softmax(x.detach(), -1, out=torch.empty(0, dtype=x.dtype, device="cpu")),
    "torch.softmax": lambda x: torch.softmax(x, 1),
    "safe_softmax": lambda x: torch.ops.aten._safe_softmax(x, -1),
    "cross_entropy": lambda x: fs.cross_entropy(x, IDS, WEIGHT, label_smoothing=0.1),
    "cross_entropy, all": lambda x: fs.cross_entropy(x, IDS, reduction="none", z_loss=0.1, softcap=3.0),
    "cross_entropy, sum": lambda x: fs.cross_entropy(x, IDS, WEIGHT, reduction="sum", z_loss=0.1),
    "token_logprobs": lambda x: fs.token_logprobs(x, IDS, temperature=TEMPERATURE, return_entropy=True)[:2],
    "token_logprobs, one temperature": lambda x: fs.token_logprobs(x, IDS, temperature=TWO),
    "masked_softmax": lambda x: fs.masked_softmax(x, MASK, causal=True, fully_masked="zero"),
    "masked_softmax, added": lambda x: fs.masked_softmax(x, WEIGHT, scale=0.3),
    "causal_lm_loss": lambda x: causal_lm_loss({"logits": x[None]}, LABELS),
    "causal_lm_loss, a number": lambda x: causal_lm_loss({"logits": x[None]}, LABELS, 70000),
    "causal_lm_loss, a tensor": lambda x: causal_lm_loss({"logits": x[None]}, LABELS, ITEMS),
    "selective_log_softmax": lambda x: selective_log_softmax(x, IDS),
}
DEFAULTS = {
    "float16": lambda: torch.set_default_dtype(torch.float16),
    "bfloat16": lambda: torch.set_default_dtype(torch.bfloat16),
    "float64": lambda: torch.set_default_dtype(torch.float64),
    "meta": lambda: torch.set_default_device("meta"),
}


@pytest.fixture(autouse=True)
def _torchs_defaults():
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


def everything(op, x: torch.Tensor) -> list[torch.Tensor]:
    """Results, gradients, and gradients of gradients."""
    x = x.detach().requires_grad_()
    results = op(x)
    results = list(results) if isinstance(results, tuple) else [results]
    found = list(results)
    if results[0].requires_grad:
        (grad,) = torch.autograd.grad(sum(t.double().square().sum() for t in results), x, create_graph=True)
        found.append(grad)
        found.append(torch.autograd.grad(grad.double().square().sum(), x)[0])
    return [t.detach() for t in found]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=dtype_id)
@pytest.mark.parametrize("name", OPS)
def test_results_do_not_depend_on_torchs_defaults(name, dtype):
    x = (torch.arange(15.0).view(3, 5).sin() * 3).to(dtype)
    with fs.patch():
        want = everything(OPS[name], x)
        for default, set_it in DEFAULTS.items():
            set_it()
            got = everything(OPS[name], x)
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
            assert [t.dtype for t in got] == [t.dtype for t in want], default
            torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_a_count_that_float16_has_not():
    torch.set_default_dtype(torch.float16)
    x = torch.randn(1, 3, 5, dtype=torch.float32)
    loss = causal_lm_loss({"logits": x}, LABELS, 70000)
    want = torch.nn.functional.cross_entropy(x[0, :2], LABELS[0, 1:], reduction="sum") / 70000
    torch.testing.assert_close(loss, want)
