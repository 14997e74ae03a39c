"""Skewed tiles over few positions whose runs start anywhere: of planes that programs hold slowly, or not alone.

Each column of a skewed tile starts at its own multiple of a thread's bytes, so all accesses are aligned vectors. The
tables of `spatial` have such tiles for four tiles of positions and more. With fewer, what counts is how much of the
last one is empty: the widest tile is taken of which little is, on as few CTAs as hold the columns in few registers.
"""

from __future__ import annotations

from typing import NamedTuple

from .spatial_tables import SpatialConfig
from .types import Device, Plan, SpatialProblem, tiles_of

# positions of a tile, widest first, and what whole tiles may have over those that exist
POSITIONS, MOST_EMPTY = (128, 64, 32), 1.2
# of a tensor, at least: in place of columns that are read twice, and of other plans. Beyond the most the tables have
# skewed tiles of each width
FEWEST_TWICE, FEWEST, MOST = 48, 100, 511
# bytes of a thread's vectors, by those of an element; the first whose tiles are filled
THREAD_BYTES = {2: (8,), 4: (16, 8)}
# registers of a thread for its columns, by `backward`: as many CTAs as need no more than FEW, and MOST_REGISTERS where
# a cluster has no more CTAs. H200, fraction of a copy or an add, 6e7 elements, with the plan before and with this one:
# softmax, bfloat16 700 columns of 300 positions 0.64 and 0.87, 1,231 of 166 0.61 and 0.79, 3,817 of 195 0.54 and 0.74;
# float32 1,231 of 166 0.70 and 0.87; gradients, bfloat16 1,284 of 297 0.49 and 0.91, 213 of 350 0.61 and 0.91; float32
# 307 of 201 0.88 and 0.98, 2,144 of 87 0.54 and 0.80
FEW_REGISTERS, MOST_REGISTERS = {False: 44, True: 56}, 76
WIDE_CTAS = 8  # of a tile of the most positions: narrower tiles need fewer
# columns, at least; fewer were not timed in place of other tiles, except these: 30 float32 columns of 350 positions, a
# gradient, 1.04 and 1.10 of its speed, 12 bfloat16 ones of 500 0.61; 3 bfloat16 ones of 156 5.4 times its time
LEAST_COLS = 60
# programs of so many warps, which hold a plane in shared memory, are two on a multiprocessor; with so many registers
# one (those of 8 warps were not timed). H200, 1.2e7 and 6e7 elements, before and with skewed tiles. One: bfloat16 246
# columns of 327 positions 0.67 and 0.64, 1.29 and 0.87; the gradient of 150 of 330 0.75 and 0.83, 1.09 and 1.02;
# slower: float32 298 of 155 (tiles of 64) 0.91 and 0.91, 1.16 and 0.84. Two: bfloat16 142 of 327 (tiles of 128) 1.09
# and 0.95, 1.23 and 0.95; 298 of 155 (64) 1.11 and 1.00, 1.20 and 0.71
CROWDED_WARPS, ALONE_REGISTERS = 16, 128
# positions of a tile, and bytes of an access, from which the tiles of `spatial` are as fast: 4,560 bfloat16 columns of
# 276 positions, a gradient, 0.73 in tiles of 64 read by 8 bytes, 0.64 in skewed tiles of 32; but 1,656 float32 columns
# of 115, by 4 bytes, 0.71 and 0.83
LEAST_POSITIONS, WIDE_ACCESS = 64, 8


