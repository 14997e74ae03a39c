"""The shortest way from a call to its launch: a contiguous tensor on the current GPU, softmax over its last dimension.

Such a call's plan, kernel, grid and output are those of the last call of its shape, dtype, alignment and device, so all
of it is kept under a key of those: a call is then one look-up, one allocation and one launch. Every other call, and the
first of its kind, goes through `launch.softmax`. The caller has made sure that the dispatcher may be bypassed.
docs/host-time.md counts the microseconds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..planning.types import Device
from . import torch_private
from .availability import KernelUnavailable
from .compile import CAPACITY
from .context import row_invariance
from .device import describe
from .launcher import prepare_rows
from .layout import DTYPE_NAMES, MAX_COLS, as_rows
from .softmax import softmax_op, torch_is_faster_reason

TORCH: Any = object()  # PyTorch's own kernel is the better choice

_known: dict[tuple[Any, ...], Any] = {}
_deterministic = torch_private.deterministic_algorithms
_invariant = row_invariance.get
# None in a build without CUDA, where no tensor is_cuda
_current_device = torch_private.current_device
_current_stream = torch_private.current_stream
_empty = torch_private.empty_strided_cuda


def forward_call(x: Tensor, dim: int, log: bool) -> Any:
    """What `run_forward` takes for softmax or log_softmax of x over dim; TORCH; or None where this way is not for it.

    x: a plain tensor on a GPU, not lazily negated.
    """
    if not x.is_contiguous():
        return None
    index = x.get_device()
    invariant = _invariant()
    key = (x.shape, x.stride(), x.dtype, dim, log, x.data_ptr() & 31, index, invariant)
    known = _known.get(key)
    if known is None:
        known = _remember(key, x, dim, log, invariant)
    return None if known is False or _current_device() != index or _deterministic() else known


def run_forward(x: Tensor, known: Any) -> Tensor:
    """The forward of x as `forward_call` has it."""
    shape, stride, dtype, x_offset, y_offset, n_rows, grid, call, prefix, trailing = known
    y = _empty(shape, stride, dtype)
    # `Binding.run`, written out
    call(
        grid, 1, 1, _current_stream(x.get_device()), *prefix,
        x.data_ptr() - x_offset, y.data_ptr() - y_offset, n_rows, *trailing,
    )  # fmt: skip
    return y


def backward(dy: Tensor, y: Tensor, dim: int, log: bool, invariant: bool) -> Tensor | None:
    """The gradient from the output y, for plain tensors of one dtype without gradients; None as `forward_call`.

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
    shape, stride, dtype, y_offset, dy_offset, dx_offset, n_rows, grid, call, prefix, trailing = known
    dx = _empty(shape, stride, dtype)
    call(
        grid, 1, 1, _current_stream(index), *prefix,
        y_address - y_offset, dy_address - dy_offset, dx.data_ptr() - dx_offset, n_rows, *trailing,
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
    if x.dtype not in DTYPE_NAMES or not isinstance(describe(x.device), Device):
        return False
    if dy is None and torch_is_faster_reason(x, dim, x.dtype):
        return TORCH
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tensors = (x, result) if dy is None else (x, dy, result)
    # as_rows and no view: a single row keeps the stride of the tensor that it was taken from
    folded = tuple(rows for t in tensors if (rows := as_rows(t, x.dim() - 1)) is not None)
    if len(folded) < len(tensors) or result.data_ptr() % 32:
        return False
    op, flags = softmax_op(log, backward=dy is not None)
    try:
        prepared = prepare_rows(op, folded, (), flags, invariant)
    except KernelUnavailable:
        return TORCH if dy is None else False
    n_rows = x.numel() // x.shape[-1]
    assert prepared.binding is not None
    call, prefix, nones = prepared.binding
    trailing = (*prepared.scalars, *nones)
    shape = tuple(x.shape), result.stride(), x.dtype
    return (*shape, *prepared.offsets, n_rows, prepared.programs(n_rows), call, prefix, trailing)
