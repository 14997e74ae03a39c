"""The row does not fit on chip: softmax, log_softmax and their gradients in two passes, with some resident chunks.

    first pass:   m' = max(m, x);  s = s*exp(m - m') + sum(exp(x - m'))        (online softmax)
    second pass:  y = exp(x - m) / s                                           backwards, because the columns that were
                                                                               read last are still in L2
    slice         |resident 0|resident 1| ... |step 0: CHUNKS chunks|step 1| ...

The plan chooses it where no other regime can hold the row. One program reads a row or, where there are clusters, the
CTAS programs of one, a slice each. The first RESIDENT_CHUNKS chunks of a slice stay in registers between the passes.
The rest is read twice: a third stream of data, next to the two of a copy. It comes from L2 where few enough rows are in
progress.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common.arguments import Int32, Int64, Rows, kernel
from .common.cluster import (
    cluster_reduce_max_sum,
    cluster_reduce_sum,
    init_cluster_barrier,
    keep_segment_layout,
    leave_cluster,
)
from .common.early_start import await_previous
from .common.numerics import LOWEST, exp, lies_in_lanes, rounded_product, upcast
from .common.softmax_terms import gradient, gradient_term, normalize
from .common.tiles import (
    head_and_tail,
    load_chunk,
    load_chunks,
    segments_of,
    slice_of,
    span_of,
    start_of,
    store_chunk,
    warp_of,
)


@triton.jit
def accumulate(x, m, s, CHUNKS: tl.constexpr, PTX: tl.constexpr):
    """Each vector's (max, sum) after one more step of the online softmax.  # m, s: [SEGMENTS, VECTORS]"""
    top = m
    for c in tl.static_range(CHUNKS):
        top = tl.maximum(top, tl.max(x[c], 2).to(tl.float32))
    # m changes only when the maximum has grown by 1. Any number near the maximum will do, and each change costs a
    # rounding; but the farther m is, the more the rounding of the exponent counts
    m_new = tl.where(top > m + 1.0, top, m)
    # a step has its own sum: fewer additions to a long sum cause less rounding
    step = tl.zeros_like(s)
    for c in tl.static_range(CHUNKS):
        step += tl.sum(exp(upcast(x[c], PTX, True) - m_new[:, :, None]), 2)
    return m_new, s * exp(m - m_new) + step


