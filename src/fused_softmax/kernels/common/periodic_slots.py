"""Slots: the numbers of each vector element of a program, and how slots of the same position are reduced.

A plane (n_cols, inner) is read as one run of vectors, and its positions repeat after `inner` elements. A thread steps
from a vector to its next one by a multiple of that period, so each of its VEC elements has one position in all chunks:
a slot. A program has `span` threads with slots. Their elements follow each other, so a position has `folds` slots,
`inner` apart:

    slot       0 1 2 3 4 5 6 7 8 9 ...        3 positions: slots 0, 3, 6, ... are of one position
    position   2 0 1 2 0 1 2 0 1 2 ...        the position of slot 0 is that of the program's first element

All slots go to shared memory, LANES neighbors of a warp reduce each position, and `gathered_cluster` merges the
positions of all CTAs. Before and after the plane's whole vectors are fewer than VEC elements each, its ends. The first
CTA has the one end, the last CTA the other one: a thread for each element, and a place behind the slots. Interpreted,
one program has the slots of all CTAs and reduces each position in turn.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gathered_rows import await_threads, max_over_lanes, sum_over_lanes
from .numerics import LOWEST, exp
from .row_scheduler import fast_divmod
from .spatial_cluster import access_of


@triton.constexpr_function
def slots_bytes(n_values: int, threads: int, vec: int) -> int:
    """Bytes of shared memory for the numbers of slots and of both ends."""
    return 4 * n_values * (vec * pitch(threads, vec) + 2 * vec)


@triton.constexpr_function
def pitch(threads: int, vec: int) -> int:
    """Places from a thread's slot to its next one: neighboring slots are then in different banks."""
    return threads + 16 // vec


@triton.jit
def _place_of(slot, THREADS: tl.constexpr, VEC: tl.constexpr):
    return slot % VEC * pitch(THREADS, VEC) + slot // VEC


@triton.constexpr_function
def _put_ptx(n_values: int, region: int) -> str:
    """Puts the values at the place behind them, in bytes from the region on, where the last operand is not 0."""
    suffix, values = access_of([f"${1 + i}" for i in range(n_values)])
    ptx = ["{", ".reg .pred puts;", ".reg .b32 at, base;", "mov.u32 base, gathered_rows;"]
    ptx += [f"setp.ne.u32 puts, ${n_values + 2}, 0;", f"mad.lo.u32 at, ${n_values + 1}, {4 * n_values}, base;"]
    return "\n".join([*ptx, f"@puts st.shared{suffix}.f32 [at+{region}], {values};", "mov.u32 $0, 0;", "}"])


@triton.constexpr_function
def _get_ptx(n_values: int, region: int) -> str:
    """Gets the values of the place."""
    suffix, values = access_of([f"${i}" for i in range(n_values)])
    ptx = ["{", ".reg .b32 at, base;", "mov.u32 base, gathered_rows;"]
    ptx += [f"mad.lo.u32 at, ${n_values}, {4 * n_values}, base;"]
    return "\n".join([*ptx, f"ld.volatile.shared{suffix}.f32 {values}, [at+{region}];", "}"])


