"""The row does not fit on chip: softmax, log_softmax and their gradients, keeping what fits and walking the rest twice.

    first walk:   m' = max(m, x);  s = s*exp(m - m') + sum(exp(x - m'))        (online softmax)
    second walk:  y = exp(x - m) / s                                           backwards, so that what was read last,
                                                                               and still is in L2, is read first
    slice         |kept 0|kept 1| ... |step 0: CHUNKS chunks|step 1| ...
The plan picks it where no other regime can hold the row. A row is walked by one program or, where there are clusters,
by the CTAS programs of one, a slice each. The first KEPT chunks of a slice stay in registers from the one walk to the
other; the rest, a third stream beside the two of a copy, comes from L2 where few enough rows are under way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common.arguments import Int32, Int64, Rows, kernel
from .common.cluster import leave_cluster, merge_over_cluster, open_exchange, stay_in_line, sum_over_cluster
from .common.numerics import LOWEST, exp, widen
from .common.tiles import edge_of, lines_of, load_chunk, load_chunks, part_of, slice_of, span_of, start_of, store_chunk
from .softmax_resident import gradient, gradient_term, normalize


@triton.jit
def accumulate(x, m, s, CHUNKS: tl.constexpr, PTX: tl.constexpr):
    """One step of the online softmax: each lane's (max, sum) with the chunks of x in it too.  # m, s: [LINES, LANES]"""
    top = m
    for c in tl.static_range(CHUNKS):
        top = tl.maximum(top, tl.max(x[c], 2).to(tl.float32))
    # a lane's maximum is followed only when it has moved by 1: any number near it will do, a move costs a rounding, and
    # the further it is the more the exponent's own rounding counts
    m_new = tl.where(top > m + 1.0, top, m)
    # a step is added up by itself: the fewer numbers are added to a long sum one by one, the less they round it
    step = tl.zeros_like(s)
    for c in tl.static_range(CHUNKS):
        step += tl.sum(exp(widen(x[c], PTX, True) - m_new[:, :, None]), 2)
    return m_new, s * exp(m - m_new) + step


