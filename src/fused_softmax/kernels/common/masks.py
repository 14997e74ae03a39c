"""Reads masks in place, with their own strides, and applies them to logits.

A mask has a value for each (outer, middle, inner, query, column). A stride is 0 where the mask is broadcast.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .numerics import scaled
from .tiles import READS, chunk_offsets

# the kind of a mask: none, uint8 that is 0 where a column is hidden, or floating numbers to add
NO_MASK = tl.constexpr(0)
BOOLEAN = tl.constexpr(1)
ADDITIVE = tl.constexpr(2)


@triton.jit
def mask_row_of(batch, query, mask_ptr, n_middle, n_inner, m_outer, m_middle, m_inner, m_query, MASK_VEC: tl.constexpr):
    """The address of each row's mask; strides in units of MASK_VEC.  # batch, query: [SEGMENTS, 1]"""
    batch, n_inner, n_middle = batch.to(tl.int32), n_inner.to(tl.int32), n_middle.to(tl.int32)
    group, inner = batch // n_inner, batch % n_inner
    outer, middle = group // n_middle, group % n_middle
    return mask_ptr + (outer * m_outer + middle * m_middle + inner * m_inner + query * m_query) * MASK_VEC


@triton.jit
def load_query_mask(mask_row, exists):
    """The one value that all columns of a row share, where MASK_COLS is 0.  # [SEGMENTS, 1]

    It is read once per segment, never as a tile of equal addresses. Triton 3.6 gives such a tile a layout that spreads
    a segment over warps, but a reduction over a cluster needs each segment in one warp.
    """
    return tl.load(mask_row, mask=exists, other=0)


@triton.jit
def load_masks(
    at, width, m_col, MASK_COLS: tl.constexpr,
    SEGMENTS: tl.constexpr, CHUNKS: tl.constexpr, WARPS_PER_ROW: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """The mask of a slice, tile by tile as `load_chunks` has the row.  # at: the slice's first column; [SEGMENTS, 1]

    Where MASK_COLS is 0, `at` is the value of `load_query_mask`.
    """
    tiles = ()
    for c in tl.static_range(CHUNKS):
        offsets = chunk_offsets(c, VECTORS, VEC, WARPS_PER_ROW)
        if MASK_COLS == 0:
            tile = at[:, :, None]
        else:
            offsets_here = offsets if MASK_COLS == 1 else offsets * m_col
            tile = tl.load(at + offsets_here, mask=offsets < width, other=0, eviction_policy=READS)
            tile = tl.reshape(tile, (SEGMENTS, VECTORS, VEC))
        tiles = tiles + (tile,)
    return tiles


@triton.jit
def hide(x, mask, scale, MASK: tl.constexpr, PTX: tl.constexpr):
    """z of logits in float32, -inf where hidden."""
    if MASK == ADDITIVE:
        return tl.fma(x, scale, mask.to(tl.float32))
    elif MASK == BOOLEAN:
        return tl.where(mask != 0, x * scale, -float("inf"))
    else:
        return scaled(x, scale, PTX)
