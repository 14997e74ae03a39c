"""Plans of planes (n_cols, inner) of a dimension that is not the last, which programs read as runs of memory.

A plane is one piece for one program while it fits into shared memory, and several small ones are. The lanes of a warp
that share a position are those of the least cost (`piece_costs`), as for narrow rows. Larger planes, and many of these,
are faster in registers (`register_planes`).
docs/measurements/thresholds.md has the figures behind the thresholds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .piece_costs import (
    ALIGN_BYTES,
    BACKWARD,
    BANKS,
    CHUNKS,
    EDGE_BYTES,
    FORWARD,
    MOST_ELEMENTS,
    OWN_ROOMS,
    SAMPLED_WARPS,
    WORK,
    over_copy,
    plane_wavefronts,
    rounded_chunks,
    wavefronts,
)
from .types import MULTIPROCESSORS, Device, Plan, SpatialProblem

# bytes of a tensor's piece of several planes, at most, by `backward`
PIECE_BYTES = {False: 16 << 10, True: 12 << 10}
# a program's room for a tensor's piece is one of these, so that shapes share kernels, while 48 KB hold all pieces
ROOMS = {False: OWN_ROOMS, True: OWN_ROOMS[:3]}
# warps of a program, by the bytes of a piece at most
PIECE_WARPS = ((16 << 10, 4), (46 << 10, 8))
FITTING = (4, 3, 2)  # programs on a multiprocessor that leave room for larger pieces
OWN_BYTES = 48 << 10  # of shared memory that a kernel declares
PLANE_CHUNKS = (1, 2, *CHUNKS[1:])  # two columns are common
# columns of a thread that cost nothing but their instructions; so many more cost as much as a copy, because fewer
# programs fit on a multiprocessor
HELD_COLS, COLS_OF_COPY = 19, 150
GRADIENT_REGISTERS = 80  # of a thread with up to HELD_COLS columns
MOST_COST = 1.5  # of a large plane: beyond, it waits for banks of shared memory
LEAST_GAIN = 0.97  # the cost with fewer warps over that with more, at most
# when tiles of positions are slower than pieces: `faster_as_planes`
LONG_RUN = 512  # positions from which tiles are skewed
WIDEST_TILE = 512  # positions: a thread holds whole columns
# bytes of a piece of such planes of 16 bits, at most; and below LONGER_RUN
LONG_BYTES, LONGER_BYTES, LONGER_RUN = 23 << 10, 46 << 10, 1024
FEW_BYTES = 1280  # of a program
# gradients on Hopper are pieces where tiles write at most so many bytes of a plane at a time, by the bytes of an
# element. 16 bits: fewer where tiles have few chunks, and where runs start at vectors
SHORT_RUN, SHORT_RUN_FEW, SHORT_RUN_CHUNKS, SHORT_RUN_WHOLE = {2: 40, 4: 28}, 28, 3, 16
FILLED_COLS, MOST_FILLED = 16, 1.1  # columns, and positions with those that fill up tiles over those without
# softmax of small 16-bit planes of whole sectors: columns, at least, and positions, at most. Then bytes where tiles are
# partly empty; bytes and columns where they are filled; and bytes of 16 positions
FEWEST_SMALL, MOST_SMALL = 9, 256
EMPTY_BYTES, FILLED_BYTES, FILLED_MOST, SIXTEEN_BYTES = 16 << 10, 8 << 10, 40, 4 << 10
WIDE_TILE, LEAST_ACCESS = 256, 4  # bytes of a tile along `inner`, and of an access
# gradients of tiles that are empty by a third, of so many positions
HALF_EMPTY_ROWS, MOST_EMPTY = 32, 1.5
# of planes whose columns are read twice in place of tiles: bytes of a run, at least; bytes, at most
LEAST_RUN, MOST_BYTES = 34, 712 << 10


def faster_as_planes(problem: SpatialProblem, device: Device, tiles: Plan) -> Plan | None:
    """The plan of pieces where it is faster than `tiles`, the plan of tiles of positions; else None.

    It is where a program of tiles has few bytes or short runs, where columns are read twice, or where
    `_tiles_are_slow`.
    """
    # a float32 softmax is faster in tiles that overlap
    if _overlaps(tiles) and problem.itemsize == 4 and problem.vec < problem.full_vec and not problem.backward:
        return None
    few_bytes = tiles.outers * problem.plane_bytes < FEW_BYTES or _has_short_runs(problem, device, tiles)
    twice = tiles.regime == "spatial_two_pass"
    if not (few_bytes or twice or _tiles_are_slow(problem, device, tiles)):
        return None
    return planes_plan(problem, device)


def are_slower_than_parts(problem: SpatialProblem, device: Device, tiles: Plan) -> bool:
    """Whether a softmax's tiles are slower than columns that are read twice, where no piece is faster than both.

    They are where `_tiles_are_slow`, for large planes whose runs are no vectors.
    """
    overlapping = _overlaps(tiles) and problem.itemsize == 4
    runs = LEAST_RUN <= problem.inner * problem.itemsize and problem.plane_bytes <= MOST_BYTES
    large = device.adds_shared_memory and may_be_pieces(problem, device) and not problem.backward and not overlapping
    return large and runs and problem.vec < problem.full_vec and _tiles_are_slow(problem, device, tiles)


def _overlaps(tiles: Plan) -> bool:
    return tiles.overlap > 0 and not tiles.skewed


def _has_short_runs(problem: SpatialProblem, device: Device, tiles: Plan) -> bool:
    """Whether a gradient's tiles write so few bytes of a plane at a time that sectors are written in parts."""
    run, most = tiles.vectors_per_chunk * problem.inner * problem.itemsize, SHORT_RUN[problem.itemsize]
    if problem.itemsize == 2 and problem.vec == problem.full_vec:
        most = SHORT_RUN_WHOLE
    elif tiles.chunks <= SHORT_RUN_CHUNKS:
        most = min(most, SHORT_RUN_FEW)
    return problem.backward and device.adds_shared_memory and run <= most


