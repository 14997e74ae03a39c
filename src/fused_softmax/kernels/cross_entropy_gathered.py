"""Cross-entropy of few classes: rows that are moved as one piece of memory. The loss, its gradient, or both.

    lse = log(sum(exp(z)));  loss as in `cross_entropy`, dx as in `cross_entropy_backward`

A row of few logits has a target, a logarithm and factors of its own, and often starts within a vector. Here a program
moves all its rows as one piece, in vectors (`gathered_rows`). VECTORS neighbors of a warp share a row, CHUNKS times VEC
columns for each. The target's logit comes from shared memory, and its gradient replaces there what its thread has put.
The rows of all tensors follow each other without a gap, and the gradient may be written over the logits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common.arguments import Float32, Int32, Int64, Rows, Vector, kernel
from .common.cross_entropy_terms import (
    assert_inside,
    coefficients,
    cross_entropy_term,
    gradient_of,
    row_loss,
    store_moments,
    sum_of_losses,
    target_of,
    weights_of,
)
from .common.early_start import await_previous
from .common.gathered_ptx import region_bytes
from .common.gathered_rows import (
    await_gathered,
    await_threads,
    columns_of_thread,
    declare_regions,
    element_of,
    fetch,
    gather,
    max_of,
    max_over_lanes,
    piece_of,
    put,
    puts_column,
    scatter,
    step_of,
    sum_of,
    sum_over_lanes,
)
from .common.logits import capped, capped_with_slope, logsumexp, reference_of, rounding_residual, weigh
from .common.numerics import LOWEST, exp2_affine, exp2_fma, over_unit


@triton.jit
def _targets(
    target_ptr, first_row, n_rows, ignore_index, columns, EACH: tl.constexpr, LANES: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """The targets of each thread's rows, int64.  # EACH x [THREADS]"""
    found = ()
    for k in tl.static_range(EACH):
        row = first_row + tl.arange(0, THREADS) // LANES + k * (THREADS // LANES)
        found = found + (target_of(row, n_rows, target_ptr, ignore_index, columns)[0],)
    return found


@triton.jit
def _inside(target, ignore_index, columns):
    """Whether a row's target counts, as `target_of` has it: asked again, so that no register holds it."""
    return (target != ignore_index) & (target >= 0) & (target < columns)


