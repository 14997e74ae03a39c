"""Plans of narrow rows, which a program moves as one piece (`kernels/common/gathered_rows`).

How many lanes of a warp share a row is a rule, not a table: the number that takes the least time, by the count of
`piece_costs`. Of losses a table has the numbers that kernels are compiled for. docs/measurements/thresholds.md has the
figures behind the thresholds.
"""

from __future__ import annotations

from functools import cache

from .piece_costs import (
    BACKWARD,
    CHUNKS,
    FORWARD,
    LOSS,
    MASKED,
    MASKED_BACKWARD,
    MOST_ELEMENTS,
    STATISTICS,
    STATISTICS_BACKWARD,
    WORK,
    over_copy,
    rounded_chunks,
    wavefronts,
)
from .types import ITEMSIZE, Device, Plan, Problem

NUM_WARPS = {32: 8}  # by the threads of a row; 4 of others. So a program's rows fill whole vectors
# accesses of a thread, at most, where a warp has one row: of a gradient of statistics that fewer threads do not hold
MOST_OF_WARP = 25
# columns from which and up to which rows are moved as one piece, the latter by the bytes of an element: beyond, other
# kernels are as fast, and faster with few rows
FEWEST_COLS = {LOSS: 2, STATISTICS: 2, STATISTICS_BACKWARD: 2}  # of the others 3
MOST_COLS = {
    FORWARD: {2: 128, 4: 64}, BACKWARD: {2: 80, 4: 0}, MASKED: {2: 116, 4: 64}, MASKED_BACKWARD: {2: 104, 4: 32},
    LOSS: {2: 384, 4: 400}, STATISTICS: {2: 330, 4: 96}, STATISTICS_BACKWARD: {2: 1024, 4: 544},
}  # fmt: skip
# elements of a thread below which it takes several rows, so that a program moves enough bytes
FEW_ELEMENTS = 8
# elements of a thread that cost few rows, which wait for them, as much as a copy's time costs many rows
ELEMENTS_OF_COPY = {LOSS: 100, STATISTICS: 1100, STATISTICS_BACKWARD: 400}  # of the others 300
# of the copy's time that runs have to save: they are a kernel more to compile, and masks are read in more sectors at
# once, which the count does not know. A loss with its gradient has no runs
RUNS_COST = {
    FORWARD: 0.05, BACKWARD: 0.05, MASKED: 0.15, MASKED_BACKWARD: 0.05, STATISTICS: 0.07, STATISTICS_BACKWARD: 0.09,
}  # fmt: skip
# accesses that a thread of a loss is compiled for, by bytes of an element, threads of a row, and elements of an access.
# Of 33 kernels, and of 27 in float32, they lose little time at any width. So at most 120 kernels serve losses of all
# widths
LOSS_ACCESSES: dict[int, dict[tuple[int, int], tuple[int, ...]]] = {
    2: {
        (1, 1): (3, 5, 11, 19, 27, 39), (1, 2): (1, 3, 5, 9, 19), (1, 4): (1, 3, 5, 8, 10), (2, 1): (28, 40),
        (2, 2): (17,), (2, 4): (8,), (4, 1): (27, 39), (4, 2): (12, 20), (4, 4): (6, 10), (8, 1): (27, 39),
        (8, 2): (17,), (8, 4): (10,), (16, 1): (24,), (16, 2): (12,), (16, 4): (8,),
    },
    4: {
        (1, 1): (3, 5, 7, 11, 21, 39), (1, 2): (1, 2, 4, 5, 8, 16), (2, 1): (18,), (2, 2): (5, 7), (4, 1): (14, 23),
        (4, 2): (5, 8), (8, 1): (16, 23), (8, 2): (6, 10), (16, 1): (17, 25), (16, 2): (8, 13),
    },
}  # fmt: skip
# columns of which the kernels that read rows take no longer than a copy; fewer take longer by their inverse
COLS_OF_ROWS = {FORWARD: 96, BACKWARD: 76, MASKED: 140, MASKED_BACKWARD: 105}
# of the time of those kernels, at most: the count has such an error
MOST_OVER_ROWS = 1.07
# columns of rows that start at multiples of 16 bytes, at most, by the bytes of an element. The kernels that read rows
# give them lanes by powers of two, scores 8 lanes at least
ALIGNED_COLS = {
    FORWARD: {2: 120, 4: 60}, BACKWARD: {2: 0, 4: 0}, MASKED: {2: 80, 4: 28}, MASKED_BACKWARD: {2: 80, 4: 20},
    LOSS: {2: 416, 4: 240}, STATISTICS: {2: 320, 4: 96}, STATISTICS_BACKWARD: {2: 1024, 4: 448},
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
    return _plan(problem, device, kind, most)


def gathered_logits(problem: Problem, device: Device, kind: str) -> Plan | None:
    """`gathered_plan` of logits, of a kind of LOSS, STATISTICS or STATISTICS_BACKWARD.

    >>> from .types import DEVICES
    >>> gathered_logits(Problem(19, "bfloat16", "bfloat16", vec=1, packed=True), DEVICES["sm_90"], LOSS).rows
    128
    """
    of = ALIGNED_COLS if problem.vec == problem.full_vec else MOST_COLS
    return _plan(problem, device, kind, of[kind][problem.itemsize])


def _plan(problem: Problem, device: Device, kind: str, most: int) -> Plan | None:
    narrow = problem.packed and FEWEST_COLS.get(kind, 3) <= problem.n_cols <= most
    if not narrow or problem.dtype != problem.out_dtype or device.warp_size != 32:
        return None
    vec = min(problem.vec, problem.full_vec // 2)  # a thread's access has at most 8 bytes
    found = _lanes_and_runs(problem.n_cols, vec, ITEMSIZE[problem.dtype], kind, problem.vec == problem.full_vec)
    if found is None:
        return None
    lanes, runs = found
    to = _accesses(kind, ITEMSIZE[problem.dtype], lanes, vec)
    chunks, full = rounded_chunks(-(-problem.n_cols // (lanes * vec)), to)
    if runs:  # the last lane's run is short
        full = max(0, full * lanes + 1 - (lanes - 1) * chunks)
    num_warps = NUM_WARPS.get(lanes, 4)
    rows = num_warps * device.warp_size // lanes * _rows_a_thread(lanes, chunks * vec)
    why = f"{rows} rows per program, moved as one piece, each in {lanes} thread{'s' * (lanes > 1)}"
    return Plan(
        "warp", rows, 1, 1, lanes, vec, chunks, full, False, False, num_warps, None, why, gathered=True,
        runs=runs,
    )  # fmt: skip


def _accesses(kind: str, itemsize: int, lanes: int, vec: int) -> tuple[int, ...]:
    """The accesses that a thread is compiled for, in rising number."""
    return LOSS_ACCESSES[itemsize].get((lanes, vec), ()) if kind == LOSS else CHUNKS


def _most_aligned(problem: Problem, kind: str, scores: bool) -> int:
    """The most columns of rows that start at multiples of 16 bytes; 0 where their vectors fill the lanes of others."""
    vectors = problem.n_cols // problem.full_vec
    fills = vectors % 8 == 0 if scores else vectors & (vectors - 1) == 0
    return 0 if fills else ALIGNED_COLS[MASKED if scores and kind == FORWARD else kind][problem.itemsize]


@cache
def _lanes_and_runs(n_cols: int, vec: int, itemsize: int, kind: str, aligned: bool) -> tuple[int, bool] | None:
    """(lanes of a row, whether each holds a run of it); None where the kernels that read rows are faster."""
    times, costs = {}, {}
    for lanes in (16, 8, 4, 2, 1):
        to, accesses = _accesses(kind, itemsize, lanes, vec), -(-n_cols // (lanes * vec))
        if not to or accesses > to[-1]:
            continue
        elements = rounded_chunks(accesses, to)[0] * vec
        if elements > MOST_ELEMENTS[kind] or (lanes > 1 and elements < vec + 2):
            continue
        for runs in (False, True) if lanes > 1 and kind in RUNS_COST else (False,):
            times[lanes, runs] = time_over_copy(n_cols, vec, itemsize, kind, lanes, runs)
            of_elements = elements / ELEMENTS_OF_COPY.get(kind, 300)
            costs[lanes, runs] = times[lanes, runs] + of_elements + (RUNS_COST[kind] if runs else 0.0)
    if not costs and kind == STATISTICS_BACKWARD:
        accesses = -(-n_cols // (32 * vec))
        return (32, False) if accesses <= MOST_OF_WARP else None
    best = min(costs, key=lambda found: costs[found]) if costs else None
    if best is not None and not aligned and kind in COLS_OF_ROWS:
        by_rows = max(1.0, COLS_OF_ROWS[kind] * 2 / (n_cols * itemsize))
        return best if times[best] <= MOST_OVER_ROWS * by_rows else None
    return best


def time_over_copy(n_cols: int, vec: int, itemsize: int, kind: str, lanes: int, runs: bool) -> float:
    """The time of rows that `lanes` threads share, each with a run of it or not, over that of their copy."""
    accesses, _ = rounded_chunks(-(-n_cols // (lanes * vec)), _accesses(kind, itemsize, lanes, vec))
    elements = accesses * vec
    waves = wavefronts(n_cols, lanes, vec, itemsize, elements if runs else vec)
    of_thread = WORK[kind].of_thread / _rows_a_thread(lanes, elements)
    return over_copy(n_cols, itemsize, kind, lanes, accesses, elements, waves, of_thread)


def _rows_a_thread(lanes: int, elements: int) -> int:
    rows = 1
    while lanes == 1 and 2 * rows * elements <= FEW_ELEMENTS:
        rows *= 2
    return rows
