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
            offsets_here = offsets if MASK_COLS == NEIGHBORS else offsets * m_col
            if c < UNPREDICATED:
                tile = tl.load(at + offsets_here, eviction_policy=READS)
            else:
                tile = tl.load(at + offsets_here, mask=offsets < width, other=0, eviction_policy=READS)
            tile = tl.reshape(tile, (SEGMENTS, VECTORS, VEC))
        tiles = tiles + (tile,)
    return tiles


@triton.constexpr_function
def _shift_ptx(words: int) -> str:
    """Shifts words right, twice as many as the result has, by the bytes in the register that follows them."""
    shift = f"${3 * words}"
    lines = [f"{{ .reg .b32 w<{2 * words}>, part; .reg .pred moves;"]
    lines += [f"mov.b32 w{k}, ${words + k};" for k in range(2 * words)]
    step, n = words // 2, 2 * words
    while step:
        n -= step
        lines.append(f"and.b32 part, {shift}, {4 * step}; setp.ne.u32 moves, part, 0;")
        lines += [f"selp.b32 w{k}, w{k + step}, w{k}, moves;" for k in range(n)]
        step //= 2
    # the bytes that remain: the shift counts bits, modulo 32
    lines.append(f"shl.b32 part, {shift}, 3;")
    lines += [f"shf.r.wrap.b32 ${k}, w{k}, w{k + 1}, part;" for k in range(words)]
    return "\n".join((*lines, "}"))


@triton.constexpr_function
def _shift_registers(words: int, vec: int) -> str:
    return ",".join(["=r"] * words + ["r"] * (2 * words + vec))


@triton.jit
def load_shifted(
    words, shift, width, TYPE: tl.constexpr, SEGMENTS: tl.constexpr, CHUNKS: tl.constexpr,
    WARPS_PER_ROW: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The mask of a CTA's slice in its own vectors, tile by tile as `load_chunks` has the row.

    For clusters, where words have no layout: `shift_loaded` has each thread shift its vectors by inline PTX. Read by
    elements, 5 vectors of a boolean mask took 41 loads. words, shift: of `shifted_start`. TYPE: an element's, of
    fewer than 32 bits.
    # words, shift, width: [SEGMENTS, 1]
    """
    at = words.to(tl.pointer_type(TYPE), bitcast=True)
    first = at if PTX else at + shift
    tiles = ()
    for c in tl.static_range(CHUNKS):
        offsets = chunk_offsets(c, VECTORS, VEC, WARPS_PER_ROW)
        tiles = tiles + (tl.load(first + offsets, mask=offsets < width, other=0, eviction_policy=READS),)
    return tiles


@triton.jit
def shift_loaded(
    tile, words, shift, width, C: tl.constexpr, TYPE: tl.constexpr, SEGMENTS: tl.constexpr,
    WARPS_PER_ROW: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Chunk C of the mask in the row's vectors, from its own vectors, as of `load_shifted`, and the next ones.

    The next ones are other threads' own ones, which hit L1, as those of `load_next`.
    """
    if PTX:
        SIZE: tl.constexpr = TYPE.primitive_bitwidth // 8
        ASM: tl.constexpr = _shift_ptx(VEC * SIZE // 4)
        REGISTERS: tl.constexpr = _shift_registers(VEC * SIZE // 4, VEC)
        at = words.to(tl.pointer_type(tile.dtype), bitcast=True)
        offsets = chunk_offsets(C, VECTORS, VEC, WARPS_PER_ROW)
        reads = (offsets < width) & (shift > 0)
        after = tl.load(at + VEC + offsets, mask=reads, other=0, eviction_policy=READS)
        tile = tl.inline_asm_elementwise(
            ASM, REGISTERS, [tile, after, shift * SIZE], dtype=tile.dtype, is_pure=True, pack=VEC
        )
    return tl.reshape(tile, (SEGMENTS, VECTORS, VEC))


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
def _shifted(own, after, shift, BYTES: tl.constexpr, PTX: tl.constexpr):
    """The words of each vector of a row, from those of the mask's own vector and of the next one.

    They are shifted by powers of two, which are selects, and then by the bits that remain.
    """
    WORDS: tl.constexpr = own.shape[2]
    words = _words_of(own) + _words_of(after)
    by_words = shift * BYTES // 4
    if WORDS > 4:
        words = _moved(words, by_words, 4)
    if WORDS > 2:
        words = _moved(words, by_words, 2)
    if WORDS > 1:
        words = _moved(words, by_words, 1)
    shifted = ()
    for k in tl.static_range(WORDS):
        word = words[k]
        if BYTES < 4:
            bits = (shift * BYTES % 4 * 8) + tl.zeros_like(word)
            word = _funnel(word, words[k + 1], bits, PTX)
        shifted = shifted + (word,)
    return shifted


@triton.jit
def mask_of(
    tile, after, shift, MASK: tl.constexpr, MASK_COLS: tl.constexpr, TYPE: tl.constexpr, SHAPE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """The numbers of a chunk that `load_masks` and `load_next` have loaded.  # SHAPE: the chunk's"""
    if MASK == NO_MASK or MASK_COLS != SHIFTED:
        return tile
    else:
        words = _shifted(tile, after, shift, TYPE.primitive_bitwidth // 8, PTX)
        elements = ()
        for k in tl.static_range(len(words)):
            elements = elements + _elements_of(words[k], TYPE)
        return _joined(elements, SHAPE)


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
            words = _spread(_shifted(tile, after, shift, 1, PTX), x.shape)
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
        return tl.where(mask != 0, x * scale, -float("inf"))
    else:
        return scaled(x, scale, PTX)
