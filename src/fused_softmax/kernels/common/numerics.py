"""The mathematics that all kernels share: a row's exponentials, and how two parts of a row are merged.

Two numbers describe any part of a row: (row_max, row_sum) with row_sum = sum(exp(x - row_max)). Two parts merge into
one (online softmax, Milakov and Gimelshein 2018, arXiv:1805.02867):

    m = max(m_a, m_b);  s = s_a*exp(m_a - m) + s_b*exp(m_b - m)

row_max is at least the lowest finite float32. So a part without a column, or a part of -inf only, adds exactly 0:
exp(-inf - LOWEST) = 0. A row of -inf only has row_sum 0 and becomes 0/0 = NaN. +inf gives inf - inf = NaN, and NaN
spreads through the sum. This is torch's behavior, without a branch.
"""

from __future__ import annotations

import re

import triton
import triton.language as tl

TRITON = tuple(int(n) for n in re.findall(r"\d+", triton.__version__)[:2])  # (major, minor)
# From 3.8 on, Triton reduces a thread's own elements as a tree. Earlier versions reduce them one by one, so
# `columns_of` gains nothing. 3.8 has no layout on a cluster for `columns_of`
_TREES = tl.constexpr(TRITON >= (3, 8))
_TREES_ON_CLUSTERS = tl.constexpr(TRITON >= (3, 9))
# whether a row's gradient converts bfloat16 in two ways (`upcast`). With Triton 3.6 it has the registers that its plans
# were measured with: 0.992 of an add on average over 16 widths, 0.987 with the second way
GRADIENT_CONVERTS_TWICE = tl.constexpr(TRITON >= (3, 7))
# reduces as a tree on clusters too, which takes more registers
TREES_ALWAYS = tl.constexpr(_TREES.value and not _TREES_ON_CLUSTERS.value)
LOG2E = tl.constexpr(1.4426950408889634)
PTX_LOG2E = "0f3FB8AA3B"  # as PTX writes a float32
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)
HIGHEST = tl.constexpr(3.4028234663852886e38)
SMALLEST = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32


@triton.jit
def exp(x):
    """exp(x) as the hardware's one instruction, 2**(x*log2(e)). x is a difference to a row's maximum."""
    return tl.exp2(x * LOG2E)


@triton.jit
def log(x):
    """log(x) from `tl.log2`."""
    return tl.log2(x) * LN2


@triton.jit
def short_log(x):
    """log(x) of x >= 0, to 1.05 units in the last place; -inf below SMALLEST. For threads that take many of them.

    x = 2^k*(1 + f) with |f| <= 1/3, and log(1 + f) is f + f^2*P(f). This takes 20 instructions, and `tl.log2` 37. A
    loss over few classes has one for each few columns.
    """
    bits = x.to(tl.int32, bitcast=True)
    k = (bits - 0x3F2AAAAB) & -0x800000  # k*2^23, where 0x3F2AAAAB is 2/3
    f = (bits - k).to(tl.float32, bitcast=True) - 1.0
    p = tl.fma(f, 0.14026251435279846, -0.1538855880498886)
    p = tl.fma(f, p, 0.13995827734470367)
    p = tl.fma(f, p, -0.16415956616401672)
    p = tl.fma(f, p, 0.20011167228221893)
    p = tl.fma(f, p, -0.2500782012939453)
    p = tl.fma(f, p, 0.33333197236061096)
    p = tl.fma(f, p, -0.49999937415122986)
    y = tl.fma(k.to(tl.float32), LN2 / 8388608.0, tl.fma(f * f, p, f))
    return tl.where(x < SMALLEST, -float("inf"), tl.where(x < float("inf"), y, x))


