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
from .layout import DTYPE_NAMES, MAX_COLS, as_rows
from .options import TORCH

Call = Callable[[Tensor], Tensor]
# of launch.softmax: what launches over these tensors; None, or TORCH, where this way is not for them
Prepare = Callable[..., Any]

_calls = Cache()
_strides = Cache()
_invariant = row_invariance.get
_current_device, _current_stream = torch_private.current_device, torch_private.current_stream
# the allocation behind torch.empty; None in a build without CUDA, where no tensor is_cuda
_empty = torch_private.empty_strided_cuda


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    if len(shape) == 2:
        return (shape[1] or 1, 1)
    found = _strides.get(shape)
    if found is None:
        found = _strides.remember(shape, torch.empty(shape, device="meta").stride())
    return found


def softmax_call(x: Tensor, dim: int, dtype: torch.dtype, log: bool, prepare: Prepare) -> Call | None:
    """call(x) -> softmax or log_softmax over dim in `dtype`; TORCH; or None where this way is not for it.

    x: a plain tensor on a GPU, not lazily negated; dtype: x's own, or one that the kernels write from x's. The call is
    for x, and for tensors of another number of rows where x has two dimensions and rows.
    """
    shape, strides = x.shape, x.stride()
    sizes: Any = shape
    if len(shape) == 2 and strides[1] == 1 and (dim == -1 or dim == 1) and shape[0]:
        sizes = shape[1]  # rows with one stride: the call does not depend on their number
    key = (sizes, strides, x.dtype, dtype, dim, log, x.data_ptr() & 31, x.get_device(), _invariant())
    found = _calls.get(key)
    if found is None:
        found = _calls.remember(key, _prepare_softmax(x, dim, dtype, log, prepare))
    return None if found is False else found


def softmax_out_call(
    x: Tensor, out: Tensor, dim: int, dtype: torch.dtype, log: bool, prepare: Prepare
) -> Callable[[Tensor, Tensor], None] | None:
    """call(x, out), which writes softmax or log_softmax over dim to `out`; None where this way is not for it.

    x, out: plain tensors, x on a GPU; dtype: x's own, or one that the kernels write from x's. The call is for
    contiguous tensors of one shape, in separate memory or the same.
    """
    shape, start, out_start = x.shape, x.data_ptr(), out.data_ptr()
    n_elements, out_dtype = x.numel(), out.dtype
    if out.shape != shape or out_dtype is not dtype or not (x.is_contiguous() and out.is_contiguous()):
        return None
    same = start == out_start and x.dtype is out_dtype
    if not (same or start + n_elements * x.itemsize <= out_start or out_start + n_elements * out.itemsize <= start):
        return None
    of_rows = len(shape) == 2 and (dim == -1 or dim == 1)
    sizes: Any = shape[1] if of_rows else shape
    devices, alignments = (x.get_device(), out.get_device()), (start & 31, out_start & 31)
    key = (sizes, x.stride(), out.stride(), x.dtype, out_dtype, dim, log, alignments, devices, _invariant())
    found = _calls.get(key)
    if found is None:
        found = _calls.remember(key, _prepare_out(x, out, dim, log, prepare))
    return None if found is False else found


def _takes(x: Tensor, dim: int) -> bool:
    """Whether kernels may take x over dim: on a GPU with kernels, not empty, and of no longer rows than they count."""
    n_dims = x.dim()
    if not -n_dims <= dim < n_dims or not x.numel() or x.shape[dim] > MAX_COLS:
        return False
    return x.dtype in DTYPE_NAMES and isinstance(describe(x.device), Device)


