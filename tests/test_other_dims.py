"""Softmax and its kin over a dimension that is not the last: each regime, layouts, bits, and losses of images."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from cases import (
    SENTINEL,
    assert_contract,
    assert_forward,
    assert_gradient,
    assert_nothing_outside,
    assert_planes,
    between_sentinels,
    edge_rows,
    logits,
)
from spatial_problems import periodic_plan

import fused_softmax as fs
from fused_softmax.kernels.common.periodic_exchange import POSITIONS, place_to_read
from fused_softmax.kernels.common.spatial_tiles import owned_positions, positions_of, tile_at
from fused_softmax.launch import cross_entropy_spatial, logsumexp, spatial, views
from fused_softmax.launch.device import describe
from fused_softmax.launch.options import CrossEntropy
from fused_softmax.planning.cross_entropy_spatial import plan_spatial_loss
from fused_softmax.planning.lean_tiles import RANGES, lean_config
from fused_softmax.planning.logsumexp import plan_logsumexp
from fused_softmax.planning.planes import planes_plan
from fused_softmax.planning.register_planes import best_way
from fused_softmax.planning.short_planes import faster_as_short
from fused_softmax.planning.spatial import (
    parts_plan,
    plan_spatial,
    resident_plan,
    tiles_plan,
)
from fused_softmax.planning.spatial_tables import ON_CHIP, PART_VECTORS, UNALIGNED
from fused_softmax.planning.strided import StridedRows, strided_is_faster, strided_plan
from fused_softmax.planning.types import DEVICES, Plan, SpatialProblem, tiles_of

pytestmark = pytest.mark.interpreted

DEVICE = describe(torch.device("cpu"))
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
PLANES = ("planes as one piece", "a large plane", "a plane in registers")
# (outer, n_cols, inner), positions of a tile, columns of a chunk, warps, CTAs; no CTAs: in parts
TILES = {
    "whole columns in a thread": ((2, 19, 40), 64, 1, 1, 1),
    "merged columns": ((3, 37, 50), 16, 8, 1, 1),
    "several of outer": ((9, 3, 5), 8, 1, 1, 1),
    "a cluster": ((2, 70, 50), 16, 4, 1, 4),
    "parts": ((2, 1100, 6), 0, 0, 0, 0),
    "one part": ((2, 70, 33), 0, 0, 0, 0),
    "two tiles": ((1, 420, 200), 0, 0, 0, 0),  # of parts, and of programs that write
    PLANES[0]: ((131, 13, 9), 0, 0, 0, 0),
    PLANES[1]: ((2, 75, 179), 0, 0, 0, 0),
    PLANES[2]: ((2, 1450, 43), 0, 0, 0, 2),
}


def planned(tile: str, problem: SpatialProblem) -> Plan:
    _, inner, cols, warps, ctas = TILES[tile]
    if tile in PLANES:
        found = (periodic_plan if tile == PLANES[2] else planes_plan)(problem, DEVICE)
        assert found is not None and (found.ctas > 1) == (ctas > 1)
        assert (found.periodic > 0) == (tile == PLANES[2])
        return found
    if tile == "two tiles":
        return plan_spatial(problem, DEVICE, "spatial_two_pass")
    if not ctas:
        return parts_plan(problem, DEVICE)
    return resident_plan(problem, DEVICE, inner, cols, warps, ctas, recompute=problem.itemsize == 2)


def run(tile: str, tensors: tuple[torch.Tensor, ...], log: bool, backward: bool = False, invariant: bool = False):
    problem = spatial.problem_of(*tensors, log=log, backward=backward, batch_invariant=invariant)
    recipe = spatial.softmax_recipe(tensors, planned(tile, problem), log, backward, DEVICE)
    spatial.prepare(recipe, tensors)(tensors)


def within(shape: tuple[int, ...], dtype: torch.dtype, packed: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """An output (outer, n_cols, inner) between sentinels, and all of its memory. packed: without gaps of its own."""
    outer, n_cols, inner = shape
    if packed:
        return between_sentinels(shape, dtype)
    field = torch.full((outer, n_cols + 2, inner + 16), SENTINEL, dtype=dtype)
    return field[:, 1:-1, 8:-8], field


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_two_tiles_of_several_parts(dtype):
    shape = TILES["two tiles"][0]
    plan = planned("two tiles", SpatialProblem(*shape[1:], dtype, 8 if dtype == "bfloat16" else 4))
    assert plan.finish.rows == 4 * plan.rows and plan.part_cols < shape[1]


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize("tile", TILES)
def test_forward_of_each_regime(tile, dtype, log):
    shape = TILES[tile][0]
    x = logits(shape[0], shape[2], shape[1], dtype=dtype).transpose(1, 2).contiguous()
    x[0, 1, 0] = -float("inf")
    y, field = within(shape, dtype, tile in PLANES)
    run(tile, (x, y), log)
    assert_forward(y.clone(), x, log)
    assert_nothing_outside((y, field))


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize("tile", TILES)
def test_gradient_of_each_regime(tile, dtype, log):
    shape = TILES[tile][0]
    y = (torch.log_softmax if log else torch.softmax)(torch.randn(shape) * 2, 1).to(dtype)
    dy = torch.randn(shape).to(dtype)
    dx, field = within(shape, dtype, tile in PLANES)
    run(tile, (y, dy, dx), log, backward=True)
    g, p = dy.double(), y.double()
    want = g - p.exp() * g.sum(1, keepdim=True) if log else p * (g - (g * p).sum(1, keepdim=True))
    scale = 1 + g.sum(1, keepdim=True).abs() if log else p * (g.abs() + (g * p).abs().sum(1, keepdim=True))
    assert ((dx.double() - want).abs() <= (2e-6 + 2 * torch.finfo(dtype).eps) * scale).all()
    assert_nothing_outside((dx, field))


@pytest.mark.parametrize("tile", TILES)
def test_infinities_and_nan(tile):
    shape = TILES[tile][0]
    rows = list(edge_rows(shape[1], FLOAT32).values())
    x = torch.stack([rows[i % len(rows)] for i in range(shape[0] * shape[2])]).view(shape[0], shape[2], shape[1])
    x = x.transpose(1, 2).contiguous()
    y = torch.empty_like(x)
    run(tile, (x, y), False)
    assert_contract(y, x, 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(8))
def test_random_small_planes(seed):
    """Softmax and its gradient by the path of a call, of shapes that move as one piece."""
    pick, gathered, log = random.Random(seed), 0, bool(seed % 2)
    for _ in range(10):
        n_cols, inner = round(2 * 80 ** pick.random()), round(2 * 100 ** pick.random()) - pick.choice((0, 1))
        shape = (pick.randrange(1, 4 + 4000 // (n_cols * inner)), n_cols, inner)
        forward, _ = assert_planes(shape, pick.choice((BFLOAT16, FLOAT32)), log)
        gathered += forward.gathered
    assert gathered >= 5


@pytest.mark.parametrize("seed", range(3))
def test_random_large_planes(seed):
    """Planes in shared memory that the launch adds, and in the registers of a program or a cluster."""
    pick, log, ways = random.Random(100 + seed), bool(seed % 2), set()
    for kilobytes in (60, 80, 250, 380, 12, 90):
        least, most = (3, 11) if kilobytes in (12, 90) else (11, 200)
        inner = round(least * (most / least) ** pick.random()) | 1
        dtype = pick.choice((BFLOAT16, FLOAT32))
        shape = (2, round(kilobytes * 1024 / dtype.itemsize / inner), inner)
        x, dy = (torch.randn(shape).mul_(3).to(dtype) for _ in range(2))
        x[0, 1, 0] = -float("inf")
        (y, field), (dx, of_dx) = (within(shape, dtype, packed=True) for _ in range(2))
        for backward, tensors in ((False, (x, y)), (True, (y, dy, dx))):
            problem = spatial.problem_of(*tensors, backward=backward, log=log)
            if backward:
                y.copy_((torch.log_softmax if log else torch.softmax)(torch.randn(shape), 1))
            for plan in filter(None, (planes_plan(problem, DEVICE), periodic_plan(problem, DEVICE))):
                ways.add((plan.periodic > 0, plan.ctas > 1))
                tensors[-1].zero_()
                spatial.prepare(spatial.softmax_recipe(tensors, plan, log, backward, DEVICE), tensors)(tensors)
                if backward:
                    assert_gradient(dx, y, dy, log)
                else:
                    assert_forward(y.clone(), x, log)
        assert_nothing_outside((y, field), (dx, of_dx))
    assert ways == {(False, False), (True, False), (True, True)}


@pytest.mark.parametrize("shape", [(9, 5, 3), (4, 35, 31), (2, 75, 179), (2, 1450, 43), (3, 3001, 5)])
def test_planes_in_place(shape):
    """Where planes are whole in a program or cluster, the output may be the input, and the bits are the same."""
    x = torch.randn(shape)
    y = fs.softmax(x, 1)
    plan = spatial.softmax_plan((x, x), False, False, False, DEVICE)
    assert plan.gathered or plan.periodic
    spatial.prepare_softmax((x, x), False, False, False)((x, x))
    assert torch.equal(x, y)


def test_large_planes_in_place_have_plain_tiles():
    # skewed tiles share vectors, and write what another one still reads
    x = torch.randn(2, 400, 301)
    exact = torch.softmax(x.double(), 1)
    plan = spatial.softmax_plan((x, x), False, False, False, DEVICE)
    assert not (plan.skewed or plan.overlap or plan.periodic) and fs.plan_for(x, dim=1).skewed
    assert fs.softmax(x, 1, out=x) is x
    assert torch.allclose(x.double(), exact, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("tile", TILES)
def test_bits_do_not_depend_on_outer(tile):
    shape = TILES[tile][0]
    x = torch.randn(shape)
    y, first = torch.empty_like(x), torch.empty_like(x[:1])
    run(tile, (x, y), False)
    run(tile, (x[:1], first), False)
    assert torch.equal(y[:1], first)


@pytest.mark.parametrize("n_cols", [19, 150, 2100])
def test_bits_do_not_depend_on_inner_within_batch_invariant(n_cols):
    x = torch.randn(1, n_cols, 96)
    with fs.batch_invariant():
        wide = fs.softmax(x, 1)
        for inner in (2, 33, 64):
            assert torch.equal(fs.softmax(x[:, :, :inner].contiguous(), 1), wide[:, :, :inner]), inner


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_columns_are_added_up_alike_for_any_inner_within_batch_invariant(itemsize, backward):
    dtype, full = {2: "bfloat16", 4: "float32"}[itemsize], 16 // itemsize
    for n_cols in (3, 19, 64, 150, 256, 350, 700, 1000, 2100, 3000, 9000, 40000, 1000000):
        added = set()
        for inner, vec, whole in ((4096, full, True), (4104, full, False), (4100, full // 2, False), (4097, 1, False)):
            problem = SpatialProblem(n_cols, inner, dtype, vec, backward, batch_invariant=True, whole_sectors=whole)
            plan = plan_spatial(problem, DEVICES["sm_90"])
            added.add((plan.regime, plan.ctas, plan.vectors_per_chunk, plan.chunks, plan.part_cols))
        assert len(added) == 1, (n_cols, added)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_loss_is_added_up_alike_for_any_inner_within_batch_invariant(itemsize):
    dtype = {2: "bfloat16", 4: "float32"}[itemsize]
    for n_cols in (3, 19, 45, 64, 120, 150, 188, 256, 350, 700, 1000, 3000):
        added = set()
        for inner, vec, whole in ((4096, 16 // itemsize, True), (4104, 16 // itemsize, False), (4097, 1, False)):
            problem = SpatialProblem(n_cols, inner, dtype, vec, batch_invariant=True, whole_sectors=whole)
            plan = plan_spatial_loss(problem, DEVICES["sm_90"])
            added.add((plan.regime, plan.ctas, plan.vectors_per_chunk, plan.chunks, plan.part_cols))
        assert len(added) == 1, (n_cols, added)


@pytest.mark.parametrize(
    "n_cols, inner, backward",
    [(150, 4096, False), (3000, 4096, False), (150, 4097, False), (150, 4097, True), (1300, 300, False)],
)
def test_columns_that_lie_far_apart(n_cols, inner, backward):
    # strides of 32 bits are read as such
    found = set()
    for stride in (inner, 2**32 * 8 - 8, 2**32 * 8 + inner % 8):
        sizes, strides = (2, n_cols, inner), (n_cols * stride, stride, 1)
        tensors = tuple(torch.empty_strided(sizes, strides, dtype=BFLOAT16, device="meta") for _ in range(2 + backward))
        plan = spatial.softmax_plan(tensors, False, backward, False, DEVICES["sm_90"])
        (step,) = spatial.softmax_recipe(tensors, plan, False, backward, DEVICES["sm_90"]).steps
        units = stride if plan.skewed else stride // plan.vec
        assert step.scalars[5] == units and step.meta["NEAR"] == (units < 2**32)
        found.add(step.meta["NEAR"])
    assert found == {True, False}


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("run_one", ["merged columns", "a cluster", "several of outer", "odd", "half sectors"])
def test_far_columns_have_the_bits_of_near_ones(monkeypatch, run_one, log):
    run_it = run_skewed if run_one in SKEWED else run
    shape, found = (SKEWED if run_one in SKEWED else TILES)[run_one][0], []
    x, dy = torch.randn(shape).to(BFLOAT16), torch.randn(shape).to(BFLOAT16)
    for near in (True, False):
        monkeypatch.setattr(spatial, "_near", lambda strides, near=near: near)
        y, dx = torch.empty_like(x), torch.empty_like(x)
        run_it(run_one, (x, y), log)
        run_it(run_one, (y, dy, dx), log, backward=True)
        found.append((y, dx))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("tile", ["merged columns", "a cluster"])
def test_out_may_be_the_input(tile):
    x = torch.randn(TILES[tile][0])
    y, inplace = torch.empty_like(x), x.clone()
    run(tile, (x, y), False)
    run(tile, (inplace, inplace), False)
    assert torch.equal(inplace, y)


# (outer, n_cols, inner), positions of a tile, columns of a chunk, CTAs, elements of an access, and those at whose
# multiples columns start
SKEWED = {
    "odd": ((3, 21, 131), 32, 8, 1, 8, 8),
    "on a cluster": ((2, 37, 77), 32, 4, 4, 4, 4),
    "twice an odd number": ((2, 5, 70), 32, 4, 1, 4, 4),
    "aligned": ((2, 19, 232), 64, 8, 2, 8, 8),
    "pairs": ((1, 9, 203), 64, 2, 1, 2, 2),
    "half sectors": ((2, 19, 232), 64, 2, 2, 8, 16),
    "half sectors, many blocks": ((1, 5, 1000), 64, 2, 1, 8, 16),
    "odd, sectors": ((2, 37, 203), 128, 4, 4, 4, 16),
    "one sector": ((3, 21, 5), 64, 16, 1, 8, 16),
}
TWO_PHASES = ("twice an odd number", "aligned", "pairs")


def run_skewed(
    tile: str, tensors: tuple[torch.Tensor, ...], log: bool, backward: bool = False, num_warps: int = 1
) -> None:
    _, inner, cols, ctas, vec, unit = SKEWED[tile]
    problem = spatial.problem_of(*tensors, log=log, backward=backward)
    assert problem.in_phase
    size = problem.itemsize
    plan = resident_plan(
        problem, DEVICE, inner, cols, 1, ctas, recompute=size == 2, thread_bytes=vec * size, skewed=unit * size
    )
    assert (plan.vec, plan.skewed) == (vec, unit)
    two_phases = tile in TWO_PHASES or ("half" in tile and size == 2)
    assert plan.overlap == (unit if two_phases else 2 * unit)
    plan = replace(plan, num_warps=num_warps)
    spatial.prepare(spatial.softmax_recipe(tensors, plan, log, backward, DEVICE), tensors)(tensors)


# shape, in the units at whose multiples columns start; positions of a tile, columns of a chunk, CTAs
OVERLAPPING = {
    "one block": ((2, 9, 3), 64, 4, 1),
    "two blocks": ((2, 9, 9), 64, 4, 1),
    "many blocks": ((3, 11, 31), 32, 2, 1),
    "a last vector alone": ((1, 7, 29), 64, 2, 1),
    "sectors": ((2, 7, 30), 64, 2, 1),
    "on a cluster": ((2, 37, 21), 64, 2, 4),
    "one column of each CTA": ((2, 19, 45), 64, 1, 8),
}
# bytes at whose multiples columns start, and those of an access: of both dtypes
STARTS = ((16, 16), (16, 8), (8, 8), (8, 4), (4, 4))


def run_overlapping(
    tile: str, access: int, tensors: tuple[torch.Tensor, ...], log: bool, backward: bool = False
) -> None:
    _, inner, cols, ctas = OVERLAPPING[tile]
    problem = spatial.problem_of(*tensors, log=log, backward=backward)
    plan = resident_plan(
        problem, DEVICE, inner, max(cols, 32 // (access * ctas)), 2, ctas, recompute=problem.itemsize == 2,
        thread_bytes=access, overlaps=True,
    )  # fmt: skip
    plan = replace(plan, outers=1)
    assert (plan.vec * problem.itemsize, plan.overlap, plan.skewed) == (access, problem.sector - problem.vec, 0)
    spatial.prepare(spatial.softmax_recipe(tensors, plan, log, backward, DEVICE), tensors)(tensors)


def check_tiles(run: Callable[..., None], shape: tuple[int, int, int], dtype: torch.dtype, log: bool) -> None:
    """Softmax and its gradient over dimension 1, by run(tensors, log, backward), between sentinels."""
    x, _ = between_sentinels(shape, dtype)
    x.copy_(torch.randn(shape) * 3)
    x[0, 1, 0] = -float("inf")
    y, field = between_sentinels(shape, dtype)
    run((x, y), log)
    exact = (torch.log_softmax if log else torch.softmax)(x.double(), 1)
    assert torch.allclose(y.double(), exact, rtol=2 * torch.finfo(dtype).eps + 2e-6, atol=1e-6)
    first = torch.empty_like(x[:1])
    run((x[:1], first), log)
    assert torch.equal(first, y[:1]), "bits depend on outer"
    dy, dx = torch.randn(shape).to(dtype), between_sentinels(shape, dtype)
    x[0, 1, 0] = 0.0
    y.copy_((torch.log_softmax if log else torch.softmax)(x.double(), 1))
    run((y, dy, dx[0]), log, backward=True)
    g, p = dy.double(), y.double()
    want = g - p.exp() * g.sum(1, keepdim=True) if log else p * (g - (g * p).sum(1, keepdim=True))
    scale = 1 + g.sum(1, keepdim=True).abs() if log else p * (g.abs() + (g * p).abs().sum(1, keepdim=True))
    assert ((dx[0].double() - want).abs() <= (2e-6 + 2 * torch.finfo(dtype).eps) * scale).all()
    assert_nothing_outside((y, field), dx)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_warps", [1, 8])  # a softmax of 8 warps writes its chunks by twos
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize("tile", SKEWED)
def test_skewed_tiles(tile, dtype, log, num_warps):
    check_tiles(partial(run_skewed, tile, num_warps=num_warps), SKEWED[tile][0], dtype, log)


# shape, dtype, elements of a vector, and the strides of inputs and of the output. Vectors lie in two columns because of
# one of these numbers alone
ACROSS = {
    "the stride of outer": ((3, 17, 26), BFLOAT16, 2, (447, 26), (991, 58)),
    "the stride of columns": ((2, 12, 104), FLOAT32, 4, (1320, 110), (1416, 118)),
    "the positions": ((1, 18, 289), FLOAT32, 2, (5220, 290), (5220, 290)),
    "none": ((2, 18, 104), BFLOAT16, 4, (1904, 104), (2160, 120)),
}


def strided(
    shape: tuple[int, int, int], dtype: torch.dtype, strides: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of these strides among sentinels, and all of its memory."""
    field = torch.full((shape[0] * strides[0] + shape[1] * strides[1] + 64,), SENTINEL, dtype=dtype)
    return field.as_strided(shape, (*strides, 1), 32), field


