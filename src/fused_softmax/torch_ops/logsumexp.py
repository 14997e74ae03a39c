"""logsumexp as PyTorch sees it: the routes of a call, the operator, its autograd and vmap rules.

    dx = g * exp(x - lse)

Autograd keeps the input and the result, as torch's does. The gradient of the gradient is a decomposition.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..launch import logsumexp as as_it_lies
from ..launch import row_statistics as rows
from ..launch import torch_private
from ..launch.availability import KernelUnavailable
from ..launch.layout import HALVES, rows_or_copy
from ..launch.torch_private import function_apply, in_forward_ad
from . import decompositions
from .arguments import expect_layout
from .library import batched, define, differentiable, expect_in_range, past_batch, under_autocast, with_batch
from .outputs import takes_out, written
from .route import (
    EMPTY,
    Answer,
    call_unsupported_reason,
    can_bypass_dispatcher,
    is_supported,
    layout_of_rows,
    planned_by,
    recorded,
    too_long_reason,
)

_TORCHS_OWN = torch.logsumexp  # as imported: a program may put ours in its place


def direct_logsumexp(x: Any, dim: Any, keepdim: Any) -> Tensor | None:
    """logsumexp over the columns of rows as they lie, on a GPU; None where the call takes `logsumexp_of`'s way."""
    if type(dim) is not int or not (dim == -1 or dim == 1) or keepdim is not False or torch_private.profiling():
        return None
    layout = layout_of_rows(x)
    if layout is None or (x.dtype in HALVES and torch_private.any_autocast()):
        return None
    try:
        lse = rows.logsumexp_of_rows(x, layout)
    except KernelUnavailable:
        return None
    return _row_logsumexp(x, ((1,), False, lse)) if x.requires_grad and torch.is_grad_enabled() else lse


def logsumexp_of(x: Tensor, dim: Any, dims: tuple[int, ...] | None, keepdim: bool, out: Tensor | None) -> Tensor:
    """logsumexp of a tensor over dim, whose rising dims are None where torch's own function judges them."""
    if (
        dims is None
        or too_long_reason(x, *dims) is not None
        or type(keepdim) is not bool
        or call_unsupported_reason(x, None) is not None
    ):
        if out is None:
            return _TORCHS_OWN(x, dim, keepdim)
        return _TORCHS_OWN(x, dim, keepdim, out=out)
    if out is None:
        if can_bypass_dispatcher(x) and not torch_private.any_autocast() and x.dim() and x.numel():
            if torch_private.profiling():
                return recorded("logsumexp", _apply, x, dims, keepdim)
            return _apply(x, dims, keepdim)
        return logsumexp(x, dims, keepdim)
    if not takes_out(out, x, x.dtype):
        return _TORCHS_OWN(x, dim, keepdim, out=out)
    result = logsumexp(x, dims, keepdim)
    if out.shape != result.shape and out.numel():  # torch resizes it, and warns
        return _TORCHS_OWN(x, dim, keepdim, out=out)
    return written(result, out)


