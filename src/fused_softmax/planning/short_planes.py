"""Tiles of planes of 12 to 447 positions, in place of plans that keep too few bytes in flight.

These plans are slower: planes in registers of large clusters, a plane alone on a multiprocessor, and tiles with wide
chunks or many positions beyond the plane. Faster tiles are narrow: 16, 32 or 64 positions, 4 to 16
bytes of a thread in a chunk, and the fewest CTAs whose threads hold few words (docs/measurements/short-planes.md).
"""

from __future__ import annotations

from typing import NamedTuple

from .held_planes import LEAST_SPEED, MOST_WARPS, Held
from .spatial_tables import SpatialConfig, config_of_words
from .types import SECTOR_BYTES, WIDE_POSITIONS, Device, Plan, SpatialProblem, tiles_of

# positions, and columns whose runs start at parts of a vector; more have `lean_tiles`, fewer positions ONE_TILE
LEAST, MOST, MOST_COLS = 40, 447, 3000
WHOLE_LEAST = 64  # positions of planes whose runs are whole vectors


class Tile(NamedTuple):
    """Positions, warps of a program, bytes of a thread in a chunk, and words of 4 bytes that a thread holds, at most.

    skewed: bytes, as of a SpatialConfig. most_read: positions that tiles read for each that exists, at most. most_ctas:
    of a cluster.
    """

    positions: int
    num_warps: int
    thread_bytes: int
    words: int
    skewed: int = 0
    most_read: float = 1.6
    most_ctas: int = 16


# Rules have tiles, best first: the planner takes the first one that reads little enough, and that a cluster holds.
# docs/measurements/thresholds.md has the figures behind each number

# a cluster could hold the planes in registers: it has more CTAs than these, or MOST_WARPS, and at least LEAST_SPEED
FEW_CTAS = 2
# the speed of registers from which no short tile is faster, by (backward, bytes of an element)
FASTEST = {(False, 2): 0.75, (False, 4): 0.86, (True, 2): 0.7, (True, 4): 0.86}
FASTEST_WHOLE = 0.86  # of a 16-bit softmax of whole sectors
# these tiles replace the plan of such planes. float32 softmax
FLOAT32_SOFTMAX = Tile(32, 8, 8, 60, most_read=1.57), Tile(64, 4, 8, 72, skewed=8)
# float32 gradients
FLOAT32_GRADIENT = Tile(64, 4, 16, 72, skewed=16, most_read=1.7, most_ctas=8), Tile(32, 8, 8, 60, most_read=1.4)
# 16-bit softmax, by whether columns start at multiples of 2 bytes alone
HALF_SOFTMAX = {
    False: (Tile(32, 4, 8, 36, most_ctas=8),),
    True: (Tile(64, 4, 8, 44, skewed=8, most_read=1.4, most_ctas=8),),
}
# 16-bit softmax at multiples of 8 bytes: a wider tile comes first where it reads less than OF_NARROW_EIGHT of what the
# narrow one does
EIGHT_BYTES = Tile(64, 4, 8, 76, most_ctas=8), Tile(32, 4, 8, 44, most_ctas=8)
OF_NARROW_EIGHT = 0.87
# and in place of skewed tiles of so many warps, and of a crowded piece, if it reads little enough
SKEWED_WARPS, IN_PLACE_OF_SKEWED = 8, (EIGHT_BYTES[0]._replace(most_read=1.31),)
IN_PLACE_OF_CROWDED = (EIGHT_BYTES[0]._replace(words=70, most_read=1.31),)
# float32 softmax of so many columns and more, in place of skewed tiles: of a cluster with less than WIDE_POSITIONS, and
# of SKEWED_WARPS where a plane has more. The narrow one is taken up to NARROW_OF_SKEWED positions
FLOATS_OF_SKEWED = Tile(64, 4, 8, 52, most_read=1.45, most_ctas=8), Tile(32, 4, 8, 56, most_read=1.45)
FLOATS_OF_SKEWED_COLS, NARROW_OF_SKEWED = 250, 200
# at multiples of 4 bytes: of so many positions. log_softmax is slower in these tiles
FOUR_BYTES = (Tile(64, 4, 8, 44, skewed=8, most_ctas=8),)
LONG_POSITIONS = 110
# 16-bit gradients
HALF_GRADIENT = (Tile(64, 4, 8, 72, skewed=8),)
# float32 softmax in plain tiles of so many positions on a cluster, whose CTAs write parts of a sector. Tiles that
# overlap or are skewed stay
PLAIN_POSITIONS = 32


