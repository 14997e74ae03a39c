"""Softmax and log_softmax along a dimension that is not contiguous, into rows that are: one read, one write.

    m = max(x);  s = sum(exp(x - m));  y = exp(x - m) / s     or   y = (x - m) - log(s)

x is (outer, n_cols, inner) with contiguous `inner`, y is (outer, inner, n_cols) without a gap. A program takes ROWS
rows, which are neighbors in both: it brings their columns to shared memory, transposed (`transposed_rows`), reduces
each row there (`rows_in_place`), and writes the piece as one run of memory. `softmax_channels_last` goes the other way.
"""

from __future__ import annotations

import triton.language as tl

from .common.arguments import AnyTensor, Int32, Int64, Rows, kernel
from .common.early_start import await_previous
from .common.gathered_ptx import region_bytes
from .common.gathered_rows import await_threads, declare_regions, scatter
from .common.row_scheduler import first_of_piece
from .common.rows_in_place import softmax_in_place
from .common.transposed_rows import gather_transposed


@kernel()
def softmax_transposed(
    x_ptr: AnyTensor, y_ptr: Rows,
    n_rows: Int64,  # outer * inner
    n_cols: Int32,
    stride: Int32,  # elements from a row to the next one in shared memory
    inner: Int32, multiplier: Int64, power: Int64,  # the numbers of `fast_divmod`
    reciprocal: Int64,  # 2^64/inner, rounded up, its bits
    x_outer: Int64, x_col: Int64,  # strides of x, in elements
    LOG: tl.constexpr, ROWS: tl.constexpr,
    # of the read: positions of a vector, its lanes, warps along the rows, columns of a word, loads before the stores
    VEC: tl.constexpr, SPAN: tl.constexpr, ACROSS: tl.constexpr, PAIR: tl.constexpr, GROUPS: tl.constexpr,
    LANES: tl.constexpr,  # of a row
    WIDTH: tl.constexpr,  # elements of an access to a row
    CHUNKS: tl.constexpr,  # of a thread, or, where LONG, of a step of the loop
    UNPREDICATED: tl.constexpr,  # chunks that all threads of a row fill
    ODD: tl.constexpr,  # rows have an odd number of 16-bit elements, and are read as words and one element
    LONG: tl.constexpr,
    PIECE: tl.constexpr,  # elements, at most
    THREADS: tl.constexpr, BULK: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
    DYNAMIC: tl.constexpr,  # bytes of shared memory that the launch adds, for larger pieces
):  # fmt: skip
    declare_regions(region_bytes(PIECE, y_ptr.dtype.element_ty.primitive_bitwidth // 8), PTX, DYNAMIC)
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    rows = tl.minimum(n_rows - first_row, ROWS).to(tl.int32)
    first_outer, first_position = first_of_piece(first_row, inner, reciprocal)
    y_ptr = y_ptr + first_row * n_cols
    await_previous(EARLY)
    gather_transposed(
        x_ptr, y_ptr, rows, n_cols, stride, first_outer, first_position, inner, multiplier, power, x_outer, x_col,
        ROWS, VEC, SPAN, ACROSS, PAIR, GROUPS, THREADS, PTX,
    )  # fmt: skip
    await_threads(PTX)
    softmax_in_place(
        x_ptr, y_ptr, rows, n_cols, stride, first_outer, first_position, inner, multiplier, power, x_outer, x_col,
        True, LOG, LANES, WIDTH, CHUNKS, UNPREDICATED, ODD, LONG, THREADS, PTX,
    )  # fmt: skip
    scatter(y_ptr, 0, rows * n_cols, PIECE, 0, THREADS, BULK, PTX)
