"""Tiles of many columns that are read by 4 or 8 bytes, and that overlap where columns start within a sector of memory.

A thread that holds few positions keeps few maxima and sums, and has registers for more columns. And a sector that two
tiles write in part costs more than the positions that overlapping tiles read twice (`kernels.common.spatial_tiles`).
Where columns start at sectors, such tiles do not overlap. One rule says which tile RANGES of columns have: the widest
one, on as few CTAs as hold the columns in registers and shared memory.
"""

from __future__ import annotations

from typing import NamedTuple

from .spatial_tables import FILLED, SpatialConfig
from .types import SECTOR_BYTES, Device, SpatialProblem, tiles_of

NUM_WARPS, WIDEST_BYTES = 4, 8
FEW_TILES = 4  # from so many on, a last one that is partly empty costs little


class Held(NamedTuple):
    """Where a thread has up to `words` of 4 bytes: those that stay in registers, and the cap on all registers."""

    words: int
    held: int
    max_registers: int


# by `backward`. H100, bfloat16 softmax, fraction of a copy with 54, 72 and all words in registers: 1,250 columns of
# 53,604 positions (80 words) 0.930, 0.936 and 0.911; 2,500 (80) 0.911, 0.897, 0.887; 2,400 (76) 0.915, 0.905, 0.883
HELD = {
    False: (Held(84, 54, 96), Held(114, 72, 128), Held(136, 108, 168)),
    True: (Held(72, 72, 112), Held(90, 90, 128), Held(144, 126, 168)),
}


class Range(NamedTuple):
    """From `least` to `most` columns: the words of a thread, at most. CTAs: by positions of a tile, best first.

    In the narrowest tiles on the most CTAs a thread has up to as many words as the last of HELD says.
    """

    least: int
    most: int
    words: int
    most_ctas: dict[int, int]


# By op, bytes of an element, and the bytes at whose multiples columns start. H200, time of the plan before over that of
# this one, random shapes of 1.2e7 to 6.7e7 elements, mean and worst: 16-bit softmax of columns that start at sectors,
# 16 shapes, 1.04 and 1.00; at halves of them, 36 shapes, 1.05 and 0.92; quarters, 29 shapes, 1.14 and 0.91; eighths, 4
# shapes, 1.06 and 0.98. Of fewer columns (110 of 9,556 positions, 181 of 50,100) 0.90 to 0.95. Gradients in halves of
# sectors 0.99; in quarters, of fewer columns (1,217 of 2,572, 2,414 of 4,700) 0.83 to 1.09, of log_softmax (1,811 of
# 356, 2,266 of 22,444) 1.18 to 1.24. Accesses of 4 bytes have fewer words, because a kernel of 114 chunks takes 33 s to
# compile, one of 57 takes 7
WIDE, NARROW = {128: 8, 64: 16}, {64: 16}
RANGES = {
    ("softmax", 2, 32): Range(229, 8704, 114, WIDE),
    ("softmax", 2, 16): Range(229, 8704, 114, WIDE),
    ("softmax", 2, 8): Range(229, 8704, 114, WIDE),
    ("softmax", 2, 4): Range(305, 4352, 64, WIDE),
    ("softmax", 4, 8): Range(1409, 4352, 60, NARROW),
    ("gradient", 2, 8): Range(2689, 4608, 128, NARROW),
    ("log gradient", 2, 8): Range(1153, 4608, 128, {128: 16, 64: 16}),
}
# up to FEW positions have these instead. H200, bfloat16, whole sectors, fraction of a copy (higher is better): softmax
# of 642 columns of 368 positions 0.88 with the tables' plan and 0.74 with this one, of 514 of 480 0.91 and 0.86
FEW = 511
FEW_RANGES = {
    ("softmax", 2, 32): Range(1025, 8704, 114, WIDE),
    ("softmax", 4, 8): Range(705, 4352, 60, NARROW),
    ("softmax", 4, 4): Range(705, 2048, 60, NARROW),
}


def overlapping_config(problem: SpatialProblem, device: Device) -> SpatialConfig | None:
    """The config of such tiles; None for other columns, where tiles are not filled, and where no cluster holds one.

    >>> from .types import DEVICES
    >>> planes = SpatialProblem(1500, 44668, "bfloat16", "bfloat16", 4, whole_sectors=False, in_phase=True)
    >>> overlapping_config(planes, DEVICES["sm_90"]).ctas
    8
    """
    starts = problem.starts * problem.itemsize
    op = ("log gradient" if problem.log else "gradient") if problem.backward else "softmax"
    key = op, problem.itemsize, starts
    of = (FEW_RANGES.get(key) if problem.inner <= FEW else None) or RANGES.get(key)
    apart = starts == SECTOR_BYTES or problem.in_phase
    if of is None or not (apart and of.least <= problem.n_cols <= of.most and _may_hold(problem, device)):
        return None
    thread_bytes = min(WIDEST_BYTES, starts)
    for positions, most_ctas in of.most_ctas.items():
        if _is_filled(problem, positions):
            most = min(most_ctas, device.max_cluster)
            config = _on_ctas(problem, device, of, positions, thread_bytes, most)
            if config is not None:
                return config
    return None


def _may_hold(problem: SpatialProblem, device: Device) -> bool:
    """Whether such tiles may hold the dtypes, and were measured on the device."""
    like = problem.dtype == problem.out_dtype and not problem.batch_invariant
    return like and device.supports_smem_staging and device.max_cluster > 1


def _is_filled(problem: SpatialProblem, positions: int) -> bool:
    """Whether whole tiles have few positions beyond the tensor, or it has some of them anyway."""
    overlap = problem.sector - problem.starts
    filled = tiles_of(problem.inner, positions, overlap) * (positions - overlap) <= FILLED * problem.inner
    return problem.inner >= FEW_TILES * positions or (problem.inner > positions and filled)


def _on_ctas(
    problem: SpatialProblem, device: Device, of: Range, positions: int, thread_bytes: int, most_ctas: int
) -> SpatialConfig | None:
    """The config on as few CTAs as hold the columns."""
    table, cols = HELD[problem.backward], NUM_WARPS * device.warp_size * thread_bytes // problem.itemsize // positions
    last, ctas = positions == min(of.most_ctas), 1
    while ctas <= most_ctas:
        chunks = -(-problem.n_cols // (cols * ctas))
        words = (1 + problem.backward) * chunks * thread_bytes // 4
        if words <= (table[-1].words if last and ctas == most_ctas else of.words):
            _, most_held, registers = next(held for held in table if words <= held.words)
            held = most_held * 4 // thread_bytes - problem.backward * chunks  # of a gradient: chunks of dy
            return SpatialConfig(
                problem.n_cols, ctas, NUM_WARPS, positions, max_registers=registers, thread_bytes=thread_bytes,
                held=held, overlaps=problem.starts < problem.sector,
            )  # fmt: skip
        ctas *= 2
    return None
