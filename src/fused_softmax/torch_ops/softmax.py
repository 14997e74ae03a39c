"""softmax and log_softmax as PyTorch sees them: the routes of a call, the operators, their autograd and vmap rules.

    dx = y * (dy - sum(dy * y))                softmax, from its output y
    dx = dy - exp(y) * sum(dy)                 log_softmax, from its output y

These are kernels; the gradients of these gradients are decompositions. Autograd saves the same tensor as in torch: the
output. RowSoftmax is the operators' autograd for a plain tensor, with no dispatcher in between.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..launch import torch_private
from ..launch.availability import KernelUnavailable
from ..launch.context import row_invariance
from ..launch.launcher import planned
from ..launch.layout import as_rows
from ..launch.options import TORCH
from ..launch.recent_softmax import (
    Described,
    prepared_into,
    recent_gradient,
    recent_softmax,
    size_of,
    softmax_into,
    softmax_result,
)
from ..launch.recent_softmax import softmax_backward as backward_call
from ..launch.softmax import (
    planned_backward,
    planned_elsewhere,
    prepare_backward,
    prepare_softmax,
    softmax_op,
)
from ..launch.softmax import softmax_backward as backward_by_kernel
from ..launch.softmax import softmax_forward as forward_by_kernel
from ..launch.torch_private import can_bypass, function_apply, has_storage, in_forward_ad, profiling
from . import decompositions
from . import softmax_rules as rules
from .arguments import FLOATING, expect_layout
from .library import batched, define, differentiable, expect_in_range, under_autocast
from .outputs import is_its_own, may_write_while_reading, takes_out, written
from .route import (
    EMPTY,
    Answer,
    PlanRequest,
    call_unsupported_reason,
    can_bypass_dispatcher,
    planned_by,
    promotes,
    recorded,
    supports_fused_cast,
    too_long_reason,
    unsupported_reason,
)

_any_autocast = torch_private.any_autocast
_is_grad_enabled = torch.is_grad_enabled
_increment_versions = torch_private.increment_versions
_invariant = row_invariance.get
_FLOAT32 = torch.float32
NAMES = {False: "softmax", True: "log_softmax"}
_RECORDED = {log: functools.partial(recorded, name) for log, name in NAMES.items()}


def direct_softmax(x: Any, dim: Any, dtype: torch.dtype | None, log: bool) -> Tensor | None:
    """softmax or log_softmax by a prepared call; None where the call takes `softmax_of`'s way."""
    if type(x) is not Tensor or type(dim) is not int:
        return None
    y = recent_softmax(x, dim, dtype, log, _row_softmax)
    if y is not None:
        return y
    if not x.is_cuda or not can_bypass(x):
        return None
    given, made = x.dtype, dtype
    if made is None:
        made = given if given is _FLOAT32 or not (_any_autocast() and promotes(x)) else _FLOAT32
    elif made is not given and not supports_fused_cast(given, made):
        return None
    around = _RECORDED[log] if profiling() else None
    y = softmax_result(x, dim, dtype, made, log, prepare_softmax, _row_softmax, around)
    return torchs_own(log)(x, dim, dtype=dtype) if y is TORCH else y


def direct_out(x: Any, dim: Any, dtype: Any, log: bool, out: Any) -> Tensor | None:
    """`direct_softmax` into a tensor of x's shape; both are contiguous, and do not overlap in part."""
    if type(x) is not Tensor or type(out) is not Tensor or type(dim) is not int:
        return None
    wrote = softmax_into(x, dim, dtype, log, out)
    if wrote is None:
        if not x.is_cuda or not can_bypass(x) or out.is_neg() or out.is_inference() or profiling():
            return None
        if (x.requires_grad or out.requires_grad) and _is_grad_enabled():
            return None
        wrote = prepared_into(x, dim, dtype, log, out, prepare_softmax, supports_fused_cast)
    if not wrote:
        return None
    _increment_versions((out,))
    return out


def softmax_of(
    x: Tensor, dim: Any, index: int | None, dtype: torch.dtype | None, out: Tensor | None, log: bool
) -> Tensor:
    """softmax or log_softmax of a tensor over dim, whose index is None where torch's own function judges it."""
    if index is None or call_unsupported_reason(x, dtype) is not None or too_long_reason(x, index) is not None:
        return _by_torch(x, dim, dtype, out, log)
    if dtype is None:
        # autocast, as torch has it on CUDA: float32, from a 16-bit input in the same pass
        dtype = torch.float32 if out is None and promotes(x) else x.dtype
    if not supports_fused_cast(x.dtype, dtype):
        x = cast(x, dtype)
    if out is not None:
        return _into(out, x, index, dtype, log)
    if not can_bypass_dispatcher(x):
        return (log_softmax if log else softmax)(x, index, dtype)

    return recorded(NAMES[log], _apply, x, index, dtype, log) if profiling() else _apply(x, index, dtype, log)


