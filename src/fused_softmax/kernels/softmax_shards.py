"""softmax and log_softmax of rows whose columns are spread over ranks: what remains once a row's numbers are known.

    log_softmax: y = (x - M) - log(S)
    gradients:   dx = y*(dy - d), d = sum(y*dy)     or   dx = dy - exp(y)*d, d = sum(dy)

M, S and d are of all ranks' columns. One program adds up a row's terms, in an order that depends on the width alone;
any number of programs share the writing of a row. The formulas are those of the one-GPU kernels.
"""

from __future__ import annotations

import triton.language as tl

from .common.arguments import Int32, Int64, Rows, Vector, kernel
from .common.numerics import lies_in_lanes, upcast
from .common.softmax_terms import gradient, gradient_term, normalize
from .common.tiles import head_and_tail, load_chunks, span_of, start_of, store_chunk, unit_of, width_if


@kernel(num_stages=3)
def shard_gradient_sums(
    y_ptr: Rows,  # aligned to VEC elements, as dy_ptr; not read where LOG
    dy_ptr: Rows,
    sums_ptr: Vector,  # [n_rows] float32
    n_rows: Int64,
    n_cols: Int32,  # n_cols and strides: in units of VEC, or of one element where UNALIGNED
    y_stride: Int64, dy_stride: Int64,
    phase: Int32,
    LOG: tl.constexpr, ROWS: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr,
    UNALIGNED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """d over these columns."""
    STEP: tl.constexpr = CHUNKS * VECTORS * VEC
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    exists = row < n_rows
    head, interior = span_of(row, y_stride, phase, n_cols, VEC, UNALIGNED)
    y_row = y_ptr + start_of(row, y_stride, phase, VEC, UNALIGNED)
    dy_row = dy_ptr + start_of(row, dy_stride, phase, VEC, UNALIGNED)
    width = width_if(exists, interior + 0 * row.to(tl.int32))
    zero = tl.zeros([1, 1], tl.int64)
    if UNALIGNED:
        head_tail, in_head_tail = head_and_tail(head, interior, n_cols, exists, VECTORS, VEC)
        dy_head_tail = tl.load(dy_row + head_tail, mask=in_head_tail, other=0.0)
        y_head_tail = dy_head_tail if LOG else tl.load(y_row + head_tail, mask=in_head_tail, other=0.0)
    d = tl.zeros([ROWS, VECTORS], tl.float32)
    ROUNDED: tl.constexpr = lies_in_lanes(VEC, y_ptr.dtype.element_ty)
    for step in range(tl.cdiv(n_cols if UNALIGNED else n_cols * VEC, STEP)):
        start = (zero + step) * STEP
        dy = load_chunks(dy_row + start, width - start, ROWS, CHUNKS, 0, VECTORS, VEC, 0.0)
        y = dy if LOG else load_chunks(y_row + start, width - start, ROWS, CHUNKS, 0, VECTORS, VEC, 0.0)
        for c in tl.static_range(CHUNKS):
            d += tl.sum(gradient_term(upcast(y[c], PTX), upcast(dy[c], PTX), LOG, ROUNDED), 2)
    if UNALIGNED:
        d += gradient_term(y_head_tail, dy_head_tail, LOG, True)
    tl.store(sums_ptr + row, tl.sum(d, 1)[:, None], mask=exists)


@kernel(splits_rows=True)
def shard_gradient(
    y_ptr: Rows, dy_ptr: Rows, dx_ptr: Rows,  # aligned to VEC elements
    sums_ptr: Vector,  # [n_rows] float32: d of all columns
    n_rows: Int64, n_cols: Int32, y_stride: Int64, dy_stride: Int64, dx_stride: Int64, phase: Int32, n_splits: Int32,
    LOG: tl.constexpr, ROWS: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr,
    UNALIGNED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """dx of these columns."""
    pid = tl.program_id(0).to(tl.int64)
    row, exists, split, head, interior, first, width = unit_of(
        pid, n_rows, n_splits, y_stride, phase, n_cols, ROWS, VECTORS, VEC, CHUNKS, UNALIGNED
    )
    y_row = y_ptr + start_of(row, y_stride, phase, VEC, UNALIGNED)
    dy_row = dy_ptr + start_of(row, dy_stride, phase, VEC, UNALIGNED)
    dx_row = dx_ptr + start_of(row, dx_stride, phase, VEC, UNALIGNED)
    y = load_chunks(y_row + first, width, ROWS, CHUNKS, 0, VECTORS, VEC, 0.0)
    dy = load_chunks(dy_row + first, width, ROWS, CHUNKS, 0, VECTORS, VEC, 0.0)
    d = tl.load(sums_ptr + row, mask=exists, other=0.0)
    for c in tl.static_range(CHUNKS):
        dx = gradient(upcast(y[c], PTX), upcast(dy[c], PTX), d[:, :, None], LOG)
        store_chunk(dx_row + first, width, dx, c, ROWS, 0, VECTORS, VEC)
    if UNALIGNED:
        head_tail, in_head_tail = head_and_tail(head, interior, n_cols, (split == 0) & exists, VECTORS, VEC)
        y_head_tail = tl.load(y_row + head_tail, mask=in_head_tail, other=0.0)
        dy_head_tail = tl.load(dy_row + head_tail, mask=in_head_tail, other=0.0)
        dx = gradient(y_head_tail, dy_head_tail, d, LOG)
        tl.store(dx_row + head_tail, dx.to(dx_ptr.dtype.element_ty), mask=in_head_tail)


@kernel(splits_rows=True)
def log_softmax_shard(
    x_ptr: Rows, y_ptr: Rows,  # aligned to VEC elements
    moments_ptr: Vector,  # [n_rows, 2] float32: (M, S)
    n_rows: Int64, n_cols: Int32, x_stride: Int64, y_stride: Int64, phase: Int32, n_splits: Int32,
    ROWS: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr, UNALIGNED: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """y of these columns."""
    pid = tl.program_id(0).to(tl.int64)
    row, exists, split, head, interior, first, width = unit_of(
        pid, n_rows, n_splits, x_stride, phase, n_cols, ROWS, VECTORS, VEC, CHUNKS, UNALIGNED
    )
    x_row = x_ptr + start_of(row, x_stride, phase, VEC, UNALIGNED)
    y_row = y_ptr + start_of(row, y_stride, phase, VEC, UNALIGNED)
    x = load_chunks(x_row + first, width, ROWS, CHUNKS, 0, VECTORS, VEC, 0.0)
    row_max = tl.load(moments_ptr + 2 * row, mask=exists, other=0.0)
    row_sum = tl.load(moments_ptr + 2 * row + 1, mask=exists, other=1.0)
    for c in tl.static_range(CHUNKS):
        y = normalize(upcast(x[c], PTX), row_max[:, :, None], row_sum[:, :, None], True)
        store_chunk(y_row + first, width, y, c, ROWS, 0, VECTORS, VEC)
    if UNALIGNED:
        head_tail, in_head_tail = head_and_tail(head, interior, n_cols, (split == 0) & exists, VECTORS, VEC)
        x_head_tail = tl.load(x_row + head_tail, mask=in_head_tail, other=0.0).to(tl.float32)
        y = normalize(x_head_tail, row_max, row_sum, True)
        tl.store(y_row + head_tail, y.to(y_ptr.dtype.element_ty), mask=in_head_tail)
