"""patch(): what it takes, what it leaves, and that nothing of it stays.

Whether our kernels ran is counted at rows' entry points: a test here fails where torch's own would have answered.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections import deque
from operator import methodcaller
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, assert_contract, dtype_id
from watched import close, watch

import fused_softmax as fs
from fused_softmax.launch import torch_private
from fused_softmax.torch_ops import aten_kernels

pytestmark = pytest.mark.interpreted

INF = float("inf")
ATEN = torch.ops.aten


@pytest.fixture(autouse=True)
def torchs_own_again():
    before = registered()
    yield
    assert registered() == before


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    return watch(monkeypatch)


def registered() -> dict[str, str]:
    """Where the CPU kernels that patch() replaces come from."""
    names = ["_safe_softmax"]
    for op in ("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"):
        names += [op, f"{op}.out"]
    return {name: repr(torch.library.get_kernel(f"aten::{name}", "CPU")) for name in names}


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_the_whole_family_comes_here(dtype, calls):
    """Forward by the contract's rule; backward and the others as torch's own, but for rounding."""
    x = (torch.randn(3, 5) * 3).to(dtype)
    dy = torch.randn(3, 5).to(dtype)
    y, logp = torch.softmax(x, -1), torch.log_softmax(x, -1)
    dx = ATEN._softmax_backward_data(dy, y, -1, dtype), ATEN._log_softmax_backward_data(dy, logp, -1, dtype)
    safe = ATEN._safe_softmax(x, -1)
    assert calls == []
    with fs.patch():
        ours = torch.softmax(x, -1)
        close(torch.softmax(x, -1, out=torch.empty(0, dtype=dtype)), y)
        close(torch.log_softmax(x, -1), logp)
        close(torch.log_softmax(x, -1, out=torch.empty(5, 3, dtype=dtype).t()), logp)
        close(ATEN._safe_softmax(x, -1), safe)
        assert calls == ["softmax_forward"] * 5
        close(ATEN._softmax_backward_data(dy, y, -1, dtype), dx[0])
        close(ATEN._log_softmax_backward_data(dy, logp, -1, dtype), dx[1])
        out = torch.empty(3, 5, dtype=dtype)
        close(ATEN._softmax_backward_data.out(dy, y, -1, dtype, grad_input=out), dx[0])
        assert ATEN._log_softmax_backward_data.out(dy, logp, -1, dtype, out=out) is out
        close(out, dx[1])
        assert calls[5:] == ["softmax_backward"] * 4
    assert_contract(ours, x)
    assert len(calls) == 9


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("name", ["_softmax", "_log_softmax"])
def test_half_to_float(name, dtype, calls):
    """What CUDA does with dtype=float32, in one pass: no CPU kernel of torch's own can."""
    x = (torch.randn(4, 33) * 3).to(dtype)
    want = getattr(torch, name[1:])(x.double(), -1)
    with fs.patch():
        got = getattr(ATEN, name)(x, -1, True)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
        out = torch.empty(4, 33)
        assert getattr(ATEN, name).out(x, -1, True, out=out) is out
        assert torch.equal(out, got)
        dy = torch.randn(4, 33)
        dx = getattr(ATEN, f"{name}_backward_data")(dy, got, -1, dtype)
        assert dx.dtype == dtype
        own = getattr(ATEN, f"{name}_backward_data")(dy.double(), got.double(), -1, torch.float64)
        torch.testing.assert_close(dx.double(), own, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
        assert calls == ["softmax_forward"] * 2 + ["softmax_backward"]
        with pytest.raises(RuntimeError):  # there is no half to convert
            getattr(ATEN, name)(x.float(), -1, True)


def test_safe_softmax_of_masked_rows(calls):
    x = torch.tensor([[1.0, 2.0, -INF], [-INF] * 3, [INF, 1.0, 2.0], [float("nan"), 1.0, 2.0]])
    for dim in (0, 1):
        for dtype in (None, torch.float32):
            own = ATEN._safe_softmax(x, dim, dtype)
            with fs.patch():
                got = ATEN._safe_softmax(x, dim, dtype)
            close(got, own)
    assert got[1].eq(0).all()
    assert len(calls) == 4
    with fs.patch():
        assert ATEN._safe_softmax(torch.empty(0, 3), 1).shape == (0, 3)
        close(ATEN._safe_softmax(torch.tensor(-INF), 0), torch.tensor(0.0))


def test_what_is_not_ours_goes_to_the_kernel_that_was_there(calls):
    double = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    want = torch.softmax(double, -1)
    (gradient,) = torch.autograd.grad(want[:, 0].sum(), double)
    with fs.patch():
        got = torch.softmax(double, -1)
        assert torch.equal(got, want)
        assert torch.equal(torch.autograd.grad(got[:, 0].sum(), double)[0], gradient)
        assert torch.equal(
            torch.log_softmax(double, 0), torch.log_softmax(double, 0, out=torch.empty_like(want.detach()))
        )
        close(ATEN._safe_softmax(double, -1), want)
        for arguments in ((torch.ones(2, 3), 2), (torch.ones(2, 3).long(), 0), (torch.ones(2, dtype=torch.cfloat), 0)):
            with pytest.raises((IndexError, NotImplementedError)):
                torch.softmax(*arguments)
        with pytest.warns(UserWarning, match="resized"):
            torch.softmax(torch.ones(2, 3), -1, out=torch.empty(7))
        with pytest.raises(RuntimeError):
            torch.softmax(torch.ones(2, 3), -1, out=torch.empty(2, 3, dtype=torch.float16))
        assert F.gumbel_softmax(torch.randn(2, 4), hard=True).sum() == 2
    assert calls == ["softmax_forward"]


def test_autograd_and_its_gradient(calls):
    x = torch.randn(3, 6, requires_grad=True)
    target = torch.tensor([1, 0, 5])

    def twice(x):
        (dx,) = torch.autograd.grad(F.cross_entropy(x, target), x, create_graph=True)
        (ddx,) = torch.autograd.grad((dx**2).sum(), x)
        return dx.detach(), ddx

    own = twice(x)
    with fs.patch():
        for got, want in zip(twice(x), own, strict=True):
            close(got, want)
    assert "softmax_forward" in calls
    assert "softmax_backward" in calls


def test_gradients_that_are_none_or_expanded(calls):
    x = torch.randn(3, 6, requires_grad=True)
    with fs.patch():
        torch.softmax(x, -1).sum().backward()
        assert x.grad.abs().max() < 1e-6
        y = torch.log_softmax(x, -1)
        first, unused = torch.unbind(torch.stack([y, y * 2]))
        (dx,) = torch.autograd.grad(first[0, 0], x)
    own = torch.autograd.grad(torch.log_softmax(x, -1)[0, 0], x)[0]
    close(dx, own)
    assert calls.count("softmax_backward") == 2


def test_scoped_by_op(calls):
    x = torch.randn(2, 3)
    with fs.patch(ops=("softmax",)):
        torch.log_softmax(x, -1)
        assert calls == []
        torch.softmax(x, -1)
        assert calls == ["softmax_forward"]
    with fs.patch("log_softmax"):
        torch.softmax(x, -1)
        torch.log_softmax(x, -1)
    assert len(calls) == 2
    with pytest.raises(ValueError, match="gumbel"):
        fs.patch(ops=("softmax", "gumbel"))


def test_nests(calls):
    x = torch.randn(2, 3)
    outer, inner = fs.patch(), fs.patch(ops=["softmax"])
    with outer:
        with inner, outer:
            torch.softmax(x, -1)
        torch.softmax(x, -1)
        torch.log_softmax(x, -1)
    assert len(calls) == 3
    torch.softmax(x, -1)
    assert len(calls) == 3


def test_decorates(calls):
    @fs.patch()
    def attend(x, *, depth=2):
        """Docs."""
        return attend(x, depth=depth - 1) if depth else torch.softmax(x, -1)

    attend(torch.randn(2, 3))
    assert calls == ["softmax_forward"]
    assert attend.__doc__ == "Docs."
    torch.softmax(torch.randn(2, 3), -1)
    assert len(calls) == 1


def test_enable_and_disable(calls):
    patch = fs.patch()
    patch.enable()
    patch.enable()
    patch.disable()
    torch.softmax(torch.randn(2, 3), -1)
    patch.disable()
    torch.softmax(torch.randn(2, 3), -1)
    assert calls == ["softmax_forward"]
    with pytest.raises(RuntimeError, match="enable"):
        patch.disable()


def test_an_exception_ends_it():
    before = registered()
    with pytest.raises(KeyError), fs.patch():
        assert registered() != before
        raise KeyError
    assert registered() == before


def test_modes_and_vmap_stay_torchs(calls):
    x = torch.randn(3, 4, 5)
    with fs.patch():
        close(torch.vmap(lambda t: torch.softmax(t, 0))(x), torch.softmax(x.double(), 1).float())
        tangent = torch.func.jvp(lambda t: torch.softmax(t, -1), (x,), (x,))[1]
    close(tangent, torch.func.jvp(lambda t: torch.softmax(t, -1), (x,), (x,))[1])
    assert len(calls) >= 2


def test_another_library_s_override_comes_back():
    ran = []
    before = torch.library.get_kernel("aten::_softmax", "CPU")
    keyset = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    library = torch.library.Library("aten", "IMPL")

    def theirs(x, dim, half_to_float):
        ran.append(x.dtype)
        return before.call_boxed(keyset, x, dim, half_to_float)

    library.impl("_softmax", theirs, "CPU")
    try:
        with fs.patch():
            torch.softmax(torch.randn(2, 3), -1)
            assert ran == []
            torch.softmax(torch.randn(2, 3).double(), -1)
            assert ran == [torch.float64]
        torch.softmax(torch.randn(2, 3), -1)
        assert ran == [torch.float64, torch.float32]
    finally:
        library._destroy()


def test_threads_that_come_and_go():
    """Threads use softmax, all the time, while others patch and release: nobody crashes or gets a wrong answer."""
    x = torch.randn(2, 7, dtype=torch.float64)  # float64: our kernels pass it on, so this is about the routing alone
    want = torch.softmax(x, -1)
    failures: list[object] = []

    def patch_and_release() -> None:
        for _ in range(100):
            with fs.patch():
                use(1)
            use(1)

    def use(times: int) -> None:
        try:
            for _ in range(times):
                if not torch.equal(torch.softmax(x, -1), want):
                    failures.append("wrong")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=patch_and_release) for _ in range(4)]
    threads += [threading.Thread(target=use, args=(2000,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


HAS_NO_WAIT = aten_kernels._wait_alone is None or torch_private._PUBLIC_ONLY


@pytest.mark.skipif(HAS_NO_WAIT, reason="no usleep, or only public functions of torch")
def test_no_thread_runs_between_the_wait_and_the_release(monkeypatch):
    """A call that reads its kernel while it changes can fail, so none may start after the wait for the others."""
    steps: list[str] = []
    wait = aten_kernels._wait_alone
    library = SimpleNamespace(m=SimpleNamespace(reset=functools.partial(steps.append, "reset")), _destroy=lambda: None)
    stop, ran = threading.Event(), False

    def others() -> None:
        while not stop.is_set():
            steps.append("other")

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=others)
    thread.start()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(100):
            time.sleep(0)
            # no step of Python in it either
            both = map(methodcaller("__call__"), (functools.partial(steps.append, "wait"), wait))
            monkeypatch.setattr(aten_kernels, "_wait_alone", functools.partial(deque, both, 0))
            aten_kernels.restore(library)
            assert steps[steps.index("wait") + 1] == "reset"
            ran |= "other" in steps
            steps.clear()
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join()
    assert ran


@pytest.mark.skipif(HAS_NO_WAIT, reason="no usleep, or only public functions of torch")
def test_alone_it_does_not_wait(monkeypatch):
    waits: list[None] = []
    monkeypatch.setattr(aten_kernels, "_wait_alone", functools.partial(waits.append, None))
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    with fs.patch():
        pass
    assert waits == []
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    with fs.patch():
        pass
    assert len(waits) == 3  # a library for each op


def test_nothing_is_printed_and_without_kernels_nothing_changes():
    """In processes of their own: torch warns of an override once a process, and a plain CPU has no kernels of ours."""
    code = """
        import torch, fused_softmax as fs
        x = torch.randn(2, 3)
        before = repr(torch.library.get_kernel("aten::_softmax", "CPU"))
        with fs.patch():
            inside = repr(torch.library.get_kernel("aten::_softmax", "CPU"))
            torch.testing.assert_close(torch.softmax(x, -1).sum(-1), torch.ones(2))
        assert (inside != before) == {taken}, inside
        assert repr(torch.library.get_kernel("aten::_softmax", "CPU")) == before
    """
    for interpret in ("1", "0"):
        done = subprocess.run(
            [sys.executable, "-W", "always", "-c", textwrap.dedent(code).replace("{taken}", str(interpret == "1"))],
            env={**os.environ, "TRITON_INTERPRET": interpret},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
        assert "verrid" not in done.stderr