class Whole(NamedTuple):
    """Tiles of a 16-bit softmax or gradient whose runs are whole vectors, from `least` to `most` columns.

    narrow: taken where WIDE reads more than OF_NARROW times what NARROW does. wide: taken elsewhere.
    """

    least: int
    most: int
    wide: Tile
    narrow: Tile


WIDE, NARROW, OF_NARROW = Tile(64, 4, 8, 48, most_ctas=8), Tile(32, 4, 8, 48), 1.25
# float32 softmax in halves of sectors, of so many columns, in place of tiles on a cluster
FLOAT_HALVES, FLOAT_HALVES_COLS = (Tile(64, 4, 8, 64, most_read=1.5),), range(250, 1025)
# and their gradients, where the tiles in place read so much
GRADIENT_HALVES, GRADIENT_HALVES_COLS = (Tile(32, 4, 8, 72),), range(1537, 2305)
GRADIENT_HALVES_READ, GRADIENT_HALVES_POSITIONS = 1.15, 255  # at least, and at most
_SOFTMAX, _OF_HALVES = Tile(32, 4, 8, 44), Tile(64, 4, 4, 60)
# by `backward`, and whether runs are whole sectors
WHOLE = {
    (False, True): (Whole(200, 1024, _SOFTMAX, _SOFTMAX),),
    (False, False): (Whole(457, 640, _OF_HALVES, _OF_HALVES),),
    (True, True): (Whole(240, 768, WIDE, NARROW), Whole(897, 1056, WIDE._replace(most_ctas=16), NARROW)),
    (True, False): (Whole(240, 1216, WIDE, NARROW),),
}
# tiles of 32 positions in place of wider ones on a cluster, which read OF_NARROWER times as much, by `backward`. 16-bit
# softmax in halves of sectors, with 16 bytes of a thread: where they read as much
NARROWER = {False: (Tile(32, 4, 8, 52), Tile(32, 4, 8, 60)), True: (Tile(32, 4, 8, 60),)}
OF_NARROWER = {False: 1.13, True: 1.19}
# planes of a softmax in shared memory, in halves of sectors, whose programs have 16 warps
CROWDED_HALVES = (Tile(64, 4, 8, 60),)
# 16-bit softmax of fewer than LEAST positions that nearly fill one tile, in place of a plane in shared memory of so
# many bytes at least. And the most columns
ONE_TILE = (Tile(32, 8, 4, 44, most_read=4 / 3, most_ctas=8),)
LEAST_PIECE, ONE_TILE_COLS = 24 << 10, 6000


def faster_as_short(
    problem: SpatialProblem, device: Device, plan: Plan, way: Held | None, held: Plan | None = None
) -> SpatialConfig | None:
    """The config of such tiles where they are faster than `plan`; else None.

    way: how registers could hold planes. held: the plan that does, where it is faster than `plan`.

    >>> from .register_planes import best_way
    >>> from .spatial import plan_spatial
    >>> from .types import DEVICES
    >>> hopper = DEVICES["sm_90"]
    >>> planes = SpatialProblem(1428, 98, "float32", 2, whole_sectors=False, in_phase=True, packed=True)
    >>> plan = plan_spatial(planes, hopper, "spatial_two_pass")
    >>> config = faster_as_short(planes, hopper, plan, best_way(planes, hopper))
    >>> config.inner, config.ctas, config.num_warps
    (32, 4, 8)
    """
    if way is not None and held is not None and is_fastest(problem, way):
        return None
    apart = problem.starts == problem.sector or problem.in_phase
    if not (problem.inner <= MOST and problem.packed and apart and problem.may_have_tiles(device)):
        return None
    if problem.inner < LEAST:
        tiles = _of_few_positions(problem, plan)
    elif problem.vec < problem.full_vec:
        tiles = _of_part_vectors(problem, plan, _cluster_could_hold(plan, way))
    else:
        tiles = _of_whole_vectors(problem, plan)
    return next(filter(None, (_config(problem, device, tile) for tile in tiles)), None)