def _apply(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        return _row_logsumexp(x, (dims, keepdim, None))
    return _forward_or_torch(x, dims, keepdim)


def planned_logsumexp(x: Tensor, dim: Any, index: int | None, backward: bool) -> Answer:
    """What logsumexp of x over one dimension would run, or its gradient."""
    if index is None:
        _TORCHS_OWN(x, dim)  # raises torch's error
        return "only PyTorch's own takes these arguments"
    reason = call_unsupported_reason(x, None) or too_long_reason(x, index)
    if reason is not None:
        if x.is_complex() or not x.dim():
            _TORCHS_OWN(x.new_zeros(1), 0)  # raises the call's error
        return reason
    if x.numel() == 0:
        return EMPTY
    if x.dim() == 0:
        return "a tensor of no dimensions is PyTorch's"
    index %= x.dim()
    if (found := as_it_lies.planned_logsumexp(x, index, backward)) is not None:
        return found
    return rows.planned_statistics(rows_or_copy(x.movedim(index, -1)), x, 0, backward)


def forward_by_kernel(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """By the kernels that take x as it lies, or over rows, which may be a copy."""
    lse = as_it_lies.logsumexp_forward(x, dims, keepdim)
    return rows.logsumexp_forward(x, dims, keepdim) if lse is None else lse


def backward_by_kernel(g: Tensor, x: Tensor, lse: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """The gradient, as `forward_by_kernel`."""
    dx = as_it_lies.logsumexp_backward(g, x, lse, dims)
    return rows.logsumexp_backward(g, x, lse, dims) if dx is None else dx


def _forward_or_torch(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    try:
        return forward_by_kernel(x, dims, keepdim)
    except KernelUnavailable:
        return _TORCHS_OWN(x, dims, keepdim)


class RowLogsumexp(torch.autograd.Function):
    """logsumexp of a plain tensor that needs a gradient: the operator's autograd, without the dispatcher.

    It takes dims, keepdim, and the result of rows that the kernels take as they lie, or None where it is to be made.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, described: tuple[tuple[int, ...], bool, Tensor | None]) -> Tensor:
        dims, keepdim, made = described
        lse = _forward_or_torch(x, dims, keepdim) if made is None else made
        ctx.save_for_backward(x, lse)
        ctx.described = dims, keepdim, made is not None
        ctx.set_materialize_grads(False)
        return lse

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, None]:
        if g is None:
            return None, None
        x, lse = ctx.saved_tensors
        dims, keepdim, of_rows = ctx.described
        if torch.is_grad_enabled() or not can_bypass_dispatcher(g):
            if in_forward_ad():  # an operator would drop tangents
                return decompositions.logsumexp_gradient(g, x, lse, list(dims), keepdim), None
            return logsumexp_backward(g, x, lse, list(dims), keepdim), None
        if of_rows:
            try:
                return rows.gradient_of_rows(g, x, lse), None
            except KernelUnavailable:
                pass
        return _backward_kernel(g, x, lse, list(dims), keepdim), None


_row_logsumexp = function_apply(RowLogsumexp)


def _takes(x: Tensor) -> bool:
    return x.dim() > 0 and is_supported(x)


def _kernel(x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    if not dim or not _takes(x):
        return _TORCHS_OWN(x, dim, keepdim)
    for d in dim:
        expect_in_range(d, x.dim())
    return _forward_or_torch(x, tuple(sorted({d % x.dim() for d in dim})), keepdim)


def _reduced(x: Tensor, dim: list[int], keepdim: bool) -> tuple[int, ...]:
    """The result's shape."""
    gone = {d % max(1, x.dim()) for d in dim} or set(range(x.dim()))
    return tuple(1 if d in gone else size for d, size in enumerate(x.shape) if keepdim or d not in gone)


def _fake(x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    for d in dim:
        expect_in_range(d, x.dim())
    return x.new_empty(_reduced(x, dim, keepdim), dtype=x.dtype if x.is_floating_point() else torch.get_default_dtype())


def _backward_kernel(g: Tensor, x: Tensor, lse: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    if dim and _takes(x):
        dims = tuple(sorted({d % x.dim() for d in dim}))
        try:
            return backward_by_kernel(g.to(x.dtype), x, lse, dims, keepdim)
        except KernelUnavailable:
            pass
    return decompositions.logsumexp_gradient(g, x, lse, dim, keepdim).contiguous()


def _checked_backward_kernel(g: Tensor, x: Tensor, lse: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    of_rows = _reduced(x, dim, keepdim)
    expect_layout("g", g, x, of_rows)
    expect_layout("lse", lse, x, of_rows)
    return _backward_kernel(g, x, lse, dim, keepdim)


def _backward_fake(g: Tensor, x: Tensor, lse: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    return x.new_empty(x.shape)


logsumexp = define("logsumexp(Tensor x, int[] dim, bool keepdim=False) -> Tensor", _kernel, _fake)
logsumexp_backward = define(
    "logsumexp_backward(Tensor g, Tensor x, Tensor lse, int[] dim, bool keepdim=False) -> Tensor",
    _checked_backward_kernel,
    _backward_fake,
)


def _autocast(x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    return logsumexp(x.float() if x.dtype in HALVES else x, dim, keepdim)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.dims, ctx.keepdim = inputs
    ctx.save_for_backward(x, output)


def _gradient(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, None, None]:
    x, lse = ctx.saved_tensors
    return (None if g is None else logsumexp_backward(g, x, lse, ctx.dims, ctx.keepdim)), None, None


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    g, x, lse, ctx.dims, ctx.keepdim = inputs
    ctx.save_for_backward(g, x, lse)


def _double_backward(ctx: Any, gg: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
    g, x, lse = ctx.saved_tensors
    return *decompositions.logsumexp_double_backward(gg, g, x, lse, ctx.dims, ctx.keepdim), None, None


def _dims_past_batch(dim: list[int], n_dims: int) -> list[int]:
    return [past_batch(d, n_dims) for d in dim] or list(range(1, n_dims + 1))


def _vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, dim: list[int], keepdim: bool = False) -> tuple[Tensor, int]:
    x = x.movedim(in_dims[0], 0)
    if x.dim() == 1:
        for d in dim:
            expect_in_range(d, 0)
        return logsumexp(x.unsqueeze(1), [1], False), 0
    return logsumexp(x, _dims_past_batch(dim, x.dim() - 1), keepdim), 0


def _backward_vmap(
    info: Any, in_dims: tuple[Any, ...], g: Tensor, x: Tensor, lse: Tensor, dim: list[int], keepdim: bool = False
) -> tuple[Tensor, int]:
    g, x, lse = (with_batch(t, d, info.batch_size) for t, d in zip((g, x, lse), in_dims, strict=False))
    if x.dim() == 1:
        return logsumexp_backward(g, x.unsqueeze(1), lse, [1], False).squeeze(1), 0
    return logsumexp_backward(g, x, lse, _dims_past_batch(dim, x.dim() - 1), keepdim), 0


under_autocast("logsumexp", _autocast)
differentiable("logsumexp", _gradient, _save, _TORCHS_OWN)
differentiable("logsumexp_backward", _double_backward, _save_backward, decompositions.logsumexp_gradient)
batched("logsumexp", _vmap)
batched("logsumexp_backward", _backward_vmap)
planned_by("logsumexp", lambda asked: planned_logsumexp(asked.x, asked.dim, asked.index, asked.backward))
