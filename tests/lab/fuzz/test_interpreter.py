"""The interpreter of the tests and the fuzzer gives the bits and the errors of Triton's, which does more work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

import fused_softmax as fs
from fused_softmax.lab.fuzz.interpreter import patch_once
from fused_softmax.lab.registry import OPS

pytestmark = pytest.mark.interpreted

PATCHED = {
    interpreter: ("_patch_builtin", "_get_np_dtype"),
    interpreter.GridExecutor: ("__call__",),
    interpreter.InterpretedFunction: ("__call__",),
    tl.tensor: ("__init__",),
    tl.block_type: ("__init__",),
}


@contextmanager
def unchanged(undo: list[Callable[[], None]]) -> Iterator[None]:
    """Triton's interpreter as it is."""
    undo.pop()()
    try:
        yield
    finally:
        undo.append(patch_once())


def results(n_cols: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Outputs and gradients of each op, in more than one regime."""
    torch.manual_seed(1)
    x = (torch.randn(3, n_cols) * 3).to(dtype).requires_grad_()
    ids, mask = torch.randint(0, n_cols, (3,)), torch.rand(3, n_cols) > 0.3
    given = {
        "softmax": lambda: fs.softmax(x, -1),
        "log_softmax": lambda: fs.log_softmax(x.t(), 0),
        "logsumexp": lambda: fs.logsumexp(x, -1),
        "masked_softmax": lambda: fs.masked_softmax(x, mask, causal=True, scale=0.7, fully_masked="zero"),
        "cross_entropy": lambda: fs.cross_entropy(x, ids, label_smoothing=0.1),
        "token_logprobs": lambda: fs.token_logprobs(x, ids, temperature=0.7),
    }
    assert set(given) == set(OPS)
    found = []
    for call in given.values():
        y = call()
        (dx,) = torch.autograd.grad(y, x, torch.linspace(-1, 1, y.numel()).view(y.shape).to(y))
        found += [y.detach().reshape(-1), dx.reshape(-1)]
    return found


@pytest.mark.parametrize(("n_cols", "dtype"), [(37, torch.bfloat16), (1025, torch.float32)])
def test_the_bits_are_the_interpreters_own(n_cols, dtype, faster_interpreter):
    first, again = results(n_cols, dtype), results(n_cols, dtype)
    with unchanged(faster_interpreter):
        want = results(n_cols, dtype)
    for got in (first, again):
        for mine, its in zip(got, want, strict=True):
            assert mine.dtype is its.dtype and torch.equal(mine.view(torch.uint8), its.view(torch.uint8))


@triton.jit
def add_one(x):
    return x + 1


@triton.jit
def of_two_shapes(x):
    return add_one(x) + tl.arange(0, 8)


@triton.jit
def wrong_shape(x_ptr):
    tl.store(x_ptr + tl.arange(0, 4), of_two_shapes(tl.load(x_ptr + tl.arange(0, 4))))


@triton.jit
def overflow(x_ptr):
    tl.store(x_ptr + tl.arange(0, 4), add_one(tl.load(x_ptr + tl.arange(0, 4))))


def test_errors_are_the_interpreters_own(faster_interpreter):
    def error() -> str:
        with pytest.raises(interpreter.InterpreterError) as raised:
            wrong_shape[(1,)](torch.zeros(4, dtype=torch.int32))
        return str(raised.value)

    got = error()
    assert "incompatible dimensions" in got
    with unchanged(faster_interpreter):
        assert got == error()


def test_integers_that_overflow_wrap_around_as_the_interpreters_do(faster_interpreter):
    def wrapped() -> list[int]:
        x = torch.full((4,), 2**31 - 1, dtype=torch.int32)
        overflow[(1,)](x)
        return x.tolist()

    with unchanged(faster_interpreter):
        want = wrapped()
    assert wrapped() == want == [-(2**31)] * 4


def test_undone_it_is_triton_s(faster_interpreter):
    with unchanged(faster_interpreter):
        its = {(owner, name): getattr(owner, name) for owner, names in PATCHED.items() for name in names}
        assert all(function.__module__.startswith("triton.") for function in its.values()), its
    assert all(getattr(owner, name) is not function for (owner, name), function in its.items())


@triton.jit
def next_to_numbers(x_ptr, y_ptr, n: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, 4))
    tl.store(y_ptr + tl.arange(0, 4), x * n)
    tl.store(y_ptr + 4 + tl.arange(0, 4), n - x)


def test_numbers_that_are_equal_are_not_mixed_up(faster_interpreter):
    def results() -> list[torch.Tensor]:
        found = []
        for n in (0, 0.0, -0.0, 1, 1.0, True, float("nan"), 2**40, -1):
            for dtype in (torch.int32, torch.int64, torch.bfloat16, torch.float32):
                x, y = torch.tensor([-3, 0, 1, 5]).to(dtype), torch.zeros(8, dtype=torch.float64)
                try:
                    next_to_numbers[(1,)](x, y, n)
                except interpreter.InterpreterError:
                    continue
                found.append(y.view(torch.int64))
        return found

    got, again = results(), results()
    with unchanged(faster_interpreter):
        want = results()
    assert len(want) > 25 and all(torch.equal(*of) for of in zip(got + again, want * 2, strict=True))
