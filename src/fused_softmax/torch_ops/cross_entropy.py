"""cross_entropy as PyTorch sees it: the routes of a call, the operator and its autograd.

    loss_i = -(1 - eps)*w_t*log p_t - eps/C*sum(w*log p) + z_loss*lse^2,   p = softmax(softcap*tanh(x/softcap))

Where a gradient is needed and the loss is a mean or a sum, the forward writes it in the pass that reads the logits, for
the upstream gradient that came last (`launch/last_upstream.py`), at first 1. If another one arrives, backward writes
the gradient again: one read, one write, no host synchronization, and the same bits. Else, and under torch.compile, the
forward only reads, and a second kernel writes the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..launch import cross_entropy as rows
from ..launch import cross_entropy_gradient as gradients
from ..launch.availability import KernelUnavailable
from ..launch.context import as_in_forward, is_batch_invariant
from ..launch.last_upstream import LastUpstream
from ..launch.launcher import Vector
from ..launch.layout import gradient_buffer, restored, rows_of, rows_or_copy
from ..launch.options import CrossEntropy, weight_facts_of
from ..launch.torch_private import function_apply, is_watched, profiling
from . import decompositions
from .arguments import REDUCTIONS, expect_floating, expect_layout, expect_weight_facts, kernels_take_loss, softcap_of
from .decompositions import no_moments
from .library import define, differentiable, not_differentiable
from .route import (
    AS_THEY_LIE,
    EMPTY,
    Answer,
    can_bypass_dispatcher,
    is_compiled,
    is_supported,
    layout_of_rows,
    planned_by,
    recorded,
    unsupported_reason,
)

_of_fields = tuple.__new__


def cross_entropy_of(
    denominator: Tensor | None,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    inplace_backward: bool,
    as_it_lies: Callable[[Tensor, CrossEntropy, bool], Tensor | None],
) -> Tensor:
    """cross_entropy of checked arguments, whose mean divides by `denominator`, of one element, where there is one.

    as_it_lies: the loss of logits (N, C, d1, ...) without a copy, or None where there is no such way.
    """
    if target.dtype is torch.uint8:
        target = target.long()
    softcap = softcap_of(softcap, logits.dtype)
    n_cols = logits.shape[1] if logits.dim() > 1 else logits.numel()
    plain = compiled = False
    if kernels_take_loss(logits, target, weight, reduction, label_smoothing, n_cols):
        plain = all(t is None or can_bypass_dispatcher(t) for t in (logits, target, weight))
        plain = plain and is_supported(logits)
        compiled = not plain and n_cols > 0 and is_compiled(logits, target, weight)
    if not (plain or compiled):
        return decompositions.cross_entropy(
            logits, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, denominator
        )
    flat = target.reshape(-1).contiguous()
    if weight is not None:
        weight = weight.detach().float().contiguous()
    if denominator is not None:
        denominator = denominator.to(logits.device, torch.float32).reshape(1)
    weight_facts = weight_facts_of(weight, label_smoothing)
    described = (
        flat, weight, weight_facts, ignore_index, reduction, float(label_smoothing), softcap, float(z_loss), denominator
    )  # fmt: skip
    if plain and flat.device.type == "cpu":
        rows.check_targets(flat, ignore_index, n_cols)
    loss = None
    if plain and logits.dim() > 2:
        loss = as_it_lies(logits, CrossEntropy(*described), inplace_backward)
    if loss is None:
        x = rows_of(logits if logits.dim() < 3 else logits.movedim(1, -1), n_cols)
        loss = (
            cross_entropy(x, *described)[0] if compiled else _by_kernels(x, CrossEntropy(*described), inplace_backward)
        )
    return loss if reduction != "none" or target.dim() == 1 else loss.view(target.shape)


def direct_cross_entropy(
    logits: Any,
    target: Any,
    ignore_index: Any,
    reduction: Any,
    label_smoothing: Any,
    softcap: Any,
    z_loss: Any,
    inplace_backward: Any,
) -> Tensor | None:
    """cross_entropy of rows as they lie, on a GPU, without weights; None where the call takes the longer way.

    The longer way judges wrong arguments, too.
    """
    layout = layout_of_rows(logits, target)
    if (
        layout is None
        or type(ignore_index) is not int
        or type(label_smoothing) is not float
        or type(z_loss) is not float
        or type(inplace_backward) is not bool
        or softcap is not None
        or reduction not in REDUCTIONS
        or not (-(2**63) <= ignore_index < 2**63 and 0.0 <= label_smoothing <= 1.0 and -math.inf < z_loss < math.inf)
    ):
        return None
    # without the Python frame of a NamedTuple's constructor
    op = _of_fields(CrossEntropy, (target, None, None, ignore_index, reduction, label_smoothing, None, z_loss, None))
    return _by_kernels(logits, op, inplace_backward, layout)


def planned_cross_entropy(logits: Tensor, backward: bool) -> Answer:
    """What cross_entropy of these logits, by int64 targets, would run; backward: where it needs a gradient."""
    expect_floating("cross_entropy", "input", logits)
    reason = unsupported_reason(logits, logits.dtype)
    if reason is not None:
        return reason
    if logits.dim() == 0 or logits.numel() == 0:
        return EMPTY
    if (found := AS_THEY_LIE["cross_entropy"](logits)) is not None:
        return found
    x = rows_or_copy(logits if logits.dim() < 3 else logits.movedim(1, -1))
    return rows.planned_cross_entropy(x, logits, backward)


def _by_kernels(x: Tensor, op: CrossEntropy, inplace: bool, layout: object = None) -> Tensor:
    if profiling():
        return recorded("cross_entropy", _apply, x, op, inplace, layout)
    return _apply(x, op, inplace, layout)


def _apply(x: Tensor, op: CrossEntropy, inplace: bool, layout: object) -> Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        return _row_cross_entropy(x, (op, inplace, layout))
    try:
        return rows.cross_entropy_forward(x, op, layout=layout)[0]
    except KernelUnavailable:
        return decompositions.cross_entropy_of_rows(x, op)


def _forward_by_torch(x: Tensor, op: CrossEntropy) -> tuple[Tensor, Tensor]:
    moments = decompositions.moments_of(decompositions.capped(x, op.softcap)).view(-1)
    return decompositions.cross_entropy_of_rows(x, op), torch.cat((moments, rows.counted(op, x.shape[1])))


def _gradient(
    x: Tensor, dx: Tensor, op: CrossEntropy, moments: Vector, count: Vector | None, g: Tensor,
    written: Vector | None = None, last: LastUpstream | None = None, invariant: bool = False,
) -> Any:  # fmt: skip
    """The launch; None where PyTorch's formula took its place."""
    try:
        return gradients.cross_entropy_gradient(x, dx, op, moments, count, g, written, last, invariant)
    except KernelUnavailable:
        dx.copy_(decompositions.cross_entropy_gradient(g, x, op))
        return None


