"""Softmax that transposes, from columns that are not neighbors in memory or into them: random layouts, and the copy."""

from __future__ import annotations

import random

import pytest
import torch
from cases import assert_contract, assert_forward, edge_rows

import fused_softmax as fs
from fused_softmax.launch import softmax as launch_softmax
from fused_softmax.launch import views
from fused_softmax.planning.types import Plan

pytestmark = pytest.mark.gpu

GUARD = 512  # elements before and after the output
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def guarded(shape: torch.Size, dtype: torch.dtype, phase: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A tensor of NaN whose address is `phase` elements behind a vector, and the guards around it, which hold 7."""
    n, start = shape.numel(), GUARD + phase
    memory = torch.full((n + 2 * GUARD + phase,), 7.0, device="cuda", dtype=dtype)
    memory[start : start + n] = float("nan")
    return memory[start : start + n].view(shape), memory[:start], memory[start + n :]


def drawn(pick: random.Random, n_cols: int, inner: int, elements: int = 1 << 22) -> torch.Tensor:
    """(outer, inner, n_cols), or (outer, height, width, n_cols)."""
    dtype, offset = pick.choice(DTYPES), pick.choice((0, 0, 0, 1, 2, 4, 8))
    more = pick.choice((0, 0, 0, 1, 3, 8))  # neighbors that belong to no row
    outer = max(1, min(pick.randint(1, 9), elements // (n_cols * inner)))
    memory = torch.randn(offset + outer * n_cols * (inner + more), device="cuda").mul_(3).to(dtype)
    x = memory[offset:].view(outer, n_cols, inner + more)[..., :inner]
    if inner % 4 == 0 and pick.random() < 0.4:
        return x.unflatten(2, (4, inner // 4)).permute(0, 2, 3, 1)
    return x.transpose(1, 2)


def channels_last(pick: random.Random, n_cols: int, inner: int, elements: int = 1 << 22) -> torch.Tensor:
    """(outer, n_cols, inner), or (outer, n_cols, height, width), whose columns are neighbors."""
    dtype, offset = pick.choice(DTYPES), pick.choice((0, 0, 0, 1, 2, 4, 8))
    outer = max(1, min(pick.randint(1, 9), elements // (n_cols * inner)))
    memory = torch.randn(offset + outer * n_cols * inner, device="cuda").mul_(3).to(dtype)
    x = memory[offset:].view(outer, inner, n_cols)
    if inner % 4 == 0 and pick.random() < 0.4:
        return x.unflatten(1, (4, inner // 4)).permute(0, 3, 1, 2)
    return x.transpose(1, 2)


def check(x: torch.Tensor, log: bool, phase: int, dim: int = -1) -> None:
    """Checks a softmax of x over dim, with the output `phase` elements behind a vector."""
    ours = fs.log_softmax if log else fs.softmax
    rows = lambda t: t.movedim(dim, -1).flatten(0, -2)  # noqa: E731
    y, before, after = guarded(x.shape, x.dtype, phase)
    for _ in range(2):
        y.fill_(float("nan"))
        ours(x, dim, out=y)
        assert_forward(rows(y), rows(x), log)
    assert (before == 7).all() and (after == 7).all(), "written outside the output"
    fresh = ours(x, dim)
    assert_forward(rows(fresh), rows(x), log)
    assert torch.equal(ours(x[:1], dim), fresh[:1]), "bits depend on outer"
    assert isinstance(fs.plan_for(x, dim), Plan)


@pytest.mark.parametrize("seed", range(24))
def test_random_layouts(seed: int):
    pick = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(4):
        n_cols, inner = round(2 * 3000 ** pick.random()), round(3000 ** pick.random())
        x = drawn(pick, n_cols, inner)
        x.flatten(0, -2)[0, 0] = -float("inf")
        x[-1, ..., : n_cols // 2] = -60  # the maximum comes late
        check(x, pick.random() < 0.4, pick.choice((0, 0, 1, 2, 4)))


@pytest.mark.parametrize("seed", range(24))
def test_random_channels_last(seed: int):
    pick, taken = random.Random(seed), 0
    torch.manual_seed(seed)
    for _ in range(5):
        x = channels_last(pick, round(2 * 1200 ** pick.random()), round(32 * 100 ** pick.random()))
        x.movedim(1, -1).flatten(0, -2)[0, 0] = -float("inf")
        x[-1, : x.shape[1] // 2] = -60  # the maximum comes late
        check(x, pick.random() < 0.4, pick.choice((0, 0, 1, 2, 4)), dim=1)
        taken += getattr(fs.plan_for(x, 1), "regime", "") == "transposed"
    assert taken


@pytest.mark.parametrize("inner", [1024, 1032, 1026, 1021])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_cols", [2, 5, 19, 32, 37, 64, 100, 148, 256, 333, 415, 700, 1001, 1281, 1600, 2301])
def test_channels_last_of_each_plan(n_cols: int, dtype: torch.dtype, inner: int):
    x = torch.randn(3, inner, n_cols, device="cuda").mul_(3).to(dtype).transpose(1, 2)
    rows = list(edge_rows(n_cols, dtype, "cuda").values())
    for i, row in enumerate(rows):
        x[i % 3, :, 7 * i] = row
    plan = fs.plan_for(x, 1)
    assert isinstance(plan, Plan)
    if torch.cuda.get_device_capability()[0] == 9 and (inner == 1024 or n_cols in (5, 19, 37, 100, 148, 333)):
        assert plan.regime == "transposed"
    for log in (False, True):
        y, before, after = guarded(x.shape, dtype, 0)
        (fs.log_softmax if log else fs.softmax)(x, 1, out=y)
        assert (before == 7).all() and (after == 7).all(), "written outside the output"
        if not log:
            assert_contract(y, x, 1)
        finite = x.isfinite().all(1, keepdim=True).expand_as(x)
        want = (torch.log_softmax if log else torch.softmax)(x.double(), 1).to(dtype).double()  # which may overflow
        eps = torch.finfo(dtype).eps
        assert torch.allclose(y[finite].double(), want[finite], rtol=2 * eps + 4e-6, atol=3e-6 * (1 + log))


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_cols", [5, 9, 21, 33, 100, 150, 255, 333, 520, 1000, 1001, 1281, 1500, 2000, 2301])
def test_columns_of_each_plan(n_cols: int, dtype: torch.dtype, aligned: bool):
    inner = 1024 if aligned else 1021
    x = torch.randn(3, n_cols, inner, device="cuda").mul_(3).to(dtype).transpose(1, 2)
    plan = fs.plan_for(x, -1)
    assert isinstance(plan, Plan)
    taken = plan.regime == "transposed"
    if torch.cuda.get_device_capability()[0] == 9:
        assert taken == (aligned or n_cols > 5)
    rows = list(edge_rows(n_cols, dtype, "cuda").values())
    for i, row in enumerate(rows):
        x[i % 3, 7 * i] = row
    for log in (False, True):
        y, before, after = guarded(x.shape, dtype, 0)
        (fs.log_softmax if log else fs.softmax)(x, -1, out=y)
        assert (before == 7).all() and (after == 7).all(), "written outside the output"
        if not log:
            assert_contract(y, x)
        finite = x.isfinite().all(-1)
        want = (torch.log_softmax if log else torch.softmax)(x.double(), -1).to(dtype).double()  # which may overflow
        eps = torch.finfo(dtype).eps
        assert torch.allclose(y[finite].double(), want[finite], rtol=2 * eps + 4e-6, atol=3e-6 * (1 + log))
    if taken:
        with fs.batch_invariant():
            found = fs.softmax(x, -1)
            assert torch.equal(found.nan_to_num(7), fs.softmax(x.contiguous(), -1).nan_to_num(7))


@pytest.mark.parametrize("seed", range(12))
def test_random_copies(seed: int):
    pick, taken = random.Random(seed), 0
    for _ in range(8):
        n_cols, inner = round(2 * 3000 ** pick.random()), round(2 * 1500 ** pick.random())
        x = drawn(pick, n_cols, inner, 1 << 21)
        if pick.random() < 0.3:
            x = x.transpose(0, 1)
        tiles = views.tiles_of(x)
        if tiles is None:
            continue
        taken += 1
        y, before, after = guarded(x.shape, x.dtype, 0)
        views.copy_launch(x, y, tiles, views.device_of(x))()
        assert torch.equal(y, x), (x.shape, x.stride())
        assert (before == 7).all() and (after == 7).all(), "written outside the output"
        found = views.contiguous(x)
        assert found.is_contiguous() and torch.equal(found, x)
    assert taken >= 2


@pytest.mark.parametrize("seed", range(12))
def test_random_steps(seed: int):
    pick = random.Random(seed)
    dtype = pick.choice([torch.float16, torch.bfloat16, torch.float32])
    n, step, first = round(2 * 1e6 ** pick.random()), pick.randint(2, 9), pick.randint(0, 9)
    x = torch.randn(first + n * step, device="cuda").to(dtype)[first:][::step]
    y, before, after = guarded(x.shape, x.dtype, 0)
    views.stepped_copy_launch(x, y, step, views.device_of(x))()
    assert torch.equal(y, x), (n, step, first)
    assert (before == 7).all() and (after == 7).all(), "written outside the output"


def test_calls_that_copy():
    """Batch-invariant calls and gradients of large transpositions have the bits of contiguous ones."""
    for dtype in DTYPES:
        x = torch.randn(3, 4001, 77, device="cuda").to(dtype).transpose(1, 2)
        with fs.batch_invariant():
            assert torch.equal(fs.softmax(x, -1), fs.softmax(x.contiguous(), -1))
        y = torch.softmax(x, -1).contiguous()
        found, wanted = (launch_softmax.softmax_backward(dy, y, -1, dtype, False) for dy in (x, x.contiguous()))
        assert torch.equal(found, wanted)


def test_the_copy_takes_no_more_memory():
    x = torch.randn(8, 3000, 512, device="cuda").transpose(1, 2)
    fs.softmax(x, -1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with fs.batch_invariant():
        fs.softmax(x, -1)
    assert torch.cuda.max_memory_allocated() - before <= 2 * x.numel() * x.element_size() + (1 << 20)
