"""Plans of softmax that transposes on its way: on one side a row's columns are neighbors in memory, on the other rows.

What adds up a row, the lanes and chunks, follows from its columns and the address of the side that is packed alone, and
in 16 bits for an odd number of columns from where the row starts. How many rows a program takes and how it moves them
follows from the other side's alignment, too, which changes no bits. docs/measurements/thresholds.md has the figures
behind the thresholds.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from .piece_costs import (
    ALIGN_BYTES,
    BANKS,
    EDGE_BYTES,
    FORWARD,
    MOST_ELEMENTS,
    OWN_ROOMS,
    WORK,
    over_copy,
    rounded_chunks,
    wavefronts,
)
from .types import ITEMSIZE, MULTIPROCESSORS, Device, Plan, power_of_two

# programs on a multiprocessor, at least, whose rooms launches add
PROGRAMS = (4, 3)
SECTOR = 32  # bytes of a column that a program moves, at least
MOST_ROWS = 2048
# bytes of a piece, about: of rows in one thread, of rows that are read by elements, and of others
NARROW_BYTES, ELEMENT_BYTES, VECTOR_BYTES = 12 << 10, 22 << 10, 34 << 10
LOOP_ELEMENTS = 16  # of a thread in a step, where a row is too long for registers
# rows of a program, where they are too long for registers, and their columns, at most
LONG_ROWS, MOST_COLS = 8, 2400
# bytes of neighbors in memory, from which on they are worth a read of their own
LEAST_BYTES = 64
# columns that a strided kernel's tiles have exactly, by the bytes of an element: their rows lie in the same banks here.
# Of 16 bits by vectors one of them
EXACT_COLS, EXACT_BY_VECTORS = {2: range(16, 257), 4: range(4, 257)}, 32
# columns that are read by elements, of which most lanes would be idle
IDLE_COLS = 5
# bytes of a piece that is written to columns, about, where they start in the middle of a sector: longer runs have fewer
# sectors in part. Its programs have 16 warps, as each element is an instruction
SPLIT_BYTES, SPLIT_WARPS = 46 << 10, 16
# of rows in one thread, wherever columns start
NARROW_SPLIT_BYTES = 24 << 10
# columns of such rows, at most, where they start in the middle of a vector, too
MOST_SPLIT = {2: 1024, 4: 416}
# the fewest of these columns that a strided kernel's tiles have exactly, and write faster, up to a step of it: where
# columns start in the middle of a vector, and at whole ones
EXACT_SPLIT, EXACT_WHOLE, EXACT_MOST = {2: 64, 4: 128}, 256, 512


class TransposedRows(NamedTuple):
    """(outer, n_cols, inner) with contiguous inner, and packed (outer, inner, n_cols), as a plan sees them.

    neighbors: rows that are neighbors in memory; of a batch: elements from a column to the next one. vec: of them each
    access may take, a power of two, at most 16 bytes. starts: bytes at whose multiples columns start, a power of two up
    to a sector's. phase: elements from a multiple of 16 bytes to the packed side. into_rows: whether it is the output.
    """

    n_cols: int
    neighbors: int
    dtype: str
    vec: int
    starts: int
    phase: int = 0
    into_rows: bool = True

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def by_vectors(self) -> bool:
        """Whether columns start at multiples of two elements, at least."""
        return self.starts > self.itemsize

    @property
    def even(self) -> bool:
        """Whether each packed row starts at a multiple of two elements."""
        return self.n_cols % 2 == 0 and self.phase % 2 == 0

    @property
    def width(self) -> int:
        """Elements of an access to a row in shared memory, 8 bytes at most."""
        if self.itemsize == 4:
            return 2 if self.even else 1
        return 4 if self.n_cols % 4 == 0 and self.phase % 4 == 0 else 2

    @property
    def odd(self) -> bool:
        """Whether a row's words leave out one of its elements."""
        return self.itemsize == 2 and not self.even


