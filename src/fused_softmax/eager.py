"""The shortest way from a call to its launch, for what most calls are: a contiguous tensor on the current GPU, its last
dimension, no gradient, nobody watching.

Such a call's plan, kernel, grid and output are those of the last call of its shape, dtype, alignment and device, so all
of it is kept under a key of those: a call is then the checks, one look-up, one allocation, one launch. Every other
call, and the first of its kind, takes `functional`'s way through `rows` and `launch`. docs/host-time.md counts the
microseconds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import guards
from torch.autograd import forward_ad

from .launch import prepared_for
from .rows import left_to_torch, row_invariance

# shapes remembered; a program that meets more starts over
CAPACITY = 8192

_known: dict[tuple[Any, ...], Any] = {}
_torch: Any = object()  # remembered: torch's own kernel is the better choice
_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack
_tracing = torch._C._get_tracing_state
_autocast = torch._C._is_any_autocast_enabled
_deterministic = torch._C._get_deterministic_algorithms
_invariant = row_invariance.get
# the CUDA functions and the allocation behind torch.empty; absent from a build without CUDA, where no tensor is_cuda
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_empty: Any = getattr(guards, "_empty_strided_cuda", None)  # absent from an older torch, too


def forward(x: Any, dim: Any, log: bool) -> Tensor | None:
    """softmax or log_softmax of x over dim, or None where this way is not for it."""
    if type(x) is not Tensor or _compiling() or not x.is_cuda or (x.requires_grad and _grad_enabled()):
        return None
    if _dispatch_modes() or _transform() is not None or _autocast() or forward_ad._current_level >= 0:
        return None  # somebody watches
    address = x.data_ptr()
    index = x.get_device()
    key = (x.shape, x.dtype, dim, log, address & 31, index, _invariant())
    known = _known.get(key)
    if known is None:
        known = _remember(key, x, dim, log)
    if known is False or not x.is_contiguous() or _current_device() != index or _deterministic() or _tracing():
        return None
    if known is _torch:
        return torch.log_softmax(x, dim) if log else torch.softmax(x, dim)
    shape, stride, dtype, x_offset, y_offset, n_rows, grid, run = known
    y = _empty(shape, stride, dtype)
    run(grid, _current_stream(index), address - x_offset, y.data_ptr() - y_offset, n_rows)
    return y


def needs_gradient(x: Any, dim: Any, log: bool) -> bool:
    """Whether x is what `forward` takes but for its gradient, and has been here before."""
    if type(x) is not Tensor or _compiling() or not (x.requires_grad and x.is_cuda and _grad_enabled()):
        return False
    if _dispatch_modes() or _transform() is not None or _autocast() or forward_ad._current_level >= 0:
        return False
    return type(_known.get((x.shape, x.dtype, dim, log, x.data_ptr() & 31, x.get_device(), _invariant()))) is tuple


def backward(dy: Tensor, y: Tensor, dim: int, log: bool) -> Tensor | None:
    """The gradient from the output y, for plain tensors of one dtype without gradients; None as `forward`."""
    if not y.is_cuda or dy.dtype is not y.dtype or dy.shape != y.shape:
        return None
    y_address, dy_address, index = y.data_ptr(), dy.data_ptr(), y.get_device()
    key = (y.shape, y.dtype, dim, log, y_address & 31, dy_address & 31, index, _invariant())
    known = _known.get(key)
    if known is None:
        known = _remember(key, y, dim, log, dy)
    if known is False or not (y.is_contiguous() and dy.is_contiguous()) or _current_device() != index:
        return None
    shape, stride, dtype, y_offset, dy_offset, dx_offset, n_rows, grid, run = known
    dx = _empty(shape, stride, dtype)
    run(
        grid, _current_stream(index),
        y_address - y_offset, dy_address - dy_offset, dx.data_ptr() - dx_offset, n_rows,
    )  # fmt: skip
    return dx


def _remember(key: tuple[Any, ...], x: Tensor, dim: Any, log: bool, dy: Tensor | None = None) -> Any:
    """What a call like this takes from now on; False where it takes the long way."""
    if len(_known) >= CAPACITY:
        _known.clear()
    _known[key] = known = _prepare(x, dim, log, dy)
    return known


def _prepare(x: Tensor, dim: Any, log: bool, dy: Tensor | None) -> Any:
    last = type(dim) is int and x.dim() > 0 and dim in (-1, x.dim() - 1)
    inputs = (x,) if dy is None else (x, dy)
    if not last or _empty is None or not x.numel() or not all(t.is_contiguous() and not t.is_neg() for t in inputs):
        return False
    if dy is None and left_to_torch(x, dim, x.dtype):
        return _torch
    result = torch.empty_like(x)
    n_rows, n_cols = x.numel() // x.shape[-1], x.shape[-1]
    prepared = prepared_for(
        tuple(t.view(n_rows, n_cols) for t in (*inputs, result)), log, _invariant(), backward=dy is not None
    )
    if prepared is None or result.data_ptr() % 32:
        return False
    grid = -(-n_rows // prepared.rows)
    return (tuple(x.shape), x.stride(), x.dtype, *prepared.offsets, n_rows, grid, prepared.run)
