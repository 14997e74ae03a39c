"""Planes (n_cols, inner) that move as pieces of memory: what plans owe to the kernels, and when they are chosen."""

from __future__ import annotations

import doctest
import random

import pytest

from fused_softmax.kernels.common.gathered_ptx import region_bytes
from fused_softmax.planning import planes
from fused_softmax.planning.piece_costs import ALIGN_BYTES
from fused_softmax.planning.spatial import plan_spatial
from fused_softmax.planning.types import DEVICES, ITEMSIZE, MULTIPROCESSORS, Plan, SpatialProblem

TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120", "interpreter")


def random_problem(pick: random.Random, backward: bool) -> SpatialProblem:
    n_cols, inner = round(2 * 3000 ** pick.random()), round(2000 ** pick.random())
    dtype = pick.choice(("bfloat16", "float16", "float32"))
    return SpatialProblem(n_cols, inner, dtype, 1, backward, packed=True)


def shared_bytes(chosen: Plan, problem: SpatialProblem) -> int:
    """What the kernel of a plan asks for."""
    return (1 + problem.backward) * region_bytes(chosen.piece, problem.itemsize)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("backward", [False, True])
def test_a_piece_has_its_room_and_its_threads(backward, target):
    pick, found = random.Random(7), {"own": 0, "added": 0}
    for _ in range(8000):
        problem = random_problem(pick, backward)
        n_cols, inner, itemsize = problem.n_cols, problem.inner, problem.itemsize
        chosen = planes.planes_plan(problem, DEVICES[target])
        if chosen is None:
            continue
        found["added" if chosen.dynamic_bytes else "own"] += 1
        lanes, room = chosen.vectors_per_chunk, region_bytes(chosen.piece, itemsize)
        assert chosen.ctas == 1 and chosen.outers * n_cols * inner <= chosen.piece
        # the last place of a piece that starts 16 bytes less an element behind a vector, and the one behind it
        assert 16 - itemsize + chosen.piece * itemsize + itemsize <= room
        assert lanes * chosen.unpredicated_chunks <= n_cols <= lanes * chosen.chunks
        n_bytes = shared_bytes(chosen, problem)
        if chosen.dynamic_bytes:  # with 48 KB or less Triton's launcher asks for no more than those
            assert n_bytes <= chosen.dynamic_bytes and chosen.dynamic_bytes > 48 << 10
            assert chosen.dynamic_bytes + ALIGN_BYTES <= MULTIPROCESSORS["sm_90"].shared_per_program
        else:
            assert n_bytes <= 48 << 10
    hopper = target in ("sm_90", "interpreter")
    assert found["own"] > 500 and (found["added"] > 100) == hopper, found


