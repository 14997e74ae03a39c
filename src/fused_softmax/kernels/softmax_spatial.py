"""softmax and log_softmax over a dimension that is not the last, and their gradients, where the columns stay on chip.

    m = max(x);  s = sum(exp(x - m));  y = exp(x - m) / s     or   y = (x - m) - log(s)
    d = sum(y*dy);  dx = y*(dy - d)                           or   d = sum(dy);  dx = dy - exp(y)*d

The tensor is (outer, n_cols, inner) with contiguous inner. A program holds CHUNKS x COLS columns of INNER positions. It
reads each once and writes each once. A thread reduces the columns that it holds, one of each chunk. Then the program
merges COLS columns. With COLS = 1 a thread holds whole columns, and nothing is merged.
"""

from __future__ import annotations

import triton.language as tl

from .common.arguments import Int32, Int64, Rows, kernel
from .common.numerics import LOWEST, exp, exp2_affine, exp2_fma, scaled, upcast
from .common.softmax_terms import gradient, gradient_term, normalize
from .common.spatial_tiles import (
    columns_of_chunk,
    load_tiles,
    outer_of,
    positions_of,
    store_tile,
    sum_over_columns,
    tile_at,
)


@kernel()
def softmax_spatial(
    x_ptr: Rows, y_ptr: Rows,
    n_outer: Int64,
    n_cols: Int32,
    inner: Int64,  # inner and strides: in units of VEC
    n_blocks: Int32,  # of positions
    x_outer: Int64, x_col: Int64, y_outer: Int64, y_col: Int64,
    LOG: tl.constexpr, OUTERS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr,
    VEC: tl.constexpr, CHUNKS: tl.constexpr, UNPREDICATED: tl.constexpr, RECOMPUTE: tl.constexpr,
    INVARIANT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    outer, is_outer = outer_of(pid // n_blocks, n_outer, OUTERS)
    first, exists = positions_of(pid % n_blocks, inner, INNER, VEC)
    if OUTERS > 1:
        exists = exists & is_outer
    column = columns_of_chunk(1, COLS)
    x_at = tile_at(x_ptr, outer, x_col, x_outer, first, column, INNER, VEC)
    y_at = tile_at(y_ptr, outer, y_col, y_outer, first, column, INNER, VEC)

    x = load_tiles(x_at, x_col, column, n_cols, exists, -float("inf"), CHUNKS, UNPREDICATED, COLS, VEC)
    m = x[0]
    for c in tl.static_range(1, CHUNKS):
        m = tl.maximum(m, x[c])
    m = tl.maximum(m.to(tl.float32), LOWEST)
    s = tl.zeros_like(m)
    exps = ()
    for c in tl.static_range(CHUNKS):
        e = exp(upcast(x[c], PTX, RECOMPUTE) - m)
        s += e
        exps = exps + (e,)

    top = tl.max(m, 1)[:, None, :]
    # rounded before the sum: whether a product and a sum are fused depends on the layout
    total = sum_over_columns(scaled(s, exp(m - top), PTX), INVARIANT)[:, None, :]

    FUSED: tl.constexpr = PTX and x_ptr.dtype.element_ty.primitive_bitwidth == 16 and y_ptr.dtype == x_ptr.dtype
    if LOG:
        by = total
    elif RECOMPUTE:
        base, shift, by = exp2_affine(top, FUSED)
        by = by * tl.div_rn(1.0, total)
    else:
        by = exp(m - top) * tl.div_rn(1.0, total)
    for c in tl.static_range(CHUNKS):
        if LOG:
            y = normalize(upcast(x[c], PTX, RECOMPUTE, True), top, total, LOG)
        elif RECOMPUTE:
            y = exp2_fma(upcast(x[c], PTX, True, True), base, shift, FUSED) * by
        else:
            y = exps[c] * by
        store_tile(y_at, y, c, y_col, column, n_cols, exists, UNPREDICATED, COLS, VEC)


@kernel()
def softmax_spatial_backward(
    y_ptr: Rows,  # the forward's output
    dy_ptr: Rows, dx_ptr: Rows,
    n_outer: Int64,
    n_cols: Int32,
    inner: Int64,  # inner and strides: in units of VEC
    n_blocks: Int32,
    y_outer: Int64, y_col: Int64, dy_outer: Int64, dy_col: Int64, dx_outer: Int64, dx_col: Int64,
    LOG: tl.constexpr, OUTERS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr,
    VEC: tl.constexpr, CHUNKS: tl.constexpr, UNPREDICATED: tl.constexpr, RECOMPUTE: tl.constexpr,
    INVARIANT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    outer, is_outer = outer_of(pid // n_blocks, n_outer, OUTERS)
    first, exists = positions_of(pid % n_blocks, inner, INNER, VEC)
    if OUTERS > 1:
        exists = exists & is_outer
    column = columns_of_chunk(1, COLS)
    y_at = tile_at(y_ptr, outer, y_col, y_outer, first, column, INNER, VEC)
    dy_at = tile_at(dy_ptr, outer, dy_col, dy_outer, first, column, INNER, VEC)
    dx_at = tile_at(dx_ptr, outer, dx_col, dx_outer, first, column, INNER, VEC)

    dy = load_tiles(dy_at, dy_col, column, n_cols, exists, 0.0, CHUNKS, UNPREDICATED, COLS, VEC)
    y = load_tiles(y_at, y_col, column, n_cols, exists, 0.0, CHUNKS, UNPREDICATED, COLS, VEC)
    d = tl.zeros([OUTERS, COLS, INNER], tl.float32)
    for c in tl.static_range(CHUNKS):
        dy_c = upcast(dy[c], PTX, RECOMPUTE)
        y_c = dy_c  # unused where LOG
        if not LOG:
            y_c = upcast(y[c], PTX, RECOMPUTE)
        d += gradient_term(y_c, dy_c, LOG)
    d = sum_over_columns(d, INVARIANT)[:, None, :]
    for c in tl.static_range(CHUNKS):
        dx = gradient(upcast(y[c], PTX, RECOMPUTE, True), upcast(dy[c], PTX, RECOMPUTE, True), d, LOG)
        store_tile(dx_at, dx, c, dx_col, column, n_cols, exists, UNPREDICATED, COLS, VEC)
