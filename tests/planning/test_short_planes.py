"""Tiles of short planes: what is planned, what each config must keep, and which plans stay."""

from __future__ import annotations

import doctest
import random
from dataclasses import replace

import pytest
import torch
from planning.test_skewed_tiles import planes
from planning.test_spatial_plans import check

from fused_softmax.launch import spatial
from fused_softmax.planning import short_planes
from fused_softmax.planning.held_planes import Held
from fused_softmax.planning.lean_tiles import LEAST_POSITIONS
from fused_softmax.planning.register_planes import best_way, faster_as_held
from fused_softmax.planning.short_planes import (
    CROWDED_HALVES,
    EIGHT_BYTES,
    FLOAT32_GRADIENT,
    FLOAT32_SOFTMAX,
    FOUR_BYTES,
    HALF_GRADIENT,
    HALF_SOFTMAX,
    LEAST_PIECE,
    MOST,
    NARROWER,
    ONE_TILE,
    ONE_TILE_COLS,
    WHOLE,
    Tile,
    faster_as_short,
)
from fused_softmax.planning.spatial import tiles_plan
from fused_softmax.planning.spatial_tables import REGISTERS, SpatialConfig
from fused_softmax.planning.types import DEVICES, Plan, SpatialProblem, tiles_of

HOPPER = DEVICES["sm_90"]
RULES: tuple[tuple[Tile, ...], ...] = (
    FLOAT32_SOFTMAX, FLOAT32_GRADIENT, *HALF_SOFTMAX.values(), HALF_GRADIENT, CROWDED_HALVES,
    EIGHT_BYTES, FOUR_BYTES, *NARROWER.values(),
    *((tile,) for ranges in WHOLE.values() for of in ranges for tile in (of.wide, of.narrow)),
)  # fmt: skip


def considered(problem: SpatialProblem) -> tuple[Plan, Held | None]:
    """The plan that short tiles are compared with, and the fastest way to hold the planes in registers."""
    way = best_way(problem, HOPPER)
    return spatial.tiles_or_pieces(problem, HOPPER, way), way


def short_of(problem: SpatialProblem) -> SpatialConfig | None:
    plan, way = considered(problem)
    return faster_as_short(problem, HOPPER, plan, way, faster_as_held(problem, way, plan))


# columns, positions, dtype, backward: positions of a tile, of a skewed one the unit, CTAs, warps, registers at most
PLANNED = (
    # in place of planes in registers, and (1,115) of 16 warps on 4 CTAs
    (1115, 146, "float32", False, (32, 0, 4, 8, 80)),
    (307, 186, "bfloat16", True, (64, 4, 4, 4, 80)),
    # of planes that are alone on a multiprocessor
    (276, 133, "float32", False, (32, 0, 1, 8, 80)),
    # of crowded pieces, and of skewed tiles, at multiples of 8 bytes
    (231, 204, "bfloat16", False, (64, 0, 1, 4, 112)), (1191, 212, "bfloat16", False, (64, 0, 4, 4, 112)),
    # of skewed tiles of float32
    (585, 250, "float32", False, (64, 0, 8, 4, 80)),  # 1.01
    (629, 198, "float32", False, (64, 0, 8, 4, 80)), (777, 147, "float32", False, (64, 0, 8, 4, 112)),
    (2451, 175, "float32", False, (32, 0, 16, 4, 80)),
    # of wider accesses, and of threads that hold many words
    (376, 188, "float32", False, (64, 0, 4, 4, 112)), (1896, 156, "float32", True, (32, 0, 16, 4, 112)),
    # of plain tiles on a cluster; (1,677, 186) has 0.96 of their speed
    (1677, 186, "float32", False, (32, 0, 4, 8, 112)),
    (2805, 130, "float32", False, (32, 0, 8, 8, 80)),
    # of tiles
    (301, 64, "bfloat16", False, (32, 0, 1, 4, 80)), (755, 304, "bfloat16", False, (32, 0, 4, 4, None)),
    (461, 280, "bfloat16", False, (64, 0, 2, 4, 112)), (475, 208, "bfloat16", True, (64, 0, 8, 4, 80)),
    # narrower, in place of wider tiles on a cluster
    (3292, 80, "bfloat16", False, (32, 0, 8, 4, 112)),
    (6932, 144, "bfloat16", False, (32, 0, 16, 4, 112)),
    (3320, 80, "float32", False, (32, 0, 16, 4, 112)), (1905, 144, "bfloat16", True, (32, 0, 8, 4, 112)),
    (4457, 136, "bfloat16", False, (32, 0, 16, 4, 80)),
    (1714, 132, "float32", False, (32, 0, 16, 4, None)),
    # at multiples of 8 bytes: in place of a piece of a cluster, and of planes in registers; and of 4 bytes
    (2358, 140, "bfloat16", False, (64, 0, 8, 4, 112)),
    (1028, 190, "bfloat16", False, (64, 4, 8, 4, 80)),
    (1400, 130, "bfloat16", False, (64, 4, 8, 4, 80)),
    # 8 CTAs do not hold the wider tile
    (2573, 140, "bfloat16", False, (32, 0, 8, 4, 80)),
)  # fmt: skip


