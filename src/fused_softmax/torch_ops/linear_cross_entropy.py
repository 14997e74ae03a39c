"""linear_cross_entropy as PyTorch sees it: the routes of a call, its autograd, the operator.

    logits = x @ weight.T + bias;  loss = cross_entropy(logits, target)

Where a gradient of a mean or a sum is needed, the forward computes it chunk by chunk, for an upstream gradient of 1.
The kernel writes the logits' gradient over the logits, and two products take it from there. Backward multiplies what
came with another upstream gradient. For reduction "none" backward makes the logits again. The loop over
chunks is linear_chunks's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..launch.availability import KernelUnavailable
from ..launch.context import as_in_forward, is_batch_invariant
from ..launch.cross_entropy import scale_unless_one
from ..launch.linear import NONE, Needs, Settings
from ..launch.options import CrossEntropy
from ..launch.torch_private import has_storage
from . import decompositions
from .arguments import LossOptions
from .decompositions import result_dtype
from .library import define, differentiable, not_differentiable
from .linear_chunks import backward_of_chunks, forward_of_chunks
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
    return decompositions.cross_entropy_of_rows(_all_logits(x, weight, bias, how), op)


def probabilities_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, options: LossOptions,
    how: Settings,
) -> Tensor:  # fmt: skip
    """The loss of probabilities, which have the logits' size, as target: torch's formula."""
    n_cols = weight.shape[0]
    loss = decompositions.cross_entropy(
        _all_logits(x, weight, bias, how), target.reshape(-1, n_cols), class_weight, -100, options.reduction,
        options.label_smoothing, options.softcap, options.z_loss,
    )  # fmt: skip
    return loss.view(target.shape[:-1]) if options.reduction == "none" else loss


def _all_logits(x: Tensor, weight: Tensor, bias: Tensor | None, how: Settings) -> Tensor:
    x, weight, bias = x.to(how.compute), weight.to(how.compute), None if bias is None else bias.to(how.compute)
    return F.linear(x, weight, bias).to(how.logits)


# --- autograd ---------------------------------------------------------------------------------------------------------


_TWICE = (
    "linear_cross_entropy(): its gradient cannot be differentiated again; that of cross_entropy(F.linear(input, "
    "linear_weight), target) can"
)


class LinearCrossEntropy(torch.autograd.Function):
    """Keeps the input, the weight and, except for reduction "none", the gradients: all of it by save_for_backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, op: CrossEntropy, how: Settings) -> Tensor:
        needs = Needs(*ctx.needs_input_grad[:3])
        found = forward_of_chunks(x, weight, bias, op, how, needs)
        ctx.save_for_backward(x, weight, bias, op.target, op.weight, op.weight_sum, op.denominator, *found[1:])
        # no tensor but those saved; batch invariance too, as backward runs in a thread that does not know
        options = op._replace(target=None, weight=None, weight_sum=None, denominator=None)  # type: ignore[arg-type]
        ctx.described = options, how, needs, is_batch_invariant()
        ctx.unread = [True]  # popped by the backward that gives away what the forward wrote
        ctx.set_materialize_grads(False)
        return found.loss

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * 5
        if torch.is_grad_enabled():
            raise RuntimeError(_TWICE)
        x, weight, bias, target, class_weight, weight_sum, denominator, *rest = ctx.saved_tensors
        options, how, needs, invariant = ctx.described
        op = options._replace(target=target, weight=class_weight, weight_sum=weight_sum, denominator=denominator)
        with as_in_forward(invariant):
            if op.reduction == "none":
                if not has_storage(g):
                    raise NotImplementedError("linear_cross_entropy(): batched upstream gradients need a mean or a sum")
                dtype = result_dtype(x)
                found = backward_of_chunks(g.to(dtype).contiguous(), rest[0], x, weight, bias, op, how, needs)
                return (*found, None, None)
            if not (ctx.unread and ctx.unread.pop()):
                # a further backward makes all of it again: what the forward wrote was given away
                rest = forward_of_chunks(x, weight, bias, op, how, needs)[1:]
            _, *written, divisor = rest
        dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        plain = can_bypass_dispatcher(g)
        by = _upstream(g, divisor)
        scaled = (
            None if t is None else _scaled_in_place(t, g) if plain and divisor is None else _times(t, b, dtype)
            for t, b, dtype in zip(written, by, dtypes, strict=True)
        )  # fmt: skip
        return (*scaled, None, None)


def _upstream(g: Tensor, divisor: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The factors of the gradients of input, weight and bias."""
    if divisor is None:
        return g, g, g
    return g / divisor[1], g / divisor[0], g / divisor[1]


def _times(t: Tensor, g: Tensor, dtype: torch.dtype | None) -> Tensor:
    """t*g, rounded once. g, of no dimensions, would be rounded to t's dtype before it is multiplied."""
    return (t * g.reshape([1] * t.dim())).to(dtype)


def _scaled_in_place(t: Tensor, g: Tensor) -> Tensor:
    """t*g in t's memory, which the device leaves alone where g is 1.

    It is what the first backward gives away, with a version counter of its own: nothing reads the saved one again.
    """
    t, g = t.data, g.to(torch.promote_types(t.dtype, torch.float32)).reshape(1)
    if t.dim() == 2 and t.stride(1) == 1 and is_supported(t):
        try:
            scale_unless_one(t, g)
            return t
        except KernelUnavailable:
            pass
    return t.mul_(g.view([1] * t.dim()))


# --- the operator -----------------------------------------------------------------------------------------------------


_FIELDS = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight, Tensor? weight_sum, "
    "Tensor? denominator, int ignore_index, str reduction, float smoothing, float? softcap, float z_loss, "
    "ScalarType compute, ScalarType logits, str accumulate, int? chunk_rows, bool[] needs"
)


