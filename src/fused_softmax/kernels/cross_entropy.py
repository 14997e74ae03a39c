"""Cross-entropy of rows of logits without a gradient, and the small sums before and after it.

    lse = log(sum(exp(z))), z = softcap(x)
    loss = (1 - eps)*w_t*(lse - z_t) + eps/C*(sum(w)*(lse - r) - sum(w*(z - r))) + z_loss*lse^2,  r any one logit

The logits are read once (`online_reduction`), and nothing of their size is written. A row with NaN or +inf has loss
NaN, as torch.log_softmax makes it. A target outside [0, n_cols) is a device assertion and is never dereferenced.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common.arguments import Float32, Int32, Int64, Rows, Vector, kernel
from .common.cluster import cluster_reduce_moments, init_cluster_barrier, leave_cluster
from .common.cross_entropy_terms import assert_inside, row_loss, store_moments, target_of
from .common.early_start import await_previous
from .common.logits import capped, logsumexp, probe, reference_of, rounding_residual
from .common.online_softmax import NO_MOMENT, WEIGHTED_SUM, online_reduction
from .common.tiles import segments_of, slice_of, span_of, start_of, warp_of, width_if


@kernel(num_stages=3, asserts=True, on_cluster=True)
def cross_entropy_forward(
    x_ptr: Rows,  # aligned to VEC elements
    target_ptr: Vector,  # [n_rows] int64
    weight_ptr: Vector,  # [n_cols] float32, where WEIGHTED
    weight_facts_ptr: Vector,  # [2] float32, where WEIGHTED and SMOOTH
    loss_ptr: Vector,  # [n_rows] float32
    moments_ptr: Vector,  # [n_rows, 2] float32
    n_rows: Int64,
    n_cols: Int32,  # n_cols and x_stride: in units of VEC, or of one element where UNALIGNED
    x_stride: Int64,
    phase: Int32,
    ignore_index: Int64,
    smoothing: Float32, cap: Float32, z_loss: Float32,
    WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, ROWS: tl.constexpr, CTAS: tl.constexpr,
    WARPS_PER_ROW: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr,
    UNALIGNED: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    init_cluster_barrier(CTAS, 4 if SMOOTH else 2, PTX, WARPS_PER_ROW)
    await_previous(EARLY)
    row, rank = segments_of(ROWS, CTAS, WARPS_PER_ROW)
    warp = warp_of(ROWS * CTAS * WARPS_PER_ROW, WARPS_PER_ROW)
    exists = row < n_rows
    head, interior = span_of(row, x_stride, phase, n_cols, VEC, UNALIGNED)
    x_row = x_ptr + start_of(row, x_stride, phase, VEC, UNALIGNED)
    first, width = slice_of(interior, rank, CTAS, VEC)
    first += warp * (VECTORS * VEC)
    width -= warp * (VECTORS * VEC)
    if ROWS > 1:
        width = width_if(exists, width)
    columns = n_cols if UNALIGNED else n_cols * VEC
    target, counts = target_of(row, n_rows, target_ptr, ignore_index, columns)
    # before the reduction, so that its latency is hidden
    x_target = tl.load(x_row - head + target, mask=counts, other=0.0)
    reference = 0.0 * row.to(tl.float32)
    if SMOOTH:
        x_probe = probe(x_row - head, 1, columns, exists, weight_facts_ptr, WEIGHTED)
        # a target is hardly hidden; a row that does not count has no loss, whatever its reference
        x_probe = tl.maximum(x_probe, x_target.to(tl.float32))
        reference = reference_of(capped(x_probe, cap, SOFTCAP))
    MOMENT: tl.constexpr = WEIGHTED_SUM if SMOOTH else NO_MOMENT
    one = 1.0 + 0.0 * row.to(tl.float32)
    row_max, row_sum, wz_sum = online_reduction(
        x_row, first, width, head, interior, columns, exists, rank, warp, one, cap, reference, weight_ptr,
        MOMENT, WEIGHTED, False, SOFTCAP, ROWS, CTAS, WARPS_PER_ROW, VECTORS, VEC, CHUNKS, UNALIGNED, PTX,
    )  # fmt: skip
    lse = logsumexp(row_max, row_sum)
    residual = rounding_residual(lse, row_max, row_sum)[:, None]
    lse = tl.where(lse == float("inf"), float("nan"), lse)[:, None]
    z = capped(x_target, cap, SOFTCAP)
    if WEIGHTED:
        w_target = tl.load(weight_ptr + target, mask=counts, other=0.0)
    else:
        w_target = 1.0
    if WEIGHTED and SMOOTH:
        w_sum = tl.load(weight_facts_ptr)
    else:
        w_sum = columns
    loss = row_loss(
        lse - z + residual, lse, residual, w_target, w_sum, wz_sum[:, None], reference, smoothing, columns, z_loss,
        SMOOTH,
    )  # fmt: skip
    assert_inside(target, ignore_index, columns)
    writes = (rank == 0) & (warp == 0) & exists
    tl.store(loss_ptr + row, tl.where(counts, loss, 0.0), mask=writes)
    store_moments(moments_ptr, row, row_max[:, None], row_sum[:, None], writes)
    leave_cluster(CTAS, PTX)


@triton.jit
def row_range(n_rows, n_each):
    """(first, end) of this program's or cluster's rows."""
    first = tl.program_id(0).to(tl.int64) * n_each
    return first, tl.minimum(first + n_each, n_rows)


@triton.jit
def add_up(
    loss_ptr, target_ptr, weight_ptr, first, end, n_classes, ignore_index,
    LOSSES: tl.constexpr, TARGETS: tl.constexpr, WEIGHTED: tl.constexpr, CTAS: tl.constexpr,
    WARPS_PER_ROW: tl.constexpr, VECTORS: tl.constexpr, EACH: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """(sum of the losses where LOSSES, number of targets that count or the sum of their weights where TARGETS), each in
    one fixed order, of rows first to end - 1.

    All CTAs of a cluster read, because one multiprocessor takes 6 us for 32,768 rows.
    """
    SEGMENTS: tl.constexpr = CTAS * WARPS_PER_ROW
    TILE: tl.constexpr = SEGMENTS * VECTORS
    place = tl.arange(0, SEGMENTS)[:, None] * VECTORS + tl.arange(0, VECTORS)[None, :]
    total = tl.zeros([SEGMENTS, VECTORS], tl.float32)
    weight = tl.zeros([SEGMENTS, VECTORS], tl.float32)
    for start in range(first, end, EACH * TILE):
        losses, targets = (), ()
        for i in tl.static_range(EACH):
            row = start + i * TILE + place
            if TARGETS:
                targets = targets + (tl.load(target_ptr + row, mask=row < end, other=ignore_index),)
            if LOSSES:
                losses = losses + (tl.load(loss_ptr + row, mask=row < end, other=0.0),)
        for i in tl.static_range(EACH):
            if LOSSES:
                total += losses[i]
            if TARGETS:
                counts = (targets[i] != ignore_index) & (targets[i] >= 0) & (targets[i] < n_classes)
                if WEIGHTED:
                    weight += tl.load(weight_ptr + targets[i], mask=counts, other=0.0)
                else:
                    weight += counts.to(tl.float32)
    segment_total, segment_weight = tl.sum(total, 1), tl.sum(weight, 1)
    _, weight, total = cluster_reduce_moments(
        tl.zeros_like(segment_total), segment_weight, segment_total, True, CTAS, PTX, WARPS_PER_ROW
    )
    return total, weight


@kernel(on_cluster=True)
def count_targets(
    target_ptr: Vector, weight_ptr: Vector,
    count_ptr: Vector,  # [programs]
    n_rows: Int64,
    n_each: Int64,  # rows of a program
    n_classes: Int32, ignore_index: Int64,
    WEIGHTED: tl.constexpr, TRIGGER: tl.constexpr, CTAS: tl.constexpr, WARPS_PER_ROW: tl.constexpr,
    VECTORS: tl.constexpr, EACH: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The mean's denominator, of each program's or cluster's rows: how many targets count, or their weights' sum."""
    init_cluster_barrier(CTAS, 4, PTX, WARPS_PER_ROW)
    if TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    first, end = row_range(n_rows, n_each)
    _, weight = add_up(
        weight_ptr, target_ptr, weight_ptr, first, end, n_classes, ignore_index,
        False, True, WEIGHTED, CTAS, WARPS_PER_ROW, VECTORS, EACH, PTX,
    )  # fmt: skip
    segment = tl.arange(0, CTAS * WARPS_PER_ROW)
    tl.store(count_ptr + tl.program_id(0) + segment, weight, mask=segment == 0)
    leave_cluster(CTAS, PTX)


