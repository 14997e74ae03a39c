"""Statistics of wide rows: independent programs reduce parts of a row, and a second kernel merges them.

    m = max(m_i);  s = sum(s_i*exp(m_i - m));  t = sum(exp(m_i - m)*(t_i + s_i*(m_i - m)))

What is asked of a row, and the formulas, are those of `row_statistics`, which has the ranks. A program ends with its
own columns, so the last programs of a launch are short, however wide the rows are. Parts are columns of the row, and
are merged in one order: neither depends on the number of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common.arguments import AnyTensor, Float32, Int32, Int64, Rows, Vector, kernel
from .common.numerics import LOWEST, rescale_moments
from .common.online_softmax import NO_MOMENT, accumulate, add_head_tail, load_step, merge_parts, moment_of
from .common.statistics_terms import UNSCALED, picked_logits, scale_of, write_statistics
from .common.tiles import head_and_tail, span_of, start_of, unit_of


@kernel(splits_rows=True)
def row_statistics_parts(
    x_ptr: Rows,  # aligned to VEC elements
    parts_ptr: Vector,  # [n_rows, n_splits, 3] float32: (max, sum, moment) of each program's columns
    scale_ptr: Vector,  # [n_rows] float32, where SCALE is BY_ROW
    n_rows: Int64,
    n_cols: Int32,  # n_cols and x_stride: in units of VEC, or of one element where UNALIGNED
    x_stride: Int64,
    phase: Int32,
    n_splits: Int32,  # programs that share a row
    scale: Float32,
    ENTROPY: tl.constexpr, SCALE: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr,
    UNALIGNED: tl.constexpr, PTX: tl.constexpr,
    TRIGGER: tl.constexpr,  # whether the next kernel may start now and wait for this one
):  # fmt: skip
    """One step of `row_statistics` for each program; `merge_row_statistics` has the rest."""
    if TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    STEP: tl.constexpr = CHUNKS * VECTORS * VEC
    MOMENT: tl.constexpr = moment_of(ENTROPY, False)
    unit = tl.program_id(0).to(tl.int64)
    row, exists, split, head, interior, first, width = unit_of(
        unit, n_rows, n_splits, x_stride, phase, n_cols, 1, VECTORS, VEC, CHUNKS, UNALIGNED
    )
    _, inside_row = span_of(unit // n_splits, x_stride, phase, n_cols, VEC, UNALIGNED)
    x_row = x_ptr + start_of(row, x_stride, phase, VEC, UNALIGNED)
    by = scale_of(row, exists, scale_ptr, scale, SCALE)
    if UNALIGNED:
        head_tail, in_head_tail = head_and_tail(head, interior, n_cols, (split == 0) & exists, VECTORS, VEC)
        x_head_tail = tl.load(x_row + head_tail, mask=in_head_tail, other=-float("inf"))
    m = tl.zeros([1, VECTORS], tl.float32) + LOWEST
    s = tl.zeros([1, VECTORS], tl.float32)
    t = tl.zeros([1, VECTORS], tl.float32)
    if first + STEP <= inside_row:
        x = load_step(x_row + first, width, 1, CHUNKS, CHUNKS, VECTORS, VEC, 1)
        m, s, t = accumulate(
            x, by, 1.0, m, s, t, by, width, False, 1, MOMENT, SCALE != UNSCALED, False, CHUNKS, True, PTX
        )
    else:
        x = load_step(x_row + first, width, 1, CHUNKS, 0, VECTORS, VEC, 1)
        m, s, t = accumulate(
            x, by, 1.0, m, s, t, by, width, True, 1, MOMENT, SCALE != UNSCALED, False, CHUNKS, True, PTX
        )
    if UNALIGNED:
        if split == 0:
            m, s, t = add_head_tail(
                x_head_tail, head_tail, in_head_tail, by, 1.0, by, x_ptr, m, s, t,
                MOMENT, False, SCALE != UNSCALED, False,
            )  # fmt: skip
    part_max, part_sum, part_moment = merge_parts(m, s, t, MOMENT)
    part = parts_ptr + (row * n_splits + split) * 3
    tl.store(part, part_max[:, None])
    tl.store(part + 1, part_sum[:, None])
    if MOMENT != NO_MOMENT:
        tl.store(part + 2, part_moment[:, None])


@triton.jit
def load_parts(parts_ptr, row, exists, first, n_splits, SPLITS: tl.constexpr, MOMENT: tl.constexpr):
    """(m, s, t) of SPLITS parts of each row from part `first` on.  # row, exists: [BLOCK, 1]; result [BLOCK, SPLITS]"""
    split = first + tl.arange(0, SPLITS)[None, :]
    part, here = parts_ptr + (row * n_splits + split) * 3, exists & (split < n_splits)
    m = tl.load(part, mask=here, other=LOWEST)
    s = tl.load(part + 1, mask=here, other=0.0)
    t = tl.zeros_like(s)
    if MOMENT != NO_MOMENT:
        t = tl.load(part + 2, mask=here, other=0.0)
    return m, s, t


@kernel()
def merge_row_statistics(
    x_ptr: AnyTensor,  # [n_rows, n_cols], columns contiguous; for the picks
    parts_ptr: Vector,  # [n_rows, n_splits, 3], as `row_statistics_parts` writes them
    lse_ptr: Vector,  # this and the following as of `row_statistics`
    moments_ptr: Vector,
    entropy_ptr: Vector,
    ids_ptr: Vector,
    picked_ptr: Vector,
    scale_ptr: Vector,
    n_rows: Int64, x_stride: Int64, n_cols: Int64,  # x_stride, n_cols: elements
    n_splits: Int32, n_picks: Int32,
    scale: Float32,
    PICKS: tl.constexpr, ENTROPY: tl.constexpr, SCALE: tl.constexpr, KEEP_MOMENTS: tl.constexpr,
    BLOCK: tl.constexpr,  # rows of a program
    SPLITS: tl.constexpr,  # a power of two: parts of a row that are read at a time
    LOOPS: tl.constexpr,  # rows may have more parts
    WAITS: tl.constexpr,  # the kernel that writes the parts may still run
):  # fmt: skip
    """Merges each row's parts in one order, and writes what is asked of the row."""
    MOMENT: tl.constexpr = moment_of(ENTROPY, False)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    exists = row < n_rows
    by = scale_of(row, exists, scale_ptr, scale, SCALE)
    k, wanted, inside, x_picked = picked_logits(x_ptr + row * x_stride, n_cols, row, exists, ids_ptr, n_picks, PICKS)
    if WAITS:
        tl.extra.cuda.gdc_wait()
    m, s, t = load_parts(parts_ptr, row, exists, 0, n_splits, SPLITS, MOMENT)
    if LOOPS:
        for first in range(SPLITS, n_splits, SPLITS):
            next_m, next_s, next_t = load_parts(parts_ptr, row, exists, first, n_splits, SPLITS, MOMENT)
            top = tl.maximum(m, next_m)
            _, s, t = rescale_moments(m, s, t, top)
            m, next_s, next_t = rescale_moments(next_m, next_s, next_t, top)
            s, t = s + next_s, t + next_t
    row_max, row_sum, row_moment = merge_parts(m, s, t, MOMENT)
    write_statistics(
        row, exists, row_max, row_sum, row_moment, x_picked, inside, wanted, k, by, lse_ptr, moments_ptr, entropy_ptr,
        picked_ptr, n_picks, PICKS, ENTROPY, False, SCALE, KEEP_MOMENTS,
    )  # fmt: skip
