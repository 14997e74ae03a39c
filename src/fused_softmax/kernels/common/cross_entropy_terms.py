"""The shared parts of the cross-entropy kernels: a row's target, its loss, and its gradient.

The formulas are those of `cross_entropy` (the loss) and `cross_entropy_backward` (dx, and its factors A, B and C).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .logits import SMOOTH_UNIT, capped_with_slope
from .numerics import exp2_fma, upcast


@triton.jit
def target_of(row, n_rows, target_ptr, ignore_index, n_classes):
    """(target, whether the row counts). A target outside the classes does not count, and `assert_inside` reports it."""
    target = tl.load(target_ptr + row, mask=row < n_rows, other=ignore_index)
    return target, (target != ignore_index) & (target >= 0) & (target < n_classes)


@triton.jit
def assert_inside(target, ignore_index, n_classes):
    """Asserts on the device, as torch does, that targets are inside the classes. All warps wait for it."""
    inside = (target == ignore_index) | ((target >= 0) & (target < n_classes))
    tl.device_assert(inside, "fused_softmax.cross_entropy: target out of bounds")


@triton.jit
def class_of(target, ignore_index, n_cols):
    """The target in int32, or -1 where it does not count."""
    return tl.where((target != ignore_index) & (target >= 0) & (target < n_cols), target, -1).to(tl.int32)


@triton.jit
def targets_at(at, mask, ignore_index, n_cols):
    """The targets in int32, -1 where one does not count. at: of int64, or as `prepare_spatial_targets` writes them."""
    if at.dtype.element_ty != tl.int64:
        return tl.load(at, mask=mask, other=-1).to(tl.int32)
    else:
        target = tl.load(at, mask=mask, other=ignore_index)
        assert_inside(target, ignore_index, n_cols)
        return class_of(target, ignore_index, n_cols)


@triton.jit
def weights_of(
    target, counts, n_cols, weight_ptr, weight_facts_ptr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr
):  # fmt: skip
    """(the targets' weights, the sum of all classes' weights where SMOOTH)."""
    w_target = 1.0
    if WEIGHTED:
        w_target = tl.load(weight_ptr + target, mask=counts, other=0.0)
    w_sum = n_cols
    if WEIGHTED and SMOOTH:
        w_sum = tl.load(weight_facts_ptr)
    return w_target, w_sum


@triton.jit
def sum_of_losses(loss, count_ptr, MEAN: tl.constexpr):
    """As `reduced_losses`, with the denominator in memory."""
    count = 1.0
    if MEAN:
        count = tl.load(count_ptr)
    return reduced_losses(loss, count, MEAN)


@triton.jit
def reduced_losses(loss, count, MEAN: tl.constexpr):
    """This program's losses, added up; where MEAN, over `count`."""
    total = tl.sum(tl.reshape(loss, (loss.numel,)), 0)
    if MEAN:  # torch divides each term of a loss by 0, and one of them is 0/0
        total = tl.where(count == 0.0, float("nan"), tl.div_rn(total, count))
    return total


@triton.jit
def store_moments(moments_ptr, row, row_max, row_sum, mask):
    """Stores (row_max, row_sum) for backward, exactly. An infinite row_sum, of a row with +inf, becomes NaN."""
    tl.store(moments_ptr + 2 * row, row_max, mask=mask)
    tl.store(moments_ptr + 2 * row + 1, tl.where(row_sum == float("inf"), float("nan"), row_sum), mask=mask)


@triton.jit
def row_loss(
    nll, lse, residual, w_target, w_sum, wz_sum, reference, smoothing, n_classes, z_loss, SMOOTH: tl.constexpr,
    SHORT: tl.constexpr = False,
):  # fmt: skip
    """One row's loss, by the formula of `cross_entropy`. nll is lse - z_t. SHORT: as of `log_of_sum`."""
    loss = w_target * nll
    if SMOOTH:
        above = (tl.fma(lse, SMOOTH_UNIT, -reference) + residual * SMOOTH_UNIT) * w_sum
        spread = (above - wz_sum) * (1.0 / SMOOTH_UNIT)
        loss = (1.0 - smoothing) * loss + smoothing / n_classes * spread
    # a factor of 0 must not turn an infinite lse into NaN
    if SHORT:
        lse = tl.where(z_loss != 0.0, lse, 0.0)
        return loss + z_loss * lse * lse
    else:
        return loss + tl.where(z_loss != 0.0, z_loss * lse * lse, 0.0)


