"""Where a call goes: to PyTorch's own kernels, with a reason; to the dispatcher; or directly to our kernels.

`unsupported_reason` says why our kernels cannot take a call. The dispatcher may be bypassed where nothing but autograd
would see the call (`can_bypass_dispatcher`); while torch.compile traces, an operator of ours stands in the graph
(`is_compiled`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ..launch import torch_private
from ..launch.availability import note
from ..launch.cache import Cache
from ..launch.device import describe, interpreting
from ..launch.layout import DTYPE_NAMES, HALVES, MAX_COLS
from ..launch.recent_calls import RecentCalls
from ..launch.torch_private import can_bypass, in_forward_ad, is_traced, is_watched
from ..planning.types import Device, Plan
from .arguments import NAMESPACE, is_dtensor


@dataclass(frozen=True)
class Fallback:
    """None of our kernels runs, and `why`.

    regime: "torch", PyTorch's own kernel runs, or "empty", none does. reason: "unsupported", our kernels cannot take
    the call, or "empty".
    """

    why: str
    regime: str = "torch"
    reason: str = "unsupported"


class PlanRequest(NamedTuple):
    """What `plan_for` asks of an op. index: dim as an int in range; None where torch's own function judges dim."""

    x: Tensor
    dim: Any
    index: int | None  # type: ignore[assignment]  # not a tuple's method
    dtype: torch.dtype | None
    mask: Tensor | None
    backward: bool
    linear_weight: Tensor | None = None
    causal: bool = False


# what an op answers `plan_for`; a str says why our kernels cannot take the call
Answer = Plan | Fallback | str
# the ops that `plan_for` knows; each file of torch_ops adds its own
PLANNED: dict[str, Callable[[PlanRequest], Answer]] = {}
# the plan of logits (N, C, d1, ...) as they lie, by op; None where they are copied. The file that has it registers it
AS_THEY_LIE: dict[str, Callable[[Tensor], Plan | None]] = {}
# what a public function makes of a DTensor, by op; `parallel` registers it, and `load_sharded` imports that
SHARDED: dict[str, Callable[..., Any]] = {}
load_sharded: Callable[[], Any] = SHARDED.clear


def of_dtensor(op: str, public: Callable[..., Any], x: Any, *args: Any) -> Any:
    """The result of a public function for a DTensor, as `parallel.dtensor` has it; None for all else, and where it is
    PyTorch's."""
    if not is_dtensor(x):
        return None
    if not SHARDED:
        load_sharded()
    return SHARDED[op](public, x, *args)


def planned_by(op: str, answer: Callable[[PlanRequest], Answer]) -> None:
    """Registers what answers `plan_for(x, op=op)`."""
    PLANNED[op] = answer


def recorded(op: str, call: Callable[..., Any], *args: Any) -> Any:
    """call(*args), as `fused_softmax::<op>` in the profile of an active torch profiler."""
    with torch.profiler.record_function(f"{NAMESPACE}::{op}"):
        return call(*args)


EMPTY = Fallback("the tensor is empty: nothing is launched", "empty", "empty")
# device types whose tensors have kernels, for torch.compile: it asks no device while it traces
_KERNEL_DEVICES = ("cpu",) if interpreting() else ("cuda",)
_is_compiling = torch.compiler.is_compiling
_transform = torch_private.innermost_transform
_has_storage = torch_private.has_storage


def can_bypass_dispatcher(x: Tensor) -> bool:
    """Whether nothing but autograd and autocast would see a call with x, which has memory of its own.

    Tensors without it are the batched gradients of autograd.grad(is_grads_batched=True), for one.
    """
    return can_bypass(x) and _has_storage(x)


def unsupported_reason(x: Tensor, dtype: torch.dtype) -> str | None:
    """Why our kernels cannot take x, computed in `dtype`; None where they can. A reason is logged once."""
    if dtype not in DTYPE_NAMES:
        return note(f"{dtype} is PyTorch's: the kernels compute in float32")
    if x.dtype is torch.float64:
        return note("float64 is PyTorch's")
    if x.layout is not torch.strided or x.is_nested:
        return note("sparse and nested tensors are PyTorch's")
    device = describe(x.device)
    return None if isinstance(device, Device) else note(str(device))


def is_supported(x: Tensor) -> bool:
    """Whether x has elements, and our kernels can take it in its own dtype."""
    return x.numel() > 0 and unsupported_reason(x, x.dtype) is None


_layouts = Cache()
_recent_layouts = RecentCalls()
_INT64 = torch.int64


