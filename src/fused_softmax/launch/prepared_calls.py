"""The direct path: a key leads to a prepared call, which allocates the output and launches.

A key holds whatever a kernel or its launch arguments were made for: op, dtypes, columns, strides, alignment, device and
batch invariance. For rows that lie one after another it does not hold their number, so a new batch size costs nothing.
Entries hold no tensor and no address. The caller has made sure that the dispatcher may be bypassed.
docs/host-time.md counts the microseconds.
"""

from __future__ import annotations

import math
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

# call(x, n_rows, address) -> the result for x at this address; n_rows counts where rows have one stride, and is 0 else
Call = Callable[[Tensor, int, int], Tensor]
# of launch.softmax: what launches over these tensors; None where this way is not for them
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
        found = _strides.store(shape, torch.empty(shape, device="meta").stride())
    return found


def softmax_call(x: Tensor, dim: int, given: torch.dtype, dtype: torch.dtype, log: bool, prepare: Prepare) -> Any:
    """(call, its n_rows, x's address) for softmax or log_softmax of x over dim in `dtype`; TORCH; or None where this
    way is not for it.

    x: a plain tensor on a GPU, not lazily negated, of dtype `given`; dtype: this one, or one that the kernels write
    from it. None for a tensor without memory of its own, too. n_rows is 0 where the call is for x's shape alone.
    """
    try:
        address, shape = x.data_ptr(), x.shape
    except RuntimeError:  # it has no memory of its own
        return None
    key: Any
    if len(shape) == 2 and (dim == -1 or dim == 1) and shape[0] > 1 and x.is_contiguous():
        n_rows, n_cols = shape  # rows with one stride: the call does not depend on their number
        key = (n_cols, given, dtype, log, address & 31, x.get_device(), _invariant())
    else:
        sizes: Any = shape
        n_rows, strides = 0, x.stride()
        if len(shape) == 2 and strides[1] == 1 and (dim == -1 or dim == 1) and shape[0]:
            n_rows, sizes = shape
        key = (sizes, strides, given, dtype, dim, log, address & 31, x.get_device(), _invariant())
    call = _calls.get(key)
    if call is None:
        call = _calls.store(key, _prepare_softmax(x, dim, dtype, log, prepare))
    if call is False:
        return None
    return TORCH if call is TORCH else (call, n_rows, address)


def _takes(x: Tensor, dim: int) -> bool:
    """Whether kernels may take x over dim: on a GPU with kernels, not empty, and of no longer rows than they count."""
    n_dims = x.dim()
    if not -n_dims <= dim < n_dims or not x.numel() or x.shape[dim] > MAX_COLS:
        return False
    return x.dtype in DTYPE_NAMES and isinstance(describe(x.device), Device)


def prepare_into(x: Tensor, out: Tensor, dim: int, dtype: torch.dtype, log: bool, prepare: Prepare) -> Any:
    """call(x, out, n_rows, address, out_address) -> whether it wrote softmax or log_softmax to out; or False.

    It is for contiguous tensors that lie as x and out do, of one shape, in separate memory or the same. It is False
    where this way is not for them, and writes nothing where they overlap otherwise. dtype: out's.
    """
    if out.device != x.device or not _takes(x, dim):
        return False
    shape = x.shape
    dim %= x.dim()
    try:
        run = prepare(x, out, dim, log)
    except KernelUnavailable:
        return False
    if run is None:
        return False
    index, known_rows = x.get_device(), x.numel() // shape[dim]
    launch = _launch_of(run)
    same = x.dtype is dtype and not hasattr(run, "apart")  # whether out may be x
    bytes_of_row, bytes_of_out_row = shape[dim] * x.itemsize, shape[dim] * out.itemsize

    def call(x: Tensor, out: Tensor, n_rows: int, address: int, out_address: int) -> bool:
        n_rows, distance = n_rows or known_rows, out_address - address
        if distance < n_rows * bytes_of_row and -distance < n_rows * bytes_of_out_row and (distance or not same):
            return False
        if _current_device() != index:
            with torch.cuda.device(index):
                return call(x, out, n_rows, address, out_address)
        launch(x, out, n_rows, address, out_address)
        return True

    return call


