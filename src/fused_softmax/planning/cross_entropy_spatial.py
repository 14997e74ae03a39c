"""SpatialProblem + Device -> Plan of cross_entropy of images (N, C, d1, ...), a loss with its gradient.

A position has a logarithm, factors and a target of its own, which take more instructions than a column does. So threads
hold whole columns where these are few, and many columns of few positions elsewhere; or one thread computes a position's
numbers for all of its elements (`SHARED`). docs/measurements/losses.md has figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from .spatial import configs_of, padded, parts_plan, resident_plan, staggered, tiles_plan
from .spatial_tables import ANY, NARROW, PARTS, PartsTile, RunRule, SpatialConfig
from .types import Device, Plan, SpatialProblem, power_of_two

# threads that hold whole columns, and their exponentials: columns, at most; where many positions start anywhere;
# numbers of a thread, at most; positions of a thread, at most
WHOLE_COLS, WHOLE_ANYWHERE, WHOLE_HELD, WHOLE_POSITIONS = 12, 25, 50, 8
# of more columns than these, whose vectors are shorter than what a thread has, a warp has half as many positions rather
# than those of several planes
FEW_OF_PLANES = 6
# positions that tiles read for each that narrower ones read, at most
MOST_READ = 1.18
# of few positions: fewer columns in a chunk, and so more of a thread, whose positions then weigh less
FEW = {2: RunRule(32, 20, 5), 4: RunRule(32, 12, 5)}
# columns whose runs are whole vectors, or at least half of one, except HALVES_ANYWHERE of them
HALVES_ANYWHERE = range(113, 401)
ALIGNED = {
    2: (
        SpatialConfig(24, 1, 2, 256, thread_bytes=8),
        SpatialConfig(36, 1, 1, 64, thread_bytes=8),
        SpatialConfig(60, 1, 4, 128, thread_bytes=4, max_registers=128),
        SpatialConfig(112, 1, 2, 64, thread_bytes=8),
        SpatialConfig(152, 1, 4, 128, thread_bytes=8, max_registers=120, whole_sectors=True),
        SpatialConfig(208, 1, 4, 64, thread_bytes=8, max_registers=96, whole_sectors=True),
        SpatialConfig(208, 1, 2, 64, thread_bytes=8),
        SpatialConfig(304, 1, 4, 64, thread_bytes=8, max_registers=128),
        SpatialConfig(400, 1, 4, 64, thread_bytes=8, max_registers=168),
        SpatialConfig(608, 2, 4, 64, thread_bytes=8, max_registers=128),
        SpatialConfig(832, 2, 4, 64, thread_bytes=8, max_registers=168),
        SpatialConfig(1024, 1, 8, 32, thread_bytes=8, max_registers=128, whole_sectors=True),
        SpatialConfig(1216, 4, 4, 64, thread_bytes=8, max_registers=128),
        SpatialConfig(1664, 4, 4, 64, thread_bytes=8, max_registers=168),
        SpatialConfig(2432, 8, 4, 64, thread_bytes=8, max_registers=128),
        SpatialConfig(3328, 8, 4, 64, thread_bytes=8, max_registers=168),
        SpatialConfig(4864, 16, 4, 64, thread_bytes=8, max_registers=128),
        SpatialConfig(6656, 16, 4, 64, thread_bytes=8, max_registers=168),
    ),
    4: (
        SpatialConfig(24, 1, 4, 512),
        SpatialConfig(48, 1, 4, 128, thread_bytes=8, max_registers=128),
        SpatialConfig(64, 1, 4, 64, thread_bytes=8, max_registers=128),
        SpatialConfig(152, 1, 4, 64, max_registers=128),
        SpatialConfig(224, 1, 4, 32, thread_bytes=8, max_registers=168),
        SpatialConfig(304, 2, 4, 64, max_registers=128),
        SpatialConfig(416, 2, 4, 64, max_registers=168),
        SpatialConfig(704, 4, 4, 64, max_registers=128),
        SpatialConfig(832, 4, 4, 64, max_registers=168),
        SpatialConfig(1408, 8, 4, 64, max_registers=128),
        SpatialConfig(1664, 8, 4, 64, max_registers=168),
        SpatialConfig(2816, 16, 4, 64, max_registers=128),
        SpatialConfig(3328, 16, 4, 64, max_registers=168),
        SpatialConfig(512, 1, 8, 32),
    ),
}
# tiles of one program, of any alignment: of batch invariance, of few positions, and of GPUs without clusters
ALONE = {
    2: (
        SpatialConfig(24, 1, 2, 256, thread_bytes=8),
        SpatialConfig(60, 1, 1, 64, thread_bytes=8),
        SpatialConfig(112, 1, 2, 64, thread_bytes=8),
        SpatialConfig(304, 1, 4, 64, thread_bytes=8),
        SpatialConfig(832, 1, 8, 64, thread_bytes=8),
        SpatialConfig(1024, 1, 8, 16, thread_bytes=8),
    ),
    4: (
        SpatialConfig(24, 1, 4, 512),
        SpatialConfig(152, 1, 4, 64),
        SpatialConfig(256, 1, 8, 64),
        SpatialConfig(512, 1, 8, 32),
        SpatialConfig(1024, 1, 16, 32),
        SpatialConfig(2048, 1, 16, 16),
    ),
}


class LossTile(NamedTuple):
    """Up to max_cols columns of up to max_inner positions: positions of a tile, warps of a CTA, bytes of a thread in a
    chunk, words of 4 bytes that a thread holds, and CTAs of a cluster, at most."""

    max_cols: int
    positions: int
    num_warps: int
    thread_bytes: int
    words: int = 64
    most_ctas: int = 1
    max_inner: int = 1 << 31


# of columns that start anywhere, and of planes that the tiles of ALIGNED do not fill
ANYWHERE = {
    2: (
        LossTile(36, 128, 2, 8),
        LossTile(100, 128, 4, 4),
        LossTile(256, 64, 4, 8),
        LossTile(2816, 32, 4, 8, most_ctas=8),
        LossTile(3328, 32, 4, 8, most_ctas=8, max_inner=1024),
    ),
    4: (
        LossTile(48, 128, 4, 8),
        LossTile(64, 64, 4, 8),
        LossTile(88, 128, 8, 8),
        LossTile(216, 64, 8, 8),
        LossTile(256, 64, 8, 16),
        LossTile(2048, 32, 8, 4, words=44, most_ctas=16),
        LossTile(4096, 32, 4, 8, most_ctas=16),
    ),
}
# of more columns, whose runs are whole sectors
MORE_COLS = {
    2: (LossTile(8192, 32, 4, 8, most_ctas=16), LossTile(10240, 16, 4, 4, most_ctas=16)),
    4: (LossTile(8192, 16, 4, 8, most_ctas=16), LossTile(10240, 16, 8, 4, words=44, most_ctas=16)),
}


class SharedTile(NamedTuple):
    """Positions of a tile of `cross_entropy_spatial_shared`, warps of a CTA, CTAs, and positions of a plane, at least.

    There one thread computes what a position's elements share.
    """

    positions: int
    num_warps: int
    ctas: int
    least_inner: int = 0


# bytes of a thread in a chunk, by those of an element. Columns that start at their multiples start together; tiles of
# all others are skewed
THREAD_BYTES = {2: 8, 4: 16}
# words of a thread of 16-bit columns, in CTAs of CAPPED_WARPS, with which registers have a cap: 6 programs fit, and 5
# without. With other words ptxas takes more registers because of a cap
CAPPED, CAPPED_WARPS, REGISTER_CAP = range(29, 41), 4, 80
ONE, TWO, FOUR, EIGHT, SIXTEEN = (SharedTile(64, 4, ctas) for ctas in (1, 2, 4, 8, 16))
_SKEWED_16_BIT = {
    88: (SharedTile(128, 4, 1),),
    128: (SharedTile(256, 8, 1), SharedTile(128, 4, 2)),
    176: (SharedTile(128, 4, 2), ONE),
    256: (SharedTile(256, 8, 2), SharedTile(128, 4, 2), ONE),
    352: (SharedTile(128, 4, 4), TWO),
    512: (SharedTile(128, 8, 2), TWO),
    704: (SharedTile(128, 4, 8), FOUR),
    1024: (SharedTile(128, 8, 4), FOUR),
    1408: (EIGHT,),
    2048: (SharedTile(128, 8, 8), EIGHT),
    2816: (SharedTile(128, 8, 16, least_inner=2048),),
}
_SKEWED_FLOAT32 = {
    48: (SharedTile(128, 4, 1),),
    64: (SharedTile(128, 4, 1), ONE),
    128: (SharedTile(128, 4, 2),),
    176: (SharedTile(128, 4, 4), TWO),
    256: (SharedTile(128, 8, 2), TWO),
    352: (SharedTile(128, 4, 8), FOUR),
    512: (FOUR,),
    1024: (EIGHT,),
    2048: (SIXTEEN,),
}
_PART_OF_A_SECTOR = {
    104: (SharedTile(128, 4, 1), ONE),
    208: (SharedTile(128, 4, 2), ONE),
    416: (SharedTile(128, 4, 4), TWO),
    704: (SharedTile(128, 4, 8), FOUR),
    1024: (SharedTile(128, 4, 8), EIGHT),
    2112: (SharedTile(128, 8, 8), EIGHT),
}
# by the bytes of an element, and those at whose multiples columns start: the tiles to try by the columns, at most. No
# tile where those of `cross_entropy_spatial` are as fast
SHARED = {
    (2, 2): {36: (), **_SKEWED_16_BIT},
    (2, 4): {36: (), **_SKEWED_16_BIT},
    (2, 8): {27: (), **_PART_OF_A_SECTOR, 5120: (SharedTile(128, 8, 16), SIXTEEN)},
    (2, 16): {36: (), **_PART_OF_A_SECTOR, 3400: (SIXTEEN,), 5120: (SharedTile(128, 8, 16), SIXTEEN)},
    (2, 32): {
        36: (),
        60: (SharedTile(128, 4, 1),),
        112: (),
        136: (SharedTile(128, 4, 1), ONE),
        145: (SharedTile(128, 4, 2), ONE),
        160: (),
        272: (SharedTile(128, 4, 2), ONE),
        512: (TWO,),
        1024: (FOUR,),
        2560: (EIGHT,),
        4096: (SIXTEEN,),
    },
    (4, 4): {19: (), **_SKEWED_FLOAT32},
    (4, 8): {99: (), **_SKEWED_FLOAT32},
    (4, 16): {
        36: (),
        68: (SharedTile(128, 4, 1), ONE),
        136: (SharedTile(128, 4, 2),),
        256: (SharedTile(128, 4, 4), TWO),
        512: (SharedTile(128, 4, 8), FOUR),
        1024: (SharedTile(128, 8, 8), EIGHT),
        2048: (SIXTEEN,),
    },
    (4, 32): {
        64: (),
        128: (ONE,),
        256: (TWO,),
        512: (FOUR,),
        1024: (EIGHT,),
        2048: (SharedTile(32, 4, 8),),
    },
}
# positions that tiles of columns which start together read: for each that exists, and for each that narrower ones read,
# at most. The wider a tile is, the fewer sectors it shares, which is worth more where these are many
MOST_TOGETHER, MOST_OF_NARROWER = 1.42, {8: MOST_READ, 16: 1.1, 32: 1.1}
REGISTERS = ((20, None), (44, 128), (64, 168))  # a cap on registers, by the words of a thread, at most
NARROW_WORDS = 52  # of a thread, at most, where a 16-bit tile is narrower than its LossTile says
# of columns that are read twice
TWICE = {2: PartsTile(256, 2, 8, programs=ANY), 4: PARTS._replace(programs=ANY)}


def plan_spatial_loss(problem: SpatialProblem, device: Device, shareable: bool = True) -> Plan:
    """The plan of a loss with its gradient: in one pass, or in two where the columns do not fit on chip.

    shareable: False of launches that `cross_entropy_spatial_shared` has no code for.
    """
    found = next(_one_pass(problem, device), None)
    # only where both read once: a backward for another upstream gradient takes `found`, and what is kept for it
    if found is not None and shareable and (shared := _shared(problem, device)) is not None:
        return shared
    if found is None:
        return parts_plan(problem, device, PARTS if problem.batch_invariant else TWICE[problem.itemsize])
    return staggered(found, problem, device)


def _one_pass(problem: SpatialProblem, device: Device) -> Iterator[Plan]:
    """The plans that keep the columns on chip, best first."""
    itemsize, few = problem.itemsize, power_of_two(problem.inner) <= NARROW
    full = problem.vec == problem.full_vec
    if not problem.batch_invariant:
        if problem.n_cols <= (WHOLE_COLS if full or few else WHOLE_ANYWHERE):
            yield _whole_columns(problem, device)
        if not few:
            if full or (2 * problem.vec >= problem.full_vec and problem.n_cols not in HALVES_ANYWHERE):
                yield from _in_tiles(problem, device, ALIGNED[itemsize])
            tiles = ANYWHERE[itemsize] + (MORE_COLS[itemsize] if full and problem.whole_sectors else ())
            yield from filter(None, (_in_tile(problem, device, tile) for tile in tiles))
    yield from _in_tiles(problem, device, ALONE[itemsize])


def _shared(problem: SpatialProblem, device: Device) -> Plan | None:
    """The plan of a SharedTile; None where none holds the columns, or none was faster."""
    if not problem.in_phase or problem.batch_invariant or device.kind == "hip":
        return None
    itemsize, starts = problem.itemsize, problem.starts * problem.itemsize
    n_bytes = THREAD_BYTES[itemsize]
    together = starts >= n_bytes
    tiles = next((of for most, of in SHARED[itemsize, starts].items() if problem.n_cols <= most), ())
    fitting = [tile for tile in tiles if tile.ctas <= device.max_cluster and problem.inner >= tile.least_inner]
    filled = _filled_together(problem, fitting, starts) if together else _filled_skewed(problem, fitting, n_bytes)
    tile = next(filled, None)
    if tile is None:
        return None
    cols = tile.num_warps * device.warp_size * n_bytes // itemsize // tile.positions
    capped = itemsize == 2 and tile.num_warps == CAPPED_WARPS
    cap = REGISTER_CAP if capped and problem.words(cols * tile.ctas, n_bytes) in CAPPED else None
    plan = resident_plan(
        problem, device, tile.positions, cols, tile.num_warps, tile.ctas, True, cap, n_bytes, skewed=n_bytes,
        together=together,
    )  # fmt: skip
    return replace(plan, why=f"{plan.why}; one thread computes what a position's elements share")


def _filled_together(problem: SpatialProblem, tiles: list[SharedTile], starts: int) -> Iterator[SharedTile]:
    """The tiles that read few positions more than exist, and than the others do. starts: bytes, as of SHARED."""
    read = {tile: padded(problem, tile.positions) for tile in tiles}
    for tile in tiles:
        if read[tile] <= min(MOST_TOGETHER * problem.inner, MOST_OF_NARROWER[starts] * min(read.values())):
            yield tile


def _filled_skewed(problem: SpatialProblem, tiles: list[SharedTile], n_bytes: int) -> Iterator[SharedTile]:
    """The tiles that together have few positions more than exist. n_bytes: of a thread in a chunk."""
    from .skewed_tiles import MOST_EMPTY, empty_of  # loaded when it is first needed

    unit = n_bytes // problem.itemsize
    yield from (tile for tile in tiles if empty_of(problem, tile.positions, unit) <= MOST_EMPTY)


def _in_tiles(problem: SpatialProblem, device: Device, table: tuple[SpatialConfig, ...]) -> Iterator[Plan]:
    """The plans of the configs of a table that hold the columns."""
    for config in configs_of(problem, device, table):
        yield replace(tiles_plan(problem, device, config, few=FEW[problem.itemsize]), recompute=True)


def _filled(problem: SpatialProblem, most: int, least: int) -> int:
    """The most positions of a tile, a power of two, whose tiles read few positions more than narrower ones do."""
    most = min(most, power_of_two(problem.inner))
    widths = [most >> k for k in range(most.bit_length()) if most >> k >= min(least, most)]
    read = {width: padded(problem, width) for width in widths}
    return next(width for width in widths if read[width] <= MOST_READ * min(read.values()))


def _whole_columns(problem: SpatialProblem, device: Device) -> Plan:
    """The plan of threads that hold whole columns of several positions, and the exponentials of all of them."""
    of_thread = min(WHOLE_POSITIONS, power_of_two(WHOLE_HELD // problem.n_cols + 1) // 2)
    warps, lanes = max(1, (2 if of_thread == WHOLE_POSITIONS else 4) * 32 // device.warp_size), device.warp_size
    may_halve = problem.n_cols > FEW_OF_PLANES and problem.vec < of_thread
    inner = _filled(problem, warps * lanes * of_thread, lanes * of_thread // (1 + may_halve))
    while warps > 1 and warps * lanes * of_thread > inner:  # one plane, where it has that many positions
        warps //= 2
    if may_halve and lanes * of_thread > inner:
        of_thread //= 2
    return resident_plan(problem, device, inner, 1, warps, thread_bytes=of_thread * problem.itemsize)


def _in_tile(problem: SpatialProblem, device: Device, tile: LossTile) -> Plan | None:
    """The plan of such a tile on the fewest CTAs; None for other planes, and where no cluster holds the columns."""
    if problem.n_cols > tile.max_cols or problem.inner > tile.max_inner:
        return None
    warps = max(1, tile.num_warps * 32 // device.warp_size)
    n_bytes, positions = tile.thread_bytes, _filled(problem, tile.positions, NARROW)
    most_ctas = min(tile.most_ctas, device.max_cluster)
    found = problem.fewest_ctas(warps * device.warp_size, positions, n_bytes, tile.words, most_ctas)
    if found is None:
        return None
    ctas, words = found
    # fewer positions are few columns of each thread
    while problem.itemsize == 2 and positions < tile.positions and ctas == 1 < warps and 2 * words <= NARROW_WORDS:
        warps, words = warps // 2, 2 * words
    cols = warps * device.warp_size * n_bytes // problem.itemsize // positions
    cap = next(cap for most, cap in REGISTERS if words <= most)
    return resident_plan(problem, device, positions, cols, warps, ctas, True, cap, n_bytes)
