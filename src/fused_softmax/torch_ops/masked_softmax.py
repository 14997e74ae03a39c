"""masked_softmax as PyTorch sees it: the routes of a call, the operator and its autograd.

    y = softmax(scale*x + mask);  dx = scale * y * (dy - sum(dy * y))

MaskedSoftmax is the operator's autograd for plain tensors, with no dispatcher in between. Empty scores, more rows than
the kernels count, scales that the kernels do not take, and devices that have none take the decompositions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..launch.availability import KernelUnavailable
from ..launch.context import as_in_forward, is_batch_invariant
from ..launch.launcher import planned
from ..launch.masked_softmax import masked_backward, masked_forward, planned_backward, planned_forward
from ..launch.softmax import softmax_backward, softmax_op
from ..launch.torch_private import function_apply, profiling
from . import decompositions
from .arguments import expect_floating, expect_layout, other_device_error
from .decompositions import widened
from .library import define, differentiable, not_differentiable
from .route import (
    EMPTY,
    Answer,
    can_bypass_dispatcher,
    is_compiled,
    is_supported,
    planned_by,
    recorded,
    unsupported_reason,
)

# the kernels count rows in 32 bits
MAX_ROWS = 2**31
_MASK_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# (dx, the mask's, then nothing for scale, causal and zero)
Gradients = tuple[Tensor | None, Tensor | None, None, None, None]


def masked_softmax_of(x: Tensor, mask: Tensor | None, scale: float, causal: bool, zero: bool) -> Tensor:
    """masked_softmax of checked arguments. zero: rows that see nothing are 0, not NaN."""
    takes = takes_scale(scale)
    if mask is not None:
        takes = takes and mask.device == x.device and (mask.dtype is torch.bool or mask.dtype in _MASK_DTYPES)
    if takes and can_bypass_dispatcher(x) and (mask is None or can_bypass_dispatcher(mask)) and _takes(x):
        if profiling():
            return recorded("masked_softmax", _apply, x, mask, float(scale), causal, zero)
        return _apply(x, mask, float(scale), causal, zero)
    if takes and x.dim() and is_compiled(x, mask):
        return masked_softmax(x, mask, float(scale), causal, zero)
    return decompositions.masked_softmax(x, mask, scale, causal, zero)


def _apply(x: Tensor, mask: Tensor | None, scale: float, causal: bool, zero: bool) -> Tensor:
    if (x.requires_grad or (mask is not None and mask.requires_grad)) and torch.is_grad_enabled():
        return _masked_softmax(x, mask, (scale, causal, zero))
    return _forward(x, mask, scale, causal, zero)


def planned_masked_softmax(x: Tensor, mask: Tensor | None, backward: bool, causal: bool) -> Answer:
    """What masked_softmax of x with this mask would run, or its gradient."""
    expect_floating("masked_softmax", "x", x)
    reason = unsupported_reason(x, x.dtype)
    if reason is not None:
        return reason
    if x.dim() == 0 or x.numel() == 0:
        return "a tensor of no dimensions is PyTorch's" if x.dim() == 0 else EMPTY
    if not _takes(x):
        return f"more than {MAX_ROWS - 1} rows are PyTorch's"
    if mask is not None and mask.dtype is not torch.bool and mask.dtype not in _MASK_DTYPES:
        return f"a mask of {mask.dtype} is PyTorch's"
    plan = planned_backward(x, mask, causal) if backward else planned_forward(x, mask, causal)
    if plan is None:  # softmax's own gradient takes such rows
        op, flags = softmax_op(log=False, backward=True)
        rows = (torch.empty((x.numel() // x.shape[-1], x.shape[-1]), dtype=x.dtype, device="meta"),) * 3
        return planned(op, rows, (), flags, x)
    return plan


def _takes(x: Tensor) -> bool:
    """Whether the kernels take scores x, (..., n_cols)."""
    return x.dim() > 0 and is_supported(x) and x.numel() // x.shape[-1] < MAX_ROWS


def takes_scale(scale: float) -> bool:
    """Whether the kernels take this scale: above 0, as the largest x is taken for the largest score, and normal in
    float32, which has no digits for others."""
    limits = torch.finfo(torch.float32)
    return limits.tiny <= scale <= limits.max


def _forward(x: Tensor, mask: Tensor | None, scale: float, causal: bool, zero: bool) -> Tensor:
    try:
        return masked_forward(x, mask, scale, causal, zero)
    except KernelUnavailable:
        return decompositions.masked_softmax(x, mask, scale, causal, zero).contiguous()


def _backward(y: Tensor, dy: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    try:
        dx = masked_backward(y, dy, mask, scale, causal)
        if dx is None:  # rows that do not fit on chip
            dx = softmax_backward(dy.to(y.dtype), y, -1, y.dtype, False)
            dx = decompositions.hide_gradient(dx, mask, causal)
            dx = dx if scale == 1.0 else dx.mul_(scale)
        return dx
    except KernelUnavailable:
        return decompositions.masked_softmax_gradient(y, dy, mask, scale, causal).contiguous()


class MaskedSoftmax(torch.autograd.Function):
    """Keeps the output, and a boolean mask, which is the caller's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor | None, options: tuple[float, bool, bool]) -> Tensor:
        scale, causal, zero = options
        y = _forward(x, mask, scale, causal, zero)
        _save_call(ctx, y, mask, scale, causal)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        plain = dy is not None and can_bypass_dispatcher(dy)
        dx, d_mask, *_ = _gradients(ctx, dy, _backward if plain else decompositions.masked_softmax_gradient)
        return dx, d_mask, None


