"""Slots: the numbers of each vector element of a program, and how slots of the same position are reduced.

A plane (n_cols, inner) is read as one run of vectors, and its positions repeat after `inner` elements. A thread steps
from a vector to its next one by a multiple of that period, so each of its VEC elements has one position in all chunks:
a slot. A program has `span` threads with slots. Their elements follow each other, so a position has `folds` slots,
`inner` apart:

    slot       0 1 2 3 4 5 6 7 8 9 ...        3 positions: slots 0, 3, 6, ... are of one position
    position   2 0 1 2 0 1 2 0 1 2 ...        the position of slot 0 is that of the program's first element

All slots go to shared memory, LANES neighbors of a warp reduce each position, and `periodic_exchange` merges the
positions of all CTAs. Before and after the plane's whole vectors are fewer than VEC elements each, its ends. The first
CTA has the one end, the last CTA the other one: a thread for each element, and a place behind the slots. Interpreted,
one program has the slots of all CTAs and reduces each position in turn.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gathered_rows import await_threads, max_over_lanes, numbers_at, put_numbers, sum_over_lanes
from .numerics import LOWEST, exp
from .row_scheduler import fast_divmod


@triton.constexpr_function
def slots_bytes(n_values: int, threads: int, vec: int) -> int:
    """Bytes of shared memory for the numbers of slots and of both ends."""
    return 4 * n_values * (threads * (vec + 1) + 2 * vec)


@triton.jit
def _place_of(slot, VEC: tl.constexpr):
    """A gap after each thread's slots: the slots that neighbors write are then in different banks."""
    return slot + slot // VEC


