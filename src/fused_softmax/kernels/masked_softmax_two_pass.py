"""Softmax of scaled rows under a mask, where the row does not fit on chip.

    z = scale*x + mask  or  z = scale*x where mask, else -inf;  y = exp(z - max(z)) / sum(exp(z - max(z)))

    first pass:   m' = max(m, z);  s = s*exp(m - m') + sum(exp(z - m'))        (online softmax)
    second pass:  y = exp(z - m) / s                                           backwards, as the columns that were read
                                                                               last are still in L2

One program reads a row in steps of CHUNKS chunks. What is read of a row and its mask, and in which order the rows are
taken, is as in `masked_softmax_resident`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common.arguments import Float32, Int32, Int64, Rows, Vector, kernel
from .common.early_start import await_previous
from .common.mask_layouts import NO_MASK, ONE_VALUE, OWN, SHIFTED, elements_to
from .common.masked_rows import accumulate, reciprocal, scalar_tiles, store_around
from .common.masks import hide, load_masks, load_next, load_scalars, mask_at, scores
from .common.numerics import LOWEST, exp, rounded_product
from .common.row_scheduler import row_at, seen_of
from .common.tiles import load_chunks, segments_of, span_of, start_of


@triton.jit
def load_step(
    x_at, at_mask, start, left, m_col, MASK: tl.constexpr, MASK_COLS: tl.constexpr, BITS: tl.constexpr,
    CHUNKS: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """(x, mask, address of the mask) of the step that begins `start` columns after x_at, as loaded."""
    x = load_chunks(x_at + start, left - start, 1, CHUNKS, 0, VECTORS, VEC, -float("inf"))
    if MASK == NO_MASK:
        return x, x, at_mask
    else:
        at = at_mask
        if MASK_COLS == SHIFTED:  # words
            at += start // VEC * (VEC * BITS // 32)
        elif MASK_COLS != ONE_VALUE:
            at += elements_to(start, m_col, MASK_COLS)
        return x, load_masks(at, left - start, m_col, MASK_COLS, BITS, 1, CHUNKS, 0, 1, VECTORS, VEC), at


@kernel()
def masked_softmax_two_pass(
    x_ptr: Rows,  # the arguments are those of `masked_softmax_resident`
    y_ptr: Rows,
    mask_ptr: Vector,
    n_rows: Int64,
    n_cols: Int32,
    x_stride: Int64, y_stride: Int64,
    phase: Int32,
    n_queries: Int64,
    n_span: Int64, span_multiplier: Int64, span_power: Int64, span_stride: Int64,
    n_block: Int64, block_multiplier: Int64, block_power: Int64, shared_stride: Int64,
    n_group: Int64, group_multiplier: Int64, group_power: Int64,
    n_last: Int64, last_multiplier: Int64, last_power: Int64,
    n_middle: Int64, n_inner: Int64,
    m_outer: Int64, m_middle: Int64, m_inner: Int64, m_query: Int64, m_col: Int64,
    m_phase: Int32,
    scale: Float32,
    MASK: tl.constexpr, MASK_COLS: tl.constexpr, MASK_ROWS: tl.constexpr, MASK_VEC: tl.constexpr, CAUSAL: tl.constexpr,
    ZERO: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr, UNALIGNED: tl.constexpr,
    PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    STEP: tl.constexpr = CHUNKS * VECTORS * VEC
    TYPE: tl.constexpr = mask_ptr.dtype.element_ty
    BITS: tl.constexpr = TYPE.primitive_bitwidth
    IS_SHIFTED: tl.constexpr = MASK != NO_MASK and MASK_COLS == SHIFTED
    SCALARS: tl.constexpr = scalar_tiles(UNALIGNED, CAUSAL, IS_SHIFTED, VECTORS, VEC)
    scale = tl.cast(scale, tl.float32)  # the interpreter makes a float64 of a subnormal number
    # locate the row, the columns that it sees, and its mask
    place, zero = segments_of(1, 1)
    exists = zero == 0  # each program has a row
    row, span, batch, query = row_at(
        place, n_queries, n_span, span_multiplier, span_power, span_stride, n_block, block_multiplier, block_power,
        shared_stride, n_group, group_multiplier, group_power, n_last, last_multiplier, last_power, MASK_ROWS != OWN,
        CAUSAL,
    )  # fmt: skip
    head, interior = span_of(row, x_stride, phase, n_cols, VEC, UNALIGNED)
    x_row = x_ptr + start_of(row, x_stride, phase, VEC, UNALIGNED)
    y_row = y_ptr + start_of(row, y_stride, phase, VEC, UNALIGNED)
    if IS_SHIFTED:  # the last vector's columns are a tail, so that no vector of the mask reaches beyond its row
        interior = tl.maximum(interior - VEC, 0)
    width = (interior + zero).to(tl.int32)
    columns = (n_cols if UNALIGNED else n_cols * VEC).to(tl.int32)
    seen = seen_of(query, columns, CAUSAL)
    within = (tl.maximum(seen - head, 0) // VEC * VEC).to(tl.int32)
    left = tl.minimum(width, within).to(tl.int32)
    await_previous(EARLY)
    mask_row, at_mask, to_mask = mask_at(
        mask_ptr, row, span, batch, query, head, zero, exists, n_middle, n_inner, m_outer, m_middle, m_inner, m_query,
        m_col, m_phase, MASK, MASK_COLS, MASK_ROWS, MASK_VEC, UNALIGNED, VEC,
    )  # fmt: skip
    scalars, in_scalars, x_scalars, masks = load_scalars(
        x_row, mask_row, at_mask, m_col, head, within, interior, columns, seen, exists, SCALARS, MASK, MASK_COLS,
        UNALIGNED, CAUSAL, VECTORS, VEC,
    )  # fmt: skip

    # each vector's own maximum and sum
    m = tl.zeros([1, VECTORS], tl.float32) + LOWEST
    s = tl.zeros([1, VECTORS], tl.float32)
    first = tl.zeros([1, 1], tl.int64)
    for step in range(tl.cdiv(tl.maximum(tl.max(tl.max(left, 1), 0), 0), STEP)):
        start = (first + step) * STEP
        x, mask, at = load_step(x_row, at_mask, start, left, m_col, MASK, MASK_COLS, BITS, CHUNKS, VECTORS, VEC)
        for c in tl.static_range(CHUNKS):
            after = load_next(at, to_mask, left - start, c, MASK_COLS, BITS, 1, 0, 1, VECTORS, VEC)
            m, s = accumulate(scores(x[c], mask[c], after, to_mask, scale, MASK, MASK_COLS, TYPE, PTX), m, s)

    # the row's
    z_scalars = ()
    for t in tl.static_range(SCALARS):
        z_scalars = z_scalars + (hide(x_scalars[t].to(tl.float32), masks[t], scale, MASK, PTX),)
    row_max = tl.max(m, 1)
    for t in tl.static_range(SCALARS):
        row_max = tl.maximum(row_max, tl.max(z_scalars[t], 1))
    row_sum = tl.sum(rounded_product(s, exp(m - row_max[:, None])), 1)
    for t in tl.static_range(SCALARS):
        row_sum += tl.sum(exp(z_scalars[t] - row_max[:, None]), 1)
    row_max = row_max[:, None]
    by = reciprocal(row_sum[:, None], ZERO, False)

    # the last formula, and the store
    n_steps = tl.cdiv(tl.max(tl.max(width, 1), 0), STEP)
    for step in range(n_steps):
        start = (first + n_steps - 1 - step) * STEP
        x, mask, at = load_step(x_row, at_mask, start, left, m_col, MASK, MASK_COLS, BITS, CHUNKS, VECTORS, VEC)
        for c in tl.static_range(CHUNKS):
            after = load_next(at, to_mask, left - start, c, MASK_COLS, BITS, 1, 0, 1, VECTORS, VEC)
            z = scores(x[c], mask[c], after, to_mask, scale, MASK, MASK_COLS, TYPE, PTX)
            y = exp(z - row_max[:, :, None]) * by[:, :, None]
            store_around(y_row + start, width - start, within - start, y, c, CAUSAL, 1, 0, 1, VECTORS, VEC)
    for t in tl.static_range(SCALARS):
        y_scalar = exp(z_scalars[t] - row_max) * by
        tl.store(y_row + scalars[t], y_scalar.to(y_ptr.dtype.element_ty), mask=in_scalars[t])
