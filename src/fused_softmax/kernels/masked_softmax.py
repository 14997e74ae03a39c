"""Softmax of scaled rows under a mask, the row on chip or walked twice.

    z = scale*x + mask  or  z = scale*x where mask, else -inf;  y = exp(z - max(z)) / sum(exp(z - max(z)))

Causal rows need no mask: query q sees columns 0..q, so its row is one of q + 1 columns, read in vectors but for its
ends, and what lies beyond is written as zeros and not read. A mask is read once, where it lies, with its own strides (0
where it is broadcast). Programs come in groups of rows that lie together, with those that share a mask soon after each
other. A row with no column left has sum 0 and is NaN, or zero where ZERO. What limits is the bytes of x and mask that
are seen, and of y.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common.arguments import Float32, Int32, Int64, Rows, Vector, kernel
from .common.cluster import cluster_reduce_max_sum, init_cluster_barrier, leave_cluster
from .common.numerics import LOWEST, exp, exp2_affine, exp2_fma, scaled, upcast
from .common.row_scheduler import scheduled_row, seen_of
from .common.tiles import (
    READS,
    chunk_offsets,
    load_chunks,
    segments_of,
    slice_of,
    span_of,
    start_of,
    store_chunk,
    warp_of,
    width_if,
)  # fmt: skip

NO_MASK = tl.constexpr(0)
BOOLEAN = tl.constexpr(1)
ADDITIVE = tl.constexpr(2)


@triton.jit
def mask_row_of(batch, query, mask_ptr, n_middle, n_inner, m_outer, m_middle, m_inner, m_query, MASK_VEC: tl.constexpr):
    """Where each row's mask begins; strides in units of MASK_VEC.  # batch, query: [SEGMENTS, 1]"""
    batch, n_inner, n_middle = batch.to(tl.int32), n_inner.to(tl.int32), n_middle.to(tl.int32)
    group, inner = batch // n_inner, batch % n_inner
    outer, middle = group // n_middle, group % n_middle
    return mask_ptr + (outer * m_outer + middle * m_middle + inner * m_inner + query * m_query) * MASK_VEC


@triton.jit
def causal_head_and_tail(head, within, interior, columns, owner, VECTORS: tl.constexpr, VEC: tl.constexpr):
    """(offsets from the first aligned column, mask) of what is written one element a lane: the head, the vector at
    `within`, which the row may see in part, and the columns after the last vector where that is another one.

    # head, within, interior, owner: scalar or [SEGMENTS, 1]; result [SEGMENTS, VECTORS], VECTORS >= 3*VEC
    """
    lane = tl.arange(0, VECTORS)[None, :]
    after = tl.where(lane < 2 * VEC, within + lane - VEC, interior + lane - 2 * VEC)
    real = (lane < 2 * VEC) | ((lane < 3 * VEC) & (within < interior))
    offsets = tl.where(lane < VEC, lane - head, after)
    exists = tl.where(lane < VEC, lane < head, real & (after < columns - head))
    return offsets, exists & owner


@triton.jit
def hide(x, mask, scale, MASK: tl.constexpr, PTX: tl.constexpr):
    """z of logits in float32; a hidden one is -inf."""
    if MASK == ADDITIVE:
        return tl.fma(x, scale, mask.to(tl.float32))
    elif MASK == BOOLEAN:
        return tl.where(mask != 0, x * scale, -float("inf"))
    else:
        return scaled(x, scale, PTX)


@triton.jit
def upcast_logits(x, scale, FUSED: tl.constexpr, PTX: tl.constexpr):
    """Logits upcast_logits anew, and scaled but where FUSED, as `exp2_affine` has the scale then."""
    x = upcast(x, PTX, True)
    return x if FUSED else scaled(x, scale, PTX)


@triton.jit
def load_query_mask(mask_row, exists):
    """The one value that a row's columns share, where MASK_COLS is 0.  # [SEGMENTS, 1]

    It is read once a line, never as a tile of equal addresses. Triton 3.6 gives such a tile a layout that spreads a
    line over warps, and the merge over a cluster needs a line to be a warp.
    """
    return tl.load(mask_row, mask=exists, other=0)


