"""The shared parts of the kernels of row statistics: a row's scale, its picks, and what is written of it.

The formulas are those of `row_statistics`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .logits import logit, logsumexp, rounding_residual
from .numerics import LOWEST, exp, log

# the factor of the logits: none, one number, or each row's own
UNSCALED = tl.constexpr(0)
ONE_SCALE = tl.constexpr(1)
BY_ROW = tl.constexpr(2)


@triton.jit
def scale_of(row, exists, scale_ptr, scale, SCALE: tl.constexpr):
    """Each row's scale, or 1 where SCALE is UNSCALED.  # row, exists: [SEGMENTS, 1]

    An infinite temperature gives 0. It becomes the least positive number, so that -inf, also after a row's end, stays
    -inf.
    """
    if SCALE == BY_ROW:
        by = tl.load(scale_ptr + row, mask=exists, other=1.0)
        least = (tl.zeros_like(row).to(tl.int32) + 1).to(tl.float32, bitcast=True)
        return tl.where(by == 0.0, least, by)
    else:
        by = tl.zeros_like(row).to(tl.float32) + 1.0
        return by * tl.cast(scale, tl.float32) if SCALE == ONE_SCALE else by


@triton.jit
def picked_logits(x_first, columns, row, writes, ids_ptr, n_picks, PICKS: tl.constexpr):
    """(k, whether there is a k-th pick, whether it is a column, its logit).  # [SEGMENTS, PICKS]

    # x_first: each row's first column, as row and writes [SEGMENTS, 1]
    """
    if PICKS > 0:
        k = tl.arange(0, PICKS)[None, :] + 0 * row.to(tl.int32)
        wanted = writes & (k < n_picks)
        at = tl.load(ids_ptr + row * n_picks + k, mask=wanted, other=-1)
        inside = wanted & (at >= 0) & (at < columns)
        return k, wanted, inside, tl.load(x_first + at, mask=inside, other=0.0)
    else:
        return row, writes, writes, row


@triton.jit
def first_pick(x_first, columns, row, exists, ids_ptr, n_picks):
    """The logit of each row's first id, or NaN where it is no column.  # all [SEGMENTS, 1]"""
    id = tl.load(ids_ptr + row * n_picks, mask=exists, other=-1)
    known = (id >= 0) & (id < columns)
    return tl.load(x_first + id, mask=known, other=float("nan")).to(tl.float32)


@triton.jit
def write_statistics(
    row, writes, row_max, row_sum, row_moment, x_picked, inside, wanted, k, by, lse_ptr, moments_ptr, entropy_ptr,
    picked_ptr, n_picks,
    PICKS: tl.constexpr, ENTROPY: tl.constexpr, RANK: tl.constexpr, SCALE: tl.constexpr, KEEP_MOMENTS: tl.constexpr,
):  # fmt: skip
    """Writes what is asked of each row.  # row_max, row_sum, row_moment: [SEGMENTS]"""
    lse = logsumexp(row_max, row_sum)
    residual, lse = rounding_residual(lse, row_max, row_sum)[:, None], lse[:, None]
    tl.store(lse_ptr + row, lse, mask=writes)
    if KEEP_MOMENTS:
        tl.store(moments_ptr + 2 * row, row_max[:, None], mask=writes)
        tl.store(moments_ptr + 2 * row + 1, row_sum[:, None], mask=writes)
    if ENTROPY:
        tl.store(entropy_ptr + row, (log(row_sum) - row_moment / row_sum)[:, None], mask=writes)
    elif RANK:
        tl.store(entropy_ptr + row, row_moment[:, None], mask=writes)
    if PICKS > 0:
        z = logit(x_picked, by, 1.0, SCALE != UNSCALED, False)
        picked = tl.where(inside & (lse < float("inf")), z - lse - residual, float("nan"))
        tl.store(picked_ptr + row * n_picks + k, picked, mask=wanted)


@triton.jit
def statistics_term(x, row_max, above, scale, a, g_entropy, ENTROPY: tl.constexpr, SCALED: tl.constexpr):
    """dx/scale of a tile, without the picks' gradients. a and g_entropy are over row_sum; above: entropy - log_sum.

    All arguments broadcast.
    """
    d = logit(x, scale, 1.0, SCALED, False) - row_max
    e = exp(d)
    dz = e * a
    if ENTROPY:
        # p*(log(p) + H) is 0 where p is 0
        dz -= g_entropy * e * tl.maximum(d + above, LOWEST)
    return dz
