"""Rows whose columns are not neighbors in memory, but whose neighbors are: into shared memory, row after row, and back.

A piece has ROWS rows, which follow each other on the other side. Threads read vectors of VEC neighboring rows, and
write each of their elements to its own row in shared memory, where the piece lies as on that side (`gathered_rows`).
SPAN lanes of a warp read neighboring vectors of one column, and the warp has 32/SPAN columns, or pairs of them where
two elements are one word. So few lanes meet in a bank.

    memory          |column 0: a a a a b b b b ...|column 1: ...     VEC rows for each thread a, b
    shared memory   |row 0: a . . .|row 1: a . . .|row 2: ...        one column, or a pair, of each of its rows
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gathered_rows import slot_of
from .row_scheduler import place_of_row
from .transposed_ptx import (
    load_constraints,
    load_ptx,
    store_constraints,
    store_ptx,
    take_constraints,
    take_ptx,
    words_of,
    words_type,
    write_constraints,
    write_ptx,
)


@triton.jit
def _vector_and_column(SPAN: tl.constexpr, ACROSS: tl.constexpr, PAIR: tl.constexpr, THREADS: tl.constexpr):
    """Each thread's vector of a block of rows, and its first column of a step.  # [THREADS]"""
    thread = tl.arange(0, THREADS)
    vector = thread // 32 % ACROSS * SPAN + thread % SPAN
    return vector, (thread // (32 * ACROSS) * (32 // SPAN) + thread % 32 // SPAN) * PAIR


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
        vector, column = _vector_and_column(SPAN, ACROSS, PAIR, THREADS)
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
def scatter_transposed(
    x_ptr, y_ptr, rows, n_cols, stride, first_outer, first_position, inner, multiplier, power, y_outer, y_col,
    ROWS: tl.constexpr, VEC: tl.constexpr, SPAN: tl.constexpr, ACROSS: tl.constexpr, PAIR: tl.constexpr,
    GROUPS: tl.constexpr, THREADS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Writes the region of the piece at x_ptr to y: `gather_transposed`, the other way, after a barrier."""
    if PTX:
        ITEMSIZE: tl.constexpr = y_ptr.dtype.element_ty.primitive_bitwidth // 8
        BLOCKS: tl.constexpr = ROWS // (ACROSS * SPAN * VEC)
        STEP: tl.constexpr = THREADS // (ACROSS * SPAN) * PAIR
        WORDS: tl.constexpr = words_of(VEC, ITEMSIZE) * PAIR * GROUPS
        TAKE: tl.constexpr = take_ptx(VEC, ITEMSIZE, PAIR, GROUPS, STEP)
        WRITE: tl.constexpr = write_ptx(VEC, ITEMSIZE, PAIR, GROUPS, STEP)
        TAKEN: tl.constexpr = take_constraints(WORDS)
        WRITTEN: tl.constexpr = write_constraints(WORDS)
        TYPE: tl.constexpr = words_type(WORDS)
        vector, column = _vector_and_column(SPAN, ACROSS, PAIR, THREADS)
        col_bytes = y_col * ITEMSIZE
        for b in tl.static_range(BLOCKS):
            row = (b * ACROSS * SPAN + vector) * VEC
            place = place_of_row(row, first_outer, first_position, inner, multiplier, power, y_outer)
            at = y_ptr.to(tl.int64) + (place + column * y_col) * ITEMSIZE
            slot = slot_of(x_ptr, row * stride + column, 0, PTX)
            left = tl.where(row < rows, n_cols - column, 0)
            for start in range(0, n_cols, STEP * GROUPS):
                source = [slot + start * ITEMSIZE, stride * ITEMSIZE, left - start]
                words = tl.inline_asm_elementwise(TAKE, TAKEN, source, dtype=TYPE, is_pure=False, pack=1)
                into = (at + start * col_bytes, col_bytes, col_bytes * STEP, left - start)
                tl.inline_asm_elementwise(WRITE, WRITTEN, into + words, dtype=tl.int32, is_pure=False, pack=1)