class Reading(NamedTuple):
    """How threads move the side that is not packed: compile-time arguments of the kernels."""

    span: int  # lanes along the rows; the others of a warp have other columns
    across: int  # warps along the rows
    pair: int  # columns of a word
    groups: int  # accesses of a thread that wait together


@cache
def store_wavefronts(n_cols: int, vec: int, span: int, pair: int, itemsize: int) -> int:
    """Wavefronts of a warp's access to shared memory where it transposes: the words in its fullest bank.

    >>> store_wavefronts(64, 8, 8, 2, 2), store_wavefronts(100, 8, 8, 2, 2), store_wavefronts(333, 8, 4, 1, 2)
    (8, 4, 1)
    """
    total, halves = 0, 2 if pair * itemsize == 8 else 1  # accesses of 8 bytes go by half warps
    for half in range(halves):
        words: dict[int, set[int]] = {}
        for lane in range(half * 32 // halves, (half + 1) * 32 // halves):
            start = (lane % span * vec * n_cols + lane // span * pair) * itemsize
            for word in range(start // 4, (start + pair * itemsize - 1) // 4 + 1):
                words.setdefault(word % BANKS, set()).add(word)
        total += max(map(len, words.values()))
    return total


def reading(of: TransposedRows, rows: int, num_warps: int) -> Reading:
    """How a program of so many rows and warps moves them."""
    pair = 2 if of.even else 1
    vector_bytes = of.vec * of.itemsize

    def cost(span: int) -> float:  # instructions and wavefronts, by the lanes that have columns, and sectors
        cols = 32 // span * pair
        busy = min(cols, of.n_cols) / cols
        waves = store_wavefronts(of.n_cols, of.vec, span, pair, of.itemsize)
        return (1 + waves) / busy + 16 / (span * vector_bytes)

    spans = [s for s in (1, 2, 4, 8, 16, 32) if s * of.vec <= rows and s * vector_bytes >= SECTOR]
    span = min(spans or [min(32, rows // of.vec)], key=cost)
    vectors, cols = rows // (span * of.vec), 32 // span * pair
    along = 1  # warps along the columns, while there are columns for them
    while along < num_warps and along * cols < of.n_cols:
        along *= 2
    across = min(num_warps // along, vectors)
    while vectors // across > 4 and across < num_warps:
        across *= 2
    words = max(1, vector_bytes // 4) * pair * (vectors // across)
    loads, step = pair * (vectors // across), num_warps // across * cols
    groups = 1
    while 2 * groups * words <= 32 and 2 * groups * loads <= 16 and groups * step < of.n_cols:
        groups *= 2
    return Reading(span, across, pair, groups)


def room_of(n_bytes: int, device: Device) -> tuple[int, int] | None:
    """(bytes of a piece, at most, bytes that the launch adds) for a piece of n_bytes; None where there is no room."""
    for own in OWN_ROOMS:
        if n_bytes <= own:
            return own, 0
    if device.adds_shared_memory:
        hopper = MULTIPROCESSORS["sm_90"]
        for programs in PROGRAMS:
            room = (hopper.shared // programs - hopper.shared_reserved - ALIGN_BYTES - EDGE_BYTES) // 512 * 512
            if n_bytes <= room:
                return room, room + EDGE_BYTES
    return None


@cache
def lanes_of(n_cols: int, width: int, itemsize: int) -> tuple[int, bool]:
    """(lanes that share a row, whether it is too long for their registers): the least time by `piece_costs`.

    It picks the fastest of those that were timed.
    """
    times = {}
    for lanes in (1, 2, 4, 8, 16, 32):
        accesses = -(-n_cols // (lanes * width))
        if accesses * width > MOST_ELEMENTS[FORWARD] or (lanes > 1 and accesses * width < 4):
            continue
        chunks, _ = rounded_chunks(accesses)
        waves = wavefronts(n_cols, lanes, width, itemsize, width)
        elements = chunks * width
        if elements <= MOST_ELEMENTS[FORWARD]:
            of_thread = WORK[FORWARD].of_thread
            times[lanes] = over_copy(n_cols, itemsize, FORWARD, lanes, chunks, elements, waves, of_thread)
    return (min(times, key=lambda lanes: times[lanes]), False) if times else (32, True)


def plan_with(
    of: TransposedRows, device: Device, rows: int, lanes: int, num_warps: int, long: bool = False
) -> Plan | None:
    """The plan with these numbers; None where it has no room, or threads without rows."""
    room = room_of(rows * of.n_cols * of.itemsize, device)
    if room is None or rows * lanes % (num_warps * 32) or rows % of.vec:
        return None
    columns = of.n_cols - of.odd
    if long:
        chunks, full = LOOP_ELEMENTS // of.width, 0
    else:
        chunks, full = rounded_chunks(-(-columns // (lanes * of.width)))
    why = f"{rows} rows per program, transposed on their way through shared memory, each in {lanes} threads"
    return Plan(
        "transposed", rows, 1, 1, lanes, of.vec, chunks, full, False, long, num_warps, None, why, gathered=True,
        piece=room[0] // of.itemsize, dynamic_bytes=room[1],
    )  # fmt: skip


def transposed_plan(of: TransposedRows, device: Device) -> Plan | None:
    """The plan of such rows; None where another kernel is faster, or the device has no such kernel.

    >>> from .types import DEVICES
    >>> transposed_plan(TransposedRows(150, 4096, "bfloat16", 8, 32), DEVICES["sm_90"]).rows
    64
    >>> transposed_plan(TransposedRows(3000, 4096, "bfloat16", 8, 32), DEVICES["sm_90"])
    """
    if device.kind not in ("cuda", "interpreter") or not is_faster(of):
        return None
    lanes, long = lanes_of(of.n_cols, of.width, of.itemsize)
    rows_of = lambda most: power_of_two(most // (of.n_cols * of.itemsize) + 1) // 2  # noqa: E731
    least = SECTOR // of.itemsize
    if of.into_rows or (of.starts == SECTOR and lanes > 1):
        by_elements = of.vec == 1
        most = NARROW_BYTES if lanes == 1 else ELEMENT_BYTES if by_elements else VECTOR_BYTES
        rows = (LONG_ROWS if of.into_rows else least) if long else max(rows_of(most), least)
        warps = 4 if lanes == 1 or (by_elements and of.itemsize == 2 and not long) else 8
    else:
        rows = max(rows_of(NARROW_SPLIT_BYTES if lanes == 1 else SPLIT_BYTES), least)
        warps = SPLIT_WARPS // 2 if lanes == 1 else SPLIT_WARPS
    rows = min(rows, MOST_ROWS)
    return plan_with(of, device, rows, lanes, min(warps, rows * lanes // 32), long)


def is_faster(of: TransposedRows) -> bool:
    """Whether the kernel takes less time than a strided one, and than a copy first, where it has room for a row."""
    if not 2 <= of.n_cols <= MOST_COLS or of.neighbors * of.itemsize < LEAST_BYTES:
        return False
    if of.odd and of.n_cols % 2 == 0:  # both ends of each row are elements alone
        return False
    if not of.into_rows:
        if of.starts == SECTOR:
            return True
        whole = of.starts == SECTOR // 2
        fewest = EXACT_WHOLE if whole else EXACT_SPLIT[of.itemsize]
        exact = of.n_cols == power_of_two(of.n_cols) and fewest <= of.n_cols <= EXACT_MOST
        strided = exact and not (of.itemsize == 2 and of.by_vectors)
        return not strided and (whole or of.n_cols <= MOST_SPLIT[of.itemsize])
    if not of.by_vectors and of.n_cols <= IDLE_COLS:
        return False
    exact = of.n_cols in EXACT_COLS[of.itemsize] and of.n_cols == power_of_two(of.n_cols)
    return not exact or (of.itemsize == 2 and of.by_vectors and of.n_cols != EXACT_BY_VECTORS)
