"""Skewed tiles: columns that start anywhere, read and written in aligned vectors.

Where `inner` is odd, columns have different phases: elements from an address that is a multiple of a unit's UNIT
elements. A unit is a vector of VEC elements, or several, such as a sector of memory. So in a skewed tile each column
has its own first position, from which on its units are aligned:

    column 0      |........|........|........|........|            phase UNIT: starts UNIT positions before the block
    column 1         |........|........|........|........|         phase 5
    complete             ^ from here to here ^

Columns whose indices differ by a multiple of UNIT have the same phase, and so have all columns of a thread: a chunk has
a multiple of UNIT columns, or of as many as the phases repeat after. So a thread reduces its columns in its own
registers. Only the few numbers of each thread are put in order of their positions, through shared memory. A position is
complete where all columns of the tile have it. All units of a column, except the first and the last one, lie where
positions are complete, and a program writes these. So tiles overlap by 2*UNIT positions, and every unit has one writer.
The first unit of a run is the first block's.

Where columns start at multiples of UNIT/2, there are two phases, and one unit of each column is not complete: the first
one of phase UNIT, and the last one of phase UNIT/2. Tiles overlap by UNIT positions then. OVERLAP says which it is.

`inner` and strides count elements here. Vectors that lie in two columns, at the ends of a run, are written one by one.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def _log2(n: int) -> int:
    return n.bit_length() - 1


@triton.jit
def skewed_start(outer, column, block, outer_stride, col_stride, STEP: tl.constexpr, UNIT: tl.constexpr):
    """(offset of each column's first element in the tile, a multiple of UNIT; its phase, 1 to UNIT).

    # column, results: [COLS, 1, 1]. STEP: positions from a block to the next one
    """
    at = outer * outer_stride + column.to(tl.int64) * col_stride + block.to(tl.int64) * STEP - 1
    group = at >> _log2(UNIT)
    return group * UNIT, (at - group * UNIT).to(tl.int32) + 1


@triton.jit
def first_phase(outer, outer_stride, col_stride, CTAS: tl.constexpr, COLS: tl.constexpr, UNIT: tl.constexpr):
    """The phase of this CTA's first column, less 1, as a scalar."""
    rank = tl.program_id(0) % CTAS
    return ((outer * outer_stride + rank * COLS * col_stride - 1) & (UNIT - 1)).to(tl.int32)


@triton.jit
def bounds_of(block, inner, STEP: tl.constexpr, INNER: tl.constexpr, AHEAD: tl.constexpr):
    """(first, end) of the positions that exist, from the block's first one on; at least -AHEAD, at most 2*INNER."""
    before = block * STEP
    return tl.maximum(-before, -AHEAD).to(tl.int32), tl.minimum(inner - before, 2 * INNER).to(tl.int32)


@triton.jit
def vectors_of(phase, INNER: tl.constexpr, VEC: tl.constexpr):
    """The first position of each element's vector, from the block's first position on.  # [COLS, 1, INNER]"""
    return tl.arange(0, INNER)[None, None, :] // VEC * VEC - phase


@triton.jit
def exists_of(start, first, end, VEC: tl.constexpr):
    """Whether a vector has a position that exists. start: of `vectors_of`; first, end: of `bounds_of`."""
    return (start + VEC > first) & (start < end)


@triton.jit
def existing_places(phase, start, first, end, INNER: tl.constexpr, VEC: tl.constexpr):
    """Where the elements of a column lie, from its first one in the tile on.  # [COLS, 1, INNER]

    Vectors that do not exist lie where the column's first one that exists does, so that loads of all chunks but the
    last need no mask. Gradients are slower so (docs/measurements/other-dims.md, 'Loads without masks'). start, first,
    end: of `exists_of`.
    """
    place = tl.arange(0, INNER)[None, None, :]
    nearest = tl.maximum(first + phase, 0) // VEC * VEC
    place = tl.where(exists_of(start, first, end, VEC), place, nearest + place % VEC)
    return tl.max_contiguous(tl.multiple_of(place, [1, 1, VEC]), [1, 1, INNER])


@triton.jit
def load_skewed(
    at, col_stride, column, n_cols, start, first, end, fill, CHUNKS: tl.constexpr, COLS: tl.constexpr,
    VEC: tl.constexpr, FIRST: tl.constexpr, POLICY: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Chunks FIRST .. CHUNKS-1, one tile each. start: of `vectors_of`; first, end: of `bounds_of`. COLS: of a chunk.

    MASKED: vectors that do not exist are not read; else `at` has `existing_places`. Those of the last chunk are
    not read in any case. The last vector of the last column may lie half outside the tensor: `with_end` reads it.
    """
    exists = exists_of(start, first, end, VEC)
    tiles = ()
    for c in tl.static_range(FIRST, CHUNKS):
        here = at + (c * COLS) * col_stride
        if c < CHUNKS - 1 and MASKED:
            tile = tl.load(here, mask=exists, other=fill, eviction_policy=POLICY)
        elif c < CHUNKS - 1:
            tile = tl.load(here, eviction_policy=POLICY)
        else:
            whole = (start + VEC <= end) | (column < n_cols - 1 - c * COLS)
            inside = exists & (column < n_cols - c * COLS)
            tile = tl.load(here, mask=inside & whole, other=fill, eviction_policy=POLICY)
        tiles = tiles + (tile,)
    return tiles


@triton.jit
def with_end(
    tiles, at, col_stride, column, n_cols, start, end, fill, CHUNKS: tl.constexpr, COLS: tl.constexpr,
    INNER: tl.constexpr, VEC: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """The tiles of `load_skewed`, with the last vector of the last column, which is read one element at a time."""
    C: tl.constexpr = CHUNKS - 1
    last = tiles[C - FIRST]
    if end < INNER:
        position = start + tl.arange(0, INNER)[None, None, :] % VEC
        ends = (start < end) & (start + VEC > end) & (column == n_cols - 1 - C * COLS)
        rest = tl.load(at + (C * COLS) * col_stride, mask=ends & (position < end), other=fill)
        last = tl.where(ends, rest, last)
    complete = ()
    for c in tl.static_range(C - FIRST):
        complete = complete + (tiles[c],)
    return complete + (last,)


@triton.jit
def owned(first, phase, INNER: tl.constexpr, UNIT: tl.constexpr, OVERLAP: tl.constexpr):
    """Whether a block writes an element: its unit is complete, or the first one of a run.  # [COLS or 1, 1, INNER]"""
    unit = tl.arange(0, INNER)[None, None, :] // UNIT
    # numbers, because the interpreter of Triton 3.9 makes no mask of a truth value next to a tile of them
    later = (first != 0).to(tl.int32)
    if OVERLAP == 0:
        return unit >= 0  # all
    elif OVERLAP == UNIT:
        late = (phase == UNIT).to(tl.int32)
        return (unit >= late * later) & (unit < INNER // UNIT - 1 + late)
    else:
        return (unit >= later) & (unit < INNER // UNIT - 1)


@triton.jit
def has_ends(first, end, inner, outer_stride, col_stride, INNER: tl.constexpr, UNIT: tl.constexpr, VEC: tl.constexpr):
    """Whether a block of positions may write vectors that lie in two columns: the first or last one of some run."""
    tl.static_assert(UNIT % VEC == 0, "a unit has whole vectors")
    across = ((inner | outer_stride | col_stride) & (VEC - 1)) != 0
    return across & ((first == 0) | (end < INNER - UNIT))


@triton.jit
def store_skewed(
    at, value, C: tl.constexpr, col_stride, column, n_cols, own, start, first, end, CHUNKS: tl.constexpr,
    COLS: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Writes the vectors of chunk C that lie in one column. value: in the output's dtype. own: of `owned`."""
    writes = own & (start >= first) & (start + VEC <= end)
    if C == CHUNKS - 1:
        writes = writes & (column < n_cols - C * COLS)
    tl.store(at + (C * COLS) * col_stride, value, mask=writes)


@triton.jit
def store_ends(
    at, values, C: tl.constexpr, col_stride, column, n_cols, own, start, first, end, CHUNKS: tl.constexpr,
    COLS: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Writes the elements of chunks C .. C + len(values) - 1 in vectors that lie in two columns."""
    position = start + tl.arange(0, INNER)[None, None, :] % VEC
    writes = own & ((start < first) | (start + VEC > end)) & (position >= first) & (position < end)
    for c in tl.static_range(C, C + len(values)):
        inside = writes
        # all columns of the other chunks exist. With few pairs each compares, or a gradient takes 8 registers more
        if c == CHUNKS - 1 or (VEC == 2 and CHUNKS <= 8):
            inside = writes & (column < n_cols - c * COLS)
        tl.store(at + (c * COLS) * col_stride, values[c - C], mask=inside)
