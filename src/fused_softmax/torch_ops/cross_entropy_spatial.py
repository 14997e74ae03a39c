"""cross_entropy of logits (N, C, d1, ...) as they lie: autograd over their kernels.

Where a gradient is needed and the loss is a mean or a sum, the forward writes it in the pass that reads the logits, for
an upstream gradient of 1. Backward computes it again where another one came. Logits are copied only where they fold
neither to planes nor to rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..launch import cross_entropy_spatial as kernels
from ..launch.availability import KernelUnavailable
from ..launch.context import is_batch_invariant
from ..launch.cross_entropy_gradient import restored_loss, scaled_in_place
from ..launch.layout import DTYPE_NAMES, restored, rows_of
from ..launch.options import CrossEntropy
from ..launch.torch_private import profiling
from ..planning.types import Plan
from . import decompositions
from .outputs import is_its_own
from .route import AS_THEY_LIE, can_bypass_dispatcher, recorded


def as_it_lies(logits: Tensor, op: CrossEntropy, inplace: bool) -> Tensor | None:
    """The loss, as `op` reduces it, of logits (N, C, d1, ...): a scalar, or (N*d1*...,).

    None where a kernel does not compile, and where logits fold to rows.
    """
    x = kernels.planes_of(logits)
    if (x is None or x.dim() > 3) and kernels.plan_of_copy(logits) is not None:
        logits = logits.contiguous()
        x = kernels.planes_of(logits)
    if x is None:
        return None
    try:
        return recorded("cross_entropy", _apply, logits, op, inplace) if profiling() else _apply(logits, op, inplace)
    except KernelUnavailable:
        return None


def planned_as_it_lies(logits: Tensor) -> Plan | None:
    """The plan of a mean with default options; None as `as_it_lies`."""
    plan = kernels.plan_of_copy(logits)
    if plan is not None:
        return plan.after_copy
    x = kernels.planes_of(logits)
    return None if x is None else kernels.loss_plan(x, None, is_batch_invariant())


def _apply(logits: Tensor, op: CrossEntropy, inplace: bool) -> Tensor:
    if logits.requires_grad and torch.is_grad_enabled():
        return SpatialCrossEntropy.apply(logits, op, inplace and is_its_own(logits))
    return kernels.cross_entropy_pass(_planes(logits), None, op)[0]


def _planes(t: Tensor) -> Tensor:
    x = kernels.planes_of(t)
    assert x is not None
    return x


class SpatialCrossEntropy(torch.autograd.Function):
    """Cross-entropy of logits (N, C, d1, ...) that need a gradient. Keeps the logits, and the gradient that the forward
    wrote, by save_for_backward, where checkpointing and offloading see them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, op: CrossEntropy, inplace: bool) -> Tensor:
        inplace = inplace and op.reduction != "none"
        dx = None
        if op.reduction != "none":
            dx = logits.detach() if inplace else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        loss, kept = kernels.cross_entropy_pass(_planes(logits), None if dx is None else _planes(dx), op)
        if inplace:
            torch.autograd.graph.increment_version(logits)
        target, weight, weight_facts, *options, denominator = op
        ctx.save_for_backward(None if inplace else logits, target, weight, weight_facts, kept, denominator, dx)
        # batch invariance too: backward runs in a thread that does not know
        ctx.described = options, inplace, is_batch_invariant()
        ctx.unread = [dx is not None]  # popped by the backward that gives away what the forward wrote
        ctx.set_materialize_grads(False)
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, None, None]:
        if g is None:
            return None, None, None
        logits, target, weight, weight_facts, kept, denominator, written = ctx.saved_tensors
        options, inplace, invariant = ctx.described
        kept = restored(kept, torch.float32)
        op = restored_loss(CrossEntropy(target, weight, weight_facts, *options, denominator))  # type: ignore[call-arg]
        if torch.is_grad_enabled() or not can_bypass_dispatcher(g):
            if logits is None:
                raise RuntimeError(decompositions.OVERWRITTEN)
            return _by_torch(g, logits, op), None, None
        unread = bool(ctx.unread) and ctx.unread.pop()
        upstream = g if g.dtype is torch.float32 and g.is_contiguous() else g.float().contiguous()
        if inplace:
            if not unread:
                raise RuntimeError(decompositions.OVERWRITTEN)
            return scaled_in_place(written, upstream), None, None  # the logits are gone
        # The first backward gives away what the forward wrote, with a version counter of its own: a change in place
        # does not disturb what is saved. Nothing reads the saved one again.
        dx = written.data if unread else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        x, dx_planes = kernels.planes_of(logits), kernels.planes_of(dx)
        other_dtype = logits.dtype not in DTYPE_NAMES or dx.dtype not in DTYPE_NAMES
        if x is None or dx_planes is None or dx_planes.dim() > 3 or other_dtype:  # no kernel writes a cropped gradient
            return _by_torch(g, logits, op), None, None  # a hook of saved tensors gave them back otherwise
        try:
            if written is not None and not unread:
                # a further one runs the forward's kernel again, so that its bits are those of the first
                _, kept = kernels.cross_entropy_pass(x, dx_planes, op, invariant)
            kernels.cross_entropy_gradient(
                x, dx_planes, op, kept, upstream.view(-1), unless_one=written is not None, invariant=invariant
            )
        except KernelUnavailable:
            dx = _by_torch(g, logits, op)
        return dx, None, None


def _by_torch(g: Tensor, logits: Tensor, op: CrossEntropy) -> Tensor:
    """The gradient by a decomposition, over rows; it can be differentiated again."""
    moved = logits.movedim(1, -1)
    rows = decompositions.cross_entropy_gradient(g.reshape(-1), rows_of(moved, logits.shape[1]), op)
    return rows.reshape(moved.shape).movedim(-1, 1)


AS_THEY_LIE["cross_entropy"] = planned_as_it_lies
