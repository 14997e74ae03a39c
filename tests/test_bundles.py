"""Columns that are read in bundles: planes that start anywhere, their ends, and nothing written outside the output."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
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
)

from fused_softmax.kernels.softmax_spatial_bundled import start_of_bundles
from fused_softmax.launch import spatial
from fused_softmax.launch.device import describe
from fused_softmax.planning import bundled_columns, register_planes
from fused_softmax.planning.bundled_columns import bundle_of
from fused_softmax.planning.spatial import bundled_plan, parts_plan
from fused_softmax.planning.types import Plan, SpatialProblem

pytestmark = pytest.mark.interpreted

DEVICE = describe(torch.device("cpu"))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# (outer, n_cols, inner): odd and even positions, halves of sectors, one plane, ends of two rows, and one column more
# than three bundles, which a second plane does not hold
SHAPES = ((3, 1101, 7), (2, 700, 6), (2, 901, 8), (1, 411, 31), (2, 300, 129), (3, 2 * 48 + 62, 5), (2, 3 * 48 + 1, 5))


def bundles_of(problem: SpatialProblem, short_parts: bool = True) -> Plan:
    """The plan in bundles. short_parts: with one short step for each part, so that there are several."""
    plan = bundled_plan(problem, DEVICE, bundle_of(problem))
    return replace(plan, chunks=1, part_cols=plan.bundle * plan.vectors_per_chunk) if short_parts else plan


def run(tensors: tuple[torch.Tensor, ...], log: bool, backward: bool = False, short_parts: bool = True) -> Plan:
    plan = bundles_of(spatial.problem_of(*tensors, log=log, backward=backward), short_parts)
    recipe = spatial.softmax_recipe(tensors, plan, log, backward, DEVICE)
    parts = recipe.steps[0].scalars[3]
    assert len(recipe.steps) == 3 + (parts > 1 and parts * plan.bundle > spatial.MOST_IN_ONE_MERGE)
    spatial.prepare(recipe, tensors)(tensors)
    return plan


@pytest.mark.sampled(3)
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, pytest.param(torch.float16, marks=pytest.mark.extended)]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_softmax_and_its_gradient(shape, dtype, log, monkeypatch):
    """The parts of log_softmax are merged in two launches, as more parts of any would be."""
    monkeypatch.setattr(spatial, "MOST_IN_ONE_MERGE", 1 if log else 1024)
    x, dy = (torch.randn(shape).mul_(3).to(dtype) for _ in range(2))
    x[0, 1, 0] = -float("inf")
    (y, field), (dx, of_dx) = (between_sentinels(shape, dtype) for _ in range(2))
    plan = run((x, y), log)
    assert plan.part_cols < shape[1] or shape not in SHAPES[1:5], "several parts"
    assert_forward(y.clone(), x, log)
    y.copy_((torch.log_softmax if log else torch.softmax)(torch.randn(shape).mul_(2), 1))
    run((y, dy, dx), log, backward=True)
    assert_gradient(dx, y, dy, log)
    assert_nothing_outside((y, field), (dx, of_dx))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_infinities_and_nan(shape):
    rows = list(edge_rows(shape[1], torch.float32).values())
    x = torch.stack([rows[i % len(rows)] for i in range(shape[0] * shape[2])]).view(shape[0], shape[2], shape[1])
    x = x.transpose(1, 2).contiguous()
    y = torch.empty_like(x)
    run((x, y), False)
    assert_contract(y, x, 1)


def test_parts_and_steps_that_the_last_bundles_do_not_fill_and_one_part():
    counts = set()
    for n_cols in (1101, 1740, 7900):
        x = torch.randn(2, n_cols, 7)
        y = torch.empty_like(x)
        plan = run((x, y), False, short_parts=n_cols < 7000)
        n_bundles, part = (n_cols - 7) // plan.bundle, plan.part_cols // plan.bundle
        assert n_bundles % part and n_bundles % (plan.finish.chunks * plan.finish.vectors_per_chunk)
        counts.add(-(-n_bundles // part))
        assert_forward(y, x, False)
    assert len(counts) > 1 and 1 in counts


@pytest.mark.parametrize("n_cols", [1101, 18400])  # one step of a program that writes, and several
def test_a_softmax_in_place_has_the_same_bits(n_cols):
    x = torch.randn(2, n_cols, 7).to(torch.bfloat16)
    y, same = torch.empty_like(x), x.clone()
    plan = run((x, y), False)
    run((same, same), False)
    assert torch.equal(y, same)
    last = plan.finish
    assert (n_cols > plan.bundle * last.chunks * last.vectors_per_chunk) == (n_cols == 18400)


WORKSPACES = ("two merges", "one merge", "one part of bundles", "parts", "one part")


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("kind", WORKSPACES)
def test_a_workspace_has_the_size_of_what_is_written_there(kind, backward, monkeypatch):
    monkeypatch.setattr(spatial, "MOST_IN_ONE_MERGE", 1 if kind == "two merges" else 1024)
    x, dy = torch.randn(3, 1101, 7), torch.randn(3, 1101, 7)
    tensors = (torch.softmax(x, 1), dy, torch.empty_like(x)) if backward else (x, torch.empty_like(x))
    problem = spatial.problem_of(*tensors, backward=backward)
    if "merge" in kind or "bundles" in kind:
        plan = bundles_of(problem, short_parts="merge" in kind)
    else:
        plan = replace(parts_plan(problem, DEVICE), part_cols=256 if kind == "parts" else 1280)
    fields = []

    def empty(size: int, **of: object) -> torch.Tensor:
        part, field = between_sentinels((size,), torch.float32)
        fields.append((part, field))
        return part

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", empty)
        launches = spatial.recipe_launches(spatial.softmax_recipe(tensors, plan, False, backward, DEVICE), tensors)
    assert len(fields) == (1 if backward else 2) * {"two merges": 3, "one part": 1}.get(kind, 2)
    for launch in launches:
        launch()
    assert not any((part == SENTINEL).any() for part, _ in fields), "a workspace is larger than what is written"
    assert_nothing_outside(*fields)
    if backward:
        assert_gradient(tensors[2], tensors[0], dy, False)
    else:
        assert_forward(tensors[1], x, False)


@triton.jit
def start_kernel(to_ptr, outer, plane, inner, period, UNIT: tl.constexpr):
    start, head = start_of_bundles(outer.to(tl.int64), plane.to(tl.int64), inner, period, UNIT)
    tl.store(to_ptr, start)
    tl.store(to_ptr + 1, head.to(tl.int64))


@pytest.mark.parametrize("unit", [8, 16])  # of float32, and of 16 bits
def test_the_first_bundle_starts_at_a_sector_and_as_soon_as_one_can(unit):
    pick, to = random.Random(unit), torch.empty(2, dtype=torch.int64)
    for _ in range(200):
        inner, outer = pick.randint(2, 5000), pick.randint(0, 99)
        plane, period = inner * pick.randint(100, 10**6), unit // math.gcd(unit, inner)
        start_kernel[(1,)](to, outer, plane, inner, period, unit)
        start, head = to.tolist()
        first = next(c for c in range(unit) if (outer * plane + c * inner) % unit == 0)
        assert (start, head) == (outer * plane, first * inner)


def test_no_bit_depends_on_how_many_planes_there_are():
    x = torch.randn(5, 1101, 7).to(torch.bfloat16)
    y, first = torch.empty_like(x), torch.empty_like(x[:2])
    run((x, y), False)
    run((x[:2], first), False)
    assert torch.equal(y[:2], first)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.extended) for n in range(2, 6))])
def test_random_planes(seed, monkeypatch):
    """Softmax and its gradient by the path of a call, where each plane is bundled that can be."""
    faster, bundled = bundled_columns.faster_as_bundled, 0

    def always(problem: SpatialProblem, plan: Plan) -> int | None:
        read_twice = replace(plan, regime="spatial_two_pass")
        return faster(replace(problem, n_cols=1 << 20), read_twice) and bundle_of(problem)

    monkeypatch.setattr(bundled_columns, "faster_as_bundled", always)
    monkeypatch.setattr(register_planes, "faster_as_held", lambda *_: None)
    pick, log = random.Random(seed), bool(seed % 2)
    for _ in range(6):
        dtype = pick.choice(DTYPES)
        inner = round(2 * 60 ** pick.random())
        vec = (inner & -inner) * dtype.itemsize  # not where runs start at sectors
        inner += vec >= 32
        shape = (pick.randint(1, 4), pick.randint(170, 600) if inner > 9 else pick.randint(800, 1600), inner)
        bundled += sum(plan.bundle > 0 for plan in assert_planes(shape, dtype, log))
    assert bundled >= 5
