"""softmax and log_softmax over a dimension that is not the last, and their gradients, where columns start anywhere.

The formulas and programs are those of `softmax_spatial`. Its tiles are skewed here (`spatial_skewed`), so that reads
and writes are aligned vectors. All tensors have the same phases, and the output has memory of its own. Where
STAGGER > 0, programs of a multiprocessor start one after the other (`staggered_start`).

A program writes its chunks in groups, with a branch before each one: ptxas moves no instruction over a branch, and
would spill otherwise. In a group the exponentials of one chunk are computed while another is written. H200, bfloat16,
fraction of a copy in groups of one and two, in programs of 8 warps: softmax of 170 columns of 3,052 positions 0.86 and
0.91, of 300 of 5,132 0.84 and 0.87, of 2,900 of 6,140 0.66 and 0.72. Groups of 4 or 8 are no faster, and in programs of
4 warps a softmax is slower in groups: 420 of 2,476 0.85 and 0.80. Gradients gain up to 2% with either.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common.arguments import Int32, Int64, Rows, kernel
from .common.early_start import await_previous
from .common.numerics import exp, exp2_affine, exp2_fma, upcast
from .common.skewed_merge import declare_skewed, merge_max_sum, merge_sum
from .common.softmax_terms import gradient, normalize
from .common.spatial_cluster import declare_exchange, share_of
from .common.spatial_moments import issue_loads, max_and_sum, sum_of_terms
from .common.spatial_skewed import (
    bounds_of,
    existing_places,
    first_phase,
    has_ends,
    load_skewed,
    owned,
    skewed_start,
    store_ends,
    store_skewed,
    vectors_of,
    with_end,
)
from .common.spatial_staging import chunk_of, declare_staging, stage_skewed
from .common.spatial_tiles import near, softmax_reads
from .common.staggered_start import stagger
from .common.tiles import READS


@kernel(cta_programs=True)
def softmax_spatial_skewed(
    x_ptr: Rows, y_ptr: Rows,
    n_outer: Int64,
    n_cols: Int32,
    inner: Int64,
    n_blocks: Int32,  # of positions
    x_outer: Int64, x_col: Int64, y_outer: Int64, y_col: Int64,
    LOG: tl.constexpr, CTAS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr,
    UNIT: tl.constexpr, OVERLAP: tl.constexpr, CHUNKS: tl.constexpr, SMEM_STAGED: tl.constexpr,
    RECOMPUTE: tl.constexpr, THREADS: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr, STAGGER: tl.constexpr,
    FITTING: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    declare_exchange(CTAS, 2, INNER, PTX)
    declare_skewed(2, COLS, INNER, UNIT, PTX)
    declare_staging(SMEM_STAGED, COLS, INNER, x_ptr.dtype.element_ty, PTX)
    pid, column = share_of(tl.program_id(0), CTAS, COLS, PTX)
    outer, block = (pid // n_blocks).to(tl.int64), (pid % n_blocks).to(tl.int64)
    STEP: tl.constexpr = CTAS * COLS  # columns of a chunk
    FIRST: tl.constexpr = SMEM_STAGED if PTX else 0
    BLOCK: tl.constexpr = INNER - OVERLAP  # positions from a block to the next one
    x_col, y_col = near(x_col, NEAR), near(y_col, NEAR)
    x_start, phase = skewed_start(outer, column, block, x_outer, x_col, BLOCK, UNIT)
    y_start, _ = skewed_start(outer, column, block, y_outer, y_col, BLOCK, UNIT)
    place = tl.arange(0, INNER)[None, None, :]
    start = vectors_of(phase, INNER, VEC)
    first, end = bounds_of(block, inner, BLOCK, INNER, UNIT)
    await_previous(EARLY)
    stagger(STAGGER, FITTING)
    stage_skewed(x_ptr, x_start, phase, x_col, first, end, SMEM_STAGED, STEP, COLS, INNER, VEC, PTX)
    POLICY: tl.constexpr = softmax_reads(x_ptr.dtype.element_ty, CHUNKS * STEP, INNER, SMEM_STAGED > 0)
    x_at = x_ptr + x_start + existing_places(phase, start, first, end, INNER, VEC)
    x = load_skewed(
        x_at, x_col, column, n_cols, start, first, end, -float("inf"), CHUNKS, STEP, VEC, FIRST, POLICY, False
    )
    lowest = issue_loads(PTX)
    x = with_end(x, x_at, x_col, column, n_cols, start, end, -float("inf"), CHUNKS, STEP, INNER, VEC, FIRST)
    m, s, exps = max_and_sum(x, CHUNKS, SMEM_STAGED, COLS, INNER, VEC, RECOMPUTE, PTX, lowest)
    before = first_phase(outer, x_outer, x_col, CTAS, COLS, UNIT)
    # where not LOG, the inverse of the sum
    top, total = merge_max_sum(m, s, phase, before, x_col, not LOG, CTAS, VEC, UNIT, THREADS, PTX)

    FUSED: tl.constexpr = PTX and x_ptr.dtype.element_ty.primitive_bitwidth == 16
    base, shift, by = top, top, total  # unused where LOG
    if not LOG and RECOMPUTE:
        base, shift, by = exp2_affine(top, FUSED)
        by = by * total
    elif not LOG:
        by = exp(m - top) * total
    y_at = y_ptr + y_start + place
    own = owned(first, phase, INNER, UNIT, OVERLAP)
    ends = has_ends(first, end, inner, y_outer, y_col, INNER, UNIT, VEC)
    GROUP: tl.constexpr = 2 if THREADS >= 256 else 1
    for g in tl.static_range((CHUNKS + GROUP - 1) // GROUP):
        if n_cols > g * GROUP * STEP:  # always, which the compiler does not know
            written = ()
            for c in tl.static_range(g * GROUP, min(CHUNKS, g * GROUP + GROUP)):
                x_c = chunk_of(x, c, SMEM_STAGED, COLS, INNER, VEC, PTX)
                e = x_c  # unused where RECOMPUTE
                if not RECOMPUTE:
                    e = exps[c]
                y = _output(x_c, e, top, total, base, shift, by, LOG, RECOMPUTE, FUSED, PTX).to(y_ptr.dtype.element_ty)
                store_skewed(y_at, y, c, y_col, column, n_cols, own, start, first, end, CHUNKS, STEP, INNER, VEC)
                written = written + (y,)
            if ends:
                store_ends(
                    y_at, written, g * GROUP, y_col, column, n_cols, own, start, first, end, CHUNKS, STEP, INNER, VEC
                )


@triton.jit
def _output(
    x, e, top, total, base, shift, by, LOG: tl.constexpr, RECOMPUTE: tl.constexpr, FUSED: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    if LOG:
        return normalize(upcast(x, PTX, RECOMPUTE, True), top, total, LOG)
    elif RECOMPUTE:
        return exp2_fma(upcast(x, PTX, True, True), base, shift, FUSED) * by
    else:
        return e * by


@kernel(cta_programs=True)
def softmax_spatial_skewed_backward(
    y_ptr: Rows,  # the forward's output
    dy_ptr: Rows, dx_ptr: Rows,
    n_outer: Int64,
    n_cols: Int32,
    inner: Int64,
    n_blocks: Int32,
    y_outer: Int64, y_col: Int64, dy_outer: Int64, dy_col: Int64, dx_outer: Int64, dx_col: Int64,
    LOG: tl.constexpr, CTAS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr,
    UNIT: tl.constexpr, OVERLAP: tl.constexpr, CHUNKS: tl.constexpr, RECOMPUTE: tl.constexpr, THREADS: tl.constexpr,
    PTX: tl.constexpr, EARLY: tl.constexpr, STAGGER: tl.constexpr, FITTING: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    declare_exchange(CTAS, 1, INNER, PTX)
    declare_skewed(1, COLS, INNER, UNIT, PTX)
    pid, column = share_of(tl.program_id(0), CTAS, COLS, PTX)
    outer, block = (pid // n_blocks).to(tl.int64), (pid % n_blocks).to(tl.int64)
    STEP: tl.constexpr = CTAS * COLS  # columns of a chunk
    BLOCK: tl.constexpr = INNER - OVERLAP  # positions from a block to the next one
    y_col, dy_col, dx_col = near(y_col, NEAR), near(dy_col, NEAR), near(dx_col, NEAR)
    y_start, phase = skewed_start(outer, column, block, y_outer, y_col, BLOCK, UNIT)
    dy_start, _ = skewed_start(outer, column, block, dy_outer, dy_col, BLOCK, UNIT)
    dx_start, _ = skewed_start(outer, column, block, dx_outer, dx_col, BLOCK, UNIT)
    place = tl.arange(0, INNER)[None, None, :]
    start = vectors_of(phase, INNER, VEC)
    first, end = bounds_of(block, inner, BLOCK, INNER, UNIT)
    y_at, dy_at = y_ptr + y_start + place, dy_ptr + dy_start + place
    await_previous(EARLY)
    stagger(STAGGER, FITTING)
    dy = load_skewed(dy_at, dy_col, column, n_cols, start, first, end, 0.0, CHUNKS, STEP, VEC, 0, READS, True)
    dy = with_end(dy, dy_at, dy_col, column, n_cols, start, end, 0.0, CHUNKS, STEP, INNER, VEC, 0)
    y = load_skewed(y_at, y_col, column, n_cols, start, first, end, 0.0, CHUNKS, STEP, VEC, 0, READS, True)
    y = with_end(y, y_at, y_col, column, n_cols, start, end, 0.0, CHUNKS, STEP, INNER, VEC, 0)
    d = sum_of_terms(y, dy, CHUNKS, 0, LOG, COLS, INNER, VEC, RECOMPUTE, PTX)
    before = first_phase(outer, y_outer, y_col, CTAS, COLS, UNIT)
    d = merge_sum(d, phase, before, y_col, CTAS, VEC, UNIT, THREADS, PTX)
    dx_at = dx_ptr + dx_start + place
    own = owned(first, phase, INNER, UNIT, OVERLAP)
    ends = has_ends(first, end, inner, dx_outer, dx_col, INNER, UNIT, VEC)
    GROUP: tl.constexpr = 2
    for g in tl.static_range((CHUNKS + GROUP - 1) // GROUP):
        if n_cols > g * GROUP * STEP:  # always, which the compiler does not know
            written = ()
            for c in tl.static_range(g * GROUP, min(CHUNKS, g * GROUP + GROUP)):
                dy_again = upcast(dy[c], PTX, RECOMPUTE, True)
                dx = gradient(upcast(y[c], PTX, RECOMPUTE, True), dy_again, d, LOG).to(dx_ptr.dtype.element_ty)
                store_skewed(dx_at, dx, c, dx_col, column, n_cols, own, start, first, end, CHUNKS, STEP, INNER, VEC)
                written = written + (dx,)
            if ends:
                store_ends(
                    dx_at, written, g * GROUP, dx_col, column, n_cols, own, start, first, end, CHUNKS, STEP, INNER, VEC
                )
