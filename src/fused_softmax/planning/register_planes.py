"""Plans of planes (n_cols, inner) in the registers of a program or a cluster, and when they are faster than others.

`held_planes` estimates the speed of the best way to hold a plane. Each other kind of plan has a speed here, from which
registers are faster.
docs/measurements/thresholds.md has the figures behind the numbers.
"""

from __future__ import annotations

from .held_planes import MOST_WARPS, SMALL_WARPS, Held, Plane, best_held, registers_of
from .types import WIDE_POSITIONS, Device, Plan, SpatialProblem

# speeds of other plans, fractions of a copy or an add; by (backward, bytes of an element), or by the latter alone.
# Columns that are read twice
TWICE = {(False, 2): 0.6, (False, 4): 0.66, (True, 2): 0.5, (True, 4): 0.62}
# a softmax's piece of one program: whose threads have so many columns, or which has 16 warps and so many lanes for each
# position
MANY_COLS, MANY_LANES, CROWDED_PIECE = 25, 32, {2: 0.75, 4: 0.9}
# others of float32: of more positions those of 16 warps alone, which may be alone on a multiprocessor. Of 16 bits, by
# the columns of a thread at least, where registers hold such a share of the vectors; with fewer columns where they hold
# LEAST_SHARE, and the plane has so many bytes
FLOAT_PIECE, PIECE_POSITIONS, PIECE_ALONE = 0.94, 100, 0.85
PIECES, PIECE, LEAST_SHARE, LEAST_PIECE = ((34, 0.4, 0.85), (25, 0.58, 0.93)), 0.93, 0.7, 12 << 10
GRADIENT_PIECE = {2: 0.85, 4: 0.9}
FILLED, FILLED_GRADIENT = 1.1, 1.05  # tiles that are filled up by no more, of a softmax and of a gradient
# a softmax's tiles: where runs start at parts of a vector, and a program has more than FEW_CHUNKS or several warps;
# tiles of FEW_POSITIONS have the first speed
PART_TILES, FEW_CHUNKS, FEW_POSITIONS = {2: 0.7, 4: 0.8}, 16, 16
# of 16 bits: of whole vectors, filled ones of a cluster, and all of more than MOST_POSITIONS; others
CLUSTER_TILES, MOST_POSITIONS, TILES = 0.93, 100, 0.78
# of 16 bits that are skewed, by whether runs start at multiples of 2 or 4 bytes, and whether tiles have WIDE_POSITIONS
SKEWED_HALVES = {(False, False): 0.75, (False, True): 0.93, (True, False): 0.74, (True, True): 0.82}
# of float32 that overlap, that are skewed, and CROWDED: skewed where one program holds the plane, overlapping if filled
# up by more than EMPTY_FLOATS, or others of 16 warps
OVERLAPPING_FLOATS, SKEWED_FLOATS, CROWDED_FLOATS, EMPTY_FLOATS = 0.94, 0.95, 0.9, 1.4
# a gradient's: of 16 bits that overlap or are skewed, by whether they have NARROW_TILE positions or more; of float32
# that overlap, or are skewed, by whether a cluster holds the plane
SLOW_TILES, NARROW_TILE = {False: 0.75, True: 0.807}, 64
OVERLAPPING_GRADIENT, SKEWED_GRADIENT = 0.915, {False: 0.87, True: 0.95}
# by the bytes of an element, that are filled up, or of 16 bits read in narrow accesses (bytes) or by many warps (where
# runs start at parts of a vector they are SLOW_TILES); others
EMPTY_TILES, NARROW_ACCESS, MANY_WARPS, GRADIENT_TILES = {2: 0.88, 4: 0.93}, 4, 8, 0.955


def faster_as_held(problem: SpatialProblem, way: Held | None, plan: Plan) -> Plan | None:
    """The plan of planes that registers hold in such a way where it is faster than `plan`; else None."""
    if way is None:
        return None
    speed = _gradient_speed(problem, plan, way) if problem.backward else _softmax_speed(problem, plan, way)
    return held_plan(problem, way) if speed is not None and way.speed >= speed else None


def _softmax_speed(problem: SpatialProblem, plan: Plan, way: Held) -> float | None:
    """About the speed of a softmax's plan; None where registers are not faster."""
    half, filled = problem.itemsize == 2, plan.filled_up(problem.inner) <= FILLED
    if plan.regime == "spatial_two_pass":
        return TWICE[False, problem.itemsize]
    if plan.gathered:
        return _piece_speed(problem, plan, way)
    plain, parts = not (plan.skewed or plan.overlap), problem.vec < problem.full_vec
    few = plan.ctas == 1 and plan.num_warps <= SMALL_WARPS[-1]
    if plain and parts:
        # few columns of one program that they fill are as fast in tiles
        if few and filled and plan.chunks <= FEW_CHUNKS:
            return None
        return PART_TILES[2 if plan.rows <= FEW_POSITIONS else problem.itemsize]
    if half:
        if few and filled:
            return None
        return _half_tiles_speed(problem, plan)
    if plan.skewed:
        return CROWDED_FLOATS if way.ctas == 1 else SKEWED_FLOATS
    if plan.overlap:
        return OVERLAPPING_FLOATS if plan.filled_up(problem.inner) <= EMPTY_FLOATS else CROWDED_FLOATS
    return CROWDED_FLOATS if plan.num_warps == MOST_WARPS else None


