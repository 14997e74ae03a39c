"""Functions of a logit, and of a row's (row_max, row_sum): softcap, scale, label smoothing's terms, logsumexp."""

from __future__ import annotations

import triton
import triton.language as tl

from .numerics import HIGHEST, LOG2E, log, short_log

# tanh(u) = u + u*(TANH_3*u^2 + ... + TANH_9*u^8) for |u| < 0.5, within 1.5e-8 of itself
TANH_3 = tl.constexpr(-0.33333143890895034)
TANH_5 = tl.constexpr(0.1332587884046698)
TANH_7 = tl.constexpr(-0.053045486696590094)
TANH_9 = tl.constexpr(0.01724147638485393)

# the sums of label smoothing are in units of 2^32: a sum of numbers near the largest float32 must not overflow before
# another sum is subtracted from it
SMOOTH_UNIT = tl.constexpr(2.0**-32)


@triton.jit
def capped_with_slope(x, cap):
    """(cap*tanh(x/cap), its derivative 1 - tanh(x/cap)^2) of x in float32, to a few roundings for every cap.

    With u = x/cap, 1 - tanh(|u|) = 2/(exp(2|u|) + 1) = q, and the derivative is q*(2 - q), which keeps its digits where
    tanh is nearly 1. Near 0 that form of tanh cancels, so tanh(u) = u + u*r with r = u^2*P(u^2) is used. The result is
    then x + x*r, which tends to x for a large cap. -inf stays -inf, because a masked class is not a small one.
    """
    u = x * tl.div_rn(1.0, cap)
    q = 2.0 / (tl.exp2(tl.abs(u) * (2.0 * LOG2E)) + 1.0)
    u2 = u * u
    # few operations, because Triton's cluster planner fails on a kernel with too many
    r = u2 * tl.fma(u2, tl.fma(u2, tl.fma(u2, TANH_9, TANH_7), TANH_5), TANH_3)
    near = tl.abs(u) < 0.5
    far = tl.where(u < 0.0, -cap, cap) * (1.0 - q)
    z = tl.where(near, tl.fma(x, r, x), far)
    t = tl.fma(u, r, u)
    slope = tl.where(near, 1.0 - t * t, q * (2.0 - q))
    return tl.where(x == -float("inf"), x, z), slope


@triton.jit
def capped(x, cap, SOFTCAP: tl.constexpr):
    """x in float32, or cap*tanh(x/cap) where there is a cap."""
    x = x.to(tl.float32)
    if SOFTCAP:
        x, _ = capped_with_slope(x, cap)
    return x


@triton.jit
def logit(x, scale, cap, SCALED: tl.constexpr, SOFTCAP: tl.constexpr):
    """The softmax's input for a raw logit, in float32.

    The product is rounded before anything is subtracted from it. As one multiply-add, x*scale - m is not 0 where
    x*scale rounds to m; for numbers near the largest float32 it is far from 0.
    """
    x = capped(x, cap, SOFTCAP)
    if SCALED:
        x = tl.fma(x, scale, 0.0)
    return x


@triton.jit
def reference_of(z):
    """The reference of the sum of smoothed logits, in units: one of them, or 0 if it is infinite.

    A sum of z without a reference loses the digits of z - lse where all logits are large.
    """
    return tl.where(tl.abs(z) <= HIGHEST, z, 0.0) * SMOOTH_UNIT


@triton.jit
def probe(to_first, to_next, n_cols, exists, weight_facts_ptr, WEIGHTED: tl.constexpr):
    """The raw logit in float32 that `reference_of` takes before a row's maximum is known: the largest of three.

    A hidden class has a logit far below the others, and a reference down there leaves few digits of their differences.
    So the first, the middle and the last one are tried; where WEIGHTED, a class of the largest weight in place of the
    first. If that one is hidden too, its term is part of the loss. The rounding is then up to a few 1e-3 of the loss in
    rows of 100,000 columns.

    # to_first: pointers to the first logit of each row; to_next: elements from a logit of a row to the next one
    """
    last = tl.cast(n_cols - 1, tl.int64)
    if WEIGHTED:
        heaviest = tl.minimum(tl.maximum(tl.load(weight_facts_ptr + 1).to(tl.int64), 0), last)
        x = tl.load(to_first + heaviest * to_next, mask=exists, other=0.0)
    else:
        x = tl.load(to_first, mask=exists, other=0.0)
    middle = tl.load(to_first + last // 2 * to_next, mask=exists, other=0.0)
    end = tl.load(to_first + last * to_next, mask=exists, other=0.0)
    return tl.maximum(tl.maximum(x.to(tl.float32), middle.to(tl.float32)), end.to(tl.float32))


@triton.jit
def weigh(z, reference, at, mask, w_ptr, WEIGHTED: tl.constexpr):
    """w*(z - reference) of a tile in units of SMOOTH_UNIT, 0 where `mask` is not set."""
    z = tl.fma(z, SMOOTH_UNIT, -reference)
    if WEIGHTED:
        w = tl.load(w_ptr + at, mask=mask, other=0.0)
        return tl.where(mask, w * z, 0.0)
    else:
        return tl.where(mask, z, 0.0)


@triton.jit
def log_of_sum(row_sum, SHORT: tl.constexpr):
    """log(row_sum). SHORT: in few instructions, for threads that have few elements of each sum."""
    if SHORT:
        return short_log(row_sum)
    else:
        return log(row_sum)


@triton.jit
def logsumexp(row_max, row_sum, SHORT: tl.constexpr = False):
    """row_max + log(row_sum), or -inf for an empty sum."""
    lse = row_max + log_of_sum(row_sum, SHORT)
    if SHORT:  # -inf already
        return lse
    else:
        return tl.where(row_sum == 0.0, -float("inf"), lse)


@triton.jit
def rounding_residual(lse, row_max, row_sum, SHORT: tl.constexpr = False):
    """The rounding residual of lse = row_max + log(row_sum): (lse - z) + residual has the digits that lse lost.

    lse rounds more, the larger the logits are.
    """
    return log_of_sum(row_sum, SHORT) - (lse - row_max)
