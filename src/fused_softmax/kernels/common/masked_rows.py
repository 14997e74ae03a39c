"""Parts of masked softmax: its scores, the columns that it moves one by one, and its sums."""

from __future__ import annotations

import triton
import triton.language as tl

from .masks import hide, mask_of
from .numerics import exp, scaled, upcast
from .tiles import chunk_offsets, store_chunk


@triton.jit
def head_seen_and_tail(head, within, interior, columns, owner, VECTORS: tl.constexpr, VEC: tl.constexpr):
    """(offsets from the first aligned column, mask) of the columns that are written one element per thread.

    These are the head, the vector at `within`, which the row may see in part, and up to two vectors of columns after
    the interior.  # head, within, interior, owner: scalar or [SEGMENTS, 1]; result [SEGMENTS, VECTORS],
    VECTORS >= 4*VEC
    """
    place = tl.arange(0, VECTORS)[None, :]
    after = tl.where(place < 2 * VEC, within + place - VEC, interior + place - 2 * VEC)
    real = ((place >= 2 * VEC) & (place < 4 * VEC)) | ((place < 2 * VEC) & (within < interior))
    offsets = tl.where(place < VEC, place - head, after)
    exists = tl.where(place < VEC, place < head, real & (after < columns - head))
    return offsets, exists & owner


@triton.jit
def scores(
    x, mask, shift, scale, MASK: tl.constexpr, MASK_COLS: tl.constexpr, TYPE: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """z of a chunk and its mask as loaded."""
    return hide(upcast(x, PTX), mask_of(mask, shift, MASK, MASK_COLS, TYPE, x.shape, PTX), scale, MASK, PTX)


@triton.jit
def upcast_logits(x, scale, FUSED: tl.constexpr, PTX: tl.constexpr):
    """Logits in float32, converted again; scaled too, except where FUSED, because `exp2_affine` then has the scale."""
    x = upcast(x, PTX, True)
    return x if FUSED else scaled(x, scale, PTX)


@triton.jit
def store_around(
    at, width, within, y, C: tl.constexpr, CAUSAL: tl.constexpr,
    SEGMENTS: tl.constexpr, WARPS_PER_ROW: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Writes chunk C, where CAUSAL without the vector at `within`, which `head_seen_and_tail` has.

    within: from the slice's first column.
    """
    if CAUSAL:
        offsets = chunk_offsets(C, VECTORS, VEC, WARPS_PER_ROW)
        value = tl.reshape(y.to(at.dtype.element_ty), (SEGMENTS, VECTORS * VEC))
        tl.store(at + offsets, value, mask=(offsets < width) & (offsets // VEC * VEC != within))
    else:
        store_chunk(at, width, y, C, SEGMENTS, 0, VECTORS, VEC, WARPS_PER_ROW)


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
