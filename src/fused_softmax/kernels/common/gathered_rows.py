"""Moves the rows of a program as one piece of memory, by way of shared memory.

Rows that follow each other without a gap are one piece, wherever each of them starts. So all threads copy the piece in
vectors of 16 bytes, whatever the width: at most a vector at either end is moved by elements. In shared memory each
thread finds its own elements, which are not vectors there: LANES neighbors of a warp share a row and take turns at VEC
elements of it, or hold a run of them each, where that meets the banks better. Results go back the same way.

A piece is the memory of a program's rows in one tensor, a region its copy in shared memory. A place counts elements
from the program's first row.

    memory          |row 0   |row 1   |row 2   |...     16 bytes for each thread, to shared memory and back
    shared memory   |a b c d a b c d a|b c ...          threads a..d of row 0: VEC elements each, CHUNKS times
    where RUNS      |a a a b b b c c d|a a ...          all chunks of a thread follow each other

A tile has one number for each thread of the program, and a thread's chunks are a tuple of tiles. So Triton has no
layout to choose, and numbers cross lanes by shuffles. The interpreter has no shared memory: it loads and stores the
places.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gathered_ptx import (
    bulk_ptx,
    constraints,
    declare_ptx,
    fetch_ptx,
    get_numbers_ptx,
    move_ptx,
    put_numbers_ptx,
    put_ptx,
    put_vectors_constraints,
    put_vectors_ptx,
    shuffle_ptx,
)

VECTOR_BYTES = tl.constexpr(16)


@triton.jit
def declare_regions(BYTES: tl.constexpr, PTX: tl.constexpr, DYNAMIC: tl.constexpr = 0):
    """Room for BYTES, of one or more regions. DYNAMIC: bytes of shared memory that the launch adds to the kernel's."""
    if PTX:
        ASM: tl.constexpr = declare_ptx(BYTES, DYNAMIC)
        tl.inline_asm_elementwise(ASM, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def phase_of(ptr):
    """Elements from the last multiple of 16 bytes to ptr."""
    ITEMSIZE: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
    return ((ptr.to(tl.int64) & (VECTOR_BYTES - 1)) // ITEMSIZE).to(tl.int32)


@triton.jit
def _move_edges(
    base, phase, end, REGION: tl.constexpr, ITEMSIZE: tl.constexpr, THREADS: tl.constexpr, INTO: tl.constexpr
):
    """Moves what lies outside of whole vectors: where the first one begins before the piece, or the last ends after it.

    # base: the address of the region's first byte; the piece is [phase, end), in elements
    """
    VEC: tl.constexpr = VECTOR_BYTES // ITEMSIZE
    ASM: tl.constexpr = move_ptx(REGION, INTO, ITEMSIZE)
    if (phase > 0) | (end % VEC > 0):
        thread = tl.arange(0, THREADS)
        at = tl.where(thread < VEC, thread, end // VEC * VEC + thread - VEC)
        there = (at >= phase) & (at < end) & (thread < 2 * VEC) & ((thread >= VEC) | (phase > 0))
        operands = [base + at * ITEMSIZE, at * ITEMSIZE, there.to(tl.int32)]
        tl.inline_asm_elementwise(ASM, "=r,l,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _move(
    ptr, first, n, MOST: tl.constexpr, REGION: tl.constexpr, THREADS: tl.constexpr, INTO: tl.constexpr,
    BULK: tl.constexpr,
):  # fmt: skip
    """Moves n elements, at most MOST, between ptr + first and a region.  # first: a multiple of a vector's elements

    BULK: one thread asks for one copy of all whole vectors.
    """
    ITEMSIZE: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
    VEC: tl.constexpr = VECTOR_BYTES // ITEMSIZE
    phase = phase_of(ptr)
    end = phase + n
    base = ptr.to(tl.int64) + (first - phase) * ITEMSIZE
    if BULK:
        ASM: tl.constexpr = bulk_ptx(REGION)
        start = (phase + VEC - 1) // VEC * VEC
        whole = tl.maximum(end // VEC * VEC - start, 0)
        operands = [base + start * ITEMSIZE, start * ITEMSIZE, whole * ITEMSIZE]
        tl.inline_asm_elementwise(ASM, "=r,l,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)
    else:
        VECTORS: tl.constexpr = move_ptx(REGION, INTO, 16)
        thread = tl.arange(0, THREADS)
        for i in tl.static_range((MOST + VEC * THREADS - 1) // (VEC * THREADS)):
            at = (thread + i * THREADS) * VEC
            there = ((at >= phase) & (at + VEC <= end)).to(tl.int32)
            operands = [base + at * ITEMSIZE, at * ITEMSIZE, there]
            tl.inline_asm_elementwise(VECTORS, "=r,l,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)
    _move_edges(base, phase, end, REGION, ITEMSIZE, THREADS, INTO)
    if BULK:
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group.read 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def gather(ptr, first, n, MOST: tl.constexpr, REGION: tl.constexpr, THREADS: tl.constexpr, PTX: tl.constexpr):
    """Begins to copy the elements [first, first + n) of ptr to a region.

    first: a multiple of a vector's elements. MOST: n, at most. REGION: where it starts, in bytes, a multiple of 16.
    """
    if PTX:
        _move(ptr, first, n, MOST, REGION, THREADS, True, False)


@triton.jit
def await_gathered(PTX: tl.constexpr):
    """Waits until what all threads copied has arrived."""
    if PTX:
        tl.inline_asm_elementwise(
            "cp.async.wait_all; bar.sync 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def await_threads(PTX: tl.constexpr):
    """Waits for all threads of the program: what they fetched may be overwritten, and what they put may be read."""
    if PTX:
        tl.inline_asm_elementwise("bar.sync 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def scatter(
    ptr, first, n, MOST: tl.constexpr, REGION: tl.constexpr, THREADS: tl.constexpr, BULK: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Writes the region to the elements [first, first + n) of ptr, once all threads have put theirs.

    BULK: as one copy past the registers (Hopper's cp.async.bulk). H100: 1 to 5% less time for causal rows; few rows
    take 0.1 us more.
    """
    if PTX:
        if BULK:  # the copy sees what the threads wrote
            tl.inline_asm_elementwise(
                "fence.proxy.async.shared::cta; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
            )
        await_threads(PTX)
        _move(ptr, first, n, MOST, REGION, THREADS, False, BULK)


@triton.jit
def piece_of(piece, n_rows, n_cols, ROWS: tl.constexpr, VEC: tl.constexpr):
    """(first row, columns, first element, elements) of a piece: ROWS rows, or those that are left.

    n_cols: in units of VEC.
    """
    first_row = piece.to(tl.int64) * ROWS
    columns = n_cols * VEC
    return first_row, columns, first_row * columns, tl.minimum(n_rows - first_row, ROWS).to(tl.int32) * columns


@triton.constexpr_function
def step_of(lanes: int, vec: int, runs: bool) -> int:
    """Elements from a thread's chunk to its next one."""
    return vec if runs else lanes * vec


@triton.jit
def columns_of_thread(
    THREADS: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr, RUNS: tl.constexpr
):  # fmt: skip
    """The first column of each thread's chunk 0.  # [THREADS]"""
    return tl.arange(0, THREADS) % LANES * (CHUNKS * VEC if RUNS else VEC)


@triton.jit
def puts_column(
    column, THREADS: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr, RUNS: tl.constexpr
):
    """Whether each thread is the one of its row that puts this column.  # column: [THREADS]"""
    lane = column // (CHUNKS * VEC) if RUNS else column // VEC % LANES
    return tl.arange(0, THREADS) % LANES == lane


@triton.jit
def slot_of(ptr, place, REGION: tl.constexpr, PTX: tl.constexpr):
    """The address of a place of the piece at ptr in shared memory; the place itself where interpreted.  # [THREADS]"""
    if PTX:
        ITEMSIZE: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
        ASM: tl.constexpr = "mov.u32 $0, gathered_rows; add.u32 $0, $0, $1;"
        operands = [(phase_of(ptr) + place) * ITEMSIZE + REGION]
        return tl.inline_asm_elementwise(ASM, "=r,r", operands, dtype=tl.int32, is_pure=False, pack=1)
    else:
        return place


@triton.jit
def fetch_at(
    at, there, DTYPE: tl.constexpr, OFFSET: tl.constexpr, VEC: tl.constexpr, FILL: tl.constexpr, SLOT: tl.constexpr
):
    """VEC tiles of float32: the elements OFFSET bytes after `at` in shared memory.  # at, there: [THREADS]

    at: an address where SLOT, else bytes from the start of all regions. FILL: "-inf" or "0" where a thread is not
    there, "" where all are.
    """
    tl.static_assert(VEC == 1 or VEC == 2 or VEC == 4, "a thread's access has at most 8 bytes")
    ASM: tl.constexpr = fetch_ptx(OFFSET, DTYPE, VEC, FILL, SLOT)
    CONSTRAINTS: tl.constexpr = constraints("=f " * VEC, 0)
    operands = [at, there.to(tl.int32)]
    # the dtypes stand here: Triton 3.9 does not take them as a constexpr
    if VEC == 1:
        return (tl.inline_asm_elementwise(ASM, CONSTRAINTS, operands, dtype=tl.float32, is_pure=False, pack=1),)
    elif VEC == 2:
        return tl.inline_asm_elementwise(
            ASM, CONSTRAINTS, operands, dtype=(tl.float32, tl.float32), is_pure=False, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            ASM,
            CONSTRAINTS,
            operands,
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=False,
            pack=1,
        )


@triton.jit
def put_at(
    values, at, there, DTYPE: tl.constexpr, OFFSET: tl.constexpr, VEC: tl.constexpr, PREDICATED: tl.constexpr,
    SLOT: tl.constexpr,
):  # fmt: skip
    """Puts VEC tiles of float32, in DTYPE, where `fetch_at` finds them. PREDICATED: only of threads that are there."""
    ASM: tl.constexpr = put_ptx(OFFSET, DTYPE, VEC, PREDICATED, SLOT)
    CONSTRAINTS: tl.constexpr = constraints("=r", VEC)
    operands = values + (at, there.to(tl.int32))
    tl.inline_asm_elementwise(ASM, CONSTRAINTS, operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def fetch(
    ptr, first, row, column, columns, exists, C: tl.constexpr, REGION: tl.constexpr, STEP: tl.constexpr,
    VEC: tl.constexpr, UNPREDICATED: tl.constexpr, FILL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """VEC tiles of float32: each thread's elements of chunk C of its row, from the region of the piece at ptr + first.

    # row: of the piece, column: of chunk 0, exists: [THREADS]; STEP: of `step_of`; FILL: "-inf" or "0", where there is
    no such column. The first UNPREDICATED chunks lie inside every row. Rows that do not exist get arbitrary numbers.
    """
    OFFSET: tl.constexpr = C * STEP
    place, there = row * columns + column, (OFFSET + column < columns) & exists
    if PTX:
        ITEMSIZE: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
        at = (phase_of(ptr) + place) * ITEMSIZE
        DTYPE: tl.constexpr = ptr.dtype.element_ty.name
        FILLED: tl.constexpr = FILL if C >= UNPREDICATED else ""
        return fetch_at(at, there, DTYPE, REGION + OFFSET * ITEMSIZE, VEC, FILLED, False)
    else:
        fill = -float("inf") if FILL == "-inf" else 0.0
        found = ()
        for i in tl.static_range(VEC):
            found = found + (tl.load(ptr + first + place + OFFSET + i, mask=there, other=fill).to(tl.float32),)
        return found


@triton.jit
def put(
    values, ptr, first, row, column, columns, exists, C: tl.constexpr, REGION: tl.constexpr, STEP: tl.constexpr,
    VEC: tl.constexpr, UNPREDICATED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Puts VEC tiles of float32, in ptr's dtype, where `scatter` to ptr takes chunk C from.  # as `fetch`"""
    OFFSET: tl.constexpr = C * STEP
    place, there = row * columns + column, (OFFSET + column < columns) & exists
    if PTX:
        ITEMSIZE: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
        DTYPE: tl.constexpr = ptr.dtype.element_ty.name
        at = (phase_of(ptr) + place) * ITEMSIZE
        put_at(values, at, there, DTYPE, REGION + OFFSET * ITEMSIZE, VEC, C >= UNPREDICATED, False)
    else:
        for i in tl.static_range(VEC):
            tl.store(ptr + first + place + OFFSET + i, values[i].to(ptr.dtype.element_ty), mask=there)


@triton.jit
def element_of(ptr, first, row, column, columns, there, PTX: tl.constexpr):
    """`fetch`es one element of each thread's row, 0 where not there.  # column: any integers; all [THREADS]"""
    column = tl.where(there, column, 0).to(tl.int32)
    return fetch(ptr, first, row, column, columns, there, 0, 0, 1, 1, 0, "0", PTX)[0]


@triton.jit
def max_of(tiles, START: tl.constexpr, N: tl.constexpr):
    """The maximum of N tiles from START on, as a tree: a chain of a thread's maxima is all that few rows wait for."""
    if N == 1:
        return tiles[START]
    else:
        return tl.maximum(max_of(tiles, START, N // 2), max_of(tiles, START + N // 2, N - N // 2))


@triton.jit
def sum_of(tiles, START: tl.constexpr, N: tl.constexpr):
    """The sum of N tiles from START on, as a tree."""
    if N == 1:
        return tiles[START]
    else:
        return sum_of(tiles, START, N // 2) + sum_of(tiles, START + N // 2, N - N // 2)


@triton.jit
def max_over_lanes(x, LANES: tl.constexpr, PTX: tl.constexpr):
    """The maximum over each LANES neighbors, in all of them.  # [THREADS]"""
    if PTX:
        ASM: tl.constexpr = shuffle_ptx(LANES, "max")
        return tl.inline_asm_elementwise(ASM, "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1)
    else:
        rows = tl.reshape(x, (x.shape[0] // LANES, LANES))
        return tl.reshape(tl.max(rows, 1)[:, None] + tl.zeros_like(rows), x.shape)


@triton.jit
def sum_over_lanes(x, LANES: tl.constexpr, PTX: tl.constexpr):
    """The sum over each LANES neighbors, in all of them, with the same bits.  # [THREADS]"""
    if PTX:
        ASM: tl.constexpr = shuffle_ptx(LANES, "add")
        return tl.inline_asm_elementwise(ASM, "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1)
    else:
        rows = tl.reshape(x, (x.shape[0] // LANES, LANES))
        return tl.reshape(tl.sum(rows, 1)[:, None] + tl.zeros_like(rows), x.shape)


@triton.jit
def put_vectors(value, place, there, VEC: tl.constexpr):
    """`put`s whole vectors of rows in tiles of segments.  # value, place, there: [SEGMENTS, VECTORS*VEC]

    place: elements from the region's start, of a multiple of 16 bytes at each vector. A vector is there or not.
    """
    ITEMSIZE: tl.constexpr = value.dtype.primitive_bitwidth // 8
    tl.static_assert(VEC * ITEMSIZE == VECTOR_BYTES, "a vector has 16 bytes")
    ASM: tl.constexpr = put_vectors_ptx(ITEMSIZE, VEC)
    CONSTRAINTS: tl.constexpr = put_vectors_constraints(ITEMSIZE, VEC)
    at = tl.where(there, place * ITEMSIZE, -1)
    tl.inline_asm_elementwise(ASM, CONSTRAINTS, [value, at], dtype=tl.int8, is_pure=False, pack=VEC)


@triton.jit
def put_elements(value, place, there):
    """`put`s single elements of rows in tiles of any shape.  # place: elements from the region's start"""
    ITEMSIZE: tl.constexpr = value.dtype.primitive_bitwidth // 8
    DTYPE: tl.constexpr = value.dtype.name
    put_at((value.to(tl.float32),), place * ITEMSIZE, there, DTYPE, 0, 1, True, False)


@triton.jit
def put_numbers(values, place, there, N: tl.constexpr, REGION: tl.constexpr):
    """Puts N float32, 1 or 2, of each thread that is there. A place counts N numbers from REGION on, in bytes."""
    ASM: tl.constexpr = put_numbers_ptx(N, REGION)
    CONSTRAINTS: tl.constexpr = constraints("=r", N)
    operands = values + (place, there.to(tl.int32))
    tl.inline_asm_elementwise(ASM, CONSTRAINTS, operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def numbers_at(place, N: tl.constexpr, REGION: tl.constexpr):
    """The N float32 that `put_numbers` put at a place."""
    ASM: tl.constexpr = get_numbers_ptx(N, REGION)
    if N == 1:
        return (tl.inline_asm_elementwise(ASM, "=f,r", [place], dtype=tl.float32, is_pure=False, pack=1),)
    else:
        return tl.inline_asm_elementwise(ASM, "=f,=f,r", [place], dtype=(tl.float32, tl.float32), is_pure=False, pack=1)
