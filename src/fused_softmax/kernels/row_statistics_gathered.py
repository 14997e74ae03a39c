"""Statistics of narrow rows of logits, and their gradient: rows that are moved as one piece of memory.

    lse = log(sum(exp(z)));  H = lse - sum(p*z);  logprob = z[id] - lse;  the gradient as in `row_statistics`

A program moves all its rows as one piece, in vectors (`gathered_rows`). VECTORS neighbors of a warp share a row, CHUNKS
times VEC columns for each. The logit of a row's id comes from shared memory, and its gradient replaces there what its
thread has put. A row has one id at most. The rows of all tensors follow each other without a gap.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common.arguments import Float32, Int32, Int64, Rows, Vector, kernel
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
from .common.logits import logit, logsumexp, rounding_residual
from .common.numerics import HIGHEST, LOWEST, exp2_affine, exp2_fma, log, over_unit
from .common.statistics_terms import UNSCALED, scale_of, statistics_term


@triton.jit
def _ids(
    ids_ptr, first_row, n_rows, EACH: tl.constexpr, LANES: tl.constexpr, THREADS: tl.constexpr, PICKS: tl.constexpr
):
    """The ids of each thread's rows, -1 of rows that do not exist; rows where not PICKS.  # EACH x [THREADS] int64"""
    found = ()
    for k in tl.static_range(EACH):
        row = first_row + tl.arange(0, THREADS) // LANES + k * (THREADS // LANES)
        if PICKS > 0:
            found = found + (tl.load(ids_ptr + row, mask=row < n_rows, other=-1),)
        else:
            found = found + (row,)
    return found


