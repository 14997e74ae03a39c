"""The online softmax reduction of a row of logits: maximum, sum of exponentials, and an optional third sum.

    z = softcap(x)*scale;  m = max(z);  s = sum(exp(z - m))
    t = sum(exp(z - m)*(z - m)), or sum(w*(z - r)), or the number of x >= r

One program, or the CTAS programs of a cluster, read the row once, in steps, and hold nothing of it. Several narrow rows
share a program. The read bandwidth is the limit. -inf adds nothing, NaN spreads, and +inf makes s infinite.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .cluster import cluster_reduce_max_sum, cluster_reduce_moments
from .logits import logit, weigh
from .numerics import (
    HIGHEST,
    LN2,
    LOWEST,
    exp,
    exp2_affine,
    lies_in_lanes,
    max_of_vectors,
    rescale_moments,
    rounded_product,
    sum_of_vectors,
    upcast,
)
from .tiles import chunk_offsets, head_and_tail, load_chunks

# the row is not read again, and no output needs room in L2. H200: 0.3 to 1.5% faster than "evict_last"
READ_ONCE = tl.constexpr("evict_first")

# the third sum of a reduction: none, sum(exp(z - m)*(z - m)), sum(w*(z - r)) with a reference r, or the number of
# logits, as they were loaded, that are at least r
NO_MOMENT = tl.constexpr(0)
ENTROPY_MOMENT = tl.constexpr(1)
WEIGHTED_SUM = tl.constexpr(2)
RANK_MOMENT = tl.constexpr(3)


@triton.constexpr_function
def moment_of(entropy: bool, rank: bool) -> int:
    """The third sum of a row's statistics."""
    return ENTROPY_MOMENT.value if entropy else RANK_MOMENT.value if rank else NO_MOMENT.value


@triton.jit
def load_step(
    at, width, SEGMENTS: tl.constexpr, CHUNKS: tl.constexpr, UNPREDICATED: tl.constexpr, VECTORS: tl.constexpr,
    VEC: tl.constexpr, WARPS_PER_ROW: tl.constexpr,
):  # fmt: skip
    """A step's chunks, as `load_chunks` returns them."""
    return load_chunks(at, width, SEGMENTS, CHUNKS, UNPREDICATED, VECTORS, VEC, -float("inf"), WARPS_PER_ROW, READ_ONCE)


@triton.jit
def count_at_least(
    x, reference, left, C: tl.constexpr, MASKED: tl.constexpr, WARPS_PER_ROW: tl.constexpr, PTX: tl.constexpr,
    ONE_CTA: tl.constexpr,
):  # fmt: skip
    """Each vector's number of logits of chunk C that are at least the reference, float32.

    What is masked holds -inf, and the reference may be -inf: such columns are left out by their place.
    # x: [SEGMENTS, VECTORS, VEC]; reference, left: [SEGMENTS, 1]; result [SEGMENTS, VECTORS]
    """
    least = x >= reference[:, :, None]
    if MASKED:
        at = chunk_offsets(C, x.shape[1], x.shape[2], WARPS_PER_ROW) < left
        least = least & tl.reshape(at, (x.shape[0], x.shape[1], x.shape[2]))
    return sum_of_vectors(tl.where(least, 1.0, 0.0), PTX, ONE_CTA)