@pytest.mark.parametrize("num_warps", [1, 8])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("of", ACROSS)
def test_ends_of_skewed_tiles_with_strides(of, backward, num_warps):
    shape, dtype, vec, of_inputs, of_output = ACROSS[of]
    inputs = [strided(shape, dtype, of_inputs)[0].copy_(torch.randn(shape)) for _ in range(1 + backward)]
    if backward:
        inputs[0].copy_(torch.softmax(inputs[0].float(), 1))
    result, memory = strided(shape, dtype, of_output)
    tensors = (*inputs, result)
    problem = spatial.problem_of(*tensors, backward=backward)
    assert problem.in_phase
    size = dtype.itemsize
    plan = resident_plan(problem, DEVICE, 32, 4, 1, recompute=size == 2, thread_bytes=vec * size, skewed=vec * size)
    plan = replace(plan, num_warps=num_warps)
    spatial.prepare(spatial.softmax_recipe(tensors, plan, False, backward, DEVICE), tensors)(tensors)
    if backward:
        assert_gradient(result, *inputs, False)
    else:
        assert_forward(result.clone(), inputs[0], False)
    assert_nothing_outside((result, memory))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize(("starts", "access"), STARTS)
@pytest.mark.parametrize("tile", OVERLAPPING)
def test_overlapping_tiles(tile, starts, access, dtype, log):
    outer, n_cols, units = OVERLAPPING[tile][0]
    check_tiles(partial(run_overlapping, tile, access), (outer, n_cols, units * starts // dtype.itemsize), dtype, log)


@triton.jit
def note_writers(
    writers, counts, n_cols, inner, n_blocks, outer_stride, col_stride, COLS: tl.constexpr, INNER: tl.constexpr,
    VEC: tl.constexpr, OVERLAP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    outer, block = tl.program_id(0) // n_blocks, tl.program_id(0) % n_blocks
    column = tl.arange(0, COLS)[:, None, None]
    first, exists = positions_of(block, inner, INNER, VEC, OVERLAP)
    own = owned_positions(
        exists, outer, block, n_blocks, column, outer_stride, col_stride, first, COLS, INNER, VEC, OVERLAP, DTYPE
    )
    own = own & (column < n_cols)
    tl.store(tile_at(writers, outer, col_stride, outer_stride, first, column, INNER, VEC), block, mask=own)
    tl.atomic_add(tile_at(counts, outer, col_stride, outer_stride, first, column, INNER, VEC), 1, mask=own)


@pytest.mark.parametrize(
    ("itemsize", "vec", "starts"), [(2, 8, 8), (2, 4, 8), (2, 4, 4), (2, 2, 2), (4, 2, 2), (4, 1, 1)]
)
def test_each_sector_has_one_writer(itemsize, vec, starts):
    sector, n_cols, outer = 32 // itemsize, 13, 3
    overlap = sector - starts
    # positions, and the gaps behind each column and behind each index of `outer`
    gaps = ((1, 0, 0), (5, 0, 1), (9, 2, 0), (16, 1, 3), (17, 0, 0), (31, 4, 1), (64, 0, 2), (129, 3, 0))
    for units, gap, last in gaps:
        inner, col_stride = starts * units, starts * (units + gap)
        outer_stride = n_cols * col_stride + starts * last
        n_blocks = tiles_of(inner, 64, overlap)
        size = outer * outer_stride
        writers, counts = torch.full((size,), -1), torch.zeros(size, dtype=torch.int32)
        note_writers[(outer * n_blocks,)](
            writers, counts, n_cols, inner // vec, n_blocks, outer_stride // vec, col_stride // vec, 16, 64, vec,
            overlap, tl.bfloat16 if itemsize == 2 else tl.float32,
        )  # fmt: skip
        place = torch.arange(size)
        column, position = place % outer_stride // col_stride, place % outer_stride % col_stride
        inside = (column < n_cols) & (position < inner)
        assert (counts == inside).all(), "each element is written once, and nothing else is"
        of_columns = writers.as_strided((outer, n_cols, inner), (outer_stride, col_stride, 1)).reshape(-1, inner)
        assert (of_columns[:, 0] == 0).all() and (of_columns[:, -1] == n_blocks - 1).all()
        assert (of_columns.diff() >= 0).all(), "blocks follow one another"
        # of each sector that lies in one column, all elements have one writer
        whole = size // sector * sector
        of_sectors, all_inside = writers[:whole].view(-1, sector), inside[:whole].view(-1, sector).all(1)
        one_column = (column + place // outer_stride * n_cols)[:whole].view(-1, sector)
        complete = all_inside & (one_column[:, 0] == one_column[:, -1])
        assert (of_sectors[complete] == of_sectors[complete, :1]).all(), "a sector has two writers"


def run_planned(tensors: tuple[torch.Tensor, ...], log: bool, backward: bool = False) -> None:
    plan = spatial.softmax_plan(tensors, log, backward, False, DEVICE)
    assert plan.skewed and plan.ctas > 1, plan
    spatial.prepare(spatial.softmax_recipe(tensors, plan, log, backward, DEVICE), tensors)(tensors)


# fewer positions than four tiles, in planes that no program holds: three tiles, two, and one that is nearly full
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 430, 151), FLOAT32), ((2, 600, 222), BFLOAT16), ((2, 470, 118), FLOAT32)]
)
def test_skewed_tiles_of_few_positions(shape, dtype, log):
    check_tiles(run_planned, shape, dtype, log)


