"""The gradients of what `losses` computes: for cross-entropy in the pass that reads the logits, else in one of their own.

    p = exp(z - lse);  dz = p*A - [j = t]*B - C*w_j;  dx = g * dz * (1 - (z/cap)^2)
    A = (1 - eps)*w_t + eps/C*sum(w) + 2*z_loss*lse;  B = (1 - eps)*w_t;  C = eps/C

`cross_entropy_resident` holds the row on chip as softmax does (its regimes, its plan) and writes the gradient where
softmax would write y: one read, one write. The others know lse already, so that no part of a row needs another: any number
of programs share it. What limits all of them is the copy: as many bytes written as read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .cluster import merge_moments_over_cluster, merge_over_cluster, open_exchange
from .losses import logit, logsumexp, row_loss, target_of, weigh
from .primitives import LOWEST, exp, opaque
from .slices import chunk_offsets, edge_of, lines_of, load_chunks, slice_of, span_of, start_of, store_chunk


@triton.jit
def cross_entropy_term(x, at, target, lse, a, b, c, w_ptr, cap, mask, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr):
    """dx of a tile whose columns are `at`, for an upstream gradient that is already in a, b and c."""
    z = logit(x, 1.0, cap, SOFTCAP)
    dz = exp(z - lse) * a - tl.where(at == target, b, 0.0)
    if SMOOTH:
        if WEIGHTED:
            dz -= c * tl.load(w_ptr + at, mask=mask, other=0.0)
        else:
            dz -= c
    if SOFTCAP:
        dz *= 1.0 - (z / cap) * (z / cap)
        dz = tl.where(x.to(tl.float32) == -float("inf"), 0.0, dz)
    return dz


@triton.jit
def coefficients(g, lse, w_target, w_sum, smoothing, n_classes, z_loss, SMOOTH: tl.constexpr):
    """(A, B, C) of the formula at the top, times the upstream gradient."""
    b = w_target * g
    a = b
    c = 0.0 * g
    if SMOOTH:
        c = smoothing / n_classes * g
        b = (1.0 - smoothing) * b
        a = b + c * w_sum
    return a + tl.where(z_loss != 0.0, 2.0 * z_loss * lse * g, 0.0), b, c


@triton.jit(
    do_not_specialize=["n_rows", "n_cols", "x_stride", "dx_stride", "phase", "ignore_index", "smoothing", "cap", "z_loss"]
)
def cross_entropy_resident(
    x_ptr,  # aligned to VEC elements, as dx_ptr, which may be x_ptr
    dx_ptr,
    target_ptr,  # [n_rows] int64
    weight_ptr,  # [n_cols] float32, where WEIGHTED
    weight_sum_ptr,  # [1] float32, where WEIGHTED
    count_ptr,  # [1] float32, where MEAN: the loss's denominator
    loss_ptr,  # [n_rows] float32
    lse_ptr,  # [n_rows] float32
    n_rows,
    n_cols,  # n_cols and strides: in units of VEC, or of one element where EDGE
    x_stride,
    dx_stride,
    phase,
    ignore_index,
    smoothing,
    cap,
    z_loss,
    MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SMOOTH: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    CTAS: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    CHUNKS: tl.constexpr,
    UNMASKED: tl.constexpr,
    EDGE: tl.constexpr,
    PTX: tl.constexpr,
):
    open_exchange(CTAS, 4 if SMOOTH else 2, PTX)
    LINES: tl.constexpr = ROWS * CTAS
    row, rank = lines_of(ROWS, CTAS)
    exists = row < n_rows
    head, interior = span_of(row, x_stride, phase, n_cols, VEC, EDGE)
    x_row = x_ptr + start_of(row, x_stride, phase, VEC, EDGE)
    dx_row = dx_ptr + start_of(row, dx_stride, phase, VEC, EDGE)
    first, width = slice_of(interior, rank, CTAS, VEC)
    if ROWS > 1:
        width = tl.where(exists, width, 0)
    columns = n_cols if EDGE else n_cols * VEC

    x = load_chunks(x_row + first, width, LINES, CHUNKS, UNMASKED, LANES, VEC, -float("inf"))
    target, counts = target_of(row, n_rows, target_ptr, ignore_index, columns)
    z_target = logit(tl.load(x_row - head + target, mask=counts, other=-float("inf")), 1.0, cap, SOFTCAP)
    if WEIGHTED:
        w_target = tl.load(weight_ptr + target, mask=counts, other=0.0)
        w_sum = tl.load(weight_sum_ptr)
    else:
        w_target = 1.0
        w_sum = columns
    # softcap is monotonic: the largest logit gives the largest z
    m = tl.max(x[0], 2)
    for k in tl.static_range(1, CHUNKS):
        m = tl.maximum(m, tl.max(x[k], 2))
    m = tl.maximum(logit(m, 1.0, cap, SOFTCAP), LOWEST)  # [LINES, LANES]
    if EDGE:
        edge, in_edge = edge_of(head, interior, n_cols, (rank == 0) & exists, LANES, VEC)
        x_edge = tl.load(x_row + edge, mask=in_edge, other=-float("inf"))
        z = logit(x_edge, 1.0, cap, SOFTCAP)
        m = tl.maximum(m, z)
        s = exp(z - m)
        t = weigh(z, edge + head, in_edge, weight_ptr, WEIGHTED)
    else:
        s = tl.zeros_like(m)
        t = tl.zeros_like(m)
    for k in tl.static_range(CHUNKS):
        z = logit(opaque(x[k], PTX), 1.0, cap, SOFTCAP)
        s += tl.sum(exp(z - m[:, :, None]), 2)
        if SMOOTH:
            at = tl.reshape(chunk_offsets(k, LANES, VEC) + 0 * rank, (LINES, LANES, VEC))
            weighted = weigh(z, at + (head + first)[:, :, None], at < width[:, :, None], weight_ptr, WEIGHTED)
            t += tl.sum(weighted, 2)

    # the target's logit is one of the row's, so it changes no maximum; taken here, it has been read by all who share the
    # row before any of them can write the gradient over it
    line_max = tl.maximum(tl.max(m, 1), tl.max(z_target, 1))
    line_sum = tl.sum(s * exp(m - line_max[:, None]), 1)
    if SMOOTH:
        row_max, row_sum, wz_sum = merge_moments_over_cluster(line_max, line_sum, tl.sum(t, 1), True, CTAS, PTX)
        wz_sum = wz_sum[:, None]
    else:
        row_max, row_sum = merge_over_cluster(line_max, line_sum, CTAS, PTX)
        wz_sum = 0.0
    lse = logsumexp(row_max, row_sum)[:, None]

    loss = row_loss(lse, z_target, w_target, w_sum, wz_sum, smoothing, columns, z_loss, SMOOTH)
    writes = (rank == 0) & exists
    tl.store(loss_ptr + row, tl.where(counts, loss, 0.0), mask=writes)
    tl.store(lse_ptr + row, lse, mask=writes)

    g = tl.where(counts, 1.0, 0.0)
    if MEAN:
        g = tl.where(counts, 1.0 / tl.load(count_ptr), 0.0)
    a, b, c = coefficients(g, lse, w_target, w_sum, smoothing, columns, z_loss, SMOOTH)
    local_target = (target - head - first)[:, :, None]
    w_here = weight_ptr + (head + first)[:, :, None]
    for k in tl.static_range(CHUNKS):
        at = tl.reshape(chunk_offsets(k, LANES, VEC) + 0 * rank, (LINES, LANES, VEC))
        dx = cross_entropy_term(
            opaque(x[k], PTX), at, local_target, lse[:, :, None], a[:, :, None], b[:, :, None], c[:, :, None],
            w_here, cap, at < width[:, :, None], WEIGHTED, SMOOTH, SOFTCAP,
        )  # fmt: skip
        dx = tl.where(counts[:, :, None], dx, 0.0)
        store_chunk(dx_row + first, width, dx, k, LINES, UNMASKED, LANES, VEC)
    if EDGE:
        dx = cross_entropy_term(
            x_edge, edge, target - head, lse, a, b, c, weight_ptr + head, cap, in_edge, WEIGHTED, SMOOTH, SOFTCAP
        )
        tl.store(dx_row + edge, tl.where(counts, dx, 0.0).to(dx_ptr.dtype.element_ty), mask=in_edge)


@triton.jit(
    do_not_specialize=[
        "n_rows", "n_cols", "x_stride", "dx_stride", "phase", "ignore_index", "smoothing", "cap", "z_loss", "g_stride"
    ]
)  # fmt: skip
def cross_entropy_backward(
    x_ptr,  # aligned to VEC elements, as dx_ptr, which may be x_ptr
    dx_ptr,
    target_ptr,  # [n_rows] int64
    weight_ptr,  # [n_cols] float32, where WEIGHTED
    weight_sum_ptr,  # [1] float32, where WEIGHTED
    count_ptr,  # [1] float32, where MEAN
    lse_ptr,  # [n_rows] float32
    g_ptr,  # upstream gradient: [1], or [n_rows] with g_stride 1; float32
    n_rows,
    n_cols,  # n_cols and strides: in units of VEC, or of one element where EDGE
    x_stride,
    dx_stride,
    phase,
    ignore_index,
    smoothing,
    cap,
    z_loss,
    g_stride,
    UNLESS_ONE: tl.constexpr,  # dx already holds the gradient for an upstream gradient of 1
    MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SMOOTH: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    CHUNKS: tl.constexpr,
    EDGE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) + tl.zeros([1, 1], tl.int64)
    upstream = tl.load(g_ptr + tl.program_id(0).to(tl.int64) * g_stride)
    needed = upstream != 1.0
    if not UNLESS_ONE:
        needed = upstream == upstream
        needed = needed | (upstream != upstream)
    if needed:
        head, interior = span_of(row, x_stride, phase, n_cols, VEC, EDGE)
        x_row = x_ptr + start_of(row, x_stride, phase, VEC, EDGE)
        dx_row = dx_ptr + start_of(row, dx_stride, phase, VEC, EDGE)
        first = tl.program_id(1) * (CHUNKS * LANES * VEC)
        width = interior - first + tl.zeros([1, 1], tl.int32)
        columns = n_cols if EDGE else n_cols * VEC
        target, counts = target_of(row, n_rows, target_ptr, ignore_index, columns)
        lse = tl.load(lse_ptr + row)
        if WEIGHTED:
            w_target = tl.load(weight_ptr + target, mask=counts, other=0.0)
            w_sum = tl.load(weight_sum_ptr)
        else:
            w_target = 1.0
            w_sum = columns
        g = tl.where(counts, upstream, 0.0)
        if MEAN:
            g = tl.where(counts, upstream / tl.load(count_ptr), 0.0)
        a, b, c = coefficients(g, lse, w_target, w_sum, smoothing, columns, z_loss, SMOOTH)
        x = load_chunks(x_row + first, width, 1, CHUNKS, 0, LANES, VEC, -float("inf"))
        if EDGE:
            edge, in_edge = edge_of(head, interior, n_cols, tl.program_id(1) == 0, LANES, VEC)
            x_edge = tl.load(x_row + edge, mask=in_edge, other=-float("inf"))
        local_target = (target - head - first)[:, :, None]
        w_here = weight_ptr + (head + first + tl.zeros([1, 1], tl.int32))[:, :, None]
        for k in tl.static_range(CHUNKS):
            at = tl.reshape(chunk_offsets(k, LANES, VEC), (1, LANES, VEC))
            dx = cross_entropy_term(
                x[k], at, local_target, lse[:, :, None], a[:, :, None], b[:, :, None], c[:, :, None],
                w_here, cap, at < width[:, :, None], WEIGHTED, SMOOTH, SOFTCAP,
            )  # fmt: skip
            dx = tl.where(counts[:, :, None], dx, 0.0)
            store_chunk(dx_row + first, width, dx, k, 1, 0, LANES, VEC)
        if EDGE:
            dx = cross_entropy_term(
                x_edge, edge, target - head, lse, a, b, c, weight_ptr + head, cap, in_edge, WEIGHTED, SMOOTH, SOFTCAP
            )
            tl.store(dx_row + edge, tl.where(counts, dx, 0.0).to(dx_ptr.dtype.element_ty), mask=in_edge)


@triton.jit
def statistics_term(x, at, lse, entropy, scale, a, g_entropy, ids_row, g_row, n_picks, ENTROPY: tl.constexpr, PICKS: tl.constexpr, low, high):
    """dx of a tile: scale*(p*(a - g_H*(log p + H)) + sum of g_k over the picks that are here).  # [1, LANES, VEC]"""
    log_p = x.to(tl.float32) * scale - lse
    p = exp(log_p)
    dz = p * a
    if ENTROPY:
        # p*log p is 0 where p is
        dz -= g_entropy * p * (tl.maximum(log_p, LOWEST) + entropy)
    if PICKS:
        for k in range(n_picks):
            picked = tl.load(ids_row + k)
            if (picked >= low) & (picked < high):
                dz += tl.where(at == picked - low, tl.load(g_row + k), 0.0)
    return dz * scale


