"""cross_entropy of rows (n_rows, n_cols): allocates what is O(rows), and launches.

No mathematics and no autograd: torch_ops folds tensors into rows, checks them, and calls these. Nothing here waits for
the device. KernelUnavailable, with nothing written, where a kernel over rows does not compile.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..planning.losses import (
    plan_capped_loss,
    plan_capped_statistics,
    plan_elementwise,
    plan_loss,
    plan_smoothed_loss,
    plan_statistics,
)
from ..planning.types import Device, Plan
from .availability import KernelUnavailable
from .cache import Cache
from .compile import kernel_loader
from .context import is_batch_invariant
from .launcher import FEW_PROGRAMS, Flags, RowOp, always, device_of, launch_flat, launch_rows, planned
from .layout import empty


@kernel_loader
def _forward() -> Any:
    from ..kernels.cross_entropy import cross_entropy_forward

    return cross_entropy_forward


@kernel_loader
def _resident() -> Any:
    from ..kernels.cross_entropy_resident import cross_entropy_resident

    return cross_entropy_resident


@kernel_loader
def _backward() -> Any:
    from ..kernels.cross_entropy_backward import cross_entropy_backward

    return cross_entropy_backward


@kernel_loader
def _scale_unless_one() -> Any:
    from ..kernels.cross_entropy_backward import scale_unless_one

    return scale_unless_one


@kernel_loader
def _count_targets() -> Any:
    from ..kernels.cross_entropy import count_targets

    return count_targets


@kernel_loader
def _reduce_losses() -> Any:
    from ..kernels.cross_entropy import reduce_losses

    return reduce_losses


# one program adds up so many losses; more are torch's to add
ONE_PROGRAM_ROWS = 65536
# more than this many are shared by a cluster
ONE_CTA_ROWS = 2048
# how much arithmetic a logit takes -> the loss alone, and the loss with its gradient in the same pass
FORWARD = {
    arithmetic: RowOp(planner, always(_forward))
    for arithmetic, planner in (
        ("exponential", plan_statistics),
        ("smoothed", plan_statistics),
        ("capped", plan_capped_statistics),
    )
}
WITH_GRADIENT = {
    arithmetic: RowOp(functools.lru_cache(planner), always(_resident))
    for arithmetic, planner in (
        ("exponential", plan_loss),
        ("smoothed", plan_smoothed_loss),
        ("capped", plan_capped_loss),
    )
}
BACKWARD = RowOp(plan_elementwise, always(_backward))
BACKWARD_UNLESS_ONE = RowOp(plan_elementwise, always(_backward), most=FEW_PROGRAMS)
SCALE_UNLESS_ONE = RowOp(plan_elementwise, always(_scale_unless_one), most=FEW_PROGRAMS)


_KINDS = {
    (weighted, smooth, capped): (
        "capped" if capped else "smoothed" if smooth else "exponential",
        (("WEIGHTED", weighted), ("SMOOTH", smooth), ("SOFTCAP", capped)),
    )
    for weighted in (False, True)
    for smooth in (False, True)
    for capped in (False, True)
}


class CrossEntropy(NamedTuple):
    """The arguments of a cross-entropy next to its logits. target: (n_rows,) int64; weight: (n_cols,) float32."""

    target: Tensor
    weight: Tensor | None
    weight_sum: Tensor | None  # [1] float32, where there are weights and smoothing
    ignore_index: int
    reduction: str
    smoothing: float
    softcap: float | None
    z_loss: float
    denominator: Tensor | None = None  # [1] float32: what a mean divides by, where it is not the targets that count

    @property
    def kind(self) -> tuple[str, Flags]:
        """(the arithmetic that a logit takes, the kernels' flags): an exponential, more for label smoothing, and most
        for a softcap."""
        return _KINDS[self.weight is not None, self.smoothing > 0.0, self.softcap is not None]

    @property
    def arithmetic(self) -> str:
        return self.kind[0]

    @property
    def flags(self) -> Flags:
        return self.kind[1]

    @property
    def numbers(self) -> tuple[float, ...]:
        return (self.smoothing, 1.0 if self.softcap is None else self.softcap, self.z_loss)

    def vectors(self, unused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """target, weight and the weights' sum as a kernel takes them; `unused` stands where there are none."""
        weight = unused if self.weight is None else self.weight
        return self.target, weight, unused if self.weight_sum is None else self.weight_sum


def check_targets(target: Tensor, ignore_index: int, n_cols: int) -> None:
    """IndexError for a target outside the classes; for the CPU, as a GPU's kernels assert it themselves."""
    outside = (target != ignore_index) & ((target < 0) | (target >= n_cols))
    if outside.any():
        raise IndexError(f"Target {int(target[outside][0])} is out of bounds.")


def fits_on_chip(x: Tensor, dx: Tensor, op: CrossEntropy) -> bool:
    """Whether a row can be held while its loss is computed, so that the gradient is written in the same pass."""
    invariant = is_batch_invariant()
    layout = (x.dtype, x.shape[1], x.stride(0), x.data_ptr() & 31, dx.stride(0), dx.data_ptr() & 31)
    arithmetic, _ = op.kind
    key = (arithmetic, *layout, x.device, invariant)
    found = _fits.get(key)
    if found is None:
        plan = WITH_GRADIENT[arithmetic].plan((x, dx), device_of(x), invariant)
        found = _fits.remember(key, plan.regime != "two_pass")
    return found


_fits = Cache()


def _loss_and_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for each row's loss, (n_rows,), and for its (row_max, row_sum), (n_rows, 2): float32.

    From these two numbers backward has p = exp(z - row_max)/row_sum with all its digits. One number, the logsumexp, is
    rounded where it is large.
    """
    n_rows = x.shape[0]
    return empty((n_rows,), (1,), torch.float32, x), empty((n_rows, 2), (2, 1), torch.float32, x)


def cross_entropy_forward(x: Tensor, op: CrossEntropy) -> tuple[Tensor, Tensor]:
    """(each row's loss, its moments as `_loss_and_moments` has them); no gradient, one read."""
    loss, moments = _loss_and_moments(x)
    vectors, numbers = (*op.vectors(loss), loss, moments), (op.ignore_index, *op.numbers)
    arithmetic, flags = op.kind
    launch_rows(FORWARD[arithmetic], (x,), vectors, numbers, flags, invariant=is_batch_invariant())
    return loss, moments


def cross_entropy_with_gradient(x: Tensor, dx: Tensor, op: CrossEntropy, count: Tensor | None) -> tuple[Tensor, Tensor]:
    """(each row's loss, its moments), and into dx the gradient for an upstream gradient of 1; dx may be x."""
    loss, moments = _loss_and_moments(x)
    vectors = (*op.vectors(loss), loss if count is None else count, loss, moments)
    arithmetic, of_kind = op.kind
    flags = (("MEAN", count is not None), ("INPLACE", dx.data_ptr() == x.data_ptr()), *of_kind)
    numbers = (op.ignore_index, *op.numbers)
    launch_rows(WITH_GRADIENT[arithmetic], (x, dx), vectors, numbers, flags, invariant=is_batch_invariant())
    return loss, moments


def cross_entropy_gradient(
    x: Tensor, dx: Tensor, op: CrossEntropy, count: Tensor | None, moments: Tensor, g: Tensor, *, unless_one: bool
) -> None:
    """The gradient for upstream g ([1], or [n_rows]; float32) into dx; unless_one: only where g is not 1."""
    vectors = (*op.vectors(g), g if count is None else count, moments, g)
    flags = (("UNLESS_ONE", unless_one), ("MEAN", count is not None), *op.kind[1])
    numbers = (op.ignore_index, int(g.numel() > 1), *op.numbers)
    launch_rows(BACKWARD_UNLESS_ONE if unless_one else BACKWARD, (x, dx), vectors, numbers, flags)


def planned_cross_entropy(x: Tensor, on: Tensor, gradient: bool) -> Plan | str:
    """The plan of rows x, which may be a meta tensor, on `on`'s device, for a mean with default options; or why its
    kernel did not compile. gradient: the forward writes it, where a row fits on chip."""
    real, op = torch.float32, "exponential"
    flags: Flags = (("WEIGHTED", False), ("SMOOTH", False), ("SOFTCAP", False))
    if gradient:
        dx = torch.empty(x.shape, dtype=x.dtype, device="meta")
        vectors = (torch.int64, real, real, real, real, real)
        plan = planned(WITH_GRADIENT[op], (x, dx), vectors, (("MEAN", True), ("INPLACE", False), *flags), on)
        if isinstance(plan, str) or plan.regime != "two_pass":
            return plan
    return planned(FORWARD[op], (x,), (torch.int64, real, real, real, real), flags, on)


def scale_unless_one(dx: Tensor, g: Tensor) -> None:
    """dx *= g ([1], or [n_rows]; float32), where g is not 1."""
    launch_rows(SCALE_UNLESS_ONE, (dx,), (g,), (int(g.numel() > 1),), ())


def count_targets(op: CrossEntropy, n_cols: int) -> Tensor:
    """The mean's denominator: how many targets count, or their weights' sum.  # [1] float32"""
    if op.denominator is not None:
        return op.denominator
    n_rows = op.target.shape[0]
    if n_rows > ONE_PROGRAM_ROWS:
        return _counted(op, n_cols)
    count = empty((1,), (1,), torch.float32, op.target)
    tensors = (op.target, count if op.weight is None else op.weight, count)
    flags = _sum_flags(False, False, op.weight is not None, n_rows > ONE_CTA_ROWS, device_of(count))
    try:
        launch_flat(_count_targets, tensors, (n_rows, n_cols, op.ignore_index), flags, num_warps=8)
    except KernelUnavailable:
        return _counted(op, n_cols)
    return count


def reduce_losses(loss: Tensor, op: CrossEntropy, n_cols: int) -> Tensor:
    """The rows' losses as `op.reduction` has them: a scalar, or as they are.  # float32"""
    if op.reduction == "none":
        return loss
    if op.reduction == "mean" and op.denominator is not None:
        return reduce_losses(loss, op._replace(reduction="sum"), n_cols) / op.denominator[0]
    mean, n_rows = op.reduction == "mean", loss.shape[0]
    if n_rows > ONE_PROGRAM_ROWS:
        return _reduced(loss, op, n_cols)
    out = empty((), (), torch.float32, loss)
    tensors = (loss, op.target, loss if op.weight is None else op.weight, out)
    flags = _sum_flags(True, mean, op.weight is not None, n_rows > ONE_CTA_ROWS, device_of(out))
    try:
        launch_flat(_reduce_losses, tensors, (n_rows, n_cols, op.ignore_index), flags, num_warps=8)
    except KernelUnavailable:
        return _reduced(loss, op, n_cols)
    return out


def _reduced(loss: Tensor, op: CrossEntropy, n_cols: int) -> Tensor:
    if op.reduction == "sum":
        return loss.sum()
    count = _counted(op, n_cols)[0]
    return torch.where(count == 0.0, float("nan"), loss.sum() / count)


@functools.lru_cache
def _sum_flags(losses: bool, mean: bool, weighted: bool, many: bool, device: Device) -> Flags:
    """The flags of a sum over rows, which the CTAs of a cluster share where there are many rows, and clusters.

    One CTA adds up weights: where they are looked up, Triton 3.6 does not keep a segment in a warp, which a reduction
    over a cluster needs.
    """
    ctas = 16 if many and device.max_cluster >= 16 and not weighted else 1
    warps, vectors = (8, 32) if ctas > 1 else (1, 256)
    shared = (("CTAS", ctas), ("WARPS_PER_ROW", warps), ("VECTORS", vectors), ("EACH", 8), ("PTX", device.ptx))
    flags: Flags = (("WEIGHTED", weighted), *shared)
    return (("MEAN", mean), ("WAITS", device.supports_pdl), *flags) if losses else flags


def _counted(op: CrossEntropy, n_cols: int) -> Tensor:
    counts = (op.target != op.ignore_index) & (op.target >= 0) & (op.target < n_cols)
    if op.weight is None:
        return counts.sum(dtype=torch.float32).view(1)
    return op.weight[op.target.clamp(0, n_cols - 1)].where(counts, 0.0).sum().view(1)