def _half_tiles_speed(problem: SpatialProblem, plan: Plan) -> float:
    """About the speed of a 16-bit softmax's tiles."""
    if plan.ctas > 1 and problem.vec == problem.full_vec and plan.filled_up(problem.inner) <= FILLED:
        return CLUSTER_TILES
    long = problem.inner > MOST_POSITIONS
    few = problem.starts < problem.sector // 4
    speed = SKEWED_HALVES[few, plan.rows >= WIDE_POSITIONS] if plan.skewed else CLUSTER_TILES
    return speed if long else min(speed, TILES)


def _piece_speed(problem: SpatialProblem, plan: Plan, way: Held) -> float | None:
    """About the speed of a softmax's pieces of shared memory; None where registers are not faster."""
    large, crowded = problem.itemsize == 4 and problem.inner > PIECE_POSITIONS, plan.num_warps == MOST_WARPS
    if large and crowded and plan.fitting_planes == 1:
        return PIECE_ALONE
    if crowded and (plan.vectors_per_chunk == MANY_LANES or plan.chunks >= MANY_COLS):
        return CROWDED_PIECE[problem.itemsize]
    if problem.itemsize == 4:
        return None if large and not crowded else FLOAT_PIECE
    for cols, share, speed in PIECES:
        if plan.chunks >= cols:
            return speed if way.share >= share else None
    return PIECE if way.share >= LEAST_SHARE and problem.plane_bytes >= LEAST_PIECE else None


def _gradient_speed(problem: SpatialProblem, plan: Plan, way: Held) -> float | None:
    """About the speed of a gradient's plan; None where registers are not faster."""
    half, filled = problem.itemsize == 2, plan.filled_up(problem.inner) <= FILLED_GRADIENT
    if plan.regime == "spatial_two_pass":
        return TWICE[True, problem.itemsize]
    if plan.gathered:
        return GRADIENT_PIECE[problem.itemsize]
    if plan.skewed or plan.overlap:
        if half:
            return SLOW_TILES[plan.rows >= NARROW_TILE]
        return SKEWED_GRADIENT[way.ctas > 1] if plan.skewed else OVERLAPPING_GRADIENT
    if filled and plan.ctas > 1 and problem.whole_sectors:
        return None
    slow = half and (plan.num_warps >= MANY_WARPS or plan.vec * problem.itemsize <= NARROW_ACCESS)
    if filled and not slow:
        return GRADIENT_TILES
    return SLOW_TILES[True] if half and problem.vec < problem.full_vec else EMPTY_TILES[problem.itemsize]


def best_way(problem: SpatialProblem, device: Device) -> Held | None:
    """The fastest way to hold the planes in registers; None where no cluster may.

    >>> from .types import DEVICES
    >>> planes = SpatialProblem(300, 251, "bfloat16", 1, packed=True)
    >>> best_way(planes, DEVICES["sm_90"]).ctas
    2
    """
    return best_held(plane_of(problem), cluster_sizes(device)) if may_be_held(problem, device) else None


def may_be_held(problem: SpatialProblem, device: Device) -> bool:
    """Whether planes may lie in the registers of a cluster."""
    return problem.packed and not problem.batch_invariant and device.adds_shared_memory


def plane_of(problem: SpatialProblem) -> Plane:
    """The plane of a problem."""
    return Plane(problem.n_cols, problem.inner, problem.itemsize, problem.backward, problem.log)


def cluster_sizes(device: Device) -> tuple[int, ...]:
    """CTAs that a cluster which holds a plane in its registers may have."""
    # of the sizes above 8 Triton's launcher allows 16 alone
    sizes = (1, 2, 4, 8, 16) if device.kind == "interpreter" else (*range(1, 9), 16)
    return tuple(size for size in sizes if size <= device.max_cluster)


def held_plan(problem: SpatialProblem, way: Held) -> Plan:
    """The plan of planes that a cluster holds in its registers as `way` says."""
    plane, threads = f"a plane of {problem.n_cols} x {problem.inner}", way.num_warps * 32
    return Plan(
        "spatial_cluster" if way.ctas > 1 else "spatial", 1, way.ctas, 1, way.lanes, problem.full_vec, way.chunks,
        way.full, False, problem.itemsize == 2, way.num_warps, registers_of(plane_of(problem), way),
        f"{plane} in the registers of {way.ctas} CTAs, {way.span} of {threads} threads", periodic=way.span,
    )  # fmt: skip
