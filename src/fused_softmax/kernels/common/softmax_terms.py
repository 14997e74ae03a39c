"""The last formulas of softmax, log_softmax and their gradients, which every regime's kernel evaluates.

y = exp(x - m) / s     or   y = (x - m) - log(s)
dx = y*(dy - d), d = sum(y*dy)     or   dx = dy - exp(y)*d, d = sum(dy)
"""

from __future__ import annotations

import triton
import triton.language as tl

from .numerics import exp, log, rounded_product


@triton.jit
def normalize(x, row_max, row_sum, LOG: tl.constexpr):
    """The forward's last formula, in float32. The arguments broadcast."""
    if LOG:
        return (x - row_max) - log(row_sum)
    else:
        return exp(x - row_max) * tl.div_rn(1.0, row_sum)


@triton.jit
def gradient_term(y, dy, LOG: tl.constexpr, ROUNDED: tl.constexpr = False):
    """One term of the row's sum d, in float32. ROUNDED: before a sum over lanes."""
    if LOG:
        return dy.to(tl.float32)
    elif ROUNDED:
        return rounded_product(y.to(tl.float32), dy.to(tl.float32))
    else:
        return y.to(tl.float32) * dy.to(tl.float32)


@triton.jit
def gradient(y, dy, d, LOG: tl.constexpr):
    """The backward's last formula, in float32. The arguments broadcast."""
    if LOG:
        return dy.to(tl.float32) - exp(y.to(tl.float32)) * d
    else:
        return y.to(tl.float32) * (dy.to(tl.float32) - d)
