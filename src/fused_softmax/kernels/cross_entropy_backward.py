"""The gradient of cross-entropy from known (row_max, row_sum): any number of programs share a row.

    p = exp(z - row_max)/row_sum;  dz = p*A - C*w_j - [j = t]*B;  dx = g * dz * (1 - tanh(x/cap)^2)
    A = (1 - eps)*w_t + eps/C*sum(w) + 2*z_loss*lse;  B = (1 - eps)*w_t;  C = eps/C

It runs in backward where the forward wrote no gradient, or where another upstream gradient arrives than the forward's
gradient is for. The device decides that, so the host never waits for a number. The kernel writes as many bytes as it
reads, and that is the limit. Its operations are those of `cross_entropy_resident`. Both write the same bits, except
with weights or smoothing, where a compiler may fuse other products. Comparing each column with the target would cost
more than p itself. So write every column as a non-target; the program that owns the target then overwrites it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common.arguments import Float32, Int32, Int64, Rows, Vector, kernel
from .common.cross_entropy_terms import (
    coefficients,
    cross_entropy_term,
    store_head_tail_gradient,
    store_target,
    target_of,
)
from .common.early_start import await_previous
from .common.logits import logsumexp
from .common.numerics import exp2_affine, upcast
from .common.tiles import (
    chunk_offsets,
    gradient_reads,
    head_and_tail,
    load_chunks,
    span_of,
    start_of,
    store_chunk,
    unit_of,
    width_if,
)


@triton.jit
def cross_entropy_unit(
    unit, x_ptr, dx_ptr, target_ptr, weight_ptr, weight_facts_ptr, count_ptr, moments_ptr, g_ptr, n_rows, n_cols,
    x_stride, dx_stride, phase, n_splits, ignore_index, g_stride, start, smoothing, cap, z_loss,
    MEAN: tl.constexpr, INPLACE: tl.constexpr, SHARDED: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr,
    SOFTCAP: tl.constexpr, ROWS: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr,
    UNALIGNED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of unit `unit`: CHUNKS chunks of ROWS rows."""
    FUSED: tl.constexpr = PTX and x_ptr.dtype.element_ty.primitive_bitwidth == 16
    row, exists, split, head, interior, first, width = unit_of(
        unit, n_rows, n_splits, x_stride, phase, n_cols, ROWS, VECTORS, VEC, CHUNKS, UNALIGNED
    )
    upstream = tl.load(g_ptr + row * g_stride, mask=exists, other=1.0)
    x_row = x_ptr + start_of(row, x_stride, phase, VEC, UNALIGNED)
    dx_row = dx_ptr + start_of(row, dx_stride, phase, VEC, UNALIGNED)
    columns = n_cols if UNALIGNED else n_cols * VEC
    POLICY: tl.constexpr = gradient_reads(UNALIGNED, x_ptr.dtype.element_ty)
    x = load_chunks(x_row + first, width, ROWS, CHUNKS, 0, VECTORS, VEC, -float("inf"), 1, POLICY)
    if UNALIGNED:
        head_tail, in_head_tail = head_and_tail(head, interior, n_cols, (split == 0) & exists, VECTORS, VEC)
        x_head_tail = tl.load(x_row + head_tail, mask=in_head_tail, other=-float("inf"))
    if SHARDED:
        target = tl.load(target_ptr + row, mask=exists, other=ignore_index)
        counts = target != ignore_index
        target -= start
        here = counts & (target >= 0) & (target < columns)
    else:
        target, counts = target_of(row, n_rows, target_ptr, ignore_index, columns)
        here = counts
    row_max = tl.load(moments_ptr + 2 * row, mask=exists, other=0.0)
    row_sum = tl.load(moments_ptr + 2 * row + 1, mask=exists, other=1.0)
    lse = logsumexp(row_max, row_sum)
    x_target = tl.load(x_row - head + target, mask=here, other=0.0).to(tl.float32)
    if INPLACE:
        # every thread has read its program's columns and the target before any thread writes; only the program that
        # owns the target uses it, so other programs may have overwritten it
        tl.debug_barrier()
    if SHARDED:
        a = upstream
        b = tl.load(g_ptr + row * g_stride + 1, mask=exists, other=0.0)
        c = tl.load(g_ptr + row * g_stride + 2, mask=exists, other=0.0)
    else:
        if WEIGHTED:
            w_target = tl.load(weight_ptr + target, mask=counts, other=0.0)
        else:
            w_target = 1.0
        if WEIGHTED and SMOOTH:
            w_sum = tl.load(weight_facts_ptr)
        else:
            w_sum = columns
        g = tl.where(counts, upstream, 0.0)
        if MEAN:
            g = tl.where(counts, upstream / tl.load(count_ptr), 0.0)
        a, b, c = coefficients(g, lse, w_target, w_sum, smoothing, columns, z_loss, SMOOTH)
    base, shift, by = exp2_affine(row_max, FUSED)
    a = tl.where(counts, a * by / row_sum, 0.0)
    w_here = weight_ptr + (head + first + 0 * row)[:, :, None]
    for k in tl.static_range(CHUNKS):
        at = tl.reshape(chunk_offsets(k, VECTORS, VEC), (1, VECTORS, VEC))
        dx = cross_entropy_term(
            upcast(x[k], PTX), 0.0, at, base[:, :, None], shift[:, :, None], a[:, :, None], c[:, :, None], w_here,
            cap, at < width[:, :, None], WEIGHTED, SMOOTH, SOFTCAP, FUSED,
        )  # fmt: skip
        dx = tl.where(counts[:, :, None], dx, 0.0)
        store_chunk(dx_row + first, width, dx, k, ROWS, 0, VECTORS, VEC)
    if UNALIGNED:
        store_head_tail_gradient(
            dx_row, x_head_tail, head_tail, in_head_tail, target - head, counts, b, base, shift, a, c,
            weight_ptr + head, cap, WEIGHTED, SMOOTH, SOFTCAP, FUSED,
        )  # fmt: skip
    dx = cross_entropy_term(
        x_target, b, target, base, shift, a, c, weight_ptr, cap, here, WEIGHTED, SMOOTH, SOFTCAP, FUSED
    )
    at = tl.where(here, target - head - first, -1) if SHARDED else target - head - first
    store_target(dx_row + first, dx, at.to(tl.int32), width, here, VECTORS, VEC, CHUNKS)


