"""softmax, log_softmax and their gradients over a dimension that is not the last, where the columns do not fit on chip.

    reduce:  a part's  m = max(x), s = sum(exp(x - m))          gradient:  d = sum(y*dy)   or   sum(dy)
    merge:   the softmax's (m, s) from those of its parts       gradient:  the sum of the parts' d
    finish:  y = exp(x - m) / s   or   (x - m) - log(s)         gradient:  dx = y*(dy - d)   or   dy - exp(y)*d

Programs share a softmax: each reduces one part of its columns, so that there is work for the whole GPU where there are
few positions. The tensor is (outer, n_cols, inner) and is read twice. Parts take the steps of the columns in turn, so
the end of the columns is read last. The finish runs backwards, because what was read last is still in L2. Parts are
merged in a fixed order. Where a GPU can, a kernel starts before the one in front of it ends: it reads its tile, and
then waits for the numbers of that one.
"""

from __future__ import annotations

import triton.language as tl

from .common.arguments import Int32, Int64, Rows, Vector, kernel
from .common.early_start import await_previous
from .common.logits import logsumexp
from .common.numerics import LOWEST, exp, upcast
from .common.softmax_terms import gradient, normalize
from .common.spatial_parts import (
    gradient_sum_of_part,
    last_first,
    load_step,
    moments_of_part,
    numbers_at,
    numbers_of,
    part_of,
    reads_of_two_passes,
)
from .common.spatial_tiles import columns_of_chunk, outer_of, positions_of, store_tile, sum_over_columns, tile_at
from .common.tiles import READS


@kernel()
def softmax_spatial_reduce(
    x_ptr: Rows,
    max_ptr: Vector,  # [outer, n_parts, inner] float32; or the logsumexp, in any dtype, where LSE and ONE_PART
    sum_ptr: Vector,  # [outer, n_parts, inner] float32
    n_outer: Int64, n_cols: Int32,
    inner: Int64,  # inner and strides: in units of VEC
    n_blocks: Int32, n_parts: Int32,
    x_outer: Int64, x_col: Int64,
    OUTERS: tl.constexpr,  # indices of `outer` of a program
    COLS: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr,
    LSE: tl.constexpr,  # for a logsumexp: +inf gives a finite maximum and an infinite sum, not NaN
    ONE_PART: tl.constexpr, INVARIANT: tl.constexpr,
    TRIGGER: tl.constexpr,  # whether the next kernel may start now and wait for this one
    PTX: tl.constexpr,
):  # fmt: skip
    if TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    index, part, block = part_of(n_blocks, n_parts)
    outer, is_outer = outer_of(index, n_outer, OUTERS)
    first, exists = positions_of(block, inner, INNER, VEC)
    if OUTERS > 1:
        exists = exists & is_outer
    column = columns_of_chunk(1, COLS)
    x_at = tile_at(x_ptr, outer, x_col, x_outer, first, column, INNER, VEC)
    m = tl.zeros([COLS, OUTERS, INNER], tl.float32) + LOWEST
    s = tl.zeros([COLS, OUTERS, INNER], tl.float32)
    POLICY: tl.constexpr = READS if LSE else reads_of_two_passes(x_ptr.dtype.element_ty)
    top, total = moments_of_part(
        m, s, x_at, part, n_parts, n_cols, x_col, column, exists, CHUNKS, COLS, VEC, LSE, INVARIANT, POLICY, PTX
    )
    to, here = numbers_of(outer, is_outer, part, n_parts, inner, first, OUTERS, INNER, VEC)
    if LSE and ONE_PART:
        tl.store(max_ptr + to, logsumexp(top, total).to(max_ptr.dtype.element_ty), mask=here)
    else:
        tl.store(max_ptr + to, top, mask=here)
        tl.store(sum_ptr + to, total, mask=here)


