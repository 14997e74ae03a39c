"""Softmax of scaled rows under a mask, with the row on chip.

    z = scale*x + mask  or  z = scale*x where mask, else -inf;  y = exp(z - max(z)) / sum(exp(z - max(z)))

Causal rows need no mask: query q sees columns 0..q, so its row has q + 1 columns. They are read in vectors, except its
head and tail; the other columns are not read, and zeros are written there. A program writes narrow causal rows as one
piece (`gathered_rows`), because short stores end within sectors. Chunks of which no row sees a column are only part of
that piece. A mask is read once, in place, with its own strides (0 where it is broadcast). `row_scheduler` has the order
of the rows. A row without a visible column has sum 0 and is NaN, or zero where ZERO. The limit is the bytes of the
visible x and mask, and of y.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common.arguments import Float32, Int32, Int64, Rows, Vector, kernel
from .common.cluster import cluster_reduce_max_sum, init_cluster_barrier, leave_cluster
from .common.early_start import await_previous
from .common.gathered_ptx import region_bytes
from .common.gathered_rows import declare_regions, put_elements, put_vectors, scatter
from .common.mask_layouts import ADDITIVE, BOOLEAN, NEIGHBORS, NO_MASK, OWN, SHIFTED
from .common.masked_rows import apart_from, reciprocal, scalar_tiles, store_around, upcast_logits
from .common.masks import hidden, hide, load_masks, load_next, load_scalars, mask_at, scores
from .common.numerics import LOWEST, SCORES_OF_32_BITS, exp, exp2_affine, exp2_fma, rounded_product, scaled
from .common.row_scheduler import row_at, rows_of_piece, seen_of
from .common.shifted_masks import load_shifted, shift_loaded
from .common.tiles import (
    chunk_offsets,
    issue_loads,
    load_chunks,
    segments_of,
    slice_of,
    span_of,
    start_of,
    warp_of,
    width_if,
)


@triton.jit
def sums_of_logits(
    x, z_scalars, scale, most, RECOMPUTED: tl.constexpr, FUSED: tl.constexpr, FOLDED: tl.constexpr,
    SKIPS: tl.constexpr, CHUNK: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """(m, s, exponentials, their correction) of logits without a mask: each vector's maximum and sum.

    Where FUSED, m is in units of x. There are no exponentials where they are RECOMPUTED.  # x: as loaded
    """
    # scale is positive, so the largest x has the largest z
    top = tl.max(x[0], 2)
    for c in tl.static_range(1, len(x)):
        if SKIPS:
            if c * CHUNK < most:
                top = tl.maximum(top, tl.max(x[c], 2))
        else:
            top = tl.maximum(top, tl.max(x[c], 2))
    top = tl.maximum(top.to(tl.float32), LOWEST)
    if FOLDED:
        for t in tl.static_range(len(z_scalars)):
            top = tl.maximum(top, z_scalars[t])
    m = top if FUSED else tl.maximum(scaled(top, scale, PTX), LOWEST)
    s = tl.zeros_like(m)
    # with the shape of a chunk: Triton 3.6 fails where it must move the correction of [SEGMENTS, VECTORS]
    base, shift, correction = exp2_affine(m[:, :, None], FUSED, scale)
    correction = tl.reshape(correction, m.shape)
    exps = ()
    for c in tl.static_range(len(x)):
        if SKIPS:
            if c * CHUNK < most:
                s += tl.sum(exp2_fma(upcast_logits(x[c], scale, FUSED, PTX), base, shift, FUSED), 2)
        else:
            e = exp2_fma(upcast_logits(x[c], scale, FUSED, PTX), base, shift, FUSED)
            s += tl.sum(e, 2)
            exps = exps if RECOMPUTED else exps + (e,)
    return m, s * correction, exps, correction


@triton.jit
def sums_of_scores(z, m, z_scalars, AFFINE: tl.constexpr, FOLDED: tl.constexpr):
    """(m, s, exponentials, their correction) of scores: each vector's maximum and sum.  # m: of the chunks"""
    if FOLDED:
        for t in tl.static_range(len(z_scalars)):
            m = tl.maximum(m, z_scalars[t])
    s = tl.zeros_like(m)
    base, shift, correction = exp2_affine(m[:, :, None], AFFINE, None, SCORES_OF_32_BITS)
    correction = tl.reshape(correction, m.shape)
    exps = ()
    for c in tl.static_range(len(z)):
        exps = exps + (exp2_fma(z[c], base, shift, AFFINE),)
        s += tl.sum(exps[c], 2)
    if AFFINE:
        s *= correction
    return m, s, exps, correction


