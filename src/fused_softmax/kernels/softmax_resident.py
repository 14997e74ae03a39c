"""The row stays on chip: softmax, log_softmax and their gradients, reading each row once.

    m = max(x);  s = sum(exp(x - m));  y = exp(x - m) / s     or   y = (x - m) - log(s)
    d = sum(y*dy);  dx = y*(dy - d)                           or   d = sum(dy);  dx = dy - exp(y)*d

One kernel runs three regimes, which differ in numbers only. warp: ROWS short rows in one program, each in one warp or
less, so that no reduction leaves its warp. block: one row in one program. cluster: one row in the CTAS programs of a
thread-block cluster, one slice each, reduced through distributed shared memory. Each vector has its own (max, sum), so
that no thread waits for another's loads. One reduction at the end gives the row's. The plan chooses the numbers by
width. The register file is the limit, and after it the bytes in flight. Some chunks of the longest rows, and of
gradients, which hold two, are staged in shared memory (`smem_staging`). log_softmax's gradient reads y late, because
its sum needs dy only.
"""

from __future__ import annotations

import triton.language as tl

from .common.arguments import Int32, Int64, Rows, kernel
from .common.cluster import cluster_reduce_max_sum, cluster_reduce_sum, init_cluster_barrier, leave_cluster
from .common.early_start import await_previous, most_that_start_next, start_next
from .common.numerics import (
    GRADIENT_CONVERTS_TWICE,
    LOWEST,
    TREES_ALWAYS,
    exp,
    exp2_affine,
    exp2_fma,
    lies_in_lanes,
    max_of_vectors,
    rounded_product,
    sum_of_vectors,
    upcast,
)
from .common.smem_staging import (
    await_staged,
    chunk_of,
    declare_staging,
    load_unstaged,
    stage,
    stage_ends,
    staged_end,
)
from .common.softmax_terms import gradient, gradient_term, normalize
from .common.tiles import (
    gradient_reads,
    head_and_tail,
    load_chunk,
    segments_of,
    slice_of,
    slice_zero,
    span_of,
    start_of,
    store_chunk,
    warp_of,
    width_if,
)


