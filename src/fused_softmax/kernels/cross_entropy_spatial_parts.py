"""Cross-entropy of (outer, n_cols, inner) where the columns do not fit on chip: the logits are read twice.

    reduce:  a part's  m = max(z), s = sum(exp(z - m)), and where SMOOTH t = sum(w*(z - reference))
    merge:   the position's (m, s, t) from those of its parts, and its loss
    finish:  dx, as in `cross_entropy_backward`

The formulas are those of `cross_entropy`; the parts are those of `softmax_spatial_parts`. The gradient may be written
over the logits: a thread of the finish reads what it overwrites, and the target's logit is read by the merge.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common.arguments import Float32, Int32, Int64, Rows, Vector, kernel
from .common.cross_entropy_terms import (
    coefficients,
    cross_entropy_term,
    row_loss,
    sum_of_losses,
    targets_at,
    weights_of,
)
from .common.early_start import await_previous
from .common.logits import capped, logsumexp, probe, reference_of, rounding_residual, weigh
from .common.numerics import LOWEST, exp, exp2_affine, maximum, scaled, upcast
from .common.spatial_parts import last_first, load_step, numbers_at, part_of
from .common.spatial_tiles import columns_of_chunk, positions_of, store_tile, sum_over_columns, tile_at


@triton.jit
def reference_at(
    x_ptr, outer, x_outer, x_col, n_cols, first, exists, weight_facts_ptr, cap, WEIGHTED: tl.constexpr,
    SOFTCAP: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """The reference of the smoothed logits of each position.  # [1, 1, INNER]"""
    to_first = tile_at(x_ptr, outer, 0, x_outer, first, tl.zeros([1, 1, 1], tl.int32), INNER, VEC)
    x_probe = probe(to_first, x_col * VEC, n_cols, exists, weight_facts_ptr, WEIGHTED)
    return reference_of(capped(x_probe, cap, SOFTCAP))


