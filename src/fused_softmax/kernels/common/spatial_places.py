"""Tiles of a tensor (outer, n_cols, inner) that are read without masks along `inner`, and reached chunk by chunk.

A masked load fills two registers of each chunk before it reads. So the positions of a tile that do not exist read those
of the last vector instead, and only their stores are masked. From a chunk to the next takes one addition. Gradients of
a softmax do not gain, and lose where ptxas then puts loads behind the first product: they have masks (`spatial_tiles`).

`inner` may also run over two dimensions of a tensor whose rows lie apart, as those of a cropped image do: `width`
positions of a row, and the next row x_row after it. The tile then knows where each of its positions lies.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def tile_of_places(ptr, outer, col_stride, outer_stride, first, column, inner, INNER: tl.constexpr, VEC: tl.constexpr):
    """As `spatial_tiles.tile_at`, with the places of `places_of`.  # [COLS, OUTERS, INNER]"""
    place = places_of(first, inner, inner, inner, False, INNER, VEC)
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