def layout_of_rows(x: Any, ids: Any = None) -> object | None:
    """What all x, (n_rows, n_cols) on a GPU, and ids, (n_rows,), that lie like these share, as a key; None for others.

    It is for plain tensors that our kernels take as they lie, and asks for what is plainly right. An op whose tensors
    are otherwise has a longer way, which judges wrong ones too. ids: None where the op has none.
    """
    if type(x) is not Tensor or (ids is not None and type(ids) is not Tensor):
        return None
    watched = is_watched()
    try:
        shape = x.shape
        if len(shape) != 2:
            return None
        if not watched:
            for check, phase, layout in _recent_layouts.get((shape[1], ids is None), ()):
                if check(x) if ids is None else check(x, ids):
                    n_rows = shape[0]
                    if x.data_ptr() & 31 == phase and n_rows and (ids is None or ids.numel() == n_rows):
                        return layout
        if not x.is_cuda or not can_bypass(x):
            return None
        address = x.data_ptr()
    except RuntimeError:  # it has no memory of its own
        return None
    n_rows, n_cols = shape
    index = x.get_device()
    if ids is not None:
        if ids.dim() != 1 or ids.numel() != n_rows or not ids.is_contiguous():
            return None
        if ids.get_device() != index or ids.dtype is not _INT64:
            return None
    if not n_rows:
        return None
    # a single row has the stride of the tensor that it was taken from
    strides = None if n_rows > 1 and x.is_contiguous() else x.stride()
    key = (n_cols, strides, x.dtype, address & 31, index, ids is None)
    found = _layouts.get(key)
    if found is None:
        found = _layouts.store(key, object() if _lie_as_kernels_read(x, ids) else False)
    if found is False:
        return None
    if not watched and (ids is None or n_rows > 1):
        given = (x,) if ids is None else (x, ids)
        _recent_layouts.add((n_cols, ids is None), given, True, address & 31, found)
    return found


def _lie_as_kernels_read(x: Tensor, ids: Tensor | None) -> bool:
    return (
        (ids is None or ids.device == x.device)
        and x.stride(1) == 1
        and 0 < x.shape[1] <= MAX_COLS
        and unsupported_reason(x, x.dtype) is None
    )


def supports_fused_cast(from_dtype: torch.dtype, to_dtype: torch.dtype) -> bool:
    """Whether the kernels read from_dtype and write to_dtype without a cast before them."""
    return from_dtype is to_dtype or (from_dtype in HALVES and to_dtype is torch.float32)


def promotes(x: Tensor) -> bool:
    """Whether autocast makes float32 of softmax's result; with out= it does not."""
    return x.is_cuda and torch.is_autocast_enabled("cuda")


def call_unsupported_reason(x: Tensor, dtype: torch.dtype | None) -> str | None:
    """Why this call of softmax or logsumexp is PyTorch's, or None where our kernels or operators take it."""
    out_dtype = x.dtype if dtype is None else dtype
    if _is_compiling():
        return unsupported_while_compiling_reason(x, out_dtype)
    if type(x) is not Tensor and type(x) is not Parameter and not is_traced(x):
        return f"{type(x).__name__} is a subclass of Tensor: only its own class knows what softmax of it is"
    if in_forward_ad():
        return "forward-mode AD is PyTorch's"
    if _transform() is not None and _differentiates():
        return "torch.func's gradients are PyTorch's"
    return unsupported_reason(x, out_dtype)


def too_long_reason(x: Tensor, *dims: int) -> str | None:
    """Why rows over dims are PyTorch's, where they hold more than the kernels count in a row, or None."""
    if _is_compiling() or x.numel() <= MAX_COLS:
        return None
    n_cols = math.prod([x.shape[d] for d in dims])
    return f"a row of {n_cols} columns is PyTorch's" if n_cols > MAX_COLS else None


def unsupported_while_compiling_reason(x: Tensor, dtype: torch.dtype) -> str | None:
    """`unsupported_reason` as far as a trace can know it; the operator asks again, on the real tensor."""
    # isinstance, not None: dynamo wraps the object
    if isinstance(torch_private.innermost_transform(), torch_private.Transform):
        return "a transform of torch.func inside torch.compile is PyTorch's"
    if x.device.type not in _KERNEL_DEVICES:
        return f"no kernels for device type {x.device.type!r}"
    return None if dtype in (*HALVES, torch.float32) else f"{dtype} is PyTorch's"


def is_compiled(x: Tensor, *others: Tensor | None) -> bool:
    """Whether torch.compile is tracing, and an operator of ours may stand in its graph for x and others.

    They must be plain tensors; x's dtype and device type must have kernels. What it takes real tensors to know (empty
    ones, strides) is left to the operator.
    """
    return (
        torch.compiler.is_compiling()
        and all(t is None or type(t) is Tensor or type(t) is Parameter or is_traced(t) for t in (x, *others))
        and not in_forward_ad()
        and unsupported_while_compiling_reason(x, x.dtype) is None
    )


def _differentiates() -> bool:
    """Whether torch.func.grad or a kin is in progress: an operator's autograd formula does not reach there."""
    stack = torch_private.transforms() or ()
    return any(interpreter.key() != torch_private.TransformType.Vmap for interpreter in stack)


def operator_takes(*tensors: Tensor) -> bool:
    """Whether an operator of a linear loss may stand for a call with these: while tracing, and in a mode.

    It is not differentiated by torch.func, subclasses of Tensor know their own formulas, and torch.jit's tracer takes
    no list of bools.
    """
    return (
        not torch.jit.is_tracing()
        and not isinstance(torch_private.innermost_transform(), torch_private.Transform)
        and not in_forward_ad()
        and all(type(t) is Tensor or type(t) is Parameter or is_traced(t) for t in tensors)
    )
