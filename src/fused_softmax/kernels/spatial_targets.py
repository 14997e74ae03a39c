"""Prepares the targets of a mean over images: counts them, and writes them in fewer bits for `cross_entropy_spatial`.

A mean needs the number of targets before the first gradient. The next kernel finds the prepared ones in the L2.
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
    WEIGHTED: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each program: its EACH x BLOCK targets in fewer bits, and how many count, or the sum of their weights."""
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
