"""How planes (n_cols, inner) lie in the registers of a program or a cluster, and how fast that is. Counts only.

A thread steps by a multiple of the period of the positions (`kernels/common/periodic_slots`), so a program has threads
without vectors. Bytes in flight are the limit up to a share of all vectors that threads could hold. Beyond it, programs
of few warps and small clusters are faster, which wait for fewer others. `register_planes` has the plans.
docs/measurements/thresholds.md has the figures behind the numbers.
"""

from __future__ import annotations

from math import gcd, log2
from typing import NamedTuple

VECTOR_BYTES = 16
HELD_REGISTERS = 128  # of a thread
# of programs of SMALL_WARPS with up to so many vectors, by (backward, bytes of an element): then more programs fit
SMALL_REGISTERS = {(False, 2): ((12, 96),), (False, 4): (), (True, 2): ((5, 80), (6, 96)), (True, 4): ((5, 80),)}
# vectors of a thread of each tensor, at most, by (backward, bytes of an element): more spill too much at the cap. Those
# of a thread that reads the numbers of LARGEST CTAs
MOST_VECTORS = {(False, 2): 22, (False, 4): 22, (True, 2): 12, (True, 4): 12}
OF_LARGEST_VECTORS = {(False, 2): 22, (False, 4): 20, (True, 2): 10, (True, 4): 11}
# vectors from which a share counts, so that it may be 1.1. Gradients of programs of MOST_WARPS have no more
FULL_VECTORS = {(False, 2): 20, (False, 4): 20, (True, 2): 11, (True, 4): 12}
WARPS = (1, 2, 4, 8, 16)  # of a program, and of the CTAs of a cluster from 4 on
SMALL_WARPS = WARPS[:3]  # of one program that holds a small plane
MOST_WARPS = WARPS[-1]  # of a program, which then fills a multiprocessor
LEAST_SPEED = 0.6  # of ways that are as fast as narrow tiles
HELD_POSITIONS = 256  # of a plane, at most: more take 512 threads, of which up to half are idle
OF_A_GROUP = 16  # multiprocessors that share clusters: a cluster lies in one such group
LARGEST = 16  # CTAs of a cluster
# the speed of such a cluster over smaller ones, and where its programs have MOST_WARPS
OF_LARGEST, OF_LARGEST_FULL = 0.92, 0.78
EIGHT_ALONE = 0.92  # the speed of one program of 8 warps over smaller ones, at least
# the speed of gradients with more than FULL_VECTORS, of one program of SMALL_WARPS and of log_softmax: some loads wait
OUT_OF_ORDER = 0.97


class Speed(NamedTuple):
    """What decides the speed of a way.

    enough_alone, enough: the share of all vectors from which more are not faster, of one program of SMALL_WARPS and of
    others. of_eight, of_most: the speed of programs of 8 warps and of MOST_WARPS over smaller ones. of_doubled: of
    twice the CTAs, from 2 on. of_message: the time that each number costs which a thread sends beyond its first one.
    """

    enough_alone: float
    enough: float
    of_eight: float
    of_most: float
    of_doubled: float
    of_message: float


SPEEDS = {  # by (backward, bytes of an element)
    (False, 2): Speed(0.40, 0.64, 0.86, 0.67, 0.945, 0.035),
    (False, 4): Speed(0.30, 0.56, 0.97, 0.80, 0.985, 0.045),
    (True, 2): Speed(0.30, 0.55, 0.96, 0.83, 0.98, 0.07),
    (True, 4): Speed(0.33, 0.41, 0.98, 0.89, 0.996, 0.029),
}
SHARED_BYTES = (48 << 10) - 16  # of a program, less its mbarrier


class Plane(NamedTuple):
    """A plane, and the bytes of its elements. backward: of a gradient, which holds two tensors. log: of log_softmax."""

    n_cols: int
    inner: int
    itemsize: int
    backward: bool
    log: bool = False


class Held(NamedTuple):
    """How a cluster holds a plane."""

    share: float  # vectors that a multiprocessor holds over FULL_VECTORS of all threads
    num_warps: int
    ctas: int
    chunks: int  # vectors of a thread
    full: int  # chunks that all CTAs fill
    lanes: int  # threads that merge the sums of a position
    span: int  # vectors from a thread's chunk to its next one
    speed: float  # about the fraction of a copy, of gradients of an add, with many planes


def best_held(plane: Plane, clusters: tuple[int, ...]) -> Held | None:
    """The fastest way to hold a plane in clusters of such sizes; None where none holds it.

    >>> best_held(Plane(300, 251, 2, False), (1, 2, 4)).ctas
    2
    >>> best_held(Plane(453, 9, 2, True), (1, 2, 4)).num_warps
    2
    """
    if plane.n_cols <= 1 or not 1 < plane.inner <= HELD_POSITIONS:
        return None
    # one CTA of 16 warps would be alone on its multiprocessor, and wait for its own loads
    ways = (
        held_in(plane, warps, ctas)
        for warps in WARPS for ctas in clusters if (warps < MOST_WARPS if ctas == 1 else warps >= SMALL_WARPS[-1])
    )  # fmt: skip
    return max(filter(None, ways), key=lambda way: (way.speed, way.share), default=None)


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
    if span * vec < plane.inner + vec or n < vec:
        return None
    kind = plane.backward, plane.itemsize
    of_cta = -(-(n // vec) // ctas)
    chunks = -(-of_cta // span)
    most = OF_LARGEST_VECTORS[kind] if ctas == LARGEST else MOST_VECTORS[kind]
    if plane.backward and warps == MOST_WARPS:
        most = min(most, FULL_VECTORS[kind])
    if chunks > most or (ctas > 1 and _shared_bytes(plane, vec, threads, ctas) > SHARED_BYTES):
        return None
    full = max(0, min((n - vec + 1) // vec // ctas // span, chunks - 1))  # one kernel also where all are full
    lanes = 1
    while lanes < 32 and 2 * lanes * plane.inner <= threads:
        lanes *= 2
    places = OF_A_GROUP * MOST_WARPS // warps
    share = span / threads * chunks / FULL_VECTORS[kind] * (places // ctas * ctas / places)
    return Held(share, warps, ctas, chunks, full, lanes, span, _speed(plane, share, warps, ctas, chunks))


def _speed(plane: Plane, share: float, warps: int, ctas: int, chunks: int) -> float:
    of = SPEEDS[plane.backward, plane.itemsize]
    alone = ctas == 1 and warps <= SMALL_WARPS[-1]
    speed = min(1.0, share / (of.enough_alone if alone else of.enough))
    if plane.backward and (alone or plane.log) and chunks > FULL_VECTORS[plane.backward, plane.itemsize]:
        speed *= OUT_OF_ORDER
    of_eight = max(of.of_eight, EIGHT_ALONE) if ctas == 1 else of.of_eight
    speed *= {8: of_eight, MOST_WARPS: of.of_most}.get(warps, 1.0)
    speed *= of.of_doubled ** max(0.0, log2(ctas) - 1)
    if ctas == LARGEST:
        speed *= OF_LARGEST_FULL if warps == MOST_WARPS else OF_LARGEST
    return speed / (1 + of.of_message * max(0.0, plane.inner * ctas / (warps * 32) - 1))


def _shared_bytes(plane: Plane, vec: int, threads: int, ctas: int) -> int:
    """Bytes of shared memory of a cluster's program: numbers of places, of slots and ends, and of all CTAs."""
    numbers = HELD_POSITIONS + vec + threads * (vec + 1) + 2 * vec + ctas * plane.inner
    return numbers * (4 if plane.backward else 8)
