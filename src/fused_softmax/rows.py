"""Folds a tensor and a dim into rows, and runs an op over them: ND tensors on this side, (n_rows, n_cols) beyond.

Where a dim's elements are neighbours and all rows share one stride, the row kernels take them as they lie. Other views
(another dim, transposed, broken strides) go to the strided kernel, which reads up to three row dimensions in place;
only what has more is copied first. Outputs are contiguous, as torch's are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from . import plan
from .availability import KernelUnavailable
from .device import describe
from .launch import DTYPE_NAMES, Launch, _device_of, kernel_of, launch_rows, problem_of
from .problem import Device

row_invariance: ContextVar[bool] = ContextVar("batch_invariant", default=False)


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Makes a row's bits independent of its place in the batch, for rows that start unaligned too.

    Without it they are independent of the number of rows, and for rows that start on 16 bytes of their place as well.
    Unaligned rows (an odd number of 16-bit columns, say) are then read element by element instead of in vectors; the
    documentation's page on batch invariance has the measured cost.

    >>> with batch_invariant():
    ...     y = torch.softmax(torch.zeros(2, 3), -1)
    """
    token = row_invariance.set(True)
    try:
        yield
    finally:
        row_invariance.reset(token)


def is_batch_invariant() -> bool:
    return row_invariance.get()


def as_rows(t: Tensor, dim: int) -> Tensor | None:
    """t as (n_rows, n_cols) with contiguous columns and one row stride, without a copy; None where it does not fold."""
    n_cols = t.shape[dim]
    if n_cols > 1 and t.stride(dim) != 1:
        return None
    dims = [(t.shape[d], t.stride(d)) for d in range(t.dim()) if d != dim]
    merged = _merge([d for d in dims if d[0] != 1])
    if len(merged) > 1:
        return None
    # a single row keeps the stride of the tensor that it was taken from, so that it is planned as that tensor's rows
    n_rows, stride = merged[0] if merged else (1, dims[-1][1] if dims else n_cols)
    return t.as_strided((n_rows, n_cols), (stride, 1))


def left_to_torch(x: Tensor, dim: int, out_dtype: torch.dtype) -> str | None:
    """Why torch's own kernel is the better choice for x's rows over dim, or None where ours is; x is on a GPU."""
    if x.dim() == 0 or x.shape[dim] >= 8 or x.numel() == 0:
        return None
    x_rows = as_rows(x, dim % x.dim())
    device = describe(x.device)
    if x_rows is None or not isinstance(device, Device) or x.dtype not in DTYPE_NAMES or out_dtype not in DTYPE_NAMES:
        return None
    like = torch.empty(x_rows.shape, dtype=out_dtype, device="meta")
    return plan.left_to_torch(problem_of(x_rows, like), device)


