"""Frames that torch.compile watches while they run: a backward() in a compiled function, the rest after a graph break.

The dispatcher calls our kernels from inside such frames. Dynamo must not trace them as if a user had written them.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fused_softmax as fs

pytestmark = pytest.mark.interpreted

backends = pytest.mark.parametrize("backend", ["eager", "aot_eager"])
IDS = torch.tensor([1, 2, 0])
FUNCTIONS = {
    "torch.softmax": lambda x: torch.softmax(x, -1),
    "torch.log_softmax": lambda x: torch.log_softmax(x, 0),
    "torch.cross_entropy": lambda x: F.cross_entropy(x, IDS),
    "softmax": lambda x: fs.softmax(x, 0),
    "logsumexp": lambda x: fs.logsumexp(x, -1),
    "cross_entropy": lambda x: fs.cross_entropy(x, IDS),
    "token_logprobs": lambda x: fs.token_logprobs(x, IDS),
    "masked_softmax": lambda x: fs.masked_softmax(x, causal=True, scale=0.5),
    "operator": lambda x: torch.ops.fused_softmax.softmax(x, -1),
}


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def backward_inside(function, x):
    x = x.detach().requires_grad_()
    y = function(x)
    y.square().sum().backward()
    return y.detach(), x.grad


def broken_in_try(function, x):
    x = x.detach().requires_grad_()
    try:
        torch._dynamo.graph_break()
        y = function(x)
        torch._dynamo.graph_break()
        y.square().sum().backward()
    finally:
        x = x.detach_()
    return y.detach(), x.grad


def broken_in_patch(function, x):
    with fs.patch():
        y = function(x)
        torch._dynamo.graph_break()
        return y, function(x * 2)


CASES = [
    (name, backward_inside) if i % 2 else pytest.param(name, backward_inside, marks=pytest.mark.extended)
    for i, name in enumerate(FUNCTIONS)
]
CASES += [
    pytest.param(name, broken_in_try, marks=pytest.mark.extended) if i % 2 else (name, broken_in_try)
    for i, name in enumerate(FUNCTIONS)
]
CASES += [(name, broken_in_patch) for name in FUNCTIONS if "torch" in name]


@pytest.mark.sampled(3)
@backends
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "run"), CASES)
def test_frames_that_dynamo_watches(name, run, backend):
    x, function = torch.randn(3, 5), FUNCTIONS[name]
    want = run(function, x)
    with fs.patch():
        compiled = torch.compile(lambda x: run(function, x), backend=backend)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), want)


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "backend"), [*((name, "eager") for name in FUNCTIONS), ("softmax", "aot_eager")])
def test_a_backward_of_an_eager_graph(name, backend):
    """The forward ran outside; autograd's Python functions and patch()'s kernels run inside."""

    @torch.compile(backend=backend)
    def step(y):
        loss = y.square().sum()
        loss.backward()
        return loss

    grads = []
    for function in (lambda y: y.square().sum().backward(), step):
        x = torch.arange(15.0).view(3, 5).requires_grad_()
        with fs.patch():
            function(FUNCTIONS[name](x))
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0])


def test_the_mark_is_no_wrapper():
    """A call of a marked function costs what it did: it is the function itself."""
    from fused_softmax.torch_ops.library import untraced

    def function():
        pass

    assert untraced(function) is function
