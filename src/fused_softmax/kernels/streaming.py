"""The row does not fit on chip: softmax, log_softmax and their gradients, walking the row in steps, twice.

    first walk:   m' = max(m, x);  s = s*exp(m - m') + sum(exp(x - m'))        (online softmax)
    second walk:  y = exp(x - m) / s                                           backwards, so that what was read last,
                                                                               and still is in L2, is read first
The plan picks it where no other regime can hold the row. A row is walked by one program or, where there are clusters,
by the CTAS programs of one, a slice each. Three streams (read, read, write) stand against the two of a copy, less what
L2 gives back; that is the limit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .cluster import merge_over_cluster, open_exchange, sum_over_cluster
from .primitives import LOWEST, exp
from .resident import gradient, gradient_term, normalize
from .slices import edge_of, lines_of, load_chunks, part_of, slice_of, span_of, start_of, store_chunk


@triton.jit
def accumulate(
    x_at,
    width,
    m,
    s,
    LINES: tl.constexpr,
    CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
):
    """One step of the online softmax: each lane's (max, sum) with CHUNKS more chunks in it.  # m, s: [LINES, LANES]"""
    x = load_chunks(x_at, width, LINES, CHUNKS, 0, LANES, VEC, -float("inf"), PARTS)
    top = m
    for c in tl.static_range(CHUNKS):
        top = tl.maximum(top, tl.max(x[c], 2).to(tl.float32))
    # a lane's maximum is followed only when it has moved by 1: any number near it will do, a move costs a rounding, and
    # the further it is the more the exponent's own rounding counts
    m_new = tl.where(top > m + 1.0, top, m)
    # a step is added up by itself: the fewer numbers are added to a long sum one by one, the less they round it
    step = tl.zeros_like(s)
    for c in tl.static_range(CHUNKS):
        step += tl.sum(exp(x[c].to(tl.float32) - m_new[:, :, None]), 2)
    return m_new, s * exp(m - m_new) + step


