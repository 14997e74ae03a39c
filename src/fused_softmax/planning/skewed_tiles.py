"""Skewed tiles over few positions whose runs start anywhere: of planes that programs hold slowly, or not alone.

Each column of a skewed tile starts at its own multiple of a thread's bytes, so all accesses are aligned vectors. The
tables of `spatial` have such tiles for four tiles of positions and more. With fewer, what counts is how much of the
last one is empty: the widest tile is taken that is filled enough, on as few CTAs as hold the columns in few registers.
docs/measurements/thresholds.md has the figures behind the thresholds.
"""

from __future__ import annotations

from typing import NamedTuple

from .held_planes import LEAST_SPEED, Held
from .spatial_tables import SpatialConfig
from .types import Device, Plan, SpatialProblem, tiles_of

# positions of a tile, widest first, and what whole tiles may have over those that exist
POSITIONS, MOST_EMPTY = (128, 64, 32), 1.2
# or so much of tiles of 64. Those of 128, too, where tiles of 64 are little less empty, on few CTAs or with many
# registers
NEARLY_FILLED, OF_NARROWER, NEARLY_CTAS, NEARLY_REGISTERS, LEAST_REGISTERS = 1.25, 1.15, 4, range(50, 61), 40
# of a tensor, at least: in place of columns that are read twice, and of other plans. Beyond the most the tables have
# skewed tiles of each width
FEWEST_TWICE, FEWEST, MOST = 48, 100, 511
# bytes of a thread's vectors, by those of an element; the first whose tiles are filled
THREAD_BYTES = {2: (8,), 4: (16, 8)}
# registers of a thread for its columns, by (backward, bytes of an element): as many CTAs as need no more than FEW, and
# MOST_REGISTERS where a cluster has no more CTAs
FEW_REGISTERS, MOST_REGISTERS = {(False, 2): 48, (False, 4): 44, (True, 2): 56, (True, 4): 56}, 76
# of a 16-bit softmax in tiles of 32 positions, by whether a cluster can have no more CTAs; and in tiles of 64 in one
# CTA
NARROW_REGISTERS, ALONE_REGISTERS = {False: 38, True: 44}, 32
WIDE_CTAS = 8  # of a tile of the most positions: narrower tiles need fewer
# columns, at least; fewer were timed in few cases
LEAST_COLS = 60
# warps of programs that hold a plane of a softmax in shared memory, one or two on a multiprocessor (fewer were not
# timed). A gradient's may have fewer warps
CROWDED_WARPS = 16
# positions of a tile, and bytes of an access, from which the tiles of `spatial` are as fast
LEAST_POSITIONS, WIDE_ACCESS = 64, 8


