"""Random softmaxes over another dimension, on every GPU that the planner knows: what each plan must keep."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from fused_softmax.launch.spatial import problem_of, tiles_of_positions
from fused_softmax.planning.cross_entropy_spatial import plan_spatial_loss
from fused_softmax.planning.logsumexp import plan_logsumexp, plan_logsumexp_gradient
from fused_softmax.planning.spatial import few_positions, plan_spatial
from fused_softmax.planning.spatial_tables import PART_VECTORS
from fused_softmax.planning.types import DEVICES, ITEMSIZE, Device, Plan, SpatialProblem

SHARED = 48 << 10  # bytes of a kernel, at most


def drawn(rng: random.Random) -> SpatialProblem:
    """Half of them have few positions, most have whole vectors, and some a cast."""
    dtype = rng.choice(("bfloat16", "float16", "float32"))
    to = dtype if rng.random() < 0.9 else rng.choice(("bfloat16", "float32"))
    widest = max(dtype, to, key=lambda name: ITEMSIZE[name])
    vec = 16 // ITEMSIZE[widest]
    inner = rng.choice((rng.randint(1, 300), rng.randint(256, 9000)))
    if rng.random() < 0.7:
        inner = max(vec, inner // vec * vec)
    while inner % vec:
        vec //= 2
    n_cols = round(2 ** rng.uniform(0, 17))
    backward, log, invariant, in_phase = (rng.random() < share for share in (0.5, 0.5, 0.1, 0.7))
    whole = inner * ITEMSIZE[to] % 32 == 0
    if rng.random() < 0.2:  # an input whose columns start elsewhere than those of the output
        vec, in_phase = rng.choice([v for v in (1, 2, 4, 8) if v <= vec]), False
    return SpatialProblem(n_cols, inner, widest, vec, backward, log, invariant, whole, in_phase and dtype == to)


def check(plan: Plan, problem: SpatialProblem, device: Device) -> None:
    if plan.regime == "spatial_two_pass":
        step = plan.chunks * plan.vectors_per_chunk
        assert plan.part_cols % step == 0 and plan.part_cols >= min(step, problem.n_cols)
        assert plan.ctas == 1 and plan.smem_staged == 0
        return
    of_a_chunk = plan.vectors_per_chunk * plan.ctas
    assert plan.skewed or plan.vec <= problem.vec, "columns start at vectors"
    assert plan.chunks * of_a_chunk >= problem.n_cols, "all columns"
    assert plan.unpredicated_chunks * of_a_chunk <= problem.n_cols, "columns that exist"
    assert plan.ctas <= device.max_cluster
    # an H200 gave wrong results where a cluster's threads were fewer than the positions
    assert plan.ctas == 1 or plan.rows <= plan.num_warps * device.warp_size
    if plan.smem_staged:
        # a copy to shared memory asks for whole chunks of one index of `outer`
        assert device.supports_smem_staging and plan.outers == 1 and plan.recompute
        assert plan.smem_staged < plan.chunks
        assert plan.skewed or plan.smem_staged <= plan.unpredicated_chunks
        chunk = plan.vectors_per_chunk * plan.rows * ITEMSIZE[problem.dtype]
        merging = (8 * plan.ctas + 16 + 4 * plan.num_warps) * plan.rows
        assert plan.smem_staged * chunk + merging < SHARED
    if plan.overlap and not plan.skewed:
        assert problem.in_phase and not problem.whole_sectors and plan.vec <= problem.vec
        assert plan.overlap == problem.sector - problem.vec
        of_a_sector = problem.sector // plan.vec
        assert plan.vectors_per_chunk * plan.ctas % of_a_sector == 0, "a column starts in a sector as the next one does"
    if plan.ctas > 1 or plan.overlap:
        assert plan.outers == 1
    if problem.batch_invariant:
        assert (plan.ctas, plan.smem_staged, plan.overlap) == (1, 0, 0)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.extended) for n in range(1, 6))])
def test_random_problems(seed: int):
    rng = random.Random(seed)
    for _ in range(3000):
        problem = drawn(rng)
        for device in DEVICES.values():
            for planned in (plan_spatial, tiles_of_positions, plan_spatial_loss):
                plan = planned(problem, device)
                try:
                    check(plan, problem, device)
                except AssertionError as error:
                    raise AssertionError(f"{problem} on {device.name}: {plan}") from error


def test_a_staged_tile_is_not_narrowed():
    # 32 positions would fit 80 better, but a program of two indices of `outer` would stage the chunks of one
    for n_cols, inner in ((600, 80), (513, 96), (640, 144), (560, 160)):
        plan = plan_spatial(SpatialProblem(n_cols, inner, "bfloat16", 8), DEVICES["sm_90"])
        assert plan.smem_staged and (plan.rows, plan.outers) == (64, 1)


@pytest.mark.parametrize("regime", ["spatial", "spatial_cluster", "spatial_two_pass"])
def test_a_forced_regime(regime: str):
    rng, found, none = random.Random(0), 0, 0
    for _ in range(2000):
        problem, device = drawn(rng), DEVICES[rng.choice(list(DEVICES))]
        try:
            assert plan_spatial(problem, device, regime).regime == regime, (problem, device.name)
            found += 1
        except ValueError as error:
            assert "cannot hold" in str(error)
            none += 1
    assert found > 300 and (none > 300 or regime == "spatial_two_pass")


def test_where_positions_are_few():
    of = SpatialProblem(513, 64, "bfloat16", 8)
    hopper = DEVICES["sm_90"]
    assert few_positions(of, hopper) and few_positions(replace(of, inner=248, whole_sectors=False), hopper)
    assert not few_positions(replace(of, n_cols=512), hopper) and not few_positions(replace(of, inner=256), hopper)
    # elements that are read one by one, batch_invariant(), and more columns than 16 CTAs hold
    others = (dict(vec=4), dict(batch_invariant=True), dict(n_cols=50000))
    assert not any(few_positions(replace(of, **other), hopper) for other in others)
    # GPUs without clusters, and those that stage nothing
    assert not any(few_positions(of, device) for name, device in DEVICES.items() if name != "sm_90")
    assert not few_positions(replace(of, inner=8, n_cols=9000), hopper)
    # 16 positions are in one program where it holds their columns, and on a cluster elsewhere
    few = replace(of, inner=16, n_cols=1300)
    assert plan_spatial(few, hopper).ctas == 1 < plan_spatial(replace(few, n_cols=8000), hopper).ctas


@pytest.mark.parametrize(
    ("n_cols", "inner", "dtype", "backward", "chunks"),
    [
        (108446, 7, "bfloat16", False, 8),
        (108446, 7, "bfloat16", True, 4),  # 16-bit gradients keep fewer
        (108446, 7, "float32", True, 8),
        (15044, 29, "float32", True, 8),
        (15044, 49, "float32", True, 4),
    ],
)
def test_steps_of_few_positions_that_are_read_twice(n_cols, inner, dtype, backward, chunks):
    problem = SpatialProblem(n_cols, inner, dtype, 1, backward)
    assert plan_spatial(problem, DEVICES["sm_90"], "spatial_two_pass").chunks == chunks


@pytest.mark.parametrize(
    ("n_cols", "wanted"),
    # CTAs, chunks, chunks that are staged, registers
    [(832, (8, 13, 0, 168)), (920, (8, 15, 11, 128)), (1000, (8, 16, 0, 168))],
)
def test_gradients_in_halves_of_sectors(n_cols, wanted):
    problem = SpatialProblem(n_cols, 15320, "bfloat16", 8, True, whole_sectors=False, in_phase=True)
    plan = plan_spatial(problem, DEVICES["sm_90"])
    assert plan.overlap == 8 and (plan.ctas, plan.chunks, plan.smem_staged, plan.max_registers) == wanted


def test_runs_that_start_at_parts_of_a_vector():
    """Each entry is what its own columns get, and all other problems never do."""
    device = DEVICES["sm_90"]
    for (backward, itemsize, vec), table in PART_VECTORS.items():
        dtype = "float32" if itemsize == 4 else "bfloat16"
        for before, config in zip((None, *table), table, strict=False):
            fewest = max(config.least_cols, 2 if before is None else before.max_cols + 1)
            for n_cols in {fewest, config.max_cols}:
                of = SpatialProblem(n_cols, 8192 + vec, dtype, vec, backward, whole_sectors=False, in_phase=True)
                plan = plan_spatial(of, device)
                found = plan.rows, plan.ctas, plan.num_warps, plan.skewed * itemsize, plan.smem_staged
                assert found == (config.inner, config.ctas, config.num_warps, config.skewed, 0), n_cols
                assert config.max_registers in (None, plan.max_registers) and plan.stagger == 0
                # a run of whole vectors, or one that starts anywhere, and bits that do not depend on `inner`
                for other in (
                    replace(of, inner=8192, vec=16 // itemsize, whole_sectors=True),
                    replace(of, inner=8193, vec=1),
                    replace(of, batch_invariant=True),
                ):
                    assert plan_spatial(other, device) != plan, (other, config)
                if config.skewed:  # what shares memory with the output has no such tiles
                    assert plan_spatial(replace(of, in_phase=False), device).skewed == 0


def test_other_kernels_keep_their_tiles():
    """The tables of parts of a vector were measured with softmax alone."""
    of = SpatialProblem(32, 22148, "bfloat16", 4, whole_sectors=False, in_phase=True)
    assert plan_spatial(of, DEVICES["sm_90"]).rows == 256
    assert plan_logsumexp_gradient(of, DEVICES["sm_90"]).rows == 128


@pytest.mark.parametrize("planned", [plan_logsumexp, plan_logsumexp_gradient])
def test_plans_without_a_second_read(planned):
    """Small planes share a program, registers hold a step, and within batch_invariant() positions change no column."""
    rng, several = random.Random(3), 0
    for _ in range(4000):
        problem, device = replace(drawn(rng), backward=False, log=False), DEVICES[rng.choice(list(DEVICES))]
        plan = planned(problem, device)
        check(plan, problem, device)
        threads = plan.num_warps * device.warp_size
        held = plan.chunks * plan.vectors_per_chunk * plan.rows * plan.outers * problem.itemsize / threads
        assert held <= 640, (problem, device.name, plan)
        if plan.outers > 1:
            several += 1
            assert plan.part_cols >= problem.n_cols, "one program has all columns of its planes"
        of_program = plan.outers * min(plan.rows, problem.inner) * min(plan.part_cols, problem.n_cols)
        assert problem.batch_invariant or of_program >= 128, (problem, device.name, plan)
        if problem.batch_invariant:
            other = planned(replace(problem, inner=problem.inner + 8, vec=1, whole_sectors=False), device)
            of_column = [(p.part_cols, p.chunks, p.vectors_per_chunk, p.outers) for p in (plan, other)]
            assert of_column[0] == of_column[1] and plan.outers == 1
    assert several > 300


@pytest.mark.parametrize("backward", [False, True])
def test_a_cast_is_planned_as_float32(backward):
    """A thread holds as many elements of the narrow tensor as of the wide one, and whole columns where they are few."""
    narrow, wide = (torch.empty(3, 300, 1312, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    tensors = (wide, wide.clone(), narrow) if backward else (narrow, wide)
    cast, like = problem_of(*tensors, backward=backward), problem_of(wide, wide.clone(), backward=backward)
    assert replace(like, packed=False, in_phase=False) == cast and (cast.dtype, cast.vec) == ("float32", 4)
    for n_cols, inner in ((2, 144), (3, 1320), (5, 5776)):
        plan = plan_spatial(replace(cast, n_cols=n_cols, inner=inner), DEVICES["sm_90"])
        assert (plan.vectors_per_chunk, plan.chunks) == (1, n_cols), "a thread has whole columns"


def test_caps_of_skewed_tiles():
    def cap(n_cols: int, backward: bool) -> int | None:
        plan = plan_spatial(SpatialProblem(n_cols, 739, "bfloat16", 1, backward, in_phase=True), DEVICES["sm_90"])
        assert plan.skewed
        return plan.max_registers

    assert (cap(71, True), cap(89, True), cap(71, False)) == (80, 96, None)