@triton.jit(do_not_specialize=["n_rows", "n_cols", "x_stride", "dx_stride", "phase", "n_picks", "scale"])
def row_statistics_backward(
    x_ptr,  # aligned to VEC elements, as dx_ptr
    dx_ptr,
    lse_ptr,  # [n_rows] float32
    entropy_ptr,  # [n_rows] float32, where ENTROPY, as its upstream gradient
    g_entropy_ptr,
    ids_ptr,  # [n_rows, n_picks] int64, where PICKS, and their upstream gradients, float32
    g_picked_ptr,
    g_lse_ptr,  # [n_rows] float32, where LSE
    scale_ptr,  # [n_rows] float32, where ROW_SCALE
    n_rows,
    n_cols,  # n_cols and strides: in units of VEC, or of one element where EDGE
    x_stride,
    dx_stride,
    phase,
    n_picks,
    scale,
    PICKS: tl.constexpr,  # a power of two >= n_picks, or 0
    ENTROPY: tl.constexpr,
    LSE: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    CHUNKS: tl.constexpr,
    EDGE: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    row = pid + tl.zeros([1, 1], tl.int64)
    head, interior = span_of(row, x_stride, phase, n_cols, VEC, EDGE)
    x_row = x_ptr + start_of(row, x_stride, phase, VEC, EDGE)
    dx_row = dx_ptr + start_of(row, dx_stride, phase, VEC, EDGE)
    first = tl.program_id(1) * (CHUNKS * LANES * VEC)
    width = interior - first + tl.zeros([1, 1], tl.int32)
    columns = n_cols if EDGE else n_cols * VEC
    x = load_chunks(x_row + first, width, 1, CHUNKS, 0, LANES, VEC, -float("inf"))
    if EDGE:
        edge, in_edge = edge_of(head, interior, n_cols, tl.program_id(1) == 0, LANES, VEC)
        x_edge = tl.load(x_row + edge, mask=in_edge, other=-float("inf"))
    by = scale
    if ROW_SCALE:
        by = tl.load(scale_ptr + pid)
    lse = tl.load(lse_ptr + pid)
    entropy = 0.0
    g_entropy = 0.0
    if ENTROPY:
        entropy = tl.load(entropy_ptr + pid)
        g_entropy = tl.load(g_entropy_ptr + pid)
    a = 0.0
    if LSE:
        a = tl.load(g_lse_ptr + pid)
    ids_row = ids_ptr + pid * n_picks
    g_row = g_picked_ptr + pid * n_picks
    if PICKS > 0:
        k = tl.arange(0, PICKS)
        at = tl.load(ids_row + k, mask=k < n_picks, other=-1)
        # an id outside the classes picks nothing, and its NaN has no gradient
        a -= tl.sum(tl.load(g_row + k, mask=(at >= 0) & (at < columns), other=0.0), 0)
    start = tl.sum(tl.sum(head + 0 * row, 1), 0).to(tl.int64) + first  # this program's first column in its row
    for k in tl.static_range(CHUNKS):
        at = tl.reshape(chunk_offsets(k, LANES, VEC), (1, LANES, VEC))
        dx = statistics_term(
            x[k], at, lse, entropy, by, a, g_entropy, ids_row, g_row, n_picks, ENTROPY, PICKS > 0,
            start, start + CHUNKS * LANES * VEC,
        )  # fmt: skip
        store_chunk(dx_row + first, width, dx, k, 1, 0, LANES, VEC)
    if EDGE:
        dx = statistics_term(
            x_edge, edge + head, lse, entropy, by, a, g_entropy, ids_row, g_row, n_picks, ENTROPY, PICKS > 0,
            tl.full([], 0, tl.int64), columns.to(tl.int64),
        )  # fmt: skip
        tl.store(dx_row + edge, dx.to(dx_ptr.dtype.element_ty), mask=in_edge)