def faster_as_skewed(problem: SpatialProblem, device: Device, plan: Plan, way: Held | None) -> SpatialConfig | None:
    """The config of skewed tiles where they are faster than `plan`; else None.

    A plane that one program holds is faster there, except where one or two programs fill a multiprocessor. Tiles of few
    positions are slower than others that are read in wide accesses, and than registers that hold planes as `way` says.
    """
    twice, held = plan.regime == "spatial_two_pass", way is not None and way.speed >= LEAST_SPEED
    fewest = FEWEST_TWICE if twice and not held else FEWEST
    enough = fewest <= problem.inner <= MOST and problem.n_cols >= LEAST_COLS
    skewed = skewed_config(problem, device) if enough and not (plan.skewed or plan.overlap) else None
    if skewed is None:
        return None
    if plan.gathered:
        crowded = problem.backward or plan.num_warps >= CROWDED_WARPS
        fitting = plan.fitting_planes
        wide = (
            fitting == 2
            and skewed.inner == POSITIONS[0]
            and empty_of(problem, skewed.inner, skewed.skewed // problem.itemsize) <= MOST_EMPTY
        )
        return skewed if crowded and (wide or (fitting == 1 and skewed.inner >= LEAST_POSITIONS)) else None
    if skewed.inner >= LEAST_POSITIONS:
        return skewed
    return skewed if not held and (twice or problem.vec * problem.itemsize < WIDE_ACCESS) else None


def skewed_config(problem: SpatialProblem, device: Device) -> SpatialConfig | None:
    """The config of the widest skewed tiles filled enough; None where no cluster holds one, or runs start at vectors.

    >>> from .types import DEVICES
    >>> planes = SpatialProblem(1231, 166, "bfloat16", 2, in_phase=True)
    >>> skewed_config(planes, DEVICES["sm_90"]).inner
    64
    """
    if not problem.in_phase or problem.batch_invariant or problem.vec == problem.full_vec or device.max_cluster == 1:
        return None
    for more_warps in (False, True):
        for positions in POSITIONS:
            for nearly in (False, True):
                for thread_bytes in THREAD_BYTES[problem.itemsize]:
                    tile = _on_ctas(problem, device, positions, thread_bytes, more_warps)
                    if tile is not None and _is_filled(problem, device, tile, nearly):
                        return tile.config
    return None


class _Tile(NamedTuple):
    config: SpatialConfig
    registers: int  # of a thread for its columns


def _is_filled(problem: SpatialProblem, device: Device, tile: _Tile, nearly: bool) -> bool:
    """Whether whole tiles have few positions more than exist; `nearly`: or somewhat more, except the narrowest."""
    (config, registers), positions = tile, tile.config.inner
    unit = config.skewed // problem.itemsize
    empty = empty_of(problem, positions, unit)
    if not nearly:
        return empty <= MOST_EMPTY
    if positions == POSITIONS[-1]:
        return False
    if positions == POSITIONS[0]:
        few = config.ctas <= NEARLY_CTAS or registers in NEARLY_REGISTERS
        return few and empty <= min(NEARLY_FILLED, OF_NARROWER * empty_of(problem, positions // 2, unit))
    held = problem.backward or config.ctas < device.max_cluster or registers >= LEAST_REGISTERS
    return held and empty <= NEARLY_FILLED


def empty_of(problem: SpatialProblem, positions: int, unit: int) -> float:
    """Positions of whole tiles over those that exist. unit: positions of a thread."""
    overlap = problem.overlap_of(unit)
    return tiles_of(problem.inner, positions, overlap, unit) * (positions - overlap) / problem.inner


class _Cluster(NamedTuple):
    ctas: int
    num_warps: int
    registers: int  # of a thread for its columns, at most
    thread_bytes: tuple[int, ...] = (8, 16)


def _clusters(problem: SpatialProblem, device: Device, positions: int) -> tuple[_Cluster, ...]:
    """Clusters for each tile of so many positions, best first."""
    few = FEW_REGISTERS[problem.backward, problem.itemsize]

    def most(ctas: int) -> int:
        if problem.itemsize == 2 and not problem.backward:
            if positions == POSITIONS[-1]:
                return NARROW_REGISTERS[ctas == device.max_cluster]
            if positions < POSITIONS[0] and ctas == 1:
                return ALONE_REGISTERS
        return few

    of_few = tuple(_Cluster(ctas, 4, most(ctas)) for ctas in (1, 2, 4, 8, 16))
    # 8 CTAs of 8 warps are faster than 16 of 4 in 16 bits, except where few registers are enough
    of_8 = () if problem.backward else (_Cluster(8, 8, MOST_REGISTERS, (8,)),)
    return *of_few, *of_8, _Cluster(16, 4, MOST_REGISTERS)


def _on_ctas(
    problem: SpatialProblem, device: Device, positions: int, thread_bytes: int, more_warps: bool
) -> _Tile | None:
    """The tile on the first cluster that holds the columns; None where none does."""
    most = min(device.max_cluster, WIDE_CTAS) if positions == POSITIONS[0] else device.max_cluster
    clusters = (_Cluster(16, 8, MOST_REGISTERS),) if more_warps else _clusters(problem, device, positions)
    for of in clusters:
        cols = of.num_warps * device.warp_size * thread_bytes // problem.itemsize // positions
        registers = problem.words(cols * of.ctas, thread_bytes)
        if of.ctas <= most and registers <= of.registers and thread_bytes in of.thread_bytes:
            config = SpatialConfig(
                problem.n_cols, of.ctas, of.num_warps, positions, thread_bytes=thread_bytes, skewed=thread_bytes
            )
            return _Tile(config, registers)
    return None