@triton.jit
def _put_max_sum(m, s, place, there, REGION: tl.constexpr):
    ASM: tl.constexpr = _put_ptx(2, REGION)
    operands = [m, s, place, there.to(tl.int32)]
    tl.inline_asm_elementwise(ASM, "=r,f,f,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _put_sum(s, place, there, REGION: tl.constexpr):
    ASM: tl.constexpr = _put_ptx(1, REGION)
    operands = [s, place, there.to(tl.int32)]
    tl.inline_asm_elementwise(ASM, "=r,f,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _get_max_sum(place, REGION: tl.constexpr):
    ASM: tl.constexpr = _get_ptx(2, REGION)
    return tl.inline_asm_elementwise(ASM, "=f,=f,r", [place], dtype=(tl.float32, tl.float32), is_pure=False, pack=1)


@triton.jit
def _get_sum(place, REGION: tl.constexpr):
    ASM: tl.constexpr = _get_ptx(1, REGION)
    return tl.inline_asm_elementwise(ASM, "=f,r", [place], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def rank_of(CTAS: tl.constexpr, THREADS: tl.constexpr, PTX: tl.constexpr):
    """(index of the plane, rank of the CTA); interpreted, the rank of each thread.  # [CTAS*THREADS]"""
    pid = tl.program_id(0)
    if PTX:
        return pid // CTAS, pid % CTAS
    else:
        return pid, tl.arange(0, CTAS * THREADS) // THREADS


@triton.jit
def vectors_of(plane, rank, n_cols, inner, VEC: tl.constexpr, CTAS: tl.constexpr):
    """A CTA's share of the plane: (first vector in memory, vectors, the plane's element that the first begins with)."""
    n = n_cols * inner
    start = plane.to(tl.int64) * n
    whole = (start + (VEC - 1)) // VEC
    head = (whole * VEC - start).to(tl.int32)
    vectors = ((n - head) // VEC).to(tl.int64)
    first = (rank * vectors // CTAS).to(tl.int32)
    return whole + first, ((rank + 1) * vectors // CTAS).to(tl.int32) - first, head + first * VEC


@triton.jit
def ends_of(plane, rank, n_cols, inner, VEC: tl.constexpr, CTAS: tl.constexpr):
    """A CTA's ends of the plane: (elements in front of its vectors, behind them, the first of the latter)."""
    n = n_cols * inner
    start = plane.to(tl.int64) * n
    head = ((start + (VEC - 1)) // VEC * VEC - start).to(tl.int32)
    tail = (n - head) % VEC
    return tl.where(rank == 0, head, 0), tl.where(rank == CTAS - 1, tail, 0), n - tail


@triton.jit
def position_of(element, inner, multiplier, power):
    """The position of an element of the plane."""
    quotient, position = fast_divmod(element, inner, multiplier, power)
    return position


@triton.jit
def _first_slot(at, begins, inner, multiplier, power):
    """The first slot of the position `at`, where slot 0 is of the plane's element `begins`."""
    quotient, first = fast_divmod(begins, inner, multiplier, power)
    return tl.where(at < first, at - first + inner, at - first)


@triton.jit
def _fold_max(
    top, start, end, step, first, REGION: tl.constexpr, SLOTS: tl.constexpr, THREADS: tl.constexpr, VEC: tl.constexpr
):
    """The maximum of top and of those at start, start + step, ... below `end`: slots, or places from `first` on."""
    for f in tl.range(0, end, step, loop_unroll_factor=4):
        there = f + start < end
        at = tl.where(there, f + start, 0)
        fold_m, fold_s = _get_max_sum(_place_of(at, THREADS, VEC) if SLOTS else first + at, REGION)
        top = tl.where(there, tl.maximum(top, fold_m), top)
    return top


@triton.jit
def _fold_exps(
    total, top, start, end, step, first, REGION: tl.constexpr, SLOTS: tl.constexpr, THREADS: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """total, and the sums of exponentials there, where top is the maximum."""
    for f in tl.range(0, end, step, loop_unroll_factor=4):
        there = f + start < end
        at = tl.where(there, f + start, 0)
        fold_m, fold_s = _get_max_sum(_place_of(at, THREADS, VEC) if SLOTS else first + at, REGION)
        total = tl.where(there, total + fold_s * exp(fold_m - top), total)
    return total


@triton.jit
def _fold_sum(
    total, start, end, step, first, REGION: tl.constexpr, SLOTS: tl.constexpr, THREADS: tl.constexpr, VEC: tl.constexpr
):
    """total, and the sums there."""
    for f in tl.range(0, end, step, loop_unroll_factor=4):
        there = f + start < end
        at = tl.where(there, f + start, 0)
        fold = _get_sum(_place_of(at, THREADS, VEC) if SLOTS else first + at, REGION)
        total = tl.where(there, total + fold, total)
    return total


@triton.jit
def reduce_max_sum(
    m, s, x_end, begins, head, tail, tail_at, inner, multiplier, power, span, REGION: tl.constexpr,
    LANES: tl.constexpr, THREADS: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Puts each position's (maximum, sum of exponentials), of its slots and ends, in front of all.

    # m, s: [THREADS, VEC]; x_end: the elements of the ends, for the first threads, [THREADS]. REGION: where slots begin
    """
    thread = tl.arange(0, THREADS)
    ENDS: tl.constexpr = VEC * pitch(THREADS, VEC)
    slots = thread[:, None] * VEC + tl.arange(0, VEC)[None, :]
    _put_max_sum(m, s, _place_of(slots, THREADS, VEC), slots >= 0, REGION)
    _put_max_sum(x_end, tl.zeros_like(x_end) + 1.0, ENDS + thread, thread < 2 * VEC, REGION)
    await_threads(True)
    step, lane = LANES * inner, thread % LANES
    for k in range(0, (inner + THREADS // LANES - 1) // (THREADS // LANES)):
        position = thread // LANES + k * (THREADS // LANES)
        at = tl.minimum(position, inner - 1)
        slot = _first_slot(at, begins, inner, multiplier, power) + lane * inner
        in_head = at + lane * inner
        in_tail = _first_slot(at, tail_at, inner, multiplier, power) + lane * inner
        top = tl.zeros([THREADS], tl.float32) + LOWEST
        top = _fold_max(top, slot, span * VEC, step, 0, REGION, True, THREADS, VEC)
        top = _fold_max(top, in_head, head, step, ENDS, REGION, False, THREADS, VEC)
        top = _fold_max(top, in_tail, tail, step, ENDS + head, REGION, False, THREADS, VEC)
        top = max_over_lanes(top, LANES, True)
        total = tl.zeros([THREADS], tl.float32)
        total = _fold_exps(total, top, slot, span * VEC, step, 0, REGION, True, THREADS, VEC)
        total = _fold_exps(total, top, in_head, head, step, ENDS, REGION, False, THREADS, VEC)
        total = _fold_exps(total, top, in_tail, tail, step, ENDS + head, REGION, False, THREADS, VEC)
        total = sum_over_lanes(total, LANES, True)
        _put_max_sum(top, total, at, (lane == 0) & (position < inner), 0)


@triton.jit
def reduce_sum(
    s, s_end, begins, head, tail, tail_at, inner, multiplier, power, span, REGION: tl.constexpr, LANES: tl.constexpr,
    THREADS: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """As `reduce_max_sum`, of one sum."""
    thread = tl.arange(0, THREADS)
    ENDS: tl.constexpr = VEC * pitch(THREADS, VEC)
    slots = thread[:, None] * VEC + tl.arange(0, VEC)[None, :]
    _put_sum(s, _place_of(slots, THREADS, VEC), slots >= 0, REGION)
    _put_sum(s_end, ENDS + thread, thread < 2 * VEC, REGION)
    await_threads(True)
    step, lane = LANES * inner, thread % LANES
    for k in range(0, (inner + THREADS // LANES - 1) // (THREADS // LANES)):
        position = thread // LANES + k * (THREADS // LANES)
        at = tl.minimum(position, inner - 1)
        slot = _first_slot(at, begins, inner, multiplier, power) + lane * inner
        in_tail = _first_slot(at, tail_at, inner, multiplier, power) + lane * inner
        total = tl.zeros([THREADS], tl.float32)
        total = _fold_sum(total, slot, span * VEC, step, 0, REGION, True, THREADS, VEC)
        total = _fold_sum(total, at + lane * inner, head, step, ENDS, REGION, False, THREADS, VEC)
        total = _fold_sum(total, in_tail, tail, step, ENDS + head, REGION, False, THREADS, VEC)
        total = sum_over_lanes(total, LANES, True)
        _put_sum(total, at, (lane == 0) & (position < inner), 0)


@triton.jit
def interpreted_max_sums(m, s, position, exists, end, end_position, ends, inner):
    """The (maximum, sum) of each slot's position, and of each end's.  # m: [CTAS*THREADS, VEC], end: [CTAS*THREADS]"""
    of_m, of_s = tl.zeros_like(m), tl.zeros_like(s)
    end_m, end_s = tl.zeros_like(end), tl.zeros_like(end)
    for p in range(0, inner):
        here, at_end = (position == p) & exists, (end_position == p) & ends
        top = tl.max(tl.max(tl.where(here, m, LOWEST), 1), 0)
        top = tl.maximum(top, tl.max(tl.where(at_end, end, LOWEST), 0))
        total = tl.sum(tl.sum(tl.where(here, s * exp(m - top), 0.0), 1), 0)
        total += tl.sum(tl.where(at_end, exp(end - top), 0.0), 0)
        of_m, of_s = tl.where(here, top, of_m), tl.where(here, total, of_s)
        end_m, end_s = tl.where(at_end, top, end_m), tl.where(at_end, total, end_s)
    return of_m, of_s, end_m, end_s


@triton.jit
def interpreted_sums(s, position, exists, end, end_position, ends, inner):
    """The sum of each slot's position, and of each end's."""
    of_s, end_s = tl.zeros_like(s), tl.zeros_like(end)
    for p in range(0, inner):
        here, at_end = (position == p) & exists, (end_position == p) & ends
        total = tl.sum(tl.sum(tl.where(here, s, 0.0), 1), 0) + tl.sum(tl.where(at_end, end, 0.0), 0)
        of_s, end_s = tl.where(here, total, of_s), tl.where(at_end, total, end_s)
    return of_s, end_s