@triton.jit
def columns_of(x):
    """The elements of each vector in order, one tensor each.  # [SEGMENTS, VECTORS, VEC] -> VEC x [SEGMENTS, VECTORS]

    A thread holds whole vectors, so no data moves.
    """
    SEGMENTS: tl.constexpr = x.shape[0]
    VECTORS: tl.constexpr = x.shape[1]
    if x.shape[2] == 2:
        return tl.split(x)
    elif x.shape[2] == 4:
        even, odd = tl.split(tl.reshape(x, (SEGMENTS, VECTORS, 2, 2)))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        return x0, x1, x2, x3
    else:
        even, odd = tl.split(tl.reshape(x, (SEGMENTS, VECTORS, 2, 2, 2)))
        x04, x26 = tl.split(even)
        x15, x37 = tl.split(odd)
        x0, x4 = tl.split(x04)
        x2, x6 = tl.split(x26)
        x1, x5 = tl.split(x15)
        x3, x7 = tl.split(x37)
        return x0, x1, x2, x3, x4, x5, x6, x7


@triton.constexpr_function
def _in_order(ptx: bool, trees: bool, vec: int) -> bool:
    return ptx and trees and 1 < vec <= 8


@triton.jit
def sum_of_vectors(x, PTX: tl.constexpr, ONE_CTA: tl.constexpr = False):
    """tl.sum(x, 2), one element after the other with every Triton.  # [SEGMENTS, VECTORS, VEC] -> [SEGMENTS, VECTORS]

    ONE_CTA: the launch has no clusters. A tree holds several partial sums, and needs the last element as early as the
    first. With Triton 3.9, online reductions took 73 registers instead of 58, and gradients began to add before their
    last loads were issued.
    """
    if _in_order(PTX, _TREES if ONE_CTA else _TREES_ON_CLUSTERS, x.shape[2]):
        columns = columns_of(x)
        total = columns[0]
        for k in tl.static_range(1, x.shape[2]):
            total += columns[k]
        return total
    else:
        return tl.sum(x, 2)


@triton.jit
def maximum(a, b, PTX: tl.constexpr):
    """The larger of two numbers of any dtype.

    Up to Triton 3.8 tl.maximum takes bfloat16 to float32 first. From 3.9 on the device compares bfloat16, and the
    interpreter, which holds bfloat16 as integers, compares their bits.
    """
    if PTX:
        return tl.maximum(a, b)
    else:
        return tl.maximum(a.to(tl.float32), b.to(tl.float32))


@triton.jit
def max_of_vectors(x, PTX: tl.constexpr, ONE_CTA: tl.constexpr = False):
    """tl.max(x, 2), one element after the other.  # [SEGMENTS, VECTORS, VEC] -> [SEGMENTS, VECTORS]"""
    if _in_order(PTX, _TREES if ONE_CTA else _TREES_ON_CLUSTERS, x.shape[2]):
        columns = columns_of(x)
        top = columns[0]
        for k in tl.static_range(1, x.shape[2]):
            top = tl.maximum(top, columns[k])
        return top
    else:
        return tl.max(x, 2)


@triton.jit
def rounded_product(a, b):
    """a*b, rounded before it enters a sum over lanes.

    Two lanes exchange their products and add. If the compiler fuses a lane's own product with this addition, each lane
    rounds the other's product only. Their sums then differ in the last bit, and so do equal elements of a row. The
    product plus 0 is not a plain product, as -0 + 0 = 0, so it stays an operation of its own.
    """
    return tl.fma(a, b, tl.zeros_like(a))


@triton.constexpr_function
def lies_in_lanes(vec: int, dtype) -> bool:
    """Whether a vector of a row may lie in several lanes, which then exchange what they add up over it.

    A row's address is known to be a multiple of 16 bytes where its vectors are. Triton may give each element of a
    shorter vector a lane of its own.
    """
    return vec > 1 and vec * dtype.primitive_bitwidth < 128


@triton.jit
def rescale_moments(m, s, t, m_new, ROUNDED: tl.constexpr = False):
    """(m, s, t) with s = sum(exp(x - m)) and t = sum(exp(x - m)*(x - m)), rescaled from m to m_new >= m.

    exp(x - m_new)*(x - m_new) = exp(m - m_new)*(exp(x - m)*(x - m) + exp(x - m)*(m - m_new)). The difference is
    floored, so that a part without columns, or one too small for float32, adds 0 and not 0*(-inf). ROUNDED: before a
    sum over lanes.
    """
    by = exp(m - m_new)
    s = rounded_product(s, by) if ROUNDED else s * by
    return m_new, s, t * by + s * tl.maximum(m - m_new, LOWEST)


