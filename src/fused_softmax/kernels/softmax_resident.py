"""The row stays on chip: softmax, log_softmax and their gradients, reading each row once.

    m = max(x);  s = sum(exp(x - m));  y = exp(x - m) / s     or   y = (x - m) - log(s)
    d = sum(y*dy);  dx = y*(dy - d)                           or   d = sum(dy);  dx = dy - exp(y)*d

One kernel for three regimes, which differ in numbers only. tile: Rows short rows in one program, a warp or less for
each, so that no reduction leaves its warp. block: one row in one program. cluster: one row in the CTAS programs of a
thread-block cluster, a slice each, merged through distributed shared memory. Each lane keeps its own (max, sum), so
that no thread waits for another's loads; the row's come from one reduction at the end. The plan picks the numbers by
width; what limits is the register file, and then the bytes in flight. A gradient holds two rows: of long ones some
chunks are parked in shared memory (`parking`), and log_softmax's, whose sum needs dy alone, reads y late.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common.arguments import Int32, Int64, Rows, kernel
from .common.cluster import leave_cluster, merge_over_cluster, open_exchange, sum_over_cluster
from .common.numerics import LOWEST, exp, exp_about, log, max_of_vectors, pivot, sum_of_vectors, widen
from .common.smem_staging import await_parked, chunk_of, load_beside, open_parking, park
from .common.tiles import (
    edge_of,
    gradient_reads,
    lines_of,
    load_chunk,
    load_chunks,
    part_of,
    slice_of,
    slice_zero,
    span_of,
    start_of,
    store_chunk,
    width_if,
)


@triton.jit
def normalize(x, row_max, row_sum, LOG: tl.constexpr):
    """The forward's last line, in float32; the arguments broadcast."""
    if LOG:
        return (x - row_max) - log(row_sum)
    else:
        return exp(x - row_max) * tl.div_rn(1.0, row_sum)


@kernel()
def softmax_resident(
    x_ptr: Rows,  # both pointers: aligned to VEC elements
    y_ptr: Rows,
    n_rows: Int64,
    n_cols: Int32,  # n_cols and strides: in units of VEC, or of one element where EDGE
    x_stride: Int64,
    y_stride: Int64,
    phase: Int32,  # elements from the pointers to the first row, where EDGE
    LOG: tl.constexpr,
    ROWS: tl.constexpr,
    CTAS: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    CHUNKS: tl.constexpr,
    UNMASKED: tl.constexpr,
    EDGE: tl.constexpr,
    RECOMPUTE: tl.constexpr,
    PTX: tl.constexpr,
):
    open_exchange(CTAS, 2, PTX, PARTS)
    # locate the row, and this line's slice of it
    LINES: tl.constexpr = ROWS * CTAS * PARTS
    row, rank = lines_of(ROWS, CTAS, PARTS)
    part = part_of(LINES, PARTS)
    head, interior = span_of(row, x_stride, phase, n_cols, VEC, EDGE)
    x_row = x_ptr + start_of(row, x_stride, phase, VEC, EDGE)
    y_row = y_ptr + start_of(row, y_stride, phase, VEC, EDGE)
    first, width = slice_of(interior, rank, CTAS, VEC)
    first += part * (LANES * VEC)
    width -= part * (LANES * VEC)
    if ROWS > 1:
        width = width_if(row < n_rows, width)

    # each lane's own maximum and sum
    x = load_chunks(x_row + first, width, LINES, CHUNKS, UNMASKED, LANES, VEC, -float("inf"), PARTS)
    if EDGE:
        edge, in_edge = edge_of(head, interior, n_cols, (rank == 0) & (part == 0) & (row < n_rows), LANES, VEC)
        x_edge = tl.load(x_row + edge, mask=in_edge, other=-float("inf")).to(tl.float32)
    # log_softmax of long slices is at its cap of registers, where only Triton's own order fits
    IN_ORDER: tl.constexpr = PTX and not (LOG and CHUNKS > 8)
    m = max_of_vectors(x[0], IN_ORDER)
    for c in tl.static_range(1, CHUNKS):
        m = tl.maximum(m, max_of_vectors(x[c], IN_ORDER))
    m = tl.maximum(m.to(tl.float32), LOWEST)  # [LINES, LANES]
    s = tl.zeros_like(m)
    kept = ()
    for c in tl.static_range(CHUNKS):
        e = exp(widen(x[c], PTX, RECOMPUTE) - m[:, :, None])
        s += sum_of_vectors(e, IN_ORDER)
        kept = kept + (e,)

    # the line's, then the row's
    line_max = tl.max(m, 1)
    if EDGE:
        line_max = tl.maximum(line_max, tl.max(x_edge, 1))
    line_sum = tl.sum(s * exp(m - line_max[:, None]), 1)
    if EDGE:
        line_sum += tl.sum(exp(x_edge - line_max[:, None]), 1)
    row_max, row_sum = merge_over_cluster(line_max, line_sum, CTAS, PTX, PARTS)
    row_max = row_max[:, None]
    row_sum = row_sum[:, None]

    # the formula's last line, and the store
    FUSED: tl.constexpr = PTX and x_ptr.dtype.element_ty.primitive_bitwidth == 16 and y_ptr.dtype == x_ptr.dtype
    if LOG:
        by = row_sum
    elif RECOMPUTE:
        base, shift, by = pivot(row_max, FUSED)
        by = by * tl.div_rn(1.0, row_sum)
    else:
        by = exp(m - row_max) * tl.div_rn(1.0, row_sum)
    for c in tl.static_range(CHUNKS):
        if LOG:
            y = normalize(widen(x[c], PTX, RECOMPUTE), row_max[:, :, None], row_sum[:, :, None], LOG)
        elif RECOMPUTE:
            y = exp_about(widen(x[c], PTX, True), base[:, :, None], shift[:, :, None], FUSED) * by[:, :, None]
        else:
            y = kept[c] * by[:, :, None]
        store_chunk(y_row + first, width, y, c, LINES, UNMASKED, LANES, VEC, PARTS)
    if EDGE:
        y_edge = normalize(x_edge, row_max, row_sum, LOG)
        tl.store(y_row + edge, y_edge.to(y_ptr.dtype.element_ty), mask=in_edge)
    leave_cluster(CTAS, PTX)


