"""The operators by PyTorch's own examination, and which way a call takes to the kernels; threads and fork.

The way is seen at the kernels' entry points: where torch's own would have answered, a test fails.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from watched import both, close, watch

import fused_softmax as fs
from fused_softmax.torch_ops import softmax as torch_softmax
from fused_softmax.torch_ops.route import can_bypass_dispatcher

pytestmark = pytest.mark.interpreted

ops = torch.ops.fused_softmax


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    return watch(monkeypatch)


class Ops(TorchDispatchMode):
    """Remembers which operators were dispatched."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


# --- every operator by PyTorch's own examination ----------------------------------------------------------------------


def samples() -> list[tuple]:
    x = torch.randn(3, 5, requires_grad=True)
    half = torch.randn(2, 3, 4).half().requires_grad_()
    double = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    found = []
    for forward, backward in ((ops.softmax, ops.softmax_backward), (ops.log_softmax, ops.log_softmax_backward)):
        found += [(forward, (x, -1)), (forward, (x, 0)), (forward, (half, 1, torch.float32)), (forward, (double, 1))]
        found += [
            (forward, (torch.randn(0, 3), 1)),
            (forward, (torch.tensor(2.0), 0)),
            (forward, (x, 1, torch.float16)),
        ]
        for t, dtype in ((x, x.dtype), (half, torch.float32), (double, double.dtype)):
            y = forward(t.detach(), -1, dtype).requires_grad_()
            found.append((backward, (torch.randn_like(y).requires_grad_(), y, -1, t.dtype)))
    for t in (x, half, double):
        for dims, keepdim in (([1], False), ([0], True), ([0, 1], False)):
            lse = ops.logsumexp(t.detach(), dims, keepdim).requires_grad_()
            found.append((ops.logsumexp, (t, dims, keepdim)))
            found.append((ops.logsumexp_backward, (torch.randn_like(lse).requires_grad_(), t, lse, dims, keepdim)))
    return found


