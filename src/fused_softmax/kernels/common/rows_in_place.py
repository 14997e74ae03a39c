"""Softmax and log_softmax of rows that lie in shared memory, in place.

The rows are a piece of memory without a gap, `packed` (`gathered_rows`), on one side of a transposition; on the other
side their columns lie apart. Each row is reduced with LANES neighbors of a warp. A short row is held in registers. A
LONG one is read three times from shared memory, in steps of CHUNKS: for its maximum, its sum, and the results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gathered_rows import fetch_at, max_of, max_over_lanes, put_at, slot_of, sum_of, sum_over_lanes
from .numerics import LOWEST, exp2_affine, exp2_fma
from .row_scheduler import place_of_row
from .softmax_terms import normalize
from .transposed_ptx import largest_ptx


@triton.jit
def fetch_of_row(
    x_ptr, x_place, x_col, slot, column, columns, there, C: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
    UNPREDICATED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """WIDTH tiles of float32: elements of chunk C of each thread's row, -inf where there is none.

    slot: of chunk 0. column: its first one, of `columns`.  # all [THREADS]
    x_place, x_col: where interpreted, the row's place in x, and elements from a column to the next one.
    """
    OFFSET: tl.constexpr = C * STEP
    there = (OFFSET + column < columns) & there
    if PTX:
        ITEMSIZE: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth // 8
        DTYPE: tl.constexpr = x_ptr.dtype.element_ty.name
        FILL: tl.constexpr = "-inf" if C >= UNPREDICATED else ""
        return fetch_at(slot, there, DTYPE, OFFSET * ITEMSIZE, WIDTH, FILL, True)
    else:
        found = ()
        for i in tl.static_range(WIDTH):
            at = x_ptr + x_place + (column + OFFSET + i).to(tl.int64) * x_col
            found = found + (tl.load(at, mask=there, other=-float("inf")).to(tl.float32),)
        return found


@triton.jit
def put_of_row(
    values, y_ptr, y_place, y_col, slot, column, columns, there, C: tl.constexpr, STEP: tl.constexpr,
    WIDTH: tl.constexpr, UNPREDICATED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Puts WIDTH tiles of float32, in y's dtype, where `fetch_of_row` found its elements."""
    OFFSET: tl.constexpr = C * STEP
    real = (OFFSET + column < columns) & there
    if PTX:
        ITEMSIZE: tl.constexpr = y_ptr.dtype.element_ty.primitive_bitwidth // 8
        DTYPE: tl.constexpr = y_ptr.dtype.element_ty.name
        put_at(values, slot, real, DTYPE, OFFSET * ITEMSIZE, WIDTH, C >= UNPREDICATED, True)
    else:
        for i in tl.static_range(WIDTH):
            at = y_ptr + y_place + (column + OFFSET + i).to(tl.int64) * y_col
            tl.store(at, values[i].to(y_ptr.dtype.element_ty), mask=real)