@triton.jit
def _rows_of_thread(
    x_ptr, first, n_left, column, columns, targets, ignore_index,
    EACH: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr,
    UNPREDICATED: tl.constexpr, RUNS: tl.constexpr, THREADS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """(the columns of each thread's rows, their targets' logits), float32.  # tiles of [THREADS]"""
    x, x_targets = (), ()
    for k in tl.static_range(EACH):
        row = tl.arange(0, THREADS) // LANES + k * (THREADS // LANES)
        exists = row < n_left
        for c in tl.static_range(CHUNKS):
            x = x + fetch(
                x_ptr, first, row, column, columns, exists, c, 0, step_of(LANES, VEC, RUNS), VEC, UNPREDICATED,
                "-inf", PTX,
            )  # fmt: skip
        counts = _inside(targets[k], ignore_index, columns)
        x_targets = x_targets + (element_of(x_ptr, first, row, targets[k], columns, counts & exists, PTX),)
    return x, x_targets


@triton.jit
def _moments(x, START: tl.constexpr, HELD: tl.constexpr, cap, LANES: tl.constexpr, SOFTCAP: tl.constexpr,
             FUSED: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """(row_max, row_sum, each column's exponential without the correction of `exp2_affine`).  # tiles of [THREADS]"""
    # softcap is monotonic: the largest logit gives the largest z
    m = tl.maximum(capped(max_over_lanes(max_of(x, START, HELD), LANES, PTX), cap, SOFTCAP), LOWEST)
    base, shift, _ = exp2_affine(m, FUSED)
    exps = ()
    for i in tl.static_range(HELD):
        exps = exps + (exp2_fma(capped(x[START + i], cap, SOFTCAP), base, shift, FUSED),)
    s = sum_over_lanes(sum_of(exps, 0, HELD), LANES, PTX)
    if FUSED:
        s = over_unit(s, exp2_fma(m, base, shift, FUSED))
    return m, s, exps


@triton.jit
def _loss(
    x, m, s, x_target, w_target, w_sum, column, columns, weight_ptr, cap, smoothing, z_loss, START: tl.constexpr,
    LANES: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr, RUNS: tl.constexpr, WEIGHTED: tl.constexpr,
    SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """(each row's loss, its logsumexp).  # [THREADS]"""
    lse = logsumexp(m, s)
    residual = rounding_residual(lse, m, s)
    reference, wz_sum = 0.0, 0.0
    if SMOOTH:
        reference = reference_of(m)
        terms = ()
        for c in tl.static_range(CHUNKS):
            for i in tl.static_range(VEC):
                z = capped(x[START + c * VEC + i], cap, SOFTCAP)
                at = column + c * step_of(LANES, VEC, RUNS) + i
                terms = terms + (weigh(z, reference, at, at < columns, weight_ptr, WEIGHTED),)
        wz_sum = sum_over_lanes(sum_of(terms, 0, CHUNKS * VEC), LANES, PTX)
    nll = lse - capped(x_target, cap, SOFTCAP) + residual
    loss = row_loss(nll, lse, residual, w_target, w_sum, wz_sum, reference, smoothing, columns, z_loss, SMOOTH)
    return loss, lse


@triton.jit
def _put_gradient(
    x, exps, START: tl.constexpr, x_target, m, s, lse, g, w_target, w_sum, dx_ptr, first, row, column, columns, target,
    exists, counts, weight_ptr, cap, smoothing, z_loss, LANES: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr,
    UNPREDICATED: tl.constexpr, RUNS: tl.constexpr, THREADS: tl.constexpr, WEIGHTED: tl.constexpr,
    SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, FUSED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Puts the gradient of each thread's columns, and then that of the target in its place.

    exps: of these columns, as `exp2_fma` has them. m, s, lse: the row's. g: upstream, over the count if there is one.
    """
    a, b, c = coefficients(tl.where(counts, g, 0.0), lse, w_target, w_sum, smoothing, columns, z_loss, SMOOTH)
    base, shift, by = exp2_affine(m, FUSED)
    a = tl.where(counts, a * by / s, 0.0)
    STEP: tl.constexpr = step_of(LANES, VEC, RUNS)
    for j in tl.static_range(CHUNKS):
        dx = ()
        for i in tl.static_range(VEC):
            x_here, slope = x[START + j * VEC + i], 1.0
            if SOFTCAP:
                _, slope = capped_with_slope(x_here, cap)
            at = column + (j * STEP + i)
            of_logit = gradient_of(
                exps[j * VEC + i], slope, x_here, 0.0, at, a, c, weight_ptr, exists & (at < columns), WEIGHTED, SMOOTH,
                SOFTCAP,
            )  # fmt: skip
            dx = dx + (tl.where(counts, of_logit, 0.0),)
        put(dx, dx_ptr, first, row, column, columns, exists, j, 0, STEP, VEC, UNPREDICATED, PTX)
    place = target.to(tl.int32)
    dx_target = cross_entropy_term(
        x_target, b, place, base, shift, a, c, weight_ptr, cap, counts, WEIGHTED, SMOOTH, SOFTCAP, FUSED
    )
    writes = counts & puts_column(place, THREADS, LANES, VEC, CHUNKS, RUNS)
    put((dx_target,), dx_ptr, first, row, place, columns, writes, 0, 0, 1, 1, 0, PTX)


@kernel(asserts=True)
def cross_entropy_gathered(
    x_ptr: Rows,  # aligned to VEC elements, as dx_ptr, which may be x_ptr
    dx_ptr: Rows,
    target_ptr: Vector,  # [n_rows] int64
    weight_ptr: Vector,  # [n_cols] float32, where WEIGHTED
    weight_facts_ptr: Vector,  # unused: there are no weights with smoothing
    count_ptr: Vector,  # [2] float32: the loss's denominator, where MEAN; takes `upstream`, where KEEPS_UPSTREAM
    loss_ptr: Vector,  # [n_rows] float32; a sum for each program, where SUM
    moments_ptr: Vector,  # [n_rows, 2] float32
    n_rows: Int64,
    n_cols: Int32,  # in units of VEC, as strides, which are n_cols
    x_stride: Int64, dx_stride: Int64,
    phase: Int32,  # unused: a pointer tells its own
    ignore_index: Int64,
    smoothing: Float32, cap: Float32, z_loss: Float32,
    upstream: Float32,  # the upstream gradient that the gradient is for
    MEAN: tl.constexpr, KEEPS_UPSTREAM: tl.constexpr,
    SUM: tl.constexpr,  # 0: each row's loss is written; 1: their sum; 2: their sum over the count, with MEAN
    WAITS: tl.constexpr,  # the kernel that writes the count may still run: this one started before its end
    WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, ROWS: tl.constexpr, VECTORS: tl.constexpr,
    VEC: tl.constexpr, CHUNKS: tl.constexpr,
    UNPREDICATED: tl.constexpr,  # chunks that all threads of a row fill
    RUNS: tl.constexpr,  # the chunks of a thread follow each other
    THREADS: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
    TRIGGER: tl.constexpr,  # whether the next kernel may start now and wait for this one
):  # fmt: skip
    tl.static_assert(not (WEIGHTED and SMOOTH), "weights and smoothing together have a kernel of their own")
    MOST: tl.constexpr = ROWS * CHUNKS * VECTORS * VEC
    EACH: tl.constexpr = ROWS * VECTORS // THREADS
    HELD: tl.constexpr = CHUNKS * VEC
    declare_regions(region_bytes(MOST, x_ptr.dtype.element_ty.primitive_bitwidth // 8), PTX)
    first_row, columns, first, n = piece_of(tl.program_id(0), n_rows, n_cols, ROWS, VEC)
    column = columns_of_thread(THREADS, VECTORS, VEC, CHUNKS, RUNS)
    await_previous(EARLY and not WAITS)
    if TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    gather(x_ptr, first, n, MOST, 0, THREADS, PTX)
    targets = _targets(target_ptr, first_row, n_rows, ignore_index, columns, EACH, VECTORS, THREADS)
    await_gathered(PTX)
    x, x_targets = _rows_of_thread(
        x_ptr, first, n_rows - first_row, column, columns, targets, ignore_index, EACH, VECTORS, VEC, CHUNKS,
        UNPREDICATED, RUNS, THREADS, PTX,
    )  # fmt: skip
    await_threads(PTX)
    if WAITS:
        tl.extra.cuda.gdc_wait()
    g = upstream
    if MEAN:
        g = upstream / tl.load(count_ptr)

    FUSED: tl.constexpr = PTX and x_ptr.dtype.element_ty.primitive_bitwidth == 16
    losses = tl.zeros([THREADS], tl.float32)
    for k in tl.static_range(EACH):
        lane = tl.arange(0, THREADS) % VECTORS
        row = tl.arange(0, THREADS) // VECTORS + k * (THREADS // VECTORS)
        exists = row < n_rows - first_row
        counts = _inside(targets[k], ignore_index, columns) & exists
        w_target, _ = weights_of(targets[k], counts, columns, weight_ptr, weight_facts_ptr, WEIGHTED, SMOOTH)
        m, s, exps = _moments(x, k * HELD, HELD, cap, VECTORS, SOFTCAP, FUSED, PTX)
        loss, lse = _loss(
            x, m, s, x_targets[k], w_target, columns, column, columns, weight_ptr, cap, smoothing, z_loss, k * HELD,
            VECTORS, VEC, CHUNKS, RUNS, False, SMOOTH, SOFTCAP, PTX,
        )  # fmt: skip
        writes = exists & (lane == 0)
        if SUM == 0:
            tl.store(loss_ptr + first_row + row, tl.where(counts, loss, 0.0), mask=writes)
        losses += tl.where(counts & writes, loss, 0.0)
        store_moments(moments_ptr, first_row + row, m, s, writes)

        _put_gradient(
            x, exps, k * HELD, x_targets[k], m, s, lse, g, w_target, columns, dx_ptr, first, row, column, columns,
            targets[k], exists, counts, weight_ptr, cap, smoothing, z_loss, VECTORS, VEC, CHUNKS, UNPREDICATED, RUNS,
            THREADS, False, SMOOTH, SOFTCAP, FUSED, PTX,
        )  # fmt: skip
    if KEEPS_UPSTREAM:
        tl.store(count_ptr + 1, upstream, mask=first_row == 0)
    scatter(dx_ptr, first, n, MOST, 0, THREADS, False, PTX)
    if SUM > 0:
        tl.store(loss_ptr + tl.program_id(0), sum_of_losses(losses, count_ptr, SUM == 2))
    for k in tl.static_range(EACH):
        assert_inside(targets[k], ignore_index, columns)


@kernel(asserts=True)
def cross_entropy_forward_gathered(
    x_ptr: Rows,  # aligned to VEC elements
    target_ptr: Vector,  # [n_rows] int64
    weight_ptr: Vector,  # [n_cols] float32, where WEIGHTED
    weight_facts_ptr: Vector,  # [2] float32, where WEIGHTED and SMOOTH
    loss_ptr: Vector,  # [n_rows] float32
    moments_ptr: Vector,  # [n_rows, 2] float32
    n_rows: Int64,
    n_cols: Int32,  # in units of VEC, as x_stride, which is n_cols
    x_stride: Int64,
    phase: Int32,  # unused: a pointer tells its own
    ignore_index: Int64,
    smoothing: Float32, cap: Float32, z_loss: Float32,
    WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, ROWS: tl.constexpr, VECTORS: tl.constexpr,
    VEC: tl.constexpr, CHUNKS: tl.constexpr, UNPREDICATED: tl.constexpr, RUNS: tl.constexpr, THREADS: tl.constexpr,
    PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    MOST: tl.constexpr = ROWS * CHUNKS * VECTORS * VEC
    EACH: tl.constexpr = ROWS * VECTORS // THREADS
    HELD: tl.constexpr = CHUNKS * VEC
    declare_regions(region_bytes(MOST, x_ptr.dtype.element_ty.primitive_bitwidth // 8), PTX)
    first_row, columns, first, n = piece_of(tl.program_id(0), n_rows, n_cols, ROWS, VEC)
    column = columns_of_thread(THREADS, VECTORS, VEC, CHUNKS, RUNS)
    await_previous(EARLY)
    gather(x_ptr, first, n, MOST, 0, THREADS, PTX)
    targets = _targets(target_ptr, first_row, n_rows, ignore_index, columns, EACH, VECTORS, THREADS)
    await_gathered(PTX)
    x, x_targets = _rows_of_thread(
        x_ptr, first, n_rows - first_row, column, columns, targets, ignore_index, EACH, VECTORS, VEC, CHUNKS,
        UNPREDICATED, RUNS, THREADS, PTX,
    )  # fmt: skip

    FUSED: tl.constexpr = PTX and x_ptr.dtype.element_ty.primitive_bitwidth == 16
    for k in tl.static_range(EACH):
        row = tl.arange(0, THREADS) // VECTORS + k * (THREADS // VECTORS)
        exists = row < n_rows - first_row
        counts = _inside(targets[k], ignore_index, columns) & exists
        w_target, w_sum = weights_of(targets[k], counts, columns, weight_ptr, weight_facts_ptr, WEIGHTED, SMOOTH)
        m, s, _ = _moments(x, k * HELD, HELD, cap, VECTORS, SOFTCAP, FUSED, PTX)
        loss, _ = _loss(
            x, m, s, x_targets[k], w_target, w_sum, column, columns, weight_ptr, cap, smoothing, z_loss, k * HELD,
            VECTORS, VEC, CHUNKS, RUNS, WEIGHTED, SMOOTH, SOFTCAP, PTX,
        )  # fmt: skip
        writes = exists & (tl.arange(0, THREADS) % VECTORS == 0)
        tl.store(loss_ptr + first_row + row, tl.where(counts, loss, 0.0), mask=writes)
        store_moments(moments_ptr, first_row + row, m, s, writes)
    for k in tl.static_range(EACH):
        assert_inside(targets[k], ignore_index, columns)


@kernel()
def cross_entropy_backward_gathered(
    x_ptr: Rows,  # aligned to VEC elements, as dx_ptr, which may be x_ptr
    dx_ptr: Rows,
    target_ptr: Vector,  # [n_rows] int64
    weight_ptr: Vector,  # [n_cols] float32, where WEIGHTED
    weight_facts_ptr: Vector,  # [2] float32, where WEIGHTED and SMOOTH
    count_ptr: Vector,  # [1] float32, where MEAN
    moments_ptr: Vector,  # [n_rows, 2] float32
    g_ptr: Vector,  # upstream gradient: [1] with g_stride 0, or [n_rows] with g_stride 1; float32
    written_ptr: Vector, last_ptr: Vector,  # unused: dx holds no gradient yet
    n_rows: Int64,
    n_cols: Int32,  # in units of VEC, as strides, which are n_cols
    x_stride: Int64, dx_stride: Int64,
    phase: Int32,  # unused: a pointer tells its own
    ignore_index: Int64, g_stride: Int64,
    start: Int64,  # unused: these are all columns
    smoothing: Float32, cap: Float32, z_loss: Float32,
    MEAN: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, ROWS: tl.constexpr,
    VECTORS: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr, UNPREDICATED: tl.constexpr, RUNS: tl.constexpr,
    THREADS: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The gradient from known (row_max, row_sum), with the operations of `cross_entropy_gathered`."""
    MOST: tl.constexpr = ROWS * CHUNKS * VECTORS * VEC
    EACH: tl.constexpr = ROWS * VECTORS // THREADS
    HELD: tl.constexpr = CHUNKS * VEC
    declare_regions(region_bytes(MOST, x_ptr.dtype.element_ty.primitive_bitwidth // 8), PTX)
    first_row, columns, first, n = piece_of(tl.program_id(0), n_rows, n_cols, ROWS, VEC)
    column = columns_of_thread(THREADS, VECTORS, VEC, CHUNKS, RUNS)
    await_previous(EARLY)
    gather(x_ptr, first, n, MOST, 0, THREADS, PTX)
    targets = _targets(target_ptr, first_row, n_rows, ignore_index, columns, EACH, VECTORS, THREADS)
    maxima, sums, upstreams = (), (), ()
    for k in tl.static_range(EACH):
        at = first_row + tl.arange(0, THREADS) // VECTORS + k * (THREADS // VECTORS)
        maxima = maxima + (tl.load(moments_ptr + 2 * at, mask=at < n_rows, other=0.0),)
        sums = sums + (tl.load(moments_ptr + 2 * at + 1, mask=at < n_rows, other=1.0),)
        upstreams = upstreams + (tl.load(g_ptr + at * g_stride, mask=at < n_rows, other=1.0),)
    await_gathered(PTX)
    x, x_targets = _rows_of_thread(
        x_ptr, first, n_rows - first_row, column, columns, targets, ignore_index, EACH, VECTORS, VEC, CHUNKS,
        UNPREDICATED, RUNS, THREADS, PTX,
    )  # fmt: skip
    await_threads(PTX)

    FUSED: tl.constexpr = PTX and x_ptr.dtype.element_ty.primitive_bitwidth == 16
    for k in tl.static_range(EACH):
        row = tl.arange(0, THREADS) // VECTORS + k * (THREADS // VECTORS)
        exists = row < n_rows - first_row
        counts = _inside(targets[k], ignore_index, columns) & exists
        w_target, w_sum = weights_of(targets[k], counts, columns, weight_ptr, weight_facts_ptr, WEIGHTED, SMOOTH)
        g = upstreams[k]
        if MEAN:
            g = g / tl.load(count_ptr)
        m, s = maxima[k], sums[k]
        base, shift, _ = exp2_affine(m, FUSED)
        exps = ()
        for i in tl.static_range(HELD):
            exps = exps + (exp2_fma(capped(x[k * HELD + i], cap, SOFTCAP), base, shift, FUSED),)
        _put_gradient(
            x, exps, k * HELD, x_targets[k], m, s, logsumexp(m, s), g, w_target, w_sum, dx_ptr, first, row, column,
            columns, targets[k], exists, counts, weight_ptr, cap, smoothing, z_loss, VECTORS, VEC, CHUNKS,
            UNPREDICATED, RUNS, THREADS, WEIGHTED, SMOOTH, SOFTCAP, FUSED, PTX,
        )  # fmt: skip
    scatter(dx_ptr, first, n, MOST, 0, THREADS, False, PTX)
