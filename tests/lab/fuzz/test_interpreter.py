"""The interpreter of the tests and the fuzzer gives the bits and the errors of Triton's, which does more work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import triton
import triton.language as tl
from params import few
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
def one_operator(x_ptr, y_ptr, z_ptr, w_ptr, i_ptr, n: tl.constexpr, which: tl.constexpr, pair: tl.constexpr):
    """of_two of blocks, of two dimensions, of a block and an element, and of numbers: as it is, and cast."""
    rows, cols = tl.arange(0, 2), tl.arange(0, 4)
    at = rows[:, None] * 4 + cols[None, :]
    x = tl.load(x_ptr + at)
    if pair == 0:
        c = of_two(x, tl.load(y_ptr + at), which)
    elif pair == 1:
        c = of_two(tl.load(x_ptr + rows)[:, None], tl.load(y_ptr + cols)[None, :], which)
    elif pair == 2:
        c = of_two(x, tl.load(y_ptr + 1), which)
    elif pair == 3:
        c = of_two(tl.load(y_ptr + 3), x, which)
    elif pair == 4:
        c = of_two(x, n, which)
    else:
        c = of_two(n, x, which)
    tl.store(z_ptr + at, c.to(tl.float64))
    tl.store(i_ptr + at, c.to(tl.int64))
    tl.store(w_ptr + at, c.to(tl.float32).to(tl.bfloat16).to(tl.float32) + c.to(tl.int32))


FLOAT, INT, BOOL = torch.float32, torch.int32, torch.bool
DTYPES = (BOOL, INT, torch.int64, torch.uint8, torch.uint32, FLOAT, torch.bfloat16)
NUMBERS = (2, 0, 0.0, -0.0, -3, 1.5, True, 2**33, 2**24 + 1, float("nan"))
SPECIAL = (1.0, -0.0, float("nan"), float("inf"), 1e-40, 3e38, -2.5, 65504.0)
WHOLE = (1, 0, -7, 2**31 - 1, -(2**31), 255, 3, -1)


def outcome(kernel: Callable[..., None], *arguments: object) -> list[torch.Tensor | str]:
    """What a kernel writes to the tensors among its arguments, as bytes, or its error."""
    try:
        kernel(*arguments)
    except (interpreter.InterpreterError, ValueError) as error:
        return [str(error)]
    return [t.view(torch.uint8).clone() for t in arguments if isinstance(t, torch.Tensor)]


def of_every_operator(first: torch.dtype, second: torch.dtype) -> list[torch.Tensor | str]:
    """What each operator gives for two dtypes and for numbers, with other elements in the second launch."""
    found = []
    one, other = (torch.tensor(SPECIAL if dtype.is_floating_point else WHOLE) for dtype in (first, second))
    x, y, turned = one.to(first), other.flip(0).to(second), one.roll(3).to(first)
    for which in range(OPERATORS):
        for pair in range(OPERANDS):
            for n in NUMBERS if pair > 3 else NUMBERS[:1]:
                for numbers in (x, turned):
                    to = torch.zeros(8, dtype=torch.float64), torch.zeros(8), torch.zeros(8, dtype=torch.int64)
                    found += outcome(one_operator[(1,)], numbers, y, *to, n, which, pair)
    return found


def assert_unchanged(results: Callable[[], list[torch.Tensor | str]], undo: list[Callable[[], None]]) -> int:
    """The results are the interpreter's own, twice. Returns how many are no errors."""
    got = results() + results()
    with unchanged(undo):
        want = results()
    for mine, its in zip(got, want + want, strict=True):
        if isinstance(its, str) or isinstance(mine, str):
            assert mine == its
        else:
            assert torch.equal(mine, its)
    return sum(not isinstance(of, str) for of in want)


@pytest.mark.parametrize("dtypes", few(((FLOAT, FLOAT), (INT, INT)), [(a, b) for a in DTYPES for b in DTYPES]), ids=str)
def test_operators_give_the_interpreters_bits(dtypes, faster_interpreter):
    first, second = dtypes
    assert assert_unchanged(lambda: of_every_operator(first, second), faster_interpreter) > 100


@triton.jit
def neighbors(x_ptr, y_ptr, z_ptr):
    """Addresses and offsets, of elements and of blocks, in both orders."""
    cols = tl.arange(0, 4)
    z_ptrs = z_ptr + tl.arange(0, 2)[:, None] * 4 + cols[None, :]
    x = tl.load((x_ptr + 2) + cols.to(tl.int64) - 1) + tl.load(cols + x_ptr)
    y = tl.load(y_ptr + tl.arange(0, 2)[:, None] + cols[None, :])
    tl.store(z_ptrs, x[None, :].to(tl.float32) + y.to(tl.float32))


