"""Lean tiles: what the rule gives each number of columns, where it gives nothing, and what a softmax runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from spatial_problems import starting_at

from fused_softmax.launch import spatial
from fused_softmax.planning.lean_tiles import LONG, RANGES, Lean, lean_config
from fused_softmax.planning.spatial import staggered, tiles_plan
from fused_softmax.planning.spatial_tables import REGISTERS
from fused_softmax.planning.types import DEVICES, SECTOR_BYTES, Plan, SpatialProblem

HOPPER = DEVICES["sm_90"]
ALL = [(key, of) for key, ranges in RANGES.items() for of in ranges]


def plan_of(problem: SpatialProblem) -> Plan:
    config = lean_config(problem, HOPPER)
    assert config is not None, problem
    return tiles_plan(problem, HOPPER, config)


def words_of(problem: SpatialProblem, of: Lean, ctas: int) -> int:
    """Of 4 bytes, that a thread has of the columns, where so many CTAs share them."""
    a_chunk = of.num_warps * 32 * of.thread_bytes // problem.itemsize // of.positions * ctas
    return (1 + problem.backward) * -(-problem.n_cols // a_chunk) * of.thread_bytes // 4


@pytest.mark.parametrize(("key", "of"), ALL)
def test_what_a_thread_holds(key: tuple[str, int, int], of: Lean):
    """For all columns of a range: all of them, on the fewest CTAs whose threads have so few words."""
    starts = key[2]
    for n_cols in range(of.least, of.most + 1):
        problem = starting_at(key, n_cols, 4096, bool(of.log))
        plan = plan_of(problem)
        of_a_chunk = plan.vectors_per_chunk * plan.ctas
        assert (plan.chunks - 1) * of_a_chunk < n_cols <= plan.chunks * of_a_chunk
        wanted = next(ctas for ctas in (1, 2, 4, 8, 16) if words_of(problem, of, ctas) <= of.words)
        assert (plan.rows, plan.num_warps, plan.ctas) == (of.positions, of.num_warps, wanted), n_cols
        assert plan.ctas == 1 or not of.alone
        words = (1 + problem.backward) * plan.chunks * of.thread_bytes // 4
        assert words == words_of(problem, of, wanted), n_cols
        uncapped = key[:2] == ("softmax", 2) and wanted >= 4 and not (of.skewed or plan.overlap)
        assert plan.max_registers == (None if uncapped else next(cap for most, cap in REGISTERS if words <= most))
        assert plan.recompute == (key[1] == 2 and (problem.backward or words > 12))
        assert plan.smem_staged == 0 and plan.outers == 1
        # a thread has a position at least, and merges one where CTAs share the columns, or columns are skewed
        assert plan.rows <= 32 * plan.num_warps or (plan.ctas == 1 and not plan.skewed)
        assert plan.skewed * problem.itemsize == of.skewed
        if not of.skewed:
            assert plan.vec * problem.itemsize <= starts, "a vector that lies across what columns start at"
            share = 0 if of.alone or starts == SECTOR_BYTES else (SECTOR_BYTES - starts) // problem.itemsize
            assert plan.overlap == share
            # a column starts in a sector as that of the next chunk does
            assert not share or of_a_chunk * of.thread_bytes % SECTOR_BYTES == 0, n_cols


def test_ranges_rise_and_have_a_cap():
    for ranges in RANGES.values():
        assert all(before.most < after.least for before, after in pairwise(ranges))
        assert all(of.least <= of.most and of.words <= REGISTERS[-1][0] for of in ranges)


# columns, positions, dtype, backward: positions of a tile, CTAs, warps, and registers at most
PLANNED = (
    (9, 764, "bfloat16", True, (256, 1, 4, 80)), (283, 4964, "bfloat16", True, (128, 8, 4, 80)),
    (340, 4384, "bfloat16", True, (64, 4, 4, 80)), (5, 1484, "bfloat16", False, (512, 1, 4, None)),
    (1061, 5404, "bfloat16", False, (64, 4, 4, 112)), (880, 2572, "float32", False, (64, 8, 4, 112)),
    # few columns whose runs start anywhere; a little more than 1,024, and than 1,350
    (5, 3001, "bfloat16", False, (128, 1, 1, None)), (14, 1041, "float16", False, (128, 1, 1, None)),
    (7, 1613, "bfloat16", True, (128, 1, 1, None)), (9, 10053, "bfloat16", True, (128, 1, 1, 80)),
    (1152, 2048, "bfloat16", False, (64, 4, 4, None)), (1153, 2048, "bfloat16", False, (64, 8, 4, None)),
    (1408, 2048, "bfloat16", False, (64, 8, 4, None)), (300, 2048, "bfloat16", False, (64, 2, 4, 80)),
    # in halves of sectors, where 4 CTAs staged chunks
    (417, 8200, "bfloat16", True, (128, 8, 4, 112)), (512, 8200, "bfloat16", True, (128, 8, 4, 112)),
    (513, 8200, "bfloat16", True, (128, 8, 4, 112)), (640, 8200, "bfloat16", True, (128, 8, 4, 128)),
)  # fmt: skip


@pytest.mark.parametrize(("n_cols", "inner", "dtype", "backward", "wanted"), PLANNED)
@pytest.mark.parametrize("outer", [1, 700])
def test_a_softmax_takes_them_whatever_outer_is(n_cols, inner, dtype, backward, wanted, outer):
    """A position's bits follow from columns, positions, dtype and device."""
    x = torch.empty(outer, n_cols, inner, dtype=getattr(torch, dtype), device="meta")
    plan = spatial.softmax_plan((x,) * (2 + backward), False, backward, False, HOPPER)
    assert (plan.rows, plan.ctas, plan.num_warps, plan.max_registers) == wanted


