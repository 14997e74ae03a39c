"""The gradient of softmax of scaled rows under a mask, the row on chip.

    dx = scale*y*(dy - sum(y*dy)), and 0 in hidden columns

y is 0 in hidden columns, so no mask is read again, with one exception: a boolean mask for a row whose sum is not
finite. A row that holds NaN, or sees no column, is NaN throughout, but its hidden columns have a gradient of 0. Columns
that a causal row does not see are not read: dx is 0 there. `softmax_two_pass` takes rows that do not fit on chip.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common.arguments import Float32, Int32, Int64, Rows, Vector, kernel
from .common.cluster import cluster_reduce_sum, init_cluster_barrier, leave_cluster
from .common.early_start import await_previous
from .common.mask_layouts import ANY_ROWS, NO_MASK, ONE_VALUE, elements_to
from .common.masked_rows import scalar_tile, scalar_tiles, store_around
from .common.masks import mask_at
from .common.numerics import lies_in_lanes, rounded_product, sum_of_vectors, upcast
from .common.row_scheduler import row_in_order, seen_of
from .common.softmax_terms import gradient_term
from .common.tiles import (
    chunk_offsets,
    load_chunks,
    segments_of,
    slice_of,
    span_of,
    start_of,
    warp_of,
    width_if,
)


@triton.jit
def gradient_of(y, dy, d, scale, PTX: tl.constexpr):
    """scale*y*(dy - d) of a chunk, whose numbers are converted to float32 again."""
    return scale * upcast(y, PTX, True, True) * (upcast(dy, PTX, True, True) - d)


@triton.jit
def load_scalars(
    y_row, dy_row, head, within, interior, columns, seen, owner, SCALARS: tl.constexpr, UNALIGNED: tl.constexpr,
    CAUSAL: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """(offsets, masks, y, dy) of the columns that are moved one by one, as `scalar_tile` has them; 0 where not seen."""
    scalars, in_scalars, y_scalars, dy_scalars = (), (), (), ()
    for t in tl.static_range(SCALARS):
        at, real = scalar_tile(t, head, within, interior, columns, owner, UNALIGNED, CAUSAL, False, VECTORS, VEC)
        scalars, in_scalars = scalars + (at,), in_scalars + (real,)
        visible = real & (at < seen - head) if CAUSAL else real
        y_scalars = y_scalars + (tl.load(y_row + at, mask=visible, other=0.0).to(tl.float32),)
        dy_scalars = dy_scalars + (tl.load(dy_row + at, mask=visible, other=0.0).to(tl.float32),)
    return scalars, in_scalars, y_scalars, dy_scalars


@kernel(on_cluster=True)
def masked_softmax_backward(
    y_ptr: Rows,  # the forward's output; all pointers: aligned to VEC elements
    dy_ptr: Rows, dx_ptr: Rows,
    mask_ptr: Vector,  # uint8, where MASK
    n_rows: Int64,
    n_cols: Int32,  # n_cols and strides: in units of VEC, or of one element where UNALIGNED
    y_stride: Int64, dy_stride: Int64, dx_stride: Int64,
    phase: Int32,
    n_queries: Int64,
    multiplier: Int64,  # the numbers of `fast_divmod` for n_queries
    power: Int64,
    n_middle: Int64,  # the mask's sizes and strides, as in `masked_softmax_resident`
    n_inner: Int64, m_outer: Int64, m_middle: Int64, m_inner: Int64, m_query: Int64, m_col: Int64,
    scale: Float32,
    MASK: tl.constexpr,  # none, or a boolean one
    MASK_COLS: tl.constexpr, MASK_VEC: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, CTAS: tl.constexpr,
    WARPS_PER_ROW: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr,
    UNALIGNED: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    init_cluster_barrier(CTAS, 1, PTX, WARPS_PER_ROW)
    SEGMENTS: tl.constexpr = ROWS * CTAS * WARPS_PER_ROW
    CHUNK: tl.constexpr = WARPS_PER_ROW * VECTORS * VEC
    SCALARS: tl.constexpr = scalar_tiles(UNALIGNED, CAUSAL, False, VECTORS, VEC)
    scale = tl.cast(scale, tl.float32)
    place, rank = segments_of(ROWS, CTAS, WARPS_PER_ROW)
    warp = warp_of(SEGMENTS, WARPS_PER_ROW)
    exists = place < n_rows
    row, batch, query = row_in_order(place, n_queries, multiplier, power, CAUSAL)
    head, interior = span_of(row, y_stride, phase, n_cols, VEC, UNALIGNED)
    y_row = y_ptr + start_of(row, y_stride, phase, VEC, UNALIGNED)
    dy_row = dy_ptr + start_of(row, dy_stride, phase, VEC, UNALIGNED)
    dx_row = dx_ptr + start_of(row, dx_stride, phase, VEC, UNALIGNED)
    first, width = slice_of(interior, rank, CTAS, VEC)
    first += warp * (VECTORS * VEC)
    width = width_if(exists, width - warp * (VECTORS * VEC)).to(tl.int32)
    # y is 0 where a causal row sees nothing: y and dy are not read there, and dx is 0
    columns = (n_cols if UNALIGNED else n_cols * VEC).to(tl.int32)
    seen = seen_of(query, columns, CAUSAL)
    within = (tl.maximum(seen - head, 0) // VEC * VEC).to(tl.int32)
    left = tl.minimum(width, within - first).to(tl.int32)
    await_previous(EARLY)
    y = load_chunks(y_row + first, left, SEGMENTS, CHUNKS, 0, VECTORS, VEC, 0.0, WARPS_PER_ROW)
    dy = load_chunks(dy_row + first, left, SEGMENTS, CHUNKS, 0, VECTORS, VEC, 0.0, WARPS_PER_ROW)
    owner = (rank == 0) & (warp == 0) & exists
    SKIPS: tl.constexpr = CAUSAL and CTAS == 1
    if SKIPS:  # the compiler moves no load over the branches that follow
        scalars, in_scalars, y_scalars, dy_scalars = load_scalars(
            y_row, dy_row, head, within, interior, columns, seen, owner, SCALARS, UNALIGNED, CAUSAL, VECTORS, VEC
        )
    d = tl.zeros([SEGMENTS, VECTORS], tl.float32)
    ROUNDED: tl.constexpr = lies_in_lanes(VEC, y_ptr.dtype.element_ty)
    # an unseen chunk takes as much time as a full one. 4,096 columns: 0.99 of the add with SKIPS, 0.97 without
    most = tl.max(tl.max(left, 1), 0) if SKIPS else 0
    for c in tl.static_range(CHUNKS):
        if SKIPS:
            if c * CHUNK < most:
                d += sum_of_vectors(gradient_term(upcast(y[c], PTX), upcast(dy[c], PTX), False, ROUNDED), PTX)
        else:
            d += sum_of_vectors(gradient_term(upcast(y[c], PTX), upcast(dy[c], PTX), False, ROUNDED), PTX)
    if not SKIPS:
        scalars, in_scalars, y_scalars, dy_scalars = load_scalars(
            y_row, dy_row, head, within, interior, columns, seen, owner, SCALARS, UNALIGNED, CAUSAL, VECTORS, VEC
        )
    if CTAS == 1:
        for t in tl.static_range(SCALARS):
            d += rounded_product(y_scalars[t], dy_scalars[t])
    d = tl.sum(d, 1)
    if CTAS > 1:  # Triton may place these tiles in other CTAs than the row's
        for t in tl.static_range(SCALARS):
            d += tl.sum(rounded_product(y_scalars[t], dy_scalars[t]), 1)
    d = cluster_reduce_sum(d, CTAS, PTX, WARPS_PER_ROW)[:, None]
    if MASK != NO_MASK:
        not_finite = exists & ((tl.abs(d) < float("inf")) == 0)
        mask_row, at_mask, _ = mask_at(
            mask_ptr, row, row, batch, query, head, first, not_finite, n_middle, n_inner, m_outer, m_middle, m_inner,
            m_query, m_col, 0, MASK, MASK_COLS, ANY_ROWS, MASK_VEC, UNALIGNED, VEC,
        )  # fmt: skip
        if MASK_COLS == ONE_VALUE:
            at_mask = tl.where(not_finite, at_mask, 1)
    vector = VEC * tl.arange(0, VECTORS)[None, :]
    d_of_row = d[:, :, None]
    for c in tl.static_range(CHUNKS):
        dx = tl.zeros([SEGMENTS, VECTORS, VEC], tl.float32)
        if CAUSAL:  # y and dy are 0 in a vector that the row does not see, but 0 times an infinite sum is NaN
            d_of_row = tl.where(vector < left - c * CHUNK, d, 0.0)[:, :, None]
        if SKIPS and MASK == NO_MASK:
            if c * CHUNK < most:
                dx = gradient_of(y[c], dy[c], d_of_row, scale, PTX)
        else:
            dx = gradient_of(y[c], dy[c], d_of_row, scale, PTX)
        if MASK != NO_MASK:
            if MASK_COLS == ONE_VALUE:
                kept = at_mask[:, :, None]
            else:
                offsets = chunk_offsets(c, VECTORS, VEC, WARPS_PER_ROW)
                at = at_mask + elements_to(offsets, m_col, MASK_COLS)
                kept = tl.load(at, mask=not_finite & (offsets < left), other=1)
                kept = tl.reshape(kept, (SEGMENTS, VECTORS, VEC))
            dx = tl.where(kept != 0, dx, 0.0)
        store_around(dx_row + first, width, within - first, dx, c, CAUSAL, SEGMENTS, 0, WARPS_PER_ROW, VECTORS, VEC)
    for t in tl.static_range(SCALARS):
        dx_scalar = scale * y_scalars[t] * (dy_scalars[t] - d)
        if CAUSAL:  # 0 times an infinite sum is NaN
            dx_scalar = tl.where(scalars[t] < seen - head, dx_scalar, 0.0)
        if MASK != NO_MASK:
            if MASK_COLS == ONE_VALUE:
                kept_scalar = at_mask
            else:
                at_scalar = mask_row + elements_to(scalars[t], m_col, MASK_COLS)
                kept_scalar = tl.load(at_scalar, mask=not_finite & in_scalars[t], other=1)
            dx_scalar = tl.where(kept_scalar != 0, dx_scalar, 0.0)
        tl.store(dx_row + scalars[t], dx_scalar.to(dx_ptr.dtype.element_ty), mask=in_scalars[t])
    leave_cluster(CTAS, PTX)
