"""patch() on the CUDA key: the operator database, half_to_float, whole models, and torch's own kernels after it."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, assert_contract, dtype_id, logits
from test_models import LAYERS, VOCABULARY, bert, gpt2, judge
from test_opinfo import NAMES, check_samples

import fused_softmax as fs
from fused_softmax.launch import softmax as rows

pytestmark = pytest.mark.gpu

ATEN = torch.ops.aten


@pytest.fixture
def reached(monkeypatch) -> list[tuple[str, int]]:
    """(entry point of the kernels, columns) as they are called."""
    seen: list[tuple[str, int]] = []

    def watch(name: str, argument: int) -> None:
        entry = getattr(rows, name)

        def watched(*arguments):
            seen.append((name, arguments[argument].shape[arguments[argument + 1]]))
            return entry(*arguments)

        monkeypatch.setattr(rows, name, watched)

    watch("softmax_forward", 0)
    watch("softmax_backward", 1)
    return seen


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("name", NAMES)
def test_operator_database(name, dtype, monkeypatch):
    check_samples(name, dtype, "cuda", monkeypatch)


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
@pytest.mark.parametrize("n_cols", [33, 1000, 50257])
def test_half_to_float_and_back(function, n_cols, reached):
    """torch.softmax(half, dtype=float32) on CUDA is one fused kernel, forward and backward; so is ours."""
    x, dy = logits(3, n_cols, dtype=torch.float16, device="cuda"), torch.randn(3, n_cols, device="cuda")

    def run(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.clone().requires_grad_()
        y = function(x, -1, dtype=dtype)
        y.backward(dy.to(dtype))
        return y.detach(), x.grad

    own = run(x, torch.float32)
    want = run(x.double(), torch.float64)
    assert reached == []
    with fs.patch():
        got = run(x, torch.float32)
    assert reached == [("softmax_forward", n_cols), ("softmax_backward", n_cols)]
    for mine, theirs, exact in zip(got, own, want, strict=True):
        assert mine.dtype == theirs.dtype
        error, allowed = ((t.double() - exact).abs().max() for t in (mine, theirs))
        assert error <= 2 * allowed + 4 * torch.finfo(torch.float32).eps * exact.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_every_way_in(dtype, reached):
    x = logits(5, 1000, dtype=dtype, device="cuda")
    with fs.patch():
        results = [torch.softmax(x, -1), F.softmax(x, -1), x.softmax(-1), torch.nn.Softmax(-1)(x)]
        results += [torch.softmax(x, -1, out=torch.empty_like(x)), ATEN._safe_softmax(x, -1)]
    assert len(reached) == 6
    for y in results:
        assert_contract(y, x)


def test_autocast(reached):
    x = torch.randn(4, 64, device="cuda", dtype=torch.float16)
    with fs.patch(), torch.autocast("cuda", torch.float16):
        y = torch.softmax(x, -1)
    assert y.dtype == torch.float32
    assert len(reached) == 1


def test_cuda_graph(reached):
    """Captured under patch(), replayed after it."""
    x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
    with fs.patch():
        torch.softmax(x, -1)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = torch.softmax(x, -1)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    assert_contract(y, x)
    assert len(reached) == 2


@pytest.mark.parametrize(("make", "n_keys"), [(gpt2, 12), (bert, 11)], ids=["gpt2", "bert"])
def test_transformers(make, n_keys, reached):
    judge(*make("cuda"))
    assert reached.count(("softmax_forward", n_keys)) == reached.count(("softmax_backward", n_keys)) == LAYERS
    assert reached.count(("softmax_forward", VOCABULARY)) == reached.count(("softmax_backward", VOCABULARY)) == 1


def test_eight_threads_patch_and_release():
    x = torch.randn(8, 257, device="cuda")
    want = torch.softmax(x.double(), -1)
    failures: list[object] = []

    def work() -> None:
        try:
            for i in range(50):
                if i % 3:
                    with fs.patch():
                        y = torch.softmax(x, -1)
                else:
                    y = torch.softmax(x, -1)
                if not torch.allclose(y.double(), want, atol=1e-6):
                    failures.append(i)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_torchs_own_again():
    before = repr(torch.library.get_kernel("aten::_softmax", "CUDA"))
    with fs.patch():
        assert repr(torch.library.get_kernel("aten::_softmax", "CUDA")) != before
    assert repr(torch.library.get_kernel("aten::_softmax", "CUDA")) == before
