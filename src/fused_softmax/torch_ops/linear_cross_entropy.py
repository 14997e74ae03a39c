"""linear_cross_entropy as PyTorch sees it: the routes of a call, the loop over chunks, autograd.

    logits = x @ weight.T + bias;  loss = cross_entropy(logits, target)

Where a gradient of a mean or a sum is needed, the forward computes it chunk by chunk, for an upstream gradient of 1.
The kernel writes the logits' gradient over the logits, and two products take it from there. Backward multiplies what
came with another upstream gradient. For reduction "none" backward makes the logits again. Where there
are no kernels, or one does not compile, the same loop runs torch's formulas. linear_operator has the operator.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..launch import cross_entropy as rows
from ..launch.availability import KernelUnavailable
from ..launch.context import as_in_forward, is_batch_invariant
from ..launch.cross_entropy_gradient import cross_entropy_gradient, restored_loss, scaled_in_place
from ..launch.layout import restored
from ..launch.linear import FLOAT16_SCALE, NONE, Gradients, Needs, Settings, of_rows_that_count, put_back
from ..launch.options import CrossEntropy
from ..launch.torch_private import has_storage
from . import decompositions
from .arguments import NAMESPACE, LossOptions
from .decompositions import result_dtype
from .linear_arguments import all_logits, gradients_by_torch, needed_gradients, without_autocast
from .route import can_bypass_dispatcher, is_supported, operator_takes


def linear_cross_entropy_of(x: Tensor, weight: Tensor, bias: Tensor | None, op: CrossEntropy, how: Settings) -> Tensor:
    """The loss of rows x (n_rows, hidden), by checked arguments; op.target: (n_rows,) int64."""
    given = [t for t in (x, weight, bias, op.target, op.weight) if t is not None]
    if all(can_bypass_dispatcher(t) for t in given):
        if torch.is_grad_enabled() and any(t.requires_grad for t in given):
            return LinearCrossEntropy.apply(x, weight, bias, op, how)
        return forward_of_chunks(x, weight, bias, op, how, NONE).loss
    if operator_takes(*given):
        return _by_operator(x, weight, bias, op, how)
    # transforms of torch.func and subclasses of Tensor: torch's formula, which holds all logits
    return decompositions.cross_entropy_of_rows(all_logits(x, weight, bias, how), op)


def _by_operator(x: Tensor, weight: Tensor, bias: Tensor | None, op: CrossEntropy, how: Settings) -> Tensor:
    needs = needed_gradients(x, weight, bias)
    return getattr(torch.ops, NAMESPACE).linear_cross_entropy(
        x, weight, bias, op.target, op.weight, op.weight_facts, op.denominator, op.ignore_index, op.reduction,
        op.smoothing, op.softcap, op.z_loss, how.compute, how.logits, how.accumulate, how.chunk_rows, needs,
    )[0]  # fmt: skip


def probabilities_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, options: LossOptions,
    how: Settings,
) -> Tensor:  # fmt: skip
    """The loss of probabilities, which have the logits' size, as target: torch's formula."""
    n_cols = weight.shape[0]
    loss = decompositions.cross_entropy(
        all_logits(x, weight, bias, how), target.reshape(-1, n_cols), class_weight, -100, options.reduction,
        options.label_smoothing, options.softcap, options.z_loss,
    )  # fmt: skip
    return loss.view(target.shape[:-1]) if options.reduction == "none" else loss


# --- the loop ---------------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """The loss; for "none", each row's moments; the gradients, and what they are still to be divided by."""

    loss: Tensor
    moments: Tensor | None
    input: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    divisor: Tensor | None  # [2], of the weight's gradient and of the others; None: nothing