@triton.jit(do_not_specialize=["n_rows", "n_cols", "x_stride", "y_stride", "phase"])
def softmax_stream(
    x_ptr,  # both pointers: aligned to VEC elements
    y_ptr,
    n_rows,
    n_cols,  # n_cols and strides: in units of VEC, or of one element where EDGE
    x_stride,
    y_stride,
    phase,  # elements from the pointers to the first row, where EDGE
    LOG: tl.constexpr,
    CTAS: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    CHUNKS: tl.constexpr,
    EDGE: tl.constexpr,
    PTX: tl.constexpr,
):
    open_exchange(CTAS, 2, PTX, PARTS)
    LINES: tl.constexpr = CTAS * PARTS
    STEP: tl.constexpr = CHUNKS * PARTS * LANES * VEC
    row, rank = lines_of(1, CTAS, PARTS)
    part = part_of(LINES, PARTS)
    head, interior = span_of(row, x_stride, phase, n_cols, VEC, EDGE)
    x_row = x_ptr + start_of(row, x_stride, phase, VEC, EDGE)
    y_row = y_ptr + start_of(row, y_stride, phase, VEC, EDGE)
    first, width = slice_of(interior, rank, CTAS, VEC)
    first += part * (LANES * VEC)
    width -= part * (LANES * VEC)
    zero = tl.zeros([1, 1], tl.int64)
    n_steps = tl.cdiv(tl.cdiv(n_cols // VEC if EDGE else n_cols, CTAS) * VEC, STEP)

    m = tl.zeros([LINES, LANES], tl.float32) + LOWEST
    s = tl.zeros([LINES, LANES], tl.float32)
    for step in range(n_steps):
        start = (zero + step) * STEP
        m, s = accumulate(x_row + first + start, width - start, m, s, LINES, CHUNKS, PARTS, LANES, VEC)
    if EDGE:
        edge, in_edge = edge_of(head, interior, n_cols, (rank == 0) & (part == 0), LANES, VEC)
        x_edge = tl.load(x_row + edge, mask=in_edge, other=-float("inf")).to(tl.float32)

    line_max = tl.max(m, 1)
    if EDGE:
        line_max = tl.maximum(line_max, tl.max(x_edge, 1))
    line_sum = tl.sum(s * exp(m - line_max[:, None]), 1)
    if EDGE:
        line_sum += tl.sum(exp(x_edge - line_max[:, None]), 1)
    row_max, row_sum = merge_over_cluster(line_max, line_sum, CTAS, PTX, PARTS)
    row_max = row_max[:, None]
    row_sum = row_sum[:, None]

    for step in range(n_steps):
        start = (zero + n_steps - 1 - step) * STEP
        x = load_chunks(x_row + first + start, width - start, LINES, CHUNKS, 0, LANES, VEC, -float("inf"), PARTS)
        for c in tl.static_range(CHUNKS):
            y = normalize(x[c].to(tl.float32), row_max[:, :, None], row_sum[:, :, None], LOG)
            store_chunk(y_row + first + start, width - start, y, c, LINES, 0, LANES, VEC, PARTS)
    if EDGE:
        y_edge = normalize(x_edge, row_max, row_sum, LOG)
        tl.store(y_row + edge, y_edge.to(y_ptr.dtype.element_ty), mask=in_edge)


@triton.jit(do_not_specialize=["n_rows", "n_cols", "y_stride", "dy_stride", "dx_stride", "phase"])
def softmax_backward_stream(
    y_ptr,  # the forward's output; all pointers: aligned to VEC elements
    dy_ptr,
    dx_ptr,
    n_rows,
    n_cols,  # n_cols and strides: in units of VEC, or of one element where EDGE
    y_stride,
    dy_stride,
    dx_stride,
    phase,
    LOG: tl.constexpr,
    CTAS: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    CHUNKS: tl.constexpr,
    EDGE: tl.constexpr,
    PTX: tl.constexpr,
):
    open_exchange(CTAS, 1, PTX, PARTS)
    LINES: tl.constexpr = CTAS * PARTS
    STEP: tl.constexpr = CHUNKS * PARTS * LANES * VEC
    row, rank = lines_of(1, CTAS, PARTS)
    part = part_of(LINES, PARTS)
    head, interior = span_of(row, y_stride, phase, n_cols, VEC, EDGE)
    y_row = y_ptr + start_of(row, y_stride, phase, VEC, EDGE)
    dy_row = dy_ptr + start_of(row, dy_stride, phase, VEC, EDGE)
    dx_row = dx_ptr + start_of(row, dx_stride, phase, VEC, EDGE)
    first, width = slice_of(interior, rank, CTAS, VEC)
    first += part * (LANES * VEC)
    width -= part * (LANES * VEC)
    zero = tl.zeros([1, 1], tl.int64)
    n_steps = tl.cdiv(tl.cdiv(n_cols // VEC if EDGE else n_cols, CTAS) * VEC, STEP)

    d = tl.zeros([LINES, LANES], tl.float32)
    for step in range(n_steps):
        start = (zero + step) * STEP
        y = load_chunks(y_row + first + start, width - start, LINES, CHUNKS, 0, LANES, VEC, 0.0, PARTS)
        dy = load_chunks(dy_row + first + start, width - start, LINES, CHUNKS, 0, LANES, VEC, 0.0, PARTS)
        for c in tl.static_range(CHUNKS):
            d += tl.sum(gradient_term(y[c], dy[c], LOG), 2)
    if EDGE:
        edge, in_edge = edge_of(head, interior, n_cols, (rank == 0) & (part == 0), LANES, VEC)
        y_edge = tl.load(y_row + edge, mask=in_edge, other=0.0)
        dy_edge = tl.load(dy_row + edge, mask=in_edge, other=0.0)
    d = tl.sum(d, 1)
    if EDGE:
        d += tl.sum(gradient_term(y_edge, dy_edge, LOG), 1)
    d = sum_over_cluster(d, CTAS, PTX, PARTS)[:, None]

    for step in range(n_steps):
        start = (zero + n_steps - 1 - step) * STEP
        y = load_chunks(y_row + first + start, width - start, LINES, CHUNKS, 0, LANES, VEC, 0.0, PARTS)
        dy = load_chunks(dy_row + first + start, width - start, LINES, CHUNKS, 0, LANES, VEC, 0.0, PARTS)
        for c in tl.static_range(CHUNKS):
            dx = gradient(y[c], dy[c], d[:, :, None], LOG)
            store_chunk(dx_row + first + start, width - start, dx, c, LINES, 0, LANES, VEC, PARTS)
    if EDGE:
        tl.store(dx_row + edge, gradient(y_edge, dy_edge, d, LOG).to(dx_ptr.dtype.element_ty), mask=in_edge)
