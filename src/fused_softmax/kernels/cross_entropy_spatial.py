"""Cross-entropy of (outer, n_cols, inner) as it lies, such as images (N, C, H, W): loss and gradient in one pass.

    lse = log(sum(exp(z)));  loss as in `cross_entropy`, dx as in `cross_entropy_backward`

Each of the outer x inner positions has a target. The tiles are those of `softmax_spatial`: a program holds all columns
of INNER positions. It reads each logit once and writes each gradient once. A column is compared with the targets, so
that a target needs no second, scattered store. The gradient may be written over the logits. A position that
does not count has a gradient of zeros, whatever it holds.

A mean needs the number of targets before the first gradient. `prepare_spatial_targets` counts them, and writes them
again in fewer bits, which L2 still holds when this kernel reads them.

With one program for the columns, the maximum is known before the first exponential. The second pass then takes the
factors of the first. Where threads hold few whole columns, it takes their exponentials (not RECOMPUTE).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common.arguments import Float32, Int32, Int64, Rows, Vector, kernel
from .common.cross_entropy_terms import (
    coefficients,
    cross_entropy_term,
    gradient_of,
    kept_or_zero,
    row_loss,
    sum_of_losses,
    targets_at,
    upcast_kept,
)
from .common.early_start import await_previous
from .common.logits import capped, capped_with_slope, logsumexp, probe, reference_of, rounding_residual, weigh
from .common.numerics import (
    LOWEST,
    exp,
    exp2_affine,
    exp2_fma,
    maximum,
    over_unit,
    reciprocal_of_sum,
    scaled,
    upcast,
)
from .common.spatial_cluster import (
    declare_exchange,
    exchange_max_sum,
    exchange_with_sums,
    renew_exchange,
    share_of,
)
from .common.spatial_tiles import (
    GROUP,
    load_places,
    outer_of,
    outer_to_read,
    places_of,
    positions_of,
    sum_over_columns,
    tile_at,
)
from .common.staggered_start import stagger
from .common.tiles import READS


@triton.jit
def write_group(
    x, exps, dx_at, START: tl.constexpr, END: tl.constexpr, column, target, counts, exists, b, base, shift, a, factor,
    weight_ptr, cap, n_cols, dx_col, selector,
    WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, FUSED: tl.constexpr,
    UNPREDICATED: tl.constexpr, STEP: tl.constexpr, VEC: tl.constexpr, RECOMPUTE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Writes dx of chunks START .. END-1, at the pointers to chunk START. exps: of all chunks, where not RECOMPUTE."""
    for c in tl.static_range(START, END):
        b_here = tl.where(column + c * STEP == target, b, 0.0)
        here, inside = column + c * STEP, column < n_cols - c * STEP
        if RECOMPUTE:
            dx = cross_entropy_term(
                upcast_kept(x[c], selector, PTX), b_here, here, base, shift, a, factor, weight_ptr, cap, inside,
                WEIGHTED, SMOOTH, SOFTCAP, FUSED,
            )  # fmt: skip
        else:
            x_c, slope = upcast(x[c], PTX), 1.0
            if SOFTCAP:
                _, slope = capped_with_slope(x_c, cap)
            dx = gradient_of(
                exps[c], slope, x_c, b_here, here, a, factor, weight_ptr, inside, WEIGHTED, SMOOTH, SOFTCAP
            )
        if SMOOTH or not RECOMPUTE:
            dx = tl.where(counts, dx, 0.0)
        dx = dx.to(dx_at.dtype.element_ty)
        if c < UNPREDICATED:
            tl.store(dx_at, dx, mask=exists)
        else:
            tl.store(dx_at, dx, mask=exists & (column < n_cols - c * STEP))
        dx_at += (STEP * VEC) * dx_col


