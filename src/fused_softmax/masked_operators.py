"""masked_softmax as a PyTorch operator, fused_softmax::masked_softmax, for torch.compile; and its gradients.

Here belong schema, kernel, fake kernel and autograd; masked.MaskedSoftmax, the same for a plain tensor with no
dispatcher between, shares `remember` and `gradients`. Empty scores, more rows than the kernels count, scales that the
kernels do not take, and devices that have none take the formulas inside the operator, as only real tensors tell.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from . import loss_formulas, masked_rows, rows
from .operators import define, library, not_differentiable, other_device_error, widened

# (dx, the mask's, then nothing for scale, causal and zero)
Gradients = tuple[Tensor | None, Tensor | None, None, None, None]


def _forward_kernel(x: Tensor, mask: Tensor | None, scale: float, causal: bool, zero: bool) -> Tensor:
    if masked_rows.takes(x) and masked_rows.scales_by(scale):
        if mask is not None and mask.device != x.device:
            raise other_device_error("mask", mask, "x", x)
        return masked_rows.masked_forward(x, mask, scale, causal, zero)
    return loss_formulas.masked_softmax(x, mask, scale, causal, zero).contiguous()


def _forward_fake(x: Tensor, mask: Tensor | None, scale: float, causal: bool, zero: bool) -> Tensor:
    return x.new_empty(x.shape)


def _backward_kernel(y: Tensor, dy: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    if masked_rows.takes(y) and masked_rows.scales_by(scale):
        if mask is not None and mask.device != y.device:
            raise other_device_error("mask", mask, "y", y)
        return masked_rows.masked_backward(y, dy, mask, scale, causal)
    return loss_formulas.masked_softmax_gradient(y, dy, mask, scale, causal).contiguous()


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


def remember(ctx: Any, y: Tensor, mask: Tensor | None, scale: float, causal: bool) -> None:
    """Keeps for `gradients` what they are made of: the output, and a boolean mask."""
    ctx.save_for_backward(y, mask if mask is not None and mask.dtype is torch.bool else None)
    ctx.scale, ctx.causal, ctx.mask = scale, causal, None if mask is None else (mask.shape, mask.dtype)
    ctx.invariant = rows.is_batch_invariant()  # backward runs in a thread that does not know
    ctx.set_materialize_grads(False)


def gradients(ctx: Any, dy: Tensor | None, kernel: Callable[..., Tensor]) -> Gradients:
    """The gradients of scores and mask by `kernel`, or by the formula where they are differentiated in their turn."""
    if dy is None:
        return None, None, None, None, None
    y, boolean = ctx.saved_tensors
    kernel = loss_formulas.masked_softmax_gradient if torch.is_grad_enabled() else kernel
    # the mask is added to what is scaled already
    scale = 1.0 if ctx.needs_input_grad[1] else ctx.scale
    with rows.batch_invariant() if ctx.invariant else nullcontext():
        dz = kernel(y, dy, boolean, scale, ctx.causal)
    if not ctx.needs_input_grad[1]:
        return dz, None, None, None, None
    dx = None if not ctx.needs_input_grad[0] else dz if ctx.scale == 1.0 else dz * ctx.scale
    shape, dtype = ctx.mask
    d_mask = widened(dz).sum_to_size(shape).to(dtype) if dz.shape != shape else dz.to(dtype)
    return dx, d_mask, None, None, None


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, mask, scale, causal, _ = inputs
    remember(ctx, output, mask, scale, causal)


def _gradients(ctx: Any, dy: Tensor | None) -> Gradients:
    return gradients(ctx, dy, masked_softmax_backward)


torch.library.register_autograd("fused_softmax::masked_softmax", _gradients, setup_context=_save, lib=library)
not_differentiable("masked_softmax_backward")
