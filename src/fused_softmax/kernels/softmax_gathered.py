"""Narrow rows that start anywhere: softmax, log_softmax and their gradients, moved as one piece of memory.

    m = max(x);  s = sum(exp(x - m));  y = exp(x - m) / s     or   y = (x - m) - log(s)
    d = sum(y*dy);  dx = y*(dy - d)                           or   d = sum(dy);  dx = dy - exp(y)*d

A row of an odd number of columns is read and written one element at a time where a kernel reads rows. Here a program
moves all its rows as one piece, in vectors (`gathered_rows`). VECTORS neighbors of a warp share a row, CHUNKS times VEC
columns for each, and a thread has ROWS*VECTORS/THREADS rows. The rows of all tensors follow each other without a gap.
Instructions and the banks of shared memory are the limit, which the plan weighs (planning/gathered.py).
"""

from __future__ import annotations

import triton.language as tl

from .common.arguments import Int32, Int64, Rows, kernel
from .common.early_start import await_previous, most_that_start_next, start_next
from .common.gathered_ptx import region_bytes
from .common.gathered_rows import (
    await_gathered,
    await_threads,
    columns_of_thread,
    declare_regions,
    fetch,
    gather,
    max_of,
    max_over_lanes,
    piece_of,
    put,
    scatter,
    step_of,
    sum_of,
    sum_over_lanes,
)
from .common.numerics import LOWEST, exp2_affine, exp2_fma, reciprocal
from .common.softmax_terms import gradient, gradient_term, normalize