@triton.jit
def accumulate(
    x, scale, cap, m, s, t,
    reference, left,  # of RANK_MOMENT: and the columns from the step's first on, where MASKED
    MASKED: tl.constexpr, WARPS_PER_ROW: tl.constexpr, MOMENT: tl.constexpr, SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr, CHUNKS: tl.constexpr, ONE_CTA: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Each vector's (m, s, t) after one more step.

    The step's maximum is taken of the logits as loaded. The caller adds a weighted sum.
    # x: CHUNKS tiles [SEGMENTS, VECTORS, VEC]; m, s, t: [SEGMENTS, VECTORS]
    """
    top = max_of_vectors(x[0], PTX, ONE_CTA)
    for c in tl.static_range(1, CHUNKS):
        top = tl.maximum(top, max_of_vectors(x[c], PTX, ONE_CTA))
    m_new = tl.minimum(tl.maximum(m, logit(top, scale, cap, SCALED, SOFTCAP)), HIGHEST)
    if MOMENT == ENTROPY_MOMENT:
        m, s, t = rescale_moments(m, s, t, m_new)
    else:
        s = s * exp(m - m_new)
    # a step has its own sum: fewer additions to a long sum cause less rounding
    step = tl.zeros_like(s)
    moment = tl.zeros_like(t)
    # where FUSED, d is in base 2 and relative to a rounded number; the correction per step undoes that rounding
    FUSED: tl.constexpr = PTX and x[0].dtype.primitive_bitwidth == 16 and not SOFTCAP
    base, shift, correction = exp2_affine(m_new, FUSED)
    for c in tl.static_range(CHUNKS):
        wide = upcast(x[c], PTX)
        if MOMENT == RANK_MOMENT:
            moment += count_at_least(wide, reference, left, c, MASKED, WARPS_PER_ROW, PTX, ONE_CTA)
        z = logit(wide, scale[:, :, None], cap, SCALED, SOFTCAP)
        d = tl.fma(z, base[:, :, None], -shift[:, :, None]) if FUSED else z - shift[:, :, None]
        e = tl.exp2(d) if FUSED else exp(d)
        step += sum_of_vectors(e, PTX, ONE_CTA)
        if MOMENT == ENTROPY_MOMENT:
            if lies_in_lanes(x[c].shape[2], x[c].dtype):
                moment += sum_of_vectors(rounded_product(e, tl.maximum(d, LOWEST)), PTX, ONE_CTA)
            else:
                moment += sum_of_vectors(e * tl.maximum(d, LOWEST), PTX, ONE_CTA)
    if FUSED:
        if MOMENT == ENTROPY_MOMENT:
            moment = correction * LN2 * (moment - tl.fma(m_new, base, -shift) * step)
        step = correction * step
    return m_new, s + step, t + moment


@triton.jit
def add_head_tail(
    x, at, inside, scale, cap, reference, w_ptr, m, s, t,
    MOMENT: tl.constexpr, WEIGHTED: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Each vector's (m, s, t) after one more element, of the row's head or tail.  # x, at, inside, m, s, t alike"""
    z = logit(x, scale, cap, SCALED, SOFTCAP)
    top = tl.minimum(tl.maximum(m, z), HIGHEST)
    if MOMENT == ENTROPY_MOMENT:
        m, s, t = rescale_moments(m, s, t, top)
    else:
        m, s = top, s * exp(m - top)
    e = exp(z - m)
    s += e
    if MOMENT == ENTROPY_MOMENT:
        t += e * tl.maximum(z - m, LOWEST)
    elif MOMENT == WEIGHTED_SUM:
        t += weigh(z, reference, at, inside, w_ptr, WEIGHTED)
    elif MOMENT == RANK_MOMENT:
        t += tl.where(inside & (x.to(tl.float32) >= reference), 1.0, 0.0)
    return m, s, t


@triton.jit
def merge_parts(m, s, t, MOMENT: tl.constexpr):
    """(max, sum, moment) over axis 1 of parts of a row.  # m, s, t: [SEGMENTS, PARTS]; result [SEGMENTS]"""
    top = tl.max(m, 1)
    if MOMENT == ENTROPY_MOMENT:
        m, s, t = rescale_moments(m, s, t, top[:, None], True)
    else:
        s = rounded_product(s, exp(m - top[:, None]))
    return top, tl.sum(s, 1), tl.sum(t, 1)


@triton.jit
def online_reduction(
    x_row,
    first,
    width,
    head,
    interior,
    n_cols,  # elements
    exists,
    rank,
    warp,
    scale,
    cap,
    reference,  # of WEIGHTED_SUM and RANK_MOMENT
    w_ptr, MOMENT: tl.constexpr, WEIGHTED: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr, CTAS: tl.constexpr, WARPS_PER_ROW: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr,
    CHUNKS: tl.constexpr, UNALIGNED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The row's (max, sum, moment), from one read.  # x_row .. scale: [SEGMENTS, 1]; result [SEGMENTS]

    first: the segment's first column. width: the columns from there to the end of its slice. n_cols: in elements.
    """
    SEGMENTS: tl.constexpr = ROWS * CTAS * WARPS_PER_ROW
    STEP: tl.constexpr = CHUNKS * WARPS_PER_ROW * VECTORS * VEC
    m = tl.zeros([SEGMENTS, VECTORS], tl.float32) + LOWEST
    s = tl.zeros([SEGMENTS, VECTORS], tl.float32)
    t = tl.zeros([SEGMENTS, VECTORS], tl.float32)
    zero = tl.zeros([1, 1], tl.int64)
    # every slice has `whole` steps, which need no mask; the last slice is the shortest. A short rest is a step of FEW
    # chunks, because an empty chunk takes as much arithmetic as a full one
    units = n_cols // VEC
    even = tl.cdiv(units, CTAS)
    shortest = tl.maximum(units - (1 if UNALIGNED else 0) - (CTAS - 1) * even, 0)
    whole = shortest * VEC // STEP
    if ROWS > 1:
        whole = whole * 0
    if MOMENT == WEIGHTED_SUM:
        whole = whole * 0
    FEW: tl.constexpr = 0 if ROWS > 1 or MOMENT == WEIGHTED_SUM else (CHUNKS + 3) // 4
    n_steps = whole + tl.cdiv(tl.maximum(even * VEC - whole * STEP - FEW * (WARPS_PER_ROW * VECTORS * VEC), 0), STEP)
    if UNALIGNED:  # before the loop, so that its latency is hidden
        head_tail, in_head_tail = head_and_tail(
            head, interior, n_cols, (rank == 0) & (warp == 0) & exists, VECTORS, VEC
        )
        x_head_tail = tl.load(x_row + head_tail, mask=in_head_tail, other=-float("inf"))
    for step in range(whole):
        x = load_step(
            x_row + first + (zero + step) * STEP, width, SEGMENTS, CHUNKS, CHUNKS, VECTORS, VEC, WARPS_PER_ROW
        )
        m, s, t = accumulate(
            x, scale, cap, m, s, t, reference, width, False, WARPS_PER_ROW, MOMENT, SCALED, SOFTCAP, CHUNKS, CTAS == 1,
            PTX,
        )  # fmt: skip
    for step in range(whole, n_steps):
        start = (zero + step) * STEP
        x = load_step(x_row + first + start, width - start, SEGMENTS, CHUNKS, 0, VECTORS, VEC, WARPS_PER_ROW)
        m, s, t = accumulate(
            x, scale, cap, m, s, t, reference, width - start, True, WARPS_PER_ROW, MOMENT, SCALED, SOFTCAP, CHUNKS,
            CTAS == 1, PTX,
        )  # fmt: skip
        if MOMENT == WEIGHTED_SUM:
            for c in tl.static_range(CHUNKS):
                z = logit(upcast(x[c], PTX), scale[:, :, None], cap, SCALED, SOFTCAP)
                at = tl.reshape(
                    start + chunk_offsets(c, VECTORS, VEC, WARPS_PER_ROW) + 0 * rank, (SEGMENTS, VECTORS, VEC)
                )
                mask = at < width[:, :, None]
                at_weight = at + (head + first)[:, :, None]
                t += tl.sum(weigh(z, reference[:, :, None], at_weight, mask, w_ptr, WEIGHTED), 2)
    if FEW > 0 and even * VEC > n_steps * STEP:
        start = (zero + n_steps) * STEP
        x = load_step(x_row + first + start, width - start, SEGMENTS, FEW, 0, VECTORS, VEC, WARPS_PER_ROW)
        m, s, t = accumulate(
            x, scale, cap, m, s, t, reference, width - start, True, WARPS_PER_ROW, MOMENT, SCALED, SOFTCAP, FEW,
            CTAS == 1, PTX,
        )  # fmt: skip
    # each thread adds one head or tail element to its sums. On a cluster they are reduced with their segment instead,
    # because Triton may place their tile in other CTAs than the row's
    if UNALIGNED and CTAS == 1:
        m, s, t = add_head_tail(
            x_head_tail, head_tail + head, in_head_tail, scale, cap, reference, w_ptr, m, s, t,
            MOMENT, WEIGHTED, SCALED, SOFTCAP,
        )  # fmt: skip
    segment_max = tl.max(m, 1)
    if UNALIGNED and CTAS > 1:
        z_head_tail = logit(x_head_tail, scale, cap, SCALED, SOFTCAP)
        segment_max = tl.minimum(tl.maximum(segment_max, tl.max(z_head_tail, 1)), HIGHEST)
    if MOMENT == ENTROPY_MOMENT:
        m, s, t = rescale_moments(m, s, t, segment_max[:, None], True)
    else:
        s = rounded_product(s, exp(m - segment_max[:, None]))
    segment_sum = tl.sum(s, 1)
    segment_moment = tl.sum(t, 1)
    if UNALIGNED and CTAS > 1:
        d = z_head_tail - segment_max[:, None]
        segment_sum += tl.sum(exp(d), 1)
        if MOMENT == ENTROPY_MOMENT:
            segment_moment += tl.sum(rounded_product(exp(d), tl.maximum(d, LOWEST)), 1)
        elif MOMENT == WEIGHTED_SUM:
            segment_moment += tl.sum(weigh(z_head_tail, reference, head_tail + head, in_head_tail, w_ptr, WEIGHTED), 1)
        elif MOMENT == RANK_MOMENT:
            segment_moment += tl.sum(tl.where(in_head_tail & (x_head_tail.to(tl.float32) >= reference), 1.0, 0.0), 1)
    if MOMENT == NO_MOMENT:
        row_max, row_sum = cluster_reduce_max_sum(segment_max, segment_sum, CTAS, PTX, WARPS_PER_ROW)
        return row_max, row_sum, row_sum
    else:
        PLAIN: tl.constexpr = MOMENT == WEIGHTED_SUM or MOMENT == RANK_MOMENT
        return cluster_reduce_moments(segment_max, segment_sum, segment_moment, PLAIN, CTAS, PTX, WARPS_PER_ROW)
