"""Lean tiles: what the rule gives each number of columns, where it gives nothing, and what a softmax runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from fused_softmax.launch import spatial
from fused_softmax.planning.lean_tiles import CTAS, LEAST_POSITIONS, LONG, RANGES, REGISTERS, Lean, lean_config
from fused_softmax.planning.spatial import tiles_plan
from fused_softmax.planning.types import DEVICES, Plan, SpatialProblem

HOPPER = DEVICES["sm_90"]
NAMES = {2: "bfloat16", 4: "float32"}
SECTOR = 32  # bytes
ALL = [(key, of) for key, ranges in RANGES.items() for of in ranges]


def problem_of(key: tuple[str, int, int], n_cols: int, log: bool, positions: int = 4096) -> SpatialProblem:
    """A problem whose columns start at multiples of so many bytes, not of twice as many."""
    op, itemsize, starts = key
    inner = positions if starts == SECTOR else positions + starts // itemsize
    name, vec = NAMES[itemsize], min(starts, 16) // itemsize
    whole = starts == SECTOR
    return SpatialProblem(n_cols, inner, name, name, vec, op == "gradient", log, whole_sectors=whole, in_phase=True)


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
        problem = problem_of(key, n_cols, log=bool(of.log))
        plan = plan_of(problem)
        of_a_chunk = plan.vectors_per_chunk * plan.ctas
        assert (plan.chunks - 1) * of_a_chunk < n_cols <= plan.chunks * of_a_chunk
        wanted = next(ctas for ctas in CTAS if words_of(problem, of, ctas) <= of.words)
        assert (plan.rows, plan.num_warps, plan.ctas) == (of.positions, of.num_warps, wanted), n_cols
        words = (1 + problem.backward) * plan.chunks * of.thread_bytes // 4
        assert words == words_of(problem, of, wanted), n_cols
        assert plan.max_registers == next(cap for most, cap in REGISTERS if words <= most)
        assert plan.smem_staged == 0 and plan.outers == 1 and plan.stagger == 0
        # a thread has a position at least, and merges one where CTAs share the columns, or columns are skewed
        assert plan.rows <= 32 * plan.num_warps or (plan.ctas == 1 and not plan.skewed)
        assert plan.skewed * problem.itemsize == of.skewed
        if not of.skewed:
            share = 0 if of.apart or starts == SECTOR else (SECTOR - starts) // problem.itemsize
            assert plan.overlap == share
            # a column starts in a sector as that of the next chunk does
            assert not share or of_a_chunk * of.thread_bytes % SECTOR == 0, n_cols


def test_ranges_rise_and_have_a_cap():
    for ranges in RANGES.values():
        assert all(before.most < after.least for before, after in pairwise(ranges))
        assert all(of.least <= of.most and of.words <= REGISTERS[-1][0] for of in ranges)


@pytest.mark.parametrize(("key", "of"), ALL)
def test_where_there_are_none(key: tuple[str, int, int], of: Lean):
    problem = problem_of(key, of.least, log=bool(of.log))
    assert lean_config(problem, HOPPER)
    has = [n for other in RANGES[key] for n in (other.least, other.most) if other.log in (None, problem.log)]
    others = [
        replace(problem, out_dtype="float16"),
        replace(problem, batch_invariant=True),
        replace(problem, inner=LEAST_POSITIONS - 32 + problem.inner % 32),
        *(replace(problem, n_cols=n) for n in (of.least - 1, of.most + 1) if n not in has),
    ]
    if of.log is not None:
        others.append(replace(problem, log=not of.log))
    assert not any(lean_config(other, HOPPER) for other in others)
    overlaps = key[2] < SECTOR and not (of.skewed or of.apart)
    in_place = lean_config(replace(problem, in_phase=False), HOPPER)
    assert (in_place is None) == (overlaps or of.skewed > 0), "such tiles write what other programs read"
    devices = (device for name, device in DEVICES.items() if name != "sm_90")
    assert not any(lean_config(problem, device) for device in devices)


@pytest.mark.parametrize("outer", [1, 3, 700])
def test_softmax_takes_them_whatever_outer_is(outer: int):
    """The plan, and with it a position's bits, follows from columns, positions, dtype and device."""
    for n_cols, inner, dtype, backward in (
        (5, 2004, torch.bfloat16, False), (9, 764, torch.bfloat16, True), (340, 4384, torch.bfloat16, True),
        (470, 5356, torch.float32, False), (283, 4964, torch.bfloat16, True),
    ):  # fmt: skip
        x = torch.empty(outer, n_cols, inner, dtype=dtype, device="meta")
        plan = spatial.softmax_plan((x,) * (2 + backward), False, backward, False, HOPPER)
        if inner < LONG:
            assert plan.num_warps == 4 and not plan.gathered
        problem = spatial.problem_of(*(torch.empty_like(x) for _ in range(2 + backward)), backward=backward)
        config = lean_config(problem, HOPPER)
        assert config is not None and plan == tiles_plan(problem, HOPPER, config)
