"""Plans of narrow rows and of small planes, which a program moves as one piece (`kernels/common/gathered_rows`).

How many lanes of a warp share a row is a rule, not a table: the number that takes the least time, by a count of the
instructions and of the wavefronts of shared memory. The count follows from the width, because a row's stride decides
which banks its lanes meet.

H200, 2^26 elements, fraction of a copy (higher is better). 65 columns of bfloat16 have 3 wavefronts for an access of 2
lanes and 5 of 4 lanes: 0.90 and 0.64. In runs 2 lanes have 2: 1.04. 49 columns have 1 with 2 lanes and 2 with 4: 1.04
and 0.97. The weights of the count are about those that fit 159 such times (error: 4%) and 198 of masked rows (3%).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from .types import ITEMSIZE, Device, Plan, Problem, SpatialProblem

NUM_WARPS = 4
FORWARD, BACKWARD, MASKED, MASKED_BACKWARD = "forward", "backward", "masked", "masked backward"
# columns from which and up to which rows are moved as one piece, the latter by the bytes of an element: beyond, other
# kernels are as fast, and faster with few rows. One column with 16 rows for each thread took 3 times torch's time with
# few rows
FEWEST_COLS = 3
MOST_COLS = {
    FORWARD: {2: 128, 4: 64}, BACKWARD: {2: 80, 4: 0}, MASKED: {2: 116, 4: 64}, MASKED_BACKWARD: {2: 104, 4: 32},
}  # fmt: skip
# elements of a row that a thread holds, at most: they are float32 in its registers, two rows of them in a gradient
MOST_ELEMENTS = {FORWARD: 40, BACKWARD: 36, MASKED: 34, MASKED_BACKWARD: 36}
# elements of a thread below which it takes several rows, so that a program moves enough bytes
FEW_ELEMENTS = 8
# accesses of a thread are rounded up to these, so that widths share kernels. They come from a random search over such
# lists: by the count below, even numbers up to 40 save 0.4% of the time on the mean, and have 72 kernels in place of
# 46. No plan has more than 40
CHUNKS = (1, 3, 5, 9, 12, 15, 19, 25, 34, 40, 64, 128, 256)
BANKS, ISSUES = 32, 4  # of a multiprocessor: 4-byte banks, and instructions in a cycle


class Work(NamedTuple):
    """What a multiprocessor does for a row, besides the copy of its bytes."""

    accesses: float  # of shared memory for an element; a mask's element is read from the L1
    of_element: float  # instructions
    of_access: float
    of_row: float  # of each thread of a row
    of_thread: float


WORK = {
    FORWARD: Work(2, 5.4, 6.9, 80, 30),
    BACKWARD: Work(3, 14, 10.4, 50, 40),
    MASKED: Work(3, 6.1, 6.9, 130, 30),
    MASKED_BACKWARD: Work(3, 16, 10.4, 80, 40),
}
# bytes that a multiprocessor moves in a cycle at the speed of a copy, on an H200, where fewer cycles are left for each
# byte than on an H100
BYTES_A_CYCLE = 18.2
# times of work that overlaps, as a norm: limits that are near each other add up
NORM = 6
# elements of a thread that cost few rows, which wait for them, as much as a copy's time costs many rows
ELEMENTS_OF_COPY = 300
# of the copy's time that runs have to save: they are a kernel more to compile, and masks are read in more sectors at
# once. H200: 85 columns with an additive mask and runs of 8 lanes took 1.38 times a copy, where the count says 1.16
RUNS_COST = {FORWARD: 0.05, BACKWARD: 0.05, MASKED: 0.15, MASKED_BACKWARD: 0.05}
# columns of which the kernels that read rows take no longer than a copy; fewer take longer by their inverse. H200,
# bfloat16: 65 columns 0.67, 127 columns 0.98; gradients of 65 columns 0.86; an additive mask of 77 columns 0.59
COLS_OF_ROWS = {FORWARD: 96, BACKWARD: 76, MASKED: 140, MASKED_BACKWARD: 105}
# of the time of those kernels, at most: the count has such an error
MOST_OVER_ROWS = 1.07
# columns of rows that start at multiples of 16 bytes, at most, by the bytes of an element. The kernels that read rows
# give them lanes by powers of two, scores 8 lanes at least. H200, bfloat16: softmax of 72 columns 0.79, as a piece
# 1.04; of 64 columns 1.02 and 0.91. An additive mask of 16 columns 0.26 and 0.75, of 64 columns 0.92 and 0.74
ALIGNED_COLS = {
    FORWARD: {2: 120, 4: 60}, BACKWARD: {2: 0, 4: 0}, MASKED: {2: 80, 4: 28}, MASKED_BACKWARD: {2: 80, 4: 20},
}  # fmt: skip


def gathered_plan(problem: Problem, device: Device, scores: bool = False, masked: bool = False) -> Plan | None:
    """The plan of rows that are moved as one piece; None where another one takes them.

    scores: of masked softmax. masked: they have a mask, which the kernel reads.

    >>> from .types import DEVICES
    >>> gathered_plan(Problem(49, "bfloat16", "bfloat16", vec=1, packed=True), DEVICES["sm_90"]).vectors_per_chunk
    2
    """
    if problem.backward:
        kind = MASKED_BACKWARD if scores else BACKWARD
    else:
        kind = MASKED if masked else FORWARD
    most = MOST_COLS[kind][problem.itemsize]
    if problem.vec == problem.full_vec:
        most = _most_aligned(problem, kind, scores)
    narrow = problem.packed and FEWEST_COLS <= problem.n_cols <= most
    if not narrow or problem.dtype != problem.out_dtype or device.warp_size != 32:
        return None
    vec = min(problem.vec, problem.full_vec // 2)  # a thread's access has at most 8 bytes
    found = _lanes_and_runs(problem.n_cols, vec, ITEMSIZE[problem.dtype], kind, problem.vec == problem.full_vec)
    if found is None:
        return None
    lanes, runs = found
    chunks, full = _rounded(-(-problem.n_cols // (lanes * vec)))
    if runs:  # the last lane's run is short
        full = max(0, full * lanes + 1 - (lanes - 1) * chunks)
    rows = NUM_WARPS * device.warp_size // lanes * _rows_a_thread(lanes, chunks * vec)
    why = f"{rows} rows per program, moved as one piece, each in {lanes} thread{'s' * (lanes > 1)}"
    return Plan(
        "warp", rows, 1, 1, lanes, vec, chunks, full, False, False, NUM_WARPS, None, why, gathered=True,
        runs=runs,
    )  # fmt: skip


def _most_aligned(problem: Problem, kind: str, scores: bool) -> int:
    """The most columns of rows that start at multiples of 16 bytes; 0 where their vectors fill the lanes of others."""
    vectors = problem.n_cols // problem.full_vec
    fills = vectors % 8 == 0 if scores else vectors & (vectors - 1) == 0
    return 0 if fills else ALIGNED_COLS[MASKED if scores and kind == FORWARD else kind][problem.itemsize]


@cache
def _lanes_and_runs(n_cols: int, vec: int, itemsize: int, kind: str, aligned: bool) -> tuple[int, bool] | None:
    """(lanes of a row, whether each holds a run of it); None where the kernels that read rows are faster."""
    times, costs = {}, {}
    for lanes in (16, 8, 4, 2, 1):  # of 128 threads, so that a program's rows are a multiple of a vector's elements
        elements = _rounded(-(-n_cols // (lanes * vec)))[0] * vec
        if elements > MOST_ELEMENTS[kind] or (lanes > 1 and elements < vec + 2):
            continue
        for runs in (False, True)[: 1 + (lanes > 1)]:
            times[lanes, runs] = time_over_copy(n_cols, vec, itemsize, kind, lanes, runs)
            costs[lanes, runs] = times[lanes, runs] + elements / ELEMENTS_OF_COPY + RUNS_COST[kind] * runs
    best = min(costs, key=lambda found: costs[found]) if costs else None
    by_rows = max(1.0, COLS_OF_ROWS[kind] * 2 / (n_cols * itemsize))
    if best is not None and not aligned and times[best] > MOST_OVER_ROWS * by_rows:
        return None
    return best


def time_over_copy(n_cols: int, vec: int, itemsize: int, kind: str, lanes: int, runs: bool) -> float:
    """The time of rows that `lanes` threads share, each with a run of it or not, over that of their copy."""
    accesses, _ = _rounded(-(-n_cols // (lanes * vec)))
    elements = accesses * vec
    waves = wavefronts(n_cols, lanes, vec, itemsize, elements if runs else vec)
    of_thread = WORK[kind].of_thread / _rows_a_thread(lanes, elements)
    return _over_copy(n_cols, itemsize, kind, lanes, accesses, elements, waves, of_thread)


def _over_copy(
    n_cols: int, itemsize: int, kind: str, lanes: int, accesses: int, elements: int, waves: int, of_thread: float,
    idle: float = 1,
) -> float:  # fmt: skip
    """The time of n_cols numbers that `lanes` threads share over that of their copy.

    accesses, elements: of a thread. waves: wavefronts of an access. of_thread: a thread's instructions besides those of
    its elements. idle: threads over those that have elements.
    """
    work = WORK[kind]
    tensors = 3 if kind in (BACKWARD, MASKED_BACKWARD) else 2
    copy = tensors * n_cols * itemsize / BYTES_A_CYCLE
    instructions = work.of_element * elements + work.of_access * accesses + work.of_row + of_thread
    waves_of_row = work.accesses * accesses * waves * lanes / 32 + tensors * n_cols * itemsize / (4 * BANKS)
    times = (copy, idle * instructions * lanes / 32 / ISSUES, waves_of_row)
    return float(sum(t**NORM for t in times) ** (1 / NORM) / copy)


def _rounded(chunks: int) -> tuple[int, int]:
    """(chunks, rounded so that widths share kernels, and how many of them all these widths fill)

    >>> _rounded(2), _rounded(9), _rounded(13)
    ((3, 1), (9, 5), (15, 12))
    """
    at = next(i for i, most in enumerate(CHUNKS) if chunks <= most)
    return CHUNKS[at], CHUNKS[at - 1] if at else 0


def _rows_a_thread(lanes: int, elements: int) -> int:
    rows = 1
    while lanes == 1 and 2 * rows * elements <= FEW_ELEMENTS:
        rows *= 2
    return rows


@cache
def wavefronts(n_cols: int, lanes: int, vec: int, itemsize: int, step: int) -> int:
    """Cycles of shared memory for one access of a warp: the words in its fullest bank.

    lanes: of each row, `step` elements apart.

    >>> wavefronts(64, 1, 1, 4, 1), wavefronts(65, 1, 1, 4, 1), wavefronts(65, 4, 1, 2, 1), wavefronts(65, 4, 1, 2, 18)
    (32, 1, 5, 2)
    """
    total, halves = 0, 2 if vec * itemsize == 8 else 1  # accesses of 8 bytes go by half warps
    for half in range(halves):
        words: dict[int, set[int]] = {}
        for thread in range(half * 32 // halves, (half + 1) * 32 // halves):
            start = (thread // lanes * n_cols + thread % lanes * step) * itemsize
            for word in range(start // 4, (start + vec * itemsize - 1) // 4 + 1):
                words.setdefault(word % BANKS, set()).add(word)
        total += max(map(len, words.values()))
    return total


# --- planes (n_cols, inner) of a dimension that is not the last -------------------------------------------------------

# bytes of a tensor's piece at most, by `backward`: of several planes, and of one: a kernel has 48 KB of shared memory
PIECE_BYTES = {False: 16 << 10, True: 12 << 10}
PLANE_BYTES = {False: 46 << 10, True: 23 << 10}
# a program's room for a tensor's piece is one of these, so that shapes share kernels
ROOMS = (12 << 10, 16 << 10, 23 << 10, 32 << 10, 46 << 10)
# columns of a thread that cost nothing but their instructions; so many more cost as much as a copy, because fewer
# programs fit on a multiprocessor. H100, bfloat16: 296 columns of 13 positions, 40 for each thread 0.96, 19 0.99
HELD_COLS, COLS_OF_COPY = 19, 150
GRADIENT_REGISTERS = 80  # of a thread with up to HELD_COLS columns
# warps of a program, by the bytes of a piece at most
PIECE_WARPS = ((16 << 10, 4), (46 << 10, 8))
# when tiles of positions are slower than pieces: `faster_as_planes`. H100, fraction of a copy or an add as tiles and
# as pieces: 35 bfloat16 columns of 31 positions 0.62 and 1.00, 7 of 24 0.71 and 1.02; gradients of 31 columns of 70
# positions, bfloat16 (tiles of 128) 0.97 and 0.94, float32 (tiles of 32) 0.74 and 0.96
LONG_RUN = 512  # positions from which tiles are skewed
LONG_BYTES = 23 << 10  # of a piece of such planes, at most
FEW_BYTES = 1280  # of a program
FILLED_COLS, MOST_FILLED = 16, 1.1  # columns, and positions with those that fill up tiles over those without
WIDE_TILE, LEAST_ACCESS = 256, 4  # bytes of a tile along `inner`, and of an access


def faster_as_planes(problem: SpatialProblem, device: Device, tiles: Plan) -> Plan | None:
    """The plan of planes where it is faster than `tiles`, the plan of tiles of positions; else None.

    It is, where a program of tiles has few bytes, or columns are read twice. Else, where runs do not start at vectors:
    a softmax of runs below LONG_RUN, and a 16-bit one of longer runs, more than 2 columns and small planes; gradients
    of runs below LONG_RUN whose tiles are narrow, or are read in accesses below LEAST_ACCESS. Where runs start at
    vectors: a softmax of few columns and runs below LONG_RUN that fill up their tiles.
    """
    inner, itemsize = problem.inner, problem.itemsize
    plane, short = problem.n_cols * inner * itemsize, inner < LONG_RUN
    if problem.vec == problem.full_vec:
        filled_up = -(-inner // tiles.rows) * tiles.rows > MOST_FILLED * inner
        faster = filled_up and problem.n_cols <= FILLED_COLS and short and not problem.backward
    elif problem.backward:
        wide = tiles.rows * itemsize >= min(inner * itemsize, WIDE_TILE) and problem.vec * itemsize >= LEAST_ACCESS
        faster = short and not wide
    else:
        faster = short or (itemsize == 2 and problem.n_cols > 2 and plane <= LONG_BYTES)
    few_bytes = tiles.outers * plane < FEW_BYTES
    always = few_bytes or tiles.regime == "spatial_two_pass"
    return planes_plan(problem, device) if faster or always else None


def planes_plan(problem: SpatialProblem, device: Device) -> Plan | None:
    """The plan of planes that a program moves as one piece; None where it cannot.

    >>> from .types import DEVICES
    >>> planes = SpatialProblem(35, 31, "bfloat16", "bfloat16", 1, packed=True)
    >>> planes_plan(planes, DEVICES["sm_90"]).outers
    4
    """
    plane = problem.n_cols * problem.inner * problem.itemsize
    possible = problem.packed and problem.n_cols > 1 and plane <= PLANE_BYTES[problem.backward]
    if not possible or problem.batch_invariant or device.warp_size != 32:
        return None
    found = _planes_lanes_warps(problem.n_cols, problem.inner, problem.itemsize, problem.backward)
    if found is None:
        return None
    outers, lanes, warps = found
    chunks, full = _rounded(-(-problem.n_cols // lanes))
    room = next(n_bytes for n_bytes in ROOMS if outers * plane <= n_bytes)
    # a gradient's places would take more registers, and fewer programs would fit
    cap = GRADIENT_REGISTERS if problem.backward and chunks <= HELD_COLS else None
    threads = f"{lanes} thread{'s' * (lanes > 1)}"
    why = f"{outers} plane(s) of {problem.n_cols} x {problem.inner}, moved as one piece, each position in {threads}"
    return Plan(
        "spatial", warps * device.warp_size // lanes, 1, 1, lanes, 1, chunks, full, False, False, warps, cap, why,
        outers=outers, gathered=True, piece=room // problem.itemsize,
    )  # fmt: skip


def _planes_lanes_warps(n_cols: int, inner: int, itemsize: int, backward: bool) -> tuple[int, int, int] | None:
    """(planes of a piece, lanes of a position, warps of a program) of the least cost; None for too many columns."""
    kind, plane = BACKWARD if backward else FORWARD, n_cols * inner * itemsize
    period = 4 * BANKS // itemsize  # of places that share a bank
    best, least = None, float("inf")
    most = max(1, PIECE_BYTES[backward] // plane)
    for outers in range(max(1, most // 2), most + 1, max(1, most // 16)):
        warps = next(warps for most_bytes, warps in PIECE_WARPS if outers * plane <= most_bytes)
        for lanes in (1, 2, 4, 8, 16, 32):
            if n_cols > CHUNKS[-1] * lanes or (chunks := _rounded(-(-n_cols // lanes))[0]) > MOST_ELEMENTS[kind]:
                continue
            threads = outers * inner * lanes
            idle = -(-threads // (32 * warps)) * 32 * warps / threads
            waves = wavefronts(1, lanes, 1, itemsize, inner % period + period)
            time = _over_copy(n_cols, itemsize, kind, lanes, chunks, chunks, waves, WORK[kind].of_thread, idle)
            cost = time + max(0, chunks - HELD_COLS) / COLS_OF_COPY
            if cost < 0.99 * least:
                best, least = (outers, lanes, warps), cost
    return best
