"""How planes (n_cols, inner) lie in the registers of a program or a cluster, and when that is faster. Counts only.

A thread steps by a multiple of the period of the positions (`kernels/common/periodic_slots`), so a program has threads
without vectors. Bytes in flight are the limit, so in the best way the threads hold the most vectors. `planes` has the
plans.
docs/measurements/thresholds.md has the figures behind the thresholds.
"""

from __future__ import annotations

from math import gcd, log2
from typing import NamedTuple

VECTOR_BYTES = 16
HELD_REGISTERS = 128  # of a thread
# of programs of SMALL_WARPS with up to so many vectors, by (backward, bytes of an element): then more programs fit
SMALL_REGISTERS = {(False, 2): ((12, 96),), (False, 4): (), (True, 2): ((5, 80), (6, 96)), (True, 4): ((5, 80),)}
# vectors of a thread of each tensor, at most, by (backward, bytes of an element). More spill too much at the cap
MOST_VECTORS = {(False, 2): 20, (False, 4): 20, (True, 2): 11, (True, 4): 12}
# warps of a program, best first, and what the next ones hold over what these hold, at least
HELD_WARPS = {(False, 2): (8, 4), (False, 4): (16, 8, 4), (True, 2): (16, 8, 4), (True, 4): (16, 8, 4)}
LEAST_HELD_GAIN = 1.1
# a 16-bit plane of more than so many CTAs, by `backward`: twice the CTAs, up to MOST_CTAS, with half of the warps,
# where they hold as much as this of what the others do. float32 loses
HALVED_ABOVE, MOST_CTAS, LEAST_HALVED = {False: 1, True: 2}, 8, 0.85
# of fewer positions, which few threads reduce: faster with 8 warps than with 16
FEW_POSITIONS, FEW_WARPS = 16, (8, 4, 16)
# what twice the CTAs hold counts for: they wait for each other, and begin and end together
OF_DOUBLED = 0.92
HELD_POSITIONS = 256  # of a plane, at most: more take 512 threads, of which up to half are idle
MOST_WARPS = 16  # of a program, which then fills a multiprocessor
OF_A_GROUP = 16  # multiprocessors that share clusters: a cluster lies in one such group
SMALL_WARPS = (1, 2, 4)  # of one program that holds a small plane
# the least share of the vectors that all threads could hold, by `backward`
LEAST_HELD = {False: 0.52, True: 0.5}
# of gradients, also where pieces in shared memory or tiles would do. A cluster gains where tiles are wider than the
# positions by FILLED_UP
LEAST_HELD_GRADIENT, FILLED_UP = 0.6, 1.15
# of gradients of few positions: where few warps may hold planes, too; of float32 in one program of 8 warps, where runs
# start at multiples of two elements and tiles are wider by FILLED_UP
LEAST_HELD_SINGLE, LEAST_HELD_PAIRS = 0.5, 0.8
# of gradients whose runs are whole sectors, where tiles are so wide
LEAST_HELD_WHOLE = 0.75
# of a gradient in one program of SMALL_WARPS: True where runs start anywhere and tiles are so wide, False elsewhere
LEAST_HELD_SMALL = {True: 0.4, False: 0.5}
# bytes: 16-bit gradients whose runs start at such multiples have few warps where tiles are so wide
SMALL_ACCESS = 4
# of a 16-bit softmax in one program of SMALL_WARPS, in place of a piece of so many warps, and columns of a thread
LEAST_HELD_PIECE, OF_PIECE_WARPS, OF_PIECE_COLS = 0.9, 8, 34
# of such a softmax whose runs start anywhere, in place of tiles
LEAST_HELD_ANYWHERE = 0.6


class Plane(NamedTuple):
    """A plane, and the bytes of its elements. backward: of a gradient, which holds two tensors.

    vec: elements at whose multiples runs of `inner` start. whole_sectors: whether they start at sectors.
    """

    n_cols: int
    inner: int
    itemsize: int
    backward: bool
    vec: int = 1
    whole_sectors: bool = False


class Held(NamedTuple):
    """How a cluster holds a plane."""

    share: float  # vectors that a multiprocessor holds over the most
    num_warps: int
    ctas: int
    chunks: int  # vectors of a thread
    full: int  # chunks that all CTAs fill
    lanes: int  # threads that merge the sums of a position
    span: int  # vectors from a thread's chunk to its next one


