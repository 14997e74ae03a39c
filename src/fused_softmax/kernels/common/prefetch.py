"""Asks L2 for the columns that a later row or step reads, so that they wait there and not in memory.

A program that holds a whole row loads it, reduces it and writes it, one after the other. Memory is idle for reads while
few programs fit on a multiprocessor and all of them write. One bulk request for each warp costs one instruction and no
register: it names a range of bytes. Nothing waits for it, and nothing is written. The interpreter requests nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import span_of, start_of


@triton.constexpr_function
def _request_ptx() -> str:
    """$1: the address of the row's first aligned column. In bytes, multiples of 16: $2: a CTA's slice; $3: the row from
    there to its end; $4: where the request begins in each slice; $5: each warp's part of it."""
    ptx = ["{", ".reg .pred some;", ".reg .b32 thread, warp, rank, at, size, left;", ".reg .b64 source, offset;"]
    ptx += ["mov.u32 thread, %tid.x;", "mov.u32 rank, %cluster_ctarank;", "shr.u32 warp, thread, 5;"]
    ptx += ["mad.lo.s32 at, warp, $5, $4;", "sub.s32 size, $2, at;", "min.s32 size, size, $5;"]
    ptx += ["mad.lo.s32 at, rank, $2, at;", "sub.s32 left, $3, at;", "min.s32 size, size, left;"]
    ptx += ["and.b32 thread, thread, 31;", "setp.gt.s32 some, size, 0;", "setp.eq.and.s32 some, thread, 0, some;"]
    ptx += ["cvta.to.global.u64 source, $1;", "cvt.s64.s32 offset, at;", "add.s64 source, source, offset;"]
    ptx += ["@some cp.async.bulk.prefetch.L2.global [source], size;", "mov.u32 $0, 0;", "}"]
    return "\n".join(ptx)


@triton.jit
def request(row, slice, left, begin, part, PTX: tl.constexpr):
    """Each warp of each CTA requests its part of the slice.  # row: a pointer; the others: bytes"""
    if PTX:
        ASM: tl.constexpr = _request_ptx()
        tl.inline_asm_elementwise(
            ASM, "=r,l,r,r,r,r", [row.to(tl.int64), slice, left, begin, part], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def row_ahead(
    x_ptr, stride, phase, n_rows, n_cols, AHEAD: tl.constexpr, CTAS: tl.constexpr, VEC: tl.constexpr,
    UNALIGNED: tl.constexpr,
):  # fmt: skip
    """(pointer, bytes of a CTA's slice, bytes) of the row that is AHEAD of a program's own; no bytes without one."""
    row = tl.program_id(0).to(tl.int64) + AHEAD
    _, interior = span_of(row, stride, phase, n_cols, VEC, UNALIGNED)
    vectors = tl.where(row < n_rows, interior // VEC, 0)
    return x_ptr + start_of(row, stride, phase, VEC, UNALIGNED), (vectors + CTAS - 1) // CTAS * 16, vectors * 16


@triton.jit
def request_row(
    x_ptr, stride, phase, n_rows, n_cols, AHEAD: tl.constexpr, CTAS: tl.constexpr, WARPS: tl.constexpr,
    VEC: tl.constexpr, UNALIGNED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Each CTA requests its slice of the row that is AHEAD of its own, if there is one; 0: nothing."""
    if AHEAD > 0 and PTX:
        row, slice, left = row_ahead(x_ptr, stride, phase, n_rows, n_cols, AHEAD, CTAS, VEC, UNALIGNED)
        request(row, slice, left, 0, (slice // 16 + WARPS - 1) // WARPS * 16, PTX)