def _apply(x: Tensor, dim: int, dtype: torch.dtype, log: bool) -> Tensor:
    if x.requires_grad and _is_grad_enabled():
        with torch.no_grad():
            y = forward_or_torch(x, dim, dtype, log)
        return _row_softmax(x, (y, (dim, x.dtype, log, _invariant(), size_of(x, dim))))
    return forward_or_torch(x, dim, dtype, log)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in another dtype, with contiguous strides for a single row too: its copy is not a row of x's tensor."""
    return x.to(dtype, memory_format=torch.contiguous_format)


def _by_torch(x: Tensor, dim: Any, dtype: torch.dtype | None, out: Tensor | None, log: bool) -> Tensor:
    """PyTorch's own function, whose error wrong arguments get; its result is right where out overlaps x, too."""
    own = torchs_own(log)
    if out is None:
        return own(x, dim, dtype=dtype)
    apart = (
        not isinstance(out, Tensor)
        or out.shape != x.shape
        or not (can_bypass_dispatcher(x) and can_bypass_dispatcher(out))
        or not takes_out(out, x, x.dtype if dtype is None else dtype)
        or not is_its_own(out)
        or may_write_while_reading(out, x)
    )
    return own(x, dim, dtype=dtype, out=out) if apart else out.copy_(own(x, dim, dtype=dtype))


_SOFTMAX, _LOG_SOFTMAX = torch.softmax, torch.log_softmax  # as imported: a program may put ours in their place


def torchs_own(log: bool) -> Callable[..., Tensor]:
    """PyTorch's own function."""
    return _LOG_SOFTMAX if log else _SOFTMAX


def _into(out: Tensor, x: Tensor, dim: int, dtype: torch.dtype, log: bool) -> Tensor:
    if not takes_out(out, x, dtype):
        return torchs_own(log)(x, dim, dtype=dtype, out=out)
    if not (can_bypass_dispatcher(x) and can_bypass_dispatcher(out)):
        return written((log_softmax if log else softmax)(x, dim, dtype), out)
    if out.shape != x.shape:
        if out.numel():  # torch resizes it, and warns
            return torchs_own(log)(x, dim, dtype=dtype, out=out)
        out.resize_(x.shape)
    if not (is_its_own(out) and may_write_while_reading(out, x)):
        # copy_ raises, before it writes, where two elements of out share their memory
        return out.copy_(forward_or_torch(x, dim, dtype, log))
    forward_or_torch(x, dim, dtype, log, out)
    _increment_versions((out,))
    return out


def forward_or_torch(x: Tensor, dim: int, out_dtype: torch.dtype, log: bool, out: Tensor | None = None) -> Tensor:
    """The forward by our kernels, or PyTorch's own where one does not compile."""
    try:
        return forward_by_kernel(x, dim, out_dtype, log, out)
    except KernelUnavailable:
        own = torchs_own(log)
        return own(x, dim, dtype=out_dtype) if out is None else own(x, dim, dtype=out_dtype, out=out)


def backward_or_torch(
    dy: Tensor, y: Tensor, dim: int, in_dtype: torch.dtype, log: bool, invariant: bool | None = None
) -> Tensor:
    """The gradient by our kernels, or PyTorch's own where one does not compile."""
    try:
        return backward_by_kernel(dy, y, dim, in_dtype, log, invariant)
    except KernelUnavailable:
        return _torchs_own_backward(dy, y, dim, in_dtype, log).contiguous()


def _torchs_own_backward(dy: Tensor, y: Tensor, dim: int, in_dtype: torch.dtype, log: bool) -> Tensor:
    own = torch_private.log_softmax_backward_data if log else torch_private.softmax_backward_data
    return own(dy.to(y.dtype), y, dim, y.dtype).to(in_dtype)