def test_programs_start_together():
    x = torch.empty(1, 250, 4096, device="meta")
    plan = spatial.softmax_plan((x, x), False, False, False, HOPPER)
    problem = spatial.problem_of(x, x)
    config = lean_config(problem, HOPPER)
    assert config and plan == tiles_plan(problem, HOPPER, config) and plan.stagger == 0
    assert staggered(plan, problem, HOPPER).stagger > 0, "another example: these would start together anyway"


def test_shorter_planes_may_have_other_plans():
    def gathered(inner: int) -> bool:
        x = torch.empty(8, 5, inner, dtype=torch.bfloat16, device="meta")
        assert lean_config(spatial.problem_of(x, x), HOPPER)
        return spatial.softmax_plan((x, x), False, False, False, HOPPER).gathered

    assert gathered(LONG - 4) and not gathered(LONG + 4)


@pytest.mark.parametrize(("key", "of"), ALL)
def test_where_there_are_none(key: tuple[str, int, int], of: Lean):
    problem = starting_at(key, of.least, 4096, bool(of.log))
    assert lean_config(problem, HOPPER)
    has = [n for other in RANGES[key] for n in (other.least, other.most) if other.log in (None, problem.log)]
    others = [
        replace(problem, batch_invariant=True),
        replace(problem, inner=416 + problem.inner % 32),
        *(replace(problem, n_cols=n) for n in (of.least - 1, of.most + 1) if n not in has),
    ]
    if of.log is not None:
        others.append(replace(problem, log=not of.log))
    if not of.alone and of.positions > 128:  # two tiles and a little of the third
        others.append(replace(problem, inner=2 * of.positions + 8 + problem.inner % 8))
    assert not any(lean_config(other, HOPPER) for other in others)
    overlaps = key[2] < SECTOR_BYTES and not (of.skewed or of.alone)
    in_place = lean_config(replace(problem, in_phase=False), HOPPER)
    assert (in_place is None) == (overlaps or of.skewed > 0), "such tiles write what other programs read"
    widest = replace(problem, n_cols=of.most)
    ctas = plan_of(widest).ctas
    assert ctas == 1 or not lean_config(widest, replace(HOPPER, max_cluster=ctas // 2 if ctas > 2 else 1))
    devices = (device for name, device in DEVICES.items() if name != "sm_90")
    assert not any(lean_config(problem, device) for device in devices)


def test_planes_of_448_positions_have_them():
    assert lean_config(starting_at(("gradient", 2, 32), 9, 448), HOPPER)


def test_skewed_tiles_count_what_they_share():
    """Of 128 positions by 8 elements, where columns start at multiples of 4: each tile but the last gives up 8."""
    key = "softmax", 2, 8
    fills, empty = (starting_at(key, 130, n) for n in (480, 492))
    assert lean_config(fills, HOPPER) and not lean_config(empty, HOPPER)