def is_fastest(problem: SpatialProblem, way: Held) -> bool:
    """Whether no short tile is faster than planes in registers."""
    if problem.whole_sectors and problem.itemsize == 2 and not problem.backward:
        return way.speed >= FASTEST_WHOLE
    return way.speed >= FASTEST[problem.backward, problem.itemsize]


def _cluster_could_hold(plan: Plan, way: Held | None) -> bool:
    """Whether a large cluster could hold the planes, and `plan` is one that short tiles may replace."""
    piece = plan.gathered and (plan.num_warps < MOST_WARPS or plan.fitting_planes > 1)
    wide = plan.skewed > 0 or plan.overlap > 0
    if way is None or piece or wide:
        return False
    return (way.ctas > FEW_CTAS or way.num_warps == MOST_WARPS) and way.speed >= LEAST_SPEED


def _of_few_positions(problem: SpatialProblem, plan: Plan) -> tuple[Tile, ...]:
    """The tile of all positions of a 16-bit softmax that start at multiples of 4 or 8 bytes; none elsewhere."""
    if problem.n_cols > ONE_TILE_COLS:
        return ()
    parts = 1 < problem.vec < problem.full_vec and problem.itemsize == 2 and not problem.backward
    piece = plan.gathered and problem.plane_bytes >= LEAST_PIECE
    return ONE_TILE if parts and piece else ()


def _of_part_vectors(problem: SpatialProblem, plan: Plan, held: bool) -> tuple[Tile, ...]:
    """The tiles that replace `plan`, whose runs start at parts of a vector: none where it is as fast."""
    if problem.n_cols > MOST_COLS:
        return ()
    softmax, half = not problem.backward, problem.itemsize == 2
    if plan.skewed:
        return _in_place_of_skewed(problem, plan)
    if half and softmax and problem.vec == 4 and plan.gathered and plan.num_warps == MOST_WARPS:
        return IN_PLACE_OF_CROWDED
    if half and softmax and held and problem.vec == 4:
        wide, narrow = EIGHT_BYTES
        return EIGHT_BYTES if _read(problem, wide) < OF_NARROW_EIGHT * _read(problem, narrow) else (narrow,)
    if plan.gathered and not held:
        return FLOAT32_SOFTMAX if plan.fitting_planes == 1 and softmax and not half else ()
    if not held:
        plain = plan.ctas > 1 and plan.rows == PLAIN_POSITIONS and not (plan.skewed or plan.overlap)
        return FLOAT32_SOFTMAX[:1] if plain and softmax and not half else ()
    if half and softmax:
        long = problem.vec == 2 and problem.inner >= LONG_POSITIONS and not problem.log
        return (FOUR_BYTES if long else ()) + HALF_SOFTMAX[problem.vec == 1]
    if half:
        return HALF_GRADIENT
    return FLOAT32_SOFTMAX if softmax else FLOAT32_GRADIENT


