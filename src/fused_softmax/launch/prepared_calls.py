"""The direct path: a key leads to a prepared call, which allocates the output and launches.

A key holds whatever a kernel or its launch arguments were made for: op, dtypes, columns, strides, alignment, device and
batch invariance. For rows that lie one after another it does not hold their number, so a new batch size costs nothing.
Entries hold no tensor and no address. The caller has made sure that the dispatcher may be bypassed.
docs/host-time.md counts the microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..planning.types import Device
from . import torch_private
from .availability import KernelUnavailable
from .cache import Cache
from .context import row_invariance
from .device import describe
from .launcher import prepare_rows
from .layout import DTYPE_NAMES, MAX_COLS, as_rows
from .softmax import prepare_strided, softmax_op, takes_strided, torch_is_faster_reason

TORCH: Any = object()  # PyTorch's own kernel is the better choice
Call = Callable[..., Tensor]

_calls = Cache()
_strides = Cache()
_invariant = row_invariance.get
# the allocation behind torch.empty; None in a build without CUDA, where no tensor is_cuda
_empty = torch_private.empty_strided_cuda


def contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    if len(shape) == 2:
        return (shape[1] or 1, 1)
    found = _strides.get(shape)
    if found is None:
        found = _strides.remember(shape, torch.empty(shape, device="meta").stride())
    return found


def softmax_call(x: Tensor, dim: int, dtype: torch.dtype, log: bool) -> Call | None:
    """call(x) -> softmax or log_softmax over dim in `dtype`; TORCH; or None where this way is not for it.

    x: a plain tensor on a GPU, not lazily negated; dtype: x's own, or one that the kernels write from x's.
    """
    n_dims = x.dim()
    if n_dims and (dim == -1 or dim == n_dims - 1) and x.is_contiguous():
        n_cols = x.shape[-1]
        # a single row keeps the stride of the tensor that it was taken from
        single = x.stride(-2) if n_dims > 1 and x.numel() == n_cols else None
        key: tuple[Any, ...] = (log, x.dtype, dtype, n_cols, single, x.data_ptr() & 31, x.get_device(), _invariant())
    else:
        key = (log, x.dtype, dtype, dim, x.shape, x.stride(), x.data_ptr() & 31, x.get_device(), _invariant())
    found = _calls.get(key)
    if found is None:
        found = _calls.remember(key, _prepare_softmax(x, dim, dtype, log))
    return None if found is False else found


def _prepare_softmax(x: Tensor, dim: int, dtype: torch.dtype, log: bool) -> Any:
    """The call; TORCH; or False where this way is not for it."""
    n_dims = x.dim()
    if not -n_dims <= dim < n_dims or _empty is None or not x.numel() or x.shape[dim] > MAX_COLS:
        return False
    if x.dtype not in DTYPE_NAMES or not isinstance(describe(x.device), Device):
        return False
    if torch_is_faster_reason(x, dim, dtype):
        return TORCH
    dim %= n_dims
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if y.data_ptr() % 32:
        return False
    x_rows, y_rows = as_rows(x, dim), as_rows(y, dim)
    try:
        if x_rows is None or y_rows is None:
            return _strided_call(x, y, dim, log) if takes_strided(x, y, dim) else False
        op, flags = softmax_op(log)
        run = prepare_rows(op, (x_rows, y_rows), (), flags, _invariant())
    except KernelUnavailable:
        return TORCH
    if dim == n_dims - 1 and x.is_contiguous():
        return _rows_call(run, dtype)
    return _folded_call(run, x.shape, dtype, x_rows, y_rows)


def _rows_call(run: Any, dtype: torch.dtype) -> Call:
    rows_of_pointers = run.over_pointers

    def call(x: Tensor) -> Tensor:
        shape = x.shape
        y = _empty(shape, contiguous_strides(shape), dtype)
        rows_of_pointers(x.numel() // shape[-1], x.data_ptr(), y.data_ptr())
        return y

    return call


def _folded_call(run: Any, shape: torch.Size, dtype: torch.dtype, x_rows: Tensor, y_rows: Tensor) -> Call:
    rows_of_pointers, strides, n_rows = run.over_pointers, contiguous_strides(shape), x_rows.shape[0]

    def call(x: Tensor) -> Tensor:
        y = _empty(shape, strides, dtype)
        rows_of_pointers(n_rows, x.data_ptr(), y.data_ptr())
        return y

    return call


def _strided_call(x: Tensor, y: Tensor, dim: int, log: bool) -> Call:
    run, shape, strides, dtype = prepare_strided(x, y, dim, log), x.shape, y.stride(), y.dtype

    def call(x: Tensor) -> Tensor:
        y = _empty(shape, strides, dtype)
        run(x, y)
        return y

    return call


def softmax_backward(dy: Tensor, y: Tensor, dim: int, dtype: torch.dtype, log: bool, invariant: bool) -> Tensor | None:
    """The gradient in `dtype` from the output y over its last dimension, for plain tensors; None as `softmax_call`.

    `invariant` is what the forward ran under: autograd calls from a thread of its own.
    """
    if not y.is_cuda or dy.dtype is not y.dtype or dy.shape != y.shape or not (dim == -1 or dim == y.dim() - 1):
        return None
    if not (y.dim() and y.is_contiguous() and dy.is_contiguous()):
        return None
    shape = y.shape
    n_cols = shape[-1]
    single = y.numel() == n_cols
    strides = (y.stride(), dy.stride()) if single else None
    addresses = y.data_ptr(), dy.data_ptr()
    key = (log, y.dtype, dtype, n_cols, strides, addresses[0] & 31, addresses[1] & 31, y.get_device(), invariant, "dx")
    run = _calls.get(key)
    if run is None:
        run = _calls.remember(key, _prepare_backward(dy, y, dtype, log, invariant))
    if run is False:
        return None
    dx = _empty(shape, contiguous_strides(shape), dtype)
    run.over_pointers(y.numel() // n_cols, *addresses, dx.data_ptr())
    return dx


def _prepare_backward(dy: Tensor, y: Tensor, dtype: torch.dtype, log: bool, invariant: bool) -> Any:
    if _empty is None or not y.numel() or y.shape[-1] > MAX_COLS or y.dtype not in DTYPE_NAMES:
        return False
    dx = torch.empty(y.shape, dtype=dtype, device=y.device)
    folded = tuple(rows for t in (y, dy, dx) if (rows := as_rows(t, y.dim() - 1)) is not None)
    if len(folded) < 3 or dx.data_ptr() % 32 or not isinstance(describe(y.device), Device):
        return False
    op, flags = softmax_op(log, backward=True)
    try:
        return prepare_rows(op, folded, (), flags, invariant)
    except KernelUnavailable:
        return False