def _tiles_are_slow(problem: SpatialProblem, device: Device, tiles: Plan) -> bool:
    """Whether tiles of positions of which each is read once are slower than planes that one program moves.

    Runs that do not start at vectors: a softmax of runs below LONG_RUN, but no large plane whose tiles are wider than
    WIDE_TILE, and a 16-bit one of longer runs, more than 2 columns and small planes; gradients of runs below LONG_RUN
    whose tiles are narrow, or are read in accesses below LEAST_ACCESS, or just of it and half empty. Runs at vectors: a
    softmax of runs below LONG_RUN that fill up their tiles, and of few columns (on Hopper not of two that have the
    widest tile), or in halves of sectors; there also where tiles do not overlap. In whole sectors also small 16-bit
    planes on Hopper (`_is_small`).
    """
    inner, itemsize, short = problem.inner, problem.itemsize, problem.inner < LONG_RUN
    filled = tiles.filled_up(problem.inner)
    if problem.vec == problem.full_vec:
        halves = not problem.whole_sectors
        two = problem.n_cols == 2 and tiles.rows == WIDEST_TILE and device.adds_shared_memory
        empty = filled > MOST_FILLED and (halves or problem.n_cols <= FILLED_COLS) and not two
        small = not halves and device.adds_shared_memory and _is_small(problem, filled)
        return short and not problem.backward and (empty or small or (halves and not tiles.overlap))
    if problem.backward:
        access = problem.vec * itemsize
        wide = tiles.rows * itemsize >= min(inner * itemsize, WIDE_TILE) and access >= LEAST_ACCESS
        narrow = HALF_EMPTY_ROWS <= tiles.rows < WIDE_TILE // itemsize
        half_empty = access == LEAST_ACCESS and narrow and filled >= MOST_EMPTY
        return short and (half_empty or not wide)
    if short:  # of a large plane wide tiles are about as fast, and faster with few elements
        return problem.plane_bytes <= ROOMS[False][-1] or tiles.rows * itemsize <= WIDE_TILE
    most = LONGER_BYTES if inner < LONGER_RUN else LONG_BYTES
    return itemsize == 2 and problem.n_cols > 2 and problem.plane_bytes <= most


