"""Plans that a softmax over another dimension than the last could have, to be timed next to the planner's plan.

Three families hold the columns on chip: tiles of positions, several planes as one piece of memory, and planes in the
registers of a cluster. Two kinds of plans have no candidates: columns that are read twice, and chunks that are staged
in shared memory.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from fused_softmax.planning.held_planes import MOST_WARPS, held_in
from fused_softmax.planning.planes import (
    OWN_BYTES,
    PIECE_BYTES,
    ROOMS,
    all_lanes,
    may_be_pieces,
    small_planes_plan,
)
from fused_softmax.planning.register_planes import cluster_sizes, held_plan, may_be_held, plane_of
from fused_softmax.planning.spatial import staggered, tiles_plan
from fused_softmax.planning.spatial_tables import MOST_KEPT, REGISTERS, SpatialConfig
from fused_softmax.planning.types import SECTOR_BYTES, Device, Plan, SpatialProblem, power_of_two

POSITIONS = (16, 32, 64, 128, 256, 512)
THREAD_BYTES = (16, 8, 4)
WARPS, CTAS = (1, 2, 4, 8, 16), (2, 4, 8, 16)
# limits of the words of 4 bytes that a thread holds of the columns. For each limit a tile has the fewest warps, or the
# fewest CTAs, whose threads hold no more
WORDS = (16, 28, 44, 72, 96)
# the cap on a thread's registers, by those words
CAPS = (*REGISTERS[:-1], (88, 128), (WORDS[-1], 168))
MOST_FILLED_UP = 1.5  # positions of whole tiles over those that exist, at most


def shared_bytes(backward: bool, ctas: int, cols: int, positions: int, unit: int) -> int:
    """Bytes of shared memory that a tile's kernel declares. unit: of a skewed tile, in elements; 0: of others.

    A softmax has two numbers of each position, a gradient one: of the CTAs of a cluster, and of a skewed tile's rows.
    """
    number = 4 if backward else 8
    exchanged = number * (ctas + 2) * positions + 8 if ctas > 1 else 0
    return exchanged + (number * (cols * positions + unit + positions + positions // 16) if unit else 0)


def candidates(problem: SpatialProblem, device: Device, most: int = 0, seed: int = 0) -> list[Plan]:
    """Different plans that hold `problem`: at most `most` of them, drawn by the seed; all where `most` is 0.

    >>> from fused_softmax.planning.types import DEVICES
    >>> problem = SpatialProblem(2, 86, "bfloat16", 2, backward=True, whole_sectors=False, packed=True)
    >>> len(candidates(problem, DEVICES["sm_90"], most=20))
    20
    """
    found = list(dict.fromkeys((*_tiles(problem, device), *_pieces(problem, device), *_in_registers(problem, device))))
    if 0 < most < len(found):
        found = random.Random(f"{seed} {problem}").sample(found, most)
    return found


def _tiles(problem: SpatialProblem, device: Device) -> Iterator[Plan]:
    """Tiles of positions: plain, overlapping and skewed ones, in one program and on a cluster."""
    starts, all_positions = problem.starts * problem.itemsize, power_of_two(problem.inner)
    places: list[tuple[bool, int]] = [(False, 0)]  # (overlaps, skewed)
    if problem.in_phase and starts < SECTOR_BYTES:
        places += [(True, 0), *((False, unit) for unit in (4, 8, 16, 32) if starts <= unit > problem.itemsize)]
    for overlaps, skewed in places:
        # tiles of few positions are narrower than the first of POSITIONS: plain ones in one program alone
        widest = all_positions if overlaps or skewed else max(all_positions, POSITIONS[0])
        for positions in (p for p in POSITIONS if p <= widest):
            # such tiles have aligned accesses alone: columns start at `starts`, or are skewed so that they do
            aligned = skewed or (starts if overlaps else THREAD_BYTES[0])
            for thread_bytes in (n for n in THREAD_BYTES if n <= aligned):
                if _fills(problem, min(positions, all_positions), overlaps, skewed):
                    yield from _tiles_of(problem, device, positions, thread_bytes, overlaps, skewed)


def _fills(problem: SpatialProblem, positions: int, overlaps: bool, skewed: int) -> bool:
    """Whether tiles of so many positions have some of their own, and are not nearly half empty."""
    shared = problem.overlap_of(skewed // problem.itemsize) if skewed else problem.sector - problem.vec
    step = positions - (shared if overlaps or skewed else 0)
    return step > 0 and -(-problem.inner // step) * step <= max(MOST_FILLED_UP * problem.inner, POSITIONS[0])


def _tiles_of(
    problem: SpatialProblem, device: Device, positions: int, thread_bytes: int, overlaps: bool, skewed: int
) -> Iterator[Plan]:
    """One tile, by the words of a thread: in one program of few warps up to many, and on clusters of 4 and 8 warps."""
    starts, period = problem.starts * problem.itemsize, SECTOR_BYTES // thread_bytes if overlaps else 1
    # skewed tiles have measured caps on registers for 4 and 8 warps
    ways = [[(1, warps) for warps in (WARPS if not skewed else (4, 8))]]
    # CTAs of a cluster write other columns: a sector that two share is written twice
    apart = skewed or overlaps or starts == SECTOR_BYTES
    if apart and positions <= power_of_two(problem.inner):
        ways += [[(ctas, warps) for ctas in CTAS if ctas <= device.max_cluster] for warps in (4, 8)]
    for sizes in ways:
        for words in WORDS:
            for ctas, warps in sizes:
                cols = warps * device.warp_size * thread_bytes // problem.itemsize // positions
                # each CTA has columns, and in overlapping tiles chunks are whole periods of the columns' starts
                if problem.n_cols <= (ctas - 1) * cols or cols * ctas < period:
                    continue
                held = problem.words(cols * ctas, thread_bytes)
                if held > words or ((skewed or ctas > 1) and warps * device.warp_size < positions):
                    continue
                cap = next(cap for most, cap in CAPS if held <= most)
                if (cap or 0) * warps * device.warp_size > device.registers:
                    continue
                unit = skewed // problem.itemsize
                if shared_bytes(problem.backward, ctas, cols, positions, unit) > OWN_BYTES:
                    continue
                recompute = problem.backward or held > MOST_KEPT
                config = SpatialConfig(
                    problem.n_cols, ctas, warps, positions, recompute, cap, thread_bytes, skewed=skewed,
                    overlaps=overlaps,
                )  # fmt: skip
                plan = tiles_plan(problem, device, config)
                yield from (plan, staggered(plan, problem, device))
                break


def _pieces(problem: SpatialProblem, device: Device) -> Iterator[Plan]:
    """One plane or several that a program moves as one piece, in warps and lanes of all sizes."""
    if not may_be_pieces(problem, device) or problem.plane_bytes > ROOMS[problem.backward][-1]:
        return
    most = PIECE_BYTES[problem.backward] // problem.plane_bytes
    for part in (1, 2, 4, 8):
        outers = max(1, most // part)
        for warps in WARPS[:4]:
            for found in all_lanes(problem, problem.n_cols, outers, warps):
                # neither lanes without a column, nor half of the threads without a position
                busy = outers * problem.inner * found.lanes * 2 > warps * device.warp_size
                if busy and found.lanes < 2 * problem.n_cols:
                    yield small_planes_plan(problem, device, outers, warps, found)


def _in_registers(problem: SpatialProblem, device: Device) -> Iterator[Plan]:
    """Planes in the registers of a cluster, of all sizes of it."""
    if not may_be_held(problem, device) or problem.n_cols <= 1 or problem.inner <= 1:
        return
    vectors = problem.n_cols * problem.inner // problem.full_vec
    for warps in (1, 2, 4, 8, MOST_WARPS):
        for ctas in cluster_sizes(device):
            threads = warps * device.warp_size
            held = held_in(plane_of(problem), warps, ctas)
            # each CTA has vectors, and so have half of all threads
            if held is not None and vectors > max((ctas - 1) * threads, ctas * threads // 2):
                yield held_plan(problem, held)
