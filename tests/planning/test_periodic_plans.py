"""Planes in the registers of a cluster: what a plan owes to the kernel, by the places that its threads visit."""

from __future__ import annotations

import doctest
import random

import pytest

from fused_softmax.kernels.common.gathered_cluster import POSITIONS, sums_bytes
from fused_softmax.kernels.common.periodic_slots import slots_bytes
from fused_softmax.planning import held_planes, planes
from fused_softmax.planning.types import DEVICES, Plan, SpatialProblem

HOPPER, INTERPRETER = DEVICES["sm_90"], DEVICES["interpreter"]


def random_problem(pick: random.Random, backward: bool) -> SpatialProblem:
    n_cols, inner = round(2 * 100_000 ** pick.random()), round(2 * 128 ** pick.random())
    dtype = pick.choice(("bfloat16", "float16", "float32"))
    return SpatialProblem(n_cols, inner, dtype, dtype, 1, backward, packed=True)


def visits(problem: SpatialProblem, chosen: Plan, plane: int) -> list[int]:
    """How often each element of a plane is visited; asserts that a slot has one position and chunks are full."""
    n, vec, span = problem.n_cols * problem.inner, chosen.vec, chosen.periodic
    counts, start = [0] * n, plane * n
    head = -start % vec
    vectors, tail = divmod(n - head, vec)
    for rank in range(chosen.ctas):
        first, last = rank * vectors // chosen.ctas, (rank + 1) * vectors // chosen.ctas
        assert last - first <= chosen.chunks * span
        assert last - first >= chosen.unpredicated_chunks * span
        for vector in range(first, last):
            for i in range(vec):
                counts[head + vector * vec + i] += 1
    for end in (*range(head), *range(n - tail, n)):
        counts[end] += 1
    return counts


@pytest.mark.parametrize(
    "device", [HOPPER, pytest.param(INTERPRETER, marks=pytest.mark.extended)], ids=lambda device: device.name
)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("seed", [3, *(pytest.param(n, marks=pytest.mark.extended) for n in range(4, 7))])
def test_a_cluster_holds_its_plane(seed, backward, device):
    pick, sizes = random.Random(seed), set()
    for _ in range(1000):
        problem = random_problem(pick, backward)
        chosen = planes.periodic_plan(problem, device)
        if chosen is None:
            continue
        sizes.add(chosen.ctas)
        threads, vec, inner = chosen.num_warps * 32, chosen.vec, problem.inner
        assert chosen.periodic * vec % inner == 0, "a slot has one position in all chunks"
        assert chosen.periodic <= threads and chosen.periodic * vec >= inner + vec
        assert chosen.vectors_per_chunk == 1 or chosen.vectors_per_chunk * inner <= threads
        assert chosen.chunks <= held_planes.MOST_VECTORS[backward, problem.itemsize]
        assert 0 <= chosen.unpredicated_chunks < chosen.chunks
        n_values = 1 if backward else 2
        assert sums_bytes(n_values) + slots_bytes(n_values, threads, vec) <= 48 << 10
        assert (
            held_planes.HELD_REGISTERS * threads <= device.registers
            and inner <= held_planes.HELD_POSITIONS <= POSITIONS
        )
        if problem.n_cols * inner < 40_000:
            for plane in (0, 1, pick.randrange(100)):
                assert set(visits(problem, chosen, plane)) == {1}
    assert {1, 2, 4, 8} <= sizes and (device is INTERPRETER or {3, 5, 7} <= sizes)


@pytest.mark.parametrize("target", ["sm_80", "sm_100", "sm_120", "gfx942"])
def test_only_hopper_has_them(target):
    problem = SpatialProblem(300, 251, "bfloat16", "bfloat16", 1, packed=True)
    assert planes.periodic_plan(problem, DEVICES[target]) is None
    assert planes.periodic_plan(problem, HOPPER) is not None


def test_planes_with_gaps_and_batch_invariance_have_none():
    known = dict(n_cols=300, inner=251, dtype="bfloat16", out_dtype="bfloat16", vec=1)
    assert planes.periodic_plan(SpatialProblem(**known, packed=True), HOPPER) is not None
    assert planes.periodic_plan(SpatialProblem(**known), HOPPER) is None
    assert planes.periodic_plan(SpatialProblem(**known, packed=True, batch_invariant=True), HOPPER) is None


def test_threads_without_vectors_count():
    """129 positions leave 127 of 256 threads without vectors, and the plan takes 387 of 512."""
    problem = SpatialProblem(599, 129, "float32", "float32", 1, packed=True)
    chosen = planes.periodic_plan(problem, HOPPER)
    assert chosen is not None and (chosen.num_warps, chosen.periodic) == (16, 387)


def test_examples():
    assert doctest.testmod(held_planes) == (0, 2)
