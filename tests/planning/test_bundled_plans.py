"""Columns that are read in bundles: which problems, and how long a bundle and a part are."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from fused_softmax.launch import spatial
from fused_softmax.planning.bundled_columns import (
    FEWEST_BUNDLES,
    FILLED,
    LEAST_BYTES,
    MOST_TILES,
    bundle_of,
    faster_as_bundled,
)
from fused_softmax.planning.spatial import bundled_plan, parts_plan
from fused_softmax.planning.spatial_tables import BUNDLED_GRADIENT, PARTS
from fused_softmax.planning.types import DEVICES, Plan, SpatialProblem, bundles_of

HOPPER = DEVICES["sm_90"]
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
DTYPES = {"bfloat16": BFLOAT16, "float32": FLOAT32}


def planes(n_cols: int, inner: int, dtype: torch.dtype, backward: bool, outer: int = 2) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty((outer, n_cols, inner), dtype=dtype, device="meta") for _ in range(2 + backward))


def chosen(n_cols: int, inner: int, dtype: torch.dtype, backward: bool, invariant: bool = False) -> Plan:
    return spatial.softmax_plan(planes(n_cols, inner, dtype, backward), False, backward, invariant, HOPPER)


# what is bundled, and the next case that is not: (columns, positions, dtype, gradient)
BUNDLED = (
    # read twice: odd positions, and even ones from a number on
    ((66852, 17, BFLOAT16, False), (66852, 16, BFLOAT16, False)),
    ((501489, 27, BFLOAT16, True), (501489, 26, BFLOAT16, True)),
    ((400000, 66, BFLOAT16, False), (400000, 62, BFLOAT16, False)),
    ((400000, 66, FLOAT32, True), (400000, 62, FLOAT32, True)),
    ((30000, 1802, FLOAT32, True), (30000, 1802, BFLOAT16, True)),
    ((400000, 34, FLOAT32, False), (400000, 30, FLOAT32, False)),
    # halves of sectors whose tiles are wide
    ((26308, 72, BFLOAT16, False), (42508, 56, BFLOAT16, False)),
    ((174863, 40, BFLOAT16, False), (174863, 24, BFLOAT16, False)),
    ((26308, 72, BFLOAT16, False), (26308, 72, BFLOAT16, True)),
    # planes in registers are faster where a cluster holds more of them
    ((81829, 15, BFLOAT16, False), (27455, 23, BFLOAT16, False)),
    ((14511, 29, FLOAT32, False), (46380, 7, FLOAT32, False)),
    ((51139, 15, BFLOAT16, False), (54451, 12, BFLOAT16, True)),
    # in place of narrow tiles
    ((9001, 103, BFLOAT16, False), (6890, 179, BFLOAT16, False)),
    ((9001, 103, BFLOAT16, False), (8518, 163, BFLOAT16, True)),
    ((9355, 107, FLOAT32, False), (4643, 821, FLOAT32, False)),
    ((6563, 106, FLOAT32, False), (8381, 1334, FLOAT32, False)),
    # where no overlapping tiles hold the columns
    ((14500, 990, FLOAT32, False), (5935, 990, FLOAT32, False)),
    ((6563, 90, FLOAT32, False), (6563, 58, FLOAT32, False)),
)


def test_from_how_many_columns_narrow_tiles_are_slower():
    # Hopper has overlapping tiles there
    for n_cols, positions in ((5001, 90), (5000, 90), (5001, 514), (5000, 514)):
        plan = spatial.softmax_plan(planes(n_cols, positions, FLOAT32, False), False, False, False, DEVICES["sm_100"])
        assert (plan.bundle > 0) == (n_cols == 5001), (n_cols, positions)


@pytest.mark.parametrize(("bundled", "not_bundled"), BUNDLED, ids=str)
def test_what_is_bundled(bundled, not_bundled):
    plan = chosen(*bundled)
    assert plan.bundle > 0 and plan.regime == "spatial_two_pass" and "as one" in plan.why
    assert plan.vec == 16 // bundled[2].itemsize, "whole vectors, whatever the positions are"
    assert chosen(*not_bundled).bundle == 0


def test_what_cannot_be_bundled():
    n_cols, inner = 66852, 17
    x, y = planes(n_cols, inner, BFLOAT16, False)
    assert chosen(n_cols, inner, BFLOAT16, False, invariant=True).bundle == 0
    for tensors in (
        (x, y.to(FLOAT32)),  # a cast
        (torch.empty((2, n_cols, inner + 1), dtype=BFLOAT16, device="meta")[:, :, 1:], y),  # gaps
        (torch.empty((4, n_cols, inner), dtype=BFLOAT16, device="meta")[::2], y),
    ):
        assert spatial.softmax_plan(tensors, False, False, False, HOPPER).bundle == 0
    problem = spatial.problem_of(x, y)
    read_twice = parts_plan(problem, HOPPER)
    bundle = bundle_of(problem)
    small = replace(problem, n_cols=-(-LEAST_BYTES // (2 * inner)))
    assert faster_as_bundled(small, read_twice) == bundle
    assert faster_as_bundled(replace(small, n_cols=small.n_cols - 1), read_twice) is None
    problem = replace(problem, inner=1701)  # of which many fill tiles
    bundle = bundle_of(problem)
    enough = FEWEST_BUNDLES * bundle + problem.period
    assert faster_as_bundled(replace(problem, n_cols=enough), read_twice) == bundle
    assert faster_as_bundled(replace(problem, n_cols=enough - 1), read_twice) is None


@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float16])
@pytest.mark.parametrize("log", [False, True])
def test_tiles_of_a_16_bit_softmax(dtype: torch.dtype, log: bool):
    plan = spatial.softmax_plan(planes(24710, 2140, dtype, False), log, False, False, HOPPER)
    assert plan.bundle and (plan.rows, plan.num_warps, plan.chunks, plan.vectors_per_chunk) == (64, 4, 12, 16)
    assert (plan.finish.rows, plan.finish.chunks, plan.finish.vectors_per_chunk) == (256, 12, 4)
    assert plan.part_cols == 2 * 12 * 16 * plan.bundle, "two steps"


@pytest.mark.parametrize(("n_cols", "bundles"), [(38000, 128), (49300, 160), (400000, 1024)])
def test_large_planes_of_16_bit_gradients_have_longer_parts(n_cols: int, bundles: int):
    plan = spatial.softmax_plan(planes(n_cols, 341, BFLOAT16, True), False, True, False, HOPPER)
    assert plan.part_cols == bundles * plan.bundle


def random_problems(seed: int, count: int) -> list[SpatialProblem]:
    pick, found = random.Random(seed), []
    while len(found) < count:
        n_cols, inner = round(2000 * 1000 ** pick.random()), round(2 * 1000 ** pick.random())
        dtype, backward = pick.choice((BFLOAT16, FLOAT32)), pick.random() < 0.5
        problem = spatial.problem_of(*planes(n_cols, inner, dtype, backward), backward=backward)
        if problem.period > 1 and n_cols > FEWEST_BUNDLES * bundle_of(problem) + problem.period:
            found.append(problem)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_bundles_start_at_sectors_and_parts_hold_them(seed):
    for problem in random_problems(seed, 300):
        bundle, tile = bundle_of(problem), PARTS.n_bytes // problem.itemsize
        assert bundle % problem.period == 0 and bundle * problem.inner * problem.itemsize % 32 == 0, problem
        filled = [f for f in range(problem.period, bundle, problem.period) if empty(f, problem, tile) <= FILLED]
        assert not filled, f"{filled} columns fill tiles, too: {problem}"
        few = bundle * problem.inner <= max(MOST_TILES * tile, problem.period * problem.inner)
        assert few and empty(bundle, problem, tile) <= 2, problem
        plan = bundled_plan(problem, HOPPER, bundle)
        assert plan.bundle == bundle and plan.part_cols % (bundle * plan.vectors_per_chunk * plan.chunks) == 0, problem
        assert plan.part_cols >= min(BUNDLED_GRADIENT.least_cols * bundle, problem.n_cols - problem.period - bundle), (
            problem
        )


def empty(bundle: int, problem: SpatialProblem, tile: int) -> float:
    """Positions of whole tiles over those of a bundle."""
    width = bundle * problem.inner
    return -(-width // tile) * tile / width


@pytest.mark.parametrize("seed", range(3))
def test_the_ends_fit_in_two_rows_of_a_bundle_wherever_a_plane_starts(seed):
    for problem in random_problems(seed, 100):
        bundle, width = bundle_of(problem), bundle_of(problem) * problem.inner
        n_bundles = bundles_of(problem.n_cols, problem.period, bundle)
        ends = (problem.n_cols - n_bundles * bundle) * problem.inner
        assert (problem.period - 1) * problem.inner <= ends <= 2 * width, problem


@pytest.mark.parametrize("seed", range(3))
def test_a_recipe_has_the_sizes_of_its_plan(seed):
    counts = set()
    for problem in random_problems(seed, 40):
        tensors = planes(problem.n_cols, problem.inner, DTYPES[problem.dtype], problem.backward)
        plan = bundled_plan(problem, HOPPER, bundle_of(problem))
        first, *merges, last = spatial.softmax_recipe(tensors, plan, False, problem.backward, HOPPER).steps
        n_bundles = bundles_of(problem.n_cols, problem.period, plan.bundle)
        parts = -(-n_bundles * plan.bundle // plan.part_cols)
        assert first.scalars[0] == last.scalars[0] == n_bundles and first.scalars[3] == parts
        # parts are merged for each position of a bundle first where there are many
        *of_bundles, of_plane = merges
        several = parts > 1 and parts * plan.bundle > 1024
        assert [step.scalars[::2] for step in of_bundles] == [(plan.bundle * problem.inner, parts)] * several
        assert of_plane.scalars[::2] == (problem.inner, plan.bundle * (1 if several else parts))
        counts.add((several, parts > 1))
        assert first.meta["UNIT"] * problem.itemsize == 32 and first.scalars[6] == problem.period
        assert last.meta["CHUNKS"] == plan.finish.chunks and last.meta["INNER"] == plan.finish.rows
        assert f" {parts} part(s)" in plan.why
    assert counts == {(False, False), (False, True), (True, True)}