@kernel()
def softmax_spatial_backward_reduce(
    y_ptr: Rows, dy_ptr: Rows,
    d_ptr: Vector,  # [outer, n_parts, inner] float32
    n_cols: Int32,
    inner: Int64,  # inner and strides: in units of VEC
    n_blocks: Int32, n_parts: Int32,
    y_outer: Int64, y_col: Int64, dy_outer: Int64, dy_col: Int64,
    LOG: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr,
    INVARIANT: tl.constexpr, TRIGGER: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    if TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    outer, part, block = part_of(n_blocks, n_parts)
    first, exists = positions_of(block, inner, INNER, VEC)
    column = columns_of_chunk(1, COLS)
    y_at = tile_at(y_ptr, outer, y_col, y_outer, first, column, INNER, VEC)
    dy_at = tile_at(dy_ptr, outer, dy_col, dy_outer, first, column, INNER, VEC)
    d = tl.zeros([COLS, 1, INNER], tl.float32)
    POLICY: tl.constexpr = reads_of_two_passes(dy_ptr.dtype.element_ty)
    d = gradient_sum_of_part(
        d, y_at, dy_at, part, n_parts, n_cols, y_col, dy_col, column, exists, LOG, CHUNKS, COLS, VEC, INVARIANT, POLICY,
        PTX,
    )  # fmt: skip
    to, here = numbers_at(outer * n_parts + part, inner, first, INNER, VEC)
    tl.store(d_ptr + to, d, mask=here)


@kernel()
def softmax_spatial_merge(
    parts_max_ptr: Vector, parts_sum_ptr: Vector,  # [outer, n_parts, inner] float32
    max_ptr: Vector,  # [outer, inner] float32; or the logsumexp, in any dtype, where LSE
    sum_ptr: Vector,  # [outer, inner] float32
    inner: Int64,  # in elements
    n_blocks: Int32, n_parts: Int32,
    COLS: tl.constexpr, INNER: tl.constexpr, LSE: tl.constexpr,
    WAITS: tl.constexpr,  # the kernel that writes the parts may still run
    TRIGGER: tl.constexpr,
):  # fmt: skip
    if TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    outer, _, block = part_of(n_blocks, 1)
    first, exists = positions_of(block, inner, INNER, 1)
    part = columns_of_chunk(1, COLS)
    at = tile_at(parts_max_ptr, outer, inner, inner * n_parts, first, part, INNER, 1)
    to_sum = tile_at(parts_sum_ptr, outer, inner, inner * n_parts, first, part, INNER, 1)
    m = tl.zeros([COLS, 1, INNER], tl.float32) + LOWEST
    s = tl.zeros([COLS, 1, INNER], tl.float32)
    if WAITS:
        tl.extra.cuda.gdc_wait()
    for start in range(0, n_parts, COLS):
        inside = exists & (part < n_parts - start)
        m_part = tl.load(at + start * inner, mask=inside, other=LOWEST)
        s_part = tl.load(to_sum + start * inner, mask=inside, other=0.0)
        m_new = tl.maximum(m, m_part)
        s = s * exp(m - m_new) + s_part * exp(m_part - m_new)
        m = m_new
    top = tl.max(m, 0)
    total = sum_over_columns(s * exp(m - top[None, :, :]), True)
    to, here = numbers_at(outer, inner, first, INNER, 1)
    if LSE:
        tl.store(max_ptr + to, logsumexp(top, total).to(max_ptr.dtype.element_ty), mask=here)
    else:
        tl.store(max_ptr + to, top, mask=here)
        tl.store(sum_ptr + to, total, mask=here)


@kernel()
def softmax_spatial_backward_merge(
    parts_ptr: Vector,  # [outer, n_parts, inner] float32
    d_ptr: Vector,  # [outer, inner] float32
    inner: Int64,  # in elements
    n_blocks: Int32, n_parts: Int32,
    COLS: tl.constexpr, INNER: tl.constexpr, WAITS: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    if TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    outer, _, block = part_of(n_blocks, 1)
    first, exists = positions_of(block, inner, INNER, 1)
    part = columns_of_chunk(1, COLS)
    at = tile_at(parts_ptr, outer, inner, inner * n_parts, first, part, INNER, 1)
    d = tl.zeros([COLS, 1, INNER], tl.float32)
    if WAITS:
        tl.extra.cuda.gdc_wait()
    for start in range(0, n_parts, COLS):
        d += tl.load(at + start * inner, mask=exists & (part < n_parts - start), other=0.0)
    to, here = numbers_at(outer, inner, first, INNER, 1)
    tl.store(d_ptr + to, sum_over_columns(d, True), mask=here)


@kernel()
def softmax_spatial_finish(
    x_ptr: Rows, y_ptr: Rows,
    max_ptr: Vector, sum_ptr: Vector,  # [outer, inner] float32
    n_cols: Int32,
    inner: Int64,  # inner and strides: in units of VEC
    n_blocks: Int32,
    n_steps: Int32,  # programs of a softmax
    x_outer: Int64, x_col: Int64, y_outer: Int64, y_col: Int64,
    LOG: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr,
    WAITS: tl.constexpr,  # the kernel that writes the maxima and sums may still run
    PTX: tl.constexpr,
):  # fmt: skip
    outer, step, block = last_first(tl.program_id(0), tl.num_programs(0), n_blocks, n_steps)
    first, exists = positions_of(block, inner, INNER, VEC)
    column = columns_of_chunk(1, COLS)
    x_at = tile_at(x_ptr, outer, x_col, x_outer, first, column, INNER, VEC)
    y_at = tile_at(y_ptr, outer, y_col, y_outer, first, column, INNER, VEC)
    start = step.to(tl.int64) * (CHUNKS * COLS)
    left = (n_cols - start).to(tl.int32)
    POLICY: tl.constexpr = reads_of_two_passes(x_ptr.dtype.element_ty)
    x = load_step(x_at, start, x_col, column, n_cols, exists, -float("inf"), CHUNKS, COLS, VEC, POLICY)
    at, here = numbers_at(outer, inner, first, INNER, VEC)
    if WAITS:  # the tile is on its way
        tl.extra.cuda.gdc_wait()
    top = tl.load(max_ptr + at, mask=here, other=0.0)[None, :, :]
    total = tl.load(sum_ptr + at, mask=here, other=1.0)[None, :, :]
    for c in tl.static_range(CHUNKS):
        y = normalize(upcast(x[c], PTX), top, total, LOG)
        store_tile(y_at + start * y_col * VEC, y, c, y_col, column, left, exists, 0, COLS, VEC)


@kernel()
def softmax_spatial_backward_finish(
    y_ptr: Rows, dy_ptr: Rows, dx_ptr: Rows,
    d_ptr: Vector,  # [outer, inner] float32
    n_cols: Int32,
    inner: Int64,  # inner and strides: in units of VEC
    n_blocks: Int32, n_steps: Int32,
    y_outer: Int64, y_col: Int64, dy_outer: Int64, dy_col: Int64, dx_outer: Int64, dx_col: Int64,
    LOG: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr,
    WAITS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    outer, step, block = last_first(tl.program_id(0), tl.num_programs(0), n_blocks, n_steps)
    first, exists = positions_of(block, inner, INNER, VEC)
    column = columns_of_chunk(1, COLS)
    y_at = tile_at(y_ptr, outer, y_col, y_outer, first, column, INNER, VEC)
    dy_at = tile_at(dy_ptr, outer, dy_col, dy_outer, first, column, INNER, VEC)
    dx_at = tile_at(dx_ptr, outer, dx_col, dx_outer, first, column, INNER, VEC)
    start = step.to(tl.int64) * (CHUNKS * COLS)
    left = (n_cols - start).to(tl.int32)
    POLICY: tl.constexpr = reads_of_two_passes(dy_ptr.dtype.element_ty)
    dy = load_step(dy_at, start, dy_col, column, n_cols, exists, 0.0, CHUNKS, COLS, VEC, POLICY)
    y = load_step(y_at, start, y_col, column, n_cols, exists, 0.0, CHUNKS, COLS, VEC, POLICY)
    if WAITS:  # the tiles are on their way
        tl.extra.cuda.gdc_wait()
    at, here = numbers_at(outer, inner, first, INNER, VEC)
    d = tl.load(d_ptr + at, mask=here, other=0.0)[:, None, :]
    for c in tl.static_range(CHUNKS):
        dx = gradient(upcast(y[c], PTX), upcast(dy[c], PTX), d, LOG)
        store_tile(dx_at + start * dx_col * VEC, dx, c, dx_col, column, left, exists, 0, COLS, VEC)


@kernel()
def logsumexp_spatial_backward(
    x_ptr: Rows, dx_ptr: Rows,
    lse_ptr: Vector,  # [outer, inner], as the forward returned it
    g_ptr: Vector,  # [outer, inner], the upstream gradient
    n_outer: Int64, n_cols: Int32,
    inner: Int64,  # inner and strides: in units of VEC
    n_blocks: Int32, n_steps: Int32,
    x_outer: Int64, x_col: Int64, dx_outer: Int64, dx_col: Int64,
    OUTERS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr,
    PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """dx = g*exp(x - lse)"""
    index, step, block = last_first(tl.program_id(0), tl.num_programs(0), n_blocks, n_steps)
    outer, is_outer = outer_of(index, n_outer, OUTERS)
    first, exists = positions_of(block, inner, INNER, VEC)
    if OUTERS > 1:
        exists = exists & is_outer
    column = columns_of_chunk(1, COLS)
    x_at = tile_at(x_ptr, outer, x_col, x_outer, first, column, INNER, VEC)
    dx_at = tile_at(dx_ptr, outer, dx_col, dx_outer, first, column, INNER, VEC)
    start = step.to(tl.int64) * (CHUNKS * COLS)
    left = (n_cols - start).to(tl.int32)
    await_previous(EARLY)
    x = load_step(x_at, start, x_col, column, n_cols, exists, 0.0, CHUNKS, COLS, VEC)
    at, here = numbers_of(outer, is_outer, 0, 1, inner, first, OUTERS, INNER, VEC)
    lse = tl.load(lse_ptr + at, mask=here, other=0.0).to(tl.float32)[None, :, :]
    g = tl.load(g_ptr + at, mask=here, other=0.0).to(tl.float32)[None, :, :]
    for c in tl.static_range(CHUNKS):
        dx = g * exp(upcast(x[c], PTX) - lse)
        store_tile(dx_at + start * dx_col * VEC, dx, c, dx_col, column, left, exists, 0, COLS, VEC)