@triton.jit
def load_masks(
    at, width, m_col, MASK_COLS: tl.constexpr,
    SEGMENTS: tl.constexpr, CHUNKS: tl.constexpr, WARPS_PER_ROW: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """The mask of a slice, tile by tile as `load_chunks` has the row.  # at: the slice's first column; [SEGMENTS, 1]

    Where MASK_COLS is 0, `at` is what `load_query_mask` read.
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
def store_around(
    at, width, within, y, C: tl.constexpr, CAUSAL: tl.constexpr,
    SEGMENTS: tl.constexpr, WARPS_PER_ROW: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Writes chunk C, where CAUSAL without the vector at `within`, which `causal_head_and_tail` has.  # within: from the slice"""
    if CAUSAL:
        offsets = chunk_offsets(C, VECTORS, VEC, WARPS_PER_ROW)
        value = tl.reshape(y.to(at.dtype.element_ty), (SEGMENTS, VECTORS * VEC))
        tl.store(at + offsets, value, mask=(offsets < width) & (offsets // VEC * VEC != within))
    else:
        store_chunk(at, width, y, C, SEGMENTS, 0, VECTORS, VEC, WARPS_PER_ROW)


@triton.jit
def reciprocal(row_sum, ZERO: tl.constexpr, REMATERIALIZE: tl.constexpr):
    """1/row_sum; where ZERO, 0 for a row that sees nothing.

    Where REMATERIALIZE, rounded to nearest: the rare cases of that are a branch, and beyond a branch the compiler does not
    remember what it has upcast_logits. A row of 8 chunks that is upcast_logits anew takes 64 registers so, and 96 without.
    """
    by = tl.div_rn(1.0, row_sum) if REMATERIALIZE else 1.0 / row_sum
    return tl.where(row_sum == 0.0, 0.0, by) if ZERO else by


@triton.jit
def accumulate(z, m, s):
    """Each lane's (max, sum) with one tile more.  # z: [SEGMENTS, VECTORS, VEC]; m, s: [SEGMENTS, VECTORS]"""
    m_new = tl.maximum(m, tl.max(z, 2))
    return m_new, s * exp(m - m_new) + tl.sum(exp(z - m_new[:, :, None]), 2)


@kernel(on_cluster=True)
def masked_softmax_forward(
    x_ptr: Rows,  # aligned to VEC elements, as y_ptr
    y_ptr: Rows,
    mask_ptr: Vector,  # uint8 or floating, where MASK
    n_rows: Int64,  # fewer than 2^31
    n_cols: Int32,  # n_cols and the rows' strides: in units of VEC, or of one element where UNALIGNED
    x_stride: Int64,
    y_stride: Int64,
    phase: Int32,
    n_queries: Int64,  # rows are (outer, n_middle, n_inner, n_queries)
    n_group: Int64,  # rows that are neighbors in the order of `scheduled_row`, and what `fast_divmod` takes of it
    group_multiplier: Int64,
    group_shift: Int64,
    n_batch: Int64,  # n_rows/n_queries
    batch_multiplier: Int64,
    batch_shift: Int64,
    n_middle: Int64,
    n_inner: Int64,
    m_outer: Int64,  # the mask's strides, in units of MASK_VEC
    m_middle: Int64,
    m_inner: Int64,
    m_query: Int64,
    m_col: Int64,  # where MASK_COLS is 2: elements
    scale: Float32,  # positive
    MASK: tl.constexpr,
    MASK_COLS: tl.constexpr,  # the mask's stride along the columns: 0, 1, or 2 for any other
    MASK_VEC: tl.constexpr,
    CAUSAL: tl.constexpr,
    ZERO: tl.constexpr,
    TWO_PASS: tl.constexpr,  # the row does not fit on chip: CHUNKS are a step's
    RECOMPUTE: tl.constexpr,  # without a mask: keep the row as loaded and compute exp twice
    ROWS: tl.constexpr, CTAS: tl.constexpr, WARPS_PER_ROW: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr,
    CHUNKS: tl.constexpr, UNALIGNED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    init_cluster_barrier(CTAS, 2, PTX, WARPS_PER_ROW)
    SEGMENTS: tl.constexpr = ROWS * CTAS * WARPS_PER_ROW
    STEP: tl.constexpr = CHUNKS * WARPS_PER_ROW * VECTORS * VEC
    HEAD_TAIL: tl.constexpr = UNALIGNED or CAUSAL
    REMATERIALIZE: tl.constexpr = RECOMPUTE and MASK == NO_MASK
    # z is never made: exp(scale*(x - m)) takes a multiply-add and an exp2
    FUSED: tl.constexpr = REMATERIALIZE and PTX and CTAS == 1 and x_ptr.dtype.element_ty.primitive_bitwidth == 16
    scale = tl.cast(scale, tl.float32)  # interpreted, a subnormal number is a float64
    unit = scale if FUSED else 1.0
    place, rank = segments_of(ROWS, CTAS, WARPS_PER_ROW)
    warp = warp_of(SEGMENTS, WARPS_PER_ROW)
    exists = place < n_rows
    row, batch, query = scheduled_row(
        place, n_queries, n_group, group_multiplier, group_shift, n_batch, batch_multiplier, batch_shift,
        MASK != NO_MASK, CAUSAL,
    )  # fmt: skip
    head, interior = span_of(row, x_stride, phase, n_cols, VEC, UNALIGNED)
    x_row = x_ptr + start_of(row, x_stride, phase, VEC, UNALIGNED)
    y_row = y_ptr + start_of(row, y_stride, phase, VEC, UNALIGNED)
    first, width = slice_of(interior, rank, CTAS, VEC)
    first += warp * (VECTORS * VEC)
    width = width_if(exists, width - warp * (VECTORS * VEC)).to(tl.int32)
    # what the row sees: in whole vectors, and of this line's slice
    columns = (n_cols if UNALIGNED else n_cols * VEC).to(tl.int32)
    seen = seen_of(query, columns, CAUSAL)
    within = (tl.maximum(seen - head, 0) // VEC * VEC).to(tl.int32)
    left = tl.minimum(width, within - first).to(tl.int32)
    mask_row = mask_row_of(batch, query, mask_ptr, n_middle, n_inner, m_outer, m_middle, m_inner, m_query, MASK_VEC)
    if MASK != NO_MASK and MASK_COLS == 0:
        query_mask = load_query_mask(mask_row, exists)
        at_mask = query_mask
    else:
        mask_row += (head * m_col if MASK_COLS == 2 else head * MASK_COLS).to(tl.int64) if UNALIGNED else 0
        at_mask = mask_row + (first.to(tl.int64) * m_col if MASK_COLS == 2 else first * MASK_COLS)

    m = tl.zeros([SEGMENTS, VECTORS], tl.float32) + LOWEST
    s = tl.zeros([SEGMENTS, VECTORS], tl.float32)
    zero = tl.zeros([1, 1], tl.int64)
    exps = ()
    if not TWO_PASS:
        x = load_chunks(x_row + first, left, SEGMENTS, CHUNKS, 0, VECTORS, VEC, -float("inf"), WARPS_PER_ROW)
        mask = x
        if MASK != NO_MASK:
            mask = load_masks(at_mask, left, m_col, MASK_COLS, SEGMENTS, CHUNKS, WARPS_PER_ROW, VECTORS, VEC)
    if HEAD_TAIL:
        head_tail, in_head_tail = causal_head_and_tail(head, within, interior, columns, (rank == 0) & (warp == 0) & exists, VECTORS, VEC)
        visible = in_head_tail & (head_tail < seen - head)
        x_head_tail = tl.load(x_row + head_tail, mask=visible, other=-float("inf"))
        if MASK == NO_MASK:
            mask_head_tail = x_head_tail
        elif MASK_COLS == 0:
            mask_head_tail = query_mask
        else:
            mask_head_tail = tl.load(mask_row + head_tail * (m_col if MASK_COLS == 2 else MASK_COLS), mask=visible, other=0)
    if TWO_PASS:
        most = tl.max(tl.max(left, 1), 0)  # of the parts, the first has the most columns
        for step in range(tl.cdiv(tl.maximum(most, 0), STEP)):
            start = (zero + step) * STEP
            x = load_chunks(
                x_row + first + start, left - start, SEGMENTS, CHUNKS, 0, VECTORS, VEC, -float("inf"), WARPS_PER_ROW
            )
            mask = x
            if MASK != NO_MASK:
                at = at_mask if MASK_COLS == 0 else at_mask + start * (m_col if MASK_COLS == 2 else 1)
                mask = load_masks(at, left - start, m_col, MASK_COLS, SEGMENTS, CHUNKS, WARPS_PER_ROW, VECTORS, VEC)
            for c in tl.static_range(CHUNKS):
                m, s = accumulate(hide(upcast(x[c], PTX), mask[c], scale, MASK, PTX), m, s)
    else:
        if REMATERIALIZE:
            # scale is positive: the largest x has the largest z. Where FUSED, m stays what it is in x
            top = tl.max(x[0], 2)
            for c in tl.static_range(1, CHUNKS):
                top = tl.maximum(top, tl.max(x[c], 2))
            top = tl.maximum(top.to(tl.float32), LOWEST)
            m = top if FUSED else tl.maximum(scaled(top, scale, PTX), LOWEST)
            base, shift, correction = exp2_affine(m, FUSED, scale)
            for c in tl.static_range(CHUNKS):
                z = upcast_logits(x[c], scale, FUSED, PTX)
                s += tl.sum(exp2_fma(z, base[:, :, None], shift[:, :, None], FUSED), 2)
            s *= correction
        else:
            z = ()
            for c in tl.static_range(CHUNKS):
                z = z + (hide(upcast(x[c], PTX), mask[c], scale, MASK, PTX),)
                m = tl.maximum(m, tl.max(z[c], 2))
            for c in tl.static_range(CHUNKS):
                exps = exps + (exp(z[c] - m[:, :, None]),)
                s += tl.sum(exps[c], 2)
    # the ends are summed up by line: a tile of them need not lie in the CTAs as the row does
    segment_max = tl.max(m, 1)
    if HEAD_TAIL:
        z_head_tail = x_head_tail.to(tl.float32)
        if not FUSED:
            z_head_tail = hide(z_head_tail, mask_head_tail, scale, MASK, PTX)
        segment_max = tl.maximum(segment_max, tl.max(z_head_tail, 1))
    segment_sum = tl.sum(s * exp((m - segment_max[:, None]) * unit), 1)
    if HEAD_TAIL:
        segment_sum += tl.sum(exp((z_head_tail - segment_max[:, None]) * unit), 1)
    row_max, row_sum = cluster_reduce_max_sum(segment_max, segment_sum, CTAS, PTX, WARPS_PER_ROW)
    row_max = row_max[:, None]
    by = reciprocal(row_sum[:, None], ZERO, REMATERIALIZE)

    if TWO_PASS:
        widest = tl.max(tl.max(width, 1), 0)
        n_steps = tl.cdiv(widest, STEP)
        for step in range(n_steps):
            start = (zero + n_steps - 1 - step) * STEP
            x = load_chunks(
                x_row + first + start, left - start, SEGMENTS, CHUNKS, 0, VECTORS, VEC, -float("inf"), WARPS_PER_ROW
            )
            mask = x
            if MASK != NO_MASK:
                at = at_mask if MASK_COLS == 0 else at_mask + start * (m_col if MASK_COLS == 2 else 1)
                mask = load_masks(at, left - start, m_col, MASK_COLS, SEGMENTS, CHUNKS, WARPS_PER_ROW, VECTORS, VEC)
            for c in tl.static_range(CHUNKS):
                z = hide(upcast(x[c], PTX), mask[c], scale, MASK, PTX)
                y = exp(z - row_max[:, :, None]) * by[:, :, None]
                y_at = y_row + first + start
                store_around(
                    y_at, width - start, within - first - start, y, c, CAUSAL, SEGMENTS, WARPS_PER_ROW, VECTORS, VEC
                )
    elif REMATERIALIZE:
        base, shift, correction = exp2_affine(row_max, FUSED, scale)
        correction = correction * by
        for c in tl.static_range(CHUNKS):
            z = upcast_logits(x[c], scale, FUSED, PTX)
            y = exp2_fma(z, base[:, :, None], shift[:, :, None], FUSED) * correction[:, :, None]
            store_around(y_row + first, width, within - first, y, c, CAUSAL, SEGMENTS, WARPS_PER_ROW, VECTORS, VEC)
    else:
        by_vector = exp(m - row_max) * by
        for c in tl.static_range(CHUNKS):
            y = exps[c] * by_vector[:, :, None]
            store_around(y_row + first, width, within - first, y, c, CAUSAL, SEGMENTS, WARPS_PER_ROW, VECTORS, VEC)
    if HEAD_TAIL:
        y_head_tail = exp((z_head_tail - row_max) * unit) * by
        tl.store(y_row + head_tail, y_head_tail.to(y_ptr.dtype.element_ty), mask=in_head_tail)
    leave_cluster(CTAS, PTX)