@triton.jit
def largest_of_chunks(x_ptr, slot, CHUNKS: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr):
    """The largest of each thread's elements in CHUNKS whole chunks, in float32.  # slot: [THREADS]"""
    ASM: tl.constexpr = largest_ptx(x_ptr.dtype.element_ty.name, WIDTH, CHUNKS, STEP)
    return tl.inline_asm_elementwise(ASM, "=f,r", [slot], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def _exps_of(x, base, shift, N: tl.constexpr, FUSED: tl.constexpr):
    """N tiles of exp(x - m), or of a common multiple of it."""
    exps = ()
    for i in tl.static_range(N):
        exps = exps + (exp2_fma(x[i], base, shift, FUSED),)
    return exps


@triton.jit
def _put_chunk(
    x, exps, m, s, by, y_ptr, y_place, y_col, slot, column, columns, there, FIRST: tl.constexpr, C: tl.constexpr,
    LOG: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, UNPREDICATED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Puts the results of WIDTH elements, from number FIRST of x and of exps on."""
    y = ()
    for i in tl.static_range(WIDTH):
        if LOG:
            y = y + (normalize(x[FIRST + i], m, s, LOG),)
        else:
            y = y + (exps[FIRST + i] * by,)
    put_of_row(y, y_ptr, y_place, y_col, slot, column, columns, there, C, STEP, WIDTH, UNPREDICATED, PTX)


@triton.jit
def softmax_in_place(
    x_ptr, y_ptr, rows, n_cols, stride, first_outer, first_position, inner, multiplier, power, outer_stride, col_stride,
    INTO_ROWS: tl.constexpr, LOG: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr,
    UNPREDICATED: tl.constexpr, ODD: tl.constexpr, LONG: tl.constexpr, THREADS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The softmax of each of `rows` rows of a piece, in the region, `stride` elements apart.

    x_ptr, y_ptr: the piece of the packed side, of y where INTO_ROWS, and all of the other side, whose strides are
    outer_stride and col_stride. The interpreter reads x and writes y itself.
    """
    packed_ptr = y_ptr if INTO_ROWS else x_ptr
    # 16 bits: exp(x - m) in one multiply-add and one exp2; their common factor cancels in exp/sum
    FUSED: tl.constexpr = PTX and x_ptr.dtype.element_ty.primitive_bitwidth == 16 and not LOG
    STEP: tl.constexpr = LANES * WIDTH
    thread = tl.arange(0, THREADS)
    lane = thread % LANES
    column = lane * WIDTH
    for k in range(0, (rows * LANES + THREADS - 1) // THREADS):
        row = thread // LANES + k * (THREADS // LANES)
        exists = row < rows
        x_place, x_col, y_place, y_col = row, 1, row, 1
        if not PTX:
            x_place, y_place = row * stride, row * stride
            apart = place_of_row(row, first_outer, first_position, inner, multiplier, power, outer_stride)
            if INTO_ROWS:
                x_place, x_col = apart, col_stride
            else:
                y_place, y_col = apart, col_stride
        start = row * stride
        columns = n_cols
        edge = start
        if ODD:  # words start at even places; the odd element before or after them is the first lane's
            odd = ((start + (packed_ptr.to(tl.int64) // 2).to(tl.int32)) & 1) if PTX else start * 0
            edge = start + tl.where(odd == 1, 0, n_cols - 1)
            start += odd
            columns = n_cols - 1
        slot = slot_of(packed_ptr, start + column, 0, PTX)
        of_edge = exists & (lane == 0)
        edge_slot = slot_of(packed_ptr, edge, 0, PTX)
        last, alone = lane * 0 + n_cols - 1, ()
        if ODD:
            alone = fetch_of_row(x_ptr, x_place, x_col, edge_slot, last, n_cols, of_edge, 0, STEP, 1, 0, PTX)
        if not LONG:
            x = ()
            for c in tl.static_range(CHUNKS):
                x = x + fetch_of_row(
                    x_ptr, x_place, x_col, slot, column, columns, exists, c, STEP, WIDTH, UNPREDICATED, PTX
                )
            x = x + alone
            HELD: tl.constexpr = CHUNKS * WIDTH + (1 if ODD else 0)
            m = tl.maximum(max_over_lanes(max_of(x, 0, HELD), LANES, PTX), LOWEST)
            base, shift, _ = exp2_affine(m, FUSED)
            exps = _exps_of(x, base, shift, HELD, FUSED)
            s = sum_over_lanes(sum_of(exps, 0, HELD), LANES, PTX)
            by = tl.div_rn(1.0, s)
            for c in tl.static_range(CHUNKS):
                _put_chunk(
                    x, exps, m, s, by, y_ptr, y_place, y_col, slot, column, columns, exists, c * WIDTH, c, LOG, STEP,
                    WIDTH, UNPREDICATED, PTX,
                )  # fmt: skip
            if ODD:
                _put_chunk(
                    x, exps, m, s, by, y_ptr, y_place, y_col, edge_slot, last, n_cols, of_edge, CHUNKS * WIDTH, 0, LOG,
                    STEP, 1, 0, PTX,
                )  # fmt: skip
        else:
            ITEMSIZE: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth // 8 if PTX else 1
            whole = columns // (CHUNKS * STEP) * (CHUNKS * STEP)
            m = tl.zeros([THREADS], tl.float32) + LOWEST
            if ODD:
                m = tl.maximum(m, alone[0])
            for at in range(0, whole, CHUNKS * STEP):
                if PTX:
                    m = tl.maximum(m, largest_of_chunks(x_ptr, slot + at * ITEMSIZE, CHUNKS, STEP, WIDTH))
                else:
                    for c in tl.static_range(CHUNKS):
                        x = fetch_of_row(
                            x_ptr, x_place, x_col, slot, column + at, columns, exists, c, STEP, WIDTH, CHUNKS, PTX
                        )
                        m = tl.maximum(m, max_of(x, 0, WIDTH))
            for at in range(whole, columns, STEP):
                x = fetch_of_row(
                    x_ptr, x_place, x_col, slot + at * ITEMSIZE, column + at, columns, exists, 0, STEP, WIDTH, 0, PTX
                )
                m = tl.maximum(m, max_of(x, 0, WIDTH))
            m = max_over_lanes(m, LANES, PTX)
            base, shift, _ = exp2_affine(m, FUSED)
            s = tl.zeros([THREADS], tl.float32)
            if ODD:
                s += exp2_fma(alone[0], base, shift, FUSED)
            for at in range(whole, columns, STEP):
                x = fetch_of_row(
                    x_ptr, x_place, x_col, slot + at * ITEMSIZE, column + at, columns, exists, 0, STEP, WIDTH, 0, PTX
                )
                s += sum_of(_exps_of(x, base, shift, WIDTH, FUSED), 0, WIDTH)
            for at in range(0, whole, CHUNKS * STEP):
                exps = ()
                for c in tl.static_range(CHUNKS):
                    x = fetch_of_row(
                        x_ptr, x_place, x_col, slot + at * ITEMSIZE, column + at, columns, exists, c, STEP, WIDTH,
                        CHUNKS, PTX,
                    )  # fmt: skip
                    exps = exps + _exps_of(x, base, shift, WIDTH, FUSED)
                s += sum_of(exps, 0, CHUNKS * WIDTH)
            s = sum_over_lanes(s, LANES, PTX)
            by = tl.div_rn(1.0, s)
            for at in range(0, whole, CHUNKS * STEP):
                for c in tl.static_range(CHUNKS):
                    x = fetch_of_row(
                        x_ptr, x_place, x_col, slot + at * ITEMSIZE, column + at, columns, exists, c, STEP, WIDTH,
                        CHUNKS, PTX,
                    )  # fmt: skip
                    exps = _exps_of(x, base, shift, WIDTH, FUSED)
                    _put_chunk(
                        x, exps, m, s, by, y_ptr, y_place, y_col, slot + at * ITEMSIZE, column + at, columns, exists, 0,
                        c, LOG, STEP, WIDTH, CHUNKS, PTX,
                    )  # fmt: skip
            for at in range(whole, columns, STEP):
                x = fetch_of_row(
                    x_ptr, x_place, x_col, slot + at * ITEMSIZE, column + at, columns, exists, 0, STEP, WIDTH, 0, PTX
                )
                exps = _exps_of(x, base, shift, WIDTH, FUSED)
                _put_chunk(
                    x, exps, m, s, by, y_ptr, y_place, y_col, slot + at * ITEMSIZE, column + at, columns, exists, 0, 0,
                    LOG, STEP, WIDTH, 0, PTX,
                )  # fmt: skip
            if ODD:
                _put_chunk(
                    alone, _exps_of(alone, base, shift, 1, FUSED), m, s, by, y_ptr, y_place, y_col, edge_slot, last,
                    n_cols, of_edge, 0, 0, LOG, STEP, 1, 0, PTX,
                )  # fmt: skip
