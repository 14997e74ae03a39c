"""Reads masks in place, with their own strides, and applies them to logits.

A mask has a value for each (outer, middle, inner, query, column). A stride is 0 where the mask is broadcast.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .numerics import columns_of, scaled
from .tiles import READS, chunk_offsets, log2

# the kind of a mask: none, uint8 that is 0 where a column is hidden, or floating numbers to add
NO_MASK = tl.constexpr(0)
BOOLEAN = tl.constexpr(1)
ADDITIVE = tl.constexpr(2)
# how its columns lie: one value for all, neighbors, any stride, or neighbors that are read in the mask's own vectors
ONE_VALUE = tl.constexpr(0)
NEIGHBORS = tl.constexpr(1)
STRIDED = tl.constexpr(2)
SHIFTED = tl.constexpr(3)
# how its rows lie: as the scores' rows, one stride apart; one stride for the batches that do not share it; 2 for any
# strides
OWN = tl.constexpr(0)
SHARED = tl.constexpr(1)


@triton.jit
def mask_row_of(batch, query, n_middle, n_inner, m_outer, m_middle, m_inner, m_query, MASK_VEC: tl.constexpr):
    """The elements from the mask to each row's mask; strides in units of MASK_VEC.  # batch, query: [SEGMENTS, 1]"""
    batch, n_inner, n_middle = batch.to(tl.int32), n_inner.to(tl.int32), n_middle.to(tl.int32)
    group, inner = batch // n_inner, batch % n_inner
    outer, middle = group // n_middle, group % n_middle
    return (outer * m_outer + middle * m_middle + inner * m_inner + query * m_query) * MASK_VEC


@triton.jit
def load_query_mask(mask_row, exists):
    """The one value that all columns of a row share, where MASK_COLS is 0.  # [SEGMENTS, 1]

    It is read once per segment, never as a tile of equal addresses. Triton 3.6 gives such a tile a layout that spreads
    a segment over warps, but a reduction over a cluster needs each segment in one warp.
    """
    return tl.load(mask_row, mask=exists, other=0)