@triton.jit
def _moments(
    x, HELD: tl.constexpr, by, LANES: tl.constexpr, ENTROPY: tl.constexpr, SCALED: tl.constexpr,
    FUSED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """(row_max, row_sum, sum(exp(z - row_max)*(z - row_max)) where ENTROPY)."""
    z = ()
    for i in tl.static_range(HELD):
        z = z + (logit(x[i], by, 1.0, SCALED, False),)
    # +inf makes the sum infinite
    m = tl.minimum(tl.maximum(max_over_lanes(max_of(z, 0, HELD), LANES, PTX), LOWEST), HIGHEST)
    exps, terms = (), ()
    base, shift, _ = exp2_affine(m, FUSED)
    for i in tl.static_range(HELD):
        exps = exps + (exp2_fma(z[i], base, shift, FUSED),)
    s, t = sum_over_lanes(sum_of(exps, 0, HELD), LANES, PTX), 0.0
    if ENTROPY:
        for i in tl.static_range(HELD):
            terms = terms + (exps[i] * tl.maximum(z[i] - m, LOWEST),)
        t = sum_over_lanes(sum_of(terms, 0, HELD), LANES, PTX)
    if FUSED:
        unit = exp2_fma(m, base, shift, FUSED)
        s = tl.where(s < float("inf"), over_unit(s, unit), s)
        if ENTROPY:
            t = over_unit(t, unit)
    return m, s, t


@kernel()
def row_statistics_gathered(
    x_ptr: Rows,  # aligned to VEC elements
    lse_ptr: Vector,  # [n_rows] float32, or of x's dtype
    moments_ptr: Vector,  # [n_rows, 2] float32: (row_max, row_sum), where KEEP_MOMENTS
    entropy_ptr: Vector,  # [n_rows] float32, where ENTROPY
    ids_ptr: Vector,  # [n_rows] int64, where PICKS
    picked_ptr: Vector,  # [n_rows] float32, where PICKS: log-probabilities
    scale_ptr: Vector,  # [n_rows] float32, where SCALE is BY_ROW
    n_rows: Int64,
    n_cols: Int32,  # in units of VEC, as x_stride, which is n_cols
    x_stride: Int64,
    phase: Int32,  # unused: a pointer tells its own
    n_picks: Int32,  # 1, where PICKS
    scale: Float32,
    PICKS: tl.constexpr, ENTROPY: tl.constexpr, SCALE: tl.constexpr, KEEP_MOMENTS: tl.constexpr,
    ROWS: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr,
    UNPREDICATED: tl.constexpr,  # chunks that all threads of a row fill
    RUNS: tl.constexpr,  # the chunks of a thread follow each other
    THREADS: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    tl.static_assert(PICKS <= 1, "a row has one id at most")
    MOST: tl.constexpr = ROWS * CHUNKS * VECTORS * VEC
    EACH: tl.constexpr = ROWS * VECTORS // THREADS
    HELD: tl.constexpr = CHUNKS * VEC
    STEP: tl.constexpr = step_of(VECTORS, VEC, RUNS)
    declare_regions(region_bytes(MOST, x_ptr.dtype.element_ty.primitive_bitwidth // 8), PTX)
    first_row, columns, first, n = piece_of(tl.program_id(0), n_rows, n_cols, ROWS, VEC)
    column = columns_of_thread(THREADS, VECTORS, VEC, CHUNKS, RUNS)
    await_previous(EARLY)
    gather(x_ptr, first, n, MOST, 0, THREADS, PTX)
    ids = _ids(ids_ptr, first_row, n_rows, EACH, VECTORS, THREADS, PICKS)
    await_gathered(PTX)

    FUSED: tl.constexpr = PTX and x_ptr.dtype.element_ty.primitive_bitwidth == 16 and SCALE == UNSCALED
    for k in tl.static_range(EACH):
        row = tl.arange(0, THREADS) // VECTORS + k * (THREADS // VECTORS)
        exists = row < n_rows - first_row
        x = ()
        for c in tl.static_range(CHUNKS):
            x = x + fetch(x_ptr, first, row, column, columns, exists, c, 0, STEP, VEC, UNPREDICATED, "-inf", PTX)
        at = first_row + row
        by = scale_of(at, exists, scale_ptr, scale, SCALE)
        m, s, t = _moments(x, HELD, by, VECTORS, ENTROPY, SCALE != UNSCALED, FUSED, PTX)
        lse = logsumexp(m, s)
        writes = exists & (tl.arange(0, THREADS) % VECTORS == 0)
        tl.store(lse_ptr + at, lse, mask=writes)
        if KEEP_MOMENTS:
            tl.store(moments_ptr + 2 * at, m, mask=writes)
            tl.store(moments_ptr + 2 * at + 1, s, mask=writes)
        if ENTROPY:
            tl.store(entropy_ptr + at, log(s) - t / s, mask=writes)
        if PICKS > 0:
            inside = writes & (ids[k] >= 0) & (ids[k] < columns)
            z = logit(element_of(x_ptr, first, row, ids[k], columns, inside, PTX), by, 1.0, SCALE != UNSCALED, False)
            logprob = z - lse - rounding_residual(lse, m, s)
            tl.store(picked_ptr + at, tl.where(inside & (lse < float("inf")), logprob, float("nan")), mask=writes)


@kernel()
def row_statistics_backward_gathered(
    x_ptr: Rows,  # aligned to VEC elements, as dx_ptr
    dx_ptr: Rows,
    moments_ptr: Vector,  # [n_rows, 2] float32: (row_max, row_sum); or [n_rows], lse, where not HAS_MOMENTS
    entropy_ptr: Vector,  # [n_rows] float32, where ENTROPY, as its upstream gradient
    g_entropy_ptr: Vector,
    ids_ptr: Vector,  # [n_rows] int64, where PICKS, and their upstream gradients, float32
    g_picked_ptr: Vector,
    g_lse_ptr: Vector,  # [n_rows] float32, or of x's dtype, where LSE
    scale_ptr: Vector,  # [n_rows] float32, where SCALE is BY_ROW
    n_rows: Int64,
    n_cols: Int32,  # in units of VEC, as strides, which are n_cols
    x_stride: Int64, dx_stride: Int64,
    phase: Int32,  # unused: a pointer tells its own
    n_picks: Int32,  # 1, where PICKS
    start: Int64, size: Int64,  # unused: these are all columns
    scale: Float32,
    PICKS: tl.constexpr, ENTROPY: tl.constexpr, LSE: tl.constexpr, SCALE: tl.constexpr, HAS_MOMENTS: tl.constexpr,
    ROWS: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr, UNPREDICATED: tl.constexpr,
    RUNS: tl.constexpr, THREADS: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    tl.static_assert(PICKS <= 1, "a row has one id at most")
    MOST: tl.constexpr = ROWS * CHUNKS * VECTORS * VEC
    EACH: tl.constexpr = ROWS * VECTORS // THREADS
    HELD: tl.constexpr = CHUNKS * VEC
    STEP: tl.constexpr = step_of(VECTORS, VEC, RUNS)
    SCALED: tl.constexpr = SCALE != UNSCALED
    declare_regions(region_bytes(MOST, x_ptr.dtype.element_ty.primitive_bitwidth // 8), PTX)
    first_row, columns, first, n = piece_of(tl.program_id(0), n_rows, n_cols, ROWS, VEC)
    column = columns_of_thread(THREADS, VECTORS, VEC, CHUNKS, RUNS)
    await_previous(EARLY)
    gather(x_ptr, first, n, MOST, 0, THREADS, PTX)
    ids = _ids(ids_ptr, first_row, n_rows, EACH, VECTORS, THREADS, PICKS)
    known = ()  # of each row: (row_max, row_sum, scale, factor, entropy, its upstream gradient, the id's)
    for k in tl.static_range(EACH):
        row = tl.arange(0, THREADS) // VECTORS + k * (THREADS // VECTORS)
        exists = row < n_rows - first_row
        at = first_row + row
        by = scale_of(at, exists, scale_ptr, scale, SCALE)
        if HAS_MOMENTS:
            m = tl.load(moments_ptr + 2 * at, mask=exists, other=0.0)
            s = tl.load(moments_ptr + 2 * at + 1, mask=exists, other=1.0)
        else:
            m = tl.load(moments_ptr + at, mask=exists, other=0.0).to(tl.float32)
            s = tl.zeros_like(m) + 1.0
        entropy, g_entropy, a, g = tl.zeros_like(m), tl.zeros_like(m), tl.zeros_like(m), tl.zeros_like(m)
        if ENTROPY:
            entropy = tl.load(entropy_ptr + at, mask=exists, other=0.0)
            g_entropy = tl.load(g_entropy_ptr + at, mask=exists, other=0.0)
        if LSE:
            a = tl.load(g_lse_ptr + at, mask=exists, other=0.0).to(tl.float32)
        if PICKS > 0:
            g = tl.load(g_picked_ptr + at, mask=(ids[k] >= 0) & (ids[k] < columns), other=0.0)
            a -= g
        if ENTROPY or PICKS > 0:
            # the log-probabilities of a row with +inf are NaN
            a = tl.where(s == float("inf"), float("nan"), a)
        known = known + (m, s, by, a, entropy, g_entropy, g)
    await_gathered(PTX)

    x, x_picked = (), ()
    for k in tl.static_range(EACH):
        row = tl.arange(0, THREADS) // VECTORS + k * (THREADS // VECTORS)
        exists = row < n_rows - first_row
        for c in tl.static_range(CHUNKS):
            x = x + fetch(x_ptr, first, row, column, columns, exists, c, 0, STEP, VEC, UNPREDICATED, "-inf", PTX)
        if PICKS > 0:
            inside = exists & (ids[k] >= 0) & (ids[k] < columns)
            x_picked = x_picked + (element_of(x_ptr, first, row, ids[k], columns, inside, PTX),)
    await_threads(PTX)
    for k in tl.static_range(EACH):
        row = tl.arange(0, THREADS) // VECTORS + k * (THREADS // VECTORS)
        exists = row < n_rows - first_row
        m, s, by, a = known[7 * k], known[7 * k + 1], known[7 * k + 2], known[7 * k + 3]
        above, by_sum = known[7 * k + 4] - log(s), 1.0 / s
        a, g_entropy = a * by_sum, known[7 * k + 5] * by_sum
        for c in tl.static_range(CHUNKS):
            dx = ()
            for i in tl.static_range(VEC):
                dz = statistics_term(x[k * HELD + c * VEC + i], m, above, by, a, g_entropy, ENTROPY, SCALED)
                dx = dx + (dz * by,)
            put(dx, dx_ptr, first, row, column, columns, exists, c, 0, STEP, VEC, UNPREDICATED, PTX)
        if PICKS > 0:
            id, inside = ids[k].to(tl.int32), exists & (ids[k] >= 0) & (ids[k] < columns)
            writes = inside & puts_column(id, THREADS, VECTORS, VEC, CHUNKS, RUNS)
            dz = statistics_term(x_picked[k], m, above, by, a, g_entropy, ENTROPY, SCALED) + known[7 * k + 6]
            put((dz * by,), dx_ptr, first, row, id, columns, writes, 0, 0, 1, 1, 0, PTX)
    scatter(dx_ptr, first, n, MOST, 0, THREADS, False, PTX)