def problem_over(shape, dtype, log, backward) -> SpatialProblem:
    """The problem of a softmax of contiguous tensors, or of its gradient."""
    x = torch.empty(shape, dtype=dtype, device="meta")
    return spatial.problem_of(*(x,) * (2 + backward), log=log, backward=backward)


def check_plan(plan: Plan, shape, dtype, log, backward) -> None:
    """A plan gives right results, writes nothing outside, and its bits do not depend on `outer`."""
    inputs = [torch.randn(shape).mul_(3).to(dtype) for _ in range(1 + backward)]
    if backward:
        inputs[0] = (torch.log_softmax if log else torch.softmax)(inputs[0].float(), 1).to(dtype)
    result, memory = between_sentinels(shape, dtype)
    recipe = spatial.softmax_recipe((*inputs, result), plan, log, backward, DEVICE)
    spatial.prepare(recipe, (*inputs, result))((*inputs, result))
    if backward:
        assert_gradient(result, *inputs, log)
    else:
        assert_forward(result.clone(), inputs[0], log)
    whole = result.clone()
    assert_nothing_outside((result, memory))
    one = tuple(t[:1] for t in inputs)
    spatial.prepare(recipe, (*one, result[:1]))((*one, result[:1]))
    assert torch.equal(result[:1], whole[:1]), "bits depend on outer"