@triton.jit
def block_of_losses(
    index, x_ptr, dx_ptr, target_ptr, weight_ptr, weight_facts_ptr, count_ptr, g_ptr, loss_ptr, n_outer, n_cols, inner,
    n_blocks, x_outer, x_col, dx_outer, dx_col, width, x_row, ignore_index, smoothing, cap, z_loss,
    LOSS: tl.constexpr, GRADIENT: tl.constexpr, INPLACE: tl.constexpr, UPSTREAM: tl.constexpr, MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, CROPPED: tl.constexpr, WAITS: tl.constexpr,
    OUTERS: tl.constexpr, CTAS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr,
    CHUNKS: tl.constexpr, UNPREDICATED: tl.constexpr, RECOMPUTE: tl.constexpr, INVARIANT: tl.constexpr,
    THREADS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The loss and the gradient of block `index // CTAS` of positions."""
    tl.static_assert(RECOMPUTE or CTAS == 1, "the CTAs of a cluster keep no exponentials")
    pid, column = share_of(index, CTAS, COLS, PTX)
    leads = True  # the CTA that reads the target's logit, and writes the loss
    if CTAS > 1 and PTX:
        leads = index % CTAS == 0
    STEP: tl.constexpr = CTAS * COLS  # columns of a chunk
    outer, is_outer = outer_of(pid // n_blocks, n_outer, OUTERS)
    first, exists = positions_of(pid % n_blocks, inner, INNER, VEC)
    if OUTERS > 1:
        exists = exists & is_outer
    place = places_of(first, inner, width, x_row, CROPPED, INNER, VEC)
    here = outer_to_read(outer, n_outer, OUTERS)
    x_start = x_ptr + (here * x_outer + first) * VEC + place  # column 0 of each position
    at = (outer * inner + first) * VEC + tl.arange(0, INNER)[None, None, :]  # [1, OUTERS, INNER]

    x_at = x_start + column.to(tl.int64) * x_col * VEC
    x = load_places(x_at, (STEP * VEC) * x_col, column, n_cols, -float("inf"), CHUNKS, UNPREDICATED, STEP, READS)
    if WAITS:  # the logits are on their way
        tl.extra.cuda.gdc_wait()
    # The threads of column 0 read the targets, and a reduction gives them to the others. A tensor without columns
    # would have a layout of its own, and each chunk would be converted to it through shared memory.
    own = tl.arange(0, COLS)[:, None, None]
    reads = exists & (own == 0)  # [COLS, OUTERS, INNER]
    target = targets_at(target_ptr + at + own * 0, reads, ignore_index, n_cols)
    w_target = 1.0
    if WEIGHTED:
        w_target = tl.sum(tl.load(weight_ptr + target, mask=target >= 0, other=0.0), 0)[None, :, :]
    target = tl.max(target, 0)[None, :, :]
    counts = target >= 0
    FROM_TILE: tl.constexpr = INPLACE or not RECOMPUTE  # the target's logit is taken from the tile
    if LOSS > 0 and not FROM_TILE:
        to_target = x_start + target.to(tl.int64) * x_col * VEC
        x_target = tl.load(to_target, mask=counts & leads, other=0.0).to(tl.float32)
    reference = 0.0
    if SMOOTH and CTAS > 1:
        x_probe = probe(x_start, x_col * VEC, n_cols, exists, weight_facts_ptr, WEIGHTED)
        reference = reference_of(capped(x_probe, cap, SOFTCAP))
    if WEIGHTED and SMOOTH:
        w_sum = tl.load(weight_facts_ptr)
    else:
        w_sum = n_cols

    # softcap is monotonic: the largest logit gives the largest z
    m = x[0]
    for c in tl.static_range(1, CHUNKS):
        m = maximum(m, x[c], PTX)
    m = tl.maximum(capped(m, cap, SOFTCAP), LOWEST)
    # the exponent of a 16-bit logit is one multiply-add, but each position a factor, which few columns do without
    FUSED: tl.constexpr = PTX and RECOMPUTE and x_ptr.dtype.element_ty.primitive_bitwidth == 16
    AFFINE: tl.constexpr = FUSED and not SOFTCAP
    ALONE: tl.constexpr = CTAS == 1
    if ALONE:
        m = tl.max(m, 0)[None, :, :]
        if SMOOTH:
            reference = reference_of(m)
    base, shift, _ = exp2_affine(m, AFFINE)
    s = tl.zeros(x[0].shape, tl.float32)
    t = tl.zeros(x[0].shape, tl.float32)
    x_targets = tl.zeros(x[0].shape, tl.float32)
    exps = ()
    for c in tl.static_range(CHUNKS):
        x_c = upcast(x[c], PTX, RECOMPUTE)
        z = capped(x_c, cap, SOFTCAP)
        exps = exps + (exp2_fma(z, base, shift, AFFINE),)
        s += exps[c]
        if LOSS > 0 and FROM_TILE:
            x_targets = tl.where(column + c * STEP == target, x_c, x_targets)
        if LOSS > 0 and SMOOTH:
            t += weigh(z, reference, column + c * STEP, column < n_cols - c * STEP, weight_ptr, WEIGHTED)
    if AFFINE:
        # the largest logit's own term, which is not exactly 1. The sum over it is exact where no other logit counts, so
        # that a sure prediction has a loss of 0
        unit = exp2_fma(m, base, shift, AFFINE)
    if ALONE:
        top = tl.reshape(m, (m.shape[1], m.shape[2]))
        found = sum_over_columns(s, INVARIANT)
        total = found
        if AFFINE:
            total = over_unit(found, tl.reshape(unit, (m.shape[1], m.shape[2])))
    else:
        top = tl.max(m, 0)
        if AFFINE:
            s = over_unit(s, unit)
        total = sum_over_columns(scaled(s, exp(m - top[None, :, :]), PTX), INVARIANT)
    wz_sum = 0.0
    if CTAS > 1 and LOSS > 0 and (SMOOTH or INPLACE):
        top, total, wz_sum, x_found = exchange_with_sums(
            top, total, sum_over_columns(t, INVARIANT), tl.sum(x_targets, 0), CTAS, THREADS, PTX
        )
        wz_sum = wz_sum[None, :, :]
        if INPLACE:
            x_target = x_found[None, :, :]
    else:
        top, total = exchange_max_sum(top, total, CTAS, THREADS, PTX)
        if LOSS > 0 and SMOOTH:
            wz_sum = sum_over_columns(t, INVARIANT)[None, :, :]
        if LOSS > 0 and FROM_TILE:  # one column at most is the target's, and all others are 0
            x_target = tl.sum(x_targets, 0)[None, :, :]
    top, total = top[None, :, :], total[None, :, :]
    lse = logsumexp(top, total, True)

    if LOSS > 0:
        residual = rounding_residual(lse, top, total, True)
        nll = lse - capped(x_target, cap, SOFTCAP) + residual
        loss = row_loss(nll, lse, residual, w_target, w_sum, wz_sum, reference, smoothing, n_cols, z_loss, SMOOTH, True)
        loss = tl.where(counts, loss, 0.0)
        if LOSS == 1:
            tl.store(loss_ptr + at, loss, mask=exists & leads)
        else:
            tl.store(loss_ptr + pid, sum_of_losses(loss, count_ptr, MEAN), mask=leads)

    if GRADIENT:
        g = 1.0
        if UPSTREAM == 1:
            g = tl.load(g_ptr)
        elif UPSTREAM == 2:
            g = tl.sum(tl.load(g_ptr + at + own * 0, mask=reads & counts, other=0.0), 0)[None, :, :]
        if MEAN:
            g = g / tl.load(count_ptr)
        # a position that does not count: logits of 0, and factors of 0
        a, b, factor = coefficients(g, lse, w_target, w_sum, smoothing, n_cols, z_loss, SMOOTH, True)
        if ALONE and AFFINE:  # as in the first pass
            shift = tl.where(counts, shift, 0.0)
            a = tl.where(counts, a * reciprocal_of_sum(found, PTX, PTX)[None, :, :], 0.0)
        else:
            base, shift, by = exp2_affine(tl.where(counts, top, 0.0), FUSED)
            a = tl.where(counts, a * by * reciprocal_of_sum(total, PTX, PTX), 0.0)
        selector = kept_or_zero(counts)
        if INPLACE:
            dx_at = dx_ptr + (here * dx_outer + first) * VEC + place + column.to(tl.int64) * dx_col * VEC
        else:
            dx_at = tile_at(dx_ptr, outer, dx_col, dx_outer, first, column, INNER, VEC)
        for k in tl.static_range((CHUNKS + GROUP - 1) // GROUP):
            if n_cols > k * GROUP * STEP:  # always, which the compiler does not know
                write_group(
                    x, exps, dx_at + (k * GROUP * STEP * VEC) * dx_col, k * GROUP, min(CHUNKS, k * GROUP + GROUP),
                    column, target, counts, exists, b, base, shift, a, factor, weight_ptr, cap, n_cols, dx_col,
                    selector, WEIGHTED, SMOOTH, SOFTCAP, FUSED, UNPREDICATED, STEP, VEC, RECOMPUTE, PTX,
                )  # fmt: skip


@kernel(asserts=True, cta_programs=True)
def cross_entropy_spatial(
    x_ptr: Rows,
    dx_ptr: Rows,  # where GRADIENT; it may be x_ptr
    target_ptr: Vector,  # [outer, inner] int64; or fewer bits, as `prepare_spatial_targets` writes them
    weight_ptr: Vector,  # [n_cols] float32, where WEIGHTED
    weight_facts_ptr: Vector,  # [2] float32, where WEIGHTED and SMOOTH
    count_ptr: Vector,  # [1] float32, where MEAN: the loss's denominator
    g_ptr: Vector,  # the upstream gradient, float32: [1] where UPSTREAM is 1, [outer, inner] where it is 2
    loss_ptr: Vector,  # float32: [outer, inner] where LOSS is 1, a sum for each program where it is 2
    n_outer: Int64,
    n_cols: Int32,
    inner: Int64,  # inner and strides: in units of VEC
    n_blocks: Int32,
    x_outer: Int64, x_col: Int64, dx_outer: Int64, dx_col: Int64,
    width: Int32, x_row: Int64,  # where CROPPED: positions of a row, and from a row to the next
    ignore_index: Int64,
    smoothing: Float32, cap: Float32, z_loss: Float32,
    LOSS: tl.constexpr, GRADIENT: tl.constexpr,
    INPLACE: tl.constexpr,  # dx_ptr is x_ptr: a program must not read what another thread of it has overwritten
    UPSTREAM: tl.constexpr,
    UNLESS_ONE: tl.constexpr,  # dx already holds the gradient for an upstream gradient of 1
    MEAN: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr,
    CROPPED: tl.constexpr,  # the positions of x are rows of `width` that lie x_row apart; those of dx too where INPLACE
    WAITS: tl.constexpr,  # what prepares the targets may still run: this kernel started before its end
    TRIGGER: tl.constexpr,  # whether the next kernel may start now and wait for this one
    OUTERS: tl.constexpr, CTAS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr,
    CHUNKS: tl.constexpr, UNPREDICATED: tl.constexpr,
    RECOMPUTE: tl.constexpr,  # compute each exponential twice, and hold none; always on a cluster
    INVARIANT: tl.constexpr, THREADS: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr, STAGGER: tl.constexpr,
    FITTING: tl.constexpr,
):  # fmt: skip
    await_previous(EARLY and not WAITS)
    if TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    N_VALUES: tl.constexpr = 4 if LOSS > 0 and (SMOOTH or INPLACE) else 2
    declare_exchange(CTAS, N_VALUES, INNER, PTX)
    index = tl.program_id(0)
    if UNLESS_ONE:  # few programs look at g, and find nothing to do
        if tl.load(g_ptr) != 1.0:
            n_programs = tl.cdiv(n_outer, OUTERS) * n_blocks
            if PTX:
                n_programs *= CTAS
            while index < n_programs:
                block_of_losses(
                    index, x_ptr, dx_ptr, target_ptr, weight_ptr, weight_facts_ptr, count_ptr, g_ptr, loss_ptr, n_outer,
                    n_cols, inner, n_blocks, x_outer, x_col, dx_outer, dx_col, width, x_row, ignore_index, smoothing,
                    cap, z_loss, LOSS, GRADIENT, INPLACE, UPSTREAM, MEAN, WEIGHTED, SMOOTH, SOFTCAP, CROPPED, WAITS,
                    OUTERS, CTAS, COLS, INNER, VEC, CHUNKS, UNPREDICATED, RECOMPUTE, INVARIANT, THREADS, PTX,
                )  # fmt: skip
                renew_exchange(CTAS, N_VALUES, INNER, PTX)
                index += tl.num_programs(0)
    else:
        stagger(STAGGER, FITTING)
        block_of_losses(
            index, x_ptr, dx_ptr, target_ptr, weight_ptr, weight_facts_ptr, count_ptr, g_ptr, loss_ptr, n_outer, n_cols,
            inner, n_blocks, x_outer, x_col, dx_outer, dx_col, width, x_row, ignore_index, smoothing, cap, z_loss, LOSS,
            GRADIENT, INPLACE, UPSTREAM, MEAN, WEIGHTED, SMOOTH, SOFTCAP, CROPPED, WAITS, OUTERS, CTAS, COLS, INNER,
            VEC, CHUNKS, UNPREDICATED, RECOMPUTE, INVARIANT, THREADS, PTX,
        )  # fmt: skip