def test_addresses_are_the_interpreters_own(faster_interpreter):
    def results() -> list[torch.Tensor | str]:
        found = []
        for dtypes in ((FLOAT, torch.int64), (torch.int8, torch.float64), (BOOL, torch.bfloat16)):
            x, y = (torch.arange(8).to(dtype) for dtype in dtypes)
            found += outcome(neighbors[(1,)], x, y, torch.zeros(8))
        return found

    assert assert_unchanged(results, faster_interpreter) == 9


@triton.jit
def of_transposed(x_ptr, y_ptr):
    """Sums of rows, whose order of additions depends on how the elements lie in memory."""
    rows, cols = tl.arange(0, 64), tl.arange(0, 16)
    x = tl.trans(tl.load(x_ptr + cols[:, None] * 64 + rows[None, :]))
    tl.store(y_ptr + rows, tl.sum(x.to(tl.float32) * tl.load(x_ptr + 5).to(tl.float32), 1))
    tl.store(y_ptr + 64 + rows, tl.sum(tl.exp(x.to(tl.float32)), 1) + tl.sum(x.to(tl.float32) * 0.3, 1))
    row = tl.broadcast_to(tl.load(x_ptr + rows)[None, :], (16, 64))
    tl.store(y_ptr + 128 + cols, tl.sum(tl.exp(row.to(tl.float32)), 1))


@triton.jit
def of_wide_data(x_ptr, y_ptr, z_ptr):
    """Where numpy's dtypes are not those of the tensors: a histogram's, and of an operand that a shift changes."""
    at = tl.arange(0, 4)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(z_ptr + at, tl.histogram(y, 4) + at)
    before = y + y
    tl.store(z_ptr + 4 + at, (x >> y) + before.to(tl.int32, bitcast=True))
    tl.store(z_ptr + 8 + at, (y + before).to(tl.int32, bitcast=True))


@triton.jit
def of_booleans(x_ptr, y_ptr):
    """One boolean next to a block of them, of a comparison and of a load."""
    at = tl.arange(0, 4)
    x = tl.load(x_ptr + at)
    mask = x > 0.0
    one = tl.load(x_ptr) > 1.0
    tl.store(y_ptr + at, (mask & (x < 2.0)).to(tl.int32) + (mask & one).to(tl.int32))


@triton.jit
def of_one_boolean(x_ptr, y_ptr):
    at = tl.arange(0, 4)
    mask = tl.load(y_ptr + at) > 1
    tl.store(y_ptr + at, (tl.full((), 1, tl.int1) & mask).to(tl.int32))
    tl.store(y_ptr + at, ((tl.load(x_ptr) > 0.0) & mask).to(tl.int32))


TWO = tl.constexpr(2.0)


@triton.jit
def of_a_constant_tensor(x_ptr, y_ptr):
    x = tl.load(x_ptr + tl.arange(0, 4))
    tl.store(y_ptr + tl.arange(0, 4), (x < TWO * x).to(tl.int32))


@triton.jit
def of_a_large_number(x_ptr, y_ptr):
    x = tl.load(x_ptr + tl.arange(0, 4))
    tl.store(y_ptr + tl.arange(0, 4), (x < 2**60 + 2**36 + 1).to(tl.int32))


def test_rare_operands_are_the_interpreters_own(faster_interpreter):
    torch.manual_seed(0)
    x, small = torch.randn(16 * 64), torch.tensor([0, 1, 2, 3], dtype=torch.uint32)

    def results() -> list[torch.Tensor | str]:
        found = []
        for dtype in (FLOAT, torch.bfloat16):
            found += outcome(of_transposed[(1,)], x.to(dtype), torch.zeros(144))
        for _ in range(2):
            found += outcome(of_wide_data[(1,)], torch.tensor([9, -9, 5, 64], dtype=INT), small, torch.full((13,), -9))
        for numbers in (x[:4], torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.full((4,), 2.0**60)):
            for kernel in (of_booleans, of_one_boolean, of_a_constant_tensor, of_a_large_number):
                found += outcome(kernel[(1,)], numbers.clone(), torch.tensor([5, 1, 2, 0], dtype=INT))
        return found

    assert assert_unchanged(results, faster_interpreter) > 12