@triton.jit
def coefficients(
    g, lse, w_target, w_sum, smoothing, n_classes, z_loss, SMOOTH: tl.constexpr, SHORT: tl.constexpr = False
):
    """(A, B, C) of the formula of `cross_entropy_backward`, times the upstream gradient. SHORT: as of `log_of_sum`."""
    b = w_target * g
    a = b
    c = 0.0 * g
    if SMOOTH:
        c = smoothing / n_classes * g
        b = (1.0 - smoothing) * b
        a = b + c * w_sum
    if SHORT:
        a += tl.where(z_loss != 0.0, 2.0 * z_loss * g, 0.0) * tl.where(z_loss != 0.0, lse, 0.0)
    else:
        a += tl.where(z_loss != 0.0, 2.0 * z_loss * lse * g, 0.0)
    return a, b, c


@triton.jit
def kept_or_zero(keep):
    """What `upcast_kept` keeps or zeroes an element by, int32: a permutation, and a mask of the upper half."""
    return tl.where(keep, -61372, 0x4444)  # 0xFFFF1044: bytes (0, 0, 1st, 2nd); 0x4444: four bytes of 0


@triton.jit
def upcast_kept(x, selector, PTX: tl.constexpr):
    """x in float32, or 0 where `selector` says so, whatever x holds. A bfloat16 takes one instruction, as `upcast`'s.

    The compiler converts again here, and does not hold the float32 numbers of a first `upcast`.
    """
    if PTX and x.dtype == tl.bfloat16:
        ASM: tl.constexpr = (
            "prmt.b32 $0, $2, 0, $3; {.reg .b32 upper; and.b32 upper, $2, 0xffff0000; and.b32 $1, upper, $4;}"
        )
        x, selector = tl.broadcast(x, selector)
        return tl.inline_asm_elementwise(ASM, "=r,=r,r,r,r", [x, selector], dtype=tl.float32, is_pure=False, pack=2)
    else:
        return tl.where(selector < 0, upcast(x, PTX, True, True), 0.0)


@triton.jit
def cross_entropy_term(
    x, b, at, base, shift, a, c, w_ptr, cap, mask,
    WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """dx of a tile x in float32 at columns `at`.

    b is 0, except at the target. a, b and c include g and the correction of `exp2_affine`.
    """
    z, slope = x, 1.0
    if SOFTCAP:
        z, slope = capped_with_slope(x, cap)
    e = exp2_fma(z, base, shift, FUSED)
    return gradient_of(e, slope, x, b, at, a, c, w_ptr, mask, WEIGHTED, SMOOTH, SOFTCAP)


@triton.jit
def gradient_of(
    e, slope, x, b, at, a, c, w_ptr, mask, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr
):
    """`cross_entropy_term` of the exponentials e. slope, x: of `capped_with_slope`, used only where SOFTCAP."""
    dz = e * a - b
    if SMOOTH:
        if WEIGHTED:
            dz -= c * tl.load(w_ptr + at, mask=mask, other=0.0)
        else:
            dz -= c
    if SOFTCAP:
        dz *= slope
        dz = tl.where(x == -float("inf"), 0.0, dz)
    return dz


@triton.jit
def store_head_tail_gradient(
    dx_row, x, at, in_head_tail, target, counts, b, base, shift, a, c, w_ptr, cap,
    WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Writes dx of a row's head and tail. They are so few that each is compared with the target.

    # x, at, in_head_tail: [SEGMENTS, VECTORS]; target: from the row's first aligned column, as `at`
    """
    b_head_tail = tl.where(at == target, b, 0.0)
    dx = cross_entropy_term(
        x.to(tl.float32), b_head_tail, at, base, shift, a, c, w_ptr, cap, in_head_tail, WEIGHTED, SMOOTH, SOFTCAP, FUSED
    )
    tl.store(dx_row + at, tl.where(counts, dx, 0.0).to(dx_row.dtype.element_ty), mask=in_head_tail)


@triton.jit
def store_target(
    at, dx, target, width, wanted,
    VECTORS: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr, WARPS_PER_ROW: tl.constexpr = 1,
):  # fmt: skip
    """Overwrites the target's dx, where `wanted` and the target lies in the segment.  # all [SEGMENTS, 1]

    target: from the segment's first column, whose address is `at`. The thread that holds the column's vector writes it,
    after a barrier of its CTA, so that this write comes after the segment's own.
    """
    CHUNK: tl.constexpr = WARPS_PER_ROW * VECTORS * VEC  # columns from one chunk of a segment to its next
    inside = wanted & (target >= 0) & (target < tl.minimum(width, CHUNKS * CHUNK))
    vector = tl.where(inside, target % CHUNK // VEC, -1)  # in another segment: VECTORS or more
    owns = vector == tl.arange(0, VECTORS)[None, :]
    tl.debug_barrier()
    tl.store(at + target + tl.zeros_like(owns.to(tl.int32)), dx.to(at.dtype.element_ty), mask=owns)
