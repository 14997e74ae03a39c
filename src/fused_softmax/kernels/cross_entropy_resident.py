"""Cross-entropy and its gradient in one pass: the row stays on chip, and the gradient takes the place of softmax's y.

    lse = log(sum(exp(z)));  loss as in `cross_entropy`, dx as in `cross_entropy_backward`

dx is for the upstream gradient that the host expects: 1, or the one that came last.

The regimes are softmax's (warp, block, cluster), with a plan of their own: the row stays as loaded, exp is computed
twice, every column is written as a non-target, and then the target is overwritten. One read and one write, so the copy
is the limit. The gradient may be written over the logits. With MEAN it is already divided by the count of
`count_targets`. A row that does not count has a gradient of zeros, whatever it holds.
"""

from __future__ import annotations

import triton.language as tl

from .common.arguments import Float32, Int32, Int64, Rows, Vector, kernel
from .common.cluster import cluster_reduce_max_sum, cluster_reduce_moments, init_cluster_barrier, leave_cluster
from .common.cross_entropy_terms import (
    assert_inside,
    coefficients,
    cross_entropy_term,
    row_loss,
    store_head_tail_gradient,
    store_moments,
    store_target,
    target_of,
)
from .common.early_start import await_previous
from .common.logits import capped, logsumexp, probe, reference_of, rounding_residual, weigh
from .common.numerics import (
    LOWEST,
    TRITON,
    copied,
    exp,
    exp2_affine,
    max_of_vectors,
    rounded_product,
    sum_of_vectors,
    upcast,
)
from .common.tiles import (
    chunk_offsets,
    head_and_tail,
    load_chunks,
    segments_of,
    slice_of,
    span_of,
    start_of,
    store_chunk,
    warp_of,
    width_if,
)

# An assertion is a branch. From Triton 3.8 on, loads without a mask that stand before it are made after it: a row then
# waits for its target. H200, Triton 3.9, fraction of a copy: 110,081 columns of float32 0.91 with the assertion there
# and 0.95 with it last; 104,003 of bfloat16 0.97 and 0.94
_ASSERTS_LAST = tl.constexpr(TRITON >= (3, 8))


