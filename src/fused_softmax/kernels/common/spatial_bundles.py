"""Bundles: columns that follow one another in memory, as one wide column, where runs of positions start anywhere.

A plane (n_cols, inner) is one piece of memory. Some columns of it are a bundle, a row of `width` elements. The bundles
of a plane start at multiples of a sector from the first element of the tensor, so that a kernel reads whole vectors,
whatever `inner` is. Position p of a bundle is position p % inner of the plane. The columns in front of the first bundle
and behind the last one are the plane's ends. They are fewer than two bundles, and are read and written element by
element.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .spatial_tiles import positions_of
from .tiles import READS


@triton.jit
def start_of_bundles(outer, plane, inner, period, UNIT: tl.constexpr):
    """(first element of plane `outer`, elements in front of its first bundle): int64, int32.

    plane: elements of a plane. period: the columns after which runs start at multiples of UNIT elements again, a power
    of two. So many columns c lie in front that past + c*step is a multiple of it, both in UNIT/period elements.
    """
    start = outer * plane
    past = (start % UNIT).to(tl.int32) * period // UNIT
    step = inner % UNIT * period // UNIT  # odd, so that its third power is its inverse modulo a period of up to 16
    return start, (-past * step * step * step & (period - 1)) * inner


@triton.jit
def block_of_bundles(
    outer, block, plane, width, inner, period, INNER: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr
):
    """A program's block of positions of the bundles of plane `outer`, as it reads them.

    (first element of the plane; elements in front of its first bundle; then in units of VEC: the first bundle, the step
    to the next one, and the block's first position; mask of the positions that exist, [1, 1, INNER]).
    """
    row = (width // VEC).to(tl.int64)
    first, exists = positions_of(block, row, INNER, VEC)
    start, head = start_of_bundles(outer, plane, inner, period, UNIT)
    return start, head, (start + head) // VEC, row, first, exists


@triton.jit
def ends_at(ptr, start, head, first, n_bundles, width, ends, exists, COLS: tl.constexpr, INNER: tl.constexpr):
    """(pointers, mask) to the ends, as two rows of a block's positions: [COLS, 1, INNER].

    start, head: of `start_of_bundles`. first: the block's first position. ends: elements of a plane's ends.
    """
    row = tl.arange(0, COLS)[:, None, None]
    element = row * width + first + tl.arange(0, INNER)[None, None, :]
    at = ptr + start + element + tl.where(element < head, 0, n_bundles.to(tl.int64) * width)
    return at, exists & (row < 2) & (element < ends)


@triton.jit
def load_ends(ptr, start, head, first, n_bundles, width, ends, exists, fill, COLS: tl.constexpr, INNER: tl.constexpr):
    """The ends as loaded, `fill` where there are none."""
    at, there = ends_at(ptr, start, head, first, n_bundles, width, ends, exists, COLS, INNER)
    return tl.load(at, mask=there, other=fill, eviction_policy=READS)
