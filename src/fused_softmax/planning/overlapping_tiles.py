"""Tiles of many columns that are read by 4 or 8 bytes, and that overlap where columns start within a sector of memory.

A thread that holds few positions keeps few maxima and sums, and has registers for more columns. And a sector that two
tiles write in part costs more than the positions that overlapping tiles read twice (`kernels.common.spatial_tiles`).
Where columns start at sectors, such tiles do not overlap. One rule says which tile RANGES of columns have: the first
one that holds them in registers and shared memory, on the first number of CTAs with which it does.
docs/measurements/thresholds.md has the figures behind the thresholds.
"""

from __future__ import annotations

from typing import NamedTuple

from .spatial_tables import SpatialConfig
from .types import SECTOR_BYTES, Device, SpatialProblem, chunks_that_fit

WIDEST_BYTES = 8


class Held(NamedTuple):
    """Where a thread has up to `words` of 4 bytes: those that stay in registers, and the cap on all registers."""

    words: int
    held: int
    max_registers: int


# by `backward` and warps: the first whose other words fit into shared memory
HELD = {
    (False, 4): (Held(84, 54, 96), Held(128, 72, 128), Held(164, 108, 168)),
    (False, 8): (Held(110, 72, 128),),
    (True, 4): (
        *(Held(72, 72, 112), Held(90, 90, 128), Held(92, 126, 168)),
        *(Held(128, 72, 112), Held(150, 90, 128), Held(172, 126, 168)),
    ),
    (True, 8): (Held(128, 90, 128), Held(168, 126, 168)),
}


class Tile(NamedTuple):
    """A tile of so many positions: warps of a program, words of a thread at most, and the CTAs to try.

    least_inner: only planes of so many positions have it.
    """

    positions: int
    num_warps: int
    words: int
    ctas: tuple[int, ...] = (16,)
    least_inner: int = 1


class Range(NamedTuple):
    """From `least` to `most` columns: the tiles to try, best first."""

    least: int
    most: int
    tiles: tuple[Tile, ...]


# by op, bytes of an element, and the bytes at whose multiples columns start. Between two ranges of a kind, tiles that
# are read by 16 bytes are as fast, or faster
LONG_PLANE, FEW = 8192, 511  # positions
_WIDE = Tile(128, 4, 114, (1, 2, 4, 8)), Tile(64, 4, 114, (1, 2, 4, 8, 16))
_QUARTERS = (
    Range(2689, 7936, (Tile(64, 4, 164), Tile(64, 8, 124))),
    Range(7937, 9216, (Tile(32, 4, 144),)),
    Range(9217, 11264, (Tile(32, 8, 88),)),
)
RANGES = {
    ("softmax", 2, 32): (
        Range(229, 8704, (*_WIDE, Tile(64, 4, 136))),
        Range(8705, 16640, (Tile(32, 4, 130),)),
    ),
    ("softmax", 2, 16): (
        Range(229, 8704, (*_WIDE, Tile(64, 4, 136))),
        Range(8705, 16640, (Tile(64, 4, 150), Tile(32, 4, 130))),
    ),
    ("softmax", 2, 8): (
        Range(229, 3648, _WIDE),
        Range(3649, 4096, (Tile(64, 4, 128, (8,), least_inner=4096), Tile(64, 4, 114))),
        Range(4097, 13568, (Tile(64, 4, 160), Tile(64, 8, 106))),
    ),
    ("softmax", 2, 4): (
        Range(305, 4096, (Tile(128, 4, 74, (4,)), Tile(128, 4, 84, (8,)), Tile(64, 4, 84, (2, 4, 8, 16)))),
        Range(4097, 13056, (Tile(64, 4, 120), Tile(64, 8, 102))),
    ),
    ("softmax", 4, 32): (
        Range(5249, 7040, (Tile(32, 4, 114),)),
        Range(8193, 9600, (Tile(32, 4, 150),)),
        Range(12289, 14080, (Tile(32, 8, 110),)),
    ),
    ("softmax", 4, 16): (
        Range(4609, 5248, (Tile(64, 4, 164),)),
        Range(5249, 7040, (Tile(32, 4, 114),)),
        Range(11649, 14080, (Tile(32, 8, 110),)),
    ),
    ("softmax", 4, 8): (
        Range(1409, 14080, (Tile(64, 4, 60, (8, 16)), Tile(64, 4, 164), Tile(32, 4, 150), Tile(32, 8, 110))),
    ),
    ("softmax", 4, 4): (Range(2561, 11520, (Tile(64, 4, 104), Tile(32, 4, 100), Tile(32, 8, 90))),),
    ("gradient", 2, 16): (
        Range(4737, 5120, (Tile(64, 4, 160),)),
        Range(6145, 7936, (Tile(64, 8, 124),)),
        Range(9217, 13312, (Tile(32, 8, 104),)),
    ),
    ("gradient", 2, 8): (
        Range(1345, 1792, (Tile(64, 4, 72),)),
        Range(1793, 1920, (Tile(128, 4, 128, least_inner=LONG_PLANE), Tile(64, 4, 60))),
        Range(1921, 2048, (Tile(128, 4, 128, least_inner=LONG_PLANE), Tile(64, 4, 128, (8,)))),
        Range(2049, 2688, (Tile(128, 4, 172, least_inner=LONG_PLANE),)),
        *_QUARTERS,
    ),
    ("log gradient", 2, 8): (
        Range(1153, 2048, (Tile(128, 4, 128, (4, 8, 16)), Tile(64, 4, 128, (4, 8, 16)))),
        Range(2049, 2688, (Tile(128, 4, 172), Tile(64, 4, 90))),
        *_QUARTERS,
    ),
    ("gradient", 2, 4): (
        Range(1345, 1600, (Tile(128, 4, 128, least_inner=LONG_PLANE),)),
        Range(2689, 8064, (Tile(64, 4, 150), Tile(64, 8, 126))),
    ),
    ("gradient", 4, 32): (Range(7169, 8192, (Tile(32, 8, 128),)),),
    ("gradient", 4, 16): (Range(7681, 8192, (Tile(32, 8, 128),)),),
    ("gradient", 4, 8): (
        Range(1537, 2752, (Tile(64, 4, 172),)),
        Range(2753, 10240, (Tile(32, 4, 150), Tile(32, 8, 160))),
    ),
    ("gradient", 4, 4): (
        Range(1537, 1920, (Tile(64, 4, 120),)),
        Range(2817, 7936, (Tile(32, 4, 150), Tile(32, 8, 124))),
    ),
}
# up to FEW positions have these instead, and up to the most columns of a kind no others: elsewhere the tables' plans,
# or those of planes in registers, are faster
FEW_RANGES = {
    ("softmax", 2, 32): (Range(1025, 8704, (*_WIDE, Tile(64, 4, 136))),),
    ("softmax", 4, 8): (Range(705, 4352, (Tile(64, 4, 60, (4, 8, 16)), Tile(64, 4, 136))),),
    ("softmax", 4, 4): (Range(705, 2048, (Tile(64, 4, 60, (8, 16)), Tile(64, 4, 64))),),
    ("gradient", 2, 8): (
        Range(2049, 2432, (Tile(128, 4, 172),)),
        Range(2433, 2688, (Tile(128, 4, 172), Tile(64, 4, 90))),
    ),
    ("gradient", 2, 4): (
        Range(2049, 2240, (Tile(128, 4, 140),)),
        Range(2433, 2480, (Tile(64, 4, 90, least_inner=148),)),
        Range(2481, 2688, (Tile(64, 4, 90, least_inner=104),)),
    ),
    ("log gradient", 2, 4): (
        Range(2177, 2480, (Tile(64, 4, 90, least_inner=148),)),
        Range(2481, 2688, (Tile(64, 4, 90, least_inner=112),)),
    ),
}


