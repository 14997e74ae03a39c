"""Planes (n_cols, inner) in the registers of a cluster: softmax and log_softmax over n_cols, and their gradients.

    m = max(x);  s = sum(exp(x - m));  y = exp(x - m) / s     or   y = (x - m) - log(s)
    d = sum(y*dy);  dx = y*(dy - d)                           or   d = sum(dy);  dx = dy - exp(y)*d

For planes without gaps whose runs of `inner` do not start at vectors, or are short, and which no program holds in
shared memory. The CTAs of a cluster read a plane as one run of vectors, as a row is read. A thread steps by a multiple
of the period of the positions, so each element of its vectors has one position (`periodic_slots`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common.arguments import Int32, Int64, Rows, kernel
from .common.early_start import await_previous
from .common.gathered_cluster import leave_planes, max_sum_of, merge_sums, sum_at, sums_bytes
from .common.gathered_rows import declare_regions
from .common.numerics import LOWEST, exp, exp2_affine, exp2_fma, max_of_two, scaled, upcast
from .common.periodic_slots import (
    interpreted_max_sums,
    interpreted_sums,
    position_of,
    reduce_max_sum,
    reduce_sum,
    share_and_ends,
    slots_bytes,
)
from .common.softmax_terms import gradient, gradient_term, normalize
from .common.tiles import READS


@triton.jit
def load_slots(
    ptr, thread, slot, span, share, fill, CHUNKS: tl.constexpr, UNPREDICATED: tl.constexpr, VEC: tl.constexpr
):
    """A thread's vectors, as they are.  # CHUNKS x [THREADS, VEC]"""
    tiles = ()
    for c in tl.static_range(CHUNKS):
        there = thread < span
        if c >= UNPREDICATED:
            there = there & (c * span + thread < share)
        tiles = tiles + (tl.load(ptr + c * span * VEC + slot, mask=there, other=fill, eviction_policy=READS),)
    return tiles


@triton.jit
def next_vector(first, span, PTX: tl.constexpr):
    """first + span. Added here: the compiler would hold the addresses of all chunks from their loads on."""
    if PTX:
        ADD: tl.constexpr = "add.s32 $0, $1, $2;"
        return tl.inline_asm_elementwise(ADD, "=r,r,r", [first, span], dtype=tl.int32, is_pure=False, pack=1)
    else:
        return first + span


@triton.jit
def store_slots(
    tile, ptr, thread, slot, chunk, span, share, C: tl.constexpr, UNPREDICATED: tl.constexpr, VEC: tl.constexpr
):
    """Stores chunk C, whose first vector is the CTA's vector `chunk`."""
    there = thread < span
    if C >= UNPREDICATED:
        there = there & (chunk + thread < share)
    tl.store(ptr + chunk * VEC + slot, tile.to(ptr.dtype.element_ty), mask=there)