def most_held(plane: Plane, clusters: tuple[int, ...]) -> Held | None:
    """The best way to hold a plane in clusters of such sizes; None where none holds it.

    >>> most_held(Plane(300, 251, 2, False), (1, 2, 4)).ctas
    2
    """
    if not _has_room(plane):
        return None
    kind, best = (plane.backward, plane.itemsize), None
    for warps in FEW_WARPS if plane.inner < FEW_POSITIONS else HELD_WARPS[kind]:
        # one CTA of 16 warps would be alone on its multiprocessor, and wait for its own loads
        for ctas in clusters:
            found = held_in(plane, warps, ctas) if ctas > 1 or warps < MOST_WARPS else None
            if found is not None and (best is None or found.share > LEAST_HELD_GAIN * best.share):
                best = found
    if best is None or best.ctas <= HALVED_ABOVE[plane.backward] or plane.itemsize != 2 or best.num_warps < 8:
        return best
    halved = (held_in(plane, best.num_warps // 2, ctas) for ctas in clusters if ctas <= MOST_CTAS)
    most = max((found for found in halved if found is not None), default=best)
    return most if most.share >= LEAST_HALVED * best.share else best


def held_by_few_warps(plane: Plane) -> Held | None:
    """One program of few warps, of those whose threads hold the most vectors; None where none holds the plane.

    >>> held_by_few_warps(Plane(453, 9, 2, True)).num_warps
    2
    """
    found = (held_in(plane, warps, 1) for warps in SMALL_WARPS) if _has_room(plane) else ()
    return max(filter(None, found), key=lambda way: way.share, default=None)


def _has_room(plane: Plane) -> bool:
    """Whether it is a plane, of no more positions than programs have room for."""
    return plane.n_cols > 1 and 1 < plane.inner <= HELD_POSITIONS


def held(plane: Plane, clusters: tuple[int, ...], least: float | None = None) -> Held | None:
    """The best way, where it holds a share of `least`; LEAST_HELD where that is None. Else None.

    Few warps where they hold LEAST_HELD_GAIN times as much. Where the best way holds too little, a 16-bit softmax whose
    runs start anywhere has few warps from LEAST_HELD_ANYWHERE on, whatever `least` is.
    """
    best, few = most_held(plane, clusters), held_by_few_warps(plane)
    if best is None or best.share < (LEAST_HELD[plane.backward] if least is None else least):
        anywhere = plane.vec == 1 and plane.itemsize == 2 and not plane.backward
        return few if few is not None and anywhere and few.share >= LEAST_HELD_ANYWHERE else None
    fewer = few is not None and best.ctas == 1 and few.share > LEAST_HELD_GAIN * best.share
    return few if fewer else best


def few_in_place_of_piece(plane: Plane, num_warps: int, chunks: int) -> Held | None:
    """A softmax's plane in the registers of few warps where a piece of such a plan is slower; else None."""
    many = num_warps == OF_PIECE_WARPS and chunks >= OF_PIECE_COLS
    if plane.backward or plane.itemsize != 2 or plane.vec == VECTOR_BYTES // plane.itemsize or not many:
        return None
    few = held_by_few_warps(plane)
    return few if few is not None and few.share >= LEAST_HELD_PIECE else None


def held_gradient(plane: Plane, clusters: tuple[int, ...], filled_up: float) -> Held | None:
    """A gradient's planes where registers hold so much that no other plan is faster; else None.

    filled_up: positions of whole tiles over those that exist; 1 where tiles overlap.
    """
    empty, anywhere = filled_up >= FILLED_UP, plane.vec == 1
    single = anywhere or (empty and plane.vec * plane.itemsize == SMALL_ACCESS)
    if single:
        few = held_by_few_warps(plane)
        if few is not None and few.share >= LEAST_HELD_SMALL[anywhere and empty]:
            return few
    if plane.inner < FEW_POSITIONS:
        return _of_few_positions(plane, clusters, empty, single)
    best = most_held(plane, clusters)
    if best is None or best.share < LEAST_HELD_GRADIENT:
        return None
    if plane.whole_sectors:
        gains = best.ctas == 1 and empty and best.share >= LEAST_HELD_WHOLE
    else:
        gains = best.ctas == 1 or empty
    return best if gains else None


def _of_few_positions(plane: Plane, clusters: tuple[int, ...], empty: bool, single: bool) -> Held | None:
    """`held_gradient` of fewer than FEW_POSITIONS that few warps do not hold. single: tiles read 4 bytes or less."""
    pairs = empty and plane.itemsize == 4 and plane.vec == 2
    best = most_held(plane, clusters) if single or pairs else None
    if best is None or best.share < (LEAST_HELD_SINGLE if single else LEAST_HELD_PAIRS):
        return None
    return best if single or (best.ctas, best.num_warps) == (1, FEW_WARPS[0]) else None


def registers_of(plane: Plane, way: Held) -> int:
    """The cap on a thread's registers."""
    few = way.ctas == 1 and way.num_warps in SMALL_WARPS
    caps = SMALL_REGISTERS[plane.backward, plane.itemsize] if few else ()
    return next((cap for most, cap in caps if way.chunks <= most), HELD_REGISTERS)


def held_in(plane: Plane, warps: int, ctas: int) -> Held | None:
    """How clusters of so many CTAs and warps hold the plane; None where they cannot."""
    vec, n, threads = VECTOR_BYTES // plane.itemsize, plane.n_cols * plane.inner, warps * 32
    period = plane.inner // gcd(plane.inner, vec)  # in vectors
    span = threads // period * period
    if span * vec < plane.inner + vec:
        return None
    most = MOST_VECTORS[plane.backward, plane.itemsize]
    of_cta = -(-(n // vec) // ctas)
    chunks = -(-of_cta // span)
    if chunks > most:
        return None
    full = max(0, min((n - vec + 1) // vec // ctas // span, chunks - 1))  # one kernel also where all are full
    lanes = 1
    while lanes < 32 and 2 * lanes * plane.inner <= threads:
        lanes *= 2
    places = OF_A_GROUP * MOST_WARPS // warps
    share = span / threads * chunks / most * (places // ctas * ctas / places) * OF_DOUBLED ** (log2(ctas) - 1)
    return Held(share, warps, ctas, chunks, full, lanes, span)
