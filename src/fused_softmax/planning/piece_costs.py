"""What a piece of memory costs that passes through shared memory: a count of instructions and of wavefronts.

The count follows from the width, because a row's stride decides which banks its lanes meet.

65 columns of bfloat16 have 3 wavefronts for an access of 2 lanes, 5 of 4 lanes, and 2 of 2 lanes in runs: the fewer,
the faster. The weights of the count are about those that fit measured times.

The sizes of a piece's room in shared memory are here, too: several plans share them.
docs/measurements/thresholds.md has the figures behind the thresholds.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import NamedTuple

FORWARD, BACKWARD, MASKED, MASKED_BACKWARD = "forward", "backward", "masked", "masked backward"
# of logits: a loss with its gradient, what is read once and written as a few numbers, and the gradient of that
LOSS, STATISTICS, STATISTICS_BACKWARD = "loss", "statistics", "statistics backward"
# elements of a row that a thread holds, at most: they are float32 in its registers, two rows of them in a gradient
MOST_ELEMENTS = {
    FORWARD: 40, BACKWARD: 36, MASKED: 34, MASKED_BACKWARD: 36, LOSS: 40, STATISTICS: 40, STATISTICS_BACKWARD: 40,
}  # fmt: skip
# tensors of a row's size that are moved
TENSORS = {
    FORWARD: 2, BACKWARD: 3, MASKED: 2, MASKED_BACKWARD: 3, LOSS: 2, STATISTICS: 1, STATISTICS_BACKWARD: 2,
}  # fmt: skip
# accesses of a thread are rounded up to these, so that widths share kernels. They come from a random search over such
# lists, by the count below. No plan has more than 40
CHUNKS = (1, 3, 5, 9, 12, 15, 19, 25, 34, 40, 64, 128, 256)
BANKS, ISSUES = 32, 4  # of a multiprocessor: 4-byte banks, and instructions in a cycle
SAMPLED_WARPS = 4  # of a program that holds several planes
# bytes of a piece, at most, that kernels declare; rooms of several sizes, so that widths share kernels
OWN_ROOMS = (12 << 10, 16 << 10, 23 << 10, 32 << 10, 46 << 10)
EDGE_BYTES, ALIGN_BYTES = 32, 128  # around a piece, and in front of all where the launch adds shared memory


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
    LOSS: Work(2, 17.7, 5.5, 170, 80),
    STATISTICS: Work(1, 6.2, 7.5, 90, 60),
    STATISTICS_BACKWARD: Work(2, 3, 4.3, 150, 120),
}
# bytes that a multiprocessor moves in a cycle at the speed of a copy, on an H200, where fewer cycles are left for each
# byte than on an H100
BYTES_A_CYCLE = 18.2
# times of work that overlaps, as a norm: limits that are near each other add up
NORM = 6


def over_copy(
    n_cols: int, itemsize: int, kind: str, lanes: int, accesses: int, elements: int, waves: float, of_thread: float,
    idle: float = 1,
) -> float:  # fmt: skip
    """The time of n_cols numbers that `lanes` threads share over that of their copy.

    accesses, elements: of a thread. waves: wavefronts of an access. of_thread: a thread's instructions besides those of
    its elements. idle: threads over those that have elements.
    """
    work = WORK[kind]
    tensors = TENSORS[kind]
    copy = tensors * n_cols * itemsize / BYTES_A_CYCLE
    instructions = work.of_element * elements + work.of_access * accesses + work.of_row + of_thread
    waves_of_row = work.accesses * accesses * waves * lanes / 32 + tensors * n_cols * itemsize / (4 * BANKS)
    times = (copy, idle * instructions * lanes / 32 / ISSUES, waves_of_row)
    return float(sum(t**NORM for t in times) ** (1 / NORM) / copy)


def rounded_chunks(chunks: int, to: tuple[int, ...] = CHUNKS) -> tuple[int, int]:
    """(chunks, rounded so that widths share kernels, and how many of them all these widths fill)

    >>> rounded_chunks(2), rounded_chunks(9), rounded_chunks(13)
    ((3, 1), (9, 5), (15, 12))
    """
    at = next(i for i, most in enumerate(to) if chunks <= most)
    return to[at], to[at - 1] if at else 0


@cache
def wavefronts(n_cols: int, lanes: int, vec: int, itemsize: int, step: int) -> int:
    """Cycles of shared memory for one access of a warp: the words in its fullest bank.

    lanes: of each row, `step` elements apart.

    >>> wavefronts(64, 1, 1, 4, 1), wavefronts(65, 1, 1, 4, 1), wavefronts(65, 4, 1, 2, 1), wavefronts(65, 4, 1, 2, 18)
    (32, 1, 5, 2)
    """
    total, halves = 0, 2 if vec * itemsize == 8 else 1  # accesses of 8 bytes go by half warps
    for half in range(halves):
        words = set[int]()
        for thread in range(half * 32 // halves, (half + 1) * 32 // halves):
            start = (thread // lanes * n_cols + thread % lanes * step) * itemsize
            words.update(range(start // 4, (start + vec * itemsize - 1) // 4 + 1))
        total += _fullest_bank(words)
    return total


def _fullest_bank(words: set[int]) -> int:
    """The most of these 4-byte words that lie in one bank."""
    return max(Counter(word % BANKS for word in words).values())


@cache
def plane_wavefronts(inner: int, plane: int, lanes: int, itemsize: int) -> float:
    """Cycles of shared memory for one access of a warp to planes of so many elements: the mean of SAMPLED_WARPS warps.

    `lanes` threads share a position of a plane, `inner` elements apart. Planes whose size is a multiple of all banks
    meet in the same ones.

    >>> plane_wavefronts(2, 128, 2, 2), plane_wavefronts(2, 128, 16, 2), plane_wavefronts(2, 132, 2, 2)
    (8.0, 1.0, 1.0)
    """
    total = 0
    for first in range(0, 32 * SAMPLED_WARPS, 32):
        words = set[int]()
        for thread in range(first, first + 32):
            index, position = divmod(thread // lanes, inner)
            words.add((index * plane + position + thread % lanes * inner) * itemsize // 4)
        total += _fullest_bank(words)
    return total / SAMPLED_WARPS