@kernel(num_stages=1, splits_rows=True)
def cross_entropy_backward(
    x_ptr: Rows,  # aligned to VEC elements, as dx_ptr
    dx_ptr: Rows,  # may be x_ptr
    target_ptr: Vector,  # [n_rows] int64
    weight_ptr: Vector,  # [n_cols] float32, where WEIGHTED
    weight_facts_ptr: Vector,  # [2] float32, where WEIGHTED and SMOOTH
    count_ptr: Vector,  # [1] float32, where MEAN
    moments_ptr: Vector,  # [n_rows, 2] float32
    # upstream gradient: [1] with g_stride 0, or [n_rows] with g_stride 1; float32. Where SHARDED each row's A, B and C
    # times the upstream gradient: [n_rows, 3] with g_stride 3
    g_ptr: Vector,
    written_ptr: Vector,  # [1] float32, where UNLESS_WRITTEN: the upstream gradient that dx holds the gradient for
    last_ptr: Vector,  # [1] float32, where REPORTS: takes the upstream gradient, if it is another one
    n_rows: Int64,
    n_cols: Int32,  # n_cols and strides: in units of VEC, or of one element where UNALIGNED
    x_stride: Int64, dx_stride: Int64,
    phase: Int32,
    n_splits: Int32,  # units that share a row
    ignore_index: Int64, g_stride: Int64,
    start: Int64,  # the first of these columns, where SHARDED
    smoothing: Float32, cap: Float32, z_loss: Float32,
    UNLESS_WRITTEN: tl.constexpr,  # dx already holds the gradient for one upstream gradient; g_stride is 0
    REPORTS: tl.constexpr,
    MEAN: tl.constexpr,
    INPLACE: tl.constexpr,  # dx_ptr is x_ptr
    SHARDED: tl.constexpr,  # other ranks have more columns of the rows, and the moments are of all
    WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, ROWS: tl.constexpr,
    VECTORS: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr, UNALIGNED: tl.constexpr, PTX: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    await_previous(EARLY)
    pid = tl.program_id(0).to(tl.int64)
    n_units = (n_rows + ROWS - 1) // ROWS * n_splits
    # few programs, because most often each one only finds that nothing is to do
    if UNLESS_WRITTEN:
        upstream, written = tl.load(g_ptr), tl.load(written_ptr)
        if REPORTS:
            tl.store(last_ptr, upstream, mask=(pid == 0) & (upstream != written))
        n_units = tl.where(upstream == written, 0, n_units)
    for unit in range(pid, n_units, tl.num_programs(0).to(tl.int64)):
        cross_entropy_unit(
            unit, x_ptr, dx_ptr, target_ptr, weight_ptr, weight_facts_ptr, count_ptr, moments_ptr, g_ptr, n_rows,
            n_cols, x_stride, dx_stride, phase, n_splits, ignore_index, g_stride, start, smoothing, cap, z_loss,
            MEAN, INPLACE, SHARDED, WEIGHTED, SMOOTH, SOFTCAP, ROWS, VECTORS, VEC, CHUNKS, UNALIGNED, PTX,
        )  # fmt: skip


@kernel(num_stages=1, splits_rows=True)
def scale_unless_one(
    dx_ptr: Rows,  # aligned to VEC elements
    g_ptr: Vector,  # as above
    n_rows: Int64, n_cols: Int32, dx_stride: Int64, phase: Int32, n_splits: Int32, g_stride: Int64, ROWS: tl.constexpr,
    VECTORS: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr, UNALIGNED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """dx *= g, for a gradient that was written over its logits. A row whose g is 1 is not accessed."""
    await_previous(EARLY)
    n_units = (n_rows + ROWS - 1) // ROWS * n_splits
    n_units = tl.where((g_stride == 0) & (tl.load(g_ptr) == 1.0), 0, n_units)
    for unit in range(tl.program_id(0).to(tl.int64), n_units, tl.num_programs(0).to(tl.int64)):
        row = unit // n_splits * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
        split = (unit % n_splits).to(tl.int32)
        exists = row < n_rows
        g = tl.load(g_ptr + row * g_stride, mask=exists, other=1.0)
        if tl.sum((g != 1.0).to(tl.int32)) > 0:
            head, interior = span_of(row, dx_stride, phase, n_cols, VEC, UNALIGNED)
            dx_row = dx_ptr + start_of(row, dx_stride, phase, VEC, UNALIGNED)
            first = split * (CHUNKS * VECTORS * VEC)
            width = width_if(exists, interior - first)
            dx = load_chunks(dx_row + first, width, ROWS, CHUNKS, 0, VECTORS, VEC, 0.0)
            for k in tl.static_range(CHUNKS):
                store_chunk(dx_row + first, width, dx[k].to(tl.float32) * g[:, :, None], k, ROWS, 0, VECTORS, VEC)
            if UNALIGNED:
                head_tail, in_head_tail = head_and_tail(head, interior, n_cols, (split == 0) & exists, VECTORS, VEC)
                at_head_tail = tl.load(dx_row + head_tail, mask=in_head_tail, other=0.0).to(tl.float32) * g
                tl.store(dx_row + head_tail, at_head_tail.to(dx_ptr.dtype.element_ty), mask=in_head_tail)