def forward_of_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, op: CrossEntropy, how: Settings, needs: Needs
) -> Result:
    """The loss of all rows, and the gradients that are needed; for "none" they are backward's."""
    n_rows, n_cols = x.shape[0], weight.shape[0]
    with without_autocast(x.device.type):
        counts = op.target != op.ignore_index
        if x.device.type == "cpu":
            rows.check_targets(op.target, op.ignore_index, n_cols)
        by_row = op.reduction == "none"
        needs, scaled = NONE if by_row else needs, how.compute is torch.float16 and any(needs) and not by_row
        projection, kept = of_rows_that_count(x, weight, bias, how, needs, counts, scaled=scaled)
        op_kept = op if kept is None else op._replace(target=op.target[kept])
        of_rows = result_dtype(x.new_empty(0, dtype=how.logits))
        losses = x.new_empty(projection.n_rows, dtype=of_rows)
        moments = x.new_empty((projection.n_rows, 2), dtype=of_rows) if by_row else None
        total = _denominator(op, counts, of_rows) if op.reduction == "mean" else None
        gradients = Gradients(projection, weight) if any(projection.needs) else None
        # the kernel divides by this: float16 keeps its digits by a factor, and is divided later
        divides = total
        if scaled:
            divides = losses.new_full((1,), 1.0 / FLOAT16_SCALE)
        for chunk, logits, dlogits in projection.logits():
            op_chunk = op_kept._replace(target=op_kept.target[chunk], denominator=None)
            if gradients is None:
                losses[chunk], of_chunk = _losses(logits, op_chunk)
                if moments is not None:
                    moments[chunk] = of_chunk
            else:
                losses[chunk] = _losses_and_gradient(logits, dlogits, op_chunk, divides)
                gradients.add(chunk, dlogits)
            del logits, dlogits
        if by_row:
            assert moments is not None
            return Result(put_back(losses, kept, (n_rows,)), put_back(moments, kept, (n_rows, 2)), *[None] * 4)
        loss = losses.sum() if total is None else losses.sum() / total[0]
        if gradients is None:
            return Result(loss, *[None] * 5)
        dx, dweight, dbias = gradients.finish()
        dx = None if dx is None else put_back(dx, kept, x.shape)
        divisor = _divisor(total, counts, gradients.weight_alpha, losses) if scaled else None
        return Result(loss, None, dx, dweight, dbias, divisor)


def _divisor(total: Tensor | None, counts: Tensor, alpha: float, like: Tensor) -> Tensor:
    """What float16's gradients are to be divided by: (the weight's, the others').  # [2] float32"""
    # where no row counts the gradient is 0, not 0/0
    by = like.new_ones(1) if total is None else total.masked_fill(~counts.any(), 1.0)
    return by * FLOAT16_SCALE * torch.stack((by.new_tensor(alpha), by.new_ones(())))


def _denominator(op: CrossEntropy, counts: Tensor, dtype: torch.dtype) -> Tensor:
    """What a mean divides by: how many targets count, or their weights' sum.  # [1]"""
    if op.denominator is not None:
        return op.denominator.to(dtype)
    if op.weight is None:
        return counts.sum(dtype=dtype).view(1)
    inside = counts & (op.target >= 0) & (op.target < op.weight.shape[0])
    return op.weight.to(dtype)[op.target.where(inside, 0)].where(inside, 0.0).sum().view(1)


def _losses(logits: Tensor, op: CrossEntropy) -> tuple[Tensor, Tensor]:
    """(each row's loss, its moments)."""
    if is_supported(logits):
        try:
            return rows.losses_of_chunk(logits, op)
        except KernelUnavailable:
            pass
    return decompositions.losses_of_rows(logits, op)


def _losses_and_gradient(logits: Tensor, dlogits: Tensor, op: CrossEntropy, divides: Tensor | None) -> Tensor:
    """Each row's loss, and into dlogits, which may be logits, the gradient of their sum over `divides`."""
    if is_supported(logits):
        try:
            losses, moments = rows.losses_and_gradient_of_chunk(logits, dlogits, op, divides)
            if moments is not None:
                one = losses.new_ones(1)
                cross_entropy_gradient(logits, dlogits, op, moments, divides, one)
            return losses
        except KernelUnavailable:
            pass
    losses = decompositions.cross_entropy_of_rows(logits, op._replace(reduction="none"))
    op = op._replace(reduction="sum" if divides is None else "mean", denominator=divides)
    dlogits.copy_(decompositions.cross_entropy_gradient(losses.new_ones(1), logits, op))
    return losses


def _gradient(logits: Tensor, dlogits: Tensor, op: CrossEntropy, moments: Tensor, g: Tensor) -> None:
    """Into dlogits, which may be logits, the gradient of the rows' losses for their upstream gradients g."""
    if is_supported(logits):
        try:
            return cross_entropy_gradient(logits, dlogits, op, moments, None, g)
        except KernelUnavailable:
            pass
    dlogits.copy_(decompositions.cross_entropy_gradient(g, logits, op))