LEAN = [
    (key, of, log) for key, ranges in RANGES.items() for of in ranges for log in (False, True) if of.log in (None, log)
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("key", "of", "log"), LEAN)
def test_lean_tiles(key, of, log):
    op, itemsize, starts = key
    backward, dtype = op == "gradient", FLOAT32 if itemsize == 4 else BFLOAT16
    inner = (480 if of.alone else max(480, 4 * of.positions)) + (starts // itemsize if starts < 32 else 0)
    problem = problem_over((2, of.least, inner), dtype, log, backward)
    config = lean_config(problem, DEVICES["sm_90"])
    assert config is not None
    check_plan(tiles_plan(problem, DEVICES["sm_90"], config), (2, of.least, inner), dtype, log, backward)


# columns, positions, and whether it is a gradient: in tiles of 32 and 64 positions, plain, overlapping and skewed
SHORT = (
    (481, 90, FLOAT32, False), (599, 83, FLOAT32, False), (990, 61, FLOAT32, False), (160, 134, FLOAT32, True),
    (672, 77, FLOAT32, True), (1493, 107, FLOAT32, True), (1263, 97, BFLOAT16, False), (2078, 68, BFLOAT16, False),
    (307, 186, BFLOAT16, True), (276, 133, FLOAT32, False), (403, 136, BFLOAT16, False), (301, 64, BFLOAT16, False),
    (461, 280, BFLOAT16, False), (475, 208, BFLOAT16, True), (294, 88, BFLOAT16, True), (1173, 72, BFLOAT16, True),
)  # fmt: skip


@triton.jit
def places(place_ptr, inner, CTAS: tl.constexpr, VEC: tl.constexpr, THREADS: tl.constexpr):
    position = tl.arange(0, THREADS)
    tl.store(place_ptr + position, place_to_read(position, inner, CTAS, VEC))


@pytest.mark.parametrize("vec", [4, 8])
@pytest.mark.parametrize("inner", [2, 3, 7, 8, 31, 129, 256])
def test_no_thread_reads_a_place_that_another_one_writes(inner, vec):
    """Between two barriers each thread reads its position's numbers and writes what slots read of it."""
    threads, last = 512, inner + vec - 1
    of_one, of_more = (torch.empty(threads, dtype=torch.int32) for _ in range(2))
    places[(1,)](of_one, inner, 1, vec, threads)
    places[(1,)](of_more, inner, 2, vec, threads)
    written = {place: position for position in range(inner) for place in range(position, last, inner)}
    assert sorted(written) == list(range(last))
    for position, place in enumerate(of_one.tolist()):
        assert written.get(place, position) == position and place < POSITIONS + vec
        assert position >= inner or place == position
    assert of_more.tolist() == [min(position, inner - 1) for position in range(threads)], "what has arrived stays"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(("n_cols", "inner", "dtype", "backward"), SHORT)
def test_tiles_of_short_planes(n_cols, inner, dtype, backward, log):
    """In place of planes in registers or alone on a multiprocessor, and of other tiles."""
    problem, device = problem_over((2, n_cols, inner), dtype, log, backward), DEVICES["sm_90"]
    way = best_way(problem, device)
    config = faster_as_short(problem, device, spatial.tiles_or_pieces(problem, device, way), way)
    assert config is not None, "also where registers are faster still: the kernel is what is tested"
    check_plan(tiles_plan(problem, device, config), (2, n_cols, inner), dtype, log, backward)


def test_skewed_tiles_are_for_tensors_of_equal_phases():
    x = torch.empty(2, 40, 1001, dtype=BFLOAT16)
    y = torch.empty_like(x)
    assert spatial.problem_of(x, y).in_phase
    moved = torch.empty(x.numel() + 8, dtype=BFLOAT16)[1 : x.numel() + 1].view(x.shape)
    wider = torch.empty(2, 41, 1001, dtype=BFLOAT16)[:, 1:]
    half_a_sector = torch.empty(2, 40, 1009, dtype=BFLOAT16)[..., :1001]
    overlapping = torch.empty(2 * 40 * 1001, dtype=BFLOAT16).as_strided(x.shape, (40000, 1000, 1))
    for other in (x, moved, wider, half_a_sector, overlapping, y.float()):
        assert not spatial.problem_of(other, x).in_phase


def test_chunks_of_skewed_tiles_repeat_the_phases():
    device, n_skewed = DEVICES["sm_90"], 0
    # runs of ON_CHIP start at multiples of half a sector, runs of UNALIGNED anywhere
    tables = [(*kind, 16 // kind[1], table) for kind, table in ON_CHIP.items()]
    tables += [(*kind, 1, table) for kind, table in UNALIGNED.items()]
    tables += [(*kind, table) for kind, table in PART_VECTORS.items()]
    for backward, itemsize, starts, table in tables:
        for config in table:
            if config.skewed:
                cols = config.num_warps * 32 * config.thread_bytes // itemsize // config.inner
                repeats = max(1, config.skewed // itemsize // starts)
                assert cols * config.ctas % repeats == 0, config
                assert config.thread_bytes <= config.skewed < config.inner * itemsize / 4, config
                assert config.ctas == 1 or config.inner <= config.num_warps * device.warp_size, config
                assert not (backward and config.held), "such gradients stage nothing"
                n_skewed += 1
    assert n_skewed > 60


def cropped(x: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (1, 2, 1, 1))[..., 1:-1, 1:-2]


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda x: x[:1].expand(x.shape),
    "cropped": cropped,
    "channels of more": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
}


@pytest.mark.parametrize(
    "dim", [1, pytest.param(0, marks=pytest.mark.extended), pytest.param(2, marks=pytest.mark.extended)]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, dim):
    x = LAYOUTS[layout](torch.randn(3, 5, 6, 8))
    assert_contract(fs.softmax(x, dim), x, dim)
    dy = torch.randn_like(x)
    leaf, own = x.detach().requires_grad_(), x.detach().requires_grad_()
    fs.softmax(leaf, dim).backward(dy)
    torch.softmax(own, dim).backward(dy)
    torch.testing.assert_close(leaf.grad, own.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fs.logsumexp(x, dim), torch.logsumexp(x, dim), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1}, {"weight": True}, {"weight": True, "label_smoothing": 0.1}]
)
def test_cross_entropy_of_images(reduction, options):
    x, target = torch.randn(2, 7, 5, 6) * 3, torch.randint(0, 7, (2, 5, 6))
    target[0, 0] = -100
    options = dict(options, weight=torch.rand(7) + 0.5) if options.get("weight") else options
    assert cross_entropy_spatial.planes_of(x) is not None
    leaf, own = x.clone().requires_grad_(), x.double().requires_grad_()
    loss = fs.cross_entropy(leaf, target, reduction=reduction, **options)
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    want = F.cross_entropy(own, target, reduction=reduction, **wide)
    torch.testing.assert_close(loss.double(), want, rtol=2e-6, atol=2e-6)
    g = torch.rand_like(loss)
    loss.backward(g)
    want.backward(g.double())
    torch.testing.assert_close(leaf.grad.double(), own.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_cross_entropy_of_images_of_few_classes(seed, monkeypatch):
    """Threads hold whole columns, and the exponentials of all of them. One program looks at the upstream gradient."""
    monkeypatch.setattr(cross_entropy_spatial, "LOOKS", 1)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    outer, classes, inner = rng.randint(1, 5), rng.randint(2, 12), rng.choice((2, 3, 7, 16, 33, 49, 100, 259))
    dtype = rng.choice((BFLOAT16, FLOAT32))
    x, target = (torch.randn(outer, classes, inner) * 3).to(dtype), torch.randint(0, classes, (outer, inner))
    x[0, :, 0], target[0, 0] = float("nan"), -100  # of a position that does not count
    options: dict[str, Any] = {"reduction": rng.choice(("mean", "sum", "none"))}
    if rng.random() < 0.5:
        options["label_smoothing"] = 0.1
    if rng.random() < 0.5:
        options["weight"] = torch.rand(classes) + 0.5
    assert not cross_entropy_spatial.loss_plan(x, x, False).recompute
    for inplace in (False, True):
        leaf, own = x.clone().requires_grad_(), x.double().nan_to_num(0.0).requires_grad_()
        loss = fs.cross_entropy(leaf * 1.0, target, inplace_backward=inplace, **options)
        wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        want = F.cross_entropy(own, target, **wide)
        torch.testing.assert_close(loss.double(), want, rtol=3e-6, atol=3e-6)
        up = torch.rand_like(loss)
        loss.backward(up)
        want.backward(up.double())
        near = 2e-5 if dtype == FLOAT32 else 1e-2
        torch.testing.assert_close(leaf.grad.double(), own.grad, rtol=near, atol=near * own.grad.abs().max().item())


# classes and positions whose losses share factors, in one tile or several: on 1 to 16 CTAs. In skewed tiles, whose runs
# start at single elements or at two; and where columns start together
SHARED_LOSSES = [(37, 239), (45, 119), (60, 478), (90, 118), (150, 167), (180, 239), (300, 111), (400, 111), (700, 55)]
SHARED_LOSSES += [(1100, 55), (1500, 111), (150, 238), (45, 116), (90, 120), (300, 120), (1100, 56)]


@pytest.mark.parametrize("seed", [*range(16), *(pytest.param(n, marks=pytest.mark.extended) for n in range(16, 80))])
def test_cross_entropy_with_shared_factors(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    (classes, inner), outer = SHARED_LOSSES[seed % len(SHARED_LOSSES)], rng.randint(1, 2)
    dtype = rng.choice((BFLOAT16, FLOAT32, torch.float16))
    if dtype == FLOAT32 and classes < 100:
        inner -= inner % 4 == 2  # two of them are half a vector, which other tiles read
    x, target = (torch.randn(outer, classes, inner) * 3).to(dtype), torch.randint(0, classes, (outer, inner))
    x[0, :, 0], target[0, 0] = float("nan"), -100  # of a position that does not count
    x[0, 1, 2], target[0, 2] = -float("inf"), 0
    x[0, :, 5], x[0, 3, 5], target[0, 5] = -60.0, 60.0, 3  # a sure prediction, whose loss is 0
    options: dict[str, Any] = {"reduction": rng.choice(("mean", "mean", "sum", "none"))}
    if rng.random() < 0.3:
        options["weight"] = torch.rand(classes) + 0.5
    plan = cross_entropy_spatial.loss_plan(x, torch.empty_like(x), False)
    assert plan.skewed and plan.outers == 1, plan
    for up in (1.0, 0.25):  # the second is another kernel's, except where nothing is reduced
        leaf, own = x.clone().requires_grad_(), x.double().nan_to_num(0.0, neginf=-float("inf")).requires_grad_()
        loss = fs.cross_entropy(leaf, target, **options)
        assert torch.equal(fs.cross_entropy(x, target, **options), loss), "a gradient changes the loss"
        wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        want = F.cross_entropy(own, target, **wide)
        torch.testing.assert_close(loss.double(), want, rtol=3e-6, atol=3e-6)
        if options["reduction"] == "none":
            assert loss[0, 5] == 0 and loss[0, 0] == 0
        g = torch.full_like(loss, up) if loss.dim() == 0 else torch.rand_like(loss)
        loss.backward(g)
        want.backward(g.double())
        near = {FLOAT32: 2e-5, BFLOAT16: 1e-2, torch.float16: 2e-3}[dtype]
        torch.testing.assert_close(leaf.grad.double(), own.grad, rtol=near, atol=near * own.grad.abs().max().item())
        assert not leaf.grad[0, :, 0].any()


@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"z_loss": 1e-2}])
@pytest.mark.parametrize("inner", [119, 116])
def test_cross_entropy_with_shared_factors_is_that_of_its_rows(inner, options):
    x, target = torch.randn(2, 45, inner) * 3, torch.randint(0, 45, (2, inner))
    plan = cross_entropy_spatial.loss_plan(x, None, False)
    assert plan.skewed and (plan.overlap > 0) == inner % 2
    leaf, rows = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss = fs.cross_entropy(leaf, target, **options)
    want = fs.cross_entropy(rows.movedim(1, -1).reshape(-1, 45), target.reshape(-1), **options)
    torch.testing.assert_close(loss, want, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(torch.autograd.grad(loss, leaf), torch.autograd.grad(want, rows), rtol=2e-5, atol=1e-7)


def test_which_losses_share_factors():
    def shares(n_cols, inner, dtype="bfloat16", vec=1, device="sm_90", **more):
        problem = SpatialProblem(n_cols, inner, dtype, vec, **{"in_phase": True, **more})
        return plan_spatial_loss(problem, DEVICES[device]).skewed > 0

    assert shares(150, 4097) and shares(150, 4098, vec=2) and shares(150, 4097, "float32")
    assert not shares(150, 4097, in_phase=False) and not shares(150, 4100, vec=4, in_phase=False)
    assert not shares(150, 4097, batch_invariant=True) and not shares(21, 4097) and shares(21, 4097, "float32")
    assert not shares(80, 4097, device="gfx942") and not shares(300, 4097, device="sm_80")  # on a cluster
    assert shares(80, 4097, device="sm_80")
    assert not shares(3000, 40001)  # read twice: its backward needs what only the first read keeps
    assert not shares(4000, 252, vec=4) and shares(4000, 2052, vec=4)  # the same
    whole = dict(vec=8, whole_sectors=True)
    assert shares(40, 4096, **whole) and not shares(100, 4096, **whole) and shares(170, 4096, **whole)
    assert shares(150, 4098, "float32", 2) and not shares(90, 4098, "float32", 2)
    assert not shares(30, 4096, **whole) and shares(30, 4100, vec=4)
    x, to = (torch.empty(2, 150, 257, dtype=BFLOAT16) for _ in range(2))
    found = [cross_entropy_spatial.loss_plan(x, dx, False, DEVICES["sm_90"]).skewed for dx in (to, None, x)]
    assert found == [4, 4, 0], "of a gradient with memory of its own, of none, and in place"
    assert not cross_entropy_spatial.loss_plan(x, to, False, DEVICES["sm_90"], shareable=False).skewed


@pytest.mark.parametrize(
    ("n_cols", "inner", "vec", "positions"),
    [(200, 4100, 4, 128), (200, 196, 4, 128), (200, 148, 4, 64), (200, 132, 4, 0), (200, 100, 4, 128), (200, 44, 4, 0)]
    + [(2000, 424, 8, 64), (2000, 428, 4, 128), (2000, 440, 8, 64), (2000, 456, 8, 128)],
)
def test_tiles_of_columns_that_start_together_are_filled(n_cols, inner, vec, positions):
    problem = SpatialProblem(n_cols, inner, "bfloat16", vec, in_phase=True, whole_sectors=False)
    plan = plan_spatial_loss(problem, DEVICES["sm_90"])
    assert plan.overlap == 0 and (plan.rows if plan.skewed else 0) == positions


@pytest.mark.parametrize("inner", [119, 120])
def test_a_launch_of_shared_factors_without_their_code_is_an_error(inner):
    x, dx = (torch.empty(2, 60, inner, dtype=BFLOAT16, device="meta") for _ in range(2))
    plan = cross_entropy_spatial.loss_plan(x, dx, False, DEVICES["sm_90"])
    small, loss = torch.empty(2 * inner, dtype=torch.int64, device="meta"), cross_entropy_spatial.SUM_OF_LOSSES

    def recipe(smoothing: float, unless_one: bool, inplace: bool) -> spatial.Recipe:
        op = CrossEntropy(small, None, None, -100, "sum", smoothing, None, 0.0)
        return cross_entropy_spatial.loss_recipe(
            x, dx, op, plan, DEVICES["sm_90"], loss, True, int(unless_one), unless_one, inplace
        )

    assert len(recipe(0.0, False, False).steps) == 1
    for options in ((0.1, False, False), (0.0, True, False), (0.0, False, True)):
        with pytest.raises(AssertionError, match="no such code"):
            recipe(*options)


def test_a_loss_has_the_same_bits_with_and_without_a_gradient():
    # the gradient's columns have other phases than those of logits that are cut from more classes
    x, target = torch.randn(3, 63, 119)[:, :60].to(BFLOAT16), torch.randint(0, 60, (3, 119))
    loss = fs.cross_entropy(x, target, reduction="sum")
    assert torch.equal(fs.cross_entropy(x.requires_grad_(), target, reduction="sum"), loss)


# plans of losses: CTAS of a cluster, or None for columns that are read twice
@pytest.mark.parametrize("ctas", [4, None])
@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "mean"},
        {"reduction": "mean", "weight": True, "label_smoothing": 0.1, "softcap": 5.0},
        {"reduction": "none", "label_smoothing": 0.1, "z_loss": 1e-2},
        pytest.param({"reduction": "sum", "weight": True, "inplace_backward": True}, marks=pytest.mark.extended),
        {"reduction": "mean", "label_smoothing": 0.1, "inplace_backward": True},
    ],
)
@pytest.mark.parametrize("dtype", [BFLOAT16, pytest.param(FLOAT32, marks=pytest.mark.extended)])
def test_cross_entropy_of_images_of_many_classes(monkeypatch, ctas, options, dtype):
    """The loss and its gradient are those of one program, whose columns are all its own."""
    x, target = (torch.randn(2, 70, 40) * 3).to(dtype), torch.randint(0, 70, (2, 40))
    target[0, :5] = -100
    x[0, :, 3] = float("nan")  # of a position that does not count
    options = dict(options, weight=torch.rand(70) + 0.5) if options.get("weight") else options
    up = torch.tensor(1.0 if "inplace_backward" in options else 0.3)
    if options["reduction"] == "none":
        up = torch.rand(2, 40)

    def both():
        leaf = x.clone().requires_grad_()
        loss = fs.cross_entropy(leaf * 1.0, target, **options)
        loss.backward(up)
        return loss.detach(), leaf.grad

    loss, dx = both()

    def chosen(x, dx, invariant, **_):
        problem = spatial.problem_of(x, x if dx is None else dx, batch_invariant=invariant)
        if ctas is None:
            return replace(parts_plan(problem, DEVICE), part_cols=32, vectors_per_chunk=4)
        return resident_plan(problem, DEVICE, 16, 4, 1, ctas, recompute=True)

    monkeypatch.setattr(cross_entropy_spatial, "loss_plan", chosen)
    of_plan, dx_of_plan = both()
    torch.testing.assert_close(of_plan, loss, rtol=2e-6, atol=2e-6)
    near = 2e-5 if dtype == FLOAT32 else 1e-2
    torch.testing.assert_close(dx_of_plan, dx, rtol=near, atol=near * dx.abs().max().item())
    assert (dx_of_plan[0, :, :5] == 0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cross_entropy_of_images_of_any_layout(layout):
    target = torch.randint(0, 7, (2, 5, 6))
    leaf = torch.randn(2, 7, 5, 6).requires_grad_()
    x = LAYOUTS[layout](leaf)
    own = x.detach().double().requires_grad_()
    loss, want = fs.cross_entropy(x, target), F.cross_entropy(own, target)
    torch.testing.assert_close(loss.double(), want, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(torch.autograd.grad(loss, x)[0].double(), torch.autograd.grad(want, own)[0])
    # channels last are rows, and cropped images lie in rows that the kernel finds; what else does not fold is copied
    copied = layout in ("transposed", "every second")
    assert ("after a copy" in fs.plan_for(x, 1, op="cross_entropy").why) is copied


@pytest.mark.parametrize("width", [8, 5, pytest.param(40, marks=pytest.mark.extended)])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
def test_cross_entropy_of_cropped_images(width, dtype):
    """Vectors, single elements and tiles of many rows, as of a contiguous copy."""
    whole = (torch.randn(3, 7, 9, 56) * 3).to(dtype)
    x, target = whole[:, :, 1:-1, 8 : 8 + width], torch.randint(0, 7, (3, 7, width))
    target[1, 2] = -100
    whole[:, :, :, 8 + width] = float("nan")  # next to the image
    found = []
    for images in (x, x.contiguous()):
        leaf = images.detach().requires_grad_()
        loss = fs.cross_entropy(leaf, target, label_smoothing=0.1)
        loss.backward(torch.tensor(0.5))
        found.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=0.0)
    assert "after a copy" not in fs.plan_for(x, 1, op="cross_entropy").why


def test_cropped_images_are_copied_on_amd_gpus(monkeypatch):
    x = torch.randn(2, 7, 5, 8)[..., 1:7]
    assert cross_entropy_spatial.planes_of(x).dim() == 4 and cross_entropy_spatial.plan_of_copy(x) is None
    monkeypatch.setattr(cross_entropy_spatial, "device_of", lambda t: DEVICES["gfx942"])
    assert cross_entropy_spatial.plan_of_copy(x) is not None


def test_cropped_images_are_copied_where_their_columns_are_read_twice(monkeypatch):
    x, target = torch.randn(2, 70, 3, 10)[..., :8], torch.randint(0, 70, (2, 3, 8))
    want = F.cross_entropy(x, target)

    def chosen(*_, **__):
        problem = SpatialProblem(70, 24, "float32", vec=4)
        return replace(parts_plan(problem, DEVICE), part_cols=32, vectors_per_chunk=4)

    monkeypatch.setattr(cross_entropy_spatial, "loss_plan", chosen)
    assert "after a copy" in fs.plan_for(x, 1, op="cross_entropy").why
    torch.testing.assert_close(fs.cross_entropy(x, target), want)


@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"z_loss": 1e-2}, {"softcap": 5.0, "label_smoothing": 0.1}])
def test_cross_entropy_of_images_is_that_of_its_rows(options):
    x, target = torch.randn(2, 7, 5, 6) * 3, torch.randint(0, 7, (2, 5, 6))
    leaf, rows = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss = fs.cross_entropy(leaf, target, **options)
    want = fs.cross_entropy(rows.movedim(1, -1).reshape(-1, 7), target.reshape(-1), **options)
    torch.testing.assert_close(loss, want, rtol=2e-6, atol=2e-6)
    loss.backward()
    want.backward()
    torch.testing.assert_close(leaf.grad, rows.grad, rtol=1e-5, atol=1e-7)
    inplace = x.clone().requires_grad_()
    logits_of = inplace * 1.0
    fs.cross_entropy(logits_of, target, inplace_backward=True, **options).backward()
    torch.testing.assert_close(inplace.grad, leaf.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("classes", "dtype"), [(128, torch.int8), (129, torch.int16)])