@kernel(on_cluster=True)
def softmax_two_pass(
    x_ptr: Rows,  # both pointers: aligned to VEC elements
    y_ptr: Rows,
    n_rows: Int64,
    n_cols: Int32,  # n_cols and strides: in units of VEC, or of one element where UNALIGNED
    x_stride: Int64, y_stride: Int64,
    phase: Int32,  # elements from the pointers to the first row, where UNALIGNED
    LOG: tl.constexpr, CTAS: tl.constexpr, WARPS_PER_ROW: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr,
    RESIDENT_CHUNKS: tl.constexpr,  # chunks that every slice has
    CHUNKS: tl.constexpr,  # of a step
    UNALIGNED: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    init_cluster_barrier(CTAS, 2, PTX, WARPS_PER_ROW)
    SEGMENTS: tl.constexpr = CTAS * WARPS_PER_ROW
    CHUNK: tl.constexpr = WARPS_PER_ROW * VECTORS * VEC
    STEP: tl.constexpr = CHUNKS * CHUNK
    row, rank = segments_of(1, CTAS, WARPS_PER_ROW)
    warp = warp_of(SEGMENTS, WARPS_PER_ROW)
    head, interior = span_of(row, x_stride, phase, n_cols, VEC, UNALIGNED)
    x_row = x_ptr + start_of(row, x_stride, phase, VEC, UNALIGNED)
    y_row = y_ptr + start_of(row, y_stride, phase, VEC, UNALIGNED)
    first, width = slice_of(interior, rank, CTAS, VEC)
    first += warp * (VECTORS * VEC)
    width -= warp * (VECTORS * VEC)
    zero = tl.zeros([1, 1], tl.int64)
    n_steps = tl.cdiv(tl.cdiv(n_cols // VEC if UNALIGNED else n_cols, CTAS) * VEC - RESIDENT_CHUNKS * CHUNK, STEP)

    await_previous(EARLY)
    resident = load_chunks(
        x_row + first, width, SEGMENTS, RESIDENT_CHUNKS, RESIDENT_CHUNKS, VECTORS, VEC, -float("inf"), WARPS_PER_ROW
    )
    if UNALIGNED:
        head_tail, in_head_tail = head_and_tail(head, interior, n_cols, (rank == 0) & (warp == 0), VECTORS, VEC)
        x_head_tail = tl.load(x_row + head_tail, mask=in_head_tail, other=-float("inf")).to(tl.float32)
    m = tl.zeros([SEGMENTS, VECTORS], tl.float32) + LOWEST
    s = tl.zeros([SEGMENTS, VECTORS], tl.float32)
    for step in range(n_steps):
        start = RESIDENT_CHUNKS * CHUNK + (zero + step) * STEP
        x = load_chunks(
            x_row + first + start, width - start, SEGMENTS, CHUNKS, 0, VECTORS, VEC, -float("inf"), WARPS_PER_ROW
        )
        m, s = accumulate(x, m, s, CHUNKS, PTX)
    if RESIDENT_CHUNKS > 0:  # requested first and used last, so that no step waits for them
        m, s = accumulate(resident, m, s, RESIDENT_CHUNKS, PTX)

    segment_max = tl.max(m, 1)
    if UNALIGNED:
        segment_max = tl.maximum(segment_max, tl.max(x_head_tail, 1))
    segment_sum = tl.sum(rounded_product(s, exp(m - segment_max[:, None])), 1)
    if UNALIGNED:
        segment_sum += tl.sum(exp(x_head_tail - segment_max[:, None]), 1)
    row_max, row_sum = cluster_reduce_max_sum(segment_max, segment_sum, CTAS, PTX, WARPS_PER_ROW)
    row_max = row_max[:, None]
    row_sum = row_sum[:, None]

    for c in tl.static_range(RESIDENT_CHUNKS):
        y = normalize(upcast(resident[c], PTX, True, True), row_max[:, :, None], row_sum[:, :, None], LOG)
        store_chunk(y_row + first, width, y, c, SEGMENTS, RESIDENT_CHUNKS, VECTORS, VEC, WARPS_PER_ROW)
    for step in range(n_steps):
        start = RESIDENT_CHUNKS * CHUNK + (zero + n_steps - 1 - step) * STEP
        x = load_chunks(
            x_row + first + start, width - start, SEGMENTS, CHUNKS, 0, VECTORS, VEC, -float("inf"), WARPS_PER_ROW
        )
        for c in tl.static_range(CHUNKS):
            y = normalize(upcast(x[c], PTX), row_max[:, :, None], row_sum[:, :, None], LOG)
            store_chunk(y_row + first + start, width - start, y, c, SEGMENTS, 0, VECTORS, VEC, WARPS_PER_ROW)
    if UNALIGNED:
        y_head_tail = normalize(x_head_tail, row_max, row_sum, LOG)
        tl.store(y_row + head_tail, y_head_tail.to(y_ptr.dtype.element_ty), mask=in_head_tail)
    leave_cluster(CTAS, PTX)


@kernel(on_cluster=True)
def softmax_backward_two_pass(
    y_ptr: Rows,  # the forward's output; all pointers: aligned to VEC elements
    dy_ptr: Rows, dx_ptr: Rows,
    n_rows: Int64,
    n_cols: Int32,  # n_cols and strides: in units of VEC, or of one element where UNALIGNED
    y_stride: Int64, dy_stride: Int64, dx_stride: Int64,
    phase: Int32,
    LOG: tl.constexpr, CTAS: tl.constexpr, WARPS_PER_ROW: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr,
    RESIDENT_CHUNKS: tl.constexpr,
    PREFETCHED: tl.constexpr,  # resident chunks of y that are read before the row's sum is known: fewer where LOG
    CHUNKS: tl.constexpr, UNALIGNED: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    init_cluster_barrier(CTAS, 1, PTX, WARPS_PER_ROW)
    SEGMENTS: tl.constexpr = CTAS * WARPS_PER_ROW
    CHUNK: tl.constexpr = WARPS_PER_ROW * VECTORS * VEC
    STEP: tl.constexpr = CHUNKS * CHUNK
    row, rank = segments_of(1, CTAS, WARPS_PER_ROW)
    warp = warp_of(SEGMENTS, WARPS_PER_ROW)
    head, interior = span_of(row, y_stride, phase, n_cols, VEC, UNALIGNED)
    y_row = y_ptr + start_of(row, y_stride, phase, VEC, UNALIGNED)
    dy_row = dy_ptr + start_of(row, dy_stride, phase, VEC, UNALIGNED)
    dx_row = dx_ptr + start_of(row, dx_stride, phase, VEC, UNALIGNED)
    first, width = slice_of(interior, rank, CTAS, VEC)
    first += warp * (VECTORS * VEC)
    width -= warp * (VECTORS * VEC)
    zero = tl.zeros([1, 1], tl.int64)
    n_steps = tl.cdiv(tl.cdiv(n_cols // VEC if UNALIGNED else n_cols, CTAS) * VEC - RESIDENT_CHUNKS * CHUNK, STEP)

    await_previous(EARLY)
    dy_resident = load_chunks(
        dy_row + first, width, SEGMENTS, RESIDENT_CHUNKS, RESIDENT_CHUNKS, VECTORS, VEC, 0.0, WARPS_PER_ROW
    )
    y_resident = load_chunks(y_row + first, width, SEGMENTS, PREFETCHED, PREFETCHED, VECTORS, VEC, 0.0, WARPS_PER_ROW)
    if UNALIGNED:
        head_tail, in_head_tail = head_and_tail(head, interior, n_cols, (rank == 0) & (warp == 0), VECTORS, VEC)
        y_head_tail = tl.load(y_row + head_tail, mask=in_head_tail, other=0.0)
        dy_head_tail = tl.load(dy_row + head_tail, mask=in_head_tail, other=0.0)
    ROUNDED: tl.constexpr = lies_in_lanes(VEC, y_ptr.dtype.element_ty)
    d = tl.zeros([SEGMENTS, VECTORS], tl.float32)
    for step in range(n_steps):
        start = RESIDENT_CHUNKS * CHUNK + (zero + step) * STEP
        y = load_chunks(y_row + first + start, width - start, SEGMENTS, CHUNKS, 0, VECTORS, VEC, 0.0, WARPS_PER_ROW)
        dy = load_chunks(dy_row + first + start, width - start, SEGMENTS, CHUNKS, 0, VECTORS, VEC, 0.0, WARPS_PER_ROW)
        for c in tl.static_range(CHUNKS):
            y_c, dy_c = keep_segment_layout(y[c], CTAS, PTX), keep_segment_layout(dy[c], CTAS, PTX)
            d += tl.sum(gradient_term(y_c, dy_c, LOG, ROUNDED), 2)
    for c in tl.static_range(RESIDENT_CHUNKS):
        y_c = y_resident[c if c < PREFETCHED else 0]  # unused where LOG
        d += tl.sum(gradient_term(upcast(y_c, PTX, True), upcast(dy_resident[c], PTX, True), LOG, ROUNDED), 2)
    d = tl.sum(d, 1)
    if UNALIGNED:
        d += tl.sum(gradient_term(y_head_tail, dy_head_tail, LOG, True), 1)
    d = cluster_reduce_sum(d, CTAS, PTX, WARPS_PER_ROW)[:, None]

    for c in tl.static_range(RESIDENT_CHUNKS):
        if c + PREFETCHED < RESIDENT_CHUNKS:
            y_resident = y_resident + (
                load_chunk(
                    y_row + first, width, c + PREFETCHED, SEGMENTS, RESIDENT_CHUNKS, VECTORS, VEC, 0.0, WARPS_PER_ROW
                ),
            )
        dx = gradient(
            upcast(y_resident[c], PTX, True, True), upcast(dy_resident[c], PTX, True, True), d[:, :, None], LOG
        )
        store_chunk(dx_row + first, width, dx, c, SEGMENTS, RESIDENT_CHUNKS, VECTORS, VEC, WARPS_PER_ROW)
    for step in range(n_steps):
        start = RESIDENT_CHUNKS * CHUNK + (zero + n_steps - 1 - step) * STEP
        y = load_chunks(y_row + first + start, width - start, SEGMENTS, CHUNKS, 0, VECTORS, VEC, 0.0, WARPS_PER_ROW)
        dy = load_chunks(dy_row + first + start, width - start, SEGMENTS, CHUNKS, 0, VECTORS, VEC, 0.0, WARPS_PER_ROW)
        for c in tl.static_range(CHUNKS):
            dx = gradient(upcast(y[c], PTX), upcast(dy[c], PTX), d[:, :, None], LOG)
            store_chunk(dx_row + first + start, width - start, dx, c, SEGMENTS, 0, VECTORS, VEC, WARPS_PER_ROW)
    if UNALIGNED:
        tl.store(
            dx_row + head_tail, gradient(y_head_tail, dy_head_tail, d, LOG).to(dx_ptr.dtype.element_ty),
            mask=in_head_tail,
        )  # fmt: skip
    leave_cluster(CTAS, PTX)
