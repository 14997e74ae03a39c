"""Narrow causal rows that start anywhere: softmax of scaled rows, moved as one piece of memory.

    z = scale*x where column <= query;  y = exp(z - max(z)) / sum(exp(z - max(z))), and 0 in the other columns

As `softmax_gathered`: a program moves all its rows as one piece, and VECTORS neighbors of a warp share a row. Columns
that a row does not see are read with the piece, because they lie in sectors that other columns need, and are not used.
A row whose columns are all -inf has sum 0 and is NaN, or zero where ZERO.
"""

from __future__ import annotations

import triton.language as tl

from .common.arguments import Float32, Int32, Int64, Rows, Vector, kernel
from .common.early_start import await_previous
from .common.gathered_ptx import region_bytes
from .common.gathered_rows import (
    await_gathered,
    await_threads,
    declare_regions,
    fetch,
    gather,
    max_of,
    max_over_lanes,
    piece_of,
    put,
    scatter,
    sum_of,
    sum_over_lanes,
)
from .common.masked_rows import reciprocal
from .common.numerics import LOWEST, exp2_affine, exp2_fma, scaled
from .common.row_scheduler import fast_divmod


@kernel()
def masked_softmax_gathered(
    x_ptr: Rows, y_ptr: Rows,
    mask_ptr: Vector,  # unused
    n_rows: Int64,  # fewer than 2^31
    n_cols: Int32,  # in units of VEC, as strides, which are n_cols
    x_stride: Int64, y_stride: Int64,
    phase: Int32,  # unused: a pointer tells its own
    n_queries: Int64,
    multiplier: Int64,  # the numbers of `fast_divmod` for n_queries
    power: Int64,
    scale: Float32,  # positive
    ZERO: tl.constexpr, ROWS: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr,
    UNPREDICATED: tl.constexpr,  # chunks that all threads of a row fill
    THREADS: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    MOST: tl.constexpr = ROWS * CHUNKS * VECTORS * VEC
    declare_regions(region_bytes(MOST, x_ptr.dtype.element_ty.primitive_bitwidth // 8), PTX)
    scale = tl.cast(scale, tl.float32)  # the interpreter makes a float64 of a subnormal number
    first_row, columns, first, n = piece_of(n_rows, n_cols, ROWS, VEC)
    thread = tl.arange(0, THREADS)
    column = thread % VECTORS * VEC
    await_previous(EARLY)
    gather(x_ptr, first, n, MOST, 0, THREADS, PTX)
    await_gathered(PTX)

    z = ()
    for k in tl.static_range(ROWS * VECTORS // THREADS):
        row = thread // VECTORS + k * (THREADS // VECTORS)
        exists = row < n_rows - first_row
        _, query = fast_divmod(first_row + row, n_queries, multiplier, power)
        seen = tl.minimum(query + 1, columns)
        for c in tl.static_range(CHUNKS):
            found = fetch(x_ptr, first, row, column, columns, exists, c, 0, VECTORS, VEC, UNPREDICATED, "-inf", PTX)
            for i in tl.static_range(VEC):
                z = z + (tl.where(c * VECTORS * VEC + column + i < seen, found[i], -float("inf")),)
    await_threads(PTX)
    FUSED: tl.constexpr = PTX and x_ptr.dtype.element_ty.primitive_bitwidth == 16
    HELD: tl.constexpr = CHUNKS * VEC
    for k in tl.static_range(ROWS * VECTORS // THREADS):
        row = thread // VECTORS + k * (THREADS // VECTORS)
        exists = row < n_rows - first_row
        # scale is positive, so the largest x has the largest z
        m = tl.maximum(max_over_lanes(max_of(z, k * HELD, HELD), VECTORS, PTX), LOWEST)
        if not FUSED:
            m = tl.maximum(scaled(m, scale, PTX), LOWEST)
        base, shift, _ = exp2_affine(m, FUSED, scale)
        exps = ()
        for i in tl.static_range(HELD):
            if FUSED:
                exps = exps + (exp2_fma(z[k * HELD + i], base, shift, FUSED),)
            else:
                exps = exps + (exp2_fma(scaled(z[k * HELD + i], scale, PTX), base, shift, FUSED),)
        by = reciprocal(sum_over_lanes(sum_of(exps, 0, HELD), VECTORS, PTX), ZERO, True)
        for c in tl.static_range(CHUNKS):
            y = ()
            for i in tl.static_range(VEC):
                y = y + (exps[c * VEC + i] * by,)
            put(y, y_ptr, first, row, column, columns, exists, c, 0, VECTORS, VEC, UNPREDICATED, PTX)
    scatter(y_ptr, first, n, MOST, 0, THREADS, False, PTX)
