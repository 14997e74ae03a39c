"""The operator of linear_cross_entropy, which torch.compile and modes see: schema, kernel, fake kernel and autograd.

This file is imported when torch.ops, or `plan_for`, is asked for the operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..launch.cross_entropy import planned_cross_entropy
from ..launch.linear import Needs, Settings
from ..launch.options import CrossEntropy
from . import decompositions
from .arguments import expect_layout, expect_weight_facts
from .decompositions import result_dtype
from .library import define, differentiable, not_differentiable
from .linear_arguments import all_logits, gradients_by_torch, planned_linear, without_autocast
from .linear_cross_entropy import TWICE, backward_of_chunks, forward_of_chunks, times, upstream_of
from .route import planned_by

_FIELDS = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight, Tensor? weight_facts, "
    "Tensor? denominator, int ignore_index, str reduction, float smoothing, float? softcap, float z_loss, "
    "ScalarType compute, ScalarType logits, str accumulate, int? chunk_rows, bool[] needs"
)


def _read(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    weight_facts: Tensor | None, denominator: Tensor | None, ignore_index: int, reduction: str, smoothing: float,
    softcap: float | None, z_loss: float, compute: torch.dtype, logits: torch.dtype, accumulate: str,
    chunk_rows: int | None, needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor | None, CrossEntropy, Settings, Needs]:  # fmt: skip
    """The operator's fields as the loop takes them."""
    class_weight, weight_facts = (None if t is None else t.contiguous() for t in (class_weight, weight_facts))
    op = CrossEntropy(
        target.contiguous(), class_weight, weight_facts, ignore_index, reduction, smoothing, softcap, z_loss,
        denominator,
    )  # fmt: skip
    return x, weight, bias, op, Settings(compute, logits, accumulate, chunk_rows), Needs(*needs)


def _checked(*fields: Any) -> tuple[Tensor, Tensor, Tensor | None, CrossEntropy, Settings, Needs]:
    """`_read`; RuntimeError where a kernel would read outside of a tensor."""
    x, weight, bias, op, *_ = read = _read(*fields)
    expect_layout("target", op.target, x, x.shape[:1])
    for name, t in (("bias", bias), ("class_weight", op.weight)):
        expect_layout(name, t, x, weight.shape[:1])
    expect_weight_facts(op, x)
    expect_layout("denominator", op.denominator, x, (1,))
    return read


def _linear_cross_entropy_kernel(*fields: Any) -> tuple[Tensor, ...]:
    found = forward_of_chunks(*_checked(*fields))
    return tuple(found.loss.new_empty(0) if t is None else t for t in found)


def _gradient_dtypes(weight: Tensor, bias: Tensor | None, how: Settings, x: Tensor) -> tuple[torch.dtype, ...]:
    """The dtypes of the gradients of x, weight and bias: float16's are still to be divided."""
    wide, scaled = torch.promote_types(how.compute, torch.float32), how.compute is torch.float16
    of_weight = wide if scaled and how.accumulate != "weight" else weight.dtype
    return wide if scaled else x.dtype, of_weight, wide if scaled or bias is None else bias.dtype


def _linear_cross_entropy_fake(*fields: Any) -> tuple[Tensor, ...]:
    x, weight, bias, op, how, needs = _read(*fields)
    by_row, scaled = op.reduction == "none", how.compute is torch.float16
    loss = x.new_empty(x.shape[:1] if by_row else (), dtype=result_dtype(x.new_empty(0, dtype=how.logits)))
    of_input, of_weight, of_bias = _gradient_dtypes(weight, bias, how, x)

    def gradient(t: Tensor | None, needed: bool, dtype: torch.dtype) -> Tensor:
        return loss.new_empty(0) if t is None or by_row or not needed else torch.empty_like(t, dtype=dtype)

    return (
        loss,
        loss.new_empty((x.shape[0], 2) if by_row else 0),
        gradient(x.contiguous(), needs.input, of_input),
        gradient(weight, needs.weight, of_weight),
        gradient(bias, needs.bias, of_bias),
        loss.new_empty(2 if scaled and any(needs) and not by_row else 0),
    )


def _backward_kernel(g: Tensor, moments: Tensor, *fields: Any) -> tuple[Tensor, ...]:
    x, weight, bias, op, how, needs = _checked(*fields)
    expect_layout("g", g, x, x.shape[:1])
    expect_layout("moments", moments, x, (x.shape[0], 2))
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
        raise RuntimeError(TWICE)
    *tensors, moments, dx, dweight, dbias, divisor = ctx.saved_tensors
    needs, how_fp16 = ctx.options[-1], ctx.options[5] is torch.float16
    if ctx.options[1] == "none":
        found = linear_cross_entropy_backward(g, moments, *tensors, *ctx.options)
    else:
        by = upstream_of(g, divisor if how_fp16 else None)
        dtypes = [None if t is None else t.dtype for t in tensors[:3]]
        found = tuple(
            times(t, b, dtype) if needed else None
            for t, b, dtype, needed in zip((dx, dweight, dbias), by, dtypes, needs, strict=True)
        )
    return *(t if needed else None for t, needed in zip(found, needs, strict=True)), *nothing


def _formula(*fields: Any) -> tuple[Tensor, ...]:
    """The operator on all logits, for forward-mode AD; gradients that a graph returns have tangents, too."""
    x, weight, bias, op, how, needs = _read(*fields)
    with without_autocast(x.device.type):
        logits = all_logits(x, weight, bias, how)
        loss = decompositions.cross_entropy_of_rows(logits, op)
        nothing = loss.new_empty(0)
        if op.reduction == "none":
            return loss, decompositions.losses_of_rows(logits, op)[1], *(nothing,) * 4
        if not any(needs):
            return loss, *(nothing,) * 5
        with torch.no_grad():
            dlogits = decompositions.cross_entropy_gradient(loss.new_ones(()), logits, op)
            found = gradients_by_torch(dlogits, x, weight, bias, how, needs, _gradient_dtypes(weight, bias, how, x))
        return (
            loss,
            nothing,
            *(nothing if t is None else t for t in found),
            loss.new_ones(2 if how.compute is torch.float16 else 0),
        )


differentiable("linear_cross_entropy", _gradients, _save, _formula)
not_differentiable("linear_cross_entropy_backward")
planned_by(
    "linear_cross_entropy",
    lambda asked: planned_linear(
        asked, "linear_cross_entropy", lambda logits, on: planned_cross_entropy(logits, on, asked.backward)
    ),
)
