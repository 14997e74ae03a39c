"""Softmax of scaled rows under a mask, with the row on chip or in two passes.

    z = scale*x + mask  or  z = scale*x where mask, else -inf;  y = exp(z - max(z)) / sum(exp(z - max(z)))

Causal rows need no mask: query q sees columns 0..q, so its row has q + 1 columns. They are read in vectors, except its
head and tail; the other columns are not read, and zeros are written there. A mask is read once, in place, with its own
strides (0 where it is broadcast). `row_scheduler` has the order of the rows. A row without a visible column has sum 0
and is NaN, or zero where ZERO. The limit is the bytes of the visible x and mask, and of y.
"""

from __future__ import annotations

import triton.language as tl

from .common.arguments import Float32, Int32, Int64, Rows, Vector, kernel
from .common.cluster import cluster_reduce_max_sum, init_cluster_barrier, leave_cluster
from .common.masked_rows import accumulate, reciprocal, scalar_tile, scalar_tiles, scores, store_around, upcast_logits
from .common.masks import (
    ADDITIVE,
    BOOLEAN,
    NEIGHBORS,
    NO_MASK,
    OWN,
    SHARED,
    SHIFTED,
    hidden,
    hide,
    load_masks,
    load_next,
    load_query_mask,
    load_shifted,
    mask_row_of,
    shift_loaded,
    shifted_start,
)
from .common.numerics import LOWEST, SCORES_OF_32_BITS, exp, exp2_affine, exp2_fma, rounded_product, scaled
from .common.row_scheduler import row_in_order, row_of_shared_mask, seen_of
from .common.tiles import (
    aligned_start,
    issue_loads,
    load_chunks,
    log2,
    segments_of,
    slice_of,
    warp_of,
    width_if,
)


