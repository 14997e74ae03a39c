"""Planes (n_cols, inner) in the registers of a cluster: softmax and log_softmax over n_cols, and their gradients.

    m = max(x);  s = sum(exp(x - m));  y = exp(x - m) / s     or   y = (x - m) - log(s)
    d = sum(y*dy);  dx = y*(dy - d)                           or   d = sum(dy);  dx = dy - exp(y)*d

For planes without gaps of at most 256 positions; `planning/register_planes.py` says where they are faster than tiles
and pieces. The CTAs of a cluster read a plane as one run of vectors, as a row is read. A thread steps by a multiple
of the period of the positions, so each element of its vectors has one position (`periodic_slots`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common.arguments import Int32, Int64, Rows, kernel
from .common.early_start import await_previous
from .common.gathered_rows import declare_regions
from .common.numerics import LOG2E, LOWEST, exp, exp2_affine, exp2_fma, log, max_of_two, scaled, upcast
from .common.periodic_exchange import (
    arrivals_bytes,
    await_put,
    declare_exchange,
    merged_max_sum,
    merged_sum,
    numbers_of,
    place_to_read,
    places_bytes,
    put_for_slots,
    send_own,
)
from .common.periodic_slots import (
    interpreted_max_sums,
    interpreted_sums,
    position_of,
    reduce_max_sum,
    reduce_sum,
    share_and_ends,
    slots_bytes,
)
from .common.softmax_terms import gradient, gradient_term
from .common.tiles import READS

# chunks that are written at a time. ptxas would otherwise hold results of all chunks, and spill
GROUP = tl.constexpr(7)


@triton.jit
def load_slots(ptr, thread, span, share, fill, CHUNKS: tl.constexpr, UNPREDICATED: tl.constexpr, VEC: tl.constexpr):
    """A thread's vectors, as they are.  # CHUNKS x [THREADS, VEC]

    A thread without vectors reads those of the last one that has some.
    """
    tiles = ()
    reads = tl.minimum(thread, span - 1)
    for c in tl.static_range(CHUNKS):
        at = c * span + reads
        where = ptr + (at * VEC + tl.arange(0, VEC)[None, :])
        if c < UNPREDICATED:
            tiles = tiles + (tl.load(where, eviction_policy=READS),)
        else:
            tiles = tiles + (tl.load(where, mask=at < share, other=fill, eviction_policy=READS),)
    return tiles


@triton.jit
def next_chunk(offset, span, PTX: tl.constexpr, VEC: tl.constexpr):
    """offset + span*VEC. Added here: the compiler would hold the addresses of all chunks from their loads on."""
    if PTX:
        ADD: tl.constexpr = "add.s32 $0, $1, $2;"
        offset = tl.inline_asm_elementwise(ADD, "=r,r,r", [offset, span * VEC], dtype=tl.int32, is_pure=False, pack=1)
        return tl.multiple_of(offset, VEC)
    else:
        return offset + span * VEC


@triton.jit
def store_slots(
    tile, ptr, thread, slot, offset, span, share, C: tl.constexpr, UNPREDICATED: tl.constexpr, VEC: tl.constexpr
):
    """Stores chunk C, which begins so many elements behind the CTA's first one."""
    there = thread < span
    if C >= UNPREDICATED:
        there = there & (offset + thread * VEC < share * VEC)
    tl.store(ptr + offset + slot, tile.to(ptr.dtype.element_ty), mask=there)


@triton.jit
def terms_of(m, s, LOG: tl.constexpr, FUSED: tl.constexpr):
    """What each element needs of its position: (m, log(s)), or (m, 1/s).

    FUSED: the shift of `exp2_affine`, and its correction over s, negative where its base is 1.
    """
    if LOG:
        return m, log(s)
    elif FUSED:
        base, shift, correction = exp2_affine(m, FUSED)
        by = correction * tl.div_rn(1.0, s)
        return shift, tl.where(base == 1.0, -by, by)
    else:
        return m, tl.div_rn(1.0, s)


@triton.jit
def result_of(x, of_m, of_s, LOG: tl.constexpr, FUSED: tl.constexpr):
    """An element's result from its position's `terms_of`."""
    if LOG:
        return (x - of_m) - of_s
    elif FUSED:
        return exp2_fma(x, tl.where(of_s < 0, 1.0, LOG2E), of_m, FUSED) * tl.abs(of_s)
    else:
        return exp(x - of_m) * of_s


