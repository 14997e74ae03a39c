"""Locates a program's tile of a tensor (outer, n_cols, inner), whose softmax runs over n_cols, and reads and writes it.

Neighbors in memory are neighbors along `inner`. Each position along `inner` is a softmax of its own. So a program takes
INNER neighboring positions, and all or some of their columns: coalesced, whatever the distance between two columns is.
A chunk is a tile [COLS, OUTERS, INNER] of COLS columns. OUTERS is 1, except where columns and positions are so few that
a program takes several indices of `outer`. On a cluster the second axis is that of the CTAs instead. Columns come
first, because Triton gives neighboring threads the first of the axes whose addresses are apart: where INNER is small,
columns are neighbors in memory, and indices of `outer` are not.

`inner` and all strides come in units of VEC elements, so that Triton can prove the alignment of a vector access.

A softmax reads its tile without masks along `inner` (`load_places`): a masked load fills two registers of each chunk
before it reads. So positions of a tile that do not exist read those of the last vector instead, and only their stores
are masked. From a chunk to the next takes one addition. Gradients of a softmax do not gain, and lose where ptxas then
puts loads behind the first product: they have masks (`load_tiles`). `inner` may also run over two dimensions of a
tensor whose rows lie apart, as those of a cropped image do: `width` positions of a row, and the next row row_stride
after it. The tile then knows where each of its positions lies.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import READS

# chunks that are written before the next are computed. ptxas moves no instruction over a branch; within one block it
# computes all chunks first, and spills
GROUP = tl.constexpr(8)


@triton.constexpr_function
def softmax_reads(dtype: tl.dtype, n_cols: int, inner: int, staged: bool) -> str:
    """The eviction policy of a softmax's reads: none for 16 bits and many columns that all stay in registers.

    H200, 35 shapes of 256 to 4,096 columns: 1.5% less time without a policy. Few columns and float32 are slower so.
    """
    return "" if dtype.primitive_bitwidth == 16 and n_cols >= 256 and inner >= 32 and not staged else "evict_last"


@triton.jit
def near(stride, NEAR: tl.constexpr):
    """A stride between columns. NEAR: it has 32 bits. The compiler then knows it, and an address takes less work."""
    if NEAR:
        return stride.to(tl.uint32).to(tl.int64)
    else:
        return stride


@triton.jit
def outer_of(index, n_outer, OUTERS: tl.constexpr):
    """(index along `outer`, whether it exists): a scalar, or [1, OUTERS, 1] of a program of several."""
    if OUTERS == 1:
        return index.to(tl.int64), True
    else:
        outer = index.to(tl.int64) * OUTERS + tl.arange(0, OUTERS)[None, :, None]
        return outer, outer < n_outer


@triton.jit
def outer_to_read(outer, n_outer, OUTERS: tl.constexpr):
    """`outer` of `outer_of` for reads without a mask: indices that do not exist are the last one."""
    if OUTERS == 1:
        return outer
    else:
        return tl.minimum(outer, n_outer - 1)


@triton.jit
def positions_of(block, inner, INNER: tl.constexpr, VEC: tl.constexpr, OVERLAP: tl.constexpr = 0):
    """(first position, in units of VEC; mask of the positions that exist, [1, 1, INNER]) of a block of positions.

    OVERLAP: positions that a block shares with the next one.
    """
    first = block.to(tl.int64) * ((INNER - OVERLAP) // VEC)
    left = tl.minimum(inner - first, INNER // VEC).to(tl.int32)
    return first, tl.arange(0, INNER)[None, None, :] < left * VEC


@triton.jit
def owned_positions(
    exists, outer, block, n_blocks, column, outer_stride, col_stride, first, STEP: tl.constexpr, INNER: tl.constexpr,
    VEC: tl.constexpr, OVERLAP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The mask of what a block writes: `exists`, or [COLS, 1, INNER] where blocks share positions.

    A column's part of a block may start within a sector of memory: then the block before writes that sector. A block
    also writes the sector in which its part ends. So each sector has one writer. OVERLAP is a sector less the elements
    at whose multiples columns start.
    """
    if OVERLAP == 0:
        return exists
    else:
        SECTOR: tl.constexpr = 256 // DTYPE.primitive_bitwidth // VEC  # vectors of 32 bytes
        BLOCK: tl.constexpr = (INNER - OVERLAP) // VEC  # from a block to the next one
        tl.static_assert(STEP % SECTOR == 0, "a column starts in a sector as that of the next chunk does")
        vector = tl.arange(0, INNER)[None, None, :] // VEC
        start = (outer * outer_stride + column.to(tl.int64) * col_stride + first).to(tl.int32)
        # numbers, because the interpreter of Triton 3.9 makes no mask of a truth value next to a tile of them
        begin = (-start & (SECTOR - 1)) * (block != 0).to(tl.int32)
        end = BLOCK + (-(start + BLOCK) & (SECTOR - 1)) + SECTOR * (block == n_blocks - 1).to(tl.int32)
        return exists & (vector >= begin) & (vector < end)


@triton.jit
def columns_of_chunk(CTAS: tl.constexpr, COLS: tl.constexpr):
    """The columns of chunk 0, COLS for each CTA.  # [COLS, CTAS, 1]"""
    return tl.arange(0, CTAS)[None, :, None] * COLS + tl.arange(0, COLS)[:, None, None]