@kernel(on_cluster=True)
def masked_softmax_resident(
    x_ptr: Rows,  # aligned to VEC elements, as y_ptr
    y_ptr: Rows,
    mask_ptr: Vector,  # uint8 or floating, where MASK
    n_rows: Int64,  # fewer than 2^31
    n_cols: Int32,  # n_cols and the rows' strides: in units of VEC, or of one element where UNALIGNED
    x_stride: Int64, y_stride: Int64,
    phase: Int32,
    n_queries: Int64,  # rows are (outer, n_middle, n_inner, n_queries)
    # the order of the rows: `row_of_shared_mask`, and the numbers of `fast_divmod` for it
    n_span: Int64, span_multiplier: Int64, span_power: Int64, span_stride: Int64,
    n_block: Int64, block_multiplier: Int64, block_power: Int64, shared_stride: Int64,
    n_group: Int64, group_multiplier: Int64, group_power: Int64,
    n_last: Int64, last_multiplier: Int64, last_power: Int64,
    n_middle: Int64, n_inner: Int64,
    m_outer: Int64,  # the mask's strides, in units of MASK_VEC
    m_middle: Int64, m_inner: Int64, m_query: Int64,
    m_col: Int64,  # where STRIDED: elements
    m_phase: Int32,  # elements from mask_ptr, which is aligned where SHIFTED, to the mask
    scale: Float32,  # positive
    MASK: tl.constexpr,
    MASK_COLS: tl.constexpr,  # how its columns lie: `common.masks` names the numbers
    MASK_ROWS: tl.constexpr,  # how its rows lie
    MASK_VEC: tl.constexpr, CAUSAL: tl.constexpr, ZERO: tl.constexpr,
    RECOMPUTE: tl.constexpr,  # without a mask: hold the row as loaded and compute exp twice
    ROWS: tl.constexpr, CTAS: tl.constexpr, WARPS_PER_ROW: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr,
    CHUNKS: tl.constexpr, UNPREDICATED: tl.constexpr, UNALIGNED: tl.constexpr,
    OUTPUT_GATHERED: tl.constexpr,  # causal rows without gaps in y: a program writes its rows as one piece
    BULK: tl.constexpr,  # how (`scatter`)
    UNSEEN: tl.constexpr,  # the last chunks, of which no row sees a column: they are written without being read
    THREADS: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    init_cluster_barrier(CTAS, 2, PTX, WARPS_PER_ROW)
    tl.static_assert(not OUTPUT_GATHERED or (CAUSAL and MASK == NO_MASK), "only causal rows are written as one piece")
    tl.static_assert(UNSEEN == 0 or OUTPUT_GATHERED, "only rows that are written as one piece have unseen chunks")
    SEEN: tl.constexpr = CHUNKS - UNSEEN
    MOST: tl.constexpr = ROWS * (CHUNKS * VECTORS + 2) * VEC
    if OUTPUT_GATHERED:
        declare_regions(region_bytes(MOST, y_ptr.dtype.element_ty.primitive_bitwidth // 8), PTX)
    SEGMENTS: tl.constexpr = ROWS * CTAS * WARPS_PER_ROW
    TYPE: tl.constexpr = mask_ptr.dtype.element_ty
    BITS: tl.constexpr = TYPE.primitive_bitwidth
    IS_SHIFTED: tl.constexpr = MASK != NO_MASK and MASK_COLS == SHIFTED
    COLS: tl.constexpr = NEIGHBORS if IS_SHIFTED and CTAS > 1 else MASK_COLS  # of chunks as loaded
    BITS_OF_X: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth
    # a boolean mask is applied to logits of 16 bits as they were loaded, and no other mask is left. On a cluster that
    # is slower: 0.86 of a copy instead of 0.94 at 20,001 columns
    PACKED: tl.constexpr = MASK == BOOLEAN and BITS_OF_X == 16 and CTAS == 1
    LATER: tl.constexpr = NO_MASK if PACKED else MASK
    RECOMPUTED: tl.constexpr = RECOMPUTE and LATER == NO_MASK
    SCALARS: tl.constexpr = scalar_tiles(UNALIGNED, CAUSAL, IS_SHIFTED, VECTORS, VEC)
    # a scalar tile is one element more for a thread. On a cluster it is reduced with its segment instead: Triton may
    # place the tile in other CTAs than the row's
    FOLDED: tl.constexpr = SCALARS > 0 and CTAS == 1 and not RECOMPUTED
    # z is never computed: exp(scale*(x - m)) takes one multiply-add and one exp2
    FUSED: tl.constexpr = LATER == NO_MASK and PTX and CTAS == 1 and BITS_OF_X == 16
    # exp(z - m) in such a way, of scores under a mask
    AFFINE: tl.constexpr = not FUSED and PTX and CTAS == 1 and BITS_OF_X == 16
    # the first chunks of rows without causality have no predicate, nor instructions that fill what it leaves out
    FULL: tl.constexpr = UNPREDICATED if CTAS == 1 and not CAUSAL else 0
    CHUNK: tl.constexpr = WARPS_PER_ROW * VECTORS * VEC
    # a causal row passes over the chunks that it does not see: an unseen chunk takes as many instructions as a full one
    SKIPS: tl.constexpr = CAUSAL and RECOMPUTED and ROWS * CTAS == 1 and CHUNKS > 1
    # causal rows of 16 bits that share a warp: all chunks are computed, then all are written. 288 columns and 18
    # queries run at 0.89 of a copy, at 0.85 where each chunk is written as it is computed
    SHARED_WARP: tl.constexpr = CAUSAL and MASK == NO_MASK and BITS_OF_X == 16 and ROWS > 1 and VECTORS < 32
    LATE: tl.constexpr = SHARED_WARP and not (RECOMPUTE or OUTPUT_GATHERED)
    # the loads of a shifted mask come before all arithmetic. One program: of an additive mask only, and float32 by 8
    # warps is slower so: 0.76 of a copy instead of 0.93 at 7,379 columns. A cluster: 36,537 bfloat16 columns, additive,
    # 800 queries, take 1.24 times as long without it
    AT_ONCE: tl.constexpr = CTAS > 1 or (MASK == ADDITIVE and (VEC == 8 or VECTORS <= 128))
    scale = tl.cast(scale, tl.float32)  # the interpreter makes a float64 of a subnormal number
    unit = scale if FUSED else 1.0

    # locate the row, this segment's part of its slice, the columns that the row sees, and its mask
    place, rank = segments_of(ROWS, CTAS, WARPS_PER_ROW)
    warp = warp_of(SEGMENTS, WARPS_PER_ROW)
    if MASK != NO_MASK and ROWS > 1:  # the last program may have its last row more than once: all write the same bits
        place = tl.minimum(place, n_rows - 1)
    if OUTPUT_GATHERED:
        place, query, first_row = rows_of_piece(ROWS, n_queries, span_multiplier, span_power)
    exists = place < n_rows if MASK == NO_MASK else rank >= 0
    if OUTPUT_GATHERED:
        row, span, batch = place, place, place
    else:
        row, span, batch, query = row_at(
            place, n_queries, n_span, span_multiplier, span_power, span_stride, n_block, block_multiplier, block_power,
            shared_stride, n_group, group_multiplier, group_power, n_last, last_multiplier, last_power,
            MASK_ROWS != OWN, CAUSAL,
        )  # fmt: skip
    head, interior = span_of(row, x_stride, phase, n_cols, VEC, UNALIGNED)
    x_row = x_ptr + start_of(row, x_stride, phase, VEC, UNALIGNED)
    y_row = y_ptr + start_of(row, y_stride, phase, VEC, UNALIGNED)
    if IS_SHIFTED:  # the last vector's columns are a tail, so that no vector of the mask reaches beyond its row
        interior = tl.maximum(interior - VEC, 0)
    first, width = slice_of(interior, rank, CTAS, VEC)
    first += warp * (VECTORS * VEC)
    width = width - warp * (VECTORS * VEC)
    width = (width_if(exists, width) if MASK == NO_MASK else width).to(tl.int32)
    # in whole vectors, and in this segment
    columns = (n_cols if UNALIGNED else n_cols * VEC).to(tl.int32)
    seen = seen_of(query, columns, CAUSAL)
    within = (tl.maximum(seen - head, 0) // VEC * VEC).to(tl.int32)
    left = tl.minimum(width, within - first).to(tl.int32)
    await_previous(EARLY)
    mask_row, at_mask, to_mask = mask_at(
        mask_ptr, row, span, batch, query, head, first, exists, n_middle, n_inner, m_outer, m_middle, m_inner, m_query,
        m_col, m_phase, MASK, MASK_COLS, MASK_ROWS, MASK_VEC, UNALIGNED, VEC,
    )  # fmt: skip

    x = load_chunks(x_row + first, left, SEGMENTS, SEEN, FULL, VECTORS, VEC, -float("inf"), WARPS_PER_ROW)
    mask = x
    if IS_SHIFTED and CTAS > 1:
        mask = load_shifted(at_mask, to_mask, left, TYPE, SEGMENTS, CHUNKS, WARPS_PER_ROW, VECTORS, VEC, PTX)
    elif MASK != NO_MASK:
        mask = load_masks(at_mask, left, m_col, COLS, BITS, SEGMENTS, CHUNKS, FULL, WARPS_PER_ROW, VECTORS, VEC)
    owner = (rank == 0) & (warp == 0) & exists
    scalars, in_scalars, x_scalars, masks = load_scalars(
        x_row, mask_row, at_mask, m_col, head, within, interior, columns, seen, owner, SCALARS, MASK, MASK_COLS,
        UNALIGNED, CAUSAL, VECTORS, VEC,
    )  # fmt: skip
    z_scalars = ()
    for t in tl.static_range(SCALARS):
        z_scalar = x_scalars[t].to(tl.float32)
        if PACKED:
            z_scalar = tl.where(masks[t] != 0, z_scalar, -float("inf"))
        z_scalars = z_scalars + (z_scalar if FUSED else hide(z_scalar, masks[t], scale, LATER, PTX),)
    if IS_SHIFTED and AT_ONCE and PTX:
        issue_loads()

    # each vector's own maximum and sum
    most = tl.max(tl.max(left, 1), 0) if SKIPS else 0
    if PACKED:
        kept = ()
        for c in tl.static_range(CHUNKS):
            after = load_next(at_mask, to_mask, left, c, COLS, BITS, SEGMENTS, FULL, WARPS_PER_ROW, VECTORS, VEC)
            kept = kept + (hidden(x[c], mask[c], after, to_mask, COLS, PTX),)
        x = kept
    if RECOMPUTED or FUSED:
        m, s, exps, correction = sums_of_logits(x, z_scalars, scale, most, RECOMPUTED, FUSED, FOLDED, SKIPS, CHUNK, PTX)
    else:
        m = tl.zeros([SEGMENTS, VECTORS], tl.float32) + LOWEST
        z = ()
        for c in tl.static_range(SEEN):
            after = load_next(at_mask, to_mask, left, c, COLS, BITS, SEGMENTS, FULL, WARPS_PER_ROW, VECTORS, VEC)
            tile = mask[c]
            if IS_SHIFTED and CTAS > 1:
                tile = shift_loaded(tile, at_mask, to_mask, left, c, TYPE, SEGMENTS, WARPS_PER_ROW, VECTORS, VEC, PTX)
            z = z + (scores(x[c], tile, after, to_mask, scale, LATER, COLS, TYPE, PTX),)
            m = tl.maximum(m, tl.max(z[c], 2))
        m, s, exps, correction = sums_of_scores(z, m, z_scalars, AFFINE, FOLDED)

    # the segment's, then the row's
    exp_scalars = ()
    if FOLDED:
        for t in tl.static_range(SCALARS):
            exp_scalars = exp_scalars + (exp((z_scalars[t] - m) * unit),)
            s += exp_scalars[t]
    segment_max = tl.max(m, 1)
    if not FOLDED:
        for t in tl.static_range(SCALARS):
            segment_max = tl.maximum(segment_max, tl.max(z_scalars[t], 1))
    segment_sum = tl.sum(rounded_product(s, exp((m - segment_max[:, None]) * unit)), 1)
    if not FOLDED:
        for t in tl.static_range(SCALARS):
            segment_sum += tl.sum(exp((z_scalars[t] - segment_max[:, None]) * unit), 1)
    row_max, row_sum = cluster_reduce_max_sum(segment_max, segment_sum, CTAS, PTX, WARPS_PER_ROW)
    row_max = row_max[:, None]
    by = reciprocal(row_sum[:, None], ZERO, RECOMPUTED)

    # the last formula, and the store
    y_at, after_first, held = y_row + first, within - first, ()
    if OUTPUT_GATHERED:
        in_piece = (start_of(row, y_stride, phase, VEC, UNALIGNED) - first_row * columns).to(tl.int32)
    if RECOMPUTED:
        base, shift, correction = exp2_affine(row_max, FUSED, scale)
        base, shift, correction = base[:, :, None], shift[:, :, None], (correction * by)[:, :, None]
    else:
        by_vector = exp((m - row_max) * unit) * by
        y_scalars = ()
        for t in tl.static_range(SCALARS if FOLDED else 0):
            y_scalars = y_scalars + (exp_scalars[t] * by_vector,)
        if FUSED or AFFINE:
            by_vector *= correction
    for c in tl.static_range(CHUNKS):
        if c >= SEEN:
            y = tl.zeros([SEGMENTS, VECTORS, VEC], tl.float32) * by[:, :, None]  # NaN where the row is
        elif not RECOMPUTED:
            y = exps[c] * by_vector[:, :, None]
        elif SKIPS:
            y = tl.zeros([SEGMENTS, VECTORS, VEC], tl.float32) * correction  # NaN where the row is
            if c * CHUNK < most:
                y = exp2_fma(upcast_logits(x[c], scale, FUSED, PTX), base, shift, FUSED) * correction
        else:
            y = exp2_fma(upcast_logits(x[c], scale, FUSED, PTX), base, shift, FUSED) * correction
        if OUTPUT_GATHERED and PTX:
            offsets = chunk_offsets(c, VECTORS, VEC, WARPS_PER_ROW)
            value = tl.reshape(y.to(y_ptr.dtype.element_ty), (SEGMENTS, VECTORS * VEC))
            put_vectors(value, in_piece + offsets, apart_from(offsets, width, after_first, VEC), VEC)
        elif LATE:
            held = held + (y.to(y_ptr.dtype.element_ty),)
        else:
            store_around(y_at, width, after_first, y, c, CAUSAL, SEGMENTS, FULL, WARPS_PER_ROW, VECTORS, VEC)
    for t in tl.static_range(SCALARS):
        y_scalar = y_scalars[t] if FOLDED else exp((z_scalars[t] - row_max) * unit) * by
        y_scalar = y_scalar.to(y_ptr.dtype.element_ty)
        if OUTPUT_GATHERED and PTX:
            put_elements(y_scalar, in_piece + scalars[t], in_scalars[t])
        else:
            tl.store(y_row + scalars[t], y_scalar, mask=in_scalars[t])
    if OUTPUT_GATHERED:
        n = tl.minimum(n_rows - first_row, ROWS).to(tl.int32) * columns
        scatter(y_ptr + phase, first_row * columns, n, MOST, 0, THREADS, BULK, PTX)
    for c in tl.static_range(len(held)):
        store_around(y_at, width, after_first, held[c], c, CAUSAL, SEGMENTS, FULL, WARPS_PER_ROW, VECTORS, VEC)
    leave_cluster(CTAS, PTX)
