"""The gradient of softmax of scaled rows under a mask, the row on chip.

    dx = scale*y*(dy - sum(y*dy))

y is 0 in what a mask hides, so no mask is read again. What a causal row does not see is not read: dx is 0 there. A row
that does not fit on chip is `streaming`'s, whatever hides what.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .cluster import leave_cluster, open_exchange, sum_over_cluster
from .order import row_at, seen_of
from .primitives import widen
from .slices import edge_of, lines_of, load_chunks, part_of, slice_of, span_of, start_of, store_chunk, width_if


@triton.jit(
    do_not_specialize=[
        "n_rows", "n_cols", "y_stride", "dy_stride", "dx_stride", "phase", "n_queries", "n_group", "group_magic",
        "group_power", "n_batch", "batch_magic", "batch_power", "scale",
    ]
)  # fmt: skip
def masked_softmax_backward(
    y_ptr,  # the forward's output; all pointers: aligned to VEC elements
    dy_ptr,
    dx_ptr,
    n_rows,
    n_cols,  # n_cols and strides: in units of VEC, or of one element where EDGE
    y_stride,
    dy_stride,
    dx_stride,
    phase,
    n_queries,
    n_group,
    group_magic,
    group_power,
    n_batch,
    batch_magic,
    batch_power,
    scale,
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
    place, rank = lines_of(ROWS, CTAS, PARTS)
    part = part_of(LINES, PARTS)
    exists = place < n_rows
    row, _, query = row_at(
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
                d += tl.sum(widen(y[c], PTX) * widen(dy[c], PTX), 2)
        else:
            d += tl.sum(widen(y[c], PTX) * widen(dy[c], PTX), 2)
    if EDGE:
        edge, in_edge = edge_of(head, interior, n_cols, (rank == 0) & (part == 0) & exists, LANES, VEC)
        y_edge = tl.load(y_row + edge, mask=in_edge, other=0.0).to(tl.float32)
        dy_edge = tl.load(dy_row + edge, mask=in_edge, other=0.0).to(tl.float32)
    d = tl.sum(d, 1)
    if EDGE:
        d += tl.sum(y_edge * dy_edge, 1)
    d = sum_over_cluster(d, CTAS, PTX, PARTS)[:, None]
    for c in tl.static_range(CHUNKS):
        y_c, dy_c = widen(y[c], PTX, True), widen(dy[c], PTX, True)
        store_chunk(dx_row + first, width, scale * y_c * (dy_c - d[:, :, None]), c, LINES, 0, LANES, VEC, PARTS)
    if EDGE:
        tl.store(dx_row + edge, (scale * y_edge * (dy_edge - d)).to(dx_ptr.dtype.element_ty), mask=in_edge)
    leave_cluster(CTAS, PTX)