@triton.jit
def load_masks(
    at, shift, width, m_col, MASK_COLS: tl.constexpr, BITS: tl.constexpr,
    SEGMENTS: tl.constexpr, CHUNKS: tl.constexpr, WARPS_PER_ROW: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """The mask of a slice as loaded, tile by tile as `load_chunks` has the row; `mask_of` makes its numbers.

    at: the slice's first column; where MASK_COLS is ONE_VALUE, the value of `load_query_mask`; where it is SHIFTED, as
    shift, of `shifted_start`. A chunk then has two tiles of words: each thread's own vector, and the next one, which
    hits L1 and is not read where the mask is in phase. BITS: of an element.  # at, shift: [SEGMENTS, 1]
    """
    WORDS: tl.constexpr = VEC * BITS // 32
    tiles = ()
    for c in tl.static_range(CHUNKS):
        offsets = chunk_offsets(c, VECTORS, VEC, WARPS_PER_ROW)
        if MASK_COLS == ONE_VALUE:
            tile = at[:, :, None]
        elif MASK_COLS == SHIFTED:
            words = chunk_offsets(c, VECTORS, WORDS, WARPS_PER_ROW)
            inside = words < (width >> log2(VEC)) * WORDS
            own = tl.load(at + words, mask=inside, other=0, eviction_policy=READS)
            after = tl.load(at + words + WORDS, mask=inside & (shift > 0), other=0, eviction_policy=READS)
            tile = (tl.reshape(own, (SEGMENTS, VECTORS, WORDS)), tl.reshape(after, (SEGMENTS, VECTORS, WORDS)))
        else:
            offsets_here = offsets if MASK_COLS == NEIGHBORS else offsets * m_col
            tile = tl.load(at + offsets_here, mask=offsets < width, other=0, eviction_policy=READS)
            tile = tl.reshape(tile, (SEGMENTS, VECTORS, VEC))
        tiles = tiles + (tile,)
    return tiles


@triton.jit
def shifted_start(mask_ptr, column, first, VEC: tl.constexpr):
    """(address of the mask's aligned vector at a segment's first column, elements from there to that column).

    A mask lies anywhere with respect to its row. It is read in its own aligned vectors of VEC elements, as words of 4
    bytes, and shifted to the row's vectors in registers.  # column: the row's first aligned one, from mask_ptr
    """
    WORDS: tl.constexpr = VEC * mask_ptr.dtype.element_ty.primitive_bitwidth // 32
    vector = column >> log2(VEC)
    words = mask_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    return words + (vector + (first >> log2(VEC)).to(tl.int64)) * WORDS, (column - vector * VEC).to(tl.int32)


@triton.jit
def _words_of(tile):
    """The words of each vector in order, one tensor [SEGMENTS, VECTORS] each.  # [SEGMENTS, VECTORS, WORDS]"""
    if tile.shape[2] == 1:
        return (tl.reshape(tile, (tile.shape[0], tile.shape[1])),)
    elif tile.shape[2] == 2:
        low, high = tl.split(tile)
        return (low, high)
    else:
        return columns_of(tile)


@triton.jit
def _moved(words, by, STEP: tl.constexpr):
    """The words from place STEP on where `by` has this bit, else all except the last STEP."""
    moved = ()
    for k in tl.static_range(len(words) - STEP):
        moved = moved + (tl.where((by & STEP) != 0, words[k + STEP], words[k]),)
    return moved


@triton.jit
def _funnel(low, high, bits, PTX: tl.constexpr):
    """The low word of (high, low) shifted right by `bits` < 32."""
    if PTX:
        return tl.inline_asm_elementwise(
            "shf.r.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, bits], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        pair = (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.uint64)
        return (pair >> bits.to(tl.uint64)).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def _elements_of(word, TYPE: tl.constexpr):
    """The elements of a word in order: float32, or int32 of a boolean mask."""
    if TYPE == tl.float32:
        return (word.to(tl.float32, bitcast=True),)
    elif TYPE == tl.bfloat16:
        return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)
    elif TYPE == tl.float16:
        low = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
        return low.to(tl.float32), (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return word & 0xFF, word & 0xFF00, word & 0xFF0000, word & -16777216


@triton.jit
def _joined(x, SHAPE: tl.constexpr):
    """The inverse of `columns_of`, for 4 and 8 columns."""
    if SHAPE[2] == 4:
        even, odd = tl.join(x[0], x[2]), tl.join(x[1], x[3])
    else:
        even = tl.join(tl.join(x[0], x[4]), tl.join(x[2], x[6]))
        odd = tl.join(tl.join(x[1], x[5]), tl.join(x[3], x[7]))
    return tl.reshape(tl.join(even, odd), SHAPE)


@triton.jit
def mask_of(
    tile, shift, MASK: tl.constexpr, MASK_COLS: tl.constexpr, TYPE: tl.constexpr, SHAPE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """The numbers of a chunk that `load_masks` has loaded.  # SHAPE: the chunk's

    Where SHIFTED, a vector's words are shifted by powers of two, which are selects, and then by the bits that remain.
    """
    if MASK == NO_MASK or MASK_COLS != SHIFTED:
        return tile
    else:
        BYTES: tl.constexpr = TYPE.primitive_bitwidth // 8
        own, after = tile
        WORDS: tl.constexpr = own.shape[2]
        words = _words_of(own) + _words_of(after)
        by_words = shift * BYTES // 4
        if WORDS > 4:
            words = _moved(words, by_words, 4)
        if WORDS > 2:
            words = _moved(words, by_words, 2)
        if WORDS > 1:
            words = _moved(words, by_words, 1)
        elements = ()
        for k in tl.static_range(WORDS):
            word = words[k]
            if BYTES < 4:
                bits = (shift * BYTES % 4 * 8) + tl.zeros_like(word)
                word = _funnel(word, words[k + 1], bits, PTX)
            elements = elements + _elements_of(word, TYPE)
        return _joined(elements, SHAPE)


@triton.jit
def hide(x, mask, scale, MASK: tl.constexpr, PTX: tl.constexpr):
    """z of logits in float32, -inf where hidden."""
    if MASK == ADDITIVE:
        return tl.fma(x, scale, mask.to(tl.float32))
    elif MASK == BOOLEAN:
        return tl.where(mask != 0, x * scale, -float("inf"))
    else:
        return scaled(x, scale, PTX)
