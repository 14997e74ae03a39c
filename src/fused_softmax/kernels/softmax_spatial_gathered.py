"""Small planes (n_cols, inner): softmax and log_softmax over n_cols, and their gradients, moved as one piece of memory.

    m = max(x);  s = sum(exp(x - m));  y = exp(x - m) / s     or   y = (x - m) - log(s)
    d = sum(y*dy);  dx = y*(dy - d)                           or   d = sum(dy);  dx = dy - exp(y)*d

The tensor is (outer, n_cols, inner), without a gap. Runs of `inner` that do not start at multiples of 16 bytes are read
and written one element at a time where a kernel reads columns, and tiles of short runs are filled up. Here a program
moves `outers` planes as one piece, in vectors (`gathered_rows`), and all their positions follow each other. LANES
neighbors of a warp share a position, CHUNKS columns for each. A result takes the place of its input, which no other
thread reads.
"""

from __future__ import annotations

import triton.language as tl

from .common.arguments import Int32, Int64, Rows, kernel
from .common.early_start import await_previous
from .common.gathered_planes import fetch_columns, planes_of, position_of, put_columns
from .common.gathered_ptx import region_bytes
from .common.gathered_rows import (
    await_gathered,
    declare_regions,
    gather,
    max_of,
    max_over_lanes,
    scatter,
    sum_of,
    sum_over_lanes,
)
from .common.numerics import LOWEST, exp2_affine, exp2_fma
from .common.softmax_terms import gradient, gradient_term, normalize


@kernel()
def softmax_spatial_gathered(
    x_ptr: Rows, y_ptr: Rows,  # both at the same distance from a multiple of 16 bytes
    n_outer: Int64,
    n_cols: Int32,
    inner: Int32, multiplier: Int64, power: Int64,  # the numbers of `fast_divmod`
    outers: Int32,  # planes of a piece
    LOG: tl.constexpr,
    PIECE: tl.constexpr,  # elements of a piece, at most
    LANES: tl.constexpr, CHUNKS: tl.constexpr,
    UNPREDICATED: tl.constexpr,  # chunks that all threads of a position fill
    THREADS: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
    DYNAMIC: tl.constexpr,  # bytes of shared memory that the launch adds, for larger pieces
):  # fmt: skip
    declare_regions(region_bytes(PIECE, x_ptr.dtype.element_ty.primitive_bitwidth // 8), PTX, DYNAMIC)
    first, n, plane, positions = planes_of(n_outer, n_cols, inner, outers)
    x_ptr, y_ptr = x_ptr + first, y_ptr + first
    await_previous(EARLY)
    gather(x_ptr, 0, n, PIECE, 0, THREADS, PTX)
    await_gathered(PTX)

    # 16 bits: exp(x - m) in one multiply-add and one exp2; their common factor cancels in exp/sum
    FUSED: tl.constexpr = PTX and x_ptr.dtype.element_ty.primitive_bitwidth == 16 and not LOG
    for k in range(0, (positions + THREADS // LANES - 1) // (THREADS // LANES)):
        at, step, exists = position_of(k, positions, n, plane, inner, multiplier, power, LANES, THREADS)
        x = fetch_columns(x_ptr, at, step, exists, n_cols, 0, "-inf", LANES, CHUNKS, UNPREDICATED, THREADS, PTX)
        m = tl.maximum(max_over_lanes(max_of(x, 0, CHUNKS), LANES, PTX), LOWEST)
        base, shift, _ = exp2_affine(m, FUSED)
        exps = ()
        for c in tl.static_range(CHUNKS):
            exps = exps + (exp2_fma(x[c], base, shift, FUSED),)
        s = sum_over_lanes(sum_of(exps, 0, CHUNKS), LANES, PTX)
        by = tl.div_rn(1.0, s)
        y = ()
        for c in tl.static_range(CHUNKS):
            if LOG:
                y = y + (normalize(x[c], m, s, LOG),)
            else:
                y = y + (exps[c] * by,)
        put_columns(y, y_ptr, at, step, exists, n_cols, 0, LANES, CHUNKS, UNPREDICATED, THREADS, PTX)
    scatter(y_ptr, 0, n, PIECE, 0, THREADS, False, PTX)


@kernel()
def softmax_spatial_gathered_backward(
    y_ptr: Rows,  # the forward's output, at the same distance from a multiple of 16 bytes as dx, which takes its places
    dy_ptr: Rows, dx_ptr: Rows,
    n_outer: Int64,  # these numbers: as in `softmax_spatial_gathered`
    n_cols: Int32,
    inner: Int32, multiplier: Int64, power: Int64,
    outers: Int32,
    LOG: tl.constexpr, PIECE: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr, UNPREDICATED: tl.constexpr,
    THREADS: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr, DYNAMIC: tl.constexpr,
):  # fmt: skip
    SECOND: tl.constexpr = region_bytes(PIECE, y_ptr.dtype.element_ty.primitive_bitwidth // 8)
    declare_regions(2 * SECOND, PTX, DYNAMIC)
    first, n, plane, positions = planes_of(n_outer, n_cols, inner, outers)
    y_ptr, dy_ptr, dx_ptr = y_ptr + first, dy_ptr + first, dx_ptr + first
    await_previous(EARLY)
    gather(y_ptr, 0, n, PIECE, 0, THREADS, PTX)
    gather(dy_ptr, 0, n, PIECE, SECOND, THREADS, PTX)
    await_gathered(PTX)

    for k in range(0, (positions + THREADS // LANES - 1) // (THREADS // LANES)):
        at, step, exists = position_of(k, positions, n, plane, inner, multiplier, power, LANES, THREADS)
        y = fetch_columns(y_ptr, at, step, exists, n_cols, 0, "0", LANES, CHUNKS, UNPREDICATED, THREADS, PTX)
        dy = fetch_columns(dy_ptr, at, step, exists, n_cols, SECOND, "0", LANES, CHUNKS, UNPREDICATED, THREADS, PTX)
        terms = ()
        for c in tl.static_range(CHUNKS):
            terms = terms + (gradient_term(y[c], dy[c], LOG),)
        d = sum_over_lanes(sum_of(terms, 0, CHUNKS), LANES, PTX)
        dx = ()
        for c in tl.static_range(CHUNKS):
            dx = dx + (gradient(y[c], dy[c], d, LOG),)
        put_columns(dx, dx_ptr, at, step, exists, n_cols, 0, LANES, CHUNKS, UNPREDICATED, THREADS, PTX)
    scatter(dx_ptr, 0, n, PIECE, 0, THREADS, False, PTX)
