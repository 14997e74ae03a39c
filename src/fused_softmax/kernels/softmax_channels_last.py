"""Softmax and log_softmax along the dimension that is contiguous, into an output where another one is: channels_last.

    m = max(x);  s = sum(exp(x - m));  y = exp(x - m) / s     or   y = (x - m) - log(s)

x is (outer, inner, n_cols) without a gap, y is (outer, n_cols, inner) with contiguous `inner`. A program takes ROWS
rows, which are neighbors in both: it reads their piece as one run of memory, reduces each row in shared memory
(`rows_in_place`), and writes the columns, transposed (`transposed_rows`). `softmax_transposed` goes the other way.
"""

from __future__ import annotations

import triton.language as tl

from .common.arguments import AnyTensor, Int32, Int64, Rows, kernel
from .common.early_start import await_previous
from .common.gathered_ptx import region_bytes
from .common.gathered_rows import await_gathered, await_threads, declare_regions, gather
from .common.row_scheduler import first_of_piece
from .common.rows_in_place import softmax_in_place
from .common.transposed_rows import scatter_transposed


@kernel()
def softmax_channels_last(
    x_ptr: Rows, y_ptr: AnyTensor,
    n_rows: Int64,  # outer * inner
    n_cols: Int32,
    stride: Int32,  # elements from a row to the next one in shared memory
    inner: Int32, multiplier: Int64, power: Int64,  # the numbers of `fast_divmod`
    reciprocal: Int64,  # 2^64/inner, rounded up, its bits
    y_outer: Int64, y_col: Int64,  # strides of y, in elements
    LOG: tl.constexpr, ROWS: tl.constexpr,
    # of the write: positions of a vector, its lanes, warps along the rows, columns of a word, vectors of a thread
    VEC: tl.constexpr, SPAN: tl.constexpr, ACROSS: tl.constexpr, PAIR: tl.constexpr, GROUPS: tl.constexpr,
    LANES: tl.constexpr,  # of a row
    WIDTH: tl.constexpr,  # elements of an access to a row
    CHUNKS: tl.constexpr,  # of a thread, or, where LONG, of a step of the loop
    UNPREDICATED: tl.constexpr,  # chunks that all threads of a row fill
    ODD: tl.constexpr,  # rows have an odd number of 16-bit elements, and are read as words and one element
    LONG: tl.constexpr,
    PIECE: tl.constexpr,  # elements, at most
    THREADS: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
    DYNAMIC: tl.constexpr,  # bytes of shared memory that the launch adds, for larger pieces
):  # fmt: skip
    declare_regions(region_bytes(PIECE, x_ptr.dtype.element_ty.primitive_bitwidth // 8), PTX, DYNAMIC)
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    rows = tl.minimum(n_rows - first_row, ROWS).to(tl.int32)
    first_outer, first_position = first_of_piece(first_row, inner, reciprocal)
    x_ptr = x_ptr + first_row * n_cols
    await_previous(EARLY)
    gather(x_ptr, 0, rows * n_cols, PIECE, 0, THREADS, PTX)
    await_gathered(PTX)
    softmax_in_place(
        x_ptr, y_ptr, rows, n_cols, stride, first_outer, first_position, inner, multiplier, power, y_outer, y_col,
        False, LOG, LANES, WIDTH, CHUNKS, UNPREDICATED, ODD, LONG, THREADS, PTX,
    )  # fmt: skip
    await_threads(PTX)
    scatter_transposed(
        x_ptr, y_ptr, rows, n_cols, stride, first_outer, first_position, inner, multiplier, power, y_outer, y_col,
        ROWS, VEC, SPAN, ACROSS, PAIR, GROUPS, THREADS, PTX,
    )  # fmt: skip