class RowCrossEntropy(torch.autograd.Function):
    """Cross-entropy of rows that need a gradient. Keeps the rows, two numbers a row, and the gradient that the forward
    wrote: all of it by save_for_backward, where checkpointing and offloading see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, described: tuple[CrossEntropy, bool, object]) -> Tensor:
        op, inplace, layout = described
        # two rows that share memory cannot hold two gradients
        inplace = inplace and (x.shape[0] == 1 or x.stride(0) >= x.shape[1])
        try:
            loss, kept, dx, last = rows.cross_entropy_forward(x, op, True, inplace, layout)
        except KernelUnavailable:
            (loss, kept), dx, last = _forward_by_torch(x, op), None, None
        inplace = inplace and dx is not None
        if inplace:
            torch.autograd.graph.increment_version(x)
        target, weight, weight_facts, *options, denominator = op
        ctx.save_for_backward(None if inplace else x, target, weight, weight_facts, kept, denominator, dx)
        # batch invariance too: backward runs in a thread that does not know
        ctx.described = options, x.shape[0], inplace, last, is_batch_invariant(), layout
        ctx.unread = [dx is not None]  # popped by the backward that returns the forward's gradient
        ctx.set_materialize_grads(False)
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, None]:
        if g is None:
            return None, None
        x, target, weight, weight_facts, kept, denominator, written = ctx.saved_tensors
        options, n_rows, inplace, last, invariant, layout = ctx.described
        recent = layout is not None and not inplace and not torch.is_grad_enabled() and not is_watched()
        unread = None
        if recent and written is not None and ctx.unread:
            unread, dx = ctx.unread.pop(), written.data
            if gradients.gradient_unless_written(layout, x, dx, target, kept, n_rows, options, g, last):
                return dx, None
        kept = restored(kept, torch.float32)
        op = gradients.restored_loss(_of_fields(CrossEntropy, (target, weight, weight_facts, *options, denominator)))
        if torch.is_grad_enabled() or not can_bypass_dispatcher(g):
            if x is None:
                raise RuntimeError(decompositions.OVERWRITTEN)
            return decompositions.cross_entropy_gradient(g, x, op), None
        if unread is None:
            unread = bool(ctx.unread) and ctx.unread.pop()
        upstream = g if g.dtype is torch.float32 and g.is_contiguous() else g.float().contiguous()
        if inplace:
            if not unread:
                raise RuntimeError(decompositions.OVERWRITTEN)
            return gradients.scaled_in_place(written, upstream), None
        dx = None
        if unread:
            dx = written.data  # with a version counter of its own: a change in place does not disturb what is saved
        elif written is not None:
            # a further one runs the forward's kernel again, so that its bits are those of the first
            with as_in_forward(invariant):
                _, kept, dx, last = rows.cross_entropy_forward(x, op, True)
        moments, count, expected = gradients.parts_of(kept, n_rows)
        divides = count if op.reduction == "mean" else None
        if dx is None:
            dx = gradient_buffer(x)
            _gradient(x, dx, op, moments, divides, upstream, invariant=invariant)
        else:
            launch = _gradient(x, dx, op, moments, divides, upstream, expected, last)
            if recent and unread and launch is not None:
                gradients.cache_gradient(launch, layout, x, dx, kept, op, upstream, last)
        return dx, None


_row_cross_entropy = function_apply(RowCrossEntropy)


# --- the operator: of rows (n_rows, n_cols), described by the fields of CrossEntropy ----------------------------------


_FIELDS = (
    "Tensor target, Tensor? weight, Tensor? weight_facts, int ignore_index, str reduction, float smoothing, "
    "float? softcap, float z_loss, Tensor? denominator"
)


def _described(target: Tensor, weight: Tensor | None, weight_facts: Tensor | None, *rest: Any) -> CrossEntropy:
    weight, weight_facts = (None if t is None else t.contiguous() for t in (weight, weight_facts))
    return CrossEntropy(target.contiguous(), weight, weight_facts, *rest)


def _expect_layouts(op: CrossEntropy, x: Tensor) -> None:
    expect_layout("target", op.target, x, x.shape[:1])
    expect_layout("weight", op.weight, x, x.shape[1:])
    expect_weight_facts(op, x)
    expect_layout("denominator", op.denominator, x, (1,))


def _cross_entropy_kernel(x: Tensor, *fields: Any) -> tuple[Tensor, Tensor]:
    op, n_cols = _described(*fields), x.shape[1]
    if not is_supported(x):
        return decompositions.cross_entropy_of_rows(x, op), no_moments(x)
    _expect_layouts(op, x)
    if x.device.type == "cpu":
        rows.check_targets(op.target, op.ignore_index, n_cols)
    try:
        loss, kept, *_ = rows.cross_entropy_forward(rows_of(x, n_cols), op)
    except KernelUnavailable:
        loss, kept = _forward_by_torch(rows_of(x, n_cols), op)
    return loss, kept[: 2 * x.shape[0]].view(-1, 2)


def _cross_entropy_fake(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    weight_facts: Tensor | None,
    ignore_index: int,
    reduction: str,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    moments = no_moments(x)
    return moments.new_empty(x.shape[:1] if reduction == "none" else ()), moments


def _cross_entropy_backward_kernel(g: Tensor, moments: Tensor, x: Tensor, *fields: Any) -> Tensor:
    op, n_cols = _described(*fields), x.shape[1]
    if not is_supported(x):
        return decompositions.cross_entropy_gradient(g, x, op).contiguous() if x.numel() else x.new_empty(x.shape)
    expect_layout("moments", moments, x, (x.shape[0], 2))
    expect_layout("g", g, x, x.shape[:1] if op.reduction == "none" else ())
    _expect_layouts(op, x)
    count = rows.count_targets(op, x) if op.reduction == "mean" else None
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    g, moments = g.reshape(-1).float().contiguous(), moments.contiguous()
    _gradient(rows_of(x, n_cols), dx, op, moments, count, g, invariant=is_batch_invariant())
    return dx


def _cross_entropy_backward_fake(g: Tensor, moments: Tensor, x: Tensor, *fields: Any) -> Tensor:
    return x.new_empty(x.shape)


cross_entropy = define(
    f"cross_entropy(Tensor x, {_FIELDS}) -> (Tensor loss, Tensor moments)", _cross_entropy_kernel, _cross_entropy_fake
)
cross_entropy_backward = define(
    f"cross_entropy_backward(Tensor g, Tensor moments, Tensor x, {_FIELDS}) -> Tensor",
    _cross_entropy_backward_kernel,
    _cross_entropy_backward_fake,
)


def _save_cross_entropy(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, target, weight, weight_facts, *ctx.options, denominator = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], x, target, weight, weight_facts, denominator)


def _cross_entropy_gradients(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 9
    if g is None:
        return None, *nothing
    moments, x, target, weight, weight_facts, denominator = ctx.saved_tensors
    fields = (target, weight, weight_facts, *ctx.options, denominator)
    if torch.is_grad_enabled():
        return decompositions.cross_entropy_gradient(g, x, CrossEntropy(*fields)), *nothing
    return cross_entropy_backward(g, moments, x, *fields), *nothing


def _formula(x: Tensor, *fields: Any) -> tuple[Tensor, Tensor]:
    op = CrossEntropy(*fields)
    return decompositions.cross_entropy_of_rows(x, op), decompositions.moments_of(decompositions.capped(x, op.softcap))


def _formula_of_gradient(g: Tensor, moments: Tensor, x: Tensor, *fields: Any) -> Tensor:
    return decompositions.cross_entropy_gradient(g, x, CrossEntropy(*fields))


differentiable("cross_entropy", _cross_entropy_gradients, _save_cross_entropy, _formula)
not_differentiable("cross_entropy_backward", _formula_of_gradient)
planned_by("cross_entropy", lambda asked: planned_cross_entropy(asked.x, asked.backward))
