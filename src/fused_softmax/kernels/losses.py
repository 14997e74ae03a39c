"""Rows of logits to a few numbers each: logsumexp, entropy, picked log-probabilities, cross-entropy.

    z = softcap(x)*scale;  lse = log(sum(exp(z)));  H = lse - sum(p*z);  logprob_k = z[id_k] - lse
    loss = (1 - eps)*w_t*(lse - z_t) + eps/C*sum(w*(lse - z)) + z_loss*lse^2

The logits are read once, in steps that keep nothing, by one program a row or the CTAS programs of a cluster. Nothing of
the logits' size is allocated. A row with NaN gives NaN, one of nothing but -inf has lse -inf, one with +inf has lse +inf
(as torch.logsumexp); its log-probabilities and losses are then NaN, as torch.log_softmax makes them. Ids are followed
only where they lie in [0, n_cols).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .cluster import merge_moments_over_cluster, merge_over_cluster, open_exchange
from .primitives import HIGHEST, LOG2E, LOWEST, exp, log, shift_moments
from .slices import chunk_offsets, edge_of, lines_of, load_chunks, slice_of, span_of, start_of

# what a walk sums up beside (max, sum): nothing, sum(exp(z - m)*(z - m)), or sum(w*z)
NO_MOMENT = tl.constexpr(0)
ENTROPY_MOMENT = tl.constexpr(1)
WEIGHTED_SUM = tl.constexpr(2)


@triton.jit
def tanh(x):
    """tanh(x) = 1 - 2/(exp(2x) + 1), right at both ends."""
    return 1.0 - 2.0 / (tl.exp2(2.0 * LOG2E * x) + 1.0)


@triton.jit
def logit(x, scale, cap, SOFTCAP: tl.constexpr):
    """What the softmax sees of a raw logit, in float32: cap*tanh(x/cap) where there is a cap, times scale.

    -inf stays -inf under a cap: a masked class is not a small one.
    """
    x = x.to(tl.float32)
    if SOFTCAP:
        x = tl.where(x == -float("inf"), x, cap * tanh(x / cap))
    return x * scale


@triton.jit
def accumulate_moments(z, weighted, m, s, t, MOMENT: tl.constexpr):
    """Each lane's (m, s, t) with one tile more in it.  # z: [LINES, LANES, VEC]; m, s, t: [LINES, LANES]"""
    m_new = tl.minimum(tl.maximum(m, tl.max(z, 2)), HIGHEST)
    d = z - m_new[:, :, None]
    e = exp(d)
    if MOMENT == ENTROPY_MOMENT:
        m, s, t = shift_moments(m, s, t, m_new)
        t += tl.sum(e * tl.maximum(d, LOWEST), 2)
    else:
        s = s * exp(m - m_new)
        if MOMENT == WEIGHTED_SUM:
            t += tl.sum(weighted, 2)
    return m_new, s + tl.sum(e, 2), t


@triton.jit
def weigh(z, at, mask, w_ptr, WEIGHTED: tl.constexpr):
    """w*z of a tile, 0 where `mask` is not."""
    if WEIGHTED:
        w = tl.load(w_ptr + at, mask=mask, other=0.0)
        return tl.where(mask, w * z, 0.0)
    else:
        return tl.where(mask, z, 0.0)


