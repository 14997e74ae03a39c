"""Rows whose columns are not neighbors in memory, but whose neighbors are: into shared memory, row after row.

A piece has ROWS rows, which follow each other in the output. Threads read vectors of VEC neighboring rows, and write
each of their elements to its own row in shared memory, where the piece lies as in the output (`gathered_rows`). SPAN
lanes of a warp read neighboring vectors of one column, and the warp has 32/SPAN columns, or pairs of them where two
elements are one word. So few lanes meet in a bank.

    memory          |column 0: a a a a b b b b ...|column 1: ...     VEC rows for each thread a, b
    shared memory   |row 0: a . . .|row 1: a . . .|row 2: ...        one column, or a pair, of each of its rows
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gathered_rows import fetch_at, put_at, slot_of
from .row_scheduler import fast_divmod
from .transposed_ptx import (
    largest_ptx,
    load_constraints,
    load_ptx,
    store_constraints,
    store_ptx,
    words_of,
    words_type,
)


@triton.jit
def first_of_piece(first_row, inner, reciprocal):
    """(outer, position) of a row. reciprocal: 2^64/inner, rounded up, of which the quotient is at most 1 too large."""
    outer = tl.umulhi(first_row.to(tl.uint64), reciprocal.to(tl.uint64)).to(tl.int64)
    position = first_row - outer * inner
    over = position < 0
    return tl.where(over, outer - 1, outer), tl.where(over, position + inner, position).to(tl.int32)


@triton.jit
def place_of_row(row, first_outer, first_position, inner, multiplier, power, x_outer):
    """Where a row of the piece starts in x, in elements.  # row: [THREADS], result int64"""
    outer, position = fast_divmod(first_position + row, inner, multiplier, power)
    return (first_outer + outer) * x_outer + position


@triton.jit
def gather_transposed(
    x_ptr, y_ptr, rows, n_cols, stride, first_outer, first_position, inner, multiplier, power, x_outer, x_col,
    ROWS: tl.constexpr, VEC: tl.constexpr, SPAN: tl.constexpr, ACROSS: tl.constexpr, PAIR: tl.constexpr,
    GROUPS: tl.constexpr, THREADS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Copies `rows` rows of x, ROWS at most, to the region of the piece at y_ptr; they are there after a barrier.

    stride: elements from a row to the next one there. ACROSS: warps next to each other along the rows; the others take
    the next columns. GROUPS: loads, or pairs of them, of a thread for each of its vectors of rows, before it stores.
    """
    if PTX:
        ITEMSIZE: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth // 8
        BLOCKS: tl.constexpr = ROWS // (ACROSS * SPAN * VEC)
        STEP: tl.constexpr = THREADS // (ACROSS * SPAN) * PAIR
        WORDS: tl.constexpr = words_of(VEC, ITEMSIZE) * PAIR * GROUPS
        LOAD: tl.constexpr = load_ptx(VEC, ITEMSIZE, PAIR, GROUPS, STEP)
        STORE: tl.constexpr = store_ptx(VEC, ITEMSIZE, PAIR, GROUPS, STEP)
        LOADED: tl.constexpr = load_constraints(WORDS)
        STORED: tl.constexpr = store_constraints(WORDS)
        TYPE: tl.constexpr = words_type(WORDS)
        thread = tl.arange(0, THREADS)
        vector = thread // 32 % ACROSS * SPAN + thread % SPAN
        column = (thread // (32 * ACROSS) * (32 // SPAN) + thread % 32 // SPAN) * PAIR
        col_bytes = x_col * ITEMSIZE
        ats, slots, lefts = (), (), ()
        for b in tl.static_range(BLOCKS):
            row = (b * ACROSS * SPAN + vector) * VEC
            place = place_of_row(row, first_outer, first_position, inner, multiplier, power, x_outer)
            ats = ats + (x_ptr.to(tl.int64) + (place + column * x_col) * ITEMSIZE,)
            slots = slots + (slot_of(y_ptr, row * stride + column, 0, PTX),)
            lefts = lefts + (tl.where(row < rows, n_cols - column, 0),)
        for start in range(0, n_cols, STEP * GROUPS):
            words = ()
            for b in tl.static_range(BLOCKS):
                source = [ats[b] + start * col_bytes, col_bytes, col_bytes * STEP, lefts[b] - start]
                words = words + (tl.inline_asm_elementwise(LOAD, LOADED, source, dtype=TYPE, is_pure=False, pack=1),)
            for b in tl.static_range(BLOCKS):
                into = (slots[b] + start * ITEMSIZE, stride * ITEMSIZE, lefts[b] - start)
                tl.inline_asm_elementwise(STORE, STORED, into + words[b], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def fetch_of_row(
    x_ptr, x_place, x_col, slot, column, columns, there, C: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
    UNPREDICATED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """WIDTH tiles of float32: elements of chunk C of each thread's row, -inf where there is none.

    slot: of chunk 0. column: its first one, of `columns`.  # all [THREADS]
    """
    OFFSET: tl.constexpr = C * STEP
    there = (OFFSET + column < columns) & there
    if PTX:
        ITEMSIZE: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth // 8
        FILL: tl.constexpr = "-inf" if C >= UNPREDICATED else ""
        return fetch_at(slot, there, x_ptr.dtype.element_ty.name, OFFSET * ITEMSIZE, WIDTH, FILL, True)
    else:
        found = ()
        for i in tl.static_range(WIDTH):
            at = x_ptr + x_place + (column + OFFSET + i).to(tl.int64) * x_col
            found = found + (tl.load(at, mask=there, other=-float("inf")).to(tl.float32),)
        return found


@triton.jit
def put_of_row(
    values, y_ptr, slot, column, columns, there, C: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
    UNPREDICATED: tl.constexpr, PTX: tl.constexpr,
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
            tl.store(y_ptr + slot + OFFSET + i, values[i].to(y_ptr.dtype.element_ty), mask=real)


@triton.jit
def largest_of_chunks(x_ptr, slot, CHUNKS: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr):
    """The largest of each thread's elements in CHUNKS whole chunks, in float32.  # slot: [THREADS]"""
    ASM: tl.constexpr = largest_ptx(x_ptr.dtype.element_ty.name, WIDTH, CHUNKS, STEP)
    return tl.inline_asm_elementwise(ASM, "=f,r", [slot], dtype=tl.float32, is_pure=False, pack=1)