_masked_softmax = function_apply(MaskedSoftmax)


# --- the operator ----------------------------------------------------------------------------------------------------


def _forward_kernel(x: Tensor, mask: Tensor | None, scale: float, causal: bool, zero: bool) -> Tensor:
    if _takes(x) and takes_scale(scale):
        if mask is not None and mask.device != x.device:
            raise other_device_error("mask", mask, "x", x)
        return _forward(x, mask, scale, causal, zero)
    return decompositions.masked_softmax(x, mask, scale, causal, zero).contiguous()


def _forward_fake(x: Tensor, mask: Tensor | None, scale: float, causal: bool, zero: bool) -> Tensor:
    return x.new_empty(x.shape)


def _backward_kernel(y: Tensor, dy: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    if _takes(y) and takes_scale(scale):
        expect_layout("dy", dy, y, y.shape)
        if mask is not None and mask.device != y.device:
            raise other_device_error("mask", mask, "y", y)
        return _backward(y, dy, mask, scale, causal)
    return decompositions.masked_softmax_gradient(y, dy, mask, scale, causal).contiguous()


def _backward_fake(y: Tensor, dy: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    return y.new_empty(y.shape)


masked_softmax = define(
    "masked_softmax(Tensor x, Tensor? mask, float scale, bool causal, bool zero) -> Tensor",
    _forward_kernel,
    _forward_fake,
)
masked_softmax_backward = define(
    "masked_softmax_backward(Tensor y, Tensor dy, Tensor? mask, float scale, bool causal) -> Tensor",
    _backward_kernel,
    _backward_fake,
)


def _save_call(ctx: Any, y: Tensor, mask: Tensor | None, scale: float, causal: bool) -> None:
    """Saves the inputs of `gradients`: the output, and a boolean mask."""
    ctx.save_for_backward(y, mask if mask is not None and mask.dtype is torch.bool else None)
    ctx.scale, ctx.causal, ctx.mask = scale, causal, None if mask is None else (mask.shape, mask.dtype)
    ctx.invariant = is_batch_invariant()  # backward runs in a thread that does not know
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, kernel: Callable[..., Tensor]) -> Gradients:
    """The gradients of scores and mask by `kernel`, or by the formula where they are differentiated in their turn."""
    if dy is None:
        return None, None, None, None, None
    y, boolean = ctx.saved_tensors
    kernel = decompositions.masked_softmax_gradient if torch.is_grad_enabled() else kernel
    # the mask is added after the scale
    scale = 1.0 if ctx.needs_input_grad[1] else ctx.scale
    with as_in_forward(ctx.invariant):
        dz = kernel(y, dy, boolean, scale, ctx.causal)
    if not ctx.needs_input_grad[1]:
        return dz, None, None, None, None
    dx = None if not ctx.needs_input_grad[0] else dz if ctx.scale == 1.0 else dz * ctx.scale
    shape, dtype = ctx.mask
    d_mask = widened(dz).sum_to_size(shape).to(dtype) if dz.shape != shape else dz.to(dtype)
    return dx, d_mask, None, None, None


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, mask, scale, causal, _ = inputs
    _save_call(ctx, output, mask, scale, causal)


def _gradients_by_operator(ctx: Any, dy: Tensor | None) -> Gradients:
    return _gradients(ctx, dy, masked_softmax_backward)


differentiable("masked_softmax", _gradients_by_operator, _save, decompositions.masked_softmax)
not_differentiable("masked_softmax_backward", decompositions.masked_softmax_gradient)
planned_by("masked_softmax", lambda asked: planned_masked_softmax(asked.x, asked.mask, asked.backward, asked.causal))
