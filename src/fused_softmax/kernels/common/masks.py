"""Reads masks in place, with their own strides, and applies them to logits.

A mask has a value for each (outer, middle, inner, query, column). A stride is 0 where the mask is broadcast.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .mask_layouts import ADDITIVE, BOOLEAN, NO_MASK, ONE_VALUE, OWN, SHARED, SHIFTED, elements_to, mask_row_of
from .masked_rows import scalar_tile
from .numerics import scaled, upcast
from .shifted_masks import elements_of, joined, shifted_start, shifted_words
from .tiles import READS, chunk_offsets, log2


@triton.jit
def load_query_mask(mask_row, exists):
    """The value that all columns of a row share, where ONE_VALUE.  # [SEGMENTS, 1]

    It is read once per segment, never as a tile of equal addresses. Triton 3.6 gives such a tile a layout that spreads
    a segment over warps, but a reduction over a cluster needs each segment in one warp.
    """
    return tl.load(mask_row, mask=exists, other=0)


@triton.jit
def mask_at(
    mask_ptr, row, span, batch, query, head, first, exists, n_middle, n_inner, m_outer, m_middle, m_inner, m_query,
    m_col, m_phase, MASK: tl.constexpr, MASK_COLS: tl.constexpr, MASK_ROWS: tl.constexpr, MASK_VEC: tl.constexpr,
    UNALIGNED: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """(address of the mask at each row's first aligned column; the same at a segment's first column; 0).

    Where ONE_VALUE the second is that value, and where SHIFTED the last two are those of `shifted_start`.
    # row, span, batch, query, head, first, exists: scalar or [SEGMENTS, 1]
    """
    if MASK_ROWS == OWN:
        start = row * m_query * MASK_VEC
    elif MASK_ROWS == SHARED:
        start = (span * m_outer + query * m_query) * MASK_VEC
    else:
        start = mask_row_of(batch, query, n_middle, n_inner, m_outer, m_middle, m_inner, m_query, MASK_VEC)
    if MASK == NO_MASK:
        return mask_ptr, mask_ptr, 0
    elif MASK_COLS == SHIFTED:
        start += m_phase + head
        words, shift = shifted_start(mask_ptr, start, first, VEC)
        return mask_ptr + start, words, shift
    elif MASK_COLS == ONE_VALUE:
        return mask_ptr, load_query_mask(mask_ptr + start, exists), 0
    else:
        at_row = mask_ptr + start
        if UNALIGNED:
            at_row += elements_to(head, m_col, MASK_COLS).to(tl.int64)
        return at_row, at_row + elements_to(first, m_col, MASK_COLS), 0


@triton.jit
def load_masks(
    at, width, m_col, MASK_COLS: tl.constexpr, BITS: tl.constexpr,
    SEGMENTS: tl.constexpr, CHUNKS: tl.constexpr, UNPREDICATED: tl.constexpr, WARPS_PER_ROW: tl.constexpr,
    VECTORS: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """The mask of a slice as loaded, tile by tile as `load_chunks` has the row; `mask_of` makes its numbers.

    at: the slice's first column; where MASK_COLS is ONE_VALUE, the value of `load_query_mask`; where it is SHIFTED, as
    of `shifted_start`, and the tiles are words, without those of `load_next`. BITS: of an element.  # at: [SEGMENTS, 1]
    """
    WORDS: tl.constexpr = VEC * BITS // 32
    tiles = ()
    for c in tl.static_range(CHUNKS):
        offsets = chunk_offsets(c, VECTORS, VEC, WARPS_PER_ROW)
        if MASK_COLS == ONE_VALUE:
            tile = at[:, :, None]
        elif MASK_COLS == SHIFTED:
            words = chunk_offsets(c, VECTORS, WORDS, WARPS_PER_ROW)
            if c < UNPREDICATED:
                tile = tl.load(at + words, eviction_policy=READS)
            else:
                inside = words < (width >> log2(VEC)) * WORDS
                tile = tl.load(at + words, mask=inside, other=0, eviction_policy=READS)
            tile = tl.reshape(tile, (SEGMENTS, VECTORS, WORDS))
        else:
            elements = elements_to(offsets, m_col, MASK_COLS)
            if c < UNPREDICATED:
                tile = tl.load(at + elements, eviction_policy=READS)
            else:
                tile = tl.load(at + elements, mask=offsets < width, other=0, eviction_policy=READS)
            tile = tl.reshape(tile, (SEGMENTS, VECTORS, VEC))
        tiles = tiles + (tile,)
    return tiles


@triton.jit
def load_next(
    at, shift, width, C: tl.constexpr, MASK_COLS: tl.constexpr, BITS: tl.constexpr,
    SEGMENTS: tl.constexpr, UNPREDICATED: tl.constexpr, WARPS_PER_ROW: tl.constexpr, VECTORS: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """Where SHIFTED, the words after each vector of the mask's chunk C; not read where the mask is in phase.

    They are the next thread's own words, which hit L1. So they are read where they are used, and take no registers
    while the row is on its way.
    """
    if MASK_COLS == SHIFTED:
        WORDS: tl.constexpr = VEC * BITS // 32
        words = chunk_offsets(C, VECTORS, WORDS, WARPS_PER_ROW)
        if C < UNPREDICATED:
            reads = (words >= 0) & (shift > 0)
        else:
            reads = (words < (width >> log2(VEC)) * WORDS) & (shift > 0)
        # any word will do where none is read: a shift of 0 takes none of them
        after = tl.load(at + words + WORDS, mask=reads, eviction_policy=READS)
        return tl.reshape(after, (SEGMENTS, VECTORS, WORDS))
    else:
        return 0


@triton.jit
def mask_of(
    tile, after, shift, MASK: tl.constexpr, MASK_COLS: tl.constexpr, TYPE: tl.constexpr, SHAPE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """The numbers of a chunk that `load_masks` and `load_next` have loaded.  # SHAPE: the chunk's"""
    if MASK == NO_MASK or MASK_COLS != SHIFTED:
        return tile
    else:
        words = shifted_words(tile, after, shift, TYPE.primitive_bitwidth // 8, PTX)
        elements = ()
        for k in tl.static_range(len(words)):
            elements = elements + elements_of(words[k], TYPE)
        return joined(elements, SHAPE)


@triton.jit
def _spread(words, SHAPE: tl.constexpr):
    """The word of each element of a boolean mask, which has 4 of them.  # words: SHAPE[2] // 4 x [SEGMENTS, VECTORS]"""
    if len(words) == 1:
        tile = words[0][:, :, None]
    else:
        tile = tl.join(words[0], words[1])
    tile = tl.broadcast_to(tile[:, :, :, None], (SHAPE[0], SHAPE[1], len(words), 4))
    return tl.reshape(tile, SHAPE)


@triton.constexpr_function
def _hide_ptx(minus_infinity: int) -> str:
    """Keeps 4 logits of 16 bits where a byte of the mask is not 0."""
    return "\n".join(
        (
            "{ .reg .b32 set, low, high;",
            "and.b32 set, $4, 0x7f7f7f7f;",
            "add.u32 set, set, 0x7f7f7f7f;",
            "or.b32 set, set, $4;",  # the top bit of each byte
            "prmt.b32 low, set, 0, 0x9988;",  # copied to 16 bits
            "prmt.b32 high, set, 0, 0xbbaa;",
            f"lop3.b32 $0, $2, low, {minus_infinity * 0x10001}, 0xe2;",
            f"lop3.b32 $1, $3, high, {minus_infinity * 0x10001}, 0xe2; }}",
        )
    )


@triton.jit
def hidden(
    x, tile, after, shift, MASK_COLS: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """Logits of 16 bits as loaded, -inf where a boolean mask hides.  # x: [SEGMENTS, VECTORS, VEC]

    They take half of the registers that they take in float32.
    """
    SHIFTS: tl.constexpr = MASK_COLS == SHIFTED
    if PTX and MASK_COLS != ONE_VALUE and x.shape[2] >= 4:
        ASM: tl.constexpr = _hide_ptx(0xFF80 if x.dtype == tl.bfloat16 else 0xFC00)
        if SHIFTS:
            words = _spread(shifted_words(tile, after, shift, 1, PTX), x.shape)
            return tl.inline_asm_elementwise(ASM, "=r,=r,r,r,r,r,r,r", [x, words], dtype=x.dtype, is_pure=True, pack=4)
        else:
            return tl.inline_asm_elementwise(ASM, "=r,=r,r,r,r", [x, tile], dtype=x.dtype, is_pure=True, pack=4)
    else:
        kept = mask_of(tile, after, shift, BOOLEAN, MASK_COLS, tl.uint8, x.shape, PTX)
        return tl.where(kept != 0, x.to(tl.float32), -float("inf")).to(x.dtype)


@triton.jit
def hide(x, mask, scale, MASK: tl.constexpr, PTX: tl.constexpr):
    """z of logits in float32, -inf where hidden."""
    if MASK == ADDITIVE:
        return tl.fma(x, scale, mask.to(tl.float32))
    elif MASK == BOOLEAN:
        return tl.where(mask != 0, scaled(x, scale, PTX), -float("inf"))
    else:
        return scaled(x, scale, PTX)


@triton.jit
def scores(
    x, mask, after, shift, scale, MASK: tl.constexpr, MASK_COLS: tl.constexpr, TYPE: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """z of a chunk and its mask as loaded."""
    return hide(upcast(x, PTX), mask_of(mask, after, shift, MASK, MASK_COLS, TYPE, x.shape, PTX), scale, MASK, PTX)


@triton.jit
def load_scalars(
    x_row, mask_row, at_mask, m_col, head, within, interior, columns, seen, owner, SCALARS: tl.constexpr,
    MASK: tl.constexpr, MASK_COLS: tl.constexpr, UNALIGNED: tl.constexpr, CAUSAL: tl.constexpr, VECTORS: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """(offsets, whether they exist, x, mask) of each tile of `scalar_tile`; x is -inf where the row does not see it.

    mask_row, at_mask: as of `mask_at`.
    """
    SHIFTS: tl.constexpr = MASK != NO_MASK and MASK_COLS == SHIFTED
    scalars, in_scalars, x_scalars, masks = (), (), (), ()
    for t in tl.static_range(SCALARS):
        at, exists = scalar_tile(t, head, within, interior, columns, owner, UNALIGNED, CAUSAL, SHIFTS, VECTORS, VEC)
        visible = exists & (at < seen - head)
        x = tl.load(x_row + at, mask=visible, other=-float("inf"))
        if MASK == NO_MASK:
            mask = x
        elif MASK_COLS == ONE_VALUE:
            mask = at_mask
        else:
            mask = tl.load(mask_row + elements_to(at, m_col, MASK_COLS), mask=visible, other=0)
        scalars, in_scalars = scalars + (at,), in_scalars + (exists,)
        x_scalars, masks = x_scalars + (x,), masks + (mask,)
    return scalars, in_scalars, x_scalars, masks
