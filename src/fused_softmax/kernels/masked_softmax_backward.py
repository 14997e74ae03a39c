"""The gradient of softmax of scaled rows under a mask, the row on chip.

    dx = scale*y*(dy - sum(y*dy)), and 0 in what is hidden

y is 0 in what a mask hides, so no mask is read again, except a boolean one for a row whose sum is not finite: a row
that holds NaN, or sees nothing, is NaN throughout, and its hidden columns have a gradient of 0 all the same. What a
causal row does not see is not read: dx is 0 there. A row that does not fit on chip is `streaming`'s.
"""

from __future__ import annotations

import triton.language as tl

from .common.arguments import Float32, Int32, Int64, Rows, Vector, kernel
from .common.cluster import leave_cluster, open_exchange, sum_over_cluster
from .common.numerics import sum_of_vectors, widen
from .common.row_scheduler import row_at, seen_of
from .common.tiles import (
    chunk_offsets,
    edge_of,
    lines_of,
    load_chunks,
    part_of,
    slice_of,
    span_of,
    start_of,
    store_chunk,
    width_if,
)
from .masked_softmax import NO_MASK, load_query_mask, mask_row_of


@kernel()
def masked_softmax_backward(
    y_ptr: Rows,  # the forward's output; all pointers: aligned to VEC elements
    dy_ptr: Rows,
    dx_ptr: Rows,
    mask_ptr: Vector,  # uint8, where MASK
    n_rows: Int64,
    n_cols: Int32,  # n_cols and strides: in units of VEC, or of one element where EDGE
    y_stride: Int64,
    dy_stride: Int64,
    dx_stride: Int64,
    phase: Int32,
    n_queries: Int64,
    n_group: Int64,
    group_magic: Int64,
    group_power: Int64,
    n_batch: Int64,
    batch_magic: Int64,
    batch_power: Int64,
    n_middle: Int64,  # the mask's sizes and strides, as `masked` has them
    n_inner: Int64,
    m_outer: Int64,
    m_middle: Int64,
    m_inner: Int64,
    m_query: Int64,
    m_col: Int64,
    scale: Float32,
    MASK: tl.constexpr,  # none, or a boolean one
    MASK_COLS: tl.constexpr,
    MASK_VEC: tl.constexpr,
    CAUSAL: tl.constexpr,
    ROWS: tl.constexpr,
    CTAS: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    CHUNKS: tl.constexpr,
    EDGE: tl.constexpr,
    PTX: tl.constexpr,
):
    open_exchange(CTAS, 1, PTX, PARTS)
    LINES: tl.constexpr = ROWS * CTAS * PARTS
    scale = tl.cast(scale, tl.float32)
    place, rank = lines_of(ROWS, CTAS, PARTS)
    part = part_of(LINES, PARTS)
    exists = place < n_rows
    row, batch, query = row_at(
        place, n_queries, n_group, group_magic, group_power, n_batch, batch_magic, batch_power, False, CAUSAL
    )
    head, interior = span_of(row, y_stride, phase, n_cols, VEC, EDGE)
    y_row = y_ptr + start_of(row, y_stride, phase, VEC, EDGE)
    dy_row = dy_ptr + start_of(row, dy_stride, phase, VEC, EDGE)
    dx_row = dx_ptr + start_of(row, dx_stride, phase, VEC, EDGE)
    first, width = slice_of(interior, rank, CTAS, VEC)
    first += part * (LANES * VEC)
    width = width_if(exists, width - part * (LANES * VEC)).to(tl.int32)
    # y is 0 in what a causal row does not see: neither is read there, and dx is 0
    columns = (n_cols if EDGE else n_cols * VEC).to(tl.int32)
    within = ((tl.maximum(seen_of(query, columns, CAUSAL) - head, 0) + (VEC - 1)) // VEC * VEC).to(tl.int32)
    left = tl.minimum(width, within - first).to(tl.int32)
    y = load_chunks(y_row + first, left, LINES, CHUNKS, 0, LANES, VEC, 0.0, PARTS)
    dy = load_chunks(dy_row + first, left, LINES, CHUNKS, 0, LANES, VEC, 0.0, PARTS)
    d = tl.zeros([LINES, LANES], tl.float32)
    # a chunk that nothing is seen of costs as much as a full one: 4,096 columns .97 of the add, and .99 without it
    SKIPS: tl.constexpr = CAUSAL and CTAS == 1
    most = tl.max(tl.max(left, 1), 0) if SKIPS else 0
    for c in tl.static_range(CHUNKS):
        if SKIPS:
            if c * (PARTS * LANES * VEC) < most:
                d += sum_of_vectors(widen(y[c], PTX) * widen(dy[c], PTX), PTX)
        else:
            d += sum_of_vectors(widen(y[c], PTX) * widen(dy[c], PTX), PTX)
    if EDGE:
        edge, in_edge = edge_of(head, interior, n_cols, (rank == 0) & (part == 0) & exists, LANES, VEC)
        y_edge = tl.load(y_row + edge, mask=in_edge, other=0.0).to(tl.float32)
        dy_edge = tl.load(dy_row + edge, mask=in_edge, other=0.0).to(tl.float32)
    d = tl.sum(d, 1)
    if EDGE:
        d += tl.sum(y_edge * dy_edge, 1)
    d = sum_over_cluster(d, CTAS, PTX, PARTS)[:, None]
    if MASK != NO_MASK:
        odd = exists & ((tl.abs(d) < float("inf")) == 0)
        mask_row = mask_row_of(batch, query, mask_ptr, n_middle, n_inner, m_outer, m_middle, m_inner, m_query, MASK_VEC)
        if MASK_COLS == 0:
            query_mask = tl.where(odd, load_query_mask(mask_row, odd), 1)
        else:
            mask_row += (head * m_col if MASK_COLS == 2 else head).to(tl.int64) if EDGE else 0
            at_mask = mask_row + (first.to(tl.int64) * m_col if MASK_COLS == 2 else first)
    # the last column that a causal row sees, from each vector of the line's first chunk: a column's place in its
    # vector is a constant then, and no register holds it
    last = ((query - head - first).to(tl.int32) - VEC * tl.arange(0, LANES)[None, :])[:, :, None]
    place = tl.arange(0, VEC)[None, None, :]
    for c in tl.static_range(CHUNKS):
        y_c, dy_c = widen(y[c], PTX, True), widen(dy[c], PTX, True)
        dx = scale * y_c * (dy_c - d[:, :, None])
        if CAUSAL:
            # of what a row does not see y is 0 where it is read at all, but 0 times an infinite sum is NaN
            dx = tl.where(place <= last - c * (PARTS * LANES * VEC), dx, 0.0)
        if MASK != NO_MASK:
            if MASK_COLS == 0:
                seen = query_mask[:, :, None]
            else:
                offsets = chunk_offsets(c, LANES, VEC, PARTS)
                at = at_mask + (offsets * m_col if MASK_COLS == 2 else offsets)
                seen = tl.reshape(tl.load(at, mask=odd & (offsets < left), other=1), (LINES, LANES, VEC))
            dx = tl.where(seen != 0, dx, 0.0)
        store_chunk(dx_row + first, width, dx, c, LINES, 0, LANES, VEC, PARTS)
    if EDGE:
        dx_edge = scale * y_edge * (dy_edge - d)
        if CAUSAL:
            dx_edge = tl.where(edge + head <= query, dx_edge, 0.0)
        if MASK != NO_MASK:
            if MASK_COLS == 0:
                seen_edge = query_mask
            else:
                at_edge = mask_row + edge * (m_col if MASK_COLS == 2 else 1)
                seen_edge = tl.load(at_edge, mask=odd & in_edge, other=1)
            dx_edge = tl.where(seen_edge != 0, dx_edge, 0.0)
        tl.store(dx_row + edge, dx_edge.to(dx_ptr.dtype.element_ty), mask=in_edge)
    leave_cluster(CTAS, PTX)
