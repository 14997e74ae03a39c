"""The ops as PyTorch operators, fused_softmax::softmax and so on: schema, kernel, fake kernel, autocast and vmap.

They are what torch.compile, torch.export, torch.func and dispatch modes see: one op, with one shape rule that takes any
width. What the kernels do not take (`refusal`) is PyTorch's own, called from inside. Their gradients are in
gradients.py; forward-mode AD has no rule: functional.py hands it to torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from . import row_losses, rows
from .device import describe, interpreting
from .launch import DTYPE_NAMES
from .problem import Device
from .torch_ops import torch_private
from .torch_ops.torch_private import forward_ad
from .untraced import untraced

_HALVES = (torch.float16, torch.bfloat16)


def refusal(x: Tensor, dtype: torch.dtype) -> str | None:
    """Why x, computed in `dtype`, is left to PyTorch's own kernels; None where ours take it."""
    if dtype not in DTYPE_NAMES:
        return f"{dtype} is PyTorch's: the kernels compute in float32"
    if x.dtype is torch.float64:
        return "float64 is PyTorch's"
    if x.layout is not torch.strided or x.is_nested:
        return "sparse and nested tensors are PyTorch's"
    device = describe(x.device)
    return None if isinstance(device, Device) else str(device)


def fuses(from_dtype: torch.dtype, to_dtype: torch.dtype) -> bool:
    """Whether the kernels read from_dtype and write to_dtype without a cast before them."""
    return from_dtype is to_dtype or (from_dtype in _HALVES and to_dtype is torch.float32)


def is_plain(x: Tensor) -> bool:
    """Whether nothing but autograd watches x: then the dispatcher can be left out.

    False while compiling, tracing, in a dispatch mode, under torch.func or forward-mode AD, for subclasses, for lazily
    negated views and for what has no memory of its own, as the gradients that autograd.grad(is_grads_batched=True)
    hands in as one.
    """
    return (
        not torch.compiler.is_compiling()
        and (type(x) is Tensor or type(x) is Parameter)
        and not torch_private.dispatch_modes()
        and torch_private.innermost_transform() is None
        and forward_ad._current_level < 0
        and torch_private.tracing_state() is None
        and not x.is_neg()
        and torch_private.has_storage(x)
    )


def other_device_error(name: str, t: Tensor, x_name: str, x: Tensor) -> RuntimeError:
    """The error, in torch's words, for t on another device than x, whose kernel would take t's address."""
    return RuntimeError(
        f"Expected all tensors to be on the same device, but {name} is on {t.device} and {x_name} is on {x.device}"
    )


# device types whose tensors have kernels, for torch.compile: it asks no device while it traces
_KERNEL_DEVICES = ("cpu",) if interpreting() else ("cuda",)


def refusal_while_compiling(x: Tensor, dtype: torch.dtype) -> str | None:
    """`refusal` as far as a trace can know it; the operator asks again, on the real tensor."""
    # isinstance, not None: dynamo wraps what it finds
    if isinstance(torch_private.innermost_transform(), torch_private.Transform):
        return "a transform of torch.func inside torch.compile is PyTorch's"
    if x.device.type not in _KERNEL_DEVICES:
        return f"no kernels for device type {x.device.type!r}"
    return None if dtype in (*_HALVES, torch.float32) else f"{dtype} is PyTorch's"


def is_compiled(x: Tensor, *others: Tensor | None) -> bool:
    """Whether torch.compile is tracing, and an operator of ours may stand in its graph for x and others.

    They must be plain tensors; x's dtype and device type must have kernels. What it takes real tensors to know (empty
    ones, strides) is left to the operator.
    """
    return (
        torch.compiler.is_compiling()
        and all(t is None or type(t) is Tensor or type(t) is Parameter or is_traced(t) for t in (x, *others))
        and forward_ad._current_level < 0
        and refusal_while_compiling(x, x.dtype) is None
    )


def is_traced(x: Tensor) -> bool:
    """Whether this is a tensor that stands for a plain one while a graph is made of the call."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(x, (FakeTensor, FunctionalTensor))


def least_positive(dtype: torch.dtype) -> float:
    """The least positive number of the dtype that `dtype` is computed in.

    A positive factor that would round to 0 becomes this: 0 times -inf would make NaN of hidden columns.
    """
    return 5e-324 if dtype is torch.float64 else 2.0**-149


# --- logsumexp's gradient, for what the kernels do not take, and for the gradient of the gradient


def over_rows(t: Tensor, x: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """t, reduced over dim, as a shape that broadcasts over x; in float32 at least."""
    if not keepdim:
        for d in sorted(d % max(1, x.dim()) for d in dim) if dim else range(x.dim()):
            t = t.unsqueeze(d) if x.dim() else t
    return widened(t)


def widened(t: Tensor) -> Tensor:
    """t in float32 at least."""
    return t.float() if t.dtype in _HALVES else t


def probabilities(x: Tensor, lse: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """exp(x - lse); as torch's, NaN where the whole row is -inf."""
    return (widened(x) - over_rows(lse, x, dim, keepdim)).exp()


