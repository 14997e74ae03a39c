"""The gradients of the operators, and RowSoftmax: the same for a plain tensor, with no dispatcher between.

    dx = y * (dy - sum(dy * y))                softmax, from its output y
    dx = dy - exp(y) * sum(dy)                 log_softmax, from its output y
    dx = g * exp(x - lse)                      logsumexp
These are kernels; the gradients of these gradients are the formulas differentiated, in plain torch in float32 at least,
so they can be differentiated again. What autograd keeps is what torch keeps: the output, and for logsumexp its input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import eager, rows
from .operators import (
    is_plain,
    library,
    log_softmax_backward,
    logsumexp_backward,
    over_rows,
    probabilities,
    softmax_backward,
    widened,
)


class RowSoftmax(torch.autograd.Function):
    """softmax or log_softmax of a plain tensor that needs a gradient: the rows' kernels, without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, dtype: torch.dtype, log: bool, known: Any = None) -> Tensor:
        if known is not None:
            y = eager.forward_known(x, known)
        else:
            found = eager.forward(x, dim, log) if dtype is x.dtype else None
            y = rows.forward_or_torch(x, dim, dtype, log) if found is None else found
        ctx.save_for_backward(y)
        ctx.dim, ctx.input_dtype, ctx.log = dim, x.dtype, log
        ctx.invariant = rows.is_batch_invariant()  # backward runs in a thread that does not know
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        if dy is None:
            return None, None, None, None, None
        (y,) = ctx.saved_tensors
        if torch.is_grad_enabled() or not is_plain(dy) or type(y) is not Tensor:
            operator = log_softmax_backward if ctx.log else softmax_backward
            return operator(dy, y, ctx.dim, ctx.input_dtype), None, None, None, None
        dx = eager.backward(dy, y, ctx.dim, ctx.log, ctx.invariant) if ctx.input_dtype is y.dtype else None
        if dx is None:
            dx = rows.backward_or_torch(dy, y, ctx.dim, ctx.input_dtype, ctx.log, ctx.invariant)
        return dx, None, None, None, None


def _save_output(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.dim, _ = inputs
    ctx.input_dtype = x.dtype
    ctx.save_for_backward(output)


def _gradient_by(operator: Callable[..., Tensor]) -> Callable[..., tuple[Tensor | None, None, None]]:
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, None, None]:
        if dy is None:
            return None, None, None
        (y,) = ctx.saved_tensors
        return operator(dy, y, ctx.dim, ctx.input_dtype), None, None

    return backward


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    dy, y, ctx.dim, _ = inputs
    ctx.save_for_backward(dy, y)


def _softmax_double_backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None, None]:
    dy, y = ctx.saved_tensors
    g_, dy_, y_, dim = widened(g), widened(dy), widened(y), ctx.dim
    gy = (g_ * y_).sum(dim, keepdim=True)
    to_y = g_ * (dy_ - (dy_ * y_).sum(dim, keepdim=True)) - dy_ * gy
    return (y_ * (g_ - gy)).to(dy.dtype), to_y.to(y.dtype), None, None


def _log_softmax_double_backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None, None]:
    dy, y = ctx.saved_tensors
    g_, dy_, p, dim = widened(g), widened(dy), widened(y).exp(), ctx.dim
    to_dy = g_ - (g_ * p).sum(dim, keepdim=True)
    return to_dy.to(dy.dtype), (-g_ * p * dy_.sum(dim, keepdim=True)).to(y.dtype), None, None


def _save_logsumexp(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.dims, ctx.keepdim = inputs
    ctx.save_for_backward(x, output)


def _logsumexp_gradient(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, None, None]:
    x, lse = ctx.saved_tensors
    return (None if g is None else logsumexp_backward(g, x, lse, ctx.dims, ctx.keepdim)), None, None


def _save_logsumexp_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    g, x, lse, ctx.dims, ctx.keepdim = inputs
    ctx.save_for_backward(g, x, lse)


def _logsumexp_double_backward(ctx: Any, gg: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
    g, x, lse = ctx.saved_tensors
    gp = widened(gg) * probabilities(x, lse, ctx.dims, ctx.keepdim)
    to_x = gp * over_rows(g, x, ctx.dims, ctx.keepdim)
    dims = [d % max(1, x.dim()) for d in ctx.dims] or list(range(x.dim()))
    to_g = gp.sum(dims, keepdim=ctx.keepdim) if x.dim() else gp
    to_lse = -to_x.sum(dims, keepdim=ctx.keepdim) if x.dim() else -to_x
    return to_g.to(g.dtype), to_x.to(x.dtype), to_lse.to(lse.dtype), None, None


for _name, _backward, _setup in (
    ("softmax", _gradient_by(softmax_backward), _save_output),
    ("log_softmax", _gradient_by(log_softmax_backward), _save_output),
    ("softmax_backward", _softmax_double_backward, _save_backward),
    ("log_softmax_backward", _log_softmax_double_backward, _save_backward),
    ("logsumexp", _logsumexp_gradient, _save_logsumexp),
    ("logsumexp_backward", _logsumexp_double_backward, _save_logsumexp_backward),
):
    torch.library.register_autograd(f"fused_softmax::{_name}", _backward, setup_context=_setup, lib=library)