def faster_as_skewed(problem: SpatialProblem, device: Device, plan: Plan) -> SpatialConfig | None:
    """The config of skewed tiles where they are faster than `plan`; else None.

    A plane that one program holds is faster there, except where one or two programs fill a multiprocessor. Tiles of few
    positions are slower than others that are read in wide accesses, and than the registers of a few CTAs.
    """
    twice = plan.regime == "spatial_two_pass"
    enough = (FEWEST_TWICE if twice else FEWEST) <= problem.inner <= MOST and problem.n_cols >= LEAST_COLS
    skewed = skewed_config(problem, device) if enough and not plan.skewed else None
    if skewed is None:
        return None
    if plan.ctas == 1 and (plan.gathered or plan.periodic):
        alone = plan.max_registers is not None and plan.max_registers >= ALONE_REGISTERS
        crowded = plan.gathered and plan.num_warps >= CROWDED_WARPS
        return skewed if crowded and skewed.inner >= (LEAST_POSITIONS if alone else POSITIONS[0]) else None
    if skewed.inner >= LEAST_POSITIONS or twice:
        return skewed
    if plan.periodic:
        return skewed if plan.ctas == device.max_cluster else None
    return skewed if problem.vec * problem.itemsize < WIDE_ACCESS else None


def skewed_config(problem: SpatialProblem, device: Device) -> SpatialConfig | None:
    """The config of the widest skewed tiles that are filled; None where no cluster holds one, or runs start at vectors.

    >>> from .types import DEVICES
    >>> planes = SpatialProblem(1231, 166, "bfloat16", "bfloat16", 2, in_phase=True)
    >>> skewed_config(planes, DEVICES["sm_90"]).inner
    64
    """
    cast = problem.dtype != problem.out_dtype
    unlike = cast or not problem.in_phase or problem.batch_invariant
    if unlike or problem.vec == problem.full_vec or device.max_cluster == 1:
        return None
    for clusters in _clusters(problem):
        for positions in POSITIONS:
            for thread_bytes in THREAD_BYTES[problem.itemsize]:
                if _is_filled(problem, positions, thread_bytes // problem.itemsize):
                    config = _on_ctas(problem, device, positions, thread_bytes, clusters)
                    if config is not None:
                        return config
    return None


def _is_filled(problem: SpatialProblem, positions: int, unit: int) -> bool:
    """Whether the positions of whole tiles are few more than those that exist. unit: positions of a thread."""
    overlap = problem.overlap_of(unit)
    tiles = tiles_of(problem.inner, positions, overlap, unit)
    return tiles * (positions - overlap) <= MOST_EMPTY * problem.inner


class _Cluster(NamedTuple):
    ctas: int
    num_warps: int
    registers: int  # of a thread for its columns, at most
    thread_bytes: tuple[int, ...] = (8, 16)


def _clusters(problem: SpatialProblem) -> tuple[tuple[_Cluster, ...], ...]:
    """Clusters for each tile, best first; and those of more warps, for columns that no tile of these holds."""
    few = FEW_REGISTERS[problem.backward]
    of_few = tuple(_Cluster(ctas, 4, few) for ctas in (1, 2, 4, 8, 16))
    # H200, 6e7 elements, 16 CTAs of 4 warps and 8 of 8, over the plan before: softmax of 3,817 bfloat16 columns of 195
    # positions 1.26 and 1.36, in float32 1.35 and 1.25
    of_8 = () if problem.backward else (_Cluster(8, 8, MOST_REGISTERS, (8,)),)
    return (*of_few, *of_8, _Cluster(16, 4, MOST_REGISTERS)), (_Cluster(16, 8, MOST_REGISTERS),)


def _on_ctas(
    problem: SpatialProblem, device: Device, positions: int, thread_bytes: int, clusters: tuple[_Cluster, ...]
) -> SpatialConfig | None:
    """The config on the first cluster that holds the columns; None where none does."""
    most = min(device.max_cluster, WIDE_CTAS) if positions == POSITIONS[0] else device.max_cluster
    for of in clusters:
        cols = of.num_warps * device.warp_size * thread_bytes // problem.itemsize // positions
        registers = (1 + problem.backward) * -(-problem.n_cols // (cols * of.ctas)) * thread_bytes // 4
        if of.ctas <= most and registers <= of.registers and thread_bytes in of.thread_bytes:
            return SpatialConfig(
                problem.n_cols, of.ctas, of.num_warps, positions, thread_bytes=thread_bytes, skewed=thread_bytes
            )
    return None