@kernel(on_cluster=True)
def softmax_resident(
    x_ptr: Rows,  # both pointers: aligned to VEC elements
    y_ptr: Rows,
    n_rows: Int64,
    n_cols: Int32,  # n_cols and strides: in units of VEC, or of one element where UNALIGNED
    x_stride: Int64, y_stride: Int64,
    phase: Int32,  # elements from the pointers to the first row, where UNALIGNED
    LOG: tl.constexpr, ROWS: tl.constexpr, CTAS: tl.constexpr, WARPS_PER_ROW: tl.constexpr, VECTORS: tl.constexpr,
    VEC: tl.constexpr, CHUNKS: tl.constexpr, UNPREDICATED: tl.constexpr,
    SMEM_STAGED: tl.constexpr,  # unpredicated chunks in shared memory, where RECOMPUTE or LOG
    UNALIGNED: tl.constexpr, RECOMPUTE: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    THREADS: tl.constexpr = WARPS_PER_ROW * VECTORS
    init_cluster_barrier(CTAS, 2, PTX, WARPS_PER_ROW)
    declare_staging(SMEM_STAGED, THREADS, PTX)
    # locate the row, and this segment's part of its slice
    SEGMENTS: tl.constexpr = ROWS * CTAS * WARPS_PER_ROW
    row, rank = segments_of(ROWS, CTAS, WARPS_PER_ROW)
    warp = warp_of(SEGMENTS, WARPS_PER_ROW)
    head, interior = span_of(row, x_stride, phase, n_cols, VEC, UNALIGNED)
    x_row = x_ptr + start_of(row, x_stride, phase, VEC, UNALIGNED)
    y_row = y_ptr + start_of(row, y_stride, phase, VEC, UNALIGNED)
    first, width = slice_of(interior, rank, CTAS, VEC)
    first += warp * (VECTORS * VEC)
    width -= warp * (VECTORS * VEC)
    if ROWS > 1:
        width = width_if(row < n_rows, width)

    # each vector's own maximum and sum
    await_previous(EARLY)
    if SMEM_STAGED > 0:
        slice_start, slice = slice_zero(x_ptr, x_stride, phase, n_cols, CTAS, VEC, UNALIGNED)
        stage(slice_start, slice, 0, SMEM_STAGED, THREADS, PTX)
    x = load_unstaged(
        x_row + first, width, SEGMENTS, CHUNKS, UNPREDICATED, VECTORS, VEC, -float("inf"), WARPS_PER_ROW, SMEM_STAGED,
        PTX,
    )  # fmt: skip
    if UNALIGNED:
        head_tail, in_head_tail = head_and_tail(
            head, interior, n_cols, (rank == 0) & (warp == 0) & (row < n_rows), VECTORS, VEC
        )
        x_head_tail = tl.load(x_row + head_tail, mask=in_head_tail, other=-float("inf")).to(tl.float32)
    start_next(EARLY and not LOG, most_that_start_next(VECTORS, CTAS))
    # log_softmax of long slices reaches its register cap, where only Triton's own order fits
    IN_ORDER: tl.constexpr = PTX and not (LOG and CHUNKS > 8)
    m = max_of_vectors(x[0], IN_ORDER)
    for c in tl.static_range(1, len(x)):
        m = tl.maximum(m, max_of_vectors(x[c], IN_ORDER))
    await_staged(SMEM_STAGED, PTX)
    for c in tl.static_range(SMEM_STAGED if PTX else 0):
        m = tl.maximum(m, max_of_vectors(chunk_of(x, c, 0, SMEM_STAGED, THREADS, PTX), IN_ORDER))
    m = tl.maximum(m.to(tl.float32), LOWEST)  # [SEGMENTS, VECTORS]
    s = tl.zeros_like(m)
    exps = ()
    for c in tl.static_range(CHUNKS):
        e = exp(upcast(chunk_of(x, c, 0, SMEM_STAGED, THREADS, PTX), PTX, RECOMPUTE) - m[:, :, None])
        s += sum_of_vectors(e, IN_ORDER)
        exps = exps + (e,)

    # the segment's, then the row's
    # each thread adds one head or tail element to its own numbers. On a cluster they are reduced with their segment
    # instead, because Triton may place their tile in other CTAs than the row's
    top = m
    if UNALIGNED and CTAS == 1:
        top = tl.maximum(m, x_head_tail)
    segment_max = tl.max(top, 1)
    if UNALIGNED and CTAS > 1:
        segment_max = tl.maximum(segment_max, tl.max(x_head_tail, 1))
    s = rounded_product(s, exp(m - segment_max[:, None]))
    if UNALIGNED and CTAS == 1:
        s += exp(x_head_tail - segment_max[:, None])
    segment_sum = tl.sum(s, 1)
    if UNALIGNED and CTAS > 1:
        segment_sum += tl.sum(exp(x_head_tail - segment_max[:, None]), 1)
    row_max, row_sum = cluster_reduce_max_sum(segment_max, segment_sum, CTAS, PTX, WARPS_PER_ROW)
    row_max = row_max[:, None]
    row_sum = row_sum[:, None]
    if ROWS > 1 and not (LOG or UNALIGNED):
        # rows that do not exist have a sum of 0. A division by 0 is slow, and the rows of a warp wait for each other
        row_sum = tl.where(row < n_rows, row_sum, 1.0)

    # the last formula, and the store
    FUSED: tl.constexpr = PTX and x_ptr.dtype.element_ty.primitive_bitwidth == 16 and y_ptr.dtype == x_ptr.dtype
    if LOG:
        by = row_sum
    elif RECOMPUTE:
        base, shift, by = exp2_affine(row_max, FUSED)
        by = by * tl.div_rn(1.0, row_sum)
    else:
        by = exp(m - row_max) * tl.div_rn(1.0, row_sum)
    for c in tl.static_range(CHUNKS):
        x_c = chunk_of(x, c, 0, SMEM_STAGED, THREADS, PTX)
        if LOG:
            y = normalize(upcast(x_c, PTX, RECOMPUTE, True), row_max[:, :, None], row_sum[:, :, None], LOG)
        elif RECOMPUTE:
            x_c = upcast(x_c, PTX, True, True)
            y = exp2_fma(x_c, base[:, :, None], shift[:, :, None], FUSED) * by[:, :, None]
        else:
            y = exps[c] * by[:, :, None]
        store_chunk(y_row + first, width, y, c, SEGMENTS, UNPREDICATED, VECTORS, VEC, WARPS_PER_ROW)
    if UNALIGNED:
        y_head_tail = normalize(x_head_tail, row_max, row_sum, LOG)
        tl.store(y_row + head_tail, y_head_tail.to(y_ptr.dtype.element_ty), mask=in_head_tail)
    leave_cluster(CTAS, PTX)


@kernel(on_cluster=True)
def softmax_backward_resident(
    y_ptr: Rows,  # the forward's output; all pointers: aligned to VEC elements
    dy_ptr: Rows, dx_ptr: Rows,
    n_rows: Int64,
    n_cols: Int32,  # n_cols and strides: in units of VEC, or of one element where UNALIGNED
    y_stride: Int64, dy_stride: Int64, dx_stride: Int64,
    phase: Int32,
    LOG: tl.constexpr, ROWS: tl.constexpr, CTAS: tl.constexpr, WARPS_PER_ROW: tl.constexpr, VECTORS: tl.constexpr,
    VEC: tl.constexpr, CHUNKS: tl.constexpr,
    PREFETCHED: tl.constexpr,  # chunks of y that are read before the row's sum is known: all, or fewer where LOG
    UNPREDICATED: tl.constexpr,
    SMEM_STAGED: tl.constexpr,  # unpredicated chunks in shared memory
    UNALIGNED: tl.constexpr, RECOMPUTE: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    THREADS: tl.constexpr = WARPS_PER_ROW * VECTORS
    POLICY: tl.constexpr = gradient_reads(UNALIGNED, y_ptr.dtype.element_ty)
    Y_SMEM_STAGED: tl.constexpr = SMEM_STAGED if PREFETCHED == CHUNKS else 0
    init_cluster_barrier(CTAS, 1, PTX, WARPS_PER_ROW)
    PLACES: tl.constexpr = SMEM_STAGED + Y_SMEM_STAGED
    ENDS_STAGED: tl.constexpr = UNALIGNED and SMEM_STAGED > 0 and PTX and y_ptr.dtype.element_ty == tl.float32
    # the chunk that the sums begin with: staged ones come last. H200, 229,377 to 262,144 columns: 0.93 to 0.95 of an
    # add with these first, 0.97 to 0.98 last. log_softmax's are no faster so, and 16 bits spill with Triton 3.9
    FIRST: tl.constexpr = SMEM_STAGED if PTX and not LOG and y_ptr.dtype.element_ty == tl.float32 else 0
    declare_staging(PLACES, THREADS, PTX, 4 * VEC if ENDS_STAGED else 0)
    SEGMENTS: tl.constexpr = ROWS * CTAS * WARPS_PER_ROW
    row, rank = segments_of(ROWS, CTAS, WARPS_PER_ROW)
    warp = warp_of(SEGMENTS, WARPS_PER_ROW)
    head, interior = span_of(row, y_stride, phase, n_cols, VEC, UNALIGNED)
    y_row = y_ptr + start_of(row, y_stride, phase, VEC, UNALIGNED)
    dy_row = dy_ptr + start_of(row, dy_stride, phase, VEC, UNALIGNED)
    dx_row = dx_ptr + start_of(row, dx_stride, phase, VEC, UNALIGNED)
    first, width = slice_of(interior, rank, CTAS, VEC)
    first += warp * (VECTORS * VEC)
    width -= warp * (VECTORS * VEC)
    if ROWS > 1:
        width = width_if(row < n_rows, width)

    await_previous(EARLY)
    if SMEM_STAGED > 0:
        dy_start, slice = slice_zero(dy_ptr, dy_stride, phase, n_cols, CTAS, VEC, UNALIGNED)
        stage(dy_start, slice, 0, SMEM_STAGED, THREADS, PTX)
        y_start, slice = slice_zero(y_ptr, y_stride, phase, n_cols, CTAS, VEC, UNALIGNED)
        stage(y_start, slice, SMEM_STAGED, Y_SMEM_STAGED, THREADS, PTX)
        if ENDS_STAGED:
            of_row = tl.program_id(0).to(tl.int64)
            head_of_row, interior_of_row = span_of(of_row, y_stride, phase, n_cols, VEC, UNALIGNED)
            stage_ends(y_start, head_of_row, interior_of_row, n_cols, 0, PLACES, THREADS, VEC)
            stage_ends(dy_start, head_of_row, interior_of_row, n_cols, 2 * VEC, PLACES, THREADS, VEC)
        if FIRST > 0:
            tl.debug_barrier()  # ptxas asks for the other chunks first otherwise, but moves no load over a barrier
    y = load_unstaged(
        y_row + first, width, SEGMENTS, PREFETCHED, UNPREDICATED, VECTORS, VEC, 0.0, WARPS_PER_ROW, Y_SMEM_STAGED, PTX,
        POLICY,
    )  # fmt: skip
    dy = load_unstaged(
        dy_row + first, width, SEGMENTS, CHUNKS, UNPREDICATED, VECTORS, VEC, 0.0, WARPS_PER_ROW, SMEM_STAGED, PTX,
        POLICY,
    )  # fmt: skip
    start_next(EARLY and not LOG, most_that_start_next(VECTORS, CTAS))
    d = tl.zeros([SEGMENTS, VECTORS], tl.float32)
    # the elements of a vector may lie in several lanes, which then add products
    ROUNDED: tl.constexpr = VECTORS == 1 or lies_in_lanes(VEC, y_ptr.dtype.element_ty)
    for i in tl.static_range(FIRST, CHUNKS + FIRST):
        if i % CHUNKS == 0:  # the staged chunks begin
            await_staged(SMEM_STAGED, PTX)
            if ENDS_STAGED:
                tl.debug_barrier()
        dy_c = upcast(chunk_of(dy, i % CHUNKS, 0, SMEM_STAGED, THREADS, PTX), PTX)
        y_c = dy_c  # unused where LOG
        if not LOG:
            y_c = upcast(chunk_of(y, i % CHUNKS, SMEM_STAGED, Y_SMEM_STAGED, THREADS, PTX), PTX)
        # on one CTA or with staged chunks, the cap of 128 registers is reached, where only Triton's own order fits
        d += sum_of_vectors(gradient_term(y_c, dy_c, LOG, ROUNDED), PTX and CTAS > 1 and SMEM_STAGED == 0)
    if UNALIGNED:
        head_tail, in_head_tail = head_and_tail(
            head, interior, n_cols, (rank == 0) & (warp == 0) & (row < n_rows), VECTORS, VEC
        )
        if ENDS_STAGED:
            place = tl.arange(0, VECTORS)[None, :]
            y_head_tail = staged_end(place, in_head_tail, 0, PLACES, THREADS)
            dy_head_tail = staged_end(place, in_head_tail, 2 * VEC, PLACES, THREADS)
        else:
            y_head_tail = tl.load(y_row + head_tail, mask=in_head_tail, other=0.0)
            dy_head_tail = tl.load(dy_row + head_tail, mask=in_head_tail, other=0.0)
    d = tl.sum(d, 1)
    if UNALIGNED:
        d += tl.sum(gradient_term(y_head_tail, dy_head_tail, LOG, True), 1)
    d = cluster_reduce_sum(d, CTAS, PTX, WARPS_PER_ROW)[:, None]

    # 8 chunks of both inputs spill where trees hold partial sums
    TWICE: tl.constexpr = GRADIENT_CONVERTS_TWICE and not (TREES_ALWAYS and CTAS > 1 and CHUNKS == 8)
    for c in tl.static_range(CHUNKS):
        if c + PREFETCHED < CHUNKS:
            y = y + (
                load_chunk(
                    y_row + first,
                    width,
                    c + PREFETCHED,
                    SEGMENTS,
                    UNPREDICATED,
                    VECTORS,
                    VEC,
                    0.0,
                    WARPS_PER_ROW,
                    POLICY,
                ),
            )
        y_c = upcast(chunk_of(y, c, SMEM_STAGED, Y_SMEM_STAGED, THREADS, PTX), PTX, RECOMPUTE, TWICE)
        dy_c = upcast(chunk_of(dy, c, 0, SMEM_STAGED, THREADS, PTX), PTX, RECOMPUTE, TWICE)
        store_chunk(
            dx_row + first,
            width,
            gradient(y_c, dy_c, d[:, :, None], LOG),
            c, SEGMENTS, UNPREDICATED, VECTORS, VEC, WARPS_PER_ROW,
        )  # fmt: skip
    if UNALIGNED:
        dx_head_tail = gradient(y_head_tail, dy_head_tail, d, LOG)
        tl.store(dx_row + head_tail, dx_head_tail.to(dx_ptr.dtype.element_ty), mask=in_head_tail)
    leave_cluster(CTAS, PTX)