@kernel(on_cluster=True)
def reduce_losses(
    loss_ptr: Vector, target_ptr: Vector, weight_ptr: Vector,
    out_ptr: Vector,  # [programs]
    count_ptr: Vector,  # [1]
    n_rows: Int64,
    n_each: Int64,  # rows of a program
    n_classes: Int32, ignore_index: Int64, MEAN: tl.constexpr, KEEPS_COUNT: tl.constexpr, HAS_COUNT: tl.constexpr,
    WEIGHTED: tl.constexpr, WAITS: tl.constexpr, CTAS: tl.constexpr, WARPS_PER_ROW: tl.constexpr,
    VECTORS: tl.constexpr, EACH: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """sum(loss) of each program's or cluster's rows, where MEAN over the count of `count_targets`: NaN where it is 0.

    HAS_COUNT: that count is read. If not, targets are counted, and KEEPS_COUNT: the count is written, too.

    WAITS: this kernel starts while the kernel in front of it still runs, which hides the latency of the launch.
    """
    init_cluster_barrier(CTAS, 4, PTX, WARPS_PER_ROW)
    if WAITS:
        tl.extra.cuda.gdc_wait()
    first, end = row_range(n_rows, n_each)
    out, weight = add_up(
        loss_ptr, target_ptr, weight_ptr, first, end, n_classes, ignore_index,
        True, not HAS_COUNT, WEIGHTED, CTAS, WARPS_PER_ROW, VECTORS, EACH, PTX,
    )  # fmt: skip
    if MEAN:
        if HAS_COUNT:
            weight = tl.load(count_ptr + 0 * tl.arange(0, CTAS * WARPS_PER_ROW))
        # torch divides each term of a loss by 0, and one of them is 0/0
        out = tl.where(weight == 0.0, float("nan"), tl.div_rn(out, weight))
    segment = tl.arange(0, CTAS * WARPS_PER_ROW)
    if KEEPS_COUNT:
        tl.store(count_ptr + segment, weight, mask=segment == 0)
    tl.store(out_ptr + tl.program_id(0) + segment, out, mask=segment == 0)
    leave_cluster(CTAS, PTX)
