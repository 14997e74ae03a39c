"""Parts of masked softmax: the columns that it moves one by one, and its sums."""

from __future__ import annotations

import triton
import triton.language as tl

from .numerics import exp, scaled, upcast
from .tiles import chunk_offsets, store_chunk

HEAD = tl.constexpr(0)
SEEN_IN_PART = tl.constexpr(1)
TAIL = tl.constexpr(2)


@triton.constexpr_function
def scalar_tiles(unaligned: bool, causal: bool, shifted: bool, vectors: int, vec: int) -> int:
    """How many tiles of `vectors` columns hold the columns that are written one element per thread."""
    scalars = unaligned + causal + (unaligned or shifted) + (unaligned and shifted)
    return -(-scalars * vec // vectors)


@triton.constexpr_function
def scalar_at(place: int, unaligned: bool, causal: bool, shifted: bool) -> int:
    """Which VEC columns lie at this place of a scalar tile: HEAD, SEEN_IN_PART, TAIL or TAIL + 1; -1 for none."""
    scalars = (0,) * unaligned + (1,) * causal + (2,) * (unaligned or shifted) + (3,) * (unaligned and shifted)
    return scalars[place] if place < len(scalars) else -1


@triton.jit
def scalar_columns(WHICH: tl.constexpr, place, head, within, interior, columns, VEC: tl.constexpr):
    """(offsets from the first aligned column, whether they exist) of the VEC columns of WHICH, at place 0..VEC-1."""
    if WHICH == HEAD:
        return place - head, place < head
    elif WHICH == SEEN_IN_PART:
        return within + place, within + 0 * place < interior
    else:
        at = interior + place + (WHICH - TAIL) * VEC
        return at, (at < columns - head) & (WHICH >= TAIL)


@triton.jit
def scalar_tile(
    T: tl.constexpr, head, within, interior, columns, owner, UNALIGNED: tl.constexpr, CAUSAL: tl.constexpr,
    SHIFTED: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """(offsets from the first aligned column, mask) of tile T of the columns that are written one element per thread.

    These are the head, the vector at `within`, which the row may see in part, and the columns after the interior: up to
    two vectors of them where the mask is SHIFTED.  # head, within, interior, owner: scalar or [SEGMENTS, 1]; result
    [SEGMENTS, VECTORS], VECTORS >= VEC
    """
    PLACES: tl.constexpr = VECTORS // VEC
    place = tl.arange(0, VECTORS)[None, :]
    offsets, exists = scalar_columns(
        scalar_at(T * PLACES, UNALIGNED, CAUSAL, SHIFTED), place, head, within, interior, columns, VEC
    )
    for k in tl.static_range(1, PLACES if PLACES < 4 else 4):
        at, real = scalar_columns(
            scalar_at(T * PLACES + k, UNALIGNED, CAUSAL, SHIFTED), place - k * VEC, head, within, interior, columns, VEC
        )
        offsets, exists = tl.where(place < k * VEC, offsets, at), tl.where(place < k * VEC, exists, real)
    if PLACES > 4:
        exists = exists & (place < 4 * VEC)
    return offsets, exists & owner


@triton.jit
def upcast_logits(x, scale, FUSED: tl.constexpr, PTX: tl.constexpr):
    """Logits in float32, converted again; scaled too, except where FUSED, because `exp2_affine` then has the scale."""
    x = upcast(x, PTX, True)
    return x if FUSED else scaled(x, scale, PTX)


@triton.jit
def apart_from(offsets, width, within, VEC: tl.constexpr):
    """Whether columns lie in `width`, and not in the vector at `within`, which a `scalar_tile` has."""
    return (offsets < width) & (offsets // VEC * VEC != within)


@triton.jit
def store_around(
    at, width, within, y, C: tl.constexpr, CAUSAL: tl.constexpr,
    SEGMENTS: tl.constexpr, UNPREDICATED: tl.constexpr, WARPS_PER_ROW: tl.constexpr, VECTORS: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """Writes chunk C, where CAUSAL without the vector at `within`, which a `scalar_tile` has.

    within: from the slice's first column.
    """
    if CAUSAL:
        offsets = chunk_offsets(C, VECTORS, VEC, WARPS_PER_ROW)
        value = tl.reshape(y.to(at.dtype.element_ty), (SEGMENTS, VECTORS * VEC))
        tl.store(at + offsets, value, mask=apart_from(offsets, width, within, VEC))
    else:
        store_chunk(at, width, y, C, SEGMENTS, UNPREDICATED, VECTORS, VEC, WARPS_PER_ROW)


@triton.jit
def reciprocal(row_sum, ZERO: tl.constexpr, REMATERIALIZE: tl.constexpr):
    """1/row_sum; where ZERO, 0 for a row that sees nothing.

    Where REMATERIALIZE it is rounded to nearest. The rare cases of that division are a branch, and the compiler does
    not carry converted values across a branch. A row of 8 chunks whose logits are converted again then takes 64
    registers instead of 96.
    """
    by = tl.div_rn(1.0, row_sum) if REMATERIALIZE else 1.0 / row_sum
    return tl.where(row_sum == 0.0, 0.0, by) if ZERO else by


@triton.jit
def accumulate(z, m, s):
    """Each vector's (max, sum) after one more tile.  # z: [SEGMENTS, VECTORS, VEC]; m, s: [SEGMENTS, VECTORS]"""
    m_new = tl.maximum(m, tl.max(z, 2))
    return m_new, s * exp(m - m_new) + tl.sum(exp(z - m_new[:, :, None]), 2)
