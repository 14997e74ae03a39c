"""Copies of strided tensors: whose contiguous dimension is another one, or whose elements are all one step apart."""

from __future__ import annotations

import triton.language as tl

from .common.arguments import AnyTensor, Count, kernel
from .common.early_start import await_previous


@kernel()
def transposed_copy(
    x_ptr: AnyTensor, y_ptr: AnyTensor,
    n_rows: Count,  # in units of X_VEC, as x's strides
    n_cols: Count,  # in units of Y_VEC, as y's strides
    n_middle: Count,
    x_outer: Count, x_middle: Count, x_col: Count, y_outer: Count, y_middle: Count, y_row: Count,
    ROWS: tl.constexpr, COLS: tl.constexpr,
    X_VEC: tl.constexpr,  # elements, at whose multiples all runs of x start and end
    Y_VEC: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """y[outer, middle, row, col] = x[outer, middle, col, row], by tiles: rows are neighbors in x, columns in y.

    A tile is read along the rows and written along the columns. Triton changes its layout in between, through shared
    memory. torch's own copy of 16-bit numbers takes 3 to 6 times as long as one of contiguous numbers (H200).
    """
    rows, cols = n_rows * X_VEC, n_cols * Y_VEC
    row_blocks, col_blocks = tl.cdiv(rows, ROWS), tl.cdiv(cols, COLS)
    group, block = tl.program_id(0) // (row_blocks * col_blocks), tl.program_id(0) % (row_blocks * col_blocks)
    outer, middle = (group // n_middle).to(tl.int64), (group % n_middle).to(tl.int64)
    row = block // col_blocks * ROWS + tl.arange(0, ROWS)
    col = block % col_blocks * COLS + tl.arange(0, COLS)
    x_ptr += (outer * x_outer + middle * x_middle) * X_VEC
    y_ptr += (outer * y_outer + middle * y_middle) * Y_VEC
    await_previous(EARLY)
    there = (col < cols)[:, None] & (row < rows)[None, :]
    tile = tl.load(x_ptr + (col.to(tl.int64) * x_col * X_VEC)[:, None] + row[None, :], mask=there)
    there = (row < rows)[:, None] & (col < cols)[None, :]
    tl.store(y_ptr + (row.to(tl.int64) * y_row * Y_VEC)[:, None] + col[None, :], tl.trans(tile), mask=there)


@kernel()
def stepped_copy(
    x_ptr: AnyTensor, y_ptr: AnyTensor,
    n: Count,
    step: Count,  # x's stride, in elements
    THREADS: tl.constexpr, CHUNKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y[i] = x[i * step], such as every second column.

    Neighboring threads read neighbors: a chunk has one element for each thread, because Triton would give a thread
    several neighbors of a larger one, and each access of a warp would meet 32 sectors. torch's own copy finds the
    address of each element by divisions. H200, two elements apart, us of torch and here: 1.31e6 of bfloat16 3.48 and
    1.86, of float32 4.53 and 2.52; 6e7 139 and 83, 193 and 167.
    """
    step = tl.cast(step, tl.int64)
    start = tl.program_id(0).to(tl.int64) * (THREADS * CHUNKS)
    i = tl.arange(0, THREADS)
    x_at, y_at = x_ptr + start * step + i * step, y_ptr + start + i
    left = n - start
    await_previous(EARLY)
    x = ()
    for c in tl.static_range(CHUNKS):
        x = x + (tl.load(x_at + c * THREADS * step, mask=i < left - c * THREADS),)
    for c in tl.static_range(CHUNKS):
        tl.store(y_at + c * THREADS, x[c], mask=i < left - c * THREADS)
