"""A mask that is read in its own aligned vectors and shifted to those of its row, in registers.

A mask lies anywhere with respect to its row. Read element by element, it would take as many loads as it has elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .numerics import columns_of
from .tiles import READS, chunk_offsets, log2


@triton.jit
def shifted_start(mask_ptr, column, first, VEC: tl.constexpr):
    """(address of the mask's aligned vector at a segment's first column, elements from there to that column).

    It is read in vectors of VEC elements, as words of 4 bytes.  # column: the row's first aligned one, from mask_ptr
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
def shifted_words(own, after, shift, BYTES: tl.constexpr, PTX: tl.constexpr):
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
def elements_of(word, TYPE: tl.constexpr):
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
def joined(x, SHAPE: tl.constexpr):
    """The inverse of `columns_of`, for 4 and 8 columns."""
    if SHAPE[2] == 4:
        even, odd = tl.join(x[0], x[2]), tl.join(x[1], x[3])
    else:
        even = tl.join(tl.join(x[0], x[4]), tl.join(x[2], x[6]))
        odd = tl.join(tl.join(x[1], x[5]), tl.join(x[3], x[7]))
    return tl.reshape(tl.join(even, odd), SHAPE)


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