@pytest.mark.parametrize("backward", [False, True])
def test_as_many_programs_fit_as_rooms_and_caps_are_made_for(backward):
    of_device = MULTIPROCESSORS["sm_90"]
    problem = SpatialProblem(100, 31, "bfloat16", 1, backward, packed=True)
    for room in planes._rooms(problem, planes.FITTING):
        asked = room.dynamic + ALIGN_BYTES if room.dynamic else planes.OWN_BYTES
        n_bytes = (1 + backward) * region_bytes(room.n_bytes // 2, 2)
        used = (min(asked, n_bytes) if not room.dynamic else asked) + of_device.shared_reserved
        assert room.fitting * used <= of_device.shared < (room.fitting + 1) * (used + 4096)
        for warps in (4, 8, 16):
            cap = planes._cap(room.fitting, warps)
            assert cap is None or cap * 32 * warps * room.fitting <= of_device.registers


def test_planes_are_pieces_where_that_is_faster():
    def chosen(n_cols, inner, vec, dtype="bfloat16", **more):
        size = ITEMSIZE[dtype]
        known = dict(whole_sectors=inner * size % 32 == 0, in_phase=True, packed=True) | more
        problem = SpatialProblem(n_cols, inner, dtype, vec, **known)
        device = DEVICES["sm_90"]
        return planes.faster_as_planes(problem, device, plan_spatial(problem, device))

    def pieces(*args, **more):
        return chosen(*args, **more) is not None

    assert pieces(35, 31, 1) and pieces(35, 31, 1, backward=True)  # runs start anywhere
    assert pieces(7, 24, 8) and not pieces(7, 24, 8, backward=True)  # a softmax fills up its tiles
    assert not pieces(64, 64, 8)  # whole vectors, and full tiles
    assert pieces(89, 136, 8) and not pieces(89, 144, 8)  # the runs of the latter are whole sectors
    # small planes of whole sectors: tiles that are partly empty, few columns, few positions
    assert pieces(58, 96, 8) and not pieces(91, 224, 8) and pieces(100, 80, 8) and not pieces(110, 80, 8)
    assert pieces(9, 32, 8) and not pieces(8, 32, 8) and pieces(26, 128, 8) and not pieces(38, 256, 8)
    assert not pieces(51, 64, 8) and not pieces(60, 32, 8) and pieces(83, 16, 8) and not pieces(200, 16, 8)
    assert not pieces(20, 272, 8)  # longer ones were not timed
    assert not pieces(58, 96, 8, backward=True) and not pieces(90, 40, 4, "float32")
    ampere = SpatialProblem(58, 96, "bfloat16", 8, whole_sectors=True, in_phase=True, packed=True)
    assert planes.faster_as_planes(ampere, DEVICES["sm_80"], plan_spatial(ampere, DEVICES["sm_80"])) is None
    assert pieces(2, 16, 8, backward=True)  # few bytes
    # short runs: 8, 32 and 40 bytes; not three chunks of 32 bytes, 64 bytes, or whole vectors
    assert pieces(9, 2, 2, backward=True) and pieces(25, 4, 4, backward=True) and pieces(9, 10, 2, backward=True)
    assert not any(pieces(n_cols, 4, 4, backward=True) for n_cols in (10, 11, 24))
    assert not pieces(5, 8, 8, backward=True) and not pieces(12, 2, 2, "float32", backward=True)
    assert pieces(9, 3, 1, "float32", backward=True) and pieces(3, 4, 4, "float32", backward=True)
    assert not pieces(9, 7, 1, "float32", backward=True) and pieces(3, 8, 8, backward=True)
    tiny = SpatialProblem(9, 2, "bfloat16", 2, True, whole_sectors=False, in_phase=True, packed=True)
    for target in ("sm_80", "sm_100", "sm_120"):
        assert planes.faster_as_planes(tiny, DEVICES[target], plan_spatial(tiny, DEVICES[target])) is None, target
    assert pieces(14, 591, 1) and not pieces(14, 591, 1, backward=True) and not pieces(2, 2001, 1)  # long runs
    assert pieces(31, 70, 2, "float32", backward=True) and not pieces(31, 70, 2, backward=True)  # narrow tiles
    assert pieces(274, 17, 1, "float32", backward=True)  # half empty tiles
    assert chosen(468, 83, 1).dynamic_bytes > 48 << 10 and chosen(101, 251, 1, backward=True).dynamic_bytes > 48 << 10
    assert chosen(980, 90, 1).num_warps == 16  # alone on its multiprocessor
    assert chosen(1039, 37, 1).gathered and chosen(969, 28, 4, "float32").gathered
    assert chosen(334, 84, 4, backward=True).gathered and chosen(713, 56, 8).gathered
    assert not pieces(400, 301, 1)  # of more bytes than a multiprocessor has
    assert not pieces(400, 301, 1, backward=True)
    assert not pieces(770, 32, 4, "float32") and not pieces(10000, 40, 8)  # tiles of whole vectors are read once
    assert not pieces(35, 31, 1, batch_invariant=True)  # lanes follow from `inner`


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_access_meets_few_banks(dtype, backward):
    """Also of planes whose size is a multiple of all banks: (64, 2) took eight times as long for each access."""
    itemsize = ITEMSIZE[dtype]
    for n_cols in range(2, 129):
        for inner in range(2, 25):
            problem = SpatialProblem(n_cols, inner, dtype, 1, backward, packed=True)
            plan = planes.planes_plan(problem, DEVICES["sm_90"])
            assert plan is not None
            # places of a warp's first columns: `position_of` of kernels/common/gathered_planes.py
            lanes, met = plan.vectors_per_chunk, {}
            for thread in range(32):
                index, rest = divmod(thread // lanes, inner)
                place = index * n_cols * inner + rest + thread % lanes * inner
                if index < plan.outers:
                    met.setdefault(place * itemsize // 4 % 32, set()).add(place * itemsize // 4)
            assert max(map(len, met.values())) <= 4, (n_cols, inner, lanes)


@pytest.mark.parametrize("target", ["sm_80", "sm_100", "sm_120", "gfx942"])
def test_elsewhere_than_on_hopper_large_planes_have_tiles(target):
    problem = SpatialProblem(468, 83, "bfloat16", 1, packed=True)
    assert planes.planes_plan(problem, DEVICES[target]) is None


def test_examples():
    assert doctest.testmod(planes).attempted >= 3 and doctest.testmod(planes).failed == 0