@pytest.mark.parametrize(("n_cols", "inner", "dtype", "backward", "wanted"), PLANNED)
@pytest.mark.parametrize("outer", [1, 700])
def test_a_softmax_takes_them_whatever_outer_is(n_cols, inner, dtype, backward, wanted, outer):
    """A position's bits follow from columns, positions, dtype and device."""
    x = torch.empty(outer, n_cols, inner, dtype=getattr(torch, dtype), device="meta")
    plan = spatial.softmax_plan((x,) * (2 + backward), False, backward, False, HOPPER)
    assert (plan.rows, plan.skewed, plan.ctas, plan.num_warps, plan.max_registers) == wanted
    assert short_of(spatial.problem_of(*(x,) * (2 + backward), backward=backward))


# what was as fast before, or faster, on an H200; and what was not timed
KEPT = (
    (663, 49, "float32", False), (402, 43, "float32", True), (1023, 43, "float32", True),
    (2144, 62, "float32", True), (1070, 85, "float32", True), (1549, 51, "bfloat16", False),
    (1275, 82, "bfloat16", False), (2340, 62, "bfloat16", False), (490, 119, "bfloat16", True),
    (243, 82, "float32", False), (197, 88, "bfloat16", False), (176, 112, "bfloat16", False),
    (1060, 320, "bfloat16", False), (360, 200, "bfloat16", False), (807, 376, "bfloat16", False),
    (1110, 200, "bfloat16", True), (289, 139, "bfloat16", False), (585, 122, "float32", False),
    (1823, 119, "float32", False), (2154, 209, "float32", False),
    (641, 42, "float32", True), (786, 208, "bfloat16", True), (842, 336, "bfloat16", True),
    # tiles that read about as much as narrow ones; and 7,681 columns, which 16 CTAs do not hold in few words
    (2834, 208, "bfloat16", True), (952, 200, "float32", True), (1505, 296, "bfloat16", True),
    (2950, 368, "bfloat16", False), (2507, 64, "bfloat16", False), (1120, 280, "float32", False),
    (729, 104, "bfloat16", False), (1843, 436, "float32", False), (7681, 144, "bfloat16", False),
    (164, 416, "bfloat16", False), (171, 340, "float32", False),  # one CTA, and two
    # at multiples of 8 bytes: 2, 3 and 2 CTAs; of 4: fewer positions, 4 warps; of 2
    (1762, 44, "bfloat16", False), (826, 132, "bfloat16", False), (447, 130, "bfloat16", False),
    (1283, 86, "bfloat16", False), (1330, 78, "bfloat16", False), (1260, 126, "bfloat16", False),
    (868, 177, "bfloat16", False), (1232, 57, "bfloat16", False), (845, 12, "bfloat16", False),
    # tiles would be emptier, planes are small, runs are odd or whole vectors; and other ops
    (2446, 10, "bfloat16", False), (1458, 20, "bfloat16", False), (280, 30, "bfloat16", False),
    (838, 14, "bfloat16", False), (2435, 13, "bfloat16", False), (1784, 24, "bfloat16", False),
    (6001, 14, "bfloat16", False), (5633, 30, "bfloat16", False), (1784, 26, "bfloat16", True),
    (1784, 26, "float32", False),
)  # fmt: skip


