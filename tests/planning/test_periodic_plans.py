"""Planes in the registers of a cluster: what a plan owes to the kernel, by the places that its threads visit."""

from __future__ import annotations

import doctest
import random

import pytest
import torch

from fused_softmax.kernels.common.gathered_cluster import POSITIONS, sums_bytes
from fused_softmax.kernels.common.periodic_slots import slots_bytes
from fused_softmax.launch import spatial
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


# columns, positions, dtype, backward: warps and vectors of a thread where one program of few warps holds the plane, and
# None where it has another plan. Runs start where contiguous planes have them
BY_FEW_WARPS = (
    # gradients: runs that start anywhere, a share of 0.42 and more; at multiples of 4 bytes from 0.5 on
    (453, 9, "bfloat16", True, (2, 9)), (402, 5, "float16", True, (1, 9)), (108, 41, "bfloat16", True, (4, 5)),
    (115, 9, "bfloat16", True, (1, 5)), (1645, 3, "bfloat16", True, (2, 10)), (74, 17, "float32", True, (2, 7)),
    (33, 17, "float32", True, (1, 9)), (962, 10, "bfloat16", True, (4, 10)),
    (47, 26, "bfloat16", True, None), (176, 6, "bfloat16", True, None), (17, 59, "float32", True, None),
    # tiles are filled; runs start at multiples of 8 bytes, of float32 too; more positions
    (134, 14, "bfloat16", True, None), (35, 68, "bfloat16", True, None), (152, 18, "float32", True, None),
    (110, 301, "bfloat16", True, None), (914, 14, "bfloat16", True, None),
    (50, 50, "bfloat16", True, (2, 7)), (58, 22, "bfloat16", True, (1, 8)),  # shares of 0.55 and 0.54
    # a softmax: in place of a piece of 8 warps with 34 columns of a thread
    (845, 10, "bfloat16", False, (2, 18)), (1023, 17, "bfloat16", False, (4, 19)), (829, 18, "bfloat16", False, None),
    (744, 10, "bfloat16", False, None), (825, 4, "bfloat16", False, None), (845, 10, "float32", False, None),
    (910, 9, "bfloat16", False, None), (1101, 8, "bfloat16", False, None),
    # of tiles of runs that start anywhere; and half of the warps, which hold as much
    (1625, 3, "bfloat16", False, None), (1299, 3, "float32", False, None),
    (1906, 3, "bfloat16", False, (2, 12)), (1404, 3, "float16", False, (1, 18)), (2193, 4, "bfloat16", False, None),
    (1383, 7, "bfloat16", False, (2, 20)), (2456, 2, "float32", False, (2, 20)),
)  # fmt: skip


@pytest.mark.parametrize(("n_cols", "inner", "dtype", "backward", "wanted"), BY_FEW_WARPS)
@pytest.mark.parametrize("outer", [1, 900])
def test_few_warps_hold_small_planes(n_cols, inner, dtype, backward, wanted, outer):
    x = torch.empty(outer, n_cols, inner, dtype=getattr(torch, dtype), device="meta")
    tensors = (x,) * (2 + backward)
    for log in (False, True):
        chosen = spatial.softmax_plan(tensors, log, backward, False, HOPPER)
        assert ((chosen.num_warps, chosen.chunks) if chosen.periodic else None) == wanted
        assert chosen.ctas == 1 or wanted is None
        assert not spatial.softmax_plan(tensors, log, backward, True, HOPPER).periodic  # batch invariant


@pytest.mark.parametrize(
    ("n_cols", "inner", "dtype", "backward", "wanted"),
    [
        (108, 41, "bfloat16", True, 80), (245, 5, "bfloat16", True, 96), (323, 10, "bfloat16", True, 128),
        (51, 19, "float32", True, 80), (109, 11, "float32", True, 128), (1906, 3, "bfloat16", False, 96),
        (2068, 5, "bfloat16", False, 96), (1404, 3, "bfloat16", False, 128), (2456, 2, "float32", False, 128),
        (2019, 3, "bfloat16", False, 128),
        (468, 83, "bfloat16", True, 128), (3000, 7, "bfloat16", False, 128),  # of more warps
    ],
)  # fmt: skip
def test_few_vectors_leave_room_for_more_programs(n_cols, inner, dtype, backward, wanted):
    x = torch.empty(2, n_cols, inner, dtype=getattr(torch, dtype), device="meta")
    chosen = spatial.softmax_plan((x,) * (2 + backward), False, backward, False, HOPPER)
    assert chosen.periodic and chosen.max_registers == wanted


@pytest.mark.parametrize(
    ("n_cols", "inner", "dtype", "wanted"),
    [
        # runs that start anywhere: shares of 0.5 and more, on several CTAs, too
        (958, 11, "float32", (1, 8)), (533, 11, "float32", (1, 8)), (1836, 7, "float32", (3, 4)),
        (917, 15, "bfloat16", (1, 8)), (972, 11, "bfloat16", (1, 8)), (917, 15, "float16", (1, 8)),
        # at multiples of 4 bytes, where tiles are partly empty
        (1940, 10, "bfloat16", (1, 8)), (3941, 6, "bfloat16", (3, 4)), (940, 14, "bfloat16", None),
        # float32 at multiples of 8 bytes: shares of 0.8 and more in one program of 8 warps
        (887, 10, "float32", (1, 8)), (1970, 6, "float32", (1, 8)), (767, 10, "float32", None),
        (912, 6, "float32", None), (843, 14, "float32", None),
        # other starts
        (887, 12, "float32", None), (1940, 12, "bfloat16", None),
    ],
)  # fmt: skip
def test_registers_hold_gradients_of_few_positions_whose_tiles_read_few_bytes_at_a_time(n_cols, inner, dtype, wanted):
    x = torch.empty(2, n_cols, inner, dtype=getattr(torch, dtype), device="meta")
    for log in (False, True):
        chosen = spatial.softmax_plan((x, x, x), log, True, False, HOPPER)
        assert ((chosen.ctas, chosen.num_warps) if chosen.periodic else None) == wanted
        assert not spatial.softmax_plan((x, x, x), log, True, False, DEVICES["sm_80"]).periodic


def test_few_warps_hold_no_more_positions_than_there_is_room_for():
    pick = random.Random(8)
    for _ in range(4000):
        n_cols, inner = round(2 * 2000 ** pick.random()), round(2 * 600 ** pick.random())
        plane = held_planes.Plane(n_cols, inner, pick.choice((2, 4)), pick.random() < 0.5)
        found = held_planes.held_by_few_warps(plane)
        if found is not None:
            assert inner <= held_planes.HELD_POSITIONS and found.ctas == 1
            others = [held_planes.held_in(plane, warps, 1) for warps in (1, 2, 4)]
            assert found.share == max(other.share for other in others if other is not None)


def test_examples():
    assert doctest.testmod(held_planes) == (0, 2)