@triton.jit
def walk(
    x_row,
    first,
    width,
    head,
    interior,
    n_cols,  # elements
    exists,
    rank,
    scale,
    cap,
    w_ptr,
    MOMENT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    CTAS: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    CHUNKS: tl.constexpr,
    EDGE: tl.constexpr,
    PTX: tl.constexpr,
):
    """The row's (max, sum, moment), after the one read.  # x_row .. scale: [LINES, 1]; result [LINES]"""
    LINES: tl.constexpr = ROWS * CTAS
    STEP: tl.constexpr = CHUNKS * LANES * VEC
    m = tl.zeros([LINES, LANES], tl.float32) + LOWEST
    s = tl.zeros([LINES, LANES], tl.float32)
    t = tl.zeros([LINES, LANES], tl.float32)
    scale_3d = scale[:, :, None]
    zero = tl.zeros([1, 1], tl.int64)
    # whole steps, which every slice has, need no mask; the last slice is the shortest
    units = n_cols // VEC
    even = tl.cdiv(units, CTAS)
    shortest = tl.maximum(units - (1 if EDGE else 0) - (CTAS - 1) * even, 0)
    whole = shortest * VEC // STEP
    if ROWS > 1:
        whole = whole * 0
    if MOMENT == WEIGHTED_SUM:
        whole = whole * 0
    for step in range(whole):
        x = load_chunks(x_row + first + (zero + step) * STEP, width, LINES, CHUNKS, CHUNKS, LANES, VEC, 0.0)
        for c in tl.static_range(CHUNKS):
            z = logit(x[c], scale_3d, cap, SOFTCAP)
            m, s, t = accumulate_moments(z, z, m, s, t, MOMENT)
    for step in range(whole, tl.cdiv(even * VEC, STEP)):
        start = (zero + step) * STEP
        x = load_chunks(x_row + first + start, width - start, LINES, CHUNKS, 0, LANES, VEC, -float("inf"))
        for c in tl.static_range(CHUNKS):
            z = logit(x[c], scale_3d, cap, SOFTCAP)
            weighted = z
            if MOMENT == WEIGHTED_SUM:
                at = tl.reshape(start + chunk_offsets(c, LANES, VEC) + 0 * rank, (LINES, LANES, VEC))
                mask = at < width[:, :, None]
                weighted = weigh(z, at + (head + first)[:, :, None], mask, w_ptr, WEIGHTED)
            m, s, t = accumulate_moments(z, weighted, m, s, t, MOMENT)
    if EDGE:
        edge, in_edge = edge_of(head, interior, n_cols, (rank == 0) & exists, LANES, VEC)
        z = logit(tl.load(x_row + edge, mask=in_edge, other=-float("inf")), scale, cap, SOFTCAP)
        weighted = z
        if MOMENT == WEIGHTED_SUM:
            weighted = weigh(z, edge + head, in_edge, w_ptr, WEIGHTED)
        m, s, t = accumulate_moments(z[:, :, None], weighted[:, :, None], m, s, t, MOMENT)

    line_max = tl.max(m, 1)
    if MOMENT == ENTROPY_MOMENT:
        m, s, t = shift_moments(m, s, t, line_max[:, None])
    else:
        s = s * exp(m - line_max[:, None])
    if MOMENT == NO_MOMENT:
        row_max, row_sum = merge_over_cluster(line_max, tl.sum(s, 1), CTAS, PTX)
        return row_max, row_sum, row_sum
    else:
        return merge_moments_over_cluster(
            line_max, tl.sum(s, 1), tl.sum(t, 1), MOMENT == WEIGHTED_SUM, CTAS, PTX
        )


@triton.jit
def logsumexp(row_max, row_sum):
    """row_max + log(row_sum), and -inf where nothing was summed."""
    return tl.where(row_sum == 0.0, -float("inf"), row_max + log(row_sum))


