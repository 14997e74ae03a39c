"""Where rows lie whose neighbors are neighbors in memory, and whose columns are not: (outer, n_cols, inner)."""

from __future__ import annotations

import triton
import triton.language as tl

from .row_scheduler import fast_divmod


@triton.jit
def first_of_piece(first_row, inner, reciprocal):
    """(outer, position) of a row. reciprocal: 2^64/inner, rounded up, of which the quotient is at most 1 too large."""
    outer = tl.umulhi(first_row.to(tl.uint64), reciprocal.to(tl.uint64)).to(tl.int64)
    position = first_row - outer * inner
    over = position < 0
    return tl.where(over, outer - 1, outer), tl.where(over, position + inner, position).to(tl.int32)


@triton.jit
def place_of_row(row, first_outer, first_position, inner, multiplier, power, outer_stride):
    """Where a row of the piece starts on this side, in elements.  # row: [THREADS], result int64"""
    outer, position = fast_divmod(first_position + row, inner, multiplier, power)
    return (first_outer + outer) * outer_stride + position