def _launch_of(run: Any) -> Callable[[Tensor, Tensor, int, int, int], None]:
    """launch(x, y, n_rows, address of x, address of y), on the current device, of what `prepare` returned."""
    if hasattr(run, "parts"):
        index, launch, rows, prefix, after_rows, (x_offset, y_offset) = run.parts

        def over_rows(x: Tensor, y: Tensor, n_rows: int, address: int, y_address: int) -> None:
            launch(
                -(-n_rows // rows), 1, 1, _current_stream(index), *prefix,
                address - x_offset, y_address - y_offset, n_rows, *after_rows,
            )  # fmt: skip

        return over_rows
    if hasattr(run, "one"):
        index, launch, grid, prefix, rest = run.one

        def of_one_shape(x: Tensor, y: Tensor, n_rows: int, address: int, y_address: int) -> None:
            launch(grid, 1, 1, _current_stream(index), *prefix, address, y_address, *rest)

        return of_one_shape
    return lambda x, y, n_rows, address, y_address: run(x, y)


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
    if run is None:
        return False
    x_rows = as_rows(x, dim) if hasattr(run, "parts") else None
    return _strided_call(run, y) if x_rows is None else _rows_call(run, tuple(x.shape), dtype, x_rows)


def _rows_call(run: Any, shape: tuple[int, ...], dtype: torch.dtype, x_rows: Tensor) -> Call:
    """A call over rows with one stride. A closure over plain locals, as every look-up of an attribute counts here."""
    index, launch, rows, prefix, after_rows, (x_offset, y_offset) = run.parts
    strides, known_rows, n_cols = contiguous_strides(shape), x_rows.shape[0], shape[-1]

    def call(x: Tensor, n_rows: int, address: int) -> Tensor:
        if _current_device() != index:
            with torch.cuda.device(index):
                return call(x, n_rows, address)
        if n_rows:
            y = _empty((n_rows, n_cols), strides, dtype)
        else:
            y, n_rows = _empty(shape, strides, dtype), known_rows
        launch(
            -(-n_rows // rows), 1, 1, _current_stream(index), *prefix,
            address - x_offset, y.data_ptr() - y_offset, n_rows, *after_rows,
        )  # fmt: skip
        return y

    return call


def _strided_call(run: Any, like: Tensor) -> Call:
    shape, strides, dtype = tuple(like.shape), like.stride(), like.dtype
    index, launch = like.get_device(), _launch_of(run)

    def call(x: Tensor, n_rows: int, address: int) -> Tensor:
        if _current_device() != index:
            with torch.cuda.device(index):
                return call(x, n_rows, address)
        y = _empty(shape, strides, dtype)
        launch(x, y, n_rows, address, y.data_ptr())
        return y

    return call


def backward_call(
    dy: Tensor, y: Tensor, dim: int, dtype: torch.dtype, log: bool, invariant: bool, prepare: Prepare
) -> Any:
    """(call, its n_rows, the addresses of y and dy) for the gradient in `dtype` from the output y over its last
    dimension, for plain tensors; None as `softmax_call`.

    `invariant` is the forward's setting: autograd calls from another thread.
    """
    try:
        shape, y_address, dy_address, given = y.shape, y.data_ptr(), dy.data_ptr(), y.dtype
    except RuntimeError:  # one of them has no memory of its own
        return None
    if not y.is_cuda or dy.dtype is not given or dy.shape != shape or not (y.is_contiguous() and dy.is_contiguous()):
        return None
    index = y.get_device()
    key: Any
    if len(shape) == 2 and shape[0] > 1:
        n_rows, n_cols = shape
        key = (n_cols, given, dtype, dim, log, y_address & 31, dy_address & 31, index, invariant)
    else:
        n_rows = 0
        key = (
            shape, y.stride(), dy.stride(), given, dtype, dim, log, y_address & 31, dy_address & 31, index, invariant
        )  # fmt: skip
    call = _calls.get(key)
    if call is None:
        call = _calls.store(key, _prepare_backward(dy, y, dim, dtype, log, invariant, prepare))
    return None if call is False else (call, n_rows, y_address, dy_address)


def _prepare_backward(
    dy: Tensor, y: Tensor, dim: int, dtype: torch.dtype, log: bool, invariant: bool, prepare: Prepare
) -> Any:
    """call(n_rows, address of y, address of dy) -> the gradient; False where this way is not for them."""
    shape = tuple(y.shape)
    if _empty is None or not shape or not y.numel() or shape[-1] > MAX_COLS or y.dtype not in DTYPE_NAMES:
        return False
    if not (dim == -1 or dim == len(shape) - 1):
        return False
    dx = torch.empty(y.shape, dtype=dtype, device=y.device)
    if dx.data_ptr() % 32 or not isinstance(describe(y.device), Device):
        return False
    try:
        run = prepare(y, dy, dx, log, invariant)
    except KernelUnavailable:
        return False
    return False if run is None else _gradient_of_rows(run, shape, dtype)


def _gradient_of_rows(run: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[int, int, int], Tensor]:
    index, launch, rows, prefix, after_rows, (y_offset, dy_offset, dx_offset) = run.parts
    strides, known_rows, n_cols = contiguous_strides(shape), math.prod(shape[:-1]), shape[-1]

    def call(n_rows: int, y_address: int, dy_address: int) -> Tensor:
        if _current_device() != index:
            with torch.cuda.device(index):
                return call(n_rows, y_address, dy_address)
        if n_rows:
            dx = _empty((n_rows, n_cols), strides, dtype)
        else:
            dx, n_rows = _empty(shape, strides, dtype), known_rows
        launch(
            -(-n_rows // rows), 1, 1, _current_stream(index), *prefix,
            y_address - y_offset, dy_address - dy_offset, dx.data_ptr() - dx_offset, n_rows, *after_rows,
        )  # fmt: skip
        return dx

    return call