@triton.jit
def tile_at(ptr, outer, col_stride, outer_stride, first, column, INNER: tl.constexpr, VEC: tl.constexpr):
    """Pointers to the tile whose columns are `column`, [COLS, 1, 1].  # [COLS, OUTERS, INNER]"""
    start = ptr + (outer * outer_stride + first) * VEC
    return start + column.to(tl.int64) * col_stride * VEC + tl.arange(0, INNER)[None, None, :]


@triton.jit
def places_of(
    first, inner, width, row_stride, CROPPED: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr
):  # fmt: skip
    """Where the positions of a block lie, from the position `first` on, in elements.  # [1, 1, INNER]

    first, inner, width, row_stride: in units of VEC. A position that does not exist lies where the last vector does.
    """
    position = tl.arange(0, INNER)[None, None, :]
    last = (tl.minimum(inner - 1 - first, INNER) * VEC).to(tl.int32)
    place = tl.minimum(position, last + position % VEC)
    if CROPPED:
        row = (first.to(tl.int32) + place // VEC) // width
        place = place + row * (row_stride - width) * VEC
    # VEC neighbors lie together, at a multiple of VEC. The contiguity makes `inner` the axis of neighboring threads. No
    # access is wider than VEC, because nothing says that a longer run is aligned
    return tl.max_contiguous(tl.multiple_of(place, [1, 1, VEC]), [1, 1, INNER])


@triton.jit
def tile_of_places(
    ptr, outer, col_stride, outer_stride, first, column, inner, width, row_stride, CROPPED: tl.constexpr,
    INNER: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """As `tile_at`, with the places of `places_of`.  # [COLS, OUTERS, INNER]"""
    place = places_of(first, inner, width, row_stride, CROPPED, INNER, VEC)
    return ptr + (outer * outer_stride + first) * VEC + column.to(tl.int64) * col_stride * VEC + place


@triton.jit
def load_places(
    at, step, column, n_cols, fill, CHUNKS: tl.constexpr, UNPREDICATED: tl.constexpr, COLS: tl.constexpr,
    POLICY: tl.constexpr, FIRST: tl.constexpr = 0,
):  # fmt: skip
    """Chunks FIRST .. CHUNKS-1, from the pointers to chunk 0; `fill` beyond the last column.

    All loads are issued before any is used. at: to places of `places_of`. step: from a chunk to the next, in elements.
    COLS: columns of a chunk.
    """
    tiles = ()
    at += FIRST * step
    for c in tl.static_range(FIRST, CHUNKS):
        if c < UNPREDICATED:
            tile = tl.load(at, eviction_policy=POLICY)
        else:
            tile = tl.load(at, mask=column < n_cols - c * COLS, other=fill, eviction_policy=POLICY)
        tiles = tiles + (tile,)
        at += step
    return tiles


@triton.jit
def load_tile(
    at, C: tl.constexpr, col_stride, column, n_cols, exists, fill, UNPREDICATED: tl.constexpr, COLS: tl.constexpr,
    VEC: tl.constexpr, POLICY: tl.constexpr = READS,
):  # fmt: skip
    """Chunk C as loaded, from the pointers to chunk 0. The first UNPREDICATED chunks lie inside the columns."""
    here = at + (C * COLS * VEC) * col_stride
    if C < UNPREDICATED:
        return tl.load(here, mask=exists, other=fill, eviction_policy=POLICY)
    else:
        inside = exists & (column < n_cols - C * COLS)
        return tl.load(here, mask=inside, other=fill, eviction_policy=POLICY)


@triton.jit
def load_tiles(
    at, col_stride, column, n_cols, exists, fill, CHUNKS: tl.constexpr, UNPREDICATED: tl.constexpr,
    COLS: tl.constexpr, VEC: tl.constexpr, FIRST: tl.constexpr = 0,
):  # fmt: skip
    """Chunks FIRST .. CHUNKS-1, one tile each. All loads are issued before any value is used."""
    tiles = ()
    for c in tl.static_range(FIRST, CHUNKS):
        tiles = tiles + (load_tile(at, c, col_stride, column, n_cols, exists, fill, UNPREDICATED, COLS, VEC),)
    return tiles


@triton.jit
def store_tile(
    at, value, C: tl.constexpr, col_stride, column, n_cols, exists, UNPREDICATED: tl.constexpr, COLS: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """Writes chunk C in the output's dtype, at the pointers to chunk 0."""
    here = at + (C * COLS * VEC) * col_stride
    value = value.to(at.dtype.element_ty)
    if C < UNPREDICATED:
        tl.store(here, value, mask=exists)
    else:
        tl.store(here, value, mask=exists & (column < n_cols - C * COLS))


@triton.constexpr_function
def _levels(cols: int) -> int:
    return cols.bit_length() - 1


@triton.jit
def sum_over_columns(x, INVARIANT: tl.constexpr):
    """The sum over a tile's columns.  # [COLS, OUTERS, INNER] -> [OUTERS, INNER]

    INVARIANT: pair by pair, in an order that no layout changes. Else Triton chooses the order by the layout of the
    tile, which follows INNER and VEC.
    """
    if INVARIANT:
        for _level in tl.static_range(_levels(x.shape[0])):
            # a sum of two does not depend on their order
            x = tl.sum(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1], x.shape[2])), 0)
        return tl.reshape(x, (x.shape[1], x.shape[2]))
    else:
        return tl.sum(x, 0)
