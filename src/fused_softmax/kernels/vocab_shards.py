"""Rows whose columns are spread over ranks: what a rank gives to the others, and what each rank makes of it.

A payload is one rank's float32 numbers, in this order; a segment is a part of the rank's columns:

    header | [segments] sums of weights, both HEAD numbers | [segments, n_rows, 2] row_max, row_sum
    | [n_rows, picks] logits of targets | [segments, n_rows] entropies or smoothed sums | [n_rows] weights of targets

    M = max(m_i);  S = sum(s_i*exp(m_i - M));  lse = M + log(S);  log p_t = (z_t - M) - log(S)

All ranks merge the same payloads in the same order, shard by shard, so they have the same bits. These kernels read
O(rows); the logits are read by those of the one-GPU ops, which write a payload's moments.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common.arguments import AnyTensor, Float32, Int32, Int64, Vector, kernel
from .common.logits import logit
from .common.numerics import LOWEST, exp, log

BLOCK = tl.constexpr(128)  # rows of a program


@triton.jit
def rows_of_program(n_rows):
    """(rows, whether they exist).  # [BLOCK]"""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return row, row < n_rows


@kernel(asserts=True)
def pack_shard(
    x_ptr: AnyTensor,  # [n_rows, n_cols], columns contiguous
    ids_ptr: Vector,  # [n_rows, n_picks] int64, of all ranks' columns
    weight_ptr: Vector,  # [n_cols] float32, where WEIGHTED
    scale_ptr: Vector,  # [n_rows] float32, where SCALE is 2
    moments_ptr: Vector,  # of the payload, at these rows; each of the payload's parts
    picked_ptr: Vector,
    spreads_ptr: Vector,
    weights_ptr: Vector,
    payload_ptr: Vector,
    header_ptr: Vector,  # [HEAD]
    n_rows: Int64,
    payload_rows: Int64,  # rows from one segment of the payload to the next
    x_stride: Int64, n_cols: Int64,
    start: Int64,  # the first of these columns, of `size`
    size: Int64, ignore_index: Int64,
    n_picks: Int32, segments: Int32,
    scale: Float32, cap: Float32,
    LOSS: tl.constexpr,  # ids are targets, which are asserted to be inside, or ignored
    SCALE: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, HEAD: tl.constexpr,
    PADDED: tl.constexpr,  # a power of two >= HEAD
):  # fmt: skip
    """Writes the header, and logits and weights of targets, 0 where they are in other columns; ends smoothed sums."""
    word = tl.arange(0, PADDED)
    in_header = (word < HEAD) & (tl.program_id(0) == 0)
    tl.store(payload_ptr + word, tl.load(header_ptr + word, mask=in_header, other=0.0), mask=in_header)
    place, exists = rows_of_program(n_rows * n_picks)
    row = place // n_picks
    id = tl.load(ids_ptr + place, mask=exists, other=-1)
    counts = exists
    if LOSS:
        counts = exists & (id != ignore_index)
        tl.device_assert((counts == 0) | ((id >= 0) & (id < size)), "fused_softmax.parallel: target out of bounds")
    at = id - start
    here = counts & (at >= 0) & (at < n_cols)
    x = tl.load(x_ptr + row * x_stride + at, mask=here, other=0.0)
    by = tl.zeros_like(row).to(tl.float32) + scale
    if SCALE == 2:
        by = tl.load(scale_ptr + row, mask=exists, other=1.0)
    z = logit(x, by, cap, SCALE != 0, SOFTCAP)
    tl.store(picked_ptr + place, tl.where(here, z, 0.0), mask=exists)
    if WEIGHTED:
        w = tl.load(weight_ptr + at, mask=here, other=0.0)
        tl.store(weights_ptr + place, w, mask=exists)
    if SMOOTH:
        each = n_cols // segments
        for i in range(segments):
            # a loss's kernel has written its mean over the columns; where the first is -inf, as its target, 0*inf
            spread_at = spreads_ptr + i * payload_rows + row
            spread = tl.load(spread_at, mask=exists, other=0.0) * each.to(tl.float32)
            row_sum = tl.load(moments_ptr + 2 * (i * payload_rows + row) + 1, mask=exists, other=1.0)
            first = tl.load(x_ptr + row * x_stride + i * each, mask=exists, other=0.0).to(tl.float32)
            of_first = tl.zeros_like(spread) + float("inf")
            if WEIGHTED:
                of_first = tl.where(tl.load(weight_ptr + i * each) == 0.0, float("nan"), of_first)
            spread = tl.where(first == -float("inf"), of_first, spread)
            tl.store(spread_at, tl.where(row_sum == 0.0, float("inf"), spread), mask=exists)


