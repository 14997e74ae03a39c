"""The operators on a GPU: opcheck, inductor, CUDA graphs, autocast, streams, devices, threads, fork, the cache."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from cases import DTYPES, assert_contract, dtype_id, logits
from torch.library import opcheck

import fused_softmax as fs

pytestmark = pytest.mark.gpu

ops = torch.ops.fused_softmax
PAIRS = [(fs.softmax, torch.softmax), (fs.log_softmax, torch.log_softmax)]
both = pytest.mark.parametrize(("ours", "torchs"), PAIRS, ids=["softmax", "log_softmax"])


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    eps = torch.finfo(want.dtype).eps
    torch.testing.assert_close(got, want, rtol=4 * eps, atol=4 * eps)


def gradients(function, x: torch.Tensor, dy: torch.Tensor, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    y = function(x, -1, **kwargs)
    y.backward(dy.to(y.dtype))
    return y.detach(), x.grad


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_opcheck(dtype):
    x = torch.randn(3, 40, device="cuda").to(dtype).requires_grad_()
    for forward, backward in ((ops.softmax, ops.softmax_backward), (ops.log_softmax, ops.log_softmax_backward)):
        opcheck(forward.default, (x, -1), rtol=1e-2, atol=1e-2)
        opcheck(forward.default, (x, 0, torch.float32), rtol=1e-2, atol=1e-2)
        y = forward(x.detach(), -1).requires_grad_()
        opcheck(backward.default, (torch.randn_like(y).requires_grad_(), y, -1, dtype), rtol=1e-2, atol=1e-2)
    lse = ops.logsumexp(x.detach(), [1]).requires_grad_()
    opcheck(ops.logsumexp.default, (x, [1]), rtol=1e-2, atol=1e-2)
    opcheck(ops.logsumexp_backward.default, (torch.randn_like(lse).requires_grad_(), x, lse, [1]), rtol=1e-2, atol=1e-2)


@both
def test_inductor_in_one_graph_for_every_width(ours, torchs):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(lambda x: ours(x * 2, -1) + 1, backend=counter, fullgraph=True)
    for n_rows, n_cols in ((3, 17), (4, 33), (5, 1000), (2, 4096), (7, 50257)):
        x = torch.randn(n_rows, n_cols, device="cuda", requires_grad=True)
        for dim in (0, 1):
            torch._dynamo.mark_dynamic(x, dim)
        y = compiled(x)
        close(y.detach(), torchs(x.detach() * 2, -1) + 1)
        y.sum().backward()
    assert counter.frame_count == 1


@both
def test_forward_and_backward_in_a_cuda_graph(ours, torchs):
    """Nothing but a first call of that shape is needed before: no synchronisation, no allocation but the results."""
    x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    gradients(ours, x, dy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ours(x, -1)
        (dx,) = torch.autograd.grad(y, x, dy)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    want, gradient = gradients(torchs, x, dy)
    close(y.detach(), want)
    torch.testing.assert_close(dx, gradient, rtol=0.02, atol=0.02)


@both
def test_a_captured_call_allocates_its_result_alone(ours, torchs):
    x = torch.randn(64, 8192, device="cuda")
    ours(x, -1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = ours(x, -1)
    assert torch.cuda.max_memory_allocated() - before == y.numel() * y.element_size()


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=dtype_id)
def test_autocast_promotes(ours, torchs, dtype):
    x, dy = torch.randn(5, 77, device="cuda").to(dtype), torch.randn(5, 77, device="cuda")
    for compile in (False, True):
        function = torch.compile(lambda x, dim: ours(x, dim), backend="aot_eager", fullgraph=True) if compile else ours
        with torch.autocast("cuda", torch.float16):
            got, want = gradients(function, x, dy), gradients(torchs, x, dy)
        close(got[0], want[0])
        torch.testing.assert_close(got[1], want[1], rtol=0.02, atol=1e-3)
    with torch.autocast("cuda", torch.float16):
        lse, own = fs.logsumexp(x, -1), torch.logsumexp(x, -1)
    close(lse, own)


@both
def test_a_side_stream(ours, torchs):
    x = logits(64, 32768, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)  # what is launched on another stream would run before this ends
        z = x * 2
        y = ours(z, -1)
    torch.cuda.current_stream().wait_stream(stream)
    close(y, torchs(x * 2, -1))


@both
def test_the_device_that_is_not_current(ours, torchs):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x, dy = torch.randn(5, 4096, device="cuda:1"), torch.randn(5, 4096, device="cuda:1")
    assert torch.cuda.current_device() == 0
    for shape in ((5, 4096), (4096, 5)):
        got, want = gradients(ours, x.view(shape), dy.view(shape)), gradients(torchs, x.view(shape), dy.view(shape))
        close(got[0], want[0])
        close(got[1], want[1])
    assert torch.cuda.current_device() == 0


@both
def test_eight_threads(ours, torchs):
    """First calls of new shapes among them, so that compiling and launching overlap."""
    inputs = [torch.randn(3, 64 + 100 * i, device="cuda") for i in range(8)]
    results: dict[int, list] = {i: [] for i in range(8)}

    def work(i: int) -> None:
        for _ in range(10):
            x = inputs[i].clone().requires_grad_()
            y = ours(x, -1)
            y[:, 0].sum().backward()
            results[i].append((y.detach(), x.grad))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, x in enumerate(inputs):
        own = x.clone().requires_grad_()
        y = torchs(own, -1)
        y[:, 0].sum().backward()
        assert len(results[i]) == 10
        for got, gradient in results[i]:
            close(got, y.detach())
            close(gradient, own.grad)


def in_a_process(code: str, **changes: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, **changes}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_fork_after_import():
    """Importing makes no CUDA context, so that children of a process which imported us may have one."""
    done = in_a_process("""
        import os, torch, fused_softmax as fs
        child = os.fork()
        if child == 0:
            try:
                x = torch.randn(4, 1000, device="cuda", requires_grad=True)
                with fs.patch():
                    torch.log_softmax(x, -1)[:, 0].sum().backward()
                torch.testing.assert_close(fs.softmax(x).sum(-1), torch.ones(4, device="cuda"))
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert not torch.cuda.is_initialized()
        fs.softmax(torch.randn(4, 1000, device="cuda"))
    """)
    assert done.returncode == 0, done.stderr


def test_a_cache_directory_that_cannot_be_written_is_named():
    code = """
        import torch, fused_softmax as fs
        x = torch.randn(4, 1000, device="cuda")
        assert torch.equal(fs.softmax(x), torch.softmax(x, -1)) and torch.equal(fs.softmax(x), torch.softmax(x, -1))
    """
    done = in_a_process(code, TRITON_CACHE_DIR="/dev/null/cache")
    assert done.returncode == 0, done.stderr
    (message,) = [line for line in done.stderr.splitlines() if "UserWarning" in line]
    assert "PyTorch's own kernel runs" in message, message
    assert "TRITON_CACHE_DIR" in message, message
    assert "/dev/null/cache" in message, message


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_out(dtype):
    x = logits(5, 1000, dtype=dtype, device="cuda")
    for out in (torch.empty_like(x), torch.empty(0, device="cuda", dtype=dtype), torch.empty_like(x.t()).t()):
        assert fs.softmax(x, -1, out=out) is out
        assert_contract(out.contiguous(), x)
    in_place = x.clone()
    fs.softmax(in_place, -1, out=in_place)
    assert_contract(in_place, x)
