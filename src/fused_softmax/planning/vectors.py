"""How a row falls into vectors, and a slice of it into chunks. Pure Python, no I/O."""

from __future__ import annotations

from .config_tables import UNALIGNED_MIN_COLS
from .types import Problem


def geometry(problem: Problem) -> tuple[int, bool]:
    """(vec, unaligned): the width of a vector access, and whether rows have an unaligned head and tail."""
    if problem.vec < problem.full_vec and problem.in_phase and problem.n_cols >= UNALIGNED_MIN_COLS[problem.itemsize]:
        return problem.full_vec, True
    return problem.vec, False


def vectors_of(problem: Problem) -> int:
    """The vectors of a row, of which the last may be one in part; of an unaligned row those between its ends."""
    vec, unaligned = geometry(problem)
    return problem.n_cols // vec if unaligned else -(-problem.n_cols // vec)


def unpredicated_chunks(
    units: int, ctas: int, vectors: int, chunks: int, unaligned: bool, backward: bool = False
) -> int:
    """Chunks that lie inside every slice: all where powers of two divide the row so, else all except the last two.

    An unaligned row of n columns has n//vec or one vector fewer between head and tail, and the last slice is the
    shortest. Long gradients keep two predicates that they do not need. Without them, at 262,144 columns of bfloat16,
    the compiler orders their loads so that they reach 0.86 of the add; with them, they reach 0.98.
    """
    if backward and chunks >= 8:
        unaligned = True
    if not unaligned and units == ctas * vectors * chunks and chunks in (1, 2, 3, 4, 8, 16):  # widths share kernels
        return chunks
    return max(0, chunks - 2) if shortest_slice(units, ctas, unaligned) >= (chunks - 2) * vectors else 0


def shortest_slice(units: int, ctas: int, unaligned: bool) -> int:
    """Vectors of the row's shortest slice, the last. An unaligned row may have one less between head and tail."""
    return min(u - (ctas - 1) * -(-u // ctas) for u in ((units, units - 1) if unaligned else (units,)))
