"""How planes (n_cols, inner) lie in the registers of a program or a cluster (`softmax_spatial_periodic`). Counts only.

A thread steps by a multiple of the period of the positions (`kernels/common/periodic_slots`), so a program has threads
without vectors. Bytes in flight are the limit, so the best way is that whose threads hold the most vectors.
docs/measurements/thresholds.md has the figures behind the thresholds.
"""

from __future__ import annotations

from math import gcd, log2
from typing import NamedTuple

VECTOR_BYTES = 16
HELD_REGISTERS = 128  # of a thread
# vectors of a thread of each tensor, at most, by (backward, bytes of an element). More spill too much at the cap
MOST_VECTORS = {(False, 2): 20, (False, 4): 20, (True, 2): 11, (True, 4): 12}
# warps of a program, best first, and what the next ones hold over what these hold, at least
HELD_WARPS = {(False, 2): (8, 4), (False, 4): (16, 8, 4), (True, 2): (16, 8, 4), (True, 4): (16, 8, 4)}
LEAST_HELD_GAIN = 1.1
# a 16-bit plane of more than so many CTAs, by `backward`: twice the CTAs, up to MOST_CTAS, with half of the warps,
# where they hold as much as this of what the others do. float32 loses
HALVED_ABOVE, MOST_CTAS, LEAST_HALVED = {False: 1, True: 2}, 8, 0.85
# of fewer positions, which few threads reduce: 20,000 float32 columns of 7 positions 0.75 with 16 warps, 0.85 with 8;
# the gradient of 45,141 bfloat16 columns of 6 0.78 and 0.97
FEW_POSITIONS, FEW_WARPS = 16, (8, 4, 16)
# what twice the CTAs hold counts for: they wait for each other, and begin and end together. H200, float32, 16 warps and
# 18 to 22 vectors: 2 CTAs 0.91 to 0.98, 4 0.85, 8 0.75 to 0.80, 16 0.59 to 0.65
OF_DOUBLED = 0.92
HELD_POSITIONS = 256  # of a plane, at most: more take 512 threads, of which up to half are idle
MOST_WARPS = 16  # of a program, which then fills a multiprocessor
OF_A_GROUP = 16  # multiprocessors that share clusters: a cluster lies in one such group


class Plane(NamedTuple):
    """A plane, and the bytes of its elements. backward: of a gradient, which holds two tensors."""

    n_cols: int
    inner: int
    itemsize: int
    backward: bool


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
    if plane.n_cols <= 1 or not 1 < plane.inner <= HELD_POSITIONS:
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