@triton.jit(do_not_specialize=["n_rows", "n_cols", "x_stride", "phase", "n_picks", "scale"])
def row_statistics(
    x_ptr,  # aligned to VEC elements
    lse_ptr,  # [n_rows] float32
    entropy_ptr,  # [n_rows] float32, where ENTROPY
    ids_ptr,  # [n_rows, n_picks] int64, where PICKS
    picked_ptr,  # [n_rows, n_picks] float32, where PICKS: log-probabilities
    scale_ptr,  # [n_rows] float32, where ROW_SCALE
    n_rows,
    n_cols,  # n_cols and x_stride: in units of VEC, or of one element where EDGE
    x_stride,
    phase,
    n_picks,
    scale,
    PICKS: tl.constexpr,  # a power of two >= n_picks, or 0
    ENTROPY: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    CTAS: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    CHUNKS: tl.constexpr,
    EDGE: tl.constexpr,
    PTX: tl.constexpr,
):
    open_exchange(CTAS, 4 if ENTROPY else 2, PTX)
    row, rank = lines_of(ROWS, CTAS)
    exists = row < n_rows
    head, interior = span_of(row, x_stride, phase, n_cols, VEC, EDGE)
    x_row = x_ptr + start_of(row, x_stride, phase, VEC, EDGE)
    first, width = slice_of(interior, rank, CTAS, VEC)
    if ROWS > 1:
        width = tl.where(exists, width, 0)
    if ROW_SCALE:
        by = tl.load(scale_ptr + row, mask=exists, other=1.0)
    else:
        by = scale + 0.0 * row.to(tl.float32)
    columns = n_cols if EDGE else n_cols * VEC
    MOMENT: tl.constexpr = ENTROPY_MOMENT if ENTROPY else NO_MOMENT
    row_max, row_sum, row_moment = walk(
        x_row, first, width, head, interior, columns, exists, rank, by, 1.0, x_ptr,
        MOMENT, False, False, ROWS, CTAS, LANES, VEC, CHUNKS, EDGE, PTX,
    )  # fmt: skip

    lse = logsumexp(row_max, row_sum)[:, None]
    writes = (rank == 0) & exists
    tl.store(lse_ptr + row, lse, mask=writes)
    if ENTROPY:
        tl.store(entropy_ptr + row, (log(row_sum) - row_moment / row_sum)[:, None], mask=writes)
    if PICKS > 0:
        k = tl.arange(0, PICKS)[None, :] + 0 * rank
        wanted = writes & (k < n_picks)
        at = tl.load(ids_ptr + row * n_picks + k, mask=wanted, other=-1)
        inside = wanted & (at >= 0) & (at < columns)
        z = logit(tl.load(x_row - head + at, mask=inside, other=0.0), by, 1.0, False)
        picked = tl.where(inside & (lse < float("inf")), z - lse, float("nan"))
        tl.store(picked_ptr + row * n_picks + k, picked, mask=wanted)


@triton.jit
def target_of(row, n_rows, target_ptr, ignore_index, n_classes):
    """(target, whether the row counts); a target outside the classes is a device assertion, as torch's is."""
    target = tl.load(target_ptr + row, mask=row < n_rows, other=ignore_index)
    counts = target != ignore_index
    inside = (target >= 0) & (target < n_classes)
    tl.device_assert((counts & ~inside) == 0, "fused_softmax.cross_entropy: target out of bounds")
    return target, counts & inside


@triton.jit
def row_loss(lse, z_target, w_target, w_sum, wz_sum, smoothing, n_classes, z_loss, SMOOTH: tl.constexpr):
    """The formula at the top of this file, for one row."""
    loss = w_target * (lse - z_target)
    if SMOOTH:
        loss = (1.0 - smoothing) * loss + smoothing / n_classes * (w_sum * lse - wz_sum)
    # a factor of 0 must not make NaN of an infinite lse
    return loss + tl.where(z_loss != 0.0, z_loss * lse * lse, 0.0)