@triton.jit
def binade(x):
    """The largest power of two that is at most x; x is positive."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


# From here on two numbers of 16 bits differ by so much that exp2 of it is 0, as exp is. Two float32 differ by 128
SCORES_OF_16_BITS = tl.constexpr(2.0**28)
SCORES_OF_32_BITS = tl.constexpr(2.0**30 + 128)


@triton.jit
def exp2_affine(m, FUSED: tl.constexpr, scale=None, LIMIT: tl.constexpr = SCORES_OF_16_BITS):
    """(base, shift, correction) with exp(scale*(x - m)) = exp2_fma(x, base, shift)*correction.

    Each element then takes one multiply-add and one exp2. x and m have 16 bits, or are such numbers times one factor,
    and scale is positive (None: 1). m may also be the row's logsumexp, which rounds to the largest x from 2^28 on. base
    is scale*log2(e). shift is m*base, rounded, and the correction, one number per row, undoes this rounding.

    From scale*m = 2^28 on, exp tells no two 16-bit numbers apart, so base is a power of two and nothing is rounded.
    Below that the rounding error is 2^4 or less, and the correction neither overflows nor vanishes. The result is right
    to one or two roundings of float32, but not exactly 1 where x is m. So use it for results of 16 bits, or for one
    term of many in a sum. LIMIT replaces 2^28 where there is no scale: SCORES_OF_32_BITS for float32 x and m. Where not
    FUSED, x and m are already scaled and of any size, and shift is m.
    """
    if FUSED and scale is None:
        base = tl.where(tl.abs(m) < LIMIT, LOG2E, 1.0)
        shift = m * base
        return base, shift, tl.exp2(-tl.fma(m, base, -shift))
    elif FUSED:
        scale = tl.zeros_like(m) + scale
        small = tl.abs(m) * scale < 268435456.0
        # the product must not overflow either: from 2^64 on, 16-bit numbers differ by 2^56 or more and need no scale
        base = tl.where(small, scale * LOG2E, tl.where(tl.abs(m) < 18446744073709551616.0, binade(scale), 1.0))
        shift = m * base
        return base, shift, tl.where(small, tl.exp2(-tl.fma(m, base, -shift)), 1.0)
    else:
        return tl.zeros_like(m) + LOG2E, m, tl.zeros_like(m) + 1.0


@triton.jit
def exp2_fma(x, base, shift, FUSED: tl.constexpr):
    """exp(scale*(x - m)), without the correction of `exp2_affine`."""
    if FUSED:
        return tl.exp2(tl.fma(x, base, -shift))
    else:
        return exp(x - shift)


@triton.jit
def reciprocal(x, PTX: tl.constexpr):
    """1/x, correctly rounded, for kernels whose threads may have few elements for each quotient.

    `tl.div_rn` takes more instructions. H200, softmax of 2 bfloat16 columns of 20,184 positions, with this, and without
    an exponential of 0: 0.83 of its time. Planes in registers, which have many elements, took 1.04 of theirs.
    """
    if PTX:
        return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.div_rn(1.0, x)


@triton.jit
def reciprocal_of_sum(x, SHORT: tl.constexpr, PTX: tl.constexpr):
    """1/x of a row's sum, which is 1 or more, or makes the row NaN.

    SHORT, only where PTX: the hardware's reciprocal and one step of Newton, all but correctly rounded; 0 and infinity
    give NaN. Else `reciprocal`, which branches to cases that a sum has not: a softmax of 2 bfloat16 columns has 408
    instructions, of 64 columns 1,072, and 264 and 968 with SHORT.
    """
    if SHORT:
        STEP: tl.constexpr = (
            "{.reg .f32 r, n, e; rcp.approx.ftz.f32 r, $1; neg.f32 n, $1; fma.rn.f32 e, n, r, 0f3F800000; "
            "fma.rn.f32 $0, r, e, r;}"
        )
        return tl.inline_asm_elementwise(STEP, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return reciprocal(x, PTX)


@triton.jit
def over_unit(x, unit):
    """x / unit, and exactly 1 where they are equal. `div_rn` calls a function, for which registers are spilled.

    Of the largest number's own term by `exp2_fma`, which is not exactly 1: a sum over it is exact where no other number
    counts, so that a sure prediction has a loss of 0.
    """
    by = reciprocal_of_sum(unit, True, True)
    quotient = x * by
    return tl.fma(tl.fma(-quotient, unit, x), by, quotient)


@triton.jit
def scaled(x, by, PTX: tl.constexpr):
    """x*by, rounded to float32 before any other operation.

    Otherwise the compiler fuses x*by - m into one multiply-add, which is not 0 where x*by rounds to m. For numbers near
    the largest float32, it is far from 0.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, by], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return x * by