def _read(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    weight_sum: Tensor | None, denominator: Tensor | None, ignore_index: int, reduction: str, smoothing: float,
    softcap: float | None, z_loss: float, compute: torch.dtype, logits: torch.dtype, accumulate: str,
    chunk_rows: int | None, needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor | None, CrossEntropy, Settings, Needs]:  # fmt: skip
    """The operator's fields as the loop takes them."""
    op = CrossEntropy(
        target.contiguous(), None if class_weight is None else class_weight.contiguous(), weight_sum, ignore_index,
        reduction, smoothing, softcap, z_loss, denominator,
    )  # fmt: skip
    return x, weight, bias, op, Settings(compute, logits, accumulate, chunk_rows), Needs(*needs)


def _by_operator(x: Tensor, weight: Tensor, bias: Tensor | None, op: CrossEntropy, how: Settings) -> Tensor:
    enabled = torch.is_grad_enabled()
    needs = [enabled and t is not None and t.requires_grad for t in (x, weight, bias)]
    return linear_cross_entropy(
        x, weight, bias, op.target, op.weight, op.weight_sum, op.denominator, op.ignore_index, op.reduction,
        op.smoothing, op.softcap, op.z_loss, how.compute, how.logits, how.accumulate, how.chunk_rows, needs,
    )[0]  # fmt: skip


def _linear_cross_entropy_kernel(*fields: Any) -> tuple[Tensor, ...]:
    found = forward_of_chunks(*_read(*fields))
    return tuple(found.loss.new_empty(0) if t is None else t for t in found)


def _linear_cross_entropy_fake(*fields: Any) -> tuple[Tensor, ...]:
    x, weight, bias, op, how, needs = _read(*fields)
    by_row, scaled = op.reduction == "none", how.compute is torch.float16
    loss = x.new_empty(x.shape[:1] if by_row else (), dtype=result_dtype(x.new_empty(0, dtype=how.logits)))
    wide = torch.promote_types(how.compute, torch.float32)
    of_weight = wide if scaled and how.accumulate != "weight" else weight.dtype

    def gradient(t: Tensor | None, needed: bool, dtype: torch.dtype) -> Tensor:
        return loss.new_empty(0) if t is None or by_row or not needed else torch.empty_like(t, dtype=dtype)

    return (
        loss,
        loss.new_empty((x.shape[0], 2) if by_row else 0),
        gradient(x.contiguous(), needs.input, wide if scaled else x.dtype),
        gradient(weight, needs.weight, of_weight),
        gradient(bias, needs.bias, wide if scaled or bias is None else bias.dtype),
        loss.new_empty(2 if scaled and any(needs) and not by_row else 0),
    )


def _backward_kernel(g: Tensor, moments: Tensor, *fields: Any) -> tuple[Tensor, ...]:
    x, weight, bias, op, how, needs = _read(*fields)
    g = g.to(moments.dtype).contiguous()
    found = backward_of_chunks(g, moments, x, weight, bias, op, how, needs)
    return tuple(moments.new_empty(0) if t is None else t for t in found)


def _backward_fake(g: Tensor, moments: Tensor, *fields: Any) -> tuple[Tensor, ...]:
    x, weight, bias, _, _, needs = _read(*fields)
    given = zip((x.contiguous(), weight, bias), needs, strict=True)
    return tuple(moments.new_empty(0) if t is None or not needed else torch.empty_like(t) for t, needed in given)


linear_cross_entropy = define(
    f"linear_cross_entropy({_FIELDS}) -> (Tensor loss, Tensor moments, Tensor dx, Tensor dweight, Tensor dbias, "
    "Tensor divisor)",
    _linear_cross_entropy_kernel,
    _linear_cross_entropy_fake,
)
linear_cross_entropy_backward = define(
    f"linear_cross_entropy_backward(Tensor g, Tensor moments, {_FIELDS}) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    _backward_kernel,
    _backward_fake,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.options = *inputs[:7], inputs[7:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[1:])


def _gradients(ctx: Any, g: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 14
    if g is None:
        return None, None, None, *nothing
    if torch.is_grad_enabled():
        raise RuntimeError(_TWICE)
    *tensors, moments, dx, dweight, dbias, divisor = ctx.saved_tensors
    needs, how_fp16 = ctx.options[-1], ctx.options[5] is torch.float16
    if ctx.options[1] == "none":
        found = linear_cross_entropy_backward(g, moments, *tensors, *ctx.options)
    else:
        by = _upstream(g, divisor if how_fp16 else None)
        dtypes = [None if t is None else t.dtype for t in tensors[:3]]
        found = tuple(
            _times(t, b, dtype) if needed else None
            for t, b, dtype, needed in zip((dx, dweight, dbias), by, dtypes, needs, strict=True)
        )
    return *(t if needed else None for t, needed in zip(found, needs, strict=True)), *nothing


differentiable("linear_cross_entropy", _gradients, _save)
not_differentiable("linear_cross_entropy_backward")
