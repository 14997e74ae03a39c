"""Plans of narrow rows that start anywhere, which a program moves as one piece (`kernels/common/gathered_rows`).

How many lanes of a warp share a row is a rule, not a table: the number that takes the fewest cycles of a
multiprocessor, by a count of the instructions and of the wavefronts of shared memory. The count follows from the width,
because a row's stride decides which banks its lanes meet.

H100, 2^26 elements, fraction of a copy (higher is better). 65 columns of bfloat16 have 3 wavefronts for an access of 2
lanes and 5 of 4 lanes: 1.01 and 0.80. 77 columns have 3, 2 and 1 with 2, 4 and 8 lanes: 1.01, 1.03 and 1.03.
"""

from __future__ import annotations

from functools import cache

from .types import ITEMSIZE, Device, Plan, Problem

# columns from which and up to which rows are moved as one piece, the latter by the bytes of an element, forward and in
# a gradient: beyond, other kernels are as fast, and faster with few rows. One column with 16 rows for each thread took
# 3 times torch's time with few rows
FEWEST_COLS = 3
MOST_COLS = {2: (128, 80), 4: (64, 0)}
NUM_WARPS = 4
# elements of a row that a thread holds, at most, forward and in a gradient: they are float32 in its registers, two rows
# of them in a gradient
MOST_ELEMENTS = (40, 24)
# elements of a thread below which it takes several rows, so that a program moves enough bytes
FEW_ELEMENTS = 8
# accesses of a thread are rounded up to these, so that widths share kernels
CHUNKS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 36, 40, 64, 128, 256)
BANKS, ISSUES = 32, 4  # of a multiprocessor: 4-byte banks, and instructions in a cycle
# instructions for an element, for an access of a thread, for a row of a thread and for a thread (compiled kernels)
INSTRUCTIONS = (8.5, 1.5, 90, 110)
# bytes that a multiprocessor moves in a cycle at the speed of a copy, on an H200, where fewer cycles are left for each
# byte than on an H100; and elements of a thread that cost few rows, which wait for them, as much as a copy's time costs
# many rows
BYTES_A_CYCLE, ELEMENTS_OF_COPY = 18.2, 48
# cycles over those of a copy, at most, where several lanes share a row. H100: 127 columns of bfloat16 with 16 lanes
# take 1.25 times as many, and run at 1.03 of a copy; the kernels that read rows run at 1.04
MOST_CYCLES = 1.25


def gathered_plan(problem: Problem, device: Device) -> Plan | None:
    """The plan of rows that are moved as one piece; None where another one takes them.

    >>> from .types import DEVICES
    >>> gathered_plan(Problem(77, "bfloat16", "bfloat16", vec=1, packed=True), DEVICES["sm_90"]).vectors_per_chunk
    4
    """
    narrow = (
        problem.packed
        and problem.vec < problem.full_vec
        and FEWEST_COLS <= problem.n_cols <= MOST_COLS[problem.itemsize][problem.backward]
    )
    if not narrow or problem.dtype != problem.out_dtype or device.warp_size != 32:
        return None
    found = _lanes(problem.n_cols, problem.vec, ITEMSIZE[problem.dtype], problem.backward)
    if found is None:
        return None
    lanes, rows_a_thread = found
    chunks, full = _rounded(-(-problem.n_cols // (lanes * problem.vec)))
    rows = NUM_WARPS * device.warp_size // lanes * rows_a_thread
    why = f"{rows} rows per program, moved as one piece, each in {lanes} thread{'s' * (lanes > 1)}"
    return Plan("warp", rows, 1, 1, lanes, problem.vec, chunks, full, False, False, NUM_WARPS, None, why, gathered=True)


@cache
def _lanes(n_cols: int, vec: int, itemsize: int, backward: bool) -> tuple[int, int] | None:
    """(lanes of a row, rows of a thread).

    None where one thread cannot hold a row, and every number of lanes takes more than MOST_CYCLES.
    """
    costs, tensors = {}, 3 if backward else 2
    copy = tensors * n_cols * itemsize / BYTES_A_CYCLE
    for lanes in (16, 8, 4, 2, 1):  # of 128 threads, so that a program's rows are a multiple of a vector's elements
        accesses, _ = _rounded(-(-n_cols // (lanes * vec)))
        elements = accesses * vec
        if elements > MOST_ELEMENTS[backward] or (lanes > 1 and elements < vec + 2):
            continue
        rows = _rows_a_thread(lanes, elements)
        instructions = INSTRUCTIONS[0] * elements + INSTRUCTIONS[1] * accesses + INSTRUCTIONS[2]
        instructions += INSTRUCTIONS[3] / rows
        waves = tensors * accesses * wavefronts(n_cols, lanes, vec, itemsize) * lanes / 32
        waves += tensors * n_cols * itemsize / (4 * BANKS)
        cycles = max(instructions * lanes / 32 / ISSUES, waves)
        if lanes == 1 or cycles <= MOST_CYCLES * copy:
            costs[lanes, rows] = cycles / copy + elements / ELEMENTS_OF_COPY
    return min(costs, key=lambda found: costs[found]) if costs else None


def _rounded(chunks: int) -> tuple[int, int]:
    """(chunks, rounded so that widths share kernels, and how many of them all these widths fill)

    >>> _rounded(2), _rounded(5), _rounded(13)
    ((2, 1), (6, 4), (16, 12))
    """
    at = next(i for i, most in enumerate(CHUNKS) if chunks <= most)
    return CHUNKS[at], CHUNKS[at - 1] if at else 0


def _rows_a_thread(lanes: int, elements: int) -> int:
    rows = 1
    while lanes == 1 and 2 * rows * elements <= FEW_ELEMENTS:
        rows *= 2
    return rows


@cache
def wavefronts(n_cols: int, lanes: int, vec: int, itemsize: int) -> int:
    """Cycles of shared memory for one access of a warp, `lanes` of them in each row: the words in its fullest bank.

    >>> wavefronts(64, 1, 1, 4), wavefronts(65, 1, 1, 4), wavefronts(65, 4, 1, 2)
    (32, 1, 5)
    """
    total, halves = 0, 2 if vec * itemsize == 8 else 1  # accesses of 8 bytes go by half warps
    for half in range(halves):
        words: dict[int, set[int]] = {}
        for thread in range(half * 32 // halves, (half + 1) * 32 // halves):
            start = (thread // lanes * n_cols + thread % lanes * vec) * itemsize
            for word in range(start // 4, (start + vec * itemsize - 1) // 4 + 1):
                words.setdefault(word % BANKS, set()).add(word)
        total += max(map(len, words.values()))
    return total
