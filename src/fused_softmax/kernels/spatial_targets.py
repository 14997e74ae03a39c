"""The small kernels around `cross_entropy_spatial`: what prepares the targets of a mean, and what adds up partial sums.

A mean needs the number of targets before the first gradient. Programs count their targets, and write them in fewer
bits, which the main kernel finds in the L2. `add_partials` adds up these counts, later the losses, and
the counts of losses of many rows.

Each kernel starts while the one in front of it still runs, and then waits for its end. This hides the latency of a
launch. No kernel ends before that wait, so the writes of all earlier kernels are visible after it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common.arguments import Int32, Int64, Vector, kernel
from .common.cross_entropy_terms import assert_inside, class_of


@triton.jit
def prepare_block(
    target_ptr, weight_ptr, to_ptr, start, n, n_cols, ignore_index, WEIGHTED: tl.constexpr, EACH: tl.constexpr,
    BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Writes the targets from `start` on in fewer bits. Returns how many count, or the sum of their weights."""
    at = start + tl.arange(0, BLOCK)
    targets = ()
    for k in tl.static_range(EACH):
        if MASKED:
            target = tl.load(target_ptr + at + k * BLOCK, mask=at < n - k * BLOCK, other=ignore_index)
        else:
            target = tl.load(target_ptr + at + k * BLOCK)
        targets = targets + (target,)
    found = tl.zeros([BLOCK], tl.float32)
    wrong = tl.zeros([BLOCK], tl.int64) + ignore_index
    for k in tl.static_range(EACH):
        target = class_of(targets[k], ignore_index, n_cols)
        # one assertion for all: the warps wait for each
        wrong = tl.where((target < 0) & (targets[k] != ignore_index), targets[k], wrong)
        if WEIGHTED:
            found += tl.load(weight_ptr + target, mask=target >= 0, other=0.0)
        else:
            found += (target >= 0).to(tl.float32)
        if MASKED:
            tl.store(to_ptr + at + k * BLOCK, target.to(to_ptr.dtype.element_ty), mask=at < n - k * BLOCK)
        else:
            tl.store(to_ptr + at + k * BLOCK, target.to(to_ptr.dtype.element_ty))
    assert_inside(wrong, ignore_index, n_cols)
    return tl.sum(found, 0)


@kernel(asserts=True)
def prepare_spatial_targets(
    target_ptr: Vector,  # [n] int64
    weight_ptr: Vector,  # [n_cols] float32, where WEIGHTED
    to_ptr: Vector,  # [n] int8, int16 or int32: the target, or -1 where it does not count
    count_ptr: Vector,  # [programs] float32
    n: Int64,
    n_cols: Int32,
    ignore_index: Int64,
    WEIGHTED: tl.constexpr,
    TRIGGER: tl.constexpr,  # whether the next kernel may start now and wait for this one
    EACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each program: its EACH x BLOCK targets in fewer bits, and how many count, or the sum of their weights."""
    if TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    start = tl.program_id(0).to(tl.int64) * (EACH * BLOCK)
    if start + EACH * BLOCK <= n:  # without masks, so that a thread reads 16 bytes at a time
        found = prepare_block(
            target_ptr, weight_ptr, to_ptr, start, n, n_cols, ignore_index, WEIGHTED, EACH, BLOCK, MASKED=False
        )
    else:
        found = prepare_block(
            target_ptr, weight_ptr, to_ptr, start, n, n_cols, ignore_index, WEIGHTED, EACH, BLOCK, MASKED=True
        )
    tl.store(count_ptr + tl.program_id(0), found)


@triton.jit
def add_block(partial_ptr, start, n, total, EACH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """`total` and EACH x BLOCK partial sums from `start` on."""
    at = start + tl.arange(0, BLOCK)
    partials = ()
    for k in tl.static_range(EACH):
        if MASKED:
            partial = tl.load(partial_ptr + at + k * BLOCK, mask=at < n - k * BLOCK, other=0.0)
        else:
            partial = tl.load(partial_ptr + at + k * BLOCK)
        partials = partials + (partial,)
    for k in tl.static_range(EACH):
        total += partials[k]
    return total


@kernel()
def add_partials(
    partial_ptr: Vector,  # [n] float32
    sum_ptr: Vector,  # [1] float32
    n: Int64,
    WAITS: tl.constexpr,  # the kernel that writes the partial sums may still run
    TRIGGER: tl.constexpr,  # whether the next kernel may start now and wait for this one
    EACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of all partial sums, in one fixed order. One program."""
    if TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    if WAITS:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, EACH * BLOCK):
        if start + EACH * BLOCK <= n:  # without masks, so that a thread reads 16 bytes at a time
            total = add_block(partial_ptr, start, n, total, EACH, BLOCK, MASKED=False)
        else:
            total = add_block(partial_ptr, start, n, total, EACH, BLOCK, MASKED=True)
    tl.store(sum_ptr, tl.sum(total, 0))