@kernel(cta_programs=True)
def softmax_spatial_periodic(
    x_ptr: Rows, y_ptr: Rows,  # aligned to 16 bytes
    n_cols: Int32,
    inner: Int32, multiplier: Int64, power: Int64,  # the numbers of `fast_divmod`
    span: Int32,  # threads with vectors: span*VEC is a multiple of inner
    LOG: tl.constexpr, CTAS: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr,
    UNPREDICATED: tl.constexpr,  # chunks that all threads with vectors fill
    RECOMPUTE: tl.constexpr, THREADS: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    SLOTS: tl.constexpr = sums_bytes(2)
    declare_regions(SLOTS + slots_bytes(2, THREADS, VEC), PTX)
    first, share, begins, head, tail, tail_at, lane, end, is_end, at_end = share_and_ends(
        n_cols, inner, CTAS, THREADS, VEC, PTX
    )
    thread = lane[:, None]
    slot = thread * VEC + tl.arange(0, VEC)[None, :]
    await_previous(EARLY)
    x = load_slots(x_ptr + first * VEC, thread, slot, span, share, -float("inf"), CHUNKS, UNPREDICATED, VEC)
    x_end = tl.load(x_ptr + at_end, mask=is_end, other=-float("inf")).to(tl.float32)

    # each slot's own maximum and sum. 16 bits: exp(x - m) in one multiply-add and one exp2
    FUSED: tl.constexpr = PTX and x_ptr.dtype.element_ty.primitive_bitwidth == 16 and not LOG
    m = x[0]
    for c in tl.static_range(1, CHUNKS):
        m = max_of_two(m, x[c], PTX)
    m = tl.maximum(m.to(tl.float32), LOWEST)
    base, shift, correction = exp2_affine(m, FUSED)
    s = tl.zeros_like(m)
    exps = ()
    for c in tl.static_range(CHUNKS):
        e = exp2_fma(upcast(x[c], PTX, RECOMPUTE), base, shift, FUSED)
        s += e
        exps = exps + (e,)
    s = scaled(s, correction, PTX)

    # each position's
    if PTX:
        reduce_max_sum(
            m, s, x_end, begins, head, tail, tail_at, inner, multiplier, power, span, SLOTS, LANES, THREADS, VEC
        )  # fmt: skip
        merge_sums(inner, 2, CTAS, THREADS)
        of_m, of_s = max_sum_of(position_of(begins + slot, inner, multiplier, power))
        end_m, end_s = max_sum_of(position_of(end, inner, multiplier, power))
    else:
        of_m, of_s, end_m, end_s = interpreted_max_sums(
            m, s, position_of(begins + slot, inner, multiplier, power), thread < span,
            x_end, position_of(end, inner, multiplier, power), is_end, inner,
        )  # fmt: skip

    if RECOMPUTE:
        base, shift, by = exp2_affine(of_m, FUSED)
        by = by * tl.div_rn(1.0, of_s)
    else:
        by = exp(m - of_m) * tl.div_rn(1.0, of_s)
    chunk = 0
    for c in tl.static_range(CHUNKS):
        if LOG:
            y = normalize(upcast(x[c], PTX, RECOMPUTE, True), of_m, of_s, LOG)
        elif RECOMPUTE:
            y = exp2_fma(upcast(x[c], PTX, True, True), base, shift, FUSED) * by
        else:
            y = exps[c] * by
        store_slots(y, y_ptr + first * VEC, thread, slot, chunk, span, share, c, UNPREDICATED, VEC)
        chunk = next_vector(chunk, span, PTX)
    y_end = normalize(x_end, end_m, end_s, LOG)
    tl.store(y_ptr + at_end, y_end.to(y_ptr.dtype.element_ty), mask=is_end)
    leave_planes(PTX)


@kernel(cta_programs=True)
def softmax_spatial_periodic_backward(
    y_ptr: Rows,  # the forward's output; all aligned to 16 bytes
    dy_ptr: Rows, dx_ptr: Rows,
    n_cols: Int32,  # these numbers: as in `softmax_spatial_periodic`
    inner: Int32, multiplier: Int64, power: Int64,
    span: Int32,
    LOG: tl.constexpr, CTAS: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr,
    UNPREDICATED: tl.constexpr, RECOMPUTE: tl.constexpr, THREADS: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    SLOTS: tl.constexpr = sums_bytes(1)
    declare_regions(SLOTS + slots_bytes(1, THREADS, VEC), PTX)
    first, share, begins, head, tail, tail_at, lane, end, is_end, at_end = share_and_ends(
        n_cols, inner, CTAS, THREADS, VEC, PTX
    )
    thread = lane[:, None]
    slot = thread * VEC + tl.arange(0, VEC)[None, :]
    await_previous(EARLY)
    y = load_slots(y_ptr + first * VEC, thread, slot, span, share, 0.0, CHUNKS, UNPREDICATED, VEC)
    dy = load_slots(dy_ptr + first * VEC, thread, slot, span, share, 0.0, CHUNKS, UNPREDICATED, VEC)
    y_end = tl.load(y_ptr + at_end, mask=is_end, other=0.0)
    dy_end = tl.load(dy_ptr + at_end, mask=is_end, other=0.0)

    d = tl.zeros_like(slot).to(tl.float32)
    for c in tl.static_range(CHUNKS):
        dy_c = upcast(dy[c], PTX, RECOMPUTE)
        y_c = dy_c  # unused where LOG
        if not LOG:
            y_c = upcast(y[c], PTX, RECOMPUTE)
        d += gradient_term(y_c, dy_c, LOG)
    d_end = gradient_term(y_end, dy_end, LOG, True)
    if PTX:
        reduce_sum(d, d_end, begins, head, tail, tail_at, inner, multiplier, power, span, SLOTS, LANES, THREADS, VEC)
        merge_sums(inner, 1, CTAS, THREADS)
        d = sum_at(position_of(begins + slot, inner, multiplier, power))
        d_end = sum_at(position_of(end, inner, multiplier, power))
    else:
        d, d_end = interpreted_sums(
            d, position_of(begins + slot, inner, multiplier, power), thread < span,
            d_end, position_of(end, inner, multiplier, power), is_end, inner,
        )  # fmt: skip
    chunk = 0
    for c in tl.static_range(CHUNKS):
        y_c, dy_c = upcast(y[c], PTX, RECOMPUTE, True), upcast(dy[c], PTX, RECOMPUTE, True)
        dx = gradient(y_c, dy_c, d, LOG)
        store_slots(dx, dx_ptr + first * VEC, thread, slot, chunk, span, share, c, UNPREDICATED, VEC)
        chunk = next_vector(chunk, span, PTX)
    dx_end = gradient(y_end, dy_end, d_end, LOG)
    tl.store(dx_ptr + at_end, dx_end.to(dx_ptr.dtype.element_ty), mask=is_end)
    leave_planes(PTX)