def _is_small(problem: SpatialProblem, filled: float) -> bool:
    """Whether pieces are faster than tiles for 16-bit planes of so few bytes: fewer bytes where tiles are filled."""
    if problem.itemsize != 2 or problem.n_cols < FEWEST_SMALL or problem.inner > MOST_SMALL:
        return False
    if filled > MOST_FILLED:
        return problem.plane_bytes <= EMPTY_BYTES
    few = problem.n_cols <= FILLED_MOST and problem.plane_bytes <= FILLED_BYTES
    return few or (problem.inner == 16 and problem.plane_bytes <= SIXTEEN_BYTES)


def planes_plan(problem: SpatialProblem, device: Device) -> Plan | None:
    """The plan of planes that are read as pieces of memory; None where they cannot.

    >>> from .types import DEVICES
    >>> planes = SpatialProblem(35, 31, "bfloat16", 1, packed=True)
    >>> planes_plan(planes, DEVICES["sm_90"]).outers
    4
    """
    if not may_be_pieces(problem, device):
        return None
    small = problem.plane_bytes <= ROOMS[problem.backward][-1]
    plan = _small_planes(problem, device) if small else None
    if plan is None and device.adds_shared_memory:
        several, one = (None if small else _large_plane(problem, device, fitting) for fitting in (FITTING, (1,)))
        plan = several or one
    return plan


def may_be_pieces(problem: SpatialProblem, device: Device) -> bool:
    """Whether planes may be read as runs of memory."""
    empty_or_rows = problem.n_cols <= 1 or problem.inner < 1
    return problem.packed and not empty_or_rows and not problem.batch_invariant and device.warp_size == 32


class Lanes(NamedTuple):
    """How the columns of a position are shared, and what it costs: the time over that of a copy."""

    lanes: int
    chunks: int
    full: int  # chunks that all such widths fill
    cost: float


