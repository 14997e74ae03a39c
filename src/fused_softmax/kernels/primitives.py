"""The mathematics every kernel shares: a row's exponentials, and how two parts of a row are merged.

A part of a row is summed up by two numbers, (row_max, row_sum) with row_sum = sum(exp(x - row_max)), and two parts
merge to a third (online softmax, Milakov and Gimelshein 2018, arXiv:1805.02867):

    m = max(m_a, m_b);  s = s_a*exp(m_a - m) + s_b*exp(m_b - m)

row_max is floored at the lowest finite float32, so that a part with no column of the row, or with nothing but -inf,
adds exactly nothing: exp(-inf - LOWEST) = 0. A row of nothing but -inf then has row_sum 0 and comes out as 0/0 = NaN;
+inf gives inf - inf = NaN, and NaN spreads through the sum. That is torch's behaviour, with no branch.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)
HIGHEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def exp(x):
    """exp(x) as the one instruction the hardware has for it, 2**(x*log2(e)). x is a difference to a row's maximum."""
    return tl.exp2(x * LOG2E)


@triton.jit
def log(x):
    """log(x) from the hardware's base-2 logarithm."""
    return tl.log2(x) * LN2


@triton.jit
def shift_moments(m, s, t, m_new):
    """(m, s, t) with s = sum(exp(x - m)) and t = sum(exp(x - m)*(x - m)), as seen from m_new >= m.

    exp(x - m_new)*(x - m_new) = exp(m - m_new)*(exp(x - m)*(x - m) + exp(x - m)*(m - m_new)). The difference is
    floored, so that a part which counts nothing, or far less than float32 can tell, adds 0 and not 0*(-inf).
    """
    by = exp(m - m_new)
    s = s * by
    return m_new, s, t * by + s * tl.maximum(m - m_new, LOWEST)


@triton.jit
def opaque(x, PTX: tl.constexpr):
    """x, with its origin hidden from the optimiser.

    exp(x) is cheaper to compute twice than to keep: the row stays in registers as 16-bit numbers, more programs fit on
    a multiprocessor, and more bytes are in flight. Unhidden, the compiler would convert once and keep the float32
    numbers; a float32 row needs no hiding.
    """
    if PTX and x.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    else:
        return x
