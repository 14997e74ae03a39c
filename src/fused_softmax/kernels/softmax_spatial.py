"""softmax and log_softmax over a dimension that is not the last, and their gradients, where the columns stay on chip.

    m = max(x);  s = sum(exp(x - m));  y = exp(x - m) / s     or   y = (x - m) - log(s)
    d = sum(y*dy);  dx = y*(dy - d)                           or   d = sum(dy);  dx = dy - exp(y)*d

The tensor is (outer, n_cols, inner) with contiguous inner. A program holds CHUNKS x COLS columns of INNER positions. It
reads each once and writes each once. A thread reduces the columns that it holds, one of each chunk. Then the program
merges COLS columns. With COLS = 1 a thread holds whole columns, and nothing is merged.

Where CTAS > 1, the CTAs of a thread-block cluster share the columns, COLS of each chunk for each CTA, and merge their
numbers at last. The first SMEM_STAGED chunks (of a gradient: of dy) are in shared memory, not in registers. Chunks are
reduced in groups, while later ones are on their way (`spatial_moments`). Where STAGGER > 0, programs of a
multiprocessor start one after the other (`staggered_start`). The positions of a softmax's input may be those of a
cropped image, whose rows lie apart (CROPPED).
"""

from __future__ import annotations

import triton.language as tl

from .common.arguments import Int32, Int64, Rows, kernel
from .common.early_start import await_previous
from .common.numerics import LOWEST, exp, exp2_affine, exp2_fma, reciprocal_of_sum, scaled, upcast
from .common.softmax_terms import gradient, normalize
from .common.spatial_cluster import declare_exchange, exchange_max_sum, exchange_sum, share_of
from .common.spatial_moments import issue_loads, max_and_sum, sum_of_terms
from .common.spatial_staging import chunk_of, declare_staging, stage
from .common.spatial_tiles import (
    GROUP,
    load_places,
    load_tiles,
    near,
    outer_of,
    outer_to_read,
    owned_positions,
    positions_of,
    softmax_reads,
    store_tile,
    sum_over_columns,
    tile_at,
    tile_of_places,
)
from .common.staggered_start import stagger