@triton.jit
def upcast(x, PTX: tl.constexpr, REMATERIALIZE: tl.constexpr = False, SECOND: tl.constexpr = False):
    """x in float32. REMATERIALIZE: convert again here, even where the compiler has x in float32 already; SECOND: for
    the second time.

    Computing exp(x) twice is cheaper than holding it: the row stays in registers as 16-bit numbers, more programs fit
    on a multiprocessor, and more bytes are in flight. Otherwise the compiler would convert once and hold the float32
    numbers. The assembly also takes one instruction per bfloat16, where the compiler takes three for two of them.
    ptxas converts once, too, where both conversions are the same instruction, so the second is another one. With Triton
    3.6 a loss of 32,000 columns takes 96 registers, and 155 with the same instruction; with 3.9 the gradient of 128,256
    columns takes 48, and 76. A second float16 is negated before and after: both negations become part of the
    instructions next to them.
    """
    if PTX and REMATERIALIZE and SECOND and x.dtype == tl.bfloat16:
        PERMUTE: tl.constexpr = "prmt.b32 $0, $2, 0, 0x1044; prmt.b32 $1, $2, 0, 0x3244;"
        return tl.inline_asm_elementwise(PERMUTE, "=r,=r,r", [x], dtype=tl.float32, is_pure=False, pack=2)
    elif PTX and x.dtype == tl.bfloat16:
        ASM: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        return tl.inline_asm_elementwise(ASM, "=r,=r,r", [x], dtype=tl.float32, is_pure=not REMATERIALIZE, pack=2)
    elif PTX and REMATERIALIZE and SECOND and x.dtype == tl.float16:
        NEGATED: tl.constexpr = (
            "{.reg .b16 a, b; .reg .b32 n; neg.f16x2 n, $2; mov.b32 {a, b}, n; "
            "cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; neg.f32 $0, $0; neg.f32 $1, $1;}"
        )
        return tl.inline_asm_elementwise(NEGATED, "=f,=f,r", [x], dtype=tl.float32, is_pure=False, pack=2)
    elif PTX and REMATERIALIZE and x.dtype == tl.float16:
        HALVES: tl.constexpr = "{.reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;}"
        return tl.inline_asm_elementwise(HALVES, "=f,=f,r", [x], dtype=tl.float32, is_pure=False, pack=2)
    else:
        return x.to(tl.float32)


@triton.jit
def max_of_two(a, b, PTX: tl.constexpr):
    """The maximum of two tiles of one dtype. Two numbers of 16 bits take one instruction, and no float32 of theirs."""
    if PTX and a.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], a.dtype, is_pure=True, pack=2)
    elif PTX and a.dtype == tl.float16:
        return tl.inline_asm_elementwise("max.f16x2 $0, $1, $2;", "=r,r,r", [a, b], a.dtype, is_pure=True, pack=2)
    else:  # in float32: the interpreter of Triton 3.9 compares the bits of two bfloat16
        return tl.maximum(a.to(tl.float32), b.to(tl.float32))


@triton.jit
def copied(x):
    """x, a float32 tile, through an instruction that Triton does not look into; ptxas leaves it out.

    Triton 3.6 moves layouts along every chain of operations of a launch on a cluster, and gives up after 10,000 steps.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