@triton.jit(do_not_specialize=["n_rows", "n_cols", "x_stride", "phase", "ignore_index", "smoothing", "cap", "z_loss"])
def cross_entropy_forward(
    x_ptr,  # aligned to VEC elements
    target_ptr,  # [n_rows] int64
    weight_ptr,  # [n_cols] float32, where WEIGHTED
    weight_sum_ptr,  # [1] float32, where WEIGHTED
    loss_ptr,  # [n_rows] float32
    lse_ptr,  # [n_rows] float32
    n_rows,
    n_cols,  # n_cols and x_stride: in units of VEC, or of one element where EDGE
    x_stride,
    phase,
    ignore_index,
    smoothing,
    cap,
    z_loss,
    WEIGHTED: tl.constexpr,
    SMOOTH: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    CTAS: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    CHUNKS: tl.constexpr,
    EDGE: tl.constexpr,
    PTX: tl.constexpr,
):
    open_exchange(CTAS, 4 if SMOOTH else 2, PTX)
    row, rank = lines_of(ROWS, CTAS)
    exists = row < n_rows
    head, interior = span_of(row, x_stride, phase, n_cols, VEC, EDGE)
    x_row = x_ptr + start_of(row, x_stride, phase, VEC, EDGE)
    first, width = slice_of(interior, rank, CTAS, VEC)
    if ROWS > 1:
        width = tl.where(exists, width, 0)
    columns = n_cols if EDGE else n_cols * VEC
    target, counts = target_of(row, n_rows, target_ptr, ignore_index, columns)
    MOMENT: tl.constexpr = WEIGHTED_SUM if SMOOTH else NO_MOMENT
    one = 1.0 + 0.0 * row.to(tl.float32)
    row_max, row_sum, wz_sum = walk(
        x_row, first, width, head, interior, columns, exists, rank, one, cap, weight_ptr,
        MOMENT, WEIGHTED, SOFTCAP, ROWS, CTAS, LANES, VEC, CHUNKS, EDGE, PTX,
    )  # fmt: skip
    lse = logsumexp(row_max, row_sum)[:, None]
    lse = tl.where(lse == float("inf"), float("nan"), lse)
    z = logit(tl.load(x_row - head + target, mask=counts, other=0.0), one, cap, SOFTCAP)
    if WEIGHTED:
        w_target = tl.load(weight_ptr + target, mask=counts, other=0.0)
        w_sum = tl.load(weight_sum_ptr)
    else:
        w_target = 1.0
        w_sum = columns
    loss = row_loss(lse, z, w_target, w_sum, wz_sum[:, None], smoothing, columns, z_loss, SMOOTH)
    writes = (rank == 0) & exists
    tl.store(loss_ptr + row, tl.where(counts, loss, 0.0), mask=writes)
    tl.store(lse_ptr + row, lse, mask=writes)


@triton.jit(do_not_specialize=["n_rows", "ignore_index"])
def count_targets(target_ptr, weight_ptr, count_ptr, n_rows, ignore_index, n_classes, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """The mean's denominator: how many targets count, or the sum of their weights. One program."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        target = tl.load(target_ptr + row, mask=row < n_rows, other=ignore_index)
        counts = (target != ignore_index) & (target >= 0) & (target < n_classes)
        if WEIGHTED:
            total += tl.load(weight_ptr + target, mask=counts, other=0.0)
        else:
            total += counts.to(tl.float32)
    tl.store(count_ptr, tl.sum(total, 0))


@triton.jit(do_not_specialize=["n_rows", "ignore_index"])
def reduce_losses(
    loss_ptr, target_ptr, weight_ptr, out_ptr, n_rows, ignore_index, n_classes,
    MEAN: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """sum(loss), divided where MEAN by what `count_targets` counts: NaN where nothing does. One program, one order."""
    total = tl.zeros([BLOCK], tl.float32)
    weight = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        total += tl.load(loss_ptr + row, mask=row < n_rows, other=0.0)
        if MEAN:
            target = tl.load(target_ptr + row, mask=row < n_rows, other=ignore_index)
            counts = (target != ignore_index) & (target >= 0) & (target < n_classes)
            if WEIGHTED:
                weight += tl.load(weight_ptr + target, mask=counts, other=0.0)
            else:
                weight += counts.to(tl.float32)
    out = tl.sum(total, 0)
    if MEAN:
        out = out / tl.sum(weight, 0)
    tl.store(out_ptr, out)
