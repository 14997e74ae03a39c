"""Random narrow softmaxes at random starts, in place too, with guards around the output; gradients and masks."""

from __future__ import annotations

import math
import random

import pytest
import torch

import fused_softmax as fs
from fused_softmax.launch.device import device_of
from fused_softmax.launch.launcher import launch_rows
from fused_softmax.launch.masked_softmax import backward_of, forward_of, masked_backward, masked_forward
from fused_softmax.launch.softmax import softmax_forward, softmax_op

pytestmark = pytest.mark.gpu
GUARD = 64  # elements before and after a tensor


def piece(rng: random.Random, n_rows: int, n_cols: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(rows without gaps that start anywhere, the memory around them, where they start)"""
    start = GUARD + rng.choice((0, 0, 0, 1, 2, 3, 4, 7))
    memory = torch.full((n_rows * n_cols + 2 * GUARD + 8,), 7.0, device="cuda", dtype=dtype)
    return memory[start : start + n_rows * n_cols].view(n_rows, n_cols), memory, start


def expect_untouched(memory: torch.Tensor, start: int, n: int) -> None:
    assert (memory[:start] == 7).all() and (memory[start + n :] == 7).all(), "written outside the output"


def unit(dtype: torch.dtype) -> tuple[float, float]:
    """(relative error, absolute error) of a result that is rounded to dtype once, and of a few float32 operations."""
    return {
        torch.bfloat16: (2**-8, 2**-133), torch.float16: (1.02 * 2**-11, 2**-24), torch.float32: (3e-6, 1e-37),
    }[dtype]  # fmt: skip


@pytest.mark.parametrize("seed", range(24))
def test_random_rows(seed):
    rng = random.Random(seed)
    dtype = rng.choice((torch.bfloat16, torch.float16, torch.float32))
    most = 64 if dtype is torch.float32 and seed % 4 else 128
    n_cols, log = rng.randint(1, most), rng.random() < 0.4
    relative, absolute = unit(dtype)
    for n_rows in (1, rng.randint(2, 70), rng.randint(1000, 5000)):
        x, _, _ = piece(rng, n_rows, n_cols, dtype)
        y, memory, start = piece(rng, n_rows, n_cols, dtype)
        x.copy_(3 * torch.randn(n_rows, n_cols, device="cuda"))
        softmax_forward(x, -1, dtype, log, y)
        expected = (torch.log_softmax if log else torch.softmax)(x.double(), -1)
        near = expected.abs() + (2**-6 if dtype.itemsize == 2 else 1) * log  # a logarithm near 0 is a difference
        assert ((y.double() - expected).abs() <= relative * near + absolute).all()
        expect_untouched(memory, start, y.numel())
        many = torch.cat([x, x])
        assert torch.equal(softmax_forward(many, -1, dtype, log)[:n_rows], softmax_forward(x.clone(), -1, dtype, log))
        whole = softmax_forward(x.clone(), -1, dtype, log)
        plan = fs.plan_for(x.clone(), op="log_softmax" if log else "softmax")
        # a row by itself, where it lies in the batch; other plans depend on its alignment
        for i in {0, rng.randrange(n_rows), n_rows - 1} if plan.gathered else ():
            alone = x.clone()[i : i + 1]
            assert torch.equal(softmax_forward(alone, -1, dtype, log), whole[i : i + 1])
        z, memory, start = piece(rng, n_rows, n_cols, dtype)
        z.copy_(x)
        softmax_forward(z, -1, dtype, log, z)
        expect_untouched(memory, start, z.numel())
        assert ((z.double() - expected).abs() <= relative * near + absolute).all(), "in place"
        dy, _, _ = piece(rng, n_rows, n_cols, dtype)
        dy.copy_(torch.randn(n_rows, n_cols, device="cuda"))
        dx, memory, start = piece(rng, n_rows, n_cols, dtype)
        op, flags = softmax_op(log, backward=True)
        launch_rows(op, (y, dy, dx), (), (), flags)
        expect_untouched(memory, start, dx.numel())
        p, g = y.double(), dy.double()
        if log:
            expected = g - p.exp() * g.sum(-1, keepdim=True)
            near = g.abs() + p.exp() * g.abs().sum(-1, keepdim=True)
        else:
            expected = p * (g - (p * g).sum(-1, keepdim=True))
            near = p * (g.abs() + (p * g.abs()).sum(-1, keepdim=True))
        assert ((dx.double() - expected).abs() <= relative * near + absolute).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("n_cols", [1, 5, 33, 77, 127])
def test_special_rows(n_cols, dtype):
    """Rows of -inf, with +inf and with NaN are torch's, and leave their neighbors alone."""
    x = torch.randn(300, n_cols, device="cuda").to(dtype)
    x[1], x[2, 0], x[3, -1], x[5] = -float("inf"), float("inf"), float("nan"), torch.finfo(dtype).max
    for ours, theirs in ((fs.softmax, torch.softmax), (fs.log_softmax, torch.log_softmax)):
        torch.testing.assert_close(ours(x, -1).float(), theirs(x.float(), -1), rtol=2**-7, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("seed", range(16))
def test_random_causal_rows(seed):
    rng = random.Random(seed)
    dtype = rng.choice((torch.bfloat16, torch.float16, torch.float32))
    shape = (
        rng.randint(1, 3),
        rng.randint(1, 40),
        rng.randint(1, 60),
        rng.choice((rng.randint(3, 60), rng.randint(16, 640))),
    )
    x = torch.randn(shape, device="cuda").to(dtype)
    keep = torch.ones(shape[2:], dtype=torch.bool, device="cuda").tril()
    y = fs.masked_softmax(x, causal=True, scale=0.5)
    expected = torch.softmax((0.5 * x.double()).masked_fill(~keep, -float("inf")), -1)
    relative, absolute = unit(dtype)
    assert ((y.double() - expected).abs() <= relative * expected + max(absolute, 1e-9)).all()
    assert (y.masked_select(~keep) == 0).all()


@pytest.mark.parametrize("seed", range(24))
def test_causal_rows_of_few_queries(seed):
    """They are torch's, and no bit depends on the number of queries."""
    rng = random.Random(seed)
    dtype, n_cols = rng.choice((torch.bfloat16, torch.float16, torch.float32)), round(66 * 20 ** rng.random())
    queries = rng.randint(1, max(1, min(n_cols - 1, 260)))
    x = torch.randn(rng.randint(1, 9), n_cols, n_cols, device="cuda").to(dtype)
    for value in (float("inf"), -float("inf"), float("nan")):
        x[rng.randrange(x.shape[0]), rng.randrange(queries), rng.randrange(3)] = value
    few, many = (fs.masked_softmax(t, causal=True, scale=0.5) for t in (x[:, :queries].contiguous(), x))
    torch.testing.assert_close(few[0], many[0, :queries], rtol=0, atol=0, equal_nan=True)  # the same addresses mod 16
    keep = torch.ones(queries, n_cols, dtype=torch.bool, device="cuda").tril()
    expected = torch.softmax((0.5 * x[:, :queries].double()).masked_fill(~keep, -float("inf")), -1)
    relative, absolute = unit(dtype)
    torch.testing.assert_close(few.double(), expected, rtol=relative, atol=max(absolute, 1e-9), equal_nan=True)


def test_a_call_of_causal_rows_is_kept_for_all_numbers_of_queries():
    """Scores of two dimensions: what was prepared for few queries runs many, and the other way round."""
    for n_rows in (5, 40, 330, 129, 5):
        x = torch.randn(n_rows, 330, device="cuda", dtype=torch.bfloat16)
        z = x.double().masked_fill(torch.ones(n_rows, 330, dtype=torch.bool, device="cuda").triu(1), -float("inf"))
        torch.testing.assert_close(
            fs.masked_softmax(x, causal=True).double(), torch.softmax(z, -1), rtol=2**-8, atol=1e-9
        )


def random_mask(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
    """None, or a mask of any kind, broadcast in any dimension, with columns that are neighbors or not."""
    kind = rng.choice(("none", "boolean", "additive", "additive", "float32"))
    sizes = [n if rng.random() < 0.6 else 1 for n in shape[:-1]] + [shape[-1] if rng.random() < 0.9 else 1]
    if kind == "none":
        return None
    start = rng.choice((0, 1, 3, 8))
    values = torch.rand(math.prod(sizes) + start, device="cuda")[start:].view(sizes)
    if kind == "boolean":
        mask = values > rng.choice((0.1, 0.9))
    else:
        mask = (4 * values - 2).masked_fill(values < 0.1, -float("inf"))
        mask = mask.to(dtype if kind == "additive" else torch.float32)
    return mask.mT.contiguous().mT if rng.random() < 0.2 else mask


@pytest.mark.parametrize("seed", range(40))
def test_random_masks(seed):
    """Forward and gradient against float64; and the first batch, alone, has the bits that it has among others."""
    rng = random.Random(seed)
    dtype = rng.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32))
    shape = (rng.randint(1, 3), rng.randint(1, 40), rng.randint(1, 70), rng.randint(3, 130))
    mask, causal, scale = random_mask(rng, shape, dtype), rng.random() < 0.3, rng.choice((0.5, 1.0))
    memory = torch.randn(math.prod(shape) + 16, device="cuda").to(dtype)
    start = rng.choice((0, 0, 1, 2, 4))
    x = memory[start : start + math.prod(shape)].view(shape)
    keep = torch.ones(shape[2:], dtype=torch.bool, device="cuda")
    causes = keep.tril() if causal else keep
    z = (scale * x.double()).masked_fill(~causes, -float("inf"))
    hidden = ~causes.expand(shape)
    if mask is not None and mask.dtype is torch.bool:
        hidden = hidden | ~mask
        z = z.masked_fill(~mask, -float("inf"))
    elif mask is not None:
        z = z + mask.double()
    expected = torch.softmax(z, -1)
    relative, absolute = unit(dtype)
    y = masked_forward(x, mask, scale, causal, False)
    assert (
        ((y.double() - expected).abs() <= relative * expected + max(absolute, 1e-9)).logical_or(expected.isnan()).all()
    )
    assert torch.equal(y.isnan(), expected.isnan())
    alone = masked_forward(x[:1], mask if mask is None or mask.shape[0] == 1 else mask[:1], scale, causal, False)
    if start % 8 == 0:  # other plans depend on where the rows begin
        assert torch.equal(alone.nan_to_num(7), y[:1].nan_to_num(7))

    dy = torch.randn(shape, device="cuda").to(dtype)
    dy[0, 0, 0, 0] = float("inf") if rng.random() < 0.3 else 1
    boolean = mask if mask is not None and mask.dtype is torch.bool else None
    dx = masked_backward(y, dy, boolean, scale, causal)
    p, g = y.double(), dy.double().masked_fill(~causes, 0)
    p = p.masked_fill(~causes, 0)
    expected = (scale * p * (g - (p * g).sum(-1, keepdim=True))).masked_fill(
        hidden if boolean is not None else ~causes, 0
    )
    near = scale * p * (g.abs() + (p * g.abs()).sum(-1, keepdim=True))
    right = (dx.double() - expected).abs() <= 1.02 * relative * near + max(absolute, 1e-9)
    assert (right | (dx.double() == expected) | expected.isnan()).all()
    assert torch.equal(dx.isnan(), expected.isnan())


NARROW = [
    *((n_cols, torch.bfloat16) for n_cols in (5, 16, 37, 49, 63, 72, 76, 101)),
    *((n_cols, torch.float32) for n_cols in (4, 5, 19, 20)),
]


@pytest.mark.parametrize(("n_cols", "dtype"), NARROW)
def test_nothing_is_written_beside_masked_rows(n_cols, dtype):
    """Rows that fill whole programs, and that do not, between guards; and their gradient."""
    for n_rows in (1, 63, 128, 1000):
        x = torch.randn(1, 1, n_rows, n_cols, device="cuda").to(dtype)
        mask = torch.randn(n_rows, n_cols, device="cuda").to(dtype)
        memory, start = torch.full((n_rows * n_cols + 2 * GUARD,), 7.0, device="cuda", dtype=dtype), GUARD
        y = memory[start : start + n_rows * n_cols].view(n_rows, n_cols)
        rows = (x.view(n_rows, n_cols), y)
        found = forward_of(x, rows, mask, False, False, device_of(x), False)
        assert found.op.plan(rows, device_of(x), False).gathered
        launch_rows(found.op, rows, (found.read,), (*found.order, *found.numbers, 0.5), found.flags)
        expect_untouched(memory, start, y.numel())
        expected = torch.softmax(0.5 * x[0, 0].float() + mask.float(), -1)
        torch.testing.assert_close(y.float(), expected, rtol=2**-7, atol=1e-5)
        dx = memory.clone().fill_(7)[start : start + y.numel()].view(y.shape)
        back = (y.clone(), torch.randn_like(y), dx)
        found = backward_of(x, back, mask > -9, False, device_of(x), False)
        assert found.op.plan(back, device_of(x), False).gathered
        launch_rows(found.op, back, (found.read,), (*found.order, *found.numbers, 0.5), found.flags)
        whole = torch.empty(0, dtype=dtype, device="cuda").set_(dx.untyped_storage())
        expect_untouched(whole, start, dx.numel())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", ["rows", "one row", "columns", "one column"])
def test_a_call_is_kept_for_all_numbers_of_rows(shape, causal):
    """Scores of two dimensions: what was prepared for one number of rows runs another."""
    for n_rows in (5, 4000, 1, 129, 5):
        x = torch.randn(n_rows, 49, device="cuda", dtype=torch.bfloat16)
        sizes = {"rows": (n_rows, 49), "one row": (1, 49), "columns": (49,), "one column": (n_rows, 1)}[shape]
        mask = torch.randn(sizes, device="cuda", dtype=torch.bfloat16)
        z = x.double() + mask.double()
        if causal:
            z = z.masked_fill(torch.ones(n_rows, 49, dtype=torch.bool, device="cuda").triu(1), -float("inf"))
        y = fs.masked_softmax(x, mask, causal=causal)
        torch.testing.assert_close(y.double(), torch.softmax(z, -1), rtol=2**-8, atol=1e-9)


@pytest.mark.parametrize("n_batch", [2, 5])
def test_batches_share_a_bias_of_many_megabytes(n_batch):
    """Pieces of other batches lie between two of a batch: blocks of 2 MB, and a last one of less."""
    x = torch.randn(n_batch, 90, 1000, 49, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(1, 90, 1000, 49, device="cuda", dtype=torch.bfloat16)
    y = fs.masked_softmax(x, bias)
    for i in range(n_batch):
        expected = torch.softmax(x[i].float() + bias[0].float(), -1)
        torch.testing.assert_close(y[i].float(), expected, rtol=2**-7, atol=1e-6)


def test_a_graph_of_pieces():
    """Each kernel starts early and reads what the one before it wrote as one piece."""
    x = torch.randn(3, 500, 19, 286, device="cuda", dtype=torch.bfloat16)
    chain = lambda: fs.softmax(fs.masked_softmax(fs.softmax(x[..., :77].contiguous(), -1), causal=True), -1)  # noqa: E731
    expected = chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [chain() for _ in range(4)]
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected) for y in found)