@kernel(cta_programs=True)
def softmax_spatial(
    x_ptr: Rows, y_ptr: Rows,
    n_outer: Int64,
    n_cols: Int32,
    inner: Int64,  # inner and strides: in units of VEC
    n_blocks: Int32,  # of positions
    x_outer: Int64, x_col: Int64, y_outer: Int64, y_col: Int64,
    width: Int32, x_row: Int64,  # where CROPPED: positions of a row of x, and from a row to the next
    LOG: tl.constexpr,
    CROPPED: tl.constexpr,  # the positions of x are rows of `width` that lie x_row apart
    OUTERS: tl.constexpr, CTAS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr,
    VEC: tl.constexpr, CHUNKS: tl.constexpr, UNPREDICATED: tl.constexpr, SMEM_STAGED: tl.constexpr,
    OVERLAP: tl.constexpr, RECOMPUTE: tl.constexpr, INVARIANT: tl.constexpr, THREADS: tl.constexpr, PTX: tl.constexpr,
    EARLY: tl.constexpr, STAGGER: tl.constexpr, FITTING: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    declare_exchange(CTAS, 2, INNER, PTX)
    declare_staging(SMEM_STAGED, COLS, INNER, x_ptr.dtype.element_ty, PTX)
    pid, column = share_of(tl.program_id(0), CTAS, COLS, PTX)
    outer, is_outer = outer_of(pid // n_blocks, n_outer, OUTERS)
    block = pid % n_blocks
    first, exists = positions_of(block, inner, INNER, VEC, OVERLAP)
    if OUTERS > 1:
        exists = exists & is_outer
    here = outer_to_read(outer, n_outer, OUTERS)
    x_col, y_col = near(x_col, NEAR), near(y_col, NEAR)
    x_at = tile_of_places(x_ptr, here, x_col, x_outer, first, column, inner, width, x_row, CROPPED, INNER, VEC)
    y_at = tile_of_places(y_ptr, here, y_col, y_outer, first, column, inner, width, x_row, False, INNER, VEC)

    STEP: tl.constexpr = CTAS * COLS  # columns of a chunk
    FIRST: tl.constexpr = SMEM_STAGED if PTX else 0
    own = owned_positions(
        exists, outer, block, n_blocks, column, y_outer, y_col, first, STEP, INNER, VEC, OVERLAP,
        y_ptr.dtype.element_ty,
    )  # fmt: skip
    tl.static_assert(not CROPPED or SMEM_STAGED == 0, "a staged chunk is a run of memory")
    await_previous(EARLY)
    stagger(STAGGER, FITTING)
    stage(x_ptr, outer, x_col, x_outer, first, column, inner, SMEM_STAGED, STEP, COLS, INNER, VEC, PTX)
    POLICY: tl.constexpr = softmax_reads(x_ptr.dtype.element_ty, CHUNKS * STEP, INNER, SMEM_STAGED > 0)
    x = load_places(
        x_at, (STEP * VEC) * x_col, column, n_cols, -float("inf"), CHUNKS, UNPREDICATED, STEP, POLICY, FIRST
    )
    lowest = LOWEST
    if SMEM_STAGED > 0:
        lowest = issue_loads(PTX)
    m, s, exps = max_and_sum(x, CHUNKS, SMEM_STAGED, COLS, INNER, VEC, RECOMPUTE, PTX, lowest)

    ALONE: tl.constexpr = CTAS * COLS == 1  # a thread holds whole columns
    top = tl.max(m, 0)
    if not ALONE:
        # rounded before the sum: whether a product and a sum are fused depends on the layout
        s = scaled(s, exp(m - top[None, :, :]), PTX)
    total = sum_over_columns(s, INVARIANT)
    top, total = exchange_max_sum(top, total, CTAS, THREADS, PTX)
    top, total = top[None, :, :], total[None, :, :]

    FUSED: tl.constexpr = PTX and x_ptr.dtype.element_ty.primitive_bitwidth == 16 and y_ptr.dtype == x_ptr.dtype
    if LOG:
        by = total
    elif RECOMPUTE:
        base, shift, by = exp2_affine(top, FUSED)
        by = by * reciprocal_of_sum(total, FUSED, PTX)
    else:
        by = reciprocal_of_sum(total, FUSED, PTX)
        if not ALONE:
            by = exp(m - top) * by
    for g in tl.static_range((CHUNKS + GROUP - 1) // GROUP):
        if g == 0 or n_cols > g * GROUP * STEP:  # always, which the compiler does not know
            for c in tl.static_range(g * GROUP, min(CHUNKS, g * GROUP + GROUP)):
                if LOG:
                    x_c = chunk_of(x, c, SMEM_STAGED, COLS, INNER, VEC, PTX)
                    y = normalize(upcast(x_c, PTX, RECOMPUTE, True), top, total, LOG)
                elif RECOMPUTE:
                    x_c = chunk_of(x, c, SMEM_STAGED, COLS, INNER, VEC, PTX)
                    y = exp2_fma(upcast(x_c, PTX, True, True), base, shift, FUSED) * by
                else:
                    y = exps[c] * by
                store_tile(y_at, y, c, y_col, column, n_cols, own, UNPREDICATED, STEP, VEC)


@kernel(cta_programs=True)
def softmax_spatial_backward(
    y_ptr: Rows,  # the forward's output
    dy_ptr: Rows, dx_ptr: Rows,
    n_outer: Int64,
    n_cols: Int32,
    inner: Int64,  # inner and strides: in units of VEC
    n_blocks: Int32,
    y_outer: Int64, y_col: Int64, dy_outer: Int64, dy_col: Int64, dx_outer: Int64, dx_col: Int64,
    LOG: tl.constexpr, OUTERS: tl.constexpr, CTAS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr,
    VEC: tl.constexpr, CHUNKS: tl.constexpr, UNPREDICATED: tl.constexpr, SMEM_STAGED: tl.constexpr,
    OVERLAP: tl.constexpr, RECOMPUTE: tl.constexpr, INVARIANT: tl.constexpr, THREADS: tl.constexpr, PTX: tl.constexpr,
    EARLY: tl.constexpr, STAGGER: tl.constexpr, FITTING: tl.constexpr,
):  # fmt: skip
    declare_exchange(CTAS, 1, INNER, PTX)
    declare_staging(SMEM_STAGED, COLS, INNER, dy_ptr.dtype.element_ty, PTX)
    pid, column = share_of(tl.program_id(0), CTAS, COLS, PTX)
    outer, is_outer = outer_of(pid // n_blocks, n_outer, OUTERS)
    block = pid % n_blocks
    first, exists = positions_of(block, inner, INNER, VEC, OVERLAP)
    if OUTERS > 1:
        exists = exists & is_outer
    y_at = tile_at(y_ptr, outer, y_col, y_outer, first, column, INNER, VEC)
    dy_at = tile_at(dy_ptr, outer, dy_col, dy_outer, first, column, INNER, VEC)
    dx_at = tile_at(dx_ptr, outer, dx_col, dx_outer, first, column, INNER, VEC)

    STEP: tl.constexpr = CTAS * COLS  # columns of a chunk
    FIRST: tl.constexpr = SMEM_STAGED if PTX else 0
    own = owned_positions(
        exists, outer, block, n_blocks, column, dx_outer, dx_col, first, STEP, INNER, VEC, OVERLAP,
        dx_ptr.dtype.element_ty,
    )  # fmt: skip
    await_previous(EARLY)
    stagger(STAGGER, FITTING)
    stage(dy_ptr, outer, dy_col, dy_outer, first, column, inner, SMEM_STAGED, STEP, COLS, INNER, VEC, PTX)
    dy = load_tiles(dy_at, dy_col, column, n_cols, exists, 0.0, CHUNKS, UNPREDICATED, STEP, VEC, FIRST)
    y = load_tiles(y_at, y_col, column, n_cols, exists, 0.0, CHUNKS, UNPREDICATED, STEP, VEC)
    d = sum_of_terms(y, dy, CHUNKS, SMEM_STAGED, LOG, COLS, INNER, VEC, RECOMPUTE, PTX)
    d = exchange_sum(sum_over_columns(d, INVARIANT), CTAS, THREADS, PTX)[None, :, :]
    for g in tl.static_range((CHUNKS + GROUP - 1) // GROUP):
        if g == 0 or n_cols > g * GROUP * STEP:  # always, which the compiler does not know
            for c in tl.static_range(g * GROUP, min(CHUNKS, g * GROUP + GROUP)):
                y_c = upcast(y[c], PTX, RECOMPUTE, True)
                dy_c = upcast(chunk_of(dy, c, SMEM_STAGED, COLS, INNER, VEC, PTX), PTX, RECOMPUTE, True)
                dx = gradient(y_c, dy_c, d, LOG)
                store_tile(dx_at, dx, c, dx_col, column, n_cols, own, UNPREDICATED, STEP, VEC)
