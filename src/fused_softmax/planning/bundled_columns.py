"""When many columns whose runs of positions start anywhere are read twice in bundles, and how long a bundle is.

A plane (n_cols, inner) is one piece of memory, so `bundle` columns of it are a row of bundle * inner elements, which
starts at a sector if the first one does. Kernels reduce and write such rows in whole vectors, whatever `inner` is.

docs/measurements/thresholds.md has the figures behind the thresholds.
"""

from __future__ import annotations

from .spatial_tables import PARTS
from .types import Plan, SpatialProblem

# a bundle is filled enough where whole tiles have at most so many times its positions. Bundles of up to so many tiles
# are tried. A plane has at least so many bundles, and so many bytes: no smaller one was timed
FILLED, MOST_TILES = 1.1, 16
FEWEST_BUNDLES, LEAST_BYTES = 64, 1 << 19
# the fewest positions of an even number for which bundles are faster than columns that are read twice as they are, by
# (backward, bytes of an element); 1 << 31: never. For odd ones they always are
EVEN = {(False, 2): 64, (False, 4): 32, (True, 2): 1 << 31, (True, 4): 64}
# of a 16-bit softmax whose runs start at halves of sectors: where tiles have so many times the positions, and from so
# many positions on
LEAST_EMPTY, LEAST_HALVES = 1.2, 33
# columns from which bundles are faster than narrow tiles of a softmax on a cluster: than skewed ones of 32 positions,
# and than float32 ones of up to TILE positions where there are so many
SKEWED_COLS, TILE_COLS, TILE_POSITIONS, TILE = 7169, 5001, 90, 16


def bundle_of(problem: SpatialProblem) -> int:
    """The columns of a bundle: the fewest whose positions fill tiles, else those that fill them most.

    >>> bundle_of(SpatialProblem(400000, 5, "bfloat16", 1, packed=True))
    48
    """
    period, tile = problem.period, PARTS.n_bytes // problem.itemsize
    best, emptiest = period, float("inf")
    for bundle in range(period, max(period, MOST_TILES * tile // problem.inner) + 1, period):
        width = bundle * problem.inner
        empty = -(-width // tile) * tile / width
        if empty < emptiest:
            best, emptiest = bundle, empty
        if empty <= FILLED:
            break
    return best


def faster_as_bundled(problem: SpatialProblem, plan: Plan) -> int | None:
    """The columns of a bundle where bundles are faster than `plan`; None where they are not, or cannot be."""
    cannot = not problem.packed or problem.batch_invariant or problem.inner < 2 or problem.period == 1
    if cannot or problem.plane_bytes < LEAST_BYTES or not _is_faster(problem, plan):
        return None
    bundle = bundle_of(problem)
    return bundle if problem.n_cols >= FEWEST_BUNDLES * bundle + problem.period else None


def _is_faster(problem: SpatialProblem, plan: Plan) -> bool:
    """Whether bundles are faster than `plan`."""
    if plan.regime == "spatial_two_pass":
        return _faster_than_two_reads(problem, plan)
    if plan.periodic:
        return False
    return problem.vec < problem.full_vec and _faster_than_tiles(problem, plan)


def _faster_than_two_reads(problem: SpatialProblem, plan: Plan) -> bool:
    """Whether bundles are faster than columns that are read twice as they are."""
    kind, inner = (problem.backward, problem.itemsize), problem.inner
    if problem.vec == problem.full_vec:
        empty = -(-inner // plan.rows) * plan.rows >= LEAST_EMPTY * inner
        return kind == (False, 2) and empty and inner >= LEAST_HALVES
    return inner % 2 == 1 or inner >= EVEN[kind]


def _faster_than_tiles(problem: SpatialProblem, plan: Plan) -> bool:
    """Whether bundles are faster than narrow tiles of a softmax whose columns the CTAs of a cluster hold."""
    if problem.backward:
        return False
    if plan.skewed:
        return problem.n_cols >= SKEWED_COLS
    many = problem.n_cols >= TILE_COLS and problem.inner >= TILE_POSITIONS
    return problem.itemsize == 4 and plan.rows <= TILE and many