@triton.jit
def share_and_ends(n_cols, inner, CTAS: tl.constexpr, THREADS: tl.constexpr, VEC: tl.constexpr, PTX: tl.constexpr):
    """A CTA's vectors of its plane, its ends, and each thread's element of the ends: ten values.

    Of the vectors: the first one in memory, their number, and the plane's element that they begin with. Of the ends:
    elements in front of the vectors, elements behind them, and the first one behind them. Of a thread: its index in the
    CTA, its element of the ends in the plane, whether it has one, and the element in memory.

    Interpreted, each thread has the values of its CTA.  # [CTAS*THREADS, 1] for vectors, [CTAS*THREADS] for the others
    """
    pid = tl.program_id(0)
    if PTX:
        plane, rank, lane = pid // CTAS, pid % CTAS, tl.arange(0, THREADS)
    else:
        thread = tl.arange(0, CTAS * THREADS)
        plane, rank, lane = pid, thread // THREADS, thread % THREADS
    n = n_cols * inner
    start = plane.to(tl.int64) * n
    whole = (start + (VEC - 1)) // VEC
    before = (whole * VEC - start).to(tl.int32)
    behind = (n - before) % VEC
    head, tail, tail_at = tl.where(rank == 0, before, 0), tl.where(rank == CTAS - 1, behind, 0), n - behind
    end = tl.where(lane < head, lane, tail_at - head + lane)
    is_end, at_end = lane < head + tail, start + end
    vectors = ((n - before) // VEC).to(tl.int64)
    skipped = (rank * vectors // CTAS).to(tl.int32)
    first = whole + skipped
    share, begins = ((rank + 1) * vectors // CTAS).to(tl.int32) - skipped, before + skipped * VEC
    if not PTX:
        first, share, begins = first[:, None], share[:, None], begins[:, None]
    return first, share, begins, head, tail, tail_at, lane, end, is_end, at_end


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
def _folded(total, top, place, there, KIND: tl.constexpr, REGION: tl.constexpr):
    """total with the numbers at a place where they are there.

    KIND: "max", the maximum; "sum", the sum; or "exps", the sum of exponentials, where `top` is the maximum. Only
    "exps" reads `top`.
    """
    if KIND == "sum":
        folded = total + numbers_at(place, 1, REGION)[0]
    else:
        fold_m, fold_s = numbers_at(place, 2, REGION)
        if KIND == "max":
            folded = tl.maximum(total, fold_m)
        else:
            folded = total + fold_s * exp(fold_m - top)
    return tl.where(there, folded, total)


@triton.jit
def _fold_slots(total, top, start, end, step, KIND: tl.constexpr, REGION: tl.constexpr, VEC: tl.constexpr):
    """total with the numbers of the slots start, start + step, ... below `end`. start is below step: of all threads the
    same number of slots are there, and perhaps one more.
    """
    whole = 0
    for f in tl.range(0, end - step + 1, step, loop_unroll_factor=4):
        total = _folded(total, top, _place_of(start + f, VEC), True, KIND, REGION)
        whole = f + step
    there = start + whole < end
    return _folded(total, top, _place_of(tl.where(there, start + whole, start), VEC), there, KIND, REGION)


@triton.jit
def _fold_ends(total, top, start, end, step, first, KIND: tl.constexpr, REGION: tl.constexpr):
    """total with the numbers of the ends start, start + step, ... below `end`, at places from `first` on."""
    for f in range(0, end, step):
        there = start + f < end
        total = _folded(total, top, first + tl.where(there, start + f, 0), there, KIND, REGION)
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
    ENDS: tl.constexpr = THREADS * (VEC + 1)
    slots = thread[:, None] * VEC + tl.arange(0, VEC)[None, :]
    put_numbers((m, s), _place_of(slots, VEC), slots >= 0, 2, REGION)
    put_numbers((x_end, tl.zeros_like(x_end) + 1.0), ENDS + thread, thread < 2 * VEC, 2, REGION)
    await_threads(True)
    step, lane = LANES * inner, thread % LANES
    for k in range(0, (inner + THREADS // LANES - 1) // (THREADS // LANES)):
        position = thread // LANES + k * (THREADS // LANES)
        at = tl.minimum(position, inner - 1)
        slot = _first_slot(at, begins, inner, multiplier, power) + lane * inner
        in_head = at + lane * inner
        in_tail = _first_slot(at, tail_at, inner, multiplier, power) + lane * inner
        top = tl.zeros([THREADS], tl.float32) + LOWEST
        top = _fold_slots(top, top, slot, span * VEC, step, "max", REGION, VEC)
        top = _fold_ends(top, top, in_head, head, step, ENDS, "max", REGION)
        top = _fold_ends(top, top, in_tail, tail, step, ENDS + head, "max", REGION)
        top = max_over_lanes(top, LANES, True)
        total = tl.zeros([THREADS], tl.float32)
        total = _fold_slots(total, top, slot, span * VEC, step, "exps", REGION, VEC)
        total = _fold_ends(total, top, in_head, head, step, ENDS, "exps", REGION)
        total = _fold_ends(total, top, in_tail, tail, step, ENDS + head, "exps", REGION)
        total = sum_over_lanes(total, LANES, True)
        put_numbers((top, total), at, (lane == 0) & (position < inner), 2, 0)


@triton.jit
def reduce_sum(
    s, s_end, begins, head, tail, tail_at, inner, multiplier, power, span, REGION: tl.constexpr, LANES: tl.constexpr,
    THREADS: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """As `reduce_max_sum`, of one sum."""
    thread = tl.arange(0, THREADS)
    ENDS: tl.constexpr = THREADS * (VEC + 1)
    slots = thread[:, None] * VEC + tl.arange(0, VEC)[None, :]
    put_numbers((s,), _place_of(slots, VEC), slots >= 0, 1, REGION)
    put_numbers((s_end,), ENDS + thread, thread < 2 * VEC, 1, REGION)
    await_threads(True)
    step, lane = LANES * inner, thread % LANES
    for k in range(0, (inner + THREADS // LANES - 1) // (THREADS // LANES)):
        position = thread // LANES + k * (THREADS // LANES)
        at = tl.minimum(position, inner - 1)
        slot = _first_slot(at, begins, inner, multiplier, power) + lane * inner
        in_tail = _first_slot(at, tail_at, inner, multiplier, power) + lane * inner
        total = tl.zeros([THREADS], tl.float32)
        total = _fold_slots(total, total, slot, span * VEC, step, "sum", REGION, VEC)
        total = _fold_ends(total, total, at + lane * inner, head, step, ENDS, "sum", REGION)
        total = _fold_ends(total, total, in_tail, tail, step, ENDS + head, "sum", REGION)
        total = sum_over_lanes(total, LANES, True)
        put_numbers((total,), at, (lane == 0) & (position < inner), 1, 0)


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
