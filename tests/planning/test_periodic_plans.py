"""Planes in the registers of a cluster: what a plan owes to the kernel, by the places that its threads visit."""

from __future__ import annotations

import doctest
import random

import pytest
import torch
from spatial_problems import periodic_plan

from fused_softmax.kernels.common.periodic_exchange import OWN_BYTES, POSITIONS, arrivals_bytes, places_bytes
from fused_softmax.kernels.common.periodic_slots import slots_bytes
from fused_softmax.launch import spatial
from fused_softmax.planning import held_planes
from fused_softmax.planning.register_planes import cluster_sizes, held_plan, plane_of
from fused_softmax.planning.types import DEVICES, Plan, SpatialProblem

HOPPER, INTERPRETER = DEVICES["sm_90"], DEVICES["interpreter"]


def random_problem(pick: random.Random, backward: bool) -> SpatialProblem:
    n_cols, inner = round(2 * 100_000 ** pick.random()), round(2 * 128 ** pick.random())
    dtype = pick.choice(("bfloat16", "float16", "float32"))
    return SpatialProblem(n_cols, inner, dtype, 1, backward, packed=True)


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


def has_room(problem: SpatialProblem, chosen: Plan) -> bool:
    """Whether the kernel's regions fit into what a program may declare, and the numbers of all CTAs into theirs."""
    n_values, vec = 2 - problem.backward, chosen.vec
    others = places_bytes(n_values, vec) + slots_bytes(n_values, chosen.num_warps * 32, vec)
    arrivals = arrivals_bytes(n_values, chosen.ctas, others)
    sent = 4 * n_values * chosen.ctas * problem.inner if chosen.ctas > 1 else 0
    assert held_planes.SHARED_BYTES == OWN_BYTES
    return 0 <= sent <= arrivals and others + arrivals <= OWN_BYTES and POSITIONS >= problem.inner


def test_all_ways_have_room():
    """Also of the most warps and CTAs: there is none of 16 CTAs of 16 warps and many positions of a softmax."""
    pick, checked, refused = random.Random(11), 0, 0
    while checked < 4000:
        n_cols, inner = round(50 * 4000 ** pick.random()), round(2 * 128 ** pick.random())
        dtype, backward = pick.choice(("bfloat16", "float32")), pick.random() < 0.5
        problem = SpatialProblem(n_cols, inner, dtype, 1, backward, packed=True)
        warps, ctas = pick.choice(held_planes.WARPS), pick.choice(cluster_sizes(HOPPER))
        way = held_planes.held_in(plane_of(problem), warps, ctas)
        if way is not None:
            checked += 1
            assert has_room(problem, held_plan(problem, way)), (problem, way)
        elif (warps, ctas, backward) == (16, 16, False) and held_planes.held_in(plane_of(problem), 16, 8):
            refused += 1
    assert refused > 0


@pytest.mark.parametrize(
    ("plane", "wanted"),
    [
        ((1831, 3, 2, False), (1, 2, 11)), ((643, 7, 4, False), (1, 2, 18)), ((453, 9, 2, True), (1, 2, 9)),
        ((1611, 35, 2, False), (4, 4, 17)), ((4392, 24, 2, False), (5, 4, 21)), ((324, 100, 4, False), (2, 8, 17)),
        ((54, 225, 4, True), (2, 8, 7)), ((5269, 40, 2, True), (5, 16, 11)), ((1378, 67, 4, True), (5, 16, 10)),
        ((599, 129, 4, False), (3, 16, 17)),
        ((314, 136, 2, False), (1, 8, 21)), ((741, 8, 2, True), (1, 4, 6)), ((316, 36, 2, True), (2, 4, 6)),
        ((82360, 4, 4, False), (8, 16, 21)),
        ((45394, 13, 2, False), (16, 8, 19)), ((34592, 8, 4, False), (16, 8, 17)), ((73207, 8, 2, True), (16, 16, 9)),
    ],
)  # fmt: skip
def test_the_best_way(plane, wanted):
    """CTAs, warps and vectors of a thread: programs of few warps first, and few CTAs whose threads are filled."""
    best = held_planes.best_held(held_planes.Plane(*plane), cluster_sizes(HOPPER))
    assert best is not None and (best.ctas, best.num_warps, best.chunks) == wanted


