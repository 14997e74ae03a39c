"""The gradient of cross_entropy of rows from what its forward kept: allocates nothing, and launches.

KernelUnavailable, with nothing written, where a kernel does not compile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..planning.losses import plan_elementwise, plan_few_programs
from .cache import Cache
from .compile import kernel_loader
from .launcher import FEW_WARPS, RowOp, Vector, always, launch_rows, prepare_rows
from .layout import expect_rows, places
from .options import CrossEntropy, Flags, LossKind
from .torch_private import current_device


@kernel_loader
def _backward() -> Any:
    from ..kernels.cross_entropy_backward import cross_entropy_backward

    return cross_entropy_backward


@kernel_loader
def _scale_unless_one() -> Any:
    from ..kernels.cross_entropy_backward import scale_unless_one

    return scale_unless_one


BACKWARD = RowOp(plan_elementwise, always(_backward))
BACKWARD_UNLESS_ONE = RowOp(plan_few_programs, always(_backward), most_warps=FEW_WARPS)
SCALE_UNLESS_ONE = RowOp(plan_few_programs, always(_scale_unless_one), most_warps=FEW_WARPS)


def moments_and_count(kept: Tensor, n_rows: int) -> list[Any]:
    """What a gradient's launch takes, of what the forward kept: each row's (row_max, row_sum), the mean's denominator.

    From these two numbers backward has p = exp(z - row_max)/row_sum with all its digits. One number, the logsumexp, is
    rounded where it is large.
    """
    if kept.is_cuda:
        address = kept.data_ptr()
        return [address, address + 8 * n_rows]
    return places(kept, 0, 2 * n_rows)


def gradient_flags(kind: LossKind, unless_one: bool, mean: bool, inplace: bool, sharded: bool = False) -> Flags:
    """The flags of the kernel that writes the gradient from known moments; sharded: of a part of the columns."""
    return (("UNLESS_ONE", unless_one), ("MEAN", mean), ("INPLACE", inplace), ("SHARDED", sharded), *kind.flags)


_gradients = Cache()


def cross_entropy_gradient(
    x: Tensor, dx: Tensor, op: CrossEntropy, moments: Vector, count: Vector | None, g: Tensor, *, unless_one: bool
) -> None:
    """The gradient for upstream g ([1], or [n_rows]; float32) into dx, which may be x.

    unless_one: only where g is not 1. count: what the gradient is divided by, [1] float32, such as a mean's
    denominator; None: nothing.
    """
    address, dx_address, index = x.data_ptr(), dx.data_ptr(), x.get_device()
    inplace, kind = dx_address == address, op.kind
    key = (
        x.shape[1], x.stride(), dx.stride(), x.dtype, dx.dtype, address & 31, dx_address & 31, index,
        kind, count is None, inplace, op.weight_sum is None, unless_one,
    )  # fmt: skip
    launch = _gradients.get(key)
    if launch is None:
        expect_rows(x, dx)
        vectors = (*op.vectors(g), g if count is None else count, moments, g)
        flags = gradient_flags(kind, unless_one, count is not None, inplace)
        launch = prepare_rows(BACKWARD_UNLESS_ONE if unless_one else BACKWARD, (x, dx), vectors, flags, False).at
        if x.is_cuda:
            _gradients.remember(key, launch)
    numbers = (op.ignore_index, int(g.numel() > 1), 0, *op.numbers)
    if not x.is_cuda:
        vectors = (*op.vectors(g), g if count is None else count, moments, g)
        return launch(x.shape[0], (x, dx), vectors, numbers)
    upstream = g.data_ptr()
    given = (
        op.target.data_ptr(),
        upstream if op.weight is None else op.weight.data_ptr(),
        upstream if op.weight_sum is None else op.weight_sum.data_ptr(),
        upstream if count is None else count if type(count) is int else count.data_ptr(),
        moments if type(moments) is int else moments.data_ptr(),
        upstream,
    )
    if current_device() != index:
        with torch.cuda.device(index):
            return launch(x.shape[0], (address, dx_address), given, numbers)
    return launch(x.shape[0], (address, dx_address), given, numbers)


def scale_unless_one(dx: Tensor, g: Tensor) -> None:
    """dx *= g ([1], or [n_rows]; float32), where g is not 1."""
    launch_rows(SCALE_UNLESS_ONE, (dx,), (g,), (int(g.numel() > 1),), ())