@kernel()
def softmax_stream(
    x_ptr: Rows,  # both pointers: aligned to VEC elements
    y_ptr: Rows,
    n_rows: Int64,
    n_cols: Int32,  # n_cols and strides: in units of VEC, or of one element where EDGE
    x_stride: Int64,
    y_stride: Int64,
    phase: Int32,  # elements from the pointers to the first row, where EDGE
    LOG: tl.constexpr,
    CTAS: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    KEPT: tl.constexpr,  # chunks that every slice has
    CHUNKS: tl.constexpr,  # of a step
    EDGE: tl.constexpr,
    PTX: tl.constexpr,
):
    open_exchange(CTAS, 2, PTX, PARTS)
    LINES: tl.constexpr = CTAS * PARTS
    CHUNK: tl.constexpr = PARTS * LANES * VEC
    STEP: tl.constexpr = CHUNKS * CHUNK
    row, rank = lines_of(1, CTAS, PARTS)
    part = part_of(LINES, PARTS)
    head, interior = span_of(row, x_stride, phase, n_cols, VEC, EDGE)
    x_row = x_ptr + start_of(row, x_stride, phase, VEC, EDGE)
    y_row = y_ptr + start_of(row, y_stride, phase, VEC, EDGE)
    first, width = slice_of(interior, rank, CTAS, VEC)
    first += part * (LANES * VEC)
    width -= part * (LANES * VEC)
    zero = tl.zeros([1, 1], tl.int64)
    n_steps = tl.cdiv(tl.cdiv(n_cols // VEC if EDGE else n_cols, CTAS) * VEC - KEPT * CHUNK, STEP)

    kept = load_chunks(x_row + first, width, LINES, KEPT, KEPT, LANES, VEC, -float("inf"), PARTS)
    if EDGE:
        edge, in_edge = edge_of(head, interior, n_cols, (rank == 0) & (part == 0), LANES, VEC)
        x_edge = tl.load(x_row + edge, mask=in_edge, other=-float("inf")).to(tl.float32)
    m = tl.zeros([LINES, LANES], tl.float32) + LOWEST
    s = tl.zeros([LINES, LANES], tl.float32)
    for step in range(n_steps):
        start = KEPT * CHUNK + (zero + step) * STEP
        x = load_chunks(x_row + first + start, width - start, LINES, CHUNKS, 0, LANES, VEC, -float("inf"), PARTS)
        m, s = accumulate(x, m, s, CHUNKS, PTX)
    if KEPT > 0:  # first to be asked for, last to be used: none of the steps waits for it
        m, s = accumulate(kept, m, s, KEPT, PTX)

    line_max = tl.max(m, 1)
    if EDGE:
        line_max = tl.maximum(line_max, tl.max(x_edge, 1))
    line_sum = tl.sum(s * exp(m - line_max[:, None]), 1)
    if EDGE:
        line_sum += tl.sum(exp(x_edge - line_max[:, None]), 1)
    row_max, row_sum = merge_over_cluster(line_max, line_sum, CTAS, PTX, PARTS)
    row_max = row_max[:, None]
    row_sum = row_sum[:, None]

    for c in tl.static_range(KEPT):
        y = normalize(widen(kept[c], PTX, True), row_max[:, :, None], row_sum[:, :, None], LOG)
        store_chunk(y_row + first, width, y, c, LINES, KEPT, LANES, VEC, PARTS)
    for step in range(n_steps):
        start = KEPT * CHUNK + (zero + n_steps - 1 - step) * STEP
        x = load_chunks(x_row + first + start, width - start, LINES, CHUNKS, 0, LANES, VEC, -float("inf"), PARTS)
        for c in tl.static_range(CHUNKS):
            y = normalize(widen(x[c], PTX), row_max[:, :, None], row_sum[:, :, None], LOG)
            store_chunk(y_row + first + start, width - start, y, c, LINES, 0, LANES, VEC, PARTS)
    if EDGE:
        y_edge = normalize(x_edge, row_max, row_sum, LOG)
        tl.store(y_row + edge, y_edge.to(y_ptr.dtype.element_ty), mask=in_edge)
    leave_cluster(CTAS, PTX)


@kernel()
def softmax_backward_stream(
    y_ptr: Rows,  # the forward's output; all pointers: aligned to VEC elements
    dy_ptr: Rows,
    dx_ptr: Rows,
    n_rows: Int64,
    n_cols: Int32,  # n_cols and strides: in units of VEC, or of one element where EDGE
    y_stride: Int64,
    dy_stride: Int64,
    dx_stride: Int64,
    phase: Int32,
    LOG: tl.constexpr,
    CTAS: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    KEPT: tl.constexpr,
    AHEAD: tl.constexpr,  # kept chunks of y that are read before the row's sum is known: all but where LOG
    CHUNKS: tl.constexpr,
    EDGE: tl.constexpr,
    PTX: tl.constexpr,
):
    open_exchange(CTAS, 1, PTX, PARTS)
    LINES: tl.constexpr = CTAS * PARTS
    CHUNK: tl.constexpr = PARTS * LANES * VEC
    STEP: tl.constexpr = CHUNKS * CHUNK
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
    n_steps = tl.cdiv(tl.cdiv(n_cols // VEC if EDGE else n_cols, CTAS) * VEC - KEPT * CHUNK, STEP)

    dy_kept = load_chunks(dy_row + first, width, LINES, KEPT, KEPT, LANES, VEC, 0.0, PARTS)
    y_kept = load_chunks(y_row + first, width, LINES, AHEAD, AHEAD, LANES, VEC, 0.0, PARTS)
    if EDGE:
        edge, in_edge = edge_of(head, interior, n_cols, (rank == 0) & (part == 0), LANES, VEC)
        y_edge = tl.load(y_row + edge, mask=in_edge, other=0.0)
        dy_edge = tl.load(dy_row + edge, mask=in_edge, other=0.0)
    d = tl.zeros([LINES, LANES], tl.float32)
    for step in range(n_steps):
        start = KEPT * CHUNK + (zero + step) * STEP
        y = load_chunks(y_row + first + start, width - start, LINES, CHUNKS, 0, LANES, VEC, 0.0, PARTS)
        dy = load_chunks(dy_row + first + start, width - start, LINES, CHUNKS, 0, LANES, VEC, 0.0, PARTS)
        for c in tl.static_range(CHUNKS):
            y_c, dy_c = stay_in_line(y[c], CTAS, PTX), stay_in_line(dy[c], CTAS, PTX)
            d += tl.sum(gradient_term(y_c, dy_c, LOG), 2)
    for c in tl.static_range(KEPT):
        y_c = y_kept[c if c < AHEAD else 0]  # unused where LOG
        d += tl.sum(gradient_term(widen(y_c, PTX, True), widen(dy_kept[c], PTX, True), LOG), 2)
    d = tl.sum(d, 1)
    if EDGE:
        d += tl.sum(gradient_term(y_edge, dy_edge, LOG), 1)
    d = sum_over_cluster(d, CTAS, PTX, PARTS)[:, None]

    for c in tl.static_range(KEPT):
        if c + AHEAD < KEPT:
            y_kept = y_kept + (load_chunk(y_row + first, width, c + AHEAD, LINES, KEPT, LANES, VEC, 0.0, PARTS),)
        dx = gradient(widen(y_kept[c], PTX, True), widen(dy_kept[c], PTX, True), d[:, :, None], LOG)
        store_chunk(dx_row + first, width, dx, c, LINES, KEPT, LANES, VEC, PARTS)
    for step in range(n_steps):
        start = KEPT * CHUNK + (zero + n_steps - 1 - step) * STEP
        y = load_chunks(y_row + first + start, width - start, LINES, CHUNKS, 0, LANES, VEC, 0.0, PARTS)
        dy = load_chunks(dy_row + first + start, width - start, LINES, CHUNKS, 0, LANES, VEC, 0.0, PARTS)
        for c in tl.static_range(CHUNKS):
            dx = gradient(widen(y[c], PTX), widen(dy[c], PTX), d[:, :, None], LOG)
            store_chunk(dx_row + first + start, width - start, dx, c, LINES, 0, LANES, VEC, PARTS)
    if EDGE:
        tl.store(dx_row + edge, gradient(y_edge, dy_edge, d, LOG).to(dx_ptr.dtype.element_ty), mask=in_edge)
    leave_cluster(CTAS, PTX)
