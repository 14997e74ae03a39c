"""Tiles of planes of 40 to 447 positions, in place of plans that keep too few bytes in flight.

Such are planes in the registers of large clusters, planes that are alone on a multiprocessor, and tiles whose threads
have many words or read 16 bytes. What is faster is narrow: 32 or 64 positions, 4 to 16 bytes of a thread, 4 or 8 warps,
and the fewest CTAs whose threads hold few words (docs/measurements/short-planes.md has all times).
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from .held_planes import MOST_WARPS
from .spatial_tables import SpatialConfig, config_of_words
from .types import MULTIPROCESSORS, SECTOR_BYTES, Device, Plan, SpatialProblem, tiles_of

LEAST, MOST, MOST_COLS = 40, 447, 3000  # positions, and columns; longer planes have `lean_tiles`, others were not timed
WHOLE_LEAST = 64  # positions of planes whose runs are whole vectors


class Tile(NamedTuple):
    """Positions, warps of a program, bytes of a thread in a chunk, and words of 4 bytes that it holds, at most.

    most_read: what tiles read over what exists, at most; of_last: over what the last tile of a rule reads. most_ctas:
    of a cluster.
    """

    positions: int
    num_warps: int
    thread_bytes: int
    words: int
    skewed: bool = False
    most_read: float = 1.6
    of_last: float = inf
    most_ctas: int = 16


# The first tile is taken that reads little enough, and that a cluster holds. H200, speed over that of planes in
# registers, 1e7 and 5e7 elements: softmax of 1,428 float32 columns of 98 positions (4 CTAs of 16 warps) 1.32 and 1.15,
# 2,471 of 90 (6 of 16) 1.31 and 1.21; of 990 of 61 (2 of 16) in tiles of 32, which read 1.57 of what exists, 1.08 and
# 0.92, skewed (1.05) 1.34 and 1.19. With 4 warps in place of 8, 1,099 of 75 1.02 and 1.01, with 8 1.10 and 1.10
FLOAT32_SOFTMAX = Tile(32, 8, 8, 60, of_last=1.05), Tile(64, 4, 8, 72, skewed=True)
# also in place of plain tiles on a cluster, whose CTAs write parts of a sector: log_softmax of 2,805 of 130 1.20 and
# 1.27; but not of others: 1,845 of 406 0.86 and 0.93, 2,943 of 118 0.80 and 0.81, 2,154 of 209 (skewed) 0.97 and 0.92
MANY_COLS = 1200
# of at most so many CTAs planes of few warps stay in registers: 663 columns of 49 (2 of 8) 1.02 and 1.05
FEW_CTAS = 2
# gradients: of 16 warps from so many CTAs on, and of fewer warps. 1,669 columns of 77 (6 of 16) 1.26 and 1.07, 1,493 of
# 107 (8 of 16) 1.12 and 1.02; but 1,023 of 43 (2 of 16) 1.06 and 0.86, and 2,144 of 62 (6 of 16, 1.55 of it is read)
# 1.05 and 0.89; 391 of 53 (3 of 8) 1.10 and 1.11, 308 of 86 1.12 and 1.07; but 402 of 43 (2 of 8) 0.97 and 0.93
FLOAT32_GRADIENT_CTAS = 5
FLOAT32_GRADIENT_16 = (Tile(32, 8, 8, 60, most_read=1.4),)
# 672 of 77 (5 of 8) skewed on 16 CTAs 0.94 and 0.90; 641 of 42 (5 of 4) in tiles of 32, which read 1.52, 0.93 and 0.88
FLOAT32_GRADIENT_8 = (
    Tile(64, 4, 16, 72, skewed=True, most_read=1.7, most_ctas=8),
    Tile(32, 8, 8, 60, most_read=1.4),
)
# 16-bit softmax of so many CTAs, by whether columns start at 2 bytes: 2,078 bfloat16 columns of 68 (8 of 4) 1.34 and
# 1.07, 1,263 of 97 1.18 and 1.07; but 1,549 of 51 (2 of 8) 0.91 and 0.92, and on 16 CTAs 2,340 of 62 0.99 and 0.75
HALF_CTAS = 7
HALF_SOFTMAX = {
    False: (Tile(32, 4, 8, 36, most_ctas=8),),
    True: (Tile(64, 4, 8, 44, skewed=True, most_read=1.4, most_ctas=8),),
}
# 16-bit gradients of 16 warps: 307 of 186 1.28 and 1.06, 1,781 of 123 1.12 and 1.00, 900 of 86 1.12 and 0.94; but with
# fewer warps 490 of 119 (6 of 4) 1.00 and 0.84
HALF_GRADIENT = (Tile(64, 4, 8, 72, skewed=True),)


class Whole(NamedTuple):
    """Tiles of a 16-bit softmax or gradient whose runs are whole vectors, from `least` to `most` columns.

    narrow: taken where tiles of 64 positions read more than OF_NARROW of what tiles of 32 do. wide: taken elsewhere.
    """

    least: int
    most: int
    wide: Tile | None
    narrow: Tile | None


WIDE, NARROW, OF_NARROW = Tile(64, 4, 8, 48, most_ctas=8), Tile(32, 4, 8, 48), 1.25
# By `backward`, and whether runs are whole sectors. H200, bfloat16, 1e7 and 5e7 elements, speed over that of the plan
# before: softmax of 301 columns of 64 positions 1.21 and 1.05, 221 of 240 1.28 and 1.04, 755 of 304 1.15 and 1.06, 676
# of 192 1.20 and 0.95; but 176 of 112 0.97 and 0.96, 1,060 of 320 0.95 and 0.94; in halves of sectors 461 of 280 1.07
# and 1.04, 458 of 152 1.05 and 1.03; but 360 of 200 0.99 and 0.93, 807 of 376 0.96 and 0.95. Gradients of 475 of 208
# 1.22 and 1.10, 480 of 160 1.23 and 1.09, 243 of 176 1.00 and 1.03; in halves 294 of 88 1.29 and 1.18, 261 of 216 (6
# CTAs of 4 warps held it) 1.23 and 1.10, 1,173 of 72 (narrow) 1.20 and 1.23. On 16 CTAs 981 of 288 1.20 and 1.02, but
# 786 of 208 0.92 and 0.82, in halves 1,110 of 200 1.03 and 0.94
_SOFTMAX, _OF_HALVES = Tile(32, 4, 8, 44), Tile(64, 4, 4, 60)
WHOLE = {
    (False, True): (Whole(200, 1024, _SOFTMAX, _SOFTMAX),),
    (False, False): (Whole(457, 640, _OF_HALVES, _OF_HALVES),),
    (True, True): (Whole(240, 768, WIDE, NARROW), Whole(897, 1056, Tile(64, 4, 8, 48), NARROW)),
    (True, False): (Whole(240, 896, WIDE, NARROW), Whole(897, 1216, None, NARROW)),
}
# planes of a softmax in shared memory, in halves of sectors, whose programs have 16 warps: 403 of 136 1.37 and 1.12,
# 170 of 280 1.31 and 1.10; but with 8 warps 197 of 88 0.84 and 0.84
CROWDED_HALVES = (Tile(64, 4, 8, 60),)


def faster_as_short(problem: SpatialProblem, device: Device, plan: Plan) -> SpatialConfig | None:
    """The config of such tiles where they are faster than `plan`; else None.

    >>> from .planes import periodic_plan
    >>> from .types import DEVICES
    >>> planes = SpatialProblem(1428, 98, "float32", "float32", 2, whole_sectors=False, in_phase=True, packed=True)
    >>> config = faster_as_short(planes, DEVICES["sm_90"], periodic_plan(planes, DEVICES["sm_90"]))
    >>> config.inner, config.ctas, config.num_warps
    (32, 4, 8)
    """
    short = LEAST <= problem.inner <= MOST and problem.n_cols <= MOST_COLS
    apart = problem.starts == problem.sector or problem.in_phase
    if not (short and apart and problem.may_have_tiles(device)):
        return None
    rule = _of_planes if problem.vec < problem.full_vec else _of_whole_vectors
    return _first(problem, device, rule(problem, plan))


def _of_planes(problem: SpatialProblem, plan: Plan) -> tuple[Tile, ...]:
    """The tiles that replace planes whose runs start anywhere: none where `plan` is as fast."""
    half, many_warps = problem.itemsize == 2, plan.num_warps == MOST_WARPS
    if plan.gathered:
        return FLOAT32_SOFTMAX if not half and not problem.backward and many_warps and _is_alone(plan) else ()
    if not plan.periodic:
        plain = plan.ctas > 1 and not (plan.skewed or plan.overlap) and problem.n_cols >= MANY_COLS
        return FLOAT32_SOFTMAX[:1] if plain and not (half or problem.backward) else ()
    if half and problem.backward:
        return HALF_GRADIENT if many_warps else ()
    if half:
        return HALF_SOFTMAX[problem.vec == 1] if plan.ctas >= HALF_CTAS else ()
    if not problem.backward:
        return FLOAT32_SOFTMAX if many_warps or plan.ctas > FEW_CTAS else ()
    if many_warps:
        return FLOAT32_GRADIENT_16 if plan.ctas >= FLOAT32_GRADIENT_CTAS else ()
    return FLOAT32_GRADIENT_8 if plan.ctas > FEW_CTAS else ()


def _of_whole_vectors(problem: SpatialProblem, plan: Plan) -> tuple[Tile, ...]:
    """The tiles of 16-bit planes whose runs are whole vectors: none where `plan` is as fast."""
    if problem.itemsize != 2 or problem.inner < WHOLE_LEAST:
        return ()
    if plan.gathered:
        return CROWDED_HALVES if plan.num_warps == MOST_WARPS and not problem.whole_sectors else ()
    wide = _read(problem, WIDE) <= OF_NARROW * _read(problem, NARROW)
    for of in WHOLE[problem.backward, problem.whole_sectors]:
        tile = of.wide if wide else of.narrow
        if of.least <= problem.n_cols <= of.most and tile is not None:
            return (tile,)
    return ()


def _is_alone(plan: Plan) -> bool:
    """Whether one program that holds a plane in shared memory fills a multiprocessor."""
    of_device = MULTIPROCESSORS["sm_90"]
    return 2 * (plan.dynamic_bytes + of_device.shared_reserved) > of_device.shared


def _first(problem: SpatialProblem, device: Device, tiles: tuple[Tile, ...]) -> SpatialConfig | None:
    """The config of the first tile that reads little enough, and that a cluster holds; None where none does."""
    for tile in tiles:
        read = _read(problem, tile)
        if read <= min(tile.most_read, tile.of_last * _read(problem, tiles[-1])):
            config = _config(problem, device, tile)
            if config is not None:
                return config
    return None


def _skewed_by(tile: Tile) -> int:
    return tile.thread_bytes if tile.skewed else 0


def _read(problem: SpatialProblem, tile: Tile) -> float:
    """Positions that whole tiles read over those that exist."""
    unit = _skewed_by(tile) // problem.itemsize
    overlap = problem.overlap_of(unit) if unit else problem.sector - problem.starts
    return tiles_of(problem.inner, tile.positions, overlap, unit) * tile.positions / problem.inner


def _config(problem: SpatialProblem, device: Device, tile: Tile) -> SpatialConfig | None:
    """The config on the fewest CTAs; None where no cluster holds the columns."""
    starts = problem.starts * problem.itemsize
    thread_bytes = tile.thread_bytes if tile.skewed else min(tile.thread_bytes, starts)
    overlaps = starts < SECTOR_BYTES and not tile.skewed
    cols = tile.num_warps * device.warp_size * thread_bytes // problem.itemsize // tile.positions
    ctas = problem.fewest_ctas(cols, thread_bytes, tile.words, min(tile.most_ctas, device.max_cluster), overlaps)
    if ctas is None:
        return None
    words = problem.words(cols * ctas, thread_bytes)
    return config_of_words(
        problem.n_cols, ctas, tile.num_warps, tile.positions, thread_bytes, words, problem.backward, _skewed_by(tile),
        overlaps,
    )  # fmt: skip
