"""Softmax and log_softmax along a dimension that is not contiguous, into rows that are: one read, one write.

    m = max(x);  s = sum(exp(x - m));  y = exp(x - m) / s     or   y = (x - m) - log(s)

x is (outer, n_cols, inner) with contiguous `inner`, y is (outer, inner, n_cols) without a gap. A program takes ROWS
rows, which are neighbors in both: it brings their columns to shared memory, transposed (`transposed_rows`), reduces
each row there with LANES neighbors of a warp, puts results in place, and writes the piece as one run of memory.

A short row is held in registers. A LONG one is read three times from shared memory, by a loop over GROUP chunks: for
its maximum, its sum, and the results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common.arguments import AnyTensor, Int32, Int64, Rows, kernel
from .common.early_start import await_previous
from .common.gathered_ptx import region_bytes
from .common.gathered_rows import (
    await_threads,
    declare_regions,
    max_of,
    max_over_lanes,
    scatter,
    slot_of,
    sum_of,
    sum_over_lanes,
)
from .common.numerics import LOWEST, exp2_affine, exp2_fma
from .common.softmax_terms import normalize
from .common.transposed_rows import (
    fetch_of_row,
    first_of_piece,
    gather_transposed,
    largest_of_chunks,
    place_of_row,
    put_of_row,
)


@triton.jit
def _exps_of(x, base, shift, N: tl.constexpr, FUSED: tl.constexpr):
    """N tiles of exp(x - m), or of a common multiple of it."""
    exps = ()
    for i in tl.static_range(N):
        exps = exps + (exp2_fma(x[i], base, shift, FUSED),)
    return exps


@triton.jit
def _put_chunk(
    x, exps, m, s, by, y_ptr, slot, column, columns, there, FIRST: tl.constexpr, C: tl.constexpr, LOG: tl.constexpr,
    STEP: tl.constexpr, WIDTH: tl.constexpr, UNPREDICATED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Puts the results of WIDTH elements, from number FIRST of x and of exps on."""
    y = ()
    for i in tl.static_range(WIDTH):
        if LOG:
            y = y + (normalize(x[FIRST + i], m, s, LOG),)
        else:
            y = y + (exps[FIRST + i] * by,)
    put_of_row(y, y_ptr, slot, column, columns, there, C, STEP, WIDTH, UNPREDICATED, PTX)


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

    # 16 bits: exp(x - m) in one multiply-add and one exp2; their common factor cancels in exp/sum
    FUSED: tl.constexpr = PTX and x_ptr.dtype.element_ty.primitive_bitwidth == 16 and not LOG
    STEP: tl.constexpr = LANES * WIDTH
    thread = tl.arange(0, THREADS)
    lane = thread % LANES
    column = lane * WIDTH
    for k in range(0, (rows * LANES + THREADS - 1) // THREADS):
        row = thread // LANES + k * (THREADS // LANES)
        exists = row < rows
        x_place = row.to(tl.int64)  # where interpreted: each row's place in x
        if not PTX:
            x_place = place_of_row(row, first_outer, first_position, inner, multiplier, power, x_outer)
        start = row * stride
        columns = n_cols
        edge = start
        if ODD:  # words start at even places; the odd element before or after them is the first lane's
            odd = ((start + (y_ptr.to(tl.int64) // 2).to(tl.int32)) & 1) if PTX else start * 0
            edge = start + tl.where(odd == 1, 0, n_cols - 1)
            start += odd
            columns = n_cols - 1
        slot = slot_of(y_ptr, start + column, 0, PTX)
        of_edge = exists & (lane == 0)
        edge_slot = slot_of(y_ptr, edge, 0, PTX)
        alone = ()
        if ODD:
            alone = fetch_of_row(
                x_ptr, x_place, x_col, edge_slot, lane * 0 + n_cols - 1, n_cols, of_edge, 0, STEP, 1, 0, PTX
            )
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
                    x, exps, m, s, by, y_ptr, slot, column, columns, exists, c * WIDTH, c, LOG, STEP, WIDTH,
                    UNPREDICATED, PTX,
                )  # fmt: skip
            if ODD:
                _put_chunk(
                    x, exps, m, s, by, y_ptr, edge_slot, lane * 0 + n_cols - 1, n_cols, of_edge, CHUNKS * WIDTH, 0, LOG,
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
                        x, exps, m, s, by, y_ptr, slot + at * ITEMSIZE, column + at, columns, exists, 0, c, LOG, STEP,
                        WIDTH, CHUNKS, PTX,
                    )  # fmt: skip
            for at in range(whole, columns, STEP):
                x = fetch_of_row(
                    x_ptr, x_place, x_col, slot + at * ITEMSIZE, column + at, columns, exists, 0, STEP, WIDTH, 0, PTX
                )
                exps = _exps_of(x, base, shift, WIDTH, FUSED)
                _put_chunk(
                    x, exps, m, s, by, y_ptr, slot + at * ITEMSIZE, column + at, columns, exists, 0, 0, LOG, STEP,
                    WIDTH, 0, PTX,
                )  # fmt: skip
            if ODD:
                _put_chunk(
                    alone, _exps_of(alone, base, shift, 1, FUSED), m, s, by, y_ptr, edge_slot, lane * 0 + n_cols - 1,
                    n_cols, of_edge, 0, 0, LOG, STEP, 1, 0, PTX,
                )  # fmt: skip
    scatter(y_ptr, 0, rows * n_cols, PIECE, 0, THREADS, BULK, PTX)