@triton.jit
def headers_differ(gathered_ptr, length, ranks, COMMON: tl.constexpr, PADDED: tl.constexpr):
    """Whether the bits of a rank's first COMMON numbers are not those of rank 0."""
    word = tl.arange(0, PADDED)
    first = tl.load(gathered_ptr + word, mask=word < COMMON, other=0.0).to(tl.int32, bitcast=True)
    differ = tl.zeros([PADDED], tl.int32)
    for rank in range(1, ranks):
        other = tl.load(gathered_ptr + rank * length + word, mask=word < COMMON, other=0.0)
        differ = tl.maximum(differ, (other.to(tl.int32, bitcast=True) != first).to(tl.int32))
    return tl.max(differ, 0) > 0


@triton.jit
def merge_moments(
    gathered_ptr, row, exists, n_rows, length, ranks, segments, INFINITE: tl.constexpr, COMMON: tl.constexpr,
    PADDED: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """(row_max, row_sum) of all shards; NaN where a rank made another call. INFINITE: a sum may be infinite."""
    top = tl.zeros([BLOCK], tl.float32) + LOWEST
    for i in range(ranks * segments):
        at = gathered_ptr + i // segments * length + HEAD + 2 * (i % segments * n_rows + row)
        top = tl.maximum(top, tl.load(at, mask=exists, other=LOWEST))
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(ranks * segments):
        at = gathered_ptr + i // segments * length + HEAD + 2 * (i % segments * n_rows + row)
        m, s = tl.load(at, mask=exists, other=LOWEST), tl.load(at + 1, mask=exists, other=0.0)
        total += s * exp(m - top)
    if COMMON > 0:
        total = tl.where(headers_differ(gathered_ptr, length, ranks, COMMON, PADDED), float("nan"), total)
    return top, total if INFINITE else tl.where(total == float("inf"), float("nan"), total)


@triton.jit
def add_ranks(at, exists, length, ranks):
    """The sum over the ranks of one of their numbers for each row."""
    total = tl.zeros([BLOCK], tl.float32)
    for rank in range(ranks):
        total += tl.load(at + rank * length, mask=exists, other=0.0)
    return total


@kernel()
def merge_loss(
    gathered_ptr: Vector,  # [ranks, length] float32: every rank's payload
    target_ptr: Vector,  # [n_rows] int64
    loss_ptr: Vector,  # [n_rows] float32, as the following
    moments_ptr: Vector,  # [n_rows, 2]: (row_max, row_sum)
    weights_ptr: Vector,  # [n_rows], where WEIGHTED: 0 in rows that do not count
    n_rows: Int64, length: Int64, size: Int64, ignore_index: Int64,
    ranks: Int32, segments: Int32,
    smoothing: Float32, z_loss: Float32,
    WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, COMMON: tl.constexpr, PADDED: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """Each row's loss, 0 where its target is ignored."""
    row, exists = rows_of_program(n_rows)
    target = tl.load(target_ptr + row, mask=exists, other=ignore_index)
    counts = target != ignore_index
    row_max, row_sum = merge_moments(
        gathered_ptr, row, exists, n_rows, length, ranks, segments, False, COMMON, PADDED, HEAD
    )
    log_sum = log(row_sum)
    picked = HEAD + 2 * segments * n_rows
    spreads = picked + n_rows
    weights = spreads + segments * n_rows
    loss = log_sum - (add_ranks(gathered_ptr + picked + row, exists, length, ranks) - row_max)
    if WEIGHTED:
        w = add_ranks(gathered_ptr + weights + row, exists, length, ranks)
        loss *= w
        tl.store(weights_ptr + row, tl.where(counts, w, 0.0), mask=exists)
    if SMOOTH:
        spread = tl.zeros([BLOCK], tl.float32)
        for i in range(ranks * segments):
            payload = gathered_ptr + i // segments * length
            k = i % segments
            m = tl.load(payload + HEAD + 2 * (k * n_rows + row), mask=exists, other=0.0)
            s = tl.load(payload + HEAD + 2 * (k * n_rows + row) + 1, mask=exists, other=1.0)
            own = tl.load(payload + spreads + k * n_rows + row, mask=exists, other=0.0)
            above = log_sum - ((m - row_max) + log(s))  # lse - lse_i
            spread += tl.where(s == 0.0, own, own + tl.load(payload + HEAD - segments + k) * above)
        loss = (1.0 - smoothing) * loss + smoothing / size.to(tl.float32) * spread
    lse = row_max + log_sum
    # a factor of 0 must not turn an infinite lse into NaN
    loss += tl.where(z_loss != 0.0, z_loss * lse * lse, 0.0)
    tl.store(loss_ptr + row, tl.where(counts, loss, 0.0), mask=exists)
    tl.store(moments_ptr + 2 * row, row_max, mask=exists)
    tl.store(moments_ptr + 2 * row + 1, row_sum, mask=exists)


@kernel()
def merge_statistics(
    gathered_ptr: Vector,  # as of `merge_loss`
    ids_ptr: Vector,  # [n_rows, n_picks] int64, where PICKS
    picked_ptr: Vector,  # [n_rows, n_picks], where PICKS: log-probabilities
    entropy_ptr: Vector,  # [n_rows], where ENTROPY
    lse_ptr: Vector,  # [n_rows]
    moments_ptr: Vector,  # [n_rows, 2]
    n_rows: Int64, length: Int64, size: Int64,
    ranks: Int32, segments: Int32, n_picks: Int32,
    PICKS: tl.constexpr, ENTROPY: tl.constexpr,
    INFINITE: tl.constexpr,  # a row with +inf keeps its infinite sum; otherwise it is NaN, as its probabilities are
    COMMON: tl.constexpr, PADDED: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """Each row's logsumexp, log-probabilities and entropy. An id outside [0, size) has NaN."""
    row, exists = rows_of_program(n_rows)
    row_max, row_sum = merge_moments(
        gathered_ptr, row, exists, n_rows, length, ranks, segments, INFINITE, COMMON, PADDED, HEAD
    )
    log_sum = log(row_sum)
    tl.store(lse_ptr + row, row_max + log_sum, mask=exists)
    tl.store(moments_ptr + 2 * row, row_max, mask=exists)
    tl.store(moments_ptr + 2 * row + 1, row_sum, mask=exists)
    picked = HEAD + 2 * segments * n_rows
    if PICKS:
        for k in range(n_picks):
            at = row * n_picks + k
            z = add_ranks(gathered_ptr + picked + at, exists, length, ranks)
            id = tl.load(ids_ptr + at, mask=exists, other=-1)
            known = (id >= 0) & (id < size) & (row_sum < float("inf"))
            tl.store(picked_ptr + at, tl.where(known, (z - row_max) - log_sum, float("nan")), mask=exists)
    if ENTROPY:
        # sum(q*(H - log q)), where q is a shard's share of the row. A shard of -inf only has none of it
        entropies = picked + n_rows * n_picks
        entropy = tl.zeros([BLOCK], tl.float32)
        for i in range(ranks * segments):
            payload, k = gathered_ptr + i // segments * length, i % segments
            m = tl.load(payload + HEAD + 2 * (k * n_rows + row), mask=exists, other=0.0)
            s = tl.load(payload + HEAD + 2 * (k * n_rows + row) + 1, mask=exists, other=1.0)
            own = tl.load(payload + entropies + k * n_rows + row, mask=exists, other=0.0)
            log_q = tl.maximum((m - row_max) + (log(s) - log_sum), LOWEST)
            entropy += tl.where(s == 0.0, 0.0, exp(log_q) * (own - log_q))
        # 0/0: a row of -inf only has none, and a row with +inf neither
        tl.store(entropy_ptr + row, entropy + (0.0 * row_sum) / row_sum, mask=exists)


@kernel()
def loss_factors(
    g_ptr: Vector,  # upstream gradient: [1] with g_stride 0, or [n_rows] with g_stride 1; float32
    target_ptr: Vector,  # [n_rows] int64
    moments_ptr: Vector,  # [n_rows, 2]
    weights_ptr: Vector,  # [n_rows], where WEIGHTED
    count_ptr: Vector,  # [1], where MEAN
    weight_sum_ptr: Vector,  # [1], where WEIGHTED and SMOOTH
    factors_ptr: Vector,  # [n_rows, 3] float32
    n_rows: Int64, ignore_index: Int64, size: Int64, g_stride: Int64,
    smoothing: Float32, z_loss: Float32,
    MEAN: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr,
):  # fmt: skip
    """(a, b, c) of dx = p*a - c*w - [j = t]*b, which are 0 in rows that do not count."""
    row, exists = rows_of_program(n_rows)
    counts = exists & (tl.load(target_ptr + row, mask=exists, other=ignore_index) != ignore_index)
    g = tl.load(g_ptr + row * g_stride, mask=exists, other=0.0)
    if MEAN:
        g = g / tl.load(count_ptr)
    g = tl.where(counts, g, 0.0)
    b = g
    if WEIGHTED:
        b = g * tl.load(weights_ptr + row, mask=exists, other=0.0)
    a = b
    c = tl.zeros_like(g)
    if SMOOTH:
        n_cols = size.to(tl.float32)
        c = smoothing / n_cols * g
        b = (1.0 - smoothing) * b
        if WEIGHTED:
            a = b + c * tl.load(weight_sum_ptr)
        else:
            a = b + c * n_cols
    row_max = tl.load(moments_ptr + 2 * row, mask=exists, other=0.0)
    row_sum = tl.load(moments_ptr + 2 * row + 1, mask=exists, other=1.0)
    # a row that does not count may be -inf
    a += tl.where(counts & (z_loss != 0.0), 2.0 * z_loss * (row_max + log(row_sum)) * g, 0.0)
    tl.store(factors_ptr + 3 * row, a, mask=exists)
    tl.store(factors_ptr + 3 * row + 1, b, mask=exists)
    tl.store(factors_ptr + 3 * row + 2, c, mask=exists)