def _small_planes(problem: SpatialProblem, device: Device) -> Plan | None:
    """The plan of one plane or several in a program's own 48 KB; None for too many columns."""
    plane = problem.plane_bytes
    most = max(1, PIECE_BYTES[problem.backward] // plane)
    best: tuple[int, int, Lanes] | None = None
    for outers in range(max(1, most // 2), most + 1, max(1, most // 16)):
        warps = next(warps for n_bytes, warps in PIECE_WARPS if outers * plane <= n_bytes)
        found = _lanes(problem, problem.n_cols, outers, warps)
        if found is not None and (best is None or found.cost < 0.99 * best[2].cost):
            best = outers, warps, found
    if best is None:
        return None
    outers, warps, found = best
    return small_planes_plan(problem, device, outers, warps, found)


def small_planes_plan(problem: SpatialProblem, device: Device, outers: int, warps: int, found: Lanes) -> Plan:
    """The plan of so many planes in a program of so many warps, whose columns lanes share as `found` says."""
    room = next(n_bytes for n_bytes in ROOMS[problem.backward] if outers * problem.plane_bytes <= n_bytes)
    # a gradient's places would take more registers, and fewer programs would fit
    cap = GRADIENT_REGISTERS if problem.backward and found.chunks <= HELD_COLS else None
    return _plan(problem, device, outers, found, warps, room, 0, cap)


def _large_plane(problem: SpatialProblem, device: Device, fitting: tuple[int, ...]) -> Plan | None:
    """The plan of one plane in shared memory that the launch adds; None where so many programs do not fit."""
    room = next((room for room in _rooms(problem, fitting) if problem.plane_bytes <= room.n_bytes), None)
    if room is None:
        return None
    # few programs need more warps each, but not idle ones
    best: tuple[int, Lanes] | None = None
    for warps in (8,) if room.fitting > 2 else (16, 8):
        found = _lanes(problem, problem.n_cols, 1, warps)
        if found is not None and (best is None or found.cost < LEAST_GAIN * best[1].cost):
            best = warps, found
    if best is None or best[1].cost > MOST_COST:
        return None
    warps, found = best
    return _plan(problem, device, 1, found, warps, room.n_bytes, room.dynamic, _cap(room.fitting, warps))


class _Room(NamedTuple):
    n_bytes: int  # of a tensor's piece, at most
    fitting: int  # programs on a multiprocessor
    dynamic: int  # bytes of shared memory that the launch adds


def _rooms(problem: SpatialProblem, fitting: tuple[int, ...]) -> Iterator[_Room]:
    """Rooms for a tensor's piece where so many programs are to fit on a multiprocessor."""
    tensors, of_device = 1 + problem.backward, MULTIPROCESSORS["sm_90"]
    for programs in fitting:
        n_bytes = of_device.shared // programs - of_device.shared_reserved
        adds = n_bytes > OWN_BYTES
        room = ((n_bytes - adds * ALIGN_BYTES) // tensors - EDGE_BYTES) // 512 * 512
        yield _Room(room, programs, adds * tensors * (room + EDGE_BYTES))


def _cap(fitting: int, warps: int) -> int | None:
    """The registers of a thread with which so many programs fit; None where a thread cannot have more."""
    cap = Device.registers // (fitting * warps * 32) // 8 * 8
    return cap if cap < 255 else None


def _lanes(problem: SpatialProblem, n_cols: int, outers: int, warps: int) -> Lanes | None:
    """The least costly lanes for n_cols columns of `outers` planes; None for too many columns."""
    best: Lanes | None = None
    for found in all_lanes(problem, n_cols, outers, warps):
        if best is None or found.cost < 0.99 * best.cost:
            best = found
    return best


def all_lanes(problem: SpatialProblem, n_cols: int, outers: int, warps: int) -> Iterator[Lanes]:
    """The ways to share n_cols columns of `outers` planes that registers hold, fewest lanes first."""
    kind, itemsize = BACKWARD if problem.backward else FORWARD, problem.itemsize
    period = 4 * BANKS // itemsize  # of places that share a bank
    for lanes in (1, 2, 4, 8, 16, 32):
        if n_cols > CHUNKS[-1] * lanes:
            continue
        chunks, full = rounded_chunks(-(-n_cols // lanes), PLANE_CHUNKS)
        if chunks > MOST_ELEMENTS[kind]:
            continue
        threads = outers * problem.inner * lanes
        idle = -(-threads // (32 * warps)) * 32 * warps / threads
        if outers > 1 and problem.inner < 32 * SAMPLED_WARPS:  # a warp has positions of several planes
            waves = plane_wavefronts(problem.inner, problem.n_cols * problem.inner, lanes, itemsize)
        else:
            waves = wavefronts(1, lanes, 1, itemsize, problem.inner % period + period)
        cost = over_copy(n_cols, itemsize, kind, lanes, chunks, chunks, waves, WORK[kind].of_thread, idle)
        yield Lanes(lanes, chunks, full, cost + max(0, chunks - HELD_COLS) / COLS_OF_COPY)


def _plan(
    problem: SpatialProblem, device: Device, outers: int, found: Lanes, warps: int, room: int, dynamic: int,
    cap: int | None,
) -> Plan:  # fmt: skip
    threads = f"{found.lanes} thread{'s' * (found.lanes > 1)}"
    why = f"{outers} plane(s) of {problem.n_cols} x {problem.inner}, moved as one piece, each position in {threads}"
    return Plan(
        "spatial", warps * device.warp_size // found.lanes, 1, 1, found.lanes, 1, found.chunks, found.full, False,
        False, warps, cap, why, outers=outers, gathered=True, piece=room // problem.itemsize, dynamic_bytes=dynamic,
    )  # fmt: skip