@kernel(on_cluster=True)
def masked_softmax_forward(
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
    m_col: Int64,  # where MASK_COLS is 2: elements
    m_phase: Int32,  # elements from mask_ptr, which is aligned where MASK_COLS is 3, to the mask
    scale: Float32,  # positive
    MASK: tl.constexpr,
    MASK_COLS: tl.constexpr,  # how the mask's columns lie: `common.masks` names the numbers
    MASK_ROWS: tl.constexpr,  # how the mask's rows lie
    MASK_VEC: tl.constexpr, CAUSAL: tl.constexpr, ZERO: tl.constexpr,
    TWO_PASS: tl.constexpr,  # the row does not fit on chip: CHUNKS are those of a step
    RECOMPUTE: tl.constexpr,  # without a mask: hold the row as loaded and compute exp twice
    ROWS: tl.constexpr, CTAS: tl.constexpr, WARPS_PER_ROW: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr,
    CHUNKS: tl.constexpr, UNPREDICATED: tl.constexpr, UNALIGNED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    init_cluster_barrier(CTAS, 2, PTX, WARPS_PER_ROW)
    SEGMENTS: tl.constexpr = ROWS * CTAS * WARPS_PER_ROW
    STEP: tl.constexpr = CHUNKS * WARPS_PER_ROW * VECTORS * VEC
    TYPE: tl.constexpr = mask_ptr.dtype.element_ty
    BITS: tl.constexpr = TYPE.primitive_bitwidth
    IS_SHIFTED: tl.constexpr = MASK != NO_MASK and MASK_COLS == SHIFTED
    COLS: tl.constexpr = NEIGHBORS if IS_SHIFTED and CTAS > 1 else MASK_COLS  # of chunks as loaded
    BITS_OF_X: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth
    # a boolean mask is applied to logits of 16 bits as they were loaded, and no other mask is left. On a cluster that
    # is slower: 0.86 of a copy instead of 0.94 at 20,001 columns
    PACKED: tl.constexpr = MASK == BOOLEAN and BITS_OF_X == 16 and CTAS == 1 and not TWO_PASS
    LATER: tl.constexpr = NO_MASK if PACKED else MASK
    REMATERIALIZE: tl.constexpr = RECOMPUTE and LATER == NO_MASK
    SCALARS: tl.constexpr = scalar_tiles(UNALIGNED, CAUSAL, IS_SHIFTED, VECTORS, VEC)
    # a scalar tile is one element more for a thread. On a cluster it is reduced with its segment instead: Triton may
    # place the tile in other CTAs than the row's
    FOLDED: tl.constexpr = SCALARS > 0 and CTAS == 1 and not TWO_PASS and not REMATERIALIZE
    # z is never computed: exp(scale*(x - m)) takes one multiply-add and one exp2
    FUSED: tl.constexpr = LATER == NO_MASK and not TWO_PASS and PTX and CTAS == 1 and BITS_OF_X == 16
    # the first chunks of rows without causality have no predicate, nor instructions that fill what it leaves out
    FULL: tl.constexpr = UNPREDICATED if CTAS == 1 and not CAUSAL and not TWO_PASS else 0
    # exp(z - m) in such a way, of scores under a mask
    AFFINE: tl.constexpr = not FUSED and PTX and CTAS == 1 and BITS_OF_X == 16
    CHUNK: tl.constexpr = WARPS_PER_ROW * VECTORS * VEC
    # a causal row passes over the chunks that it does not see: an unseen chunk takes as many instructions as a full one
    SKIPS: tl.constexpr = CAUSAL and REMATERIALIZE and ROWS * CTAS == 1 and CHUNKS > 1
    # causal rows of 16 bits that share a warp: all chunks are computed, then all are written. 288 columns and 18
    # queries run at 0.89 of a copy, at 0.85 where each chunk is written as it is computed
    LATE: tl.constexpr = CAUSAL and MASK == NO_MASK and BITS_OF_X == 16 and ROWS > 1 and VECTORS < 32 and not RECOMPUTE
    scale = tl.cast(scale, tl.float32)  # the interpreter makes a float64 of a subnormal number
    unit = scale if FUSED else 1.0
    place, rank = segments_of(ROWS, CTAS, WARPS_PER_ROW)
    warp = warp_of(SEGMENTS, WARPS_PER_ROW)
    if MASK != NO_MASK and ROWS > 1:  # the last program may have its last row more than once: all write the same bits
        place = tl.minimum(place, n_rows - 1)
    exists = place < n_rows if MASK == NO_MASK else rank >= 0
    span = place
    if MASK_ROWS != OWN:
        row, span, batch, query = row_of_shared_mask(
            place, n_queries, n_span, span_multiplier, span_power, span_stride, n_block, block_multiplier, block_power,
            shared_stride, n_group, group_multiplier, group_power, n_last, last_multiplier, last_power, CAUSAL,
        )  # fmt: skip
    elif CAUSAL:
        row, batch, query = row_in_order(place, n_queries, span_multiplier, span_power, CAUSAL)
    else:
        row, batch, query = place, place, place
    if UNALIGNED:
        x_start, head = aligned_start(row, x_stride, phase, VEC)
        y_start, _ = aligned_start(row, y_stride, phase, VEC)
        head = tl.minimum(head, n_cols)
        interior = (n_cols - head >> log2(VEC)) * VEC
    else:
        x_start, y_start = row * x_stride * VEC, row * y_stride * VEC
        head, interior = 0, n_cols * VEC
    x_row, y_row = x_ptr + x_start, y_ptr + y_start
    if IS_SHIFTED:  # the last vector's columns are a tail, so that no vector of the mask reaches beyond its row
        interior = tl.maximum(interior - VEC, 0)
    first, width = slice_of(interior, rank, CTAS, VEC)
    first += warp * (VECTORS * VEC)
    width = width - warp * (VECTORS * VEC)
    width = (width_if(exists, width) if MASK == NO_MASK else width).to(tl.int32)
    # the columns that the row sees: in whole vectors, and in this segment
    columns = (n_cols if UNALIGNED else n_cols * VEC).to(tl.int32)
    seen = seen_of(query, columns, CAUSAL)
    within = (tl.maximum(seen - head, 0) // VEC * VEC).to(tl.int32)
    left = tl.minimum(width, within - first).to(tl.int32)
    if MASK_ROWS == OWN:
        mask_row = row * m_query * MASK_VEC
    elif MASK_ROWS == SHARED:
        mask_row = (span * m_outer + query * m_query) * MASK_VEC
    else:
        mask_row = mask_row_of(batch, query, n_middle, n_inner, m_outer, m_middle, m_inner, m_query, MASK_VEC)
    COL: tl.constexpr = 1 if IS_SHIFTED else MASK_COLS
    if IS_SHIFTED:
        mask_row += m_phase + head
        at_mask, to_mask = shifted_start(mask_ptr, mask_row, first, VEC)
        mask_row = mask_ptr + mask_row
    elif MASK != NO_MASK and MASK_COLS == 0:
        query_mask = load_query_mask(mask_ptr + mask_row, exists)
        at_mask, to_mask = query_mask, 0
    else:
        mask_row = mask_ptr + mask_row
        mask_row += (head * m_col if COL == 2 else head * COL).to(tl.int64) if UNALIGNED else 0
        at_mask, to_mask = mask_row + (first.to(tl.int64) * m_col if COL == 2 else first * COL), 0

    m = tl.zeros([SEGMENTS, VECTORS], tl.float32) + LOWEST
    s = tl.zeros([SEGMENTS, VECTORS], tl.float32)
    zero = tl.zeros([1, 1], tl.int64)
    exps, held = (), ()
    if not TWO_PASS:
        x = load_chunks(x_row + first, left, SEGMENTS, CHUNKS, FULL, VECTORS, VEC, -float("inf"), WARPS_PER_ROW)
        mask = x
        if IS_SHIFTED and CTAS > 1:
            mask = load_shifted(at_mask, to_mask, left, TYPE, SEGMENTS, CHUNKS, WARPS_PER_ROW, VECTORS, VEC, PTX)
        elif MASK != NO_MASK:
            mask = load_masks(at_mask, left, m_col, COLS, BITS, SEGMENTS, CHUNKS, FULL, WARPS_PER_ROW, VECTORS, VEC)
    scalars, in_scalars, z_scalars = (), (), ()
    for t in tl.static_range(SCALARS):
        scalar, in_scalar = scalar_tile(
            t, head, within, interior, columns, (rank == 0) & (warp == 0) & exists, UNALIGNED, CAUSAL, IS_SHIFTED,
            VECTORS, VEC,
        )  # fmt: skip
        visible = in_scalar & (scalar < seen - head)
        z_scalar = tl.load(x_row + scalar, mask=visible, other=-float("inf"))
        if MASK == NO_MASK:
            mask_scalar = z_scalar
        elif MASK_COLS == 0:
            mask_scalar = query_mask
        else:
            mask_scalar = tl.load(mask_row + scalar * (m_col if COL == 2 else COL), mask=visible, other=0)
        z_scalar = z_scalar.to(tl.float32)
        if PACKED:
            z_scalar = tl.where(mask_scalar != 0, z_scalar, -float("inf"))
        if not FUSED:
            z_scalar = hide(z_scalar, mask_scalar, scale, LATER, PTX)
        scalars, in_scalars, z_scalars = scalars + (scalar,), in_scalars + (in_scalar,), z_scalars + (z_scalar,)
    # one program: an additive mask only, and float32 by 8 warps is slower so: 0.76 of a copy instead of 0.93 at 7,379
    # columns. A cluster: 36,537 bfloat16 columns, additive, 800 queries, take 1.24 times as long without it
    AT_ONCE: tl.constexpr = CTAS > 1 or (MASK == ADDITIVE and (VEC == 8 or VECTORS <= 128))
    if IS_SHIFTED and AT_ONCE and not TWO_PASS and PTX:
        issue_loads()
    if TWO_PASS:
        most = tl.max(tl.max(left, 1), 0)  # of a CTA's segments, the first has the most columns
        for step in range(tl.cdiv(tl.maximum(most, 0), STEP)):
            start = (zero + step) * STEP
            x = load_chunks(
                x_row + first + start, left - start, SEGMENTS, CHUNKS, 0, VECTORS, VEC, -float("inf"), WARPS_PER_ROW
            )
            mask, at = x, at_mask
            if MASK != NO_MASK:
                at = at_mask if MASK_COLS == 0 else at_mask + start * (m_col if MASK_COLS == 2 else 1)
                if IS_SHIFTED:
                    at = at_mask + start // VEC * (VEC * BITS // 32)
                mask = load_masks(at, left - start, m_col, COLS, BITS, SEGMENTS, CHUNKS, 0, WARPS_PER_ROW, VECTORS, VEC)
            for c in tl.static_range(CHUNKS):
                after = load_next(at, to_mask, left - start, c, COLS, BITS, SEGMENTS, 0, WARPS_PER_ROW, VECTORS, VEC)
                m, s = accumulate(scores(x[c], mask[c], after, to_mask, scale, MASK, COLS, TYPE, PTX), m, s)
    else:
        if PACKED:
            kept = ()
            for c in tl.static_range(CHUNKS):
                after = load_next(at_mask, to_mask, left, c, COLS, BITS, SEGMENTS, FULL, WARPS_PER_ROW, VECTORS, VEC)
                kept = kept + (hidden(x[c], mask[c], after, to_mask, COLS, PTX),)
            x = kept
        most = tl.max(tl.max(left, 1), 0) if SKIPS else 0
        if REMATERIALIZE or FUSED:
            # scale is positive, so the largest x has the largest z. Where FUSED, m is in units of x
            top = tl.max(x[0], 2)
            for c in tl.static_range(1, CHUNKS):
                if SKIPS:
                    if c * CHUNK < most:
                        top = tl.maximum(top, tl.max(x[c], 2))
                else:
                    top = tl.maximum(top, tl.max(x[c], 2))
            top = tl.maximum(top.to(tl.float32), LOWEST)
            if FOLDED:
                for t in tl.static_range(SCALARS):
                    top = tl.maximum(top, z_scalars[t])
            m = top if FUSED else tl.maximum(scaled(top, scale, PTX), LOWEST)
            # with the shape of a chunk: Triton 3.6 fails where it must move the correction of [SEGMENTS, VECTORS]
            base, shift, correction = exp2_affine(m[:, :, None], FUSED, scale)
            correction = tl.reshape(correction, m.shape)
            for c in tl.static_range(CHUNKS):
                if SKIPS:
                    if c * CHUNK < most:
                        s += tl.sum(exp2_fma(upcast_logits(x[c], scale, FUSED, PTX), base, shift, FUSED), 2)
                else:
                    e = exp2_fma(upcast_logits(x[c], scale, FUSED, PTX), base, shift, FUSED)
                    s += tl.sum(e, 2)
                    exps = exps if REMATERIALIZE else exps + (e,)
            s *= correction
        else:
            z = ()
            for c in tl.static_range(CHUNKS):
                after = load_next(at_mask, to_mask, left, c, COLS, BITS, SEGMENTS, FULL, WARPS_PER_ROW, VECTORS, VEC)
                tile = mask[c]
                if IS_SHIFTED and CTAS > 1:
                    tile = shift_loaded(
                        tile, at_mask, to_mask, left, c, TYPE, SEGMENTS, WARPS_PER_ROW, VECTORS, VEC, PTX
                    )
                z = z + (scores(x[c], tile, after, to_mask, scale, LATER, COLS, TYPE, PTX),)
                m = tl.maximum(m, tl.max(z[c], 2))
            if FOLDED:
                for t in tl.static_range(SCALARS):
                    m = tl.maximum(m, z_scalars[t])
            base, shift, correction = exp2_affine(m[:, :, None], AFFINE, None, SCORES_OF_32_BITS)
            correction = tl.reshape(correction, m.shape)
            for c in tl.static_range(CHUNKS):
                exps = exps + (exp2_fma(z[c], base, shift, AFFINE),)
                s += tl.sum(exps[c], 2)
            if AFFINE:
                s *= correction
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
    by = reciprocal(row_sum[:, None], ZERO, REMATERIALIZE)

    if TWO_PASS:
        widest = tl.max(tl.max(width, 1), 0)
        n_steps = tl.cdiv(widest, STEP)
        for step in range(n_steps):
            start = (zero + n_steps - 1 - step) * STEP
            x = load_chunks(
                x_row + first + start, left - start, SEGMENTS, CHUNKS, 0, VECTORS, VEC, -float("inf"), WARPS_PER_ROW
            )
            mask, at = x, at_mask
            if MASK != NO_MASK:
                at = at_mask if MASK_COLS == 0 else at_mask + start * (m_col if MASK_COLS == 2 else 1)
                if IS_SHIFTED:
                    at = at_mask + start // VEC * (VEC * BITS // 32)
                mask = load_masks(at, left - start, m_col, COLS, BITS, SEGMENTS, CHUNKS, 0, WARPS_PER_ROW, VECTORS, VEC)
            for c in tl.static_range(CHUNKS):
                after = load_next(at, to_mask, left - start, c, COLS, BITS, SEGMENTS, 0, WARPS_PER_ROW, VECTORS, VEC)
                z = scores(x[c], mask[c], after, to_mask, scale, MASK, COLS, TYPE, PTX)
                y = exp(z - row_max[:, :, None]) * by[:, :, None]
                y_at = y_row + first + start
                store_around(
                    y_at, width - start, within - first - start, y, c, CAUSAL, SEGMENTS, 0, WARPS_PER_ROW, VECTORS, VEC
                )
    elif REMATERIALIZE:
        base, shift, correction = exp2_affine(row_max, FUSED, scale)
        base, shift, correction = base[:, :, None], shift[:, :, None], (correction * by)[:, :, None]
        for c in tl.static_range(CHUNKS):
            if SKIPS:
                y = tl.zeros([SEGMENTS, VECTORS, VEC], tl.float32) * correction  # NaN where the row is
                if c * CHUNK < most:
                    z = upcast_logits(x[c], scale, FUSED, PTX)
                    y = exp2_fma(z, base, shift, FUSED) * correction
            else:
                z = upcast_logits(x[c], scale, FUSED, PTX)
                y = exp2_fma(z, base, shift, FUSED) * correction
            store_around(
                y_row + first, width, within - first, y, c, CAUSAL, SEGMENTS, FULL, WARPS_PER_ROW, VECTORS, VEC
            )
    else:
        by_vector = exp((m - row_max) * unit) * by
        y_scalars = ()
        for t in tl.static_range(SCALARS if FOLDED else 0):
            y_scalars = y_scalars + (exp_scalars[t] * by_vector,)
        if FUSED or AFFINE:
            by_vector *= correction
        for c in tl.static_range(CHUNKS):
            y = exps[c] * by_vector[:, :, None]
            if LATE:
                held = held + (y.to(y_ptr.dtype.element_ty),)
            else:
                store_around(
                    y_row + first, width, within - first, y, c, CAUSAL, SEGMENTS, FULL, WARPS_PER_ROW, VECTORS, VEC
                )
    for t in tl.static_range(SCALARS):
        y_scalar = y_scalars[t] if FOLDED else exp((z_scalars[t] - row_max) * unit) * by
        tl.store(y_row + scalars[t], y_scalar.to(y_ptr.dtype.element_ty), mask=in_scalars[t])
    for c in tl.static_range(len(held)):
        store_around(
            y_row + first, width, within - first, held[c], c, CAUSAL, SEGMENTS, FULL, WARPS_PER_ROW, VECTORS, VEC
        )
    leave_cluster(CTAS, PTX)