@triton.jit
def merge_max_sums(
    inner, LOG: tl.constexpr, FUSED: tl.constexpr, CTAS: tl.constexpr, THREADS: tl.constexpr, ARRIVALS: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """Merges each position's (maximum, sum) over the CTAs, and puts its terms for slots. Returns `await_put`'s 0."""
    send_own(inner, 2, CTAS, THREADS, ARRIVALS)
    for k in range(0, (inner + THREADS - 1) // THREADS):
        position = tl.arange(0, THREADS) + k * THREADS
        m, s = merged_max_sum(place_to_read(position, inner, CTAS, VEC), CTAS, ARRIVALS)
        put_for_slots(terms_of(m, s, LOG, FUSED), position, inner, 2, VEC)
    return await_put()


@triton.jit
def merge_sums(inner, CTAS: tl.constexpr, THREADS: tl.constexpr, ARRIVALS: tl.constexpr, VEC: tl.constexpr):
    """Merges each position's sum over the CTAs, and puts it for all slots. Returns `await_put`'s 0."""
    send_own(inner, 1, CTAS, THREADS, ARRIVALS)
    for k in range(0, (inner + THREADS - 1) // THREADS):
        position = tl.arange(0, THREADS) + k * THREADS
        d = merged_sum(place_to_read(position, inner, CTAS, VEC), CTAS, ARRIVALS)
        put_for_slots((d,), position, inner, 1, VEC)
    return await_put()


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
    SLOTS: tl.constexpr = places_bytes(2, VEC)
    ARRIVALS: tl.constexpr = SLOTS + slots_bytes(2, THREADS, VEC)
    declare_regions(ARRIVALS + arrivals_bytes(2, CTAS, ARRIVALS), PTX)
    declare_exchange(inner, CTAS, 2, PTX)
    first, share, begins, head, tail, tail_at, lane, end, is_end, at_end = share_and_ends(
        n_cols, inner, CTAS, THREADS, VEC, PTX
    )
    thread = lane[:, None]
    slot = thread * VEC + tl.arange(0, VEC)[None, :]
    await_previous(EARLY)
    x = load_slots(x_ptr + first * VEC, thread, span, share, -float("inf"), CHUNKS, UNPREDICATED, VEC)
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
        put = merge_max_sums(inner, LOG, FUSED, CTAS, THREADS, ARRIVALS, VEC)
        place = position_of(begins + thread * VEC, inner, multiplier, power) + tl.arange(0, VEC)[None, :]
        of_m, of_s = numbers_of(place, put, 2)
        end_m, end_s = numbers_of(position_of(end, inner, multiplier, power), put, 2)
    else:
        of_m, of_s, end_m, end_s = interpreted_max_sums(
            m, s, position_of(begins + slot, inner, multiplier, power), thread < span,
            x_end, position_of(end, inner, multiplier, power), is_end, inner,
        )  # fmt: skip
        of_m, of_s = terms_of(of_m, of_s, LOG, FUSED)
        end_m, end_s = terms_of(end_m, end_s, LOG, FUSED)

    by = of_s
    if not (LOG or RECOMPUTE):
        by = exp(m - of_m) * of_s
    offset = 0
    for g in tl.static_range((CHUNKS + GROUP - 1) // GROUP):
        if g == 0 or n_cols > g:  # always, as each chunk holds a column; the compiler does not know
            for c in tl.static_range(g * GROUP, min(CHUNKS, g * GROUP + GROUP)):
                if LOG or RECOMPUTE:
                    y = result_of(upcast(x[c], PTX, RECOMPUTE, True), of_m, of_s, LOG, FUSED)
                else:
                    y = exps[c] * by
                store_slots(y, y_ptr + first * VEC, thread, slot, offset, span, share, c, UNPREDICATED, VEC)
                offset = next_chunk(offset, span, PTX, VEC)
    y_end = result_of(x_end, end_m, end_s, LOG, FUSED)
    tl.store(y_ptr + at_end, y_end.to(y_ptr.dtype.element_ty), mask=is_end)


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
    SLOTS: tl.constexpr = places_bytes(1, VEC)
    ARRIVALS: tl.constexpr = SLOTS + slots_bytes(1, THREADS, VEC)
    declare_regions(ARRIVALS + arrivals_bytes(1, CTAS, ARRIVALS), PTX)
    declare_exchange(inner, CTAS, 1, PTX)
    first, share, begins, head, tail, tail_at, lane, end, is_end, at_end = share_and_ends(
        n_cols, inner, CTAS, THREADS, VEC, PTX
    )
    thread = lane[:, None]
    slot = thread * VEC + tl.arange(0, VEC)[None, :]
    await_previous(EARLY)
    y = load_slots(y_ptr + first * VEC, thread, span, share, 0.0, CHUNKS, UNPREDICATED, VEC)
    dy = load_slots(dy_ptr + first * VEC, thread, span, share, 0.0, CHUNKS, UNPREDICATED, VEC)
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
        put = merge_sums(inner, CTAS, THREADS, ARRIVALS, VEC)
        place = position_of(begins + thread * VEC, inner, multiplier, power) + tl.arange(0, VEC)[None, :]
        d = numbers_of(place, put, 1)[0]
        d_end = numbers_of(position_of(end, inner, multiplier, power), put, 1)[0]
    else:
        d, d_end = interpreted_sums(
            d, position_of(begins + slot, inner, multiplier, power), thread < span,
            d_end, position_of(end, inner, multiplier, power), is_end, inner,
        )  # fmt: skip
    offset = 0
    for g in tl.static_range((CHUNKS + GROUP - 1) // GROUP):
        if g == 0 or n_cols > g:  # always, as each chunk holds a column; the compiler does not know
            for c in tl.static_range(g * GROUP, min(CHUNKS, g * GROUP + GROUP)):
                y_c, dy_c = upcast(y[c], PTX, RECOMPUTE, True), upcast(dy[c], PTX, RECOMPUTE, True)
                dx = gradient(y_c, dy_c, d, LOG)
                store_slots(dx, dx_ptr + first * VEC, thread, slot, offset, span, share, c, UNPREDICATED, VEC)
                offset = next_chunk(offset, span, PTX, VEC)
    dx_end = gradient(y_end, dy_end, d_end, LOG)
    tl.store(dx_ptr + at_end, dx_end.to(dx_ptr.dtype.element_ty), mask=is_end)