def _in_place_of_skewed(problem: SpatialProblem, plan: Plan) -> tuple[Tile, ...]:
    """The tiles that replace skewed ones of a softmax, whose runs start at parts of a vector."""
    many_warps, few = plan.num_warps == SKEWED_WARPS, plan.ctas > 1 and plan.rows < WIDE_POSITIONS
    if problem.backward:
        return ()
    if problem.itemsize == 2:
        return IN_PLACE_OF_SKEWED if many_warps and problem.vec == 4 else ()
    if problem.n_cols < FLOATS_OF_SKEWED_COLS or not (few or (many_warps and problem.inner > WIDE_POSITIONS)):
        return ()
    return FLOATS_OF_SKEWED if problem.inner <= NARROW_OF_SKEWED else FLOATS_OF_SKEWED[:1]


def _of_whole_vectors(problem: SpatialProblem, plan: Plan) -> tuple[Tile, ...]:
    """Runs are whole vectors: the tile of WHOLE for so many columns, else NARROWER where the tiles of `plan` read much.

    Planes in shared memory stay, except CROWDED_HALVES.
    """
    half = problem.itemsize == 2
    if problem.inner < WHOLE_LEAST:
        return ()
    if plan.gathered:
        crowded = half and plan.num_warps == MOST_WARPS and not (problem.whole_sectors or problem.backward)
        return CROWDED_HALVES if crowded else ()
    if not (half or problem.whole_sectors):
        if not problem.backward and problem.n_cols in FLOAT_HALVES_COLS:
            return FLOAT_HALVES if plan.ctas > 1 else ()
        few = problem.backward and problem.inner <= GRADIENT_HALVES_POSITIONS and problem.n_cols in GRADIENT_HALVES_COLS
        if few and _read_by(problem, plan.rows, plan.overlap) >= GRADIENT_HALVES_READ:
            return GRADIENT_HALVES
    wide = _read(problem, WIDE) <= OF_NARROW * _read(problem, NARROW)
    ranges = WHOLE[problem.backward, problem.whole_sectors] if half else ()
    found = tuple(of.wide if wide else of.narrow for of in ranges if of.least <= problem.n_cols <= of.most)
    return found or (NARROWER[problem.backward] if _reads_much(problem, plan) else ())


def _reads_much(problem: SpatialProblem, plan: Plan) -> bool:
    """Whether the tiles of `plan` on a cluster read so much more than NARROWER that these are faster."""
    narrow = NARROWER[problem.backward][0]
    if plan.ctas == 1 or plan.rows <= narrow.positions:
        return False
    read = _read_by(problem, plan.rows, plan.overlap)
    halves = plan.overlap > 0 and plan.vec == problem.full_vec and problem.itemsize == 2 and not problem.backward
    return read >= (1.0 if halves else OF_NARROWER[problem.backward]) * _read(problem, narrow)


def _read(problem: SpatialProblem, tile: Tile) -> float:
    """Positions that whole tiles read over those that exist."""
    unit = tile.skewed // problem.itemsize
    return _read_by(problem, tile.positions, problem.shared_by(unit), unit)


def _read_by(problem: SpatialProblem, positions: int, overlap: int, unit: int = 0) -> float:
    """Positions that such tiles read over those that exist; the numbers are of `tiles_of`."""
    return tiles_of(problem.inner, positions, overlap, unit) * positions / problem.inner


def _config(problem: SpatialProblem, device: Device, tile: Tile) -> SpatialConfig | None:
    """The config on the fewest CTAs; None where tiles read too much, and where no cluster holds the columns."""
    starts = problem.starts * problem.itemsize
    thread_bytes = tile.thread_bytes if tile.skewed else min(tile.thread_bytes, starts)
    threads, most_ctas = tile.num_warps * device.warp_size, min(tile.most_ctas, device.max_cluster)
    found = problem.fewest_ctas(threads, tile.positions, thread_bytes, tile.words, most_ctas)
    if found is None or _read(problem, tile) > tile.most_read:
        return None
    ctas, words = found
    return config_of_words(
        problem.n_cols, ctas, tile.num_warps, tile.positions, thread_bytes, words, problem.backward, tile.skewed,
        overlaps=starts < SECTOR_BYTES and not tile.skewed,
    )  # fmt: skip