def backward_of_chunks(
    g: Tensor, moments: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, op: CrossEntropy, how: Settings,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients for reduction "none" and the rows' upstream gradients g: the logits are made again."""
    shape = x.shape
    with without_autocast(x.device.type):
        projection, kept = of_rows_that_count(x, weight, bias, how, needs, op.target != op.ignore_index)
        if kept is not None:
            g, moments, op = g[kept], moments[kept], op._replace(target=op.target[kept])
        gradients = Gradients(projection, weight)
        for chunk, logits, dlogits in projection.logits():
            op_chunk = op._replace(target=op.target[chunk])
            _gradient(logits, dlogits, op_chunk, moments[chunk], g[chunk])
            gradients.add(chunk, dlogits)
            del logits, dlogits
        dx, dweight, dbias = gradients.finish()
        return None if dx is None else put_back(dx, kept, shape), dweight, dbias


# --- autograd ---------------------------------------------------------------------------------------------------------


TWICE = (
    "linear_cross_entropy(): its gradient cannot be differentiated again; that of cross_entropy(F.linear(input, "
    "linear_weight), target) can"
)


class LinearCrossEntropy(torch.autograd.Function):
    """Keeps the input, the weight and, except for reduction "none", the gradients: all of it by save_for_backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, op: CrossEntropy, how: Settings) -> Tensor:
        needs = Needs(*ctx.needs_input_grad[:3])
        found = forward_of_chunks(x, weight, bias, op, how, needs)
        ctx.save_for_backward(x, weight, bias, op.target, op.weight, op.weight_facts, op.denominator, *found[1:])
        # no tensor but those saved; batch invariance too, as backward runs in a thread that does not know
        options = op._replace(target=None, weight=None, weight_facts=None, denominator=None)  # type: ignore[arg-type]
        ctx.described = options, how, needs, is_batch_invariant()
        ctx.unread = [True]  # popped by the backward that gives away what the forward wrote
        ctx.set_materialize_grads(False)
        return found.loss

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * 5
        if torch.is_grad_enabled():
            raise RuntimeError(TWICE)
        x, weight, bias, target, class_weight, weight_facts, denominator, *rest = ctx.saved_tensors
        options, how, needs, invariant = ctx.described
        op = options._replace(target=target, weight=class_weight, weight_facts=weight_facts, denominator=denominator)
        op = restored_loss(op, result_dtype(x))
        if op.reduction == "none" and not has_storage(g):  # upstream gradients that vmap batched: torch's formula
            with without_autocast(x.device.type):
                logits = all_logits(x, weight, bias, how)
            dlogits = decompositions.cross_entropy_gradient(g, logits, op)
            return *gradients_by_torch(dlogits, x, weight, bias, how, needs), None, None
        with as_in_forward(invariant):
            if op.reduction == "none":
                dtype = result_dtype(x)
                moments = restored(rest[0], dtype)
                found = backward_of_chunks(g.to(dtype).contiguous(), moments, x, weight, bias, op, how, needs)
                return (*found, None, None)
            if not (ctx.unread and ctx.unread.pop()):
                # a further backward makes all of it again: what the forward wrote was given away
                rest = forward_of_chunks(x, weight, bias, op, how, needs)[1:]
            _, *written, divisor = rest
        dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        plain = can_bypass_dispatcher(g)
        by = upstream_of(g, divisor)
        scaled = (
            None if t is None else _scaled(t, g) if plain and divisor is None else times(t, b, dtype)
            for t, b, dtype in zip(written, by, dtypes, strict=True)
        )  # fmt: skip
        return (*scaled, None, None)


def upstream_of(g: Tensor, divisor: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The factors of the gradients of input, weight and bias."""
    if divisor is None:
        return g, g, g
    return g / divisor[1], g / divisor[0], g / divisor[1]


def times(t: Tensor, g: Tensor, dtype: torch.dtype | None) -> Tensor:
    """t*g, rounded once. g, of no dimensions, would be rounded to t's dtype before it is multiplied."""
    return (t * g.reshape([1] * t.dim())).to(dtype)


def _scaled(t: Tensor, g: Tensor) -> Tensor:
    """t*g in the memory that the first backward gives away, with a version counter of its own: nothing reads the saved
    one again."""
    return scaled_in_place(t.data, g.to(torch.promote_types(t.dtype, torch.float32)))
