"""Planes (n_cols, inner) in shared memory, moved there by `gathered_rows`: which columns a thread has, and their slots.

LANES neighbors of a warp share a position, CHUNKS columns for each. A result takes the place of its input, which no
other thread reads.

A slot is the address of an element of a piece in shared memory. The step from a thread's column to its next one is a
number of the call, so the address is added up as it goes. As `fetch` and `put` of `gathered_rows`, whose steps are
constants; where interpreted, a slot is a place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gathered_rows import fetch_at, put_at, slot_of
from .row_scheduler import fast_divmod


@triton.jit
def next_slot(slot, ptr, elements, PTX: tl.constexpr):
    """The slot so many elements further. Added here: the compiler would hold a register for each multiple of them."""
    if PTX:
        ITEMSIZE: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
        ADD: tl.constexpr = "add.s32 $0, $1, $2;"
        return tl.inline_asm_elementwise(
            ADD, "=r,r,r", [slot, elements * ITEMSIZE], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        return slot + elements


@triton.jit
def fetch_slot(ptr, slot, there, FILL: tl.constexpr, PREDICATED: tl.constexpr, PTX: tl.constexpr):
    """The element in each thread's slot, in float32; FILL, as of `fetch`, where PREDICATED and not there."""
    if PTX:
        DTYPE: tl.constexpr = ptr.dtype.element_ty.name
        return fetch_at(slot, there, DTYPE, 0, 1, FILL if PREDICATED else "", True)[0]
    else:
        return tl.load(ptr + slot, mask=there, other=-float("inf") if FILL == "-inf" else 0.0).to(tl.float32)


@triton.jit
def put_slot(value, ptr, slot, there, PTX: tl.constexpr):
    """Puts a float32 for each thread that is there, in ptr's dtype, into its slot."""
    if PTX:
        DTYPE: tl.constexpr = ptr.dtype.element_ty.name
        put_at((value,), slot, there, DTYPE, 0, 1, True, True)
    else:
        tl.store(ptr + slot, value.to(ptr.dtype.element_ty), mask=there)


@triton.jit
def planes_of(n_outer, n_cols, inner, outers):
    """(first element, elements, elements of a plane, positions) of the program's piece of `outers` planes or fewer."""
    first = tl.program_id(0).to(tl.int64) * outers
    plane = n_cols * inner
    planes = tl.minimum(n_outer - first, outers).to(tl.int32)
    return first * plane, planes * plane, plane, planes * inner


@triton.jit
def position_of(k, positions, n, plane, inner, multiplier, power, LANES: tl.constexpr, THREADS: tl.constexpr):
    """(place of each thread's first column, places to its next one, whether it has a position) in round k.

    n: elements of the piece. A thread without a position stays behind it, where no thread writes.  # [THREADS]
    """
    thread = tl.arange(0, THREADS)
    position = thread // LANES + k * (THREADS // LANES)
    index, rest = fast_divmod(position, inner, multiplier, power)
    exists = position < positions
    at = tl.where(exists, index * plane + rest + thread % LANES * inner, n)
    return at, tl.where(exists, LANES * inner, 0), exists


@triton.jit
def fetch_columns(
    ptr, at, step, exists, n_cols, REGION: tl.constexpr, FILL: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr,
    UNPREDICATED: tl.constexpr, THREADS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Each thread's columns, of `position_of`, in float32.  # CHUNKS x [THREADS]"""
    found = ()
    slot = slot_of(ptr, at, REGION, PTX)
    for c in tl.static_range(CHUNKS):
        there = exists & (tl.arange(0, THREADS) % LANES + c * LANES < n_cols)
        found = found + (fetch_slot(ptr, slot, there, FILL, c >= UNPREDICATED, PTX),)
        slot = next_slot(slot, ptr, step, PTX)
    return found


@triton.jit
def put_columns(
    tiles, ptr, at, step, exists, n_cols, REGION: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr,
    UNPREDICATED: tl.constexpr, THREADS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Puts results where `fetch_columns` found the input of the region."""
    slot = slot_of(ptr, at, REGION, PTX)
    for c in tl.static_range(CHUNKS):
        there = exists
        if c >= UNPREDICATED:
            there = exists & (tl.arange(0, THREADS) % LANES + c * LANES < n_cols)
        put_slot(tiles[c], ptr, slot, there, PTX)
        slot = next_slot(slot, ptr, step, PTX)