@pytest.mark.parametrize(("n_cols", "inner", "dtype", "backward"), KEPT)
def test_faster_plans_stay(n_cols, inner, dtype, backward):
    assert short_of(planes(n_cols, inner, dtype, backward)) is None


def test_log_softmax_stays_in_registers_at_multiples_of_4_bytes():
    x = torch.empty(1, 1400, 130, dtype=torch.bfloat16, device="meta")
    assert spatial.softmax_plan((x, x), True, False, False, HOPPER).periodic
    assert spatial.softmax_plan((x, x), False, False, False, HOPPER).skewed == 4


def rule_of(problem: SpatialProblem, plan: Plan, way: Held | None, tile: SpatialConfig) -> str:
    """What `plan` is, or that a cluster could hold planes, and the tile in place of it."""
    held = "held" if short_planes._cluster_could_hold(plan, way) else "alone" if plan.gathered else "plain"
    if problem.vec == problem.full_vec:
        held = "crowded" if plan.gathered else "sectors" if problem.whole_sectors else "halves"
    op = "gradient" if problem.backward else "softmax"
    return f"{held} {op} {8 * problem.itemsize} bits: {'skewed ' if tile.skewed else ''}{tile.inner}"


def tile_of(problem: SpatialProblem, plan: Plan, way: Held | None, config: SpatialConfig) -> Tile:
    """The tile of the rule that gave `config`."""
    if problem.vec < problem.full_vec:
        tiles = short_planes._of_part_vectors(problem, plan, short_planes._cluster_could_hold(plan, way))
    else:
        tiles = short_planes._of_whole_vectors(problem, plan)
    return next(tile for tile in tiles if short_planes._config(problem, HOPPER, tile) == config)


