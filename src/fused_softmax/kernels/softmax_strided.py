"""Softmax and log_softmax along a dimension that is not contiguous, or over rows that share no stride.

    m' = max(m, x);  s = s*exp(m - m') + exp(x - m');  y = exp(x - m) / s     or   y = (x - m) - log(s)

A program takes ROWS neighboring rows and reduces their columns online, COLS at a time. Triton lays out the tile by the
strides that are 1, so memory is read along rows or columns, whichever are contiguous. Each element of the tile has its
own (max, sum). The plan chooses this kernel for views that fold neither to rows nor to planes, where that is faster
than to copy them first. Where one step holds all columns, the input is read once. Elsewhere it is read twice, the
second time from L2 if L2 still holds it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common.arguments import AnyTensor, Count, Size, Stride, kernel
from .common.early_start import await_previous
from .common.numerics import LOWEST, exp, rounded_product
from .common.softmax_terms import normalize


@triton.jit
def _sum_of(terms, largest):
    """tl.sum(terms, 1) of terms that are not negative, small ones apart.  # [ROWS, COLS] -> [ROWS]

    A thread may add all terms of a row one after another. Terms below half a bit of the sum would then all be lost: 51
    of exp(-16) next to 7 of 1 are 8e-7 of their sum.
    """
    large = terms >= largest * 0.00390625
    return tl.sum(tl.where(large, terms, 0.0), 1) + tl.sum(tl.where(large, 0.0, terms), 1)


@kernel()
def softmax_strided(
    x_ptr: AnyTensor, y_ptr: AnyTensor,
    # neighboring rows; rows in all: outer x n_middle x n_rows, outer x n_middle on the grid. Specialized, as n_cols is,
    # because a mask of unknown alignment takes the vectors from an access
    n_rows: Size,
    n_cols: Size,
    n_middle: Count,
    x_outer: Stride,  # strides, in elements
    x_middle: Stride, x_row: Stride, x_col: Stride, y_outer: Stride, y_middle: Stride, y_row: Stride, y_col: Stride,
    LOG: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ONE_STEP: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    n_blocks = tl.cdiv(n_rows, ROWS)
    pid = tl.program_id(0)
    group = (pid // n_blocks).to(tl.int64)
    outer = group // n_middle
    middle = group % n_middle
    row = (pid % n_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :].to(tl.int64)
    x_at = x_ptr + outer * x_outer + middle * x_middle + row * x_row + col * x_col
    y_at = y_ptr + outer * y_outer + middle * y_middle + row * y_row + col * y_col
    await_previous(EARLY)
    if ONE_STEP:
        inside = (row < n_rows) & (col < n_cols)
        x = tl.load(x_at, mask=inside, other=-float("inf")).to(tl.float32)
        row_max = tl.maximum(tl.max(x, 1), LOWEST)[:, None]
        row_sum = _sum_of(exp(x - row_max), 1.0)[:, None]
        tl.store(y_at, normalize(x, row_max, row_sum, LOG).to(y_ptr.dtype.element_ty), mask=inside)
    else:
        m = tl.zeros([ROWS, COLS], tl.float32) + LOWEST
        s = tl.zeros([ROWS, COLS], tl.float32)
        compensation = tl.zeros([ROWS, COLS], tl.float32)  # the rounding error of s, a sum of hundreds of numbers
        for start in range(0, n_cols, COLS):
            inside = (row < n_rows) & (col + start < n_cols)
            x = tl.load(x_at + start * tl.cast(x_col, tl.int64), mask=inside, other=-float("inf")).to(tl.float32)
            m_new = tl.maximum(m, x)
            by = exp(m - m_new)
            e = exp(x - m_new) - compensation * by
            total = s * by + e
            # compensated summation (Kahan 1965)
            compensation = (total - s * by) - e
            s = total
            m = m_new
        row_max = tl.max(m, 1)[:, None]
        parts = rounded_product(s, exp(m - row_max))
        row_sum = _sum_of(parts, tl.max(parts, 1)[:, None])[:, None]
        last = (n_cols - 1) // COLS * COLS
        for step in range(0, n_cols, COLS):
            start = last - step
            inside = (row < n_rows) & (col + start < n_cols)
            x = tl.load(x_at + start * tl.cast(x_col, tl.int64), mask=inside, other=-float("inf")).to(tl.float32)
            y = normalize(x, row_max, row_sum, LOG).to(y_ptr.dtype.element_ty)
            tl.store(y_at + start * tl.cast(y_col, tl.int64), y, mask=inside)
