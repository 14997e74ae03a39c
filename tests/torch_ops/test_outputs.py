"""out= that shares memory with the input or with itself, or that autograd protects; also under patch()."""

from __future__ import annotations

import contextlib

import pytest
import torch
from watched import PAIRS, close

import fused_softmax as fs
from fused_softmax.torch_ops.outputs import is_its_own, may_write_while_reading
from fused_softmax.torch_ops.softmax import cast

pytestmark = pytest.mark.interpreted

N = 70
# (function, torch's own, whether under patch()): patch() takes torch's out= variants
WAYS = [(ours, torchs, False) for ours, torchs in PAIRS] + [(torchs, torchs, True) for _, torchs in PAIRS]
ways = pytest.mark.parametrize(("function", "torchs", "patched"), WAYS)


def patched_or_not(patched):
    return fs.patch() if patched else contextlib.nullcontext()


# name -> (x, out) within one piece of memory
SHARED = {
    "the same": lambda m: (m[:N], m[:N]),
    "transposed": lambda m: (m[:N], m[:N].t()),
    "from transposed": lambda m: (m[:N].t(), m[:N]),
    "one row later": lambda m: (m[:N], m[1 : N + 1]),
    "one row before": lambda m: (m[1 : N + 1], m[:N]),
    "one element later": lambda m: (m.view(-1)[: N * N].view(N, N), m.view(-1)[1 : N * N + 1].view(N, N)),
    "the next columns": lambda m: (m[:, :30], m[:, 20:50]),
    "interleaved": lambda m: (m[:, ::2], m[:, 1::2]),
    "apart": lambda m: (m[:N], m[N:]),
}


@pytest.mark.sampled(3)
@ways
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", SHARED)
def test_shared_memory(name, dim, function, torchs, patched):
    x, out = SHARED[name](torch.randn(2 * N, N))
    want = torchs(x.clone(), dim)
    with patched_or_not(patched):
        assert function(x, dim, out=out) is out
    close(out, want)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("keepdim", [False, True])
def test_logsumexp_into_its_input(dim, keepdim):
    x = torch.randn(N, N)
    want = torch.logsumexp(x, dim, keepdim)
    out = x[:1] if dim == 0 and keepdim else x[:, :1] if keepdim else x.diagonal()
    close(fs.logsumexp(x, dim, keepdim, out=out), want)


def test_a_wider_output_over_a_narrow_input():
    memory = torch.randn(4 * N).half()
    x, out = memory[:N].view(2, -1), memory.view(torch.float32)[:N].view(2, -1)
    want = torch.softmax(x.clone(), -1, dtype=torch.float32)
    close(fs.softmax(x, -1, dtype=torch.float32, out=out), want)


def refused():
    with torch.inference_mode():
        inference = torch.full((3, 5), 7.0)
    yield "inference", inference, "Inplace update to inference tensor"
    yield "expanded rows", torch.full((1, 5), 7.0).expand(3, 5), "single memory location"
    yield "expanded columns", torch.full((3, 1), 7.0).expand(3, 5), "single memory location"


@ways
@pytest.mark.parametrize("of", range(3))
def test_what_may_not_be_written_raises_as_in_torch(of, function, torchs, patched):
    x = torch.randn(3, 5)
    name, out, message = list(refused())[of]
    for call in (function, torchs):
        with patched_or_not(patched), pytest.raises(RuntimeError, match=message):
            call(x, -1, out=out)
        if call is not torchs or name != "inference":  # torch writes an inference tensor, then raises
            assert (out == 7.0).all(), f"{name} was written"


def test_logsumexp_refuses_the_same():
    x = torch.randn(3, 5)
    with torch.inference_mode():
        inference = torch.full((3,), 7.0)
    for out in (inference, torch.full((1,), 7.0).expand(3)):
        for call in (fs.logsumexp, torch.logsumexp):
            with pytest.raises(RuntimeError, match=r"inference tensor|single memory location"):
                call(x, 1, out=out)
            assert call is not fs.logsumexp or (out == 7.0).all()
    for call in (torch.logsumexp, fs.logsumexp):
        with pytest.raises(NotImplementedError):
            call(x, 1, out=torch.zeros(3).to_sparse())
        with pytest.warns(UserWarning, match="resized"):
            close(call(x, 1, out=torch.empty(7)), torch.logsumexp(x, 1))


def test_inference_mode_writes_inference_tensors():
    with torch.inference_mode():
        x, out = torch.randn(3, 5), torch.empty(3, 5)
        close(fs.softmax(x, -1, out=out), torch.softmax(x, -1))
        close(fs.logsumexp(x, -1, out=torch.empty(3)), torch.logsumexp(x, -1))


def test_what_the_strides_say():
    t = torch.zeros(4, 6, 8)
    for writable in (t, t.transpose(0, 2), t[:, ::2], t[..., 1:3], t[:1].expand(1, 6, 8), t[:0], t[0, 0, 0]):
        assert is_its_own(writable)
    for shared in (t[:1].expand(4, 6, 8), t.as_strided((5, 5), (1, 1)), t.as_strided((3, 4), (2, 1))):
        assert not is_its_own(shared)
    assert may_write_while_reading(t, t)
    assert may_write_while_reading(t[:2], t[2:])
    assert may_write_while_reading(t[:0], t)
    assert not may_write_while_reading(t[:2], t[1:3])
    assert not may_write_while_reading(t[0].t(), t[0, :, :6])


def test_an_output_whose_strides_do_not_fold(poisoned_memory):
    """Four dimensions of rows that the strided kernel cannot walk at once: through new memory."""
    x = torch.randn(2, 3, 2, 4, 5).permute(3, 1, 2, 0, 4)
    out = torch.empty(2, 3, 4, 2, 5).permute(2, 1, 3, 0, 4)
    assert fs.softmax(x, -1, out=out) is out
    torch.testing.assert_close(out, torch.softmax(x, -1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n_cols", [3, 60])
def test_an_out_that_overlaps_its_input_in_part(dtype, n_cols):
    """Where the call is PyTorch's own, too: its result on such memory is wrong on a GPU."""
    buffer = torch.randn(8 * n_cols).to(dtype)
    x, out = buffer[: 7 * n_cols].view(7, n_cols), buffer[2 : 7 * n_cols + 2].view(7, n_cols)
    want = torch.log_softmax(x.double(), 1)
    calls = []
    own = torch.log_softmax
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "log_softmax", lambda *a, **k: (calls.append(k.get("out")), own(*a, **k))[1])
        assert fs.log_softmax(x, 1, out=out) is out
    assert not any(given is not None for given in calls)
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2 if dtype is torch.bfloat16 else 1e-5)


def test_a_single_row_that_is_cast_is_planned_as_a_row_of_its_own():
    x = torch.randn(2, 2667).bfloat16()[:, :2664]
    assert cast(x[1:2], torch.float16).stride() == (2664, 1)
    with fs.batch_invariant():
        assert torch.equal(fs.softmax(x, -1, dtype=torch.float16)[1:2], fs.softmax(x[1:2], -1, dtype=torch.float16))