@kernel()
def softmax_gathered(
    x_ptr: Rows, y_ptr: Rows,
    n_rows: Int64,
    n_cols: Int32,  # in units of VEC, as strides, which are n_cols
    x_stride: Int64, y_stride: Int64,
    phase: Int32,  # unused: a pointer tells its own
    LOG: tl.constexpr, ROWS: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr,
    UNPREDICATED: tl.constexpr,  # chunks that all threads of a row fill
    RUNS: tl.constexpr,  # the chunks of a thread follow each other
    THREADS: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    MOST: tl.constexpr = ROWS * CHUNKS * VECTORS * VEC
    declare_regions(region_bytes(MOST, x_ptr.dtype.element_ty.primitive_bitwidth // 8), PTX)
    first_row, columns, first, n = piece_of(tl.program_id(0), n_rows, n_cols, ROWS, VEC)
    thread = tl.arange(0, THREADS)
    column = columns_of_thread(THREADS, VECTORS, VEC, CHUNKS, RUNS)
    STEP: tl.constexpr = step_of(VECTORS, VEC, RUNS)
    await_previous(EARLY)
    gather(x_ptr, first, n, MOST, 0, THREADS, PTX)
    await_gathered(PTX)
    start_next(EARLY and not LOG, most_that_start_next(VECTORS, 1))

    x = ()
    for k in tl.static_range(ROWS * VECTORS // THREADS):
        row = thread // VECTORS + k * (THREADS // VECTORS)
        exists = row < n_rows - first_row
        for c in tl.static_range(CHUNKS):
            x = x + fetch(x_ptr, first, row, column, columns, exists, c, 0, STEP, VEC, UNPREDICATED, "-inf", PTX)
    await_threads(PTX)
    # 16 bits: exp(x - m) in one multiply-add and one exp2; their common factor cancels in exp/sum
    FUSED: tl.constexpr = PTX and x_ptr.dtype.element_ty.primitive_bitwidth == 16 and not LOG
    HELD: tl.constexpr = CHUNKS * VEC
    for k in tl.static_range(ROWS * VECTORS // THREADS):
        row = thread // VECTORS + k * (THREADS // VECTORS)
        exists = row < n_rows - first_row
        m = tl.maximum(max_over_lanes(max_of(x, k * HELD, HELD), VECTORS, PTX), LOWEST)
        base, shift, _ = exp2_affine(m, FUSED)
        exps = ()
        for i in tl.static_range(HELD):
            exps = exps + (exp2_fma(x[k * HELD + i], base, shift, FUSED),)
        s = sum_over_lanes(sum_of(exps, 0, HELD), VECTORS, PTX)
        by = reciprocal(s, PTX)
        for c in tl.static_range(CHUNKS):
            y = ()
            for i in tl.static_range(VEC):
                if LOG:
                    y = y + (normalize(x[k * HELD + c * VEC + i], m, s, LOG),)
                else:
                    y = y + (exps[c * VEC + i] * by,)
            put(y, y_ptr, first, row, column, columns, exists, c, 0, STEP, VEC, UNPREDICATED, PTX)
    scatter(y_ptr, first, n, MOST, 0, THREADS, False, PTX)


@kernel()
def softmax_backward_gathered(
    y_ptr: Rows,  # the forward's output
    dy_ptr: Rows, dx_ptr: Rows,
    n_rows: Int64,
    n_cols: Int32,  # in units of VEC, as strides, which are n_cols
    y_stride: Int64, dy_stride: Int64, dx_stride: Int64,
    phase: Int32,  # unused: a pointer tells its own
    LOG: tl.constexpr, ROWS: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr,
    UNPREDICATED: tl.constexpr,  # chunks that all threads of a row fill
    RUNS: tl.constexpr,  # the chunks of a thread follow each other
    THREADS: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    MOST: tl.constexpr = ROWS * CHUNKS * VECTORS * VEC
    tl.static_assert(dy_ptr.dtype == y_ptr.dtype and dx_ptr.dtype == y_ptr.dtype, "the tensors have one dtype")
    SECOND: tl.constexpr = region_bytes(MOST, y_ptr.dtype.element_ty.primitive_bitwidth // 8)
    declare_regions(2 * SECOND, PTX)
    first_row, columns, first, n = piece_of(tl.program_id(0), n_rows, n_cols, ROWS, VEC)
    thread = tl.arange(0, THREADS)
    column = columns_of_thread(THREADS, VECTORS, VEC, CHUNKS, RUNS)
    STEP: tl.constexpr = step_of(VECTORS, VEC, RUNS)
    await_previous(EARLY)
    gather(y_ptr, first, n, MOST, 0, THREADS, PTX)
    gather(dy_ptr, first, n, MOST, SECOND, THREADS, PTX)
    await_gathered(PTX)
    start_next(EARLY and not LOG, most_that_start_next(VECTORS, 1))

    y, dy = (), ()
    for k in tl.static_range(ROWS * VECTORS // THREADS):
        row = thread // VECTORS + k * (THREADS // VECTORS)
        exists = row < n_rows - first_row
        for c in tl.static_range(CHUNKS):
            y = y + fetch(y_ptr, first, row, column, columns, exists, c, 0, STEP, VEC, UNPREDICATED, "0", PTX)
            dy = dy + fetch(dy_ptr, first, row, column, columns, exists, c, SECOND, STEP, VEC, UNPREDICATED, "0", PTX)
    await_threads(PTX)
    HELD: tl.constexpr = CHUNKS * VEC
    for k in tl.static_range(ROWS * VECTORS // THREADS):
        row = thread // VECTORS + k * (THREADS // VECTORS)
        exists = row < n_rows - first_row
        terms = ()
        for i in tl.static_range(HELD):
            terms = terms + (gradient_term(y[k * HELD + i], dy[k * HELD + i], LOG),)
        d = sum_over_lanes(sum_of(terms, 0, HELD), VECTORS, PTX)
        for c in tl.static_range(CHUNKS):
            dx = ()
            for i in tl.static_range(VEC):
                dx = dx + (gradient(y[k * HELD + c * VEC + i], dy[k * HELD + c * VEC + i], d, LOG),)
            put(dx, dx_ptr, first, row, column, columns, exists, c, 0, STEP, VEC, UNPREDICATED, PTX)
    scatter(dx_ptr, first, n, MOST, 0, THREADS, False, PTX)