# --- schemas and kernels ----------------------------------------------------------------------------------------------

library = torch.library.Library("fused_softmax", "DEF")


def define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """The operator fused_softmax::<schema>, of a kernel for any device and a fake kernel, which knows shapes alone."""
    name = schema.split("(")[0]
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, untraced(kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(f"fused_softmax::{name}", fake, lib=library)
    return getattr(torch.ops.fused_softmax, name).default


def not_differentiable(name: str) -> None:
    """Registers that fused_softmax::<name>, a gradient, has none: an error, where torch would warn and go on."""

    def backward(ctx: Any, *upstream: Tensor | None) -> None:
        raise RuntimeError(f"fused_softmax::{name} is a gradient that cannot be differentiated")

    torch.library.register_autograd(f"fused_softmax::{name}", backward, lib=library)


def _in_range(dim: int, n_dims: int) -> None:
    bound = max(1, n_dims)
    if not -bound <= dim < bound:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-bound}, {bound - 1}], but got {dim})")


def _forward_kernel(log: bool) -> Callable[..., Tensor]:
    def kernel(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        out_dtype = x.dtype if dtype is None else dtype
        if refusal(x, out_dtype) is not None:
            return (torch.log_softmax if log else torch.softmax)(x, dim, dtype=dtype)
        _in_range(dim, x.dim())
        return rows.forward_or_torch(x if fuses(x.dtype, out_dtype) else x.to(out_dtype), dim, out_dtype, log)

    return kernel


def _forward_fake(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    _in_range(dim, x.dim())
    out_dtype = x.dtype if dtype is None else dtype
    if not out_dtype.is_floating_point:
        raise NotImplementedError(f"softmax is not implemented for {out_dtype}")
    return x.new_empty(x.shape, dtype=out_dtype)


def _backward_kernel(log: bool) -> Callable[..., Tensor]:
    def kernel(dy: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
        _in_range(dim, y.dim())
        dy = dy.to(y.dtype)
        if refusal(y, y.dtype) is not None:
            own = torch._log_softmax_backward_data if log else torch._softmax_backward_data
            return own(dy, y, dim, y.dtype).to(input_dtype)
        if not fuses(input_dtype, y.dtype):
            return rows.backward_or_torch(dy, y, dim, y.dtype, log).to(input_dtype)
        return rows.backward_or_torch(dy, y, dim, input_dtype, log)

    return kernel


def _backward_fake(dy: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    _in_range(dim, y.dim())
    return y.new_empty(y.shape, dtype=input_dtype)


def _takes_logsumexp(x: Tensor) -> bool:
    return x.dim() > 0 and x.numel() > 0 and refusal(x, x.dtype) is None


def _logsumexp_kernel(x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    if not dim or not _takes_logsumexp(x):
        return torch.logsumexp(x, dim, keepdim)
    for d in dim:
        _in_range(d, x.dim())
    return row_losses.logsumexp_forward(x, tuple(sorted({d % x.dim() for d in dim})), keepdim)


def _logsumexp_fake(x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    for d in dim:
        _in_range(d, x.dim())
    gone = {d % max(1, x.dim()) for d in dim} or set(range(x.dim()))
    shape = [1 if d in gone else size for d, size in enumerate(x.shape) if keepdim or d not in gone]
    return x.new_empty(shape, dtype=x.dtype if x.is_floating_point() else torch.get_default_dtype())


def _logsumexp_backward_kernel(g: Tensor, x: Tensor, lse: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    if dim and _takes_logsumexp(x):
        dims = tuple(sorted({d % x.dim() for d in dim}))
        return row_losses.logsumexp_backward(g.to(x.dtype), x, lse, dims, keepdim)
    return over_rows(g, x, dim, keepdim).mul(probabilities(x, lse, dim, keepdim)).to(x.dtype)


def _logsumexp_backward_fake(g: Tensor, x: Tensor, lse: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    return x.new_empty(x.shape)


softmax = define("softmax(Tensor x, int dim, ScalarType? dtype=None) -> Tensor", _forward_kernel(False), _forward_fake)
log_softmax = define(
    "log_softmax(Tensor x, int dim, ScalarType? dtype=None) -> Tensor", _forward_kernel(True), _forward_fake
)
softmax_backward = define(
    "softmax_backward(Tensor dy, Tensor y, int dim, ScalarType input_dtype) -> Tensor",
    _backward_kernel(False),
    _backward_fake,
)
log_softmax_backward = define(
    "log_softmax_backward(Tensor dy, Tensor y, int dim, ScalarType input_dtype) -> Tensor",
    _backward_kernel(True),
    _backward_fake,
)
logsumexp = define("logsumexp(Tensor x, int[] dim, bool keepdim=False) -> Tensor", _logsumexp_kernel, _logsumexp_fake)
logsumexp_backward = define(
    "logsumexp_backward(Tensor g, Tensor x, Tensor lse, int[] dim, bool keepdim=False) -> Tensor",
    _logsumexp_backward_kernel,
    _logsumexp_backward_fake,
)

# --- autocast: float32 on CUDA, as torch; from a 16-bit input in the same pass ----------------------------------------

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)


def _softmax_autocast(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def autocast(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return operator(x, dim, torch.float32 if dtype is None and x.dtype in DTYPE_NAMES else dtype)

    return autocast


def _logsumexp_autocast(x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return logsumexp(x.float() if x.dtype in _HALVES else x, dim, keepdim)


library.impl("softmax", _softmax_autocast(softmax), "AutocastCUDA")
library.impl("log_softmax", _softmax_autocast(log_softmax), "AutocastCUDA")
library.impl("logsumexp", _logsumexp_autocast, "AutocastCUDA")

# --- vmap: one more dimension of rows, the first ----------------------------------------------------------------------


def _past_batch(dim: int, n_dims: int) -> int:
    """dim of a tensor of n_dims as it counts with a batch dimension before them."""
    _in_range(dim, n_dims)
    return dim % n_dims + 1


def _batched(t: Tensor, batch_dim: int | None, batch_size: int) -> Tensor:
    return t.expand(batch_size, *t.shape) if batch_dim is None else t.movedim(batch_dim, 0)


# The dispatcher leaves out trailing arguments that have their default: the rules have the schemas' defaults too.


def _forward_vmap(operator: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, int]]:
    def rule(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, dim: int, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, int]:
        x = x.movedim(in_dims[0], 0)
        if x.dim() == 1:
            _in_range(dim, 0)
            return operator(x.unsqueeze(1), 1, dtype).squeeze(1), 0
        return operator(x, _past_batch(dim, x.dim() - 1), dtype), 0

    return rule


def _backward_vmap(operator: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, int]]:
    def rule(
        info: Any, in_dims: tuple[Any, ...], dy: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype
    ) -> tuple[Tensor, int]:
        dy, y = _batched(dy, in_dims[0], info.batch_size), _batched(y, in_dims[1], info.batch_size)
        if y.dim() == 1:
            return operator(dy.unsqueeze(1), y.unsqueeze(1), 1, input_dtype).squeeze(1), 0
        return operator(dy, y, _past_batch(dim, y.dim() - 1), input_dtype), 0

    return rule


def _dims_past_batch(dim: list[int], n_dims: int) -> list[int]:
    return [_past_batch(d, n_dims) for d in dim] or list(range(1, n_dims + 1))


def _logsumexp_vmap(
    info: Any, in_dims: tuple[Any, ...], x: Tensor, dim: list[int], keepdim: bool = False
) -> tuple[Tensor, int]:
    x = x.movedim(in_dims[0], 0)
    if x.dim() == 1:
        for d in dim:
            _in_range(d, 0)
        return logsumexp(x.unsqueeze(1), [1], False), 0
    return logsumexp(x, _dims_past_batch(dim, x.dim() - 1), keepdim), 0


def _logsumexp_backward_vmap(
    info: Any, in_dims: tuple[Any, ...], g: Tensor, x: Tensor, lse: Tensor, dim: list[int], keepdim: bool = False
) -> tuple[Tensor, int]:
    g, x, lse = (_batched(t, d, info.batch_size) for t, d in zip((g, x, lse), in_dims, strict=False))
    if x.dim() == 1:
        return logsumexp_backward(g, x.unsqueeze(1), lse, [1], False).squeeze(1), 0
    return logsumexp_backward(g, x, lse, _dims_past_batch(dim, x.dim() - 1), keepdim), 0


for _name, _rule in (
    ("softmax", _forward_vmap(softmax)),
    ("log_softmax", _forward_vmap(log_softmax)),
    ("softmax_backward", _backward_vmap(softmax_backward)),
    ("log_softmax_backward", _backward_vmap(log_softmax_backward)),
    ("logsumexp", _logsumexp_vmap),
    ("logsumexp_backward", _logsumexp_backward_vmap),
):
    if torch_private.register_vmap is not None:
        torch_private.register_vmap(f"fused_softmax::{_name}", _rule, lib=library)
