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

from .availability import KernelUnavailable
from .launch import MAX_COLS, prepared_for
from .rows import as_rows, left_to_torch, row_invariance
from .torch_ops import torch_private
from .torch_ops.torch_private import forward_ad

# shapes remembered; a program that meets more starts over
CAPACITY = 8192

_known: dict[tuple[Any, ...], Any] = {}
_torch: Any = object()  # remembered: torch's own kernel is the better choice
_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled
_dispatch_modes = torch_private.dispatch_modes
_transform = torch_private.innermost_transform
_tracing = torch_private.is_tracing
_autocast = torch_private.any_autocast
_deterministic = torch_private.deterministic_algorithms
_invariant = row_invariance.get
# None in a build without CUDA, where no tensor is_cuda
_current_device = torch_private.current_device
_current_stream = torch_private.current_stream
_empty = torch_private.empty_strided_cuda


def forward(x: Any, dim: Any, log: bool) -> Tensor | None:
    """softmax or log_softmax of x over dim, or None where this way is not for it."""
    if type(x) is not Tensor or type(dim) is not int or _compiling() or not x.is_cuda:
        return None
    # `_watched`, written out: this is where a call's microseconds go
    if (x.requires_grad and _grad_enabled()) or _dispatch_modes() or _transform() is not None or _autocast():
        return None
    if forward_ad._current_level >= 0 or _tracing() or not x.is_contiguous() or x.is_neg():
        return None
    address = x.data_ptr()
    index = x.get_device()
    key = (x.shape, x.stride(), x.dtype, dim, log, address & 31, index, _invariant())
    known = _known.get(key)
    if known is None:
        known = _remember(key, x, dim, log, key[-1])
    if known is False or _current_device() != index or _deterministic():
        return None
    if known is _torch:
        return torch.log_softmax(x, dim) if log else torch.softmax(x, dim)
    shape, stride, dtype, x_offset, y_offset, n_rows, grid, call, middle, rest = known
    y = _empty(shape, stride, dtype)
    # `Binding.run`, written out
    call(
        grid, 1, 1, _current_stream(index), *middle,
        address - x_offset, y.data_ptr() - y_offset, n_rows, *rest,
    )  # fmt: skip
    return y


def known_but_for_its_gradient(x: Any, dim: Any, log: bool) -> Any:
    """What `forward` remembers of a call like this, where x's gradient alone is in its way; else None."""
    if type(x) is not Tensor or type(dim) is not int or _compiling() or not (x.requires_grad and x.is_cuda):
        return None
    if not _grad_enabled() or _watched() or not x.is_contiguous() or x.is_neg():
        return None
    index = x.get_device()
    known = _known.get((x.shape, x.stride(), x.dtype, dim, log, x.data_ptr() & 31, index, _invariant()))
    return known if type(known) is tuple and _current_device() == index and not _deterministic() else None


def forward_known(x: Tensor, known: Any) -> Tensor:
    """The forward of x as `known_but_for_its_gradient` has it."""
    shape, stride, dtype, x_offset, y_offset, n_rows, grid, call, middle, rest = known
    y = _empty(shape, stride, dtype)
    call(
        grid, 1, 1, _current_stream(x.get_device()), *middle,
        x.data_ptr() - x_offset, y.data_ptr() - y_offset, n_rows, *rest,
    )  # fmt: skip
    return y


def _watched() -> bool:
    """Whether somebody would have to see the call: a mode, a transform, autocast, forward AD, a trace."""
    return (
        _dispatch_modes() > 0 or _transform() is not None or _autocast() or forward_ad._current_level >= 0 or _tracing()
    )


def backward(dy: Tensor, y: Tensor, dim: int, log: bool, invariant: bool) -> Tensor | None:
    """The gradient from the output y, for plain tensors of one dtype without gradients; None as `forward`.

    `invariant` is what the forward ran under: autograd calls from a thread of its own.
    """
    if not y.is_cuda or dy.dtype is not y.dtype or dy.shape != y.shape:
        return None
    if type(dim) is not int or not y.is_contiguous() or not dy.is_contiguous() or y.is_neg() or dy.is_neg():
        return None
    y_address, dy_address, index = y.data_ptr(), dy.data_ptr(), y.get_device()
    key = (y.shape, y.stride(), dy.stride(), y.dtype, dim, log, y_address & 31, dy_address & 31, index, invariant)
    known = _known.get(key)
    if known is None:
        known = _remember(key, y, dim, log, invariant, dy)
    if known is False or _current_device() != index:
        return None
    shape, stride, dtype, y_offset, dy_offset, dx_offset, n_rows, grid, call, middle, rest = known
    dx = _empty(shape, stride, dtype)
    call(
        grid, 1, 1, _current_stream(index), *middle,
        y_address - y_offset, dy_address - dy_offset, dx.data_ptr() - dx_offset, n_rows, *rest,
    )  # fmt: skip
    return dx


def _remember(key: tuple[Any, ...], x: Tensor, dim: int, log: bool, invariant: bool, dy: Tensor | None = None) -> Any:
    """What a call like this takes from now on; False where it takes the long way."""
    if len(_known) >= CAPACITY:
        _known.clear()
    _known[key] = known = _prepare(x, dim, log, invariant, dy)
    return known


def _prepare(x: Tensor, dim: int, log: bool, invariant: bool, dy: Tensor | None) -> Any:
    last = x.dim() > 0 and dim in (-1, x.dim() - 1)
    if not last or _empty is None or not x.numel() or x.shape[-1] > MAX_COLS:
        return False
    if dy is None and left_to_torch(x, dim, x.dtype):
        return _torch
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tensors = (x, result) if dy is None else (x, dy, result)
    # as_rows and no view: a single row keeps the stride of the tensor that it was taken from
    folded = [as_rows(t, x.dim() - 1) for t in tensors]
    if any(t is None for t in folded):
        return False
    try:
        prepared = prepared_for(tuple(t for t in folded if t is not None), log, invariant, backward=dy is not None)
    except KernelUnavailable:
        return _torch if dy is None else False
    if prepared is None or result.data_ptr() % 32:
        return False
    n_rows = x.numel() // x.shape[-1]
    grid = -(-n_rows // prepared.rows)
    return (tuple(x.shape), result.stride(), x.dtype, *prepared.offsets, n_rows, grid, *prepared.binding)