@kernel(asserts=True, on_cluster=True)
def cross_entropy_resident(
    x_ptr: Rows,  # aligned to VEC elements, as dx_ptr, which may be x_ptr
    dx_ptr: Rows,
    target_ptr: Vector,  # [n_rows] int64
    weight_ptr: Vector,  # [n_cols] float32, where WEIGHTED
    weight_facts_ptr: Vector,  # [2] float32, where WEIGHTED and SMOOTH
    count_ptr: Vector,  # [2] float32: where MEAN, the loss's denominator; takes `upstream`, where KEEPS_UPSTREAM
    loss_ptr: Vector,  # [n_rows] float32
    moments_ptr: Vector,  # [n_rows, 2] float32
    n_rows: Int64,
    n_cols: Int32,  # n_cols and strides: in units of VEC, or of one element where UNALIGNED
    x_stride: Int64, dx_stride: Int64,
    phase: Int32,
    ignore_index: Int64,
    smoothing: Float32, cap: Float32, z_loss: Float32,
    upstream: Float32,  # the upstream gradient that the gradient is for
    MEAN: tl.constexpr,
    INPLACE: tl.constexpr,  # dx_ptr is x_ptr
    KEEPS_UPSTREAM: tl.constexpr,
    WAITS: tl.constexpr,  # the kernel that writes the count may still run: this one started before its end
    WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, ROWS: tl.constexpr, CTAS: tl.constexpr,
    WARPS_PER_ROW: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr,
    UNPREDICATED: tl.constexpr, UNALIGNED: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
    TRIGGER: tl.constexpr,  # whether the next kernel may start now and wait for this one
):  # fmt: skip
    init_cluster_barrier(CTAS, 4 if SMOOTH else 2, PTX, WARPS_PER_ROW)
    await_previous(EARLY and not WAITS)
    if TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    SEGMENTS: tl.constexpr = ROWS * CTAS * WARPS_PER_ROW
    row, rank = segments_of(ROWS, CTAS, WARPS_PER_ROW)
    warp = warp_of(SEGMENTS, WARPS_PER_ROW)
    exists = row < n_rows
    head, interior = span_of(row, x_stride, phase, n_cols, VEC, UNALIGNED)
    x_row = x_ptr + start_of(row, x_stride, phase, VEC, UNALIGNED)
    dx_row = dx_ptr + start_of(row, dx_stride, phase, VEC, UNALIGNED)
    first, width = slice_of(interior, rank, CTAS, VEC)
    first += warp * (VECTORS * VEC)
    width -= warp * (VECTORS * VEC)
    if ROWS > 1:
        width = width_if(exists, width)
    columns = n_cols if UNALIGNED else n_cols * VEC

    ASSERTS_LAST: tl.constexpr = _ASSERTS_LAST and x_ptr.dtype.element_ty == tl.float32
    x = load_chunks(x_row + first, width, SEGMENTS, CHUNKS, UNPREDICATED, VECTORS, VEC, -float("inf"), WARPS_PER_ROW)
    if UNALIGNED:
        head_tail, in_head_tail = head_and_tail(
            head, interior, n_cols, (rank == 0) & (warp == 0) & exists, VECTORS, VEC
        )
        x_head_tail = tl.load(x_row + head_tail, mask=in_head_tail, other=-float("inf"))
    if ROWS == 1:
        # one row: its numbers are scalars, which need no layout conversion between warps
        own = tl.program_id(0).to(tl.int64)
        target, counts = target_of(own, n_rows, target_ptr, ignore_index, columns)
        if not ASSERTS_LAST:
            assert_inside(target, ignore_index, columns)
        own_head = span_of(own, x_stride, phase, n_cols, VEC, UNALIGNED)[0]
        z_target = tl.load(
            x_ptr + start_of(own, x_stride, phase, VEC, UNALIGNED) - own_head + target, mask=counts, other=0.0
        )
    else:
        target, counts = target_of(row, n_rows, target_ptr, ignore_index, columns)
        if not ASSERTS_LAST:
            assert_inside(target, ignore_index, columns)
        z_target = tl.load(x_row - head + target, mask=counts, other=0.0)
    reference = 0.0 * row.to(tl.float32)
    if SMOOTH:
        z_probe = capped(probe(x_row - head, 1, columns, exists, weight_facts_ptr, WEIGHTED), cap, SOFTCAP)
        reference = reference_of(z_probe)
    x_target = z_target.to(tl.float32)
    z_target = tl.where(counts, capped(x_target, cap, SOFTCAP), -float("inf"))
    if WEIGHTED:
        w_target = tl.load(weight_ptr + target, mask=counts, other=0.0)
    else:
        w_target = 1.0
    if WEIGHTED and SMOOTH:
        w_sum = tl.load(weight_facts_ptr)
    else:
        w_sum = columns
    # a slice that Triton's cluster planner does not take as it is
    LONG: tl.constexpr = PTX and UNALIGNED and CTAS > 1 and CHUNKS > 13 and x_ptr.dtype.element_ty == tl.float32
    # softcap is monotonic: the largest logit gives the largest z
    m = max_of_vectors(x[0], PTX)
    for k in tl.static_range(1, CHUNKS):
        m = tl.maximum(m, max_of_vectors(x[k], PTX))
    m = tl.maximum(capped(m, cap, SOFTCAP), LOWEST)  # [SEGMENTS, VECTORS]
    if INPLACE:
        # the target's logit is one of the row's, so it changes no maximum. Here every program of the row reads it
        # before any of them can write the gradient over it. If not INPLACE, nothing waits for it: two dependent loads
        # would delay each row's sum (time over copy 1.20 instead of 1.05 at 128,256 columns, lower is better)
        m = tl.maximum(m, z_target)
        if SMOOTH:
            m = tl.maximum(m, tl.where(exists, z_probe, -float("inf")))
    s = tl.zeros_like(m)
    t = tl.zeros_like(m)
    for k in tl.static_range(CHUNKS):
        wide = upcast(x[k], PTX, True)
        z = capped(copied(wide) if LONG else wide, cap, SOFTCAP)
        s += sum_of_vectors(exp(z - m[:, :, None]), PTX)
        if SMOOTH:
            at = tl.reshape(chunk_offsets(k, VECTORS, VEC, WARPS_PER_ROW) + 0 * rank, (SEGMENTS, VECTORS, VEC))
            at_weight, mask = at + (head + first)[:, :, None], at < width[:, :, None]
            t += tl.sum(weigh(z, reference[:, :, None], at_weight, mask, weight_ptr, WEIGHTED), 2)

    # each thread adds one head or tail element to its own numbers. On a cluster they are reduced with their segment
    # instead, because Triton may place their tile in other CTAs than the row's
    top = m
    if UNALIGNED:
        z_head_tail = capped(x_head_tail, cap, SOFTCAP)
        wz_head_tail = weigh(z_head_tail, reference, head_tail + head, in_head_tail, weight_ptr, WEIGHTED)
        if CTAS == 1:
            top = tl.maximum(m, z_head_tail)
    segment_max = tl.max(top, 1)
    if UNALIGNED and CTAS > 1:
        segment_max = tl.maximum(segment_max, tl.max(z_head_tail, 1))
    s = rounded_product(s, exp(m - segment_max[:, None]))
    if UNALIGNED and CTAS == 1:
        s += exp(z_head_tail - segment_max[:, None])
        t += wz_head_tail
    segment_sum = tl.sum(s, 1)
    segment_weighted = tl.sum(t, 1)
    if UNALIGNED and CTAS > 1:
        segment_sum += tl.sum(exp(z_head_tail - segment_max[:, None]), 1)
        segment_weighted += tl.sum(wz_head_tail, 1)
    if SMOOTH:
        row_max, row_sum, wz_sum = cluster_reduce_moments(
            segment_max, segment_sum, segment_weighted, True, CTAS, PTX, WARPS_PER_ROW
        )
        wz_sum = wz_sum[:, None]
    else:
        row_max, row_sum = cluster_reduce_max_sum(segment_max, segment_sum, CTAS, PTX, WARPS_PER_ROW)
        wz_sum = 0.0
    lse = logsumexp(row_max, row_sum)
    residual, lse = rounding_residual(lse, row_max, row_sum)[:, None], lse[:, None]
    nll = lse - z_target + residual

    g = tl.where(counts, upstream, 0.0)
    if WAITS:
        tl.extra.cuda.gdc_wait()
    if MEAN:
        g = tl.where(counts, upstream / tl.load(count_ptr), 0.0)
    a, b, c = coefficients(g, lse, w_target, w_sum, smoothing, columns, z_loss, SMOOTH)
    FUSED: tl.constexpr = PTX and x_ptr.dtype.element_ty.primitive_bitwidth == 16
    base, shift, by = exp2_affine(row_max[:, None], FUSED)
    a = tl.where(counts, a * by / row_sum[:, None], 0.0)
    b, c = b + tl.zeros_like(a), c + tl.zeros_like(a)
    if ROWS > 1 or counts:
        w_here = weight_ptr + (head + first)[:, :, None]
        for k in tl.static_range(CHUNKS):
            at = tl.reshape(chunk_offsets(k, VECTORS, VEC, WARPS_PER_ROW) + 0 * rank, (SEGMENTS, VECTORS, VEC))
            wide = upcast(x[k], PTX, True, True)
            dx = cross_entropy_term(
                copied(wide) if LONG else wide, 0.0, at, base[:, :, None], shift[:, :, None], a[:, :, None],
                c[:, :, None], w_here, cap, at < width[:, :, None], WEIGHTED, SMOOTH, SOFTCAP, FUSED,
            )  # fmt: skip
            if ROWS > 1:
                dx = tl.where(counts[:, :, None], dx, 0.0)
            store_chunk(dx_row + first, width, dx, k, SEGMENTS, UNPREDICATED, VECTORS, VEC, WARPS_PER_ROW)
        if UNALIGNED:
            store_head_tail_gradient(
                dx_row, x_head_tail, head_tail, in_head_tail, target - head, counts, b, base, shift, a, c,
                weight_ptr + head, cap, WEIGHTED, SMOOTH, SOFTCAP, FUSED,
            )  # fmt: skip
        dx = cross_entropy_term(
            x_target, b, target, base, shift, a, c, weight_ptr, cap, counts, WEIGHTED, SMOOTH, SOFTCAP, FUSED
        )
        local_target = (target - head - first).to(tl.int32)
        store_target(dx_row + first, dx, local_target, width, counts & exists, VECTORS, VEC, CHUNKS, WARPS_PER_ROW)
    else:  # whatever the row holds
        zeros = tl.zeros([SEGMENTS, VECTORS, VEC], tl.float32)
        for k in tl.static_range(CHUNKS):
            store_chunk(dx_row + first, width, zeros, k, SEGMENTS, UNPREDICATED, VECTORS, VEC, WARPS_PER_ROW)
        if UNALIGNED:
            tl.store(dx_row + head_tail, tl.zeros_like(x_head_tail).to(dx_ptr.dtype.element_ty), mask=in_head_tail)

    # last, because these numbers move to other warps before they are written
    loss = row_loss(nll, lse, residual, w_target, w_sum, wz_sum, reference, smoothing, columns, z_loss, SMOOTH)
    writes = (rank == 0) & (warp == 0) & exists
    tl.store(loss_ptr + row, tl.where(counts, loss, 0.0), mask=writes)
    store_moments(moments_ptr, row, row_max[:, None], row_sum[:, None], writes)
    if KEEPS_UPSTREAM:
        tl.store(count_ptr + 1 + 0 * row, upstream + 0.0 * row.to(tl.float32), mask=writes & (row == 0))
    if ASSERTS_LAST:
        assert_inside(target, ignore_index, columns)
    leave_cluster(CTAS, PTX)
