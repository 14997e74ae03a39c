"""Which rule a result is judged by: what its row's scale is, and what its roundings may cost."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from fused_softmax.launch.device import interpreting

from . import exactness
from .draw import Case
from .inputs import Inputs
from .scales import (
    gradient_scale,
    gradient_size,
    input_scale,
    of_row_sums,
    of_scaled_logits,
    of_scores,
    of_summed_losses,
    second_scale,
)
from .stored import of_second_store, of_store_before_scale, of_stored_logsumexp, of_stored_output, of_summed_rows


def rule_of(
    case: Case, inputs: Inputs, name: str, ref: dict[str, Tensor], y: Tensor, first: Tensor, upstream: Any
) -> exactness.Rule:
    """How the result `name`, y, is judged; first: the call's first output, as it was stored."""
    interpreted = interpreting()
    forward = not name.startswith(("d_", "dd_"))
    everything = tuple(range(y.dim())) or (0,)
    if forward and not case.spec.full_outputs:
        parts = of_row_sums(case, inputs, ref[name]), of_summed_losses(case, inputs, ref[name], gradient=False)
        return exactness.Rule((), input_scale(inputs), interpreted=interpreted, extra=_added(*parts))
    if name.startswith("dd_") or name == "d_mask":
        through = max((y.dtype, getattr(torch, case.dtype), first.dtype), key=lambda d: torch.finfo(d).eps)
        scale = torch.stack([t.detach().abs().nan_to_num(0, 0, 0).amax() for t in ref.values() if t.numel()]).amax()
        scale = scale.double()
        of_second = second_scale(case, inputs, name, ref) if name.startswith("dd_") else None
        if of_second is not None:
            scale = torch.maximum(scale, of_second.to(scale))
        # of a gradient of the gradient: p as a factor, and the sums and t that it goes into; a mask's is summed below
        times = 2 if name.startswith("dd_") else 0
        rule = exactness.Rule(everything, scale, stores=4, roundings=times, interpreted=interpreted, coarsest=through)
        if not case.spec.full_outputs:
            return rule
        extra = of_stored_output(case, inputs, ref, first, upstream)[name]
        # a gradient of the scores has the output's dtype, whatever the mask's is
        once, limits = exactness.rounding(first.dtype, rule), torch.finfo(first.dtype)
        if name == "d_mask":
            dy = upstream({"y": ref["y"]})["y"]
            parts = extra, of_summed_rows(inputs, ref["y"], first, dy, y, once, limits.smallest_normal)
        else:
            parts = extra, of_store_before_scale(case, name, ref[name], once, limits.tiny * limits.eps)
        return dataclasses.replace(rule, extra=_added(*parts))
    dims = case.dims
    if inputs.batch_dim is not None:
        if forward:  # the results of vmap have their items first
            dims = tuple(d + 1 for d in dims)
        else:
            dims = tuple(d + (d >= inputs.batch_dim) for d in dims)
    if y.dim() == 0:
        dims = (0,)
    coarsest = None
    if not forward and "dtype" in case.options:
        coarsest = max((y.dtype, getattr(torch, case.options["dtype"])), key=lambda d: torch.finfo(d).eps)
    if forward:
        return exactness.Rule(dims, interpreted=interpreted, extra=of_scores(case, inputs, ref[name]))
    of_row = gradient_scale(case, inputs, ref)
    # torch's own way keeps the output in float32 there, ours as it was stored
    roundings = 2 if case.op == "masked_softmax" else 0
    rule = exactness.Rule(dims, of_row, True, gradient_size(case), 3, roundings, interpreted, coarsest)
    if case.op == "logsumexp" or case.spec.full_outputs:
        if case.op == "logsumexp":
            extra = of_stored_logsumexp(case, inputs, ref, first)
        else:
            extra = of_stored_output(case, inputs, ref, first, upstream)[name]
            once, limits = exactness.rounding(first.dtype, rule), torch.finfo(first.dtype)
            twice = of_store_before_scale(case, name, ref[name], once, limits.tiny * limits.eps)
            extra = extra if twice is None else extra + twice.nan_to_num(0, 0, 0)
        of_rows = extra.sum(dims, keepdim=True) if extra.dim() else extra
        return dataclasses.replace(rule, extra=extra, extra_sum=of_rows)
    if case.op == "token_logprobs" and (extra_of_row := of_scaled_logits(case, inputs)) is not None:
        return dataclasses.replace(rule, extra=extra_of_row, extra_sum=2 * extra_of_row)
    if case.op == "cross_entropy" and y.dim():
        once, least = exactness.rounding(y.dtype, rule), torch.finfo(y.dtype).tiny * torch.finfo(y.dtype).eps
        added_up = of_summed_losses(case, inputs, ref[name], gradient=True)
        off = _added(
            added_up, of_second_store(case, ref[name], once, least), _of_capped_logits(case, inputs, ref[name])
        )
        if off is not None:
            return dataclasses.replace(rule, extra=off, extra_sum=off.sum(dims, keepdim=True))
    return rule


def _of_capped_logits(case: Case, inputs: Inputs, of: Tensor) -> Tensor | None:
    """`of_scaled_logits`, of logits under a softcap: ours and torch's tanh round cap*tanh(x/cap) in different ways."""
    extra = of_scaled_logits(case, inputs) if case.options.get("softcap") else None
    return None if extra is None else extra.expand(of.shape)


def _added(*parts: Tensor | None) -> Tensor | None:
    """Their sum; None where there is none."""
    known = [t for t in parts if t is not None]
    return torch.stack(known).sum(0).nan_to_num(0, 0, 0) if known else None


def overflows(case: Case, name: str, y: Tensor, own: Tensor, ref: dict[str, Tensor]) -> Tensor | None:
    """Rows of a gradient of the gradient that is beyond a dtype of the call, or whose gradient is: ours and torch's are
    both made of infinities there, and which of the results are NaN follows from the order of the operations."""
    if not name.startswith("dd_") or y.shape != ref["d_x"].shape:
        return None
    passed = {case.dtype, case.options.get("dtype", case.dtype)}  # a bfloat16 row may pass through float16
    largest = min(torch.finfo(getattr(torch, dtype)).max for dtype in passed)
    beyond = (ref["d_x"].detach().abs() > largest) | (ref[name].detach().abs() > largest)
    beyond = beyond.any(case.dims[0], keepdim=True) if beyond.dim() else beyond
    return beyond & ~y.isfinite() & ~own.isfinite()


def overflows_in_place(case: Case, inputs: Inputs, name: str, y: Tensor) -> Tensor | None:
    """Rows whose gradient for an upstream gradient of 1 may be beyond the logits' dtype: `inplace_backward` keeps that
    one, and multiplies it. Only a z-loss, whose gradient is up to 2*z_loss*logsumexp, is that large."""
    if name != "d_x" or not case.options.get("inplace_backward") or inputs.batch_dim is not None or not y.dim():
        return None
    dim = case.dims[0]
    logsumexp = inputs.x.detach().double().abs().amax(dim, keepdim=True) + math.log(inputs.x.shape[dim])
    beyond = 2 * case.options.get("z_loss", 0.0) * logsumexp > torch.finfo(inputs.x.dtype).max
    return beyond & ~y.isfinite()