class RowSoftmax(torch.autograd.Function):
    """softmax or log_softmax of a plain tensor that needs a gradient, without the dispatcher.

    The result is made before: what comes in a tuple is no input, and is returned as it is.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, made: tuple[Tensor, Described]) -> Tensor:
        y, ctx.described = made
        ctx.save_for_backward(y)
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, None]:
        if dy is None:
            return None, None
        (y,) = ctx.saved_tensors
        described = ctx.described
        if not _is_grad_enabled() and (dx := recent_gradient(dy, y, described)) is not None:
            return dx, None
        dim, dtype, log, invariant, _ = described
        plain = not _is_grad_enabled() and can_bypass(dy) and type(y) is Tensor
        if plain and (dx := backward_call(dy, y, described, prepare_backward)) is not None:
            return dx, None
        if plain and has_storage(dy):
            return backward_or_torch(dy, y, dim, dtype, log, invariant), None
        if in_forward_ad():  # an operator would drop tangents
            return (decompositions.log_softmax_gradient if log else decompositions.softmax_gradient)(
                dy, y, dim, dtype
            ), None
        return (log_softmax_backward if log else softmax_backward)(dy, y, dim, dtype), None


_row_softmax = function_apply(RowSoftmax)


def planned_softmax(
    x: Tensor, dim: Any, index: int | None, dtype: torch.dtype | None, log: bool, backward: bool
) -> Answer:
    """What `softmax_of` would run, or the backward of such a call for a contiguous upstream gradient."""
    if index is None:
        torchs_own(log)(x, dim, dtype=dtype)  # raises torch's error
        return "only PyTorch's own takes these arguments"
    reason = call_unsupported_reason(x, dtype) or too_long_reason(x, index)
    if reason is not None:
        if x.numel() and (x.dtype if dtype is None else dtype) not in FLOATING:
            torchs_own(log)(x.new_zeros(1), 0, dtype=dtype)  # raises the call's error
        return reason
    if x.numel() == 0:
        return EMPTY
    out_dtype = (torch.float32 if promotes(x) else x.dtype) if dtype is None else dtype
    # the output is new, so aligned and contiguous: a meta tensor stands in for it
    y = torch.empty(x.shape or (1,), dtype=out_dtype, device="meta")
    x = x if x.dim() else x.view(1)
    index %= x.dim()
    in_dtype = x.dtype if supports_fused_cast(x.dtype, out_dtype) else out_dtype
    if backward:
        return planned_backward(y, in_dtype, index, log, x)
    x_rows, out_rows = as_rows(x, index), as_rows(y, index)
    if x_rows is None or out_rows is None:
        return planned_elsewhere(x, y, index, log)
    rows = (x_rows if in_dtype is x.dtype else torch.empty_like(x_rows, dtype=in_dtype, device="meta"), out_rows)
    op, flags = softmax_op(log)
    return planned(op, rows, (), flags, x)


def _planned_by(log: bool) -> Callable[[PlanRequest], Answer]:
    return lambda asked: planned_softmax(asked.x, asked.dim, asked.index, asked.dtype, log, asked.backward)


planned_by("softmax", _planned_by(log=False))
planned_by("log_softmax", _planned_by(log=True))


# --- the operators ----------------------------------------------------------------------------------------------------


def _forward_kernel(log: bool) -> Callable[..., Tensor]:
    def kernel(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        out_dtype = x.dtype if dtype is None else dtype
        if unsupported_reason(x, out_dtype) is not None:
            return torchs_own(log)(x, dim, dtype=dtype)
        expect_in_range(dim, x.dim())
        return forward_or_torch(
            x if supports_fused_cast(x.dtype, out_dtype) else cast(x, out_dtype), dim, out_dtype, log
        )

    return kernel


def _backward_kernel(log: bool) -> Callable[..., Tensor]:
    def kernel(dy: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
        expect_in_range(dim, y.dim())
        expect_layout("dy", dy, y, y.shape)
        dy = dy.to(y.dtype)
        if unsupported_reason(y, y.dtype) is not None:
            return _torchs_own_backward(dy, y, dim, input_dtype, log)
        if not supports_fused_cast(input_dtype, y.dtype):
            return backward_or_torch(dy, y, dim, y.dtype, log).to(input_dtype)
        return backward_or_torch(dy, y, dim, input_dtype, log)

    return kernel


_FORWARD = "(Tensor x, int dim, ScalarType? dtype=None) -> Tensor"
_BACKWARD = "_backward(Tensor dy, Tensor y, int dim, ScalarType input_dtype) -> Tensor"
softmax = define(f"softmax{_FORWARD}", _forward_kernel(False), rules.forward_fake)
log_softmax = define(f"log_softmax{_FORWARD}", _forward_kernel(True), rules.forward_fake)
softmax_backward = define(f"softmax{_BACKWARD}", _backward_kernel(False), rules.backward_fake)
log_softmax_backward = define(f"log_softmax{_BACKWARD}", _backward_kernel(True), rules.backward_fake)


_once = (decompositions.softmax_gradient, decompositions.log_softmax_gradient)
_twice = (decompositions.softmax_double_backward, decompositions.log_softmax_double_backward)
for _log, _operator, _gradient in ((False, softmax, softmax_backward), (True, log_softmax, log_softmax_backward)):
    _name = NAMES[_log]
    under_autocast(_name, rules.autocast(_operator))
    differentiable(_name, rules.gradient_by(_gradient), rules.save_output, torchs_own(_log))
    differentiable(f"{_name}_backward", rules.double_backward(_twice[_log]), rules.save_backward, _once[_log])
    batched(_name, rules.forward_vmap(_operator))
    batched(f"{_name}_backward", rules.backward_vmap(_gradient))