@triton.jit
def gradient_term(y, dy, LOG: tl.constexpr):
    """What the row's d sums up, in float32."""
    if LOG:
        return dy.to(tl.float32)
    else:
        return y.to(tl.float32) * dy.to(tl.float32)


@triton.jit
def gradient(y, dy, d, LOG: tl.constexpr):
    """The backward's last line, in float32; the arguments broadcast."""
    if LOG:
        return dy.to(tl.float32) - exp(y.to(tl.float32)) * d
    else:
        return y.to(tl.float32) * (dy.to(tl.float32) - d)


@kernel()
def softmax_backward_resident(
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
    ROWS: tl.constexpr,
    CTAS: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    CHUNKS: tl.constexpr,
    AHEAD: tl.constexpr,  # chunks of y that are read before the row's sum is known: all but where LOG
    UNMASKED: tl.constexpr,
    PARKED: tl.constexpr,  # chunks in shared memory, unmasked ones
    EDGE: tl.constexpr,
    RECOMPUTE: tl.constexpr,
    PTX: tl.constexpr,
):
    THREADS: tl.constexpr = PARTS * LANES
    POLICY: tl.constexpr = gradient_reads(EDGE, y_ptr.dtype.element_ty)
    Y_PARKED: tl.constexpr = PARKED if AHEAD == CHUNKS else 0
    open_exchange(CTAS, 1, PTX, PARTS)
    open_parking(PARKED + Y_PARKED, THREADS, PTX)
    LINES: tl.constexpr = ROWS * CTAS * PARTS
    row, rank = lines_of(ROWS, CTAS, PARTS)
    part = part_of(LINES, PARTS)
    head, interior = span_of(row, y_stride, phase, n_cols, VEC, EDGE)
    y_row = y_ptr + start_of(row, y_stride, phase, VEC, EDGE)
    dy_row = dy_ptr + start_of(row, dy_stride, phase, VEC, EDGE)
    dx_row = dx_ptr + start_of(row, dx_stride, phase, VEC, EDGE)
    first, width = slice_of(interior, rank, CTAS, VEC)
    first += part * (LANES * VEC)
    width -= part * (LANES * VEC)
    if ROWS > 1:
        width = width_if(row < n_rows, width)

    if PARKED > 0:
        slice_start, slice = slice_zero(dy_ptr, dy_stride, phase, n_cols, CTAS, VEC, EDGE)
        park(slice_start, slice, 0, PARKED, THREADS, PTX)
        slice_start, slice = slice_zero(y_ptr, y_stride, phase, n_cols, CTAS, VEC, EDGE)
        park(slice_start, slice, PARKED, Y_PARKED, THREADS, PTX)
    y = load_beside(y_row + first, width, LINES, AHEAD, UNMASKED, LANES, VEC, 0.0, PARTS, Y_PARKED, PTX, POLICY)
    dy = load_beside(dy_row + first, width, LINES, CHUNKS, UNMASKED, LANES, VEC, 0.0, PARTS, PARKED, PTX, POLICY)
    d = tl.zeros([LINES, LANES], tl.float32)
    await_parked(PARKED, PTX)
    for c in tl.static_range(CHUNKS):
        dy_c = widen(chunk_of(dy, c, 0, PARKED, THREADS, PTX), PTX)
        y_c = dy_c  # unused where LOG
        if not LOG:
            y_c = widen(chunk_of(y, c, PARKED, Y_PARKED, THREADS, PTX), PTX)
        # where the cap of 128 registers is reached, on one CTA or with parked chunks, only Triton's own order fits
        d += sum_of_vectors(gradient_term(y_c, dy_c, LOG), PTX and CTAS > 1 and PARKED == 0)
    if EDGE:
        edge, in_edge = edge_of(head, interior, n_cols, (rank == 0) & (part == 0) & (row < n_rows), LANES, VEC)
        y_edge = tl.load(y_row + edge, mask=in_edge, other=0.0)
        dy_edge = tl.load(dy_row + edge, mask=in_edge, other=0.0)
    d = tl.sum(d, 1)
    if EDGE:
        d += tl.sum(gradient_term(y_edge, dy_edge, LOG), 1)
    d = sum_over_cluster(d, CTAS, PTX, PARTS)[:, None]

    for c in tl.static_range(CHUNKS):
        if c + AHEAD < CHUNKS:
            y = y + (load_chunk(y_row + first, width, c + AHEAD, LINES, UNMASKED, LANES, VEC, 0.0, PARTS, POLICY),)
        y_c = widen(chunk_of(y, c, PARKED, Y_PARKED, THREADS, PTX), PTX, RECOMPUTE)
        dy_c = widen(chunk_of(dy, c, 0, PARKED, THREADS, PTX), PTX, RECOMPUTE)
        store_chunk(
            dx_row + first, width, gradient(y_c, dy_c, d[:, :, None], LOG), c, LINES, UNMASKED, LANES, VEC, PARTS
        )
    if EDGE:
        dx_edge = gradient(y_edge, dy_edge, d, LOG)
        tl.store(dx_row + edge, dx_edge.to(dx_ptr.dtype.element_ty), mask=in_edge)
    leave_cluster(CTAS, PTX)
