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
    interpreter: ("_patch_builtin", "_get_np_dtype", "_convert_float"),
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


@triton.jit
def of_two(a, b, which: tl.constexpr):
    if which < 5:
        c = a + b if which == 0 else a - b if which == 1 else a * b if which == 2 else a // b if which == 3 else a % b
    elif which < 9:
        c = a / b if which == 5 else a & b if which == 6 else a | b if which == 7 else a ^ b
    elif which < 12:
        c = a < b if which == 9 else a <= b if which == 10 else a > b
    else:
        c = a >= b if which == 12 else a == b if which == 13 else a != b
    return c


OPERATORS, OPERANDS = 15, 6


@triton.jit
def operands(x_ptr, y_ptr, y, n, to: tl.constexpr, which: tl.constexpr, pair: tl.constexpr):
    """of_two of blocks, of two dimensions, of a block or an element and the other, and of numbers; cast to `to`."""
    rows, cols = tl.arange(0, 2), tl.arange(0, 4)
    at = rows[:, None] * 4 + cols[None, :]
    if pair == 0:
        c = of_two(tl.load(x_ptr + at), tl.load(y_ptr + at), which)
    elif pair == 1:
        c = of_two(tl.load(x_ptr + rows)[:, None], tl.load(y_ptr + cols)[None, :], which)
    elif pair == 2:
        c = of_two(tl.load(x_ptr + at), y, which)
    elif pair == 3:
        c = of_two(tl.load(y_ptr + 3), tl.load(x_ptr + at), which)
    elif pair == 4:
        c = of_two(tl.load(x_ptr + at), n, which)
    else:
        c = of_two(n, tl.load(x_ptr + at), which)
    return c.to(to)


@triton.jit
def one_operator(x_ptr, y_ptr, z_ptr, w_ptr, n: tl.constexpr, which: tl.constexpr, pair: tl.constexpr):
    at = tl.arange(0, 2)[:, None] * 4 + tl.arange(0, 4)[None, :]
    y = tl.load(y_ptr + 1)
    tl.store(z_ptr + at, operands(x_ptr, y_ptr, y, n, tl.float32, which, pair).to(tl.float64))
    tl.store(w_ptr + at, operands(x_ptr, y_ptr, y, n, tl.bfloat16, which, pair).to(tl.float32))


DTYPES = (torch.bool, torch.int32, torch.int64, torch.uint8, torch.float32, torch.bfloat16, torch.float16)


def of_every_operator(dtypes: tuple[torch.dtype, torch.dtype], numbers: tuple[float, ...]) -> list[torch.Tensor | str]:
    """What each operator gives for two dtypes and a number, or its error."""
    found: list[torch.Tensor | str] = []
    special = torch.tensor([1.0, -0.0, float("nan"), float("inf"), 1e-40, 3e38, -2.5, 65504.0])
    whole = torch.tensor([1, 0, -7, 2**31 - 1, -(2**31), 255, 3, -1])
    x, y = ((special if dtype.is_floating_point else whole).to(dtype) for dtype in dtypes)
    for which in range(OPERATORS):
        for pair in range(OPERANDS):
            for n in numbers if pair > 3 else numbers[:1]:
                z, w = torch.zeros(8, dtype=torch.float64), torch.zeros(8)
                try:
                    one_operator[(1,)](x, y.flip(0), z, w, n, which, pair)
                    found += [z.view(torch.int64), w.view(torch.int32)]
                except interpreter.InterpreterError as error:
                    found.append(str(error))
    return found


@pytest.mark.sampled(49)
@pytest.mark.parametrize("second", DTYPES, ids=str)
@pytest.mark.parametrize("first", DTYPES, ids=str)
def test_operators_give_the_interpreters_bits(first, second, faster_interpreter):
    numbers = (2, 0, 0.0, -0.0, -3, 1.5, True, 2**33, float("nan"))
    got, again = (of_every_operator((first, second), numbers) for _ in range(2))
    with unchanged(faster_interpreter):
        want = of_every_operator((first, second), numbers)
    assert sum(not isinstance(of, str) for of in want) > 100
    for one in (got, again):
        for mine, its in zip(one, want, strict=True):
            assert mine == its if isinstance(its, str) else torch.equal(mine, its)


@triton.jit
def neighbors(x_ptr, y_ptr, z_ptr):
    """Addresses and offsets, of elements and of blocks, in both orders."""
    cols = tl.arange(0, 4)
    z_ptrs = z_ptr + tl.arange(0, 2)[:, None] * 4 + cols[None, :]
    x = tl.load((x_ptr + 2) + cols.to(tl.int64) - 1) + tl.load(cols + x_ptr)
    y = tl.load(y_ptr + tl.arange(0, 2)[:, None] + cols[None, :])
    tl.store(z_ptrs, x[None, :].to(tl.float32) + y.to(tl.float32))


def test_addresses_are_the_interpreters_own(faster_interpreter):
    def results() -> list[torch.Tensor]:
        found = []
        for dtypes in ((torch.float32, torch.int64), (torch.int8, torch.float64), (torch.bool, torch.bfloat16)):
            x, y = (torch.arange(8).to(dtype) for dtype in dtypes)
            z = torch.zeros(8)
            neighbors[(1,)](x, y, z)
            found.append(z)
        return found

    got, again = results(), results()
    with unchanged(faster_interpreter):
        want = results()
    assert all(torch.equal(*of) for of in zip(got + again, want * 2, strict=True)) and want[0].any()