def test_random_planes():
    """Tiles hold all columns in few words, are nearly filled, and every rule has some."""
    rng, rules = random.Random(5), set()
    for _ in range(12000):
        n_cols, dtype = round(90 * 40 ** rng.random()), rng.choice(("bfloat16", "float32"))
        inner = rng.choice((rng.randint(30, 470), 2 * rng.randint(15, 235), 8 * rng.randint(4, 58)))
        problem = planes(n_cols, inner, dtype, rng.random() < 0.5, rng.random() < 0.3)
        config = short_of(problem)
        if config is None or inner < 40:  # few positions: below
            continue
        found, way = considered(problem)
        rules.add(rule_of(problem, found, way, config))
        plan = tiles_plan(problem, HOPPER, config)
        check(plan, problem, HOPPER)
        most = 3000 if problem.vec < problem.full_vec else 7680
        assert 40 <= inner <= MOST and n_cols <= most and plan.smem_staged == 0 and plan.stagger == 0
        words = problem.words(plan.vectors_per_chunk * plan.ctas, config.thread_bytes)
        assert plan.max_registers == next(cap for most, cap in REGISTERS if words <= most)
        wanted = tile_of(problem, found, way, config)
        assert words <= wanted.words
        fewer = problem.words(plan.vectors_per_chunk * (plan.ctas // 2), config.thread_bytes) if plan.ctas > 1 else 99
        assert fewer > wanted.words and plan.ctas <= wanted.most_ctas, "fewer CTAs would hold the columns"
        tiles = tiles_of(inner, plan.rows, plan.overlap, plan.skewed)
        assert tiles * plan.rows <= 1.7 * inner, "at most 1.7 positions are read for each that exists"
        # the columns of each chunk start as those of the first one do
        assert not plan.skewed or plan.vectors_per_chunk * plan.ctas % plan.skewed == 0
    assert rules == {
        # skewed tiles of a float32 softmax are rare: 59 or 61 positions
        "held softmax 32 bits: 32", "held gradient 32 bits: 32", "held gradient 32 bits: skewed 64",
        "held softmax 16 bits: 32", "held gradient 16 bits: skewed 64",
        "plain softmax 32 bits: 32", "crowded softmax 16 bits: 64", "sectors softmax 16 bits: 32",
        "halves softmax 16 bits: 64", "sectors gradient 16 bits: 64", "sectors gradient 16 bits: 32",
        "plain softmax 32 bits: 64", "plain softmax 16 bits: 64", "alone softmax 16 bits: 64",
        "halves softmax 32 bits: 64",
        "halves gradient 16 bits: 64", "halves gradient 16 bits: 32", "halves softmax 16 bits: 32",
        "halves softmax 32 bits: 32", "halves gradient 32 bits: 32", "sectors softmax 32 bits: 32",
        "sectors gradient 32 bits: 32", "held softmax 16 bits: 64", "held softmax 16 bits: skewed 64",
    }  # fmt: skip


def test_no_large_cluster_holds_few_columns():
    """A table entry for many columns took 257 to 512 columns of 64 positions: 16 CTAs had half of the speed."""
    rng = random.Random(9)
    for k in range(12000):
        n_cols, dtype = round(9 * 700 ** rng.random()), rng.choice(("bfloat16", "float32"))
        inner = 64 if k % 4 == 0 else round(12 * 900 ** rng.random())
        problem = planes(n_cols, inner // 8 * 8 if k % 2 and inner >= 8 else inner, dtype, rng.random() < 0.5)
        plan, _ = considered(problem)
        if plan.ctas >= 4 and plan.regime == "spatial_cluster" and not plan.gathered:
            of_a_thread = plan.rows * plan.vectors_per_chunk * problem.itemsize // (32 * plan.num_warps)
            words = problem.words(plan.vectors_per_chunk * plan.ctas, of_a_thread)
            assert words > 16, (problem, plan)


def test_few_positions_fill_one_tile():
    rng, replaced = random.Random(6), 0
    for _ in range(6000):
        n_cols, inner = round(90 * 90 ** rng.random()), rng.randint(2, 39)
        dtype, backward = rng.choice(("bfloat16", "float16", "float32")), rng.random() < 0.3
        problem = planes(n_cols, inner, dtype, backward, rng.random() < 0.3)
        config = short_of(problem)
        if config is None:
            continue
        found, _ = considered(problem)
        assert problem.itemsize == 2 and not backward and 1 < problem.vec < 8 and n_cols <= ONE_TILE_COLS
        assert found.gathered and problem.plane_bytes >= LEAST_PIECE
        replaced += 1
        assert config.inner == 32
        plan = tiles_plan(problem, HOPPER, config)
        check(plan, problem, HOPPER)
        assert inner <= plan.rows <= 4 / 3 * inner and tiles_of(inner, plan.rows, plan.overlap) == 1
        assert problem.words(plan.vectors_per_chunk * plan.ctas, config.thread_bytes) <= 44 and plan.ctas <= 8
        assert plan.ctas == 1 or problem.words(plan.vectors_per_chunk * plan.ctas // 2, config.thread_bytes) > 44
    assert replaced >= 5


def test_where_there_are_none():
    problem = planes(1115, 146, "float32")
    plan, way = considered(problem)
    assert way is not None and faster_as_short(problem, HOPPER, plan, way)
    slower = way._replace(speed=0.5), way._replace(ctas=2, num_warps=8)
    assert not any(faster_as_short(problem, HOPPER, replace(plan, rows=16), other) for other in slower)
    others = (
        replace(problem, batch_invariant=True), replace(problem, in_phase=False), replace(problem, packed=False),
        replace(problem, inner=450), replace(problem, inner=38), replace(problem, n_cols=3001),
    )  # fmt: skip
    assert not any(faster_as_short(other, HOPPER, plan, way) for other in others)
    devices = (device for name, device in DEVICES.items() if name != "sm_90")
    assert not any(faster_as_short(problem, device, plan, way) for device in devices)


def test_longer_planes_have_lean_tiles():
    assert MOST + 1 == LEAST_POSITIONS


def test_tiles_have_caps_on_registers():
    for tile in (tile for rule in (*RULES, ONE_TILE) for tile in rule):
        assert tile.words <= REGISTERS[-1][0] and tile.positions <= 32 * tile.num_warps


def test_examples():
    assert doctest.testmod(short_planes) == (0, 8)