@pytest.mark.parametrize("operator", ["softmax", "log_softmax", "softmax_backward", "log_softmax_backward"])
def test_opcheck(operator):
    # the interpreter's bfloat16 and half results carry their own rounding through every route: eight ulp
    mine = [arguments for op, arguments in samples() if op is getattr(ops, operator)]
    assert len(mine) >= 3
    for arguments in mine:
        opcheck(getattr(ops, operator).default, arguments, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("operator", ["logsumexp", "logsumexp_backward"])
def test_opcheck_of_logsumexp(operator):
    mine = [arguments for op, arguments in samples() if op is getattr(ops, operator)]
    assert len(mine) == 9
    for arguments in mine:
        opcheck(getattr(ops, operator).default, arguments, rtol=1e-2, atol=1e-2)


def test_the_operators_have_torchs_errors():
    x = torch.randn(2, 3)
    for operator in (ops.softmax, ops.log_softmax):
        with pytest.raises(IndexError):
            operator(x, 2)
        with pytest.raises(IndexError):
            operator(x.to("meta"), -3)
        with pytest.raises(NotImplementedError):
            operator(x.long(), 0)
        with pytest.raises(NotImplementedError):
            operator(x.long().to("meta"), 0)


@pytest.mark.parametrize("through_the_operator", [False, True])
@both
def test_only_the_output_is_saved(ours, torchs, through_the_operator):
    x = torch.randn(4, 64, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = getattr(ops, torchs.__name__)(x, -1) if through_the_operator else ours(x, -1)
    assert [t.data_ptr() for t in saved] == [y.data_ptr()]


# --- the short way and the dispatcher's -------------------------------------------------------------------------------


@both
def test_eager_calls_leave_the_dispatcher_out(ours, torchs, calls):
    x = torch.randn(3, 8, requires_grad=True)
    name = f"{torchs.__name__}_backward"
    assert can_bypass_dispatcher(x)
    ours(x).sum().backward()
    assert calls == ["softmax_forward", "softmax_backward"]
    with Ops() as seen:
        assert not can_bypass_dispatcher(x)
        ours(x).sum().backward()
    assert f"fused_softmax::{torchs.__name__}" in seen.names
    assert f"fused_softmax::{name}" in seen.names


@both
def test_a_half_is_not_cast_on_its_way_to_float(ours, torchs, monkeypatch):
    """dtype=float32 of 16-bit input is fused, both ways round, eager and compiled; other dtypes are cast before."""
    seen = []
    forward, backward = torch_softmax.forward_by_kernel, torch_softmax.backward_by_kernel
    monkeypatch.setattr(
        torch_softmax, "forward_by_kernel", lambda x, *a: (seen.append((x.dtype, a[1])), forward(x, *a))[1]
    )
    monkeypatch.setattr(
        torch_softmax, "backward_by_kernel", lambda dy, *a: (seen.append((dy.dtype, a[2])), backward(dy, *a))[1]
    )
    half, single, wide = torch.float16, torch.float32, torch.float64
    x = torch.randn(3, 8).half().requires_grad_()
    torch._dynamo.reset()
    for function in (ours, torch.compile(ours, backend="aot_eager", fullgraph=True)):
        seen.clear()
        function(x, -1, dtype=single).sum().backward()
        assert seen == [(half, single), (single, half)]
    seen.clear()
    ours(torch.randn(3, 8), -1, dtype=half)
    assert seen == [(half, half)]
    assert ours(x, -1, dtype=wide).dtype is wide
    assert len(seen) == 1


@both
def test_negated_views_are_read_as_what_they_stand_for(ours, torchs):
    x = torch.randn(3, 8, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    close(ours(x, -1), torchs(x, -1))
    assert not torch.allclose(torchs(x, -1), torchs(-x, -1))


@both
def test_subclasses_are_torchs(ours, torchs):
    class Tagged(torch.Tensor):
        pass

    x = torch.randn(2, 3).as_subclass(Tagged)
    y = ours(x, -1)
    assert type(y) is Tagged
    close(y.as_subclass(torch.Tensor), torchs(x.as_subclass(torch.Tensor), -1))
    parameter = torch.nn.Parameter(torch.randn(2, 3))
    assert can_bypass_dispatcher(parameter)


@both
def test_sparse_and_nested_tensors_get_torchs_answer(ours, torchs):
    with pytest.raises(Exception) as own:
        torchs(torch.eye(3).to_sparse(), -1)
    with pytest.raises(own.type):
        ours(torch.eye(3).to_sparse(), -1)
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])
    if torchs is torch.softmax:
        for got, want in zip(ours(nested, -1).unbind(), torchs(nested, -1).unbind(), strict=True):
            close(got, want)


@both
def test_symbolic_tracing_keeps_the_call(ours, torchs):
    traced = torch.fx.symbolic_trace(lambda x: ours(x, -1))
    (call,) = (node for node in traced.graph.nodes if node.op not in ("placeholder", "output"))
    assert call.op == "call_function" and call.target is ours
    x = torch.randn(2, 3)
    close(traced(x), torchs(x, -1))


@both
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_jit_tracing_keeps_the_op(ours, torchs):
    traced = torch.jit.trace(lambda x: ours(x, -1), torch.randn(2, 3))
    x = torch.randn(2, 3)
    close(traced(x), torchs(x, -1))


# --- processes and threads --------------------------------------------------------------------------------------------


def test_eight_threads():
    inputs = [torch.randn(3, 64 + i) for i in range(8)]
    results: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def work(i: int) -> None:
        x = inputs[i].clone().requires_grad_()
        y = fs.log_softmax(x)
        y[:, 0].sum().backward()
        results[i] = (y.detach(), x.grad)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    for i, x in enumerate(inputs):
        own = x.clone().requires_grad_()
        y = own.log_softmax(-1)
        y[:, 0].sum().backward()
        close(results[i][0], y.detach())
        close(results[i][1], own.grad)


def test_fork_after_import():
    """A process that imported us, and no more, may fork: its children run the kernels."""
    code = """
        import os, torch, fused_softmax as fs
        assert not torch.cuda.is_initialized()
        children = [os.fork()]
        if children[0] == 0:
            try:
                x = torch.randn(2, 33)
                y = fs.log_softmax(x.requires_grad_())
                y[:, 0].sum().backward()
                torch.testing.assert_close(y, x.log_softmax(-1))
                with fs.patch():
                    torch.testing.assert_close(torch.softmax(x, -1), fs.softmax(x))
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitpid(children[0], 0)[1] == 0
        torch.testing.assert_close(fs.softmax(torch.ones(2, 4)), torch.full((2, 4), 0.25))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