def test_no_way_is_faster_than_a_copy():
    pick, clusters = random.Random(12), cluster_sizes(HOPPER)
    for _ in range(3000):
        plane = held_planes.Plane(
            round(20 * 2000 ** pick.random()), round(2 * 128 ** pick.random()), pick.choice((2, 4)), pick.random() < 0.5
        )
        best = held_planes.best_held(plane, clusters)
        assert best is None or (0 < best.speed <= 1 and 0 < best.share <= 1.1)


@pytest.mark.parametrize(
    "device", [HOPPER, pytest.param(INTERPRETER, marks=pytest.mark.extended)], ids=lambda device: device.name
)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("seed", [3, *(pytest.param(n, marks=pytest.mark.extended) for n in range(4, 7))])
def test_a_cluster_holds_its_plane(seed, backward, device):
    pick, sizes = random.Random(seed), set()
    for _ in range(1000):
        problem = random_problem(pick, backward)
        chosen = periodic_plan(problem, device)
        if chosen is None:
            continue
        sizes.add(chosen.ctas)
        threads, vec, inner = chosen.num_warps * 32, chosen.vec, problem.inner
        assert chosen.periodic * vec % inner == 0, "a slot has one position in all chunks"
        assert chosen.periodic <= threads and chosen.periodic * vec >= inner + vec
        assert chosen.vectors_per_chunk == 1 or chosen.vectors_per_chunk * inner <= threads
        assert chosen.chunks <= held_planes.MOST_VECTORS[backward, problem.itemsize]
        assert 0 <= chosen.unpredicated_chunks < chosen.chunks
        assert has_room(problem, chosen)
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
    problem = SpatialProblem(300, 251, "bfloat16", 1, packed=True)
    assert periodic_plan(problem, DEVICES[target]) is None
    assert periodic_plan(problem, HOPPER) is not None


def test_planes_with_gaps_and_batch_invariance_have_none():
    known = dict(n_cols=300, inner=251, dtype="bfloat16", vec=1)
    assert periodic_plan(SpatialProblem(**known, packed=True), HOPPER) is not None
    assert periodic_plan(SpatialProblem(**known), HOPPER) is None
    assert periodic_plan(SpatialProblem(**known, packed=True, batch_invariant=True), HOPPER) is None


def test_threads_without_vectors_count():
    """129 positions leave 127 of 256 threads without vectors, and the plan takes 387 of 512."""
    problem = SpatialProblem(599, 129, "float32", 1, packed=True)
    chosen = periodic_plan(problem, HOPPER)
    assert chosen is not None and (chosen.num_warps, chosen.periodic) == (16, 387)


@pytest.mark.parametrize(
    ("n_cols", "inner", "dtype", "backward", "wanted"),
    [
        (108, 41, "bfloat16", True, 80), (245, 5, "bfloat16", True, 96), (323, 10, "bfloat16", True, 128),
        (51, 19, "float32", True, 80), (109, 11, "float32", True, 128), (1906, 3, "bfloat16", False, 96),
        (2068, 5, "bfloat16", False, 128), (1404, 3, "bfloat16", False, 128), (942, 5, "float32", False, 128),
        (2019, 3, "bfloat16", False, 128),
        (468, 83, "bfloat16", True, 128), (3000, 7, "bfloat16", False, 128),  # of more warps
    ],
)  # fmt: skip
def test_few_vectors_leave_room_for_more_programs(n_cols, inner, dtype, backward, wanted):
    x = torch.empty(2, n_cols, inner, dtype=getattr(torch, dtype), device="meta")
    chosen = spatial.softmax_plan((x,) * (2 + backward), False, backward, False, HOPPER)
    assert chosen.periodic and chosen.max_registers == wanted


def test_examples():
    assert doctest.testmod(held_planes) == (0, 2)
