"""The losses' operators on a GPU: inductor in one graph, memory, CUDA graphs, autocast, no waiting, bad targets."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch.library import opcheck

import fused_softmax as fs
from fused_softmax.lab import reference
from fused_softmax.launch.options import weight_facts_of

pytestmark = pytest.mark.gpu

ops = torch.ops.fused_softmax
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
WIDTHS = (100, 4096, 50257, 128256)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def batch(n_cols: int, dtype: torch.dtype, n_rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    x = (torch.randn(n_rows, n_cols, device="cuda") * 3).to(dtype).requires_grad_()
    target = torch.randint(0, n_cols, (n_rows,), device="cuda")
    target[1] = -100
    return x, target


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, **options)


def statistics(x: torch.Tensor, ids: torch.Tensor) -> Any:
    return fs.token_logprobs(x, ids, temperature=0.7, return_entropy=True, return_logsumexp=True)


LOSSES = {
    "cross_entropy": lambda x, t: fs.cross_entropy(x, t, z_loss=1e-4) * 0.5,
    "token_logprobs": lambda x, t: sum(y.sum() for y in statistics(x, t.clamp(0))),
    "masked_softmax": lambda x, t: (
        fs.masked_softmax(x, t[:, None] >= 0, scale=0.5, fully_masked="zero").float().square().sum()
    ),
}
each = pytest.mark.parametrize("name", LOSSES)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_opcheck(dtype):
    def check(op: Any, arguments: tuple) -> None:
        opcheck(op.default, arguments, rtol=1e-2, atol=1e-2)

    x, target = batch(40, dtype)
    weight = torch.rand(40, device="cuda")
    given = (x, target, weight, weight_facts_of(weight, 0.1), -100, "mean", 0.1, 5.0, 0.1, None)
    check(ops.cross_entropy, given)
    loss, moments = ops.cross_entropy(x.detach(), *given[1:])
    check(ops.cross_entropy_backward, (torch.rand_like(loss), moments, x.detach(), *given[1:]))
    ids = torch.randint(0, 40, (5, 3), device="cuda")
    check(ops.token_logprobs, (x, ids, None, 0.7, True))
    *found, moments = ops.token_logprobs(x.detach(), ids, None, 0.7, True)
    upstream = [torch.rand_like(t) for t in found]
    check(ops.token_logprobs_backward, (*upstream, moments, found[1], x.detach(), ids, None, 0.7))
    check(ops.masked_softmax, (x, target[:, None] >= 0, 0.5, True, True))
    y = ops.masked_softmax(x.detach(), None, 0.5, True, False)
    check(ops.masked_softmax_backward, (y, torch.randn_like(y), target[:, None] >= 0, 0.5, True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_cols", WIDTHS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_cross_entropy(reduction, n_cols, dtype):
    x, target = batch(n_cols, dtype)
    options = dict(reduction=reduction, label_smoothing=0.1, softcap=30.0, z_loss=1e-4)
    exact = x.detach().double().requires_grad_()
    want = reference.cross_entropy(exact, target, **options)
    loss = compiled(lambda x, t: fs.cross_entropy(x, t, **options))(x, target)
    torch.testing.assert_close(loss.double(), want, rtol=5e-5, atol=5e-5)
    loss.backward(torch.full_like(loss, 0.3))
    want.backward(torch.full_like(want, 0.3))
    assert x.grad.dtype is dtype and not x.grad[1].any()
    assert (x.grad.double() - exact.grad).abs().max() <= TOLERANCE[dtype] * exact.grad.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_cols", WIDTHS)
def test_token_logprobs(n_cols, dtype):
    x, target = batch(n_cols, dtype)
    ids, exact = target.clamp(0), x.detach().double().requires_grad_()
    log_p = torch.log_softmax(exact / 0.7, -1)
    chosen = log_p.gather(-1, ids[:, None])[:, 0]
    want = (chosen, -(log_p.exp() * log_p).sum(-1), (exact / 0.7).logsumexp(-1))
    got = compiled(statistics)(x, ids)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=5e-5, atol=5e-5)
    sum(a.sum() for a in got).backward()
    sum(b.sum() for b in want).backward()
    assert (x.grad.double() - exact.grad).abs().max() <= TOLERANCE[dtype] * exact.grad.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_cols", [64, 1023, 8192, 50257])
@pytest.mark.parametrize("causal", [False, True])
def test_masked_softmax(causal, n_cols, dtype):
    x = (torch.randn(2, 3, 4, n_cols, device="cuda") * 2).to(dtype)
    masks = (None, torch.rand(2, 1, 1, n_cols, device="cuda") > 0.3, torch.randn(1, 4, n_cols, device="cuda").to(dtype))
    for mask in masks:
        ours, own = (x.clone().requires_grad_() for _ in range(2))

        def masked(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            return fs.masked_softmax(x, mask, scale=0.5, causal=causal, fully_masked="zero")

        dy = torch.randn_like(x)
        y, want = compiled(masked)(ours, mask), masked(own, mask)
        y.backward(dy)
        want.backward(dy)
        torch.testing.assert_close((y, ours.grad), (want, own.grad), rtol=TOLERANCE[dtype], atol=1e-6)


@each
def test_one_graph_serves_every_width(name):
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    kept = {
        "cross_entropy": lambda x, t: fs.cross_entropy(x, t),
        "token_logprobs": lambda x, t: fs.token_logprobs(x, t.clamp(0)),
        "masked_softmax": lambda x, t: fs.masked_softmax(x, causal=True),
    }[name]
    loss = compiled(kept, backend=counter)
    for n_rows, n_cols in ((3, 17), (4, 33), (5, 1000), (2, 4096), (7, 50257)):
        x, target = batch(n_cols, torch.bfloat16, n_rows)
        for t, dim in ((x, 0), (x, 1), (target, 0)):
            torch._dynamo.mark_dynamic(t, dim)
        y = loss(x, target)
        torch.testing.assert_close(y, kept(x, target), rtol=1e-2, atol=1e-5)
        torch.autograd.grad(y, x, torch.ones_like(y))
    assert counter.frame_count == 1


def peak(function: Callable[[], Any]) -> int:
    """Bytes that a call allocates at most, what it returns included, after the calls that compile."""
    for _ in range(2):
        function()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return torch.cuda.max_memory_allocated() - before


def test_memory_of_the_forwards():
    x, target = batch(128256, torch.bfloat16, 2048)
    x, ids = x.detach(), target.clamp(0)
    logprobs, loss = compiled(statistics), compiled(LOSSES["cross_entropy"])
    assert peak(lambda: logprobs(x, ids)) < 1 << 20
    assert peak(lambda: loss(x, target)) < 1 << 20


@pytest.mark.parametrize("name", ["cross_entropy", "token_logprobs"])
def test_training_allocates_the_gradient_and_little_beside(name):
    x, target = batch(50257, torch.bfloat16, 1024)
    loss = compiled(LOSSES[name])
    assert peak(lambda: torch.autograd.grad(loss(x, target), x)) < x.numel() * x.element_size() + (1 << 20)


@each
def test_cuda_graphs_of_the_compiler(name):
    x, target = batch(4096, torch.bfloat16, 64)
    step = compiled(lambda x, t: LOSSES[name](x * 1.0, t), mode="reduce-overhead")
    for _ in range(5):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
            target.random_(0, 4096)
        torch.compiler.cudagraph_mark_step_begin()
        loss = step(x, target)
        (dx,) = torch.autograd.grad(loss, x)
        want = LOSSES[name](x, target)
        torch.testing.assert_close(loss.clone(), want, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(dx.clone(), torch.autograd.grad(want, x)[0], rtol=2e-2, atol=1e-4)


@each
def test_no_host_synchronisation(name):
    x, target = batch(4096, torch.bfloat16)
    loss = compiled(LOSSES[name])
    for _ in range(2):
        torch.autograd.grad(loss(x, target), x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(loss(x, target), x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each
def test_autocast_is_eagers(name):
    x, target = batch(1000, torch.float16)
    with torch.autocast("cuda", torch.float16):
        got, want = compiled(LOSSES[name])(x, target), LOSSES[name](x, target)
    assert got.dtype is want.dtype
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("bad", [5000, -1, 1 << 40])
def test_a_target_outside_is_a_device_assertion(bad):
    """In a process of its own: an assertion ends the CUDA context."""
    script = textwrap.dedent(f"""
        import torch, fused_softmax as fs
        x = torch.randn(4, 4096, device="cuda", requires_grad=True)
        loss = torch.compile(fs.cross_entropy, fullgraph=True)
        loss(x, torch.tensor([1, {bad}, 2, 3], device="cuda"))
        torch.cuda.synchronize()
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode != 0
    assert "device-side assert" in done.stderr and "target out of bounds" in done.stderr


def test_ids_outside_are_nan():
    x = torch.randn(2, 1000, device="cuda", requires_grad=True)
    got = compiled(fs.token_logprobs)(x, torch.tensor([[1, 1000], [-1, 1 << 40]], device="cuda"))
    assert got.isnan().tolist() == [[False, True], [True, True]]
    got[0, 0].backward()
    assert x.grad.isfinite().all()