def overlapping_config(problem: SpatialProblem, device: Device) -> SpatialConfig | None:
    """The config of such tiles; None for other columns, where tiles are not filled, and where no cluster holds one.

    >>> from .types import DEVICES
    >>> planes = SpatialProblem(1500, 44668, "bfloat16", 4, whole_sectors=False, in_phase=True)
    >>> overlapping_config(planes, DEVICES["sm_90"]).ctas
    8
    """
    starts = problem.starts * problem.itemsize
    apart = starts == SECTOR_BYTES or problem.in_phase
    if not (apart and problem.may_have_tiles(device)):
        return None
    thread_bytes = min(WIDEST_BYTES, starts)
    for of in _ranges(problem, starts):
        for tile in of.tiles if of.least <= problem.n_cols <= of.most else ():
            filled = problem.inner >= tile.least_inner and problem.fills(tile.positions)
            config = _on_ctas(problem, device, tile, thread_bytes) if filled else None
            if config is not None:
                return config
    return None


def _ranges(problem: SpatialProblem, starts: int) -> tuple[Range, ...]:
    """The ranges of columns that start at multiples of so many bytes.

    Of up to FEW positions those of FEW_RANGES, and beyond their columns the others. The gradient of log_softmax has
    those of softmax where it has none of its own.
    """
    ops = ["gradient" if problem.backward else "softmax"]
    if problem.backward and problem.log:
        ops.insert(0, "log gradient")
    for op in ops:
        kind = op, problem.itemsize, starts
        few = FEW_RANGES.get(kind, ()) if problem.inner <= FEW else ()
        if few and problem.n_cols <= few[-1].most:
            return few
        if kind in RANGES:
            return RANGES[kind]
    return ()


def _on_ctas(problem: SpatialProblem, device: Device, tile: Tile, thread_bytes: int) -> SpatialConfig | None:
    """The config on the first CTAs that hold the columns."""
    chunk_bytes = tile.num_warps * device.warp_size * thread_bytes
    cols = chunk_bytes // problem.itemsize // tile.positions
    for ctas in (n for n in tile.ctas if n <= device.max_cluster):
        chunks, words = -(-problem.n_cols // (cols * ctas)), problem.words(cols * ctas, thread_bytes)
        room = chunks_that_fit(chunk_bytes, ctas, tile.num_warps, tile.positions)
        for held in HELD[problem.backward, tile.num_warps] if words <= tile.words else ():
            kept = held.held * 4 // thread_bytes - problem.backward * chunks  # of a gradient: chunks of dy
            if words <= held.words and chunks - kept <= room:
                return SpatialConfig(
                    problem.n_cols, ctas, tile.num_warps, tile.positions, max_registers=held.max_registers,
                    thread_bytes=thread_bytes, held=kept, overlaps=problem.starts < problem.sector,
                )  # fmt: skip
    return None
