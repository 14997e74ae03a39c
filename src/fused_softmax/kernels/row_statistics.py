"""Statistics of rows of logits, and their gradient: logsumexp, entropy, log-probabilities of picked columns.

    z = x*scale;  lse = log(sum(exp(z)));  H = lse - sum(p*z);  logprob_k = z[id_k] - lse
    dx = scale*(p*(g_lse - sum(g_k)) - g_H*p*(log p + H)) + scale*sum(g_k at id_k)

Forward: one read (`online_reduction`), O(rows) written. Backward: one read and one write, element by element, because
(row_max, row_sum) and H are known; any number of programs may share a row. p = exp(z - row_max)/row_sum, because a
large logsumexp is rounded, and a p computed from it would be too.

A row of -inf only has lse -inf, and a row with +inf has lse +inf (as torch.logsumexp). Their log-probabilities are NaN,
as those of torch.log_softmax, and so is the gradient of these. The gradient of lse is NaN in a row of -inf only. In a
row with +inf it is NaN at +inf and 0 elsewhere. An id outside [0, n_cols) is never dereferenced: its log-probability is
NaN and it adds nothing to the gradient.

The rank of a row's first id is the number of logits that are at least its own: 1 for the largest, and ties count. NaN
counts nowhere, and an id outside has rank 0. It is exact up to 2^24 columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common.arguments import Float32, Int32, Int64, Rows, Vector, kernel
from .common.cluster import init_cluster_barrier, leave_cluster
from .common.early_start import await_previous
from .common.numerics import log, upcast
from .common.online_softmax import moment_of, online_reduction
from .common.statistics_terms import (
    UNSCALED,
    first_pick,
    picked_logits,
    scale_of,
    statistics_term,
    write_statistics,
)
from .common.tiles import (
    chunk_offsets,
    gradient_reads,
    head_and_tail,
    load_chunks,
    segments_of,
    slice_of,
    span_of,
    start_of,
    store_chunk,
    unit_of,
    warp_of,
    width_if,
)


@kernel(num_stages=3, on_cluster=True)
def row_statistics(
    x_ptr: Rows,  # aligned to VEC elements
    lse_ptr: Vector,  # [n_rows] float32, or of x's dtype
    moments_ptr: Vector,  # [n_rows, 2] float32: (row_max, row_sum), where KEEP_MOMENTS
    entropy_ptr: Vector,  # [n_rows] float32, where ENTROPY; the rank of the first id, where RANK
    ids_ptr: Vector,  # [n_rows, n_picks] int64, where PICKS
    picked_ptr: Vector,  # [n_rows, n_picks] float32, where PICKS: log-probabilities
    scale_ptr: Vector,  # [n_rows] float32, where SCALE is BY_ROW
    n_rows: Int64,
    n_cols: Int32,  # n_cols and x_stride: in units of VEC, or of one element where UNALIGNED
    x_stride: Int64,
    phase: Int32, n_picks: Int32,
    scale: Float32,
    PICKS: tl.constexpr,  # a power of two >= n_picks, or 0
    ENTROPY: tl.constexpr,
    RANK: tl.constexpr,  # in place of ENTROPY, and with PICKS
    SCALE: tl.constexpr, KEEP_MOMENTS: tl.constexpr, ROWS: tl.constexpr, CTAS: tl.constexpr,
    WARPS_PER_ROW: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr,
    UNALIGNED: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    tl.static_assert(not RANK or (PICKS > 0 and not ENTROPY))
    init_cluster_barrier(CTAS, 4 if ENTROPY or RANK else 2, PTX, WARPS_PER_ROW)
    row, rank = segments_of(ROWS, CTAS, WARPS_PER_ROW)
    warp = warp_of(ROWS * CTAS * WARPS_PER_ROW, WARPS_PER_ROW)
    exists = row < n_rows
    head, interior = span_of(row, x_stride, phase, n_cols, VEC, UNALIGNED)
    x_row = x_ptr + start_of(row, x_stride, phase, VEC, UNALIGNED)
    first, width = slice_of(interior, rank, CTAS, VEC)
    first += warp * (VECTORS * VEC)
    width -= warp * (VECTORS * VEC)
    if ROWS > 1:
        width = width_if(exists, width)
    await_previous(EARLY)
    by = scale_of(row, exists, scale_ptr, scale, SCALE)
    columns = n_cols if UNALIGNED else n_cols * VEC
    writes = (rank == 0) & (warp == 0) & exists
    # before the reduction, so that their latency is hidden
    k, wanted, inside, x_picked = picked_logits(x_row - head, columns, row, writes, ids_ptr, n_picks, PICKS)
    reference = by
    if RANK:
        reference = first_pick(x_row - head, columns, row, exists, ids_ptr, n_picks)
    MOMENT: tl.constexpr = moment_of(ENTROPY, RANK)
    row_max, row_sum, row_moment = online_reduction(
        x_row, first, width, head, interior, columns, exists, rank, warp, by, 1.0, reference, x_ptr,
        MOMENT, False, SCALE != UNSCALED, False, ROWS, CTAS, WARPS_PER_ROW, VECTORS, VEC, CHUNKS, UNALIGNED, PTX,
    )  # fmt: skip

    write_statistics(
        row, writes, row_max, row_sum, row_moment, x_picked, inside, wanted, k, by, lse_ptr, moments_ptr, entropy_ptr,
        picked_ptr, n_picks, PICKS, ENTROPY, RANK, SCALE, KEEP_MOMENTS,
    )  # fmt: skip
    leave_cluster(CTAS, PTX)


@triton.jit
def picked_gradient(dz, at, row, exists, low, high, ids_ptr, g_ptr, n_picks, start):
    """dz plus the gradients of the picks among this program's columns, which count from `start`.

    # dz, at: [ROWS, VECTORS, VEC]
    """
    for k in range(n_picks):
        id = tl.load(ids_ptr + row * n_picks + k, mask=exists, other=-1) - start
        here = (id >= low) & (id < high)
        if tl.sum(here.to(tl.int32)) > 0:
            g = tl.load(g_ptr + row * n_picks + k, mask=here, other=0.0)
            dz += tl.where(at == (id - low)[:, :, None], g[:, :, None], 0.0)
    return dz


@kernel(splits_rows=True)
def row_statistics_backward(
    x_ptr: Rows,  # aligned to VEC elements, as dx_ptr
    dx_ptr: Rows,
    moments_ptr: Vector,  # [n_rows, 2] float32: (row_max, row_sum); or [n_rows], lse, where not HAS_MOMENTS
    entropy_ptr: Vector,  # [n_rows] float32, where ENTROPY, as its upstream gradient
    g_entropy_ptr: Vector,
    ids_ptr: Vector,  # [n_rows, n_picks] int64, where PICKS, and their upstream gradients, float32
    g_picked_ptr: Vector,
    g_lse_ptr: Vector,  # [n_rows] float32, or of x's dtype, where LSE
    scale_ptr: Vector,  # [n_rows] float32, where SCALE is BY_ROW
    n_rows: Int64,
    n_cols: Int32,  # n_cols and strides: in units of VEC, or of one element where UNALIGNED
    x_stride: Int64, dx_stride: Int64,
    phase: Int32,
    n_splits: Int32,  # programs that share a row
    n_picks: Int32,
    start: Int64, size: Int64,  # where SHARDED: these are columns from `start` on of `size`
    scale: Float32,
    PICKS: tl.constexpr,  # a power of two >= n_picks, or 0
    SHARDED: tl.constexpr,  # other ranks have more columns of the rows, and all that is known of a row is of all
    ENTROPY: tl.constexpr, LSE: tl.constexpr, SCALE: tl.constexpr, HAS_MOMENTS: tl.constexpr, ROWS: tl.constexpr,
    VECTORS: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr, UNALIGNED: tl.constexpr, PTX: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    row, exists, split, head, interior, first, width = unit_of(
        pid, n_rows, n_splits, x_stride, phase, n_cols, ROWS, VECTORS, VEC, CHUNKS, UNALIGNED
    )
    x_row = x_ptr + start_of(row, x_stride, phase, VEC, UNALIGNED)
    dx_row = dx_ptr + start_of(row, dx_stride, phase, VEC, UNALIGNED)
    columns = n_cols if UNALIGNED else n_cols * VEC
    POLICY: tl.constexpr = gradient_reads(UNALIGNED, x_ptr.dtype.element_ty)
    await_previous(EARLY)
    x = load_chunks(x_row + first, width, ROWS, CHUNKS, 0, VECTORS, VEC, -float("inf"), 1, POLICY)
    if UNALIGNED:
        head_tail, in_head_tail = head_and_tail(head, interior, n_cols, (split == 0) & exists, VECTORS, VEC)
        x_head_tail = tl.load(x_row + head_tail, mask=in_head_tail, other=-float("inf"))
    by = scale_of(row, exists, scale_ptr, scale, SCALE)
    if HAS_MOMENTS:
        row_max = tl.load(moments_ptr + 2 * row, mask=exists, other=0.0)
        row_sum = tl.load(moments_ptr + 2 * row + 1, mask=exists, other=1.0)
    else:
        row_max = tl.load(moments_ptr + row, mask=exists, other=0.0).to(tl.float32)
        row_sum = tl.zeros_like(row_max) + 1.0
    entropy = tl.zeros_like(row_max)
    g_entropy = tl.zeros_like(row_max)
    if ENTROPY:
        entropy = tl.load(entropy_ptr + row, mask=exists, other=0.0)
        g_entropy = tl.load(g_entropy_ptr + row, mask=exists, other=0.0)
    a = tl.zeros_like(row_max)
    if LSE:
        a = tl.load(g_lse_ptr + row, mask=exists, other=0.0).to(tl.float32)
    if PICKS > 0:
        k = tl.arange(0, PICKS)[None, :] + 0 * row
        id = tl.load(ids_ptr + row * n_picks + k, mask=exists & (k < n_picks), other=-1)
        inside = (id >= 0) & (id < (size if SHARDED else columns))
        a -= tl.sum(tl.load(g_picked_ptr + row * n_picks + k, mask=inside, other=0.0), 1)[:, None]
    if ENTROPY or PICKS > 0:
        # the log-probabilities of a row with +inf are NaN
        a = tl.where(row_sum == float("inf"), float("nan"), a)
    of_here = start if SHARDED else 0
    n_here = n_picks
    if PICKS > 0:  # most programs of a row hold no pick, and then no chunk looks for one
        at_first = id - of_here - head - first
        near = (at_first >= 0) & (at_first < CHUNKS * VECTORS * VEC)
        n_here = tl.where(tl.sum(tl.sum(near.to(tl.int32), 1), 0) > 0, n_picks, 0)
    by_sum, above = 1.0 / row_sum, entropy - log(row_sum)
    a, g_entropy = a * by_sum, g_entropy * by_sum
    for c in tl.static_range(CHUNKS):
        at = tl.reshape(chunk_offsets(c, VECTORS, VEC), (1, VECTORS, VEC))
        dz = statistics_term(
            upcast(x[c], PTX), row_max[:, :, None], above[:, :, None], by[:, :, None], a[:, :, None],
            g_entropy[:, :, None], ENTROPY, SCALE != UNSCALED,
        )  # fmt: skip
        if PICKS > 0:
            low = first + head + 0 * row
            high = first + head + (c + 1) * (VECTORS * VEC) + 0 * row
            dz = picked_gradient(dz, at, row, exists, low, high, ids_ptr, g_picked_ptr, n_here, of_here)
        store_chunk(dx_row + first, width, dz * by[:, :, None], c, ROWS, 0, VECTORS, VEC)
    if UNALIGNED:
        dz = statistics_term(x_head_tail, row_max, above, by, a, g_entropy, ENTROPY, SCALE != UNSCALED)
        if PICKS > 0:
            dz = picked_gradient(
                dz[:, :, None], (head_tail + head)[:, :, None], row, exists, 0 * row, columns + 0 * row,
                ids_ptr, g_picked_ptr, n_picks, of_here,
            )  # fmt: skip
            dz = tl.reshape(dz, (ROWS, VECTORS))
        tl.store(dx_row + head_tail, (dz * by).to(dx_ptr.dtype.element_ty), mask=in_head_tail)