def test_targets_are_packed_and_counted(weighted, classes, dtype):
    target = torch.randint(0, classes, (9000,))
    target[1] = classes - 1
    target[::5] = -100
    weight = torch.rand(classes) if weighted else None
    op = CrossEntropy(target, weight, None, -100, "mean", 0.0, None, 0.0)
    count = torch.empty(1)
    packed = cross_entropy_spatial.prepare_targets(op, classes, count)
    assert packed.target.dtype == dtype and torch.equal(packed.target.long(), target.clamp(min=-1))
    want = (target >= 0).sum() if weight is None else weight[target[target >= 0]].sum()
    torch.testing.assert_close(count, want.float().view(1))


@pytest.mark.parametrize("value", [-float("inf"), float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
def test_a_position_that_does_not_count_has_no_gradient(dtype, value):
    x, target = torch.randn(2, 7, 20, dtype=dtype), torch.randint(0, 7, (2, 20))
    target[:, 3] = -100
    x[:, :4, 3] = value
    leaf = x.requires_grad_()
    loss = fs.cross_entropy(leaf, target, reduction="sum", label_smoothing=0.0)
    loss.backward()
    assert (leaf.grad[:, :, 3] == 0).all() and leaf.grad.isfinite().all()
    kept = [i for i in range(20) if i != 3]
    want = F.cross_entropy(x.detach()[..., kept].double(), target[:, kept], reduction="sum")
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(6, 40), (2, 6, 40)])
def test_logsumexp_reads_transposed_rows_as_they_lie(shape, monkeypatch):
    x = torch.randn(shape).transpose(-1, -2)
    read: list[torch.Size] = []
    forward = logsumexp._forward
    monkeypatch.setattr(logsumexp, "_forward", lambda x, lse: (read.append(x.shape), forward(x, lse)))
    torch.testing.assert_close(fs.logsumexp(x, -1), torch.logsumexp(x, -1), rtol=1e-6, atol=1e-6)
    assert read == [(x.numel() // 240, 6, 40)]


def test_logsumexp_of_few_columns_takes_one_step():
    def found(n_cols: int, **more) -> Plan:
        return plan_logsumexp(SpatialProblem(n_cols, 4096, "bfloat16", 8, **more), DEVICES["sm_90"])

    for n_cols in (3, 8, 19, 64):
        plan = found(n_cols)
        # no more than a chunk is read in vain
        assert n_cols <= plan.part_cols < n_cols + plan.vectors_per_chunk and plan.outers == 1
    assert found(5000).part_cols < 5000 and found(3, batch_invariant=True).vectors_per_chunk == 8


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_a_mean_over_weights_of_zero_is_nan(z_loss):
    x, target = torch.randn(2, 3, 4), torch.zeros(2, 4, dtype=torch.int64)
    assert cross_entropy_spatial.planes_of(x) is not None
    for leaf in (x, x.clone().requires_grad_()):
        assert fs.cross_entropy(leaf, target, weight=torch.zeros(3), z_loss=z_loss).isnan()


def test_the_plan_follows_columns_and_positions():
    def regime(n_cols: int, inner: int, **more) -> str:
        return plan_spatial(SpatialProblem(n_cols, inner, "float32", 4, **more), DEVICES["sm_90"]).regime

    assert regime(19, 4096) == "spatial"
    assert regime(4096, 4096) == "spatial_cluster"
    assert regime(4096, 4096, batch_invariant=True) == regime(1 << 20, 32) == "spatial_two_pass"
    assert regime(3371, 3) == "spatial"
    problem = SpatialProblem(19, 4096, "float32", 4, batch_invariant=True)
    for inner in (3, 64, 5000):
        other = plan_spatial(replace(problem, inner=inner, vec=1), DEVICES["sm_90"])
        assert other.vectors_per_chunk == plan_spatial(problem, DEVICES["sm_90"]).vectors_per_chunk


def test_wide_tiles_where_columns_start_in_the_middle_of_a_sector():
    x = torch.empty(2, 1500, 8008, dtype=BFLOAT16, device="meta")
    aligned, odd = (spatial.problem_of(t, t) for t in (x[:, :, :8000].contiguous(), x))
    assert aligned.whole_sectors and not odd.whole_sectors
    assert not spatial.problem_of(aligned_out := x[:, :, :8000], aligned_out).whole_sectors  # strides count, too
    for n_cols in (700, 1100, 1500, 2000, 2500, 3500, 4000):
        narrow, wide = (plan_spatial(replace(p, n_cols=n_cols), DEVICES["sm_90"]) for p in (aligned, odd))
        assert wide.rows >= narrow.rows and wide.rows >= 64, n_cols
        invariant = [
            plan_spatial(replace(p, n_cols=n_cols, batch_invariant=True), DEVICES["sm_90"]) for p in (aligned, odd)
        ]
        assert invariant[0] == invariant[1], n_cols


def test_chunks_are_staged_only_where_a_thread_copies_whole_vectors():
    problem = SpatialProblem(1500, 8000, "bfloat16", 8)
    staged = spatial.tiles_of_positions(problem, DEVICES["sm_90"])
    assert 0 < staged.smem_staged < staged.unpredicated_chunks
    others = ((problem, DEVICES["sm_100"]),)
    others += tuple((replace(problem, vec=vec), DEVICES["sm_90"]) for vec in (1, 2, 4))  # inputs that start elsewhere
    assert [spatial.tiles_of_positions(*other).smem_staged for other in others] == [0] * 4


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    ("dtype", "n_cols", "inner"), [("bfloat16", 440, 264), ("bfloat16", 1700, 256), ("float32", 3000, 257)]
)
def test_groups_of_staged_chunks_are_one_softmax(dtype, n_cols, inner, log):
    # interpreted, chunks are staged nowhere, and reduced in the groups in which they arrive on a GPU
    device = replace(DEVICES["interpreter"], supports_smem_staging=True)
    x = torch.randn(1, n_cols, inner).mul_(3).to(getattr(torch, dtype))
    x[0, :, 1] = torch.linspace(-60, 60, n_cols)  # each group has a larger maximum than the one before
    x[0, :, 2] = torch.linspace(60, -60, n_cols)
    x[0, :-1, 3] = -float("inf")  # whole groups are hidden
    x[0, 1:, 4] = -float("inf")
    x[0, :, 5] = -float("inf")
    x[0, n_cols // 2, 6] = float("inf")
    x[0, n_cols // 2, 7] = float("nan")
    y = torch.full_like(x, SENTINEL)
    plan = spatial.softmax_plan((x, y), log, False, False, device)
    assert plan.smem_staged > 8 and plan.chunks > 16
    spatial.prepare(spatial.softmax_recipe((x, y), plan, log, False, device), (x, y))((x, y))
    want = (torch.log_softmax if log else torch.softmax)(x.double(), 1)
    eps = torch.finfo(x.dtype).eps
    torch.testing.assert_close(y.double(), want, rtol=2 * eps + 2e-6, atol=3e-6, equal_nan=True)


def test_halves_of_sectors_have_one_writer_where_nothing_is_staged_too():
    # columns up to which tiles overlap with clusters of 16 CTAs, and of 8
    for dtype, inner, backward, least, most in (
        ("bfloat16", 8200, False, 300, (3700, 3700)),
        ("float32", 8196, False, 100, (3500, 1500)),
        ("bfloat16", 8200, True, 800, (1750, 1750)),
        ("float32", 8196, True, 1450, (2300, 0)),
    ):
        vec = 16 // (2 if dtype == "bfloat16" else 4)
        for name, last in zip(("sm_100", "sm_120"), most, strict=True):
            for n_cols in range(least, last, 50):
                problem = SpatialProblem(n_cols, inner, dtype, vec, backward, False, False, False, True)
                assert plan_spatial(problem, DEVICES[name]).overlap > 0, (problem, name)


def test_long_columns_stay_on_chip_and_gradients_stage_dy():
    device = DEVICES["sm_90"]
    problem = SpatialProblem(5000, 8000, "bfloat16", 8)
    gradient = plan_spatial(replace(problem, backward=True), device)
    assert 0 < gradient.smem_staged < gradient.chunks and gradient.recompute
    for dtype, vec, widths in (
        ("bfloat16", 8, (5000, 8000, 10000, 15000, 20000, 30000)),
        ("float32", 4, (8000, 11000, 14000, 20000, 28000)),
    ):
        for n_cols in widths:
            of = replace(problem, n_cols=n_cols, dtype=dtype, vec=vec)
            plan = spatial.tiles_of_positions(of, device)
            assert plan.regime == "spatial_cluster" and 0 < plan.smem_staged < plan.unpredicated_chunks
            assert plan.recompute  # a staged chunk is read twice, so nothing of it is kept
    assert plan_spatial(replace(problem, n_cols=30721), device).regime == "spatial_two_pass", "31 chunks of 1,024"


def test_as_few_chunks_are_staged_as_registers_leave():
    for n_cols in (*range(300, 9200, 171), 464, 1408, 5632):
        for inner in (8192, 8200):
            problem = SpatialProblem(n_cols, inner, "bfloat16", 8, False, False, False, inner == 8192, True)
            plan = spatial.tiles_of_positions(problem, DEVICES["sm_90"])
            held = {96: 54, 128: 72, 168: 108}[plan.max_registers] * 2 // plan.vec  # from registers of 4 bytes
            assert plan.smem_staged == max(0, plan.chunks - held), (n_cols, inner, plan)


def test_programs_start_one_after_the_other_where_each_reads_much():
    of = SpatialProblem(2700, 8192, "bfloat16", 8)
    plan = spatial.tiles_of_positions(of, DEVICES["sm_90"])
    assert (plan.chunks, plan.vectors_per_chunk, plan.rows) == (43, 8, 64)
    assert (plan.stagger, plan.fitting) == (80 * 43, 4)  # of 43 KiB
    others = [plan_spatial(of, DEVICES[name]) for name in ("sm_80", "sm_100", "gfx942", "interpreter")]
    others.append(plan_spatial(replace(of, vec=1, in_phase=True, whole_sectors=False), DEVICES["sm_90"]))  # skewed
    # 128 positions that do not overlap
    others.append(plan_spatial(replace(of, n_cols=700, backward=True, whole_sectors=False), DEVICES["sm_90"]))
    others.append(spatial.tiles_of_positions(replace(of, n_cols=1790), DEVICES["sm_90"]))
    assert others[-1].rows == others[-2].rows == 128
    assert {plan.stagger for plan in others} == {0}


@pytest.mark.parametrize(
    ("dtype", "backward", "n_cols", "inner", "whole"),
    [
        # one chunk more than before, and then too many warps
        ("bfloat16", False, 2560, 8192, False), ("bfloat16", False, 2561, 8192, True),
        ("bfloat16", False, 3648, 8192, True), ("bfloat16", False, 3649, 8192, False),
        ("float32", False, 5000, 8192, True), ("float32", False, 12000, 8192, False),
        # five programs of a gradient fit; tiles that overlap
        ("bfloat16", True, 1792, 8192, True), ("bfloat16", True, 1793, 8192, False),
        ("bfloat16", True, 640, 8200, False), ("bfloat16", True, 641, 8200, True),
        # few positions
        ("float32", False, 2300, 4, False),
    ],
)  # fmt: skip
def test_which_programs_are_staggered(dtype, backward, n_cols, inner, whole):
    vec = min(inner, 16 // (2 if dtype == "bfloat16" else 4))
    problem = SpatialProblem(n_cols, inner, dtype, vec, backward, False, False, inner != 8200, True)
    assert (spatial.tiles_of_positions(problem, DEVICES["sm_90"]).stagger > 0) == whole


@pytest.mark.parametrize(
    ("shape", "dtype", "backward", "log", "stagger"),
    [
        # 80 cycles for each KiB that a program reads, of 20 chunks of y and of dy
        ((1, 2481, 1147), BFLOAT16, True, False, 80 * 80), ((1, 2481, 1147), torch.float16, True, False, 80 * 80),
        ((1, 2481, 1147), BFLOAT16, True, True, 0), ((1, 2432, 1147), BFLOAT16, True, False, 0),
        ((1, 1800, 189), BFLOAT16, True, False, 80 * 30), ((1, 1800, 189), BFLOAT16, True, True, 0),
        ((1, 1600, 189), BFLOAT16, True, False, 80 * 26), ((1, 1500, 189), BFLOAT16, True, False, 0),
        ((1, 3988, 111), BFLOAT16, False, False, 80 * 64), ((1, 3988, 111), BFLOAT16, False, True, 0),
        ((1, 3812, 429), BFLOAT16, False, False, 0),  # 60 KiB, with the same cap on registers
        ((1, 1811, 124), BFLOAT16, True, False, 0),  # 30 KiB, of `short_planes`
        ((1, 901, 3269), torch.float32, True, False, 0), ((1, 4796, 2631), BFLOAT16, True, False, 0),
    ],
)  # fmt: skip
def test_which_skewed_programs_are_staggered(shape, dtype, backward, log, stagger):
    tensors = tuple(torch.empty(shape, dtype=dtype, device="meta") for _ in range(2 + backward))
    plan = spatial.softmax_plan(tensors, log, backward, False, DEVICES["sm_90"])
    assert plan.skewed and plan.stagger == stagger
    recipe = spatial.softmax_recipe(tensors, plan, log, backward, DEVICES["sm_90"])
    assert recipe.steps[0].meta["STAGGER"] == stagger


@pytest.mark.parametrize(
    ("n_cols", "rows", "staged"),
    [(704, 64, 0), (1024, 128, 0), (1153, 64, 0), (1793, 64, 5), (2000, 64, 6), (2176, 64, 7)],
)
def test_gradients_in_halves_of_sectors_stage_what_registers_do_not_hold(n_cols, rows, staged):
    problem = SpatialProblem(n_cols, 8200, "bfloat16", 8, True, False, False, False, True)
    plan = plan_spatial(problem, DEVICES["sm_90"])
    assert (plan.rows, plan.overlap, plan.max_registers, plan.smem_staged) == (rows, 8, 168, staged)
    assert 2 * plan.chunks - plan.smem_staged <= 36, "vectors of a thread"


@pytest.mark.parametrize(
    ("n_cols", "inner", "dtype", "vec", "whole", "tile"),
    [
        # (positions, warps, chunks of a step; positions and chunks of a program that writes the result)
        (50257, 1024, "bfloat16", 8, True, (64, 4, 12, 256, 12)),
        (50257, 1032, "bfloat16", 8, False, (64, 4, 12, 256, 12)),
        (50257, 1028, "float32", 4, False, (64, 4, 8, 256, 4)),
        (50257, 1023, "bfloat16", 1, False, (256, 8, 2, 256, 2)),
        (50257, 1023, "float32", 1, False, (256, 8, 2, 256, 2)),
        (50257, 511, "bfloat16", 1, False, (128, 4, 4, 128, 4)),
        (50257, 1022, "bfloat16", 2, False, (256, 8, 2, 256, 2)),
        # a last block with few positions wastes the time of the others
        (50257, 308, "float32", 4, False, (64, 4, 8, 128, 4)), (50257, 24, "bfloat16", 8, False, (32, 4, 12, 32, 12)),
    ],
)  # fmt: skip
def test_tiles_of_columns_that_are_read_twice(n_cols, inner, dtype, vec, whole, tile):
    problem = SpatialProblem(n_cols, inner, dtype, vec, False, False, False, whole, True)
    plan = plan_spatial(problem, DEVICES["sm_90"])
    assert plan.regime == "spatial_two_pass"
    last = plan.finish
    assert (plan.rows, plan.num_warps, plan.chunks, last.rows, last.chunks) == tile
    assert last.rows * last.vectors_per_chunk == plan.rows * plan.vectors_per_chunk, "a chunk fills the threads"


@pytest.mark.parametrize(
    ("inner", "dtype", "whole", "log", "tile", "part"),
    [
        # (positions, chunks of a step; positions and chunks of a program that writes), columns of a part
        (1024, "bfloat16", True, False, (128, 16, 128, 4), 1024),
        (1032, "bfloat16", False, False, (512, 16, 512, 4), 384),
        (24, "bfloat16", False, False, (32, 16, 32, 4), 512),
        (1024, "bfloat16", True, True, (64, 8, 128, 4), 2 * 128),
        (1032, "bfloat16", False, True, (64, 8, 128, 4), 2 * 128),
        (1024, "float32", True, False, (64, 16, 256, 2), 1024),
        (1028, "float32", False, False, (64, 16, 256, 2), 1024),
        (1024, "float32", True, True, (64, 8, 256, 2), 4 * 64),
    ],
)
def test_tiles_of_gradients_that_are_read_twice(inner, dtype, whole, log, tile, part):
    problem = SpatialProblem(
        50257, inner, dtype, 16 // (2 if dtype == "bfloat16" else 4), True, log, False, whole, True
    )
    plan = plan_spatial(problem, DEVICES["sm_90"])
    assert plan.regime == "spatial_two_pass"
    assert (plan.rows, plan.chunks, plan.finish.rows, plan.finish.chunks) == tile and plan.part_cols == part


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("vec", "tile"), [(4, (256, 8, 8, 4)), (2, (256, 8, 8, 4)), (1, (256, 8, 2, 2))])
def test_gradients_that_are_read_twice_have_longer_steps_where_columns_start_at_4_or_8_bytes(dtype, vec, tile):
    for log in (False, True):
        problem = SpatialProblem(50257, 1024 + vec, dtype, vec, True, log, False, False, True)
        plan = plan_spatial(problem, DEVICES["sm_90"])
        assert (plan.rows, plan.num_warps, plan.chunks, plan.finish.chunks) == tile


# (dtype, gradient, n_cols, inner, whole sectors) -> (positions of a tile, CTAs, chunks, staged chunks, cap on
# registers, whether tiles overlap)
FEW = {
    ("float32", False, 1477, 40, True): (64, 8, 24, 6, 128, False),
    ("float32", True, 1477, 40, True): (64, 16, 12, 0, 168, False),
    ("float32", True, 3490, 40, True): (32, 16, 14, 1, 168, False),  # 64 positions would take 28 chunks
    ("bfloat16", False, 600, 64, True): (64, 1, 38, 11, 168, False),
    ("bfloat16", False, 1200, 40, False): (64, 2, 38, 11, 168, False),  # one tile: columns are neighbors
    ("bfloat16", False, 4000, 136, False): (64, 16, 16, 0, 128, True),  # several tiles share sectors
    ("bfloat16", True, 5000, 48, True): (64, 16, 20, 13, 168, False),
    ("float32", False, 14000, 12, False): (16, 16, 28, 1, 168, False),
}


@pytest.mark.parametrize("of", FEW)
def test_few_positions_are_on_as_few_ctas_as_hold_their_columns(of):
    dtype, backward, n_cols, inner, whole = of
    vec = 8 if dtype == "bfloat16" else 4
    problem = SpatialProblem(n_cols, inner, dtype, vec, backward, False, False, whole, True)
    plan = plan_spatial(problem, DEVICES["sm_90"])
    assert (plan.rows, plan.ctas, plan.chunks, plan.smem_staged, plan.max_registers, plan.overlap > 0) == FEW[of]


@pytest.mark.parametrize(
    ("n_cols", "inner", "whole", "overlaps"),
    [(25, 10012, False, True), (64, 256, False, True), (24, 10012, False, False), (45, 10016, True, False)]
    + [(45, 252, False, False)],
)
def test_tiles_of_few_float32_columns_overlap_in_halves_of_sectors(n_cols, inner, whole, overlaps):
    problem = SpatialProblem(n_cols, inner, "float32", 4, False, False, False, whole, True)
    plan = plan_spatial(problem, DEVICES["sm_90"])
    assert (plan.overlap > 0) == overlaps and plan.ctas == 1
    assert not overlaps or (plan.rows, plan.num_warps, plan.max_registers) == (64, 4, 128)


def test_a_loss_that_writes_a_gradient_is_staggered():
    x = torch.empty(2, 1400, 8192, dtype=BFLOAT16, device="meta")
    small = torch.empty(2 * 8192, dtype=torch.int64, device="meta")
    op = CrossEntropy(small, None, None, -100, "sum", 0.0, None, 0.0)
    device = DEVICES["sm_90"]
    plan = cross_entropy_spatial.loss_plan(x, x, False, device, shareable=False)
    loss, none = cross_entropy_spatial.SUM_OF_LOSSES, cross_entropy_spatial.NO_LOSS
    for what, unless_one, staggers in (
        ((loss, True, 0), False, True), ((loss, False, 0), False, False), ((none, True, 1), True, False)
    ):  # fmt: skip
        recipe = cross_entropy_spatial.loss_recipe(x, x, op, plan, device, *what, unless_one, False)
        assert (recipe.steps[0].meta["STAGGER"] > 0) == staggers


def test_columns_are_read_once_where_nothing_is_staged_too():
    for device, n_cols, inner, dtype, more in (
        ("sm_120", 3000, 192, "bfloat16", {}),
        ("sm_100", 1060, 192, "bfloat16", {}),
        ("sm_120", 3500, 8192, "bfloat16", {}),
        ("sm_120", 3500, 8200, "bfloat16", dict(whole_sectors=False, in_phase=True)),
        ("sm_100", 3000, 8183, "float32", dict(whole_sectors=False, in_phase=True)),
        ("sm_90", 2700, 301, "float32", dict(whole_sectors=False, in_phase=True)),  # skewed, which may stage
    ):
        vec = 1 if inner % 2 else 16 // (2 if dtype == "bfloat16" else 4)
        problem = SpatialProblem(n_cols, inner, dtype, vec, **more)
        plan = plan_spatial(problem, DEVICES[device])
        assert plan.regime == "spatial_cluster" and (plan.skewed or not plan.smem_staged), (device, n_cols, inner)


def test_clusters_share_columns_whose_elements_are_read_one_by_one():
    problem = SpatialProblem(300, 6171, "float32", 1, whole_sectors=False)
    for n_cols, backward in ((70, False), (300, False), (1000, False), (70, True), (300, True), (1000, True)):
        asked = replace(problem, n_cols=n_cols, backward=backward)
        assert plan_spatial(asked, DEVICES["sm_90"]).regime == "spatial_cluster"
        others = replace(asked, batch_invariant=True), replace(asked, inner=201)
        assert {plan_spatial(other, DEVICES["sm_90"]).ctas for other in others} == {1}
        assert plan_spatial(asked, DEVICES["sm_80"]).ctas == 1


def test_parts_have_few_columns_and_more_where_they_would_be_many():
    def parts(n_cols: int, inner: int, softmax: bool, **more) -> tuple[int, int]:
        problem = SpatialProblem(n_cols, inner, "bfloat16", 8, **more)
        plan = (plan_spatial if softmax else parts_plan)(problem, DEVICES["sm_90"])
        return -(-n_cols // plan.part_cols), plan.part_cols

    # 256 to 1,024 columns, with 384 programs or more in between; of a 16-bit softmax two steps, whatever the positions
    assert parts(50257, 65536, False)[1] == parts(50257, 1024, False)[1] == 1024
    assert parts(20000, 300, False)[1] == 256 and parts(20000, 1024, False)[1] == 416
    for inner, cols in ((1024, 16), (65536, 16), (32, 32), (16, 64)):
        assert parts(100000, inner, True)[1] == 2 * 12 * cols
    assert 256 < parts(1 << 22, 32, True)[0] <= 512
    # within batch_invariant() the parts, which decide the bits, do not follow from the positions
    assert len({parts(50257, inner, False, batch_invariant=True)[1] for inner in (32, 1024, 65536)}) == 1


TRANSPOSED = StridedRows(300, 64, False, along_rows=True, along_cols=False, out_along_cols=True)
CROPPED = TRANSPOSED._replace(out_along_cols=False)


def test_few_long_transposed_rows_are_copied_first():
    def strided(n_rows: int, n_cols: int) -> bool:
        return strided_is_faster(TRANSPOSED._replace(n_cols=n_cols, n_rows=n_rows))

    assert strided(8192, 20000) and strided(1024, 8192) and strided(1760, 1959) and strided(513, 2048)
    assert strided(64, 256) and strided(4, 100)
    long = TRANSPOSED._replace(n_cols=2401, n_rows=8192)  # a copy by tiles is faster
    assert strided_is_faster(long) and not strided_is_faster(long, True)
    assert strided_is_faster(long._replace(n_cols=2400), True)
    assert not strided(32, 296854) and not strided(513, 4096) and not strided(1024, 20000) and not strided(6, 1818)
    x = torch.randn(2, 2500, 3).transpose(1, 2)
    assert "after a copy" in fs.plan_for(x, -1).why
    assert_contract(fs.softmax(x, -1), x, -1)


def test_narrow_crops_of_few_columns_are_copied_where_tiles_do_not_take_them():
    def strided(n_rows: int, n_cols: int, of_batch: bool = False) -> bool:
        return strided_is_faster(CROPPED._replace(n_cols=n_cols, n_rows=n_rows, of_batch=of_batch))

    assert not strided(8, 12) and strided(8, 17) and strided(64, 4) and strided(8, 5, of_batch=True)
    assert strided(1848, 256) and not strided(1848, 257)  # a copy is as fast as to read crops twice
    x = torch.randn(3, 5, 6, 16)[..., :8]
    assert views.in_place(x, torch.empty(x.shape), 1, False) is None
    assert views.in_place(torch.randn(3, 50, 6, 16)[..., :8], torch.empty(3, 50, 6, 8), 1, False) is not None
    with fs.batch_invariant():
        assert "after a copy" in fs.plan_for(x, 1).why
        assert_contract(fs.softmax(x, 1), x, 1)


@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
@pytest.mark.parametrize("to", [None, FLOAT32], ids=["same", "cast"])
@pytest.mark.parametrize("width", [8, 16, 12, 6, 5, 1, 40])
def test_crops_are_read_as_they_lie(width, to, log):
    """Vectors of all lengths, single elements, and tiles of many rows; what lies next to a crop changes nothing."""
    whole = (torch.randn(3, 7, 9, 56) * 3).to(BFLOAT16)
    x = whole[:, :, 1:-1, 8 : 8 + width]
    inside = torch.zeros_like(whole, dtype=torch.bool)
    inside[:, :, 1:-1, 8 : 8 + width] = True
    whole[~inside] = float("nan")
    function, reference = (fs.log_softmax, torch.log_softmax) if log else (fs.softmax, torch.softmax)
    y = function(x, 1, dtype=to)
    plan = fs.plan_for(x, 1, dtype=to, op="log_softmax" if log else "softmax")
    assert y.is_contiguous() and ("lie apart" in plan.why) == (width > 1)
    eps = torch.finfo(y.dtype).eps
    torch.testing.assert_close(y.double(), reference(x.double(), 1), rtol=2 * eps, atol=4e-6)
    # over a dimension in front of two that are cropped, of five; and one that has one index
    x5 = torch.randn(2, 3, 5, 4, 10)[..., 2:8]
    for part in (x5, x5[:1], x5[:, :1], x5[:1, :1]):
        assert_contract(fs.softmax(part, 2), part, 2)
        assert "lie apart" in fs.plan_for(part, 2).why
    # of dimensions in front that do not merge a batch of one is copied, as a larger one is
    parts = torch.randn(2, 3, 5, 4, 10)[:, :2, ..., 2:8]
    assert all("after a copy" in fs.plan_for(part, 2).why for part in (parts, parts[:1]))
    assert torch.equal(fs.softmax(parts, 2)[:1], fs.softmax(parts[:1], 2))


@pytest.mark.parametrize("n_cols", (2, 5, 12, 40, 100, 200))
@pytest.mark.parametrize("of", (TRANSPOSED, CROPPED, TRANSPOSED._replace(along_rows=False, along_cols=True)))
def test_strided_tiles_keep_few_elements_of_many_rows(of, n_cols):
    plan = strided_plan(of._replace(n_cols=n_cols, n_rows=4096, out_along_cols=False))
    assert plan.rows >= 16 and plan.chunks == 1 and n_cols <= plan.vectors_per_chunk < 2 * n_cols
    assert 512 <= plan.rows * plan.vectors_per_chunk <= 4096
    assert 512 <= plan.rows * plan.vectors_per_chunk // plan.num_warps <= 1024


@pytest.mark.parametrize("n_cols", (3, 60, 200, 700))
@pytest.mark.parametrize("n_rows", (3, 200, 5000))
def test_rows_cut_from_transposed_rows_have_their_plan(n_rows, n_cols):
    """Whatever their number: it may be any part of a batch."""
    whole = torch.empty(n_cols, n_rows, device="meta").t()
    of = {views.strided_rows(whole[:n], torch.empty(n, n_cols, device="meta"), 1) for n in (1, 2, n_rows // 2, n_rows)}
    assert len(of) == 1 and {o.of_batch for o in of} == {True}
    # a batch next to rows that are neighbors, which merge in memory
    both = torch.empty(n_cols, 7 * n_rows, device="meta").view(n_cols, 7, n_rows).permute(1, 2, 0)
    of = {views.strided_rows(both[:n], torch.empty(n, n_rows, n_cols, device="meta"), 2) for n in (1, 2, 7)}
    assert {(o.n_rows, o.of_batch) for o in of} == {(n_rows, False)}


def test_empty_and_bad_input():
    for shape in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        x = torch.randn(shape)
        assert fs.softmax(x, 1).shape == shape
        assert torch.equal(fs.logsumexp(x, 1), torch.logsumexp(x, 1))
    with pytest.raises(IndexError):
        fs.softmax(torch.randn(2, 3, 4), 3)
    with pytest.raises(IndexError, match="out of bounds"):
        fs.cross_entropy(torch.randn(2, 3, 4), torch.full((2, 4), 3))
