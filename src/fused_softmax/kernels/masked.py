"""Softmax of scaled rows under a mask, and its gradient, the row on chip or walked twice.

    z = scale*x + mask  or  z = scale*x where mask, else -inf;  y = exp(z - max(z)) / sum(exp(z - max(z)))
    dx = scale*y*(dy - sum(y*dy))

The mask is read where it lies, with its own strides (0 where it is broadcast); a second time for the last line, when L2
has it. Causal rows need no mask: row q sees columns 0..q, reads those alone, and writes zeros beyond. A row with no
column left has sum 0 and is NaN, or zero where ZERO. What limits is the bytes of x that are seen and of y.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .cluster import merge_over_cluster, open_exchange, sum_over_cluster
from .primitives import LOWEST, exp, opaque
from .slices import chunk_offsets, edge_of, lines_of, load_chunks, part_of, slice_of, span_of, start_of, store_chunk

NO_MASK = tl.constexpr(0)
BOOLEAN = tl.constexpr(1)
ADDITIVE = tl.constexpr(2)


@triton.jit
def mask_row_of(
    row, mask_ptr, n_queries, n_middle, n_inner, m_outer, m_middle, m_inner, m_query, MASK_VEC: tl.constexpr
):
    """Where each row's mask begins; strides in units of MASK_VEC.  # row: [LINES, 1]"""
    batch = row // n_queries
    outer = batch // n_inner // n_middle
    at = (
        outer * m_outer + batch // n_inner % n_middle * m_middle + batch % n_inner * m_inner + row % n_queries * m_query
    )
    return mask_ptr + at * MASK_VEC


@triton.jit
def seen_of(row, head, first, width, n_queries, VEC: tl.constexpr, CAUSAL: tl.constexpr):
    """(columns of this slice that the row sees, the same in whole vectors).  # [LINES, 1]"""
    if CAUSAL:
        seen = (row % n_queries + 1).to(tl.int32) - head - first
        return tl.minimum(seen, width), tl.minimum((tl.maximum(seen, 0) + (VEC - 1)) // VEC * VEC, width)
    else:
        return width, width


@triton.jit
def recounted(seen, PTX: tl.constexpr):
    """seen, with its origin hidden: or each element's comparison with it is kept in a register for the last line."""
    if PTX:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [seen], dtype=tl.int32, is_pure=False, pack=1)
    else:
        return seen


@triton.jit
def hide(x, mask, seen, scale, MASK: tl.constexpr):
    """z of a tile of logits; -inf where it is not seen."""
    z = x.to(tl.float32) * scale
    if MASK == BOOLEAN:
        seen = seen & (mask != 0)
    elif MASK == ADDITIVE:
        z += mask.to(tl.float32)
    return tl.where(seen, z, -float("inf"))