@kernel()
def cross_entropy_spatial_reduce(
    x_ptr: Rows,
    max_ptr: Vector, sum_ptr: Vector,  # [outer, n_parts, inner] float32
    smooth_ptr: Vector,  # the same, where SMOOTH
    weight_ptr: Vector,  # [n_cols] float32, where WEIGHTED
    weight_facts_ptr: Vector,  # [2] float32, where WEIGHTED and SMOOTH
    n_cols: Int32,
    inner: Int64,  # inner and strides: in units of VEC
    n_blocks: Int32, n_parts: Int32,
    x_outer: Int64, x_col: Int64,
    ignore_index: Int64,
    smoothing: Float32, cap: Float32, z_loss: Float32,
    WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr,
    VEC: tl.constexpr, CHUNKS: tl.constexpr, INVARIANT: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_previous(EARLY)
    outer, part, block = part_of(n_blocks, n_parts)
    first, exists = positions_of(block, inner, INNER, VEC)
    column = columns_of_chunk(1, COLS)
    x_at = tile_at(x_ptr, outer, x_col, x_outer, first, column, INNER, VEC)
    reference = 0.0
    if SMOOTH:
        reference = reference_at(
            x_ptr, outer, x_outer, x_col, n_cols, first, exists, weight_facts_ptr, cap, WEIGHTED, SOFTCAP, INNER, VEC
        )
    m = tl.zeros([COLS, 1, INNER], tl.float32) + LOWEST
    s = tl.zeros([COLS, 1, INNER], tl.float32)
    t = tl.zeros([COLS, 1, INNER], tl.float32)
    for step in range(part, tl.cdiv(n_cols, CHUNKS * COLS), n_parts):
        start = step * (CHUNKS * COLS)
        x = load_step(x_at, start, x_col, column, n_cols, exists, -float("inf"), CHUNKS, COLS, VEC)
        top = x[0]
        for c in tl.static_range(1, CHUNKS):
            top = maximum(top, x[c], PTX)
        m_new = tl.maximum(m, capped(top, cap, SOFTCAP))
        of_step = tl.zeros_like(s)
        for c in tl.static_range(CHUNKS):
            z = capped(upcast(x[c], PTX), cap, SOFTCAP)
            of_step += exp(z - m_new)
            if SMOOTH:
                here = column + (start + c * COLS)
                t += weigh(z, reference, here, here < n_cols, weight_ptr, WEIGHTED)
        s = s * exp(m - m_new) + of_step
        m = m_new
    top = tl.max(m, 0)
    total = sum_over_columns(scaled(s, exp(m - top[None, :, :]), PTX), INVARIANT)
    to, here = numbers_at(outer * n_parts + part, inner, first, INNER, VEC)
    tl.store(max_ptr + to, top, mask=here)
    tl.store(sum_ptr + to, total, mask=here)
    if SMOOTH:
        tl.store(smooth_ptr + to, sum_over_columns(t, INVARIANT), mask=here)


@kernel(asserts=True)
def cross_entropy_spatial_merge(
    x_ptr: Rows,
    parts_max_ptr: Vector, parts_sum_ptr: Vector,  # [outer, n_parts, inner] float32
    parts_smooth_ptr: Vector,  # the same, where SMOOTH
    max_ptr: Vector, sum_ptr: Vector,  # [outer, inner] float32
    target_ptr: Vector,  # [outer, inner] int64; or fewer bits, as `prepare_spatial_targets` writes them
    weight_ptr: Vector,  # [n_cols] float32, where WEIGHTED
    weight_facts_ptr: Vector,  # [2] float32, where WEIGHTED and SMOOTH
    count_ptr: Vector,  # [1] float32, where MEAN: the loss's denominator
    loss_ptr: Vector,  # float32: [outer, inner] where LOSS is 1, a sum for each program where it is 2
    n_cols: Int32,
    inner: Int64,  # in elements
    n_blocks: Int32, n_parts: Int32,
    x_outer: Int64, x_col: Int64,
    ignore_index: Int64,
    smoothing: Float32, cap: Float32, z_loss: Float32,
    LOSS: tl.constexpr, MEAN: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr,
    COLS: tl.constexpr, INNER: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_previous(EARLY)
    outer, _, block = part_of(n_blocks, 1)
    first, exists = positions_of(block, inner, INNER, 1)
    part = columns_of_chunk(1, COLS)
    at = tile_at(parts_max_ptr, outer, inner, inner * n_parts, first, part, INNER, 1)
    to_sum = tile_at(parts_sum_ptr, outer, inner, inner * n_parts, first, part, INNER, 1)
    to_smooth = tile_at(parts_smooth_ptr, outer, inner, inner * n_parts, first, part, INNER, 1)
    m = tl.zeros([COLS, 1, INNER], tl.float32) + LOWEST
    s = tl.zeros([COLS, 1, INNER], tl.float32)
    t = tl.zeros([COLS, 1, INNER], tl.float32)
    for start in range(0, n_parts, COLS):
        inside = exists & (part < n_parts - start)
        m_part = tl.load(at + start * inner, mask=inside, other=LOWEST)
        s_part = tl.load(to_sum + start * inner, mask=inside, other=0.0)
        if SMOOTH:
            t += tl.load(to_smooth + start * inner, mask=inside, other=0.0)
        m_new = tl.maximum(m, m_part)
        s = s * exp(m - m_new) + s_part * exp(m_part - m_new)
        m = m_new
    top = tl.max(m, 0)
    total = sum_over_columns(s * exp(m - top[None, :, :]), True)
    to, here = numbers_at(outer, inner, first, INNER, 1)
    tl.store(max_ptr + to, top, mask=here)
    tl.store(sum_ptr + to, total, mask=here)
    if LOSS > 0:
        target = targets_at(target_ptr + to, here, ignore_index, n_cols)
        counts = target >= 0
        x_row = x_ptr + outer * x_outer + first + tl.arange(0, INNER)[None, :]
        x_target = tl.load(x_row + target.to(tl.int64) * x_col, mask=counts, other=0.0)
        w_target, w_sum = weights_of(target, counts, n_cols, weight_ptr, weight_facts_ptr, WEIGHTED, SMOOTH)
        reference, wz_sum = 0.0, 0.0
        if SMOOTH:
            x_probe = probe(x_row, x_col, n_cols, here, weight_facts_ptr, WEIGHTED)
            reference = reference_of(capped(x_probe, cap, SOFTCAP))
            wz_sum = sum_over_columns(t, True)
        lse = logsumexp(top, total, True)
        residual = rounding_residual(lse, top, total, True)
        nll = lse - capped(x_target, cap, SOFTCAP) + residual
        loss = row_loss(nll, lse, residual, w_target, w_sum, wz_sum, reference, smoothing, n_cols, z_loss, SMOOTH, True)
        loss = tl.where(counts, loss, 0.0)
        if LOSS == 1:
            tl.store(loss_ptr + to, loss, mask=here)
        else:
            tl.store(loss_ptr + tl.program_id(0), sum_of_losses(loss, count_ptr, MEAN))


@triton.jit
def step_of_gradient(
    index, n_programs, x_ptr, dx_ptr, max_ptr, sum_ptr, target_ptr, weight_ptr, weight_facts_ptr, count_ptr, g_ptr,
    n_cols, inner, n_blocks, n_steps, x_outer, x_col, dx_outer, dx_col, ignore_index, smoothing, cap, z_loss,
    UPSTREAM: tl.constexpr, MEAN: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr,
    COLS: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """dx of one step of columns; the last step first, which L2 may hold."""
    outer, step, block = last_first(index, n_programs, n_blocks, n_steps)
    first, exists = positions_of(block, inner, INNER, VEC)
    column = columns_of_chunk(1, COLS)
    x_at = tile_at(x_ptr, outer, x_col, x_outer, first, column, INNER, VEC)
    dx_at = tile_at(dx_ptr, outer, dx_col, dx_outer, first, column, INNER, VEC)
    start = step.to(tl.int64) * (CHUNKS * COLS)
    left = (n_cols - start).to(tl.int32)
    x = load_step(x_at, start, x_col, column, n_cols, exists, 0.0, CHUNKS, COLS, VEC)
    at, here = numbers_at(outer, inner, first, INNER, VEC)
    target = targets_at(target_ptr + at, here, ignore_index, n_cols)
    counts = target >= 0
    top = tl.load(max_ptr + at, mask=here, other=0.0)
    total = tl.load(sum_ptr + at, mask=here, other=1.0)
    w_target, w_sum = weights_of(target, counts, n_cols, weight_ptr, weight_facts_ptr, WEIGHTED, SMOOTH)
    g = 1.0
    if UPSTREAM == 1:
        g = tl.load(g_ptr)
    elif UPSTREAM == 2:
        g = tl.load(g_ptr + at, mask=here & counts, other=0.0)
    if MEAN:
        g = g / tl.load(count_ptr)
    FUSED: tl.constexpr = PTX and x_ptr.dtype.element_ty.primitive_bitwidth == 16
    lse = logsumexp(top, total, True)
    a, b, factor = coefficients(g, lse, w_target, w_sum, smoothing, n_cols, z_loss, SMOOTH, True)
    base, shift, by = exp2_affine(top, FUSED)
    a = (a * by / total)[None, :, :]
    b = (b + total * 0.0)[None, :, :]
    base, shift = base[None, :, :], shift[None, :, :]
    target = (target - start.to(tl.int32))[None, :, :]
    keep = counts[None, :, :]
    for c in tl.static_range(CHUNKS):
        here_b = tl.where(column + c * COLS == target, b, 0.0)
        dx = cross_entropy_term(
            upcast(x[c], PTX), here_b, column + (start + c * COLS), base, shift, a, factor, weight_ptr, cap,
            column < left - c * COLS, WEIGHTED, SMOOTH, SOFTCAP, FUSED,
        )  # fmt: skip
        dx = tl.where(keep, dx, 0.0)
        store_tile(dx_at + start * dx_col * VEC, dx, c, dx_col, column, left, exists, 0, COLS, VEC)


@kernel(asserts=True)
def cross_entropy_spatial_finish(
    x_ptr: Rows,
    dx_ptr: Rows,  # it may be x_ptr
    max_ptr: Vector, sum_ptr: Vector,  # [outer, inner] float32
    target_ptr: Vector,  # [outer, inner] int64; or fewer bits, as `prepare_spatial_targets` writes them
    weight_ptr: Vector,  # [n_cols] float32, where WEIGHTED
    weight_facts_ptr: Vector,  # [2] float32, where WEIGHTED and SMOOTH
    count_ptr: Vector,  # [1] float32, where MEAN: the loss's denominator
    g_ptr: Vector,  # the upstream gradient, float32: [1] where UPSTREAM is 1, [outer, inner] where it is 2
    n_outer: Int64,
    n_cols: Int32,
    inner: Int64,  # inner and strides: in units of VEC
    n_blocks: Int32,
    n_steps: Int32,  # of columns
    x_outer: Int64, x_col: Int64, dx_outer: Int64, dx_col: Int64,
    ignore_index: Int64,
    smoothing: Float32, cap: Float32, z_loss: Float32,
    UPSTREAM: tl.constexpr,
    UNLESS_ONE: tl.constexpr,  # dx already holds the gradient for an upstream gradient of 1
    MEAN: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, COLS: tl.constexpr,
    INNER: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_previous(EARLY)
    index = tl.program_id(0).to(tl.int64)
    n_programs = n_outer * n_blocks * n_steps
    if UNLESS_ONE:  # few programs look at g, and find nothing to do
        if tl.load(g_ptr) != 1.0:
            while index < n_programs:
                step_of_gradient(
                    index, n_programs, x_ptr, dx_ptr, max_ptr, sum_ptr, target_ptr, weight_ptr, weight_facts_ptr,
                    count_ptr, g_ptr, n_cols, inner, n_blocks, n_steps, x_outer, x_col, dx_outer, dx_col, ignore_index,
                    smoothing, cap, z_loss, UPSTREAM, MEAN, WEIGHTED, SMOOTH, SOFTCAP, COLS, INNER, VEC, CHUNKS, PTX,
                )  # fmt: skip
                index += tl.num_programs(0)
    else:
        step_of_gradient(
            index, n_programs, x_ptr, dx_ptr, max_ptr, sum_ptr, target_ptr, weight_ptr, weight_facts_ptr, count_ptr,
            g_ptr, n_cols, inner, n_blocks, n_steps, x_outer, x_col, dx_outer, dx_col, ignore_index, smoothing, cap,
            z_loss, UPSTREAM, MEAN, WEIGHTED, SMOOTH, SOFTCAP, COLS, INNER, VEC, CHUNKS, PTX,
        )  # fmt: skip
