"""Plans of many columns whose runs of positions start anywhere: they are read twice, in folds.

A plane (n_cols, inner) is one piece of memory, so `fold` columns of it are a row of fold * inner elements, which starts
at a sector if the first one does. Kernels reduce and write such rows in whole vectors, whatever `inner` is.
"""

from __future__ import annotations

from .held_planes import MOST_CTAS, MOST_WARPS
from .spatial_tables import PARTS
from .types import Plan, SpatialProblem

# positions of whole tiles over those of a fold, at most; and the tiles of a fold that reaches this, at most
FILLED_FOLD, MOST_TILES = 1.1, 16
FEWEST_FOLDS = 64  # of a plane
# where columns are read twice: the even positions from which folds are faster, by (backward, bytes of an element), and
# the first that is too many; odd ones always are. H200, 1.2e7 and 6.7e7 elements, fraction of a copy or an add, before
# and in folds: bfloat16 softmax of 66,852 columns of 17 positions 0.39 and 0.33, 0.57 and 0.54; gradient 0.32 and 0.33,
# 0.45 and 0.52; 88,977 of 622 0.43, 0.60; 45,975 of 46 0.58 and 0.54, 0.59 and 0.56; slower: 114,267 of 12 0.64 and
# 0.57, 0.58 and 0.55. float32 softmax of 18,080 of 150 0.66 and 0.57, 0.68 and 0.65; gradient of 128,542 of 202 0.54,
# 0.58
EVEN = {(False, 2): (64, 1 << 31), (False, 4): (32, 1 << 31), (True, 2): (1, 0), (True, 4): (64, 512)}
# a 16-bit softmax whose runs start at halves of sectors, where tiles are wider than the positions by so much: 26,308
# columns of 72 positions 0.47 and 0.46, 0.56 and 0.55; slower: 42,508 of 56 (1.14) 0.66 and 0.60, 0.62 and 0.55; 30,411
# of 24 0.80 and 0.87, 0.77 and 0.80
LEAST_EMPTY, LEAST_HALVES = 1.2, 32
# columns from which folds are faster than narrow tiles of a softmax on a cluster: than skewed ones of 32 positions, and
# float32 ones of 16 where there are so many positions. bfloat16 9,001 columns of 103 positions 0.38 and 0.34, 0.55 and
# 0.54; float32 9,355 of 171 0.48 and 0.44, 0.67 and 0.64; 5,935 of 990 0.54 and 0.47, 0.67 and 0.65; slower: bfloat16
# 3,198 of 134 0.61 and 0.58, 0.52 and 0.48; float32 8,508 of 1,490 in tiles of 32 with 1.2e7 elements, by a sixth
SKEWED_COLS, TILE_COLS, TILE_POSITIONS, TILE = 7169, 5001, 90, 16


def fold_of(problem: SpatialProblem) -> int:
    """The columns of a fold: the fewest whose positions fill tiles, else those that fill them most.

    >>> fold_of(SpatialProblem(400000, 5, "bfloat16", "bfloat16", 1, packed=True))
    48
    """
    period, tile = problem.period, PARTS.n_bytes // problem.itemsize
    best, emptiest = period, float("inf")
    for fold in range(period, max(period, MOST_TILES * tile // problem.inner) + 1, period):
        width = fold * problem.inner
        empty = -(-width // tile) * tile / width
        if empty < emptiest:
            best, emptiest = fold, empty
        if empty <= FILLED_FOLD:
            break
    return best


def faster_as_folded(problem: SpatialProblem, plan: Plan) -> int | None:
    """The columns of a fold where folds are faster than `plan`; None where they are not, or cannot be."""
    apart = not problem.packed or problem.batch_invariant or problem.dtype != problem.out_dtype
    if apart or problem.inner < 2 or problem.period == 1:
        return None
    if plan.regime == "spatial_two_pass":
        faster = _faster_than_two_reads(problem, plan)
    elif plan.periodic or plan.gathered:
        faster = plan.periodic > 0 and _faster_than_planes(problem, plan)
    else:
        faster = problem.vec < problem.full_vec and _faster_than_tiles(problem, plan)
    fold = fold_of(problem) if faster else problem.n_cols
    return fold if problem.n_cols >= FEWEST_FOLDS * fold + problem.period else None


def _faster_than_two_reads(problem: SpatialProblem, plan: Plan) -> bool:
    """Whether folds are faster than columns that are read twice as they are."""
    kind, inner = (problem.backward, problem.itemsize), problem.inner
    if problem.vec == problem.full_vec:
        empty = -(-inner // plan.rows) * plan.rows >= LEAST_EMPTY * inner
        return kind == (False, 2) and empty and inner > LEAST_HALVES
    least, end = EVEN[kind]
    return inner % 2 == 1 or least <= inner < end


def _faster_than_planes(problem: SpatialProblem, plan: Plan) -> bool:
    """Whether folds are faster than planes in registers: of a softmax whose programs fill a multiprocessor each."""
    crowded = plan.num_warps == MOST_WARPS and not problem.backward
    return crowded and (problem.itemsize == 2 or plan.ctas > MOST_CTAS)


def _faster_than_tiles(problem: SpatialProblem, plan: Plan) -> bool:
    """Whether folds are faster than narrow tiles of a softmax whose columns the CTAs of a cluster hold."""
    if problem.backward:
        return False
    if plan.skewed:
        return problem.n_cols >= SKEWED_COLS
    many = problem.n_cols >= TILE_COLS and problem.inner >= TILE_POSITIONS
    return problem.itemsize == 4 and plan.rows <= TILE and many