@triton.jit
def hidden_chunk(
    x, at_mask, seen, scale, m_col, C: tl.constexpr, MASK: tl.constexpr, MASK_COLS: tl.constexpr,
    LINES: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """z of chunk C.  # x: [LINES, LANES, VEC]; at_mask: the slice's first column in the mask, seen: [LINES, 1]"""
    of_lane = seen - (C * PARTS * LANES + tl.arange(0, LANES)[None, :]) * VEC
    inside = of_lane[:, :, None] > tl.arange(0, VEC)[None, None, :]
    mask = inside
    if MASK != NO_MASK:
        offsets = chunk_offsets(C, LANES, VEC, PARTS)
        if MASK_COLS == 0:
            mask = tl.load(at_mask, mask=seen > 0, other=0)[:, :, None]
        elif MASK_COLS == 1:
            in_vectors = (seen + (VEC - 1)) // VEC * VEC
            mask = tl.reshape(tl.load(at_mask + offsets, mask=offsets < in_vectors, other=0), (LINES, LANES, VEC))
        else:
            mask = tl.load(at_mask + offsets * m_col, mask=offsets < seen, other=0)
            mask = tl.reshape(mask, (LINES, LANES, VEC))
    return hide(x, mask, inside, scale, MASK)


@triton.jit
def hidden_edge(x, at_mask, seen, scale, m_col, edge, in_edge, MASK: tl.constexpr, MASK_COLS: tl.constexpr):
    """z of the row's ends.  # x, edge, in_edge: [LINES, LANES]; at_mask: the first aligned column; seen: [LINES, 1]"""
    inside = in_edge & (edge < seen)
    mask = inside
    if MASK != NO_MASK:
        mask = tl.load(at_mask + edge * (m_col if MASK_COLS == 2 else MASK_COLS), mask=inside, other=0)
    return hide(x, mask, inside, scale, MASK)


@triton.jit
def accumulate(z, m, s):
    """Each lane's (max, sum) with one tile more.  # z: [LINES, LANES, VEC]; m, s: [LINES, LANES]"""
    m_new = tl.maximum(m, tl.max(z, 2))
    return m_new, s * exp(m - m_new) + tl.sum(exp(z - m_new[:, :, None]), 2)


@triton.jit
def reciprocal(row_sum, ZERO: tl.constexpr):
    """1/row_sum; where ZERO, 0 for a row that sees nothing."""
    if ZERO:
        return tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    else:
        return 1.0 / row_sum


@triton.jit(
    do_not_specialize=[
        "n_rows", "n_cols", "x_stride", "y_stride", "phase", "n_queries", "n_middle", "n_inner", "m_outer", "m_middle",
        "m_inner", "m_query", "m_col", "scale",
    ]
)  # fmt: skip
def masked_softmax_forward(
    x_ptr,  # aligned to VEC elements, as y_ptr
    y_ptr,
    mask_ptr,  # uint8 or floating, where MASK
    n_rows,
    n_cols,  # n_cols and the rows' strides: in units of VEC, or of one element where EDGE
    x_stride,
    y_stride,
    phase,
    n_queries,  # rows are (outer, n_middle, n_inner, n_queries)
    n_middle,
    n_inner,
    m_outer,  # the mask's strides, in units of MASK_VEC
    m_middle,
    m_inner,
    m_query,
    m_col,  # where MASK_COLS is 2: elements
    scale,
    MASK: tl.constexpr,
    MASK_COLS: tl.constexpr,  # the mask's stride along the columns: 0, 1, or 2 for any other
    MASK_VEC: tl.constexpr,
    CAUSAL: tl.constexpr,
    ZERO: tl.constexpr,
    STREAM: tl.constexpr,  # the row does not fit on chip: CHUNKS are a step's
    ROWS: tl.constexpr,
    CTAS: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    CHUNKS: tl.constexpr,
    EDGE: tl.constexpr,
    PTX: tl.constexpr,
):
    open_exchange(CTAS, 2, PTX, PARTS)
    LINES: tl.constexpr = ROWS * CTAS * PARTS
    STEP: tl.constexpr = CHUNKS * PARTS * LANES * VEC
    row, rank = lines_of(ROWS, CTAS, PARTS)
    part = part_of(LINES, PARTS)
    exists = row < n_rows
    head, interior = span_of(row, x_stride, phase, n_cols, VEC, EDGE)
    x_row = x_ptr + start_of(row, x_stride, phase, VEC, EDGE)
    y_row = y_ptr + start_of(row, y_stride, phase, VEC, EDGE)
    first, width = slice_of(interior, rank, CTAS, VEC)
    first += part * (LANES * VEC)
    width = tl.where(exists, width - part * (LANES * VEC), 0)
    seen, in_vectors = seen_of(row, head, first, width, n_queries, VEC, CAUSAL)
    mask_row = mask_row_of(row, mask_ptr, n_queries, n_middle, n_inner, m_outer, m_middle, m_inner, m_query, MASK_VEC)
    mask_row += (head * m_col if MASK_COLS == 2 else head * MASK_COLS).to(tl.int64) if EDGE else 0
    at_mask = mask_row + (first.to(tl.int64) * m_col if MASK_COLS == 2 else first * MASK_COLS)

    m = tl.zeros([LINES, LANES], tl.float32) + LOWEST
    s = tl.zeros([LINES, LANES], tl.float32)
    zero = tl.zeros([1, 1], tl.int64)
    if STREAM:
        most = tl.max(tl.max(tl.maximum(seen, 0), 1), 0)  # of the parts, the first has the most columns
        for step in range(tl.cdiv(most, STEP)):
            start = (zero + step) * STEP
            left = (seen - start).to(tl.int32)
            x = load_chunks(x_row + first + start, in_vectors - start, LINES, CHUNKS, 0, LANES, VEC, 0.0, PARTS)
            at = at_mask + (start * m_col if MASK_COLS == 2 else start * MASK_COLS)
            for c in tl.static_range(CHUNKS):
                z = hidden_chunk(x[c], at, left, scale, m_col, c, MASK, MASK_COLS, LINES, PARTS, LANES, VEC)
                m, s = accumulate(z, m, s)
    else:
        x = load_chunks(x_row + first, in_vectors, LINES, CHUNKS, 0, LANES, VEC, 0.0, PARTS)
        for c in tl.static_range(CHUNKS):
            z = hidden_chunk(
                opaque(x[c], PTX), at_mask, seen, scale, m_col, c, MASK, MASK_COLS, LINES, PARTS, LANES, VEC
            )
            m, s = accumulate(z, m, s)
    if EDGE:
        edge, in_edge = edge_of(head, interior, n_cols, (rank == 0) & (part == 0) & exists, LANES, VEC)
        all_seen = tl.where(exists, n_cols, 0)
        if CAUSAL:
            all_seen = tl.minimum(all_seen, (row % n_queries + 1).to(tl.int32))
        all_seen -= head
        x_edge = tl.load(x_row + edge, mask=in_edge & (edge < all_seen), other=0.0)
        z_edge = hidden_edge(x_edge, mask_row, all_seen, scale, m_col, edge, in_edge, MASK, MASK_COLS)
    # the ends are summed up by line: a tile of them need not lie in the CTAs as the row does
    line_max = tl.max(m, 1)
    if EDGE:
        line_max = tl.maximum(line_max, tl.max(z_edge, 1))
    line_sum = tl.sum(s * exp(m - line_max[:, None]), 1)
    if EDGE:
        line_sum += tl.sum(exp(z_edge - line_max[:, None]), 1)
    row_max, row_sum = merge_over_cluster(line_max, line_sum, CTAS, PTX, PARTS)
    row_max = row_max[:, None]
    by = reciprocal(row_sum[:, None], ZERO)

    if STREAM:
        widest = tl.max(tl.max(width, 1), 0)
        n_steps = tl.cdiv(widest, STEP)
        for step in range(n_steps):
            start = (zero + n_steps - 1 - step) * STEP
            left = (seen - start).to(tl.int32)
            x = load_chunks(x_row + first + start, in_vectors - start, LINES, CHUNKS, 0, LANES, VEC, 0.0, PARTS)
            at = at_mask + (start * m_col if MASK_COLS == 2 else start * MASK_COLS)
            for c in tl.static_range(CHUNKS):
                z = hidden_chunk(x[c], at, left, scale, m_col, c, MASK, MASK_COLS, LINES, PARTS, LANES, VEC)
                y = exp(z - row_max[:, :, None]) * by[:, :, None]
                store_chunk(y_row + first + start, width - start, y, c, LINES, 0, LANES, VEC, PARTS)
    else:
        seen = recounted(seen.to(tl.int32), PTX)
        for c in tl.static_range(CHUNKS):
            z = hidden_chunk(
                opaque(x[c], PTX), at_mask, seen, scale, m_col, c, MASK, MASK_COLS, LINES, PARTS, LANES, VEC
            )
            y = exp(z - row_max[:, :, None]) * by[:, :, None]
            store_chunk(y_row + first, width, y, c, LINES, 0, LANES, VEC, PARTS)
    if EDGE:
        y_edge = exp(z_edge - row_max) * by
        tl.store(y_row + edge, y_edge.to(y_ptr.dtype.element_ty), mask=in_edge)


@triton.jit(
    do_not_specialize=["n_rows", "n_cols", "y_stride", "dy_stride", "dx_stride", "phase", "n_queries", "scale"]
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
    row, rank = lines_of(ROWS, CTAS, PARTS)
    part = part_of(LINES, PARTS)
    exists = row < n_rows
    head, interior = span_of(row, y_stride, phase, n_cols, VEC, EDGE)
    y_row = y_ptr + start_of(row, y_stride, phase, VEC, EDGE)
    dy_row = dy_ptr + start_of(row, dy_stride, phase, VEC, EDGE)
    dx_row = dx_ptr + start_of(row, dx_stride, phase, VEC, EDGE)
    first, width = slice_of(interior, rank, CTAS, VEC)
    first += part * (LANES * VEC)
    width = tl.where(exists, width - part * (LANES * VEC), 0)
    # y is 0 in what a causal row does not see: neither is read there, and dx is 0
    seen, in_vectors = seen_of(row, head, first, width, n_queries, VEC, CAUSAL)
    y = load_chunks(y_row + first, in_vectors, LINES, CHUNKS, 0, LANES, VEC, 0.0, PARTS)
    dy = load_chunks(dy_row + first, in_vectors, LINES, CHUNKS, 0, LANES, VEC, 0.0, PARTS)
    d = tl.sum(y[0].to(tl.float32) * dy[0].to(tl.float32), 2)
    for c in tl.static_range(1, CHUNKS):
        d += tl.sum(y[c].to(tl.float32) * dy[c].to(tl.float32), 2)
    if EDGE:
        edge, in_edge = edge_of(head, interior, n_cols, (rank == 0) & (part == 0) & exists, LANES, VEC)
        y_edge = tl.load(y_row + edge, mask=in_edge, other=0.0).to(tl.float32)
        dy_edge = tl.load(dy_row + edge, mask=in_edge, other=0.0).to(tl.float32)
    d = tl.sum(d, 1)
    if EDGE:
        d += tl.sum(y_edge * dy_edge, 1)
    d = sum_over_cluster(d, CTAS, PTX, PARTS)[:, None]
    for c in tl.static_range(CHUNKS):
        y_c, dy_c = opaque(y[c], PTX).to(tl.float32), opaque(dy[c], PTX).to(tl.float32)
        store_chunk(dx_row + first, width, scale * y_c * (dy_c - d[:, :, None]), c, LINES, 0, LANES, VEC, PARTS)
    if EDGE:
        tl.store(dx_row + edge, (scale * y_edge * (dy_edge - d)).to(dx_ptr.dtype.element_ty), mask=in_edge)