def _merge(dims: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """(size, *strides) of as few dimensions as walk the same elements in the same order."""
    merged: list[tuple[int, ...]] = []
    for size, *strides in dims:
        if merged and all(outer == size * inner for outer, inner in zip(merged[-1][1:], strides, strict=True)):
            merged[-1] = (merged[-1][0] * size, *strides)
        else:
            merged.append((size, *strides))
    return merged


def forward_or_torch(x: Tensor, dim: int, out_dtype: torch.dtype, log: bool, out: Tensor | None = None) -> Tensor:
    """`softmax_forward`, or PyTorch's own kernel where ours does not compile."""
    try:
        return softmax_forward(x, dim, out_dtype, log, out)
    except KernelUnavailable:
        own = torch.log_softmax if log else torch.softmax
        return own(x, dim, dtype=out_dtype) if out is None else own(x, dim, dtype=out_dtype, out=out)


def backward_or_torch(
    dy: Tensor, y: Tensor, dim: int, in_dtype: torch.dtype, log: bool, invariant: bool | None = None
) -> Tensor:
    """`softmax_backward`, or PyTorch's own kernel where ours does not compile."""
    try:
        return softmax_backward(dy, y, dim, in_dtype, log, invariant)
    except KernelUnavailable:
        own = torch._log_softmax_backward_data if log else torch._softmax_backward_data
        return own(dy.to(y.dtype), y, dim, y.dtype).to(in_dtype).contiguous()


def softmax_forward(x: Tensor, dim: int, out_dtype: torch.dtype, log: bool, out: Tensor | None = None) -> Tensor:
    """softmax or log_softmax of x over dim, by our kernels, into `out` or a new contiguous tensor of out_dtype.

    x: float16, bfloat16 or float32, any shape and strides, dim in [-x.dim(), x.dim()). RuntimeError where x's device
    has no kernels; KernelUnavailable, with nothing written, where a kernel does not compile.
    """
    y = torch.empty(x.shape, dtype=out_dtype, device=x.device) if out is None else out
    if x.numel() == 0:
        return y
    if x.dim() == 0:
        softmax_forward(x.view(1), 0, out_dtype, log, y.view(1))
        return y
    dim %= x.dim()
    x_rows, y_rows = as_rows(x, dim), as_rows(y, dim)
    if x_rows is not None and y_rows is not None:
        launch_rows((x_rows, y_rows), log, invariant=row_invariance.get())
    else:
        if len(_row_dims(x, y, dim)) > 3:
            x = x.contiguous()
            if len(_row_dims(x, y, dim)) > 3:  # the strides of `out` do not fold: into new memory first
                return y.copy_(softmax_forward(x, dim, out_dtype, log))
        strided_launch(x, y, dim, log)()
    return y


def softmax_backward(
    dy: Tensor, y: Tensor, dim: int, in_dtype: torch.dtype, log: bool, invariant: bool | None = None
) -> Tensor:
    """The gradient of softmax or log_softmax over dim from its output y, contiguous, in the forward's input dtype.

    `invariant`: whether the forward was batch invariant, where that is not what this thread says. KernelUnavailable
    where a kernel does not compile.
    """
    if invariant is None:
        invariant = row_invariance.get()
    dx = torch.empty(y.shape, dtype=in_dtype, device=y.device)
    if y.numel() == 0:
        return dx
    if y.dim() == 0:
        return softmax_backward(dy.view(1), y.view(1), 0, in_dtype, log, invariant).view(())
    dim %= y.dim()
    if dim != y.dim() - 1 and math.prod(y.shape[dim + 1 :]) > 1:
        # rows that are not neighbours in memory: the gradient takes them as rows of a transposed copy
        dx.copy_(
            softmax_backward(dy.movedim(dim, -1), y.movedim(dim, -1), -1, in_dtype, log, invariant).movedim(-1, dim)
        )
        return dx
    y_rows, dy_rows, dx_rows = as_rows(y, dim), as_rows(dy, dim), as_rows(dx, dim)
    y_rows = as_rows(y.contiguous(), dim) if y_rows is None else y_rows
    dy_rows = as_rows(dy.contiguous(), dim) if dy_rows is None else dy_rows
    assert y_rows is not None and dy_rows is not None and dx_rows is not None
    launch_rows((y_rows, dy_rows, dx_rows), log, backward=True, invariant=invariant)
    return dx


# a tile of the strided kernel, and how many of its elements may be columns where those, not the rows, are contiguous
STRIDED_TILE = 4096


def _row_dims(x: Tensor, y: Tensor, dim: int) -> list[tuple[int, ...]]:
    """(size, x's stride, y's stride) of as few dimensions as hold the rows of both; the strided kernel takes three."""
    return _merge([(x.shape[d], x.stride(d), y.stride(d)) for d in range(x.dim()) if d != dim and x.shape[d] != 1])


def strided_launch(x: Tensor, y: Tensor, dim: int, log: bool, device: Device | None = None) -> Launch:
    """The launch that takes x to y over a dim whose elements, or rows, lie anywhere; `device` stands in for x's own.

    x and y have three dimensions of rows at most, as `_row_dims` counts them.
    """
    merged = _row_dims(x, y, dim)
    # the rows of a tile are the dimension whose neighbours in memory they are, or the innermost
    order = sorted(range(len(merged)), key=lambda i: (merged[i][1] == 1) + (merged[i][2] == 1))
    outer, middle, (n_rows, x_row, y_row) = ([(1, 0, 0)] * 3 + [merged[i] for i in order])[-3:]
    n_cols, x_col, y_col = x.shape[dim], x.stride(dim), y.stride(dim)
    if n_cols == 1:
        x_col = y_col = 1
    along_cols = x_col == 1 and x_row != 1
    cols = min(plan.power_of_two(n_cols), 1024 if along_cols else 64)
    rows = max(1, min(plan.power_of_two(n_rows), STRIDED_TILE // cols))
    grid = outer[0] * middle[0] * -(-n_rows // rows)
    args = (x, y, n_rows, n_cols, middle[0], outer[1], middle[1], x_row, x_col, outer[2], middle[2], y_row, y_col)
    meta: dict[str, object] = dict(LOG=log, ROWS=rows, COLS=cols, ONE_STEP=n_cols <= cols, num_warps=4)
    device = device or _device_of(x)
    meta |= device.options()
    return Launch(kernel_of("strided", "softmax_strided"), (grid,), args, meta)