def _prepare_out(x: Tensor, out: Tensor, dim: int, log: bool, prepare: Prepare) -> Any:
    if out.device != x.device or not _takes(x, dim):
        return False
    dim %= x.dim()
    try:
        run = prepare(x, out, dim, log)
    except KernelUnavailable:
        return False
    if run is None or run is TORCH:
        return False
    if not hasattr(run, "at"):
        return run
    launch, n_cols, index = run.at, x.shape[dim], x.get_device()

    def call(x: Tensor, out: Tensor) -> None:
        if _current_device() != index:
            with torch.cuda.device(index):
                return call(x, out)
        launch(x.numel() // n_cols, (x.data_ptr(), out.data_ptr()), (), ())

    return call


def _prepare_softmax(x: Tensor, dim: int, dtype: torch.dtype, log: bool, prepare: Prepare) -> Any:
    """The call; TORCH; or False where this way is not for it."""
    if _empty is None or not _takes(x, dim):
        return False
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if y.data_ptr() % 32:
        return False
    dim %= x.dim()
    try:
        run = prepare(x, y, dim, log)
    except KernelUnavailable:
        return TORCH
    if run is None or run is TORCH:
        return run or False
    x_rows = as_rows(x, dim) if hasattr(run, "parts") else None
    return _strided_call(run, y) if x_rows is None else _rows_call(run, tuple(x.shape), dtype, x_rows)


def _rows_call(run: Any, shape: tuple[int, ...], dtype: torch.dtype, x_rows: Tensor) -> Call:
    """A call over rows with one stride. A closure over plain locals, as every look-up of an attribute counts here."""
    index, launch, rows, prefix, after_rows, (x_offset, y_offset) = run.parts
    strides, known_rows, n_cols = contiguous_strides(shape), x_rows.shape[0], shape[-1]
    of_two = len(shape) == 2 and x_rows.shape[1] == n_cols

    def call(x: Tensor) -> Tensor:
        if _current_device() != index:
            with torch.cuda.device(index):
                return call(x)
        n_rows = x.shape[0] if of_two else known_rows
        y = _empty((n_rows, n_cols) if of_two else shape, strides, dtype)
        launch(
            -(-n_rows // rows), 1, 1, _current_stream(index), *prefix,
            x.data_ptr() - x_offset, y.data_ptr() - y_offset, n_rows, *after_rows,
        )  # fmt: skip
        return y

    return call


def _strided_call(run: Callable[[Tensor, Tensor], None], like: Tensor) -> Call:
    shape, strides, dtype = tuple(like.shape), like.stride(), like.dtype

    def call(x: Tensor) -> Tensor:
        y = _empty(shape, strides, dtype)
        run(x, y)
        return y

    return call


def softmax_backward(
    dy: Tensor, y: Tensor, dim: int, dtype: torch.dtype, log: bool, invariant: bool, prepare: Prepare
) -> Tensor | None:
    """The gradient in `dtype` from the output y over its last dimension, for plain tensors; None as `softmax_call`.

    `invariant` is the forward's setting: autograd calls from another thread.
    """
    if not y.is_cuda or dy.dtype is not y.dtype or dy.shape != y.shape or not (dim == -1 or dim == y.dim() - 1):
        return None
    if not (y.dim() and y.is_contiguous() and dy.is_contiguous()):
        return None
    shape, index = tuple(y.shape), y.get_device()
    y_address, dy_address = y.data_ptr(), dy.data_ptr()
    # contiguous strides do not tell the number of rows; a single row's may be any
    key = (shape[-1], y.stride(), dy.stride(), y.dtype, dtype, log, y_address & 31, dy_address & 31, index, invariant)
    found = _calls.get(key)
    if found is None:
        found = _calls.remember(key, _prepare_backward(dy, y, dtype, log, invariant, prepare))
    if found is False or _current_device() != index:
        return None
    _, launch, rows, prefix, after_rows, offsets = found
    dx = _empty(shape, contiguous_strides(shape), dtype)
    n_rows = y.numel() // shape[-1]
    launch(
        -(-n_rows // rows), 1, 1, _current_stream(index), *prefix,
        y_address - offsets[0], dy_address - offsets[1], dx.data_ptr() - offsets[2], n_rows, *after_rows,
    )  # fmt: skip
    return dx


def _prepare_backward(dy: Tensor, y: Tensor, dtype: torch.dtype, log: bool, invariant: bool, prepare: Prepare) -> Any:
    if _empty is None or not y.numel() or y.shape[-1] > MAX_COLS or y.dtype not in DTYPE_NAMES:
        return False
    dx = torch.empty(y.shape, dtype=dtype, device=y.device)
    if dx.data_ptr() % 32 or not isinstance(describe(y.device), Device):
        return False
    try:
        run = prepare(y, dy, dx, log, invariant)
    except KernelUnavailable:
        return False
    return False if run is None else run.parts
