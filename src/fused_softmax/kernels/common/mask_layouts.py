"""How a mask lies in memory: the numbers that name it, and where a row's mask begins."""

from __future__ import annotations

import triton
import triton.language as tl

# the kind of a mask: none, uint8 that is 0 where a column is hidden, or floating numbers to add
NO_MASK = tl.constexpr(0)
BOOLEAN = tl.constexpr(1)
ADDITIVE = tl.constexpr(2)
# how its columns lie: one value for all, neighbors, any stride, or neighbors that are read in the mask's own vectors
ONE_VALUE = tl.constexpr(0)
NEIGHBORS = tl.constexpr(1)
STRIDED = tl.constexpr(2)
SHIFTED = tl.constexpr(3)
# how its rows lie: as the scores' rows, one stride apart; one stride for the batches that do not share it; any strides
OWN = tl.constexpr(0)
SHARED = tl.constexpr(1)
ANY_ROWS = tl.constexpr(2)


@triton.jit
def mask_row_of(batch, query, n_middle, n_inner, m_outer, m_middle, m_inner, m_query, MASK_VEC: tl.constexpr):
    """The elements from the mask to each row's mask; strides in units of MASK_VEC.  # batch, query: [SEGMENTS, 1]"""
    batch, n_inner, n_middle = batch.to(tl.int32), n_inner.to(tl.int32), n_middle.to(tl.int32)
    group, inner = batch // n_inner, batch % n_inner
    outer, middle = group // n_middle, group % n_middle
    return (outer * m_outer + middle * m_middle + inner * m_inner + query * m_query) * MASK_VEC


@triton.jit
def elements_to(column, m_col, MASK_COLS: tl.constexpr):
    """Elements from a row's mask to that of `column`."""
    if MASK_COLS == STRIDED:
        return column * m_col
    else:
        return column
