"""Programs that share a softmax over another dimension than the last: parts, steps of columns, and a part's numbers."""

from __future__ import annotations

import triton
import triton.language as tl

from .numerics import HIGHEST, exp, maximum, scaled, upcast
from .softmax_terms import gradient_term
from .spatial_tiles import load_tile, sum_over_columns
from .tiles import READS


@triton.constexpr_function
def reads_of_two_passes(dtype: tl.dtype) -> str:
    """The eviction policy of columns that are read twice: none for 16 bits.

    H200, time with a policy over time without, bfloat16, 5 shapes: 0.99 to 1.01 with 1.3e8 elements, 1.01 to 1.04 with
    4e7. float32 is up to 4% slower without.
    """
    return "" if dtype.primitive_bitwidth == 16 else READS.value


@triton.jit
def load_step(
    at, start, col_stride, column, end, exists, fill, CHUNKS: tl.constexpr, COLS: tl.constexpr, VEC: tl.constexpr,
    POLICY: tl.constexpr = READS,
):  # fmt: skip
    """The CHUNKS tiles from column `start` on; columns from `end` on are filled."""
    tiles = ()
    here = at + start * col_stride * VEC
    for c in tl.static_range(CHUNKS):
        tiles = tiles + (load_tile(here, c, col_stride, column, end - start, exists, fill, 0, COLS, VEC, POLICY),)
    return tiles


@triton.jit
def part_of(n_blocks, n_parts):
    """(outer, part, block) of this program."""
    pid = tl.program_id(0)
    return (pid // n_blocks // n_parts).to(tl.int64), pid // n_blocks % n_parts, pid % n_blocks


@triton.jit
def numbers_at(row, inner, first, INNER: tl.constexpr, VEC: tl.constexpr):
    """(offsets of the program's positions in a tensor of rows of `inner` positions, mask of those that exist).

    The mask is computed here: one reshaped from the tile's splits each access into single elements.
    # row: a scalar, or [OUTERS, 1] -> [1 or OUTERS, INNER], [1, INNER]
    """
    position = tl.arange(0, INNER)[None, :]
    left = tl.minimum(inner - first, INNER // VEC).to(tl.int32)
    return (row * inner + first) * VEC + position, position < left * VEC


@triton.jit
def numbers_of(
    outer, is_outer, part, n_parts, inner, first, OUTERS: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr
):
    """`numbers_at` of a part's numbers, for the indices of `outer` that `outer_of` gives.  # both [OUTERS, INNER]"""
    if OUTERS == 1:
        return numbers_at(outer * n_parts + part, inner, first, INNER, VEC)
    else:
        row = tl.reshape(outer, (OUTERS, 1)) * n_parts + part
        at, exists = numbers_at(row, inner, first, INNER, VEC)
        return at, exists & tl.reshape(is_outer, (OUTERS, 1))


@triton.jit
def last_first(index, n_programs, n_blocks, n_steps):
    """(outer, step of the columns, block) of program `index`, from the end of the tensor to its start."""
    pid = n_programs - 1 - index
    return (pid // n_blocks // n_steps).to(tl.int64), pid // n_blocks % n_steps, pid % n_blocks


@triton.jit
def moments_of_part(
    m, s, x_at, part, n_parts, n_cols, x_col, column, exists, CHUNKS: tl.constexpr, COLS: tl.constexpr,
    VEC: tl.constexpr, LSE: tl.constexpr, INVARIANT: tl.constexpr, POLICY: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """(maximum, sum) of each position over the columns of a part, and over the (m, s) before: [COLS, OUTERS, INNER].

    Part p has the steps p, p + n_parts, ... of the columns. So the programs of all parts read one run of memory at a
    time, and what they read last is the end of the columns.
    LSE: for a logsumexp. +inf gives a finite maximum and an infinite sum, not NaN.
    """
    STEP: tl.constexpr = CHUNKS * COLS
    for step in range(part, tl.cdiv(n_cols, STEP), n_parts):
        x = load_step(x_at, step * STEP, x_col, column, n_cols, exists, -float("inf"), CHUNKS, COLS, VEC, POLICY)
        top = x[0]
        for c in tl.static_range(1, CHUNKS):
            top = maximum(top, x[c], PTX)
        m_new = tl.maximum(m, top.to(tl.float32))
        if LSE:
            m_new = tl.minimum(m_new, HIGHEST)
        # a step has its own sum: fewer additions to a long sum cause less rounding
        of_step = tl.zeros_like(s)
        for c in tl.static_range(CHUNKS):
            of_step += exp(upcast(x[c], PTX) - m_new)
        s = s * exp(m - m_new) + of_step
        m = m_new
    top = tl.max(m, 0)
    return top, sum_over_columns(scaled(s, exp(m - top[None, :, :]), PTX), INVARIANT)


@triton.jit
def gradient_sum_of_part(
    d, y_at, dy_at, part, n_parts, n_cols, y_col, dy_col, column, exists, LOG: tl.constexpr, CHUNKS: tl.constexpr,
    COLS: tl.constexpr, VEC: tl.constexpr, INVARIANT: tl.constexpr, POLICY: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The gradient's sum of each position over the columns of a part, and the d before: [COLS, 1, INNER].

    Part p has the steps p, p + n_parts, ... of the columns, as in `moments_of_part`.
    """
    STEP: tl.constexpr = CHUNKS * COLS
    n_steps = tl.cdiv(n_cols, STEP)
    if LOG:  # of one tensor registers hold two steps, so that loads never pause
        dy = load_step(dy_at, part * STEP, dy_col, column, n_cols, exists, 0.0, CHUNKS, COLS, VEC, POLICY)
        for step in range(part, n_steps, n_parts):
            start = tl.minimum(step + n_parts, n_steps) * STEP  # all is masked from n_steps on; `start` has 31 bits
            following = load_step(dy_at, start, dy_col, column, n_cols, exists, 0.0, CHUNKS, COLS, VEC, POLICY)
            d += _sum_of_step(dy, dy, d, LOG, CHUNKS, PTX)
            dy = following
    else:
        for step in range(part, n_steps, n_parts):
            start = step * STEP
            dy = load_step(dy_at, start, dy_col, column, n_cols, exists, 0.0, CHUNKS, COLS, VEC, POLICY)
            y = load_step(y_at, start, y_col, column, n_cols, exists, 0.0, CHUNKS, COLS, VEC, POLICY)
            d += _sum_of_step(y, dy, d, LOG, CHUNKS, PTX)
    return sum_over_columns(d, INVARIANT)


@triton.jit
def _sum_of_step(y, dy, d, LOG: tl.constexpr, CHUNKS: tl.constexpr, PTX: tl.constexpr):
    """The terms of a step's chunks, added up, as d: [COLS, 1, INNER]."""
    of_step = tl.zeros_like(d)
    for c in tl.static_range(CHUNKS):
        of_step += gradient_term(upcast(y[c], PTX), upcast(dy[c], PTX), LOG)
    return of_step
