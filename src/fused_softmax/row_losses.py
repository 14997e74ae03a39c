"""Losses and statistics of rows (n_rows, n_cols): allocates what is O(rows), and launches.

No mathematics and no autograd: `losses` and `logprobs` fold tensors into rows, check them, and call these. Nothing here
waits for the device. logsumexp_forward and logsumexp_backward take whole tensors, for the operators.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .availability import KernelUnavailable
from .launch import _device_of, problem_of
from .loss_launch import FEW_PROGRAMS, Flags, launch_flat, launch_rows
from .loss_plans import (
    plan_capped_loss,
    plan_capped_statistics,
    plan_elementwise,
    plan_loss,
    plan_smoothed_loss,
    plan_statistics,
)
from .problem import Device, power_of_two
from .rows import is_batch_invariant

# one program adds up so many losses; more are torch's to add
ONE_PROGRAM_ROWS = 65536
# more than this many are shared by a cluster
ONE_CTA_ROWS = 2048
# how much arithmetic a logit of a loss takes -> its planner
_PLANNERS = {
    "exponential": functools.lru_cache(plan_loss),
    "smoothed": functools.lru_cache(plan_smoothed_loss),
    "capped": functools.lru_cache(plan_capped_loss),
}


@dataclass(frozen=True)
class CrossEntropy:
    """What a cross-entropy is told beside its logits. target: (n_rows,) int64; weight: (n_cols,) float32."""

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
    def arithmetic(self) -> str:
        """What a logit takes: an exponential, more for label smoothing, and most for a softcap."""
        return "capped" if self.softcap is not None else "smoothed" if self.smoothing > 0.0 else "exponential"

    @property
    def flags(self) -> Flags:
        return (
            ("WEIGHTED", self.weight is not None),
            ("SMOOTH", self.smoothing > 0.0),
            ("SOFTCAP", self.softcap is not None),
        )

    @property
    def numbers(self) -> tuple[float, ...]:
        return (float(self.smoothing), 1.0 if self.softcap is None else float(self.softcap), float(self.z_loss))

    def vectors(self, unused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """target, weight and the weights' sum as a kernel takes them; `unused` stands where there are none."""
        weight = unused if self.weight is None else self.weight
        return self.target, weight, unused if self.weight_sum is None else self.weight_sum


def _formulas() -> Any:
    """What computes a row's loss where a kernel does not compile; it imports this module."""
    from . import loss_formulas

    return loss_formulas


def check_targets(target: Tensor, ignore_index: int, n_cols: int) -> None:
    """IndexError for a target outside the classes; for the CPU, as a GPU's kernels assert it themselves."""
    outside = (target != ignore_index) & ((target < 0) | (target >= n_cols))
    if outside.any():
        raise IndexError(f"Target {int(target[outside][0])} is out of bounds.")


def check_ids(ids: Tensor, n_cols: int) -> None:
    """IndexError for an id outside the columns; for the CPU, as on a GPU to know would be to wait."""
    if ids.numel() and (ids.min() < 0 or ids.max() >= n_cols):
        raise IndexError(f"token_ids are out of bounds for {n_cols} columns")


def fits_on_chip(x: Tensor, dx: Tensor, op: CrossEntropy) -> bool:
    """Whether a row can be held while its loss is computed, so that the gradient is written in the same pass."""
    planner = _PLANNERS[op.arithmetic]
    return planner(problem_of(x, dx, batch_invariant=is_batch_invariant()), _device_of(x)).regime != "stream"


def gradient_buffer(x: Tensor) -> Tensor:
    """Uninitialised memory for the gradient of rows x, whose rows start as x's do where that costs little.

    A vocabulary that is padded to a multiple of 64 and cut to its own width keeps its aligned rows that way.
    """
    n_rows, n_cols = x.shape
    stride = x.stride(0) if n_cols < x.stride(0) <= 2 * n_cols else n_cols
    return torch.empty((n_rows, stride), dtype=x.dtype, device=x.device)[:, :n_cols]


def _loss_and_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for each row's loss, (n_rows,), and for its (row_max, row_sum), (n_rows, 2): float32.

    From these two numbers backward has p = exp(z - row_max)/row_sum with all its digits. One number, the logsumexp, is
    rounded where it is large.
    """
    loss = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    return loss, torch.empty((x.shape[0], 2), dtype=torch.float32, device=x.device)


def cross_entropy_forward(x: Tensor, op: CrossEntropy) -> tuple[Tensor, Tensor]:
    """(each row's loss, its moments as `_loss_and_moments` has them); no gradient, one read."""
    loss, moments = _loss_and_moments(x)
    numbers = (op.ignore_index, *op.numbers)
    try:
        launch_rows(
            "cross_entropy_forward",
            (x,),
            (*op.vectors(loss), loss, moments),
            numbers,
            op.flags,
            plan_statistics if op.softcap is None else plan_capped_statistics,
            invariant=is_batch_invariant(),
        )
    except KernelUnavailable:
        return _formulas().losses_of_rows(x, op)
    return loss, moments


def cross_entropy_with_gradient(x: Tensor, dx: Tensor, op: CrossEntropy, count: Tensor | None) -> tuple[Tensor, Tensor]:
    """(each row's loss, its moments), and into dx the gradient for an upstream gradient of 1; dx may be x.

    KernelUnavailable, with nothing written, where the kernel does not compile.
    """
    loss, moments = _loss_and_moments(x)
    vectors = (*op.vectors(loss), loss if count is None else count, loss, moments)
    flags = (("MEAN", count is not None), ("INPLACE", dx.data_ptr() == x.data_ptr()), *op.flags)
    launch_rows(
        "cross_entropy_resident",
        (x, dx),
        vectors,
        (op.ignore_index, *op.numbers),
        flags,
        _PLANNERS[op.arithmetic],
        invariant=is_batch_invariant(),
    )
    return loss, moments


def cross_entropy_gradient(
    x: Tensor, dx: Tensor, op: CrossEntropy, count: Tensor | None, moments: Tensor, g: Tensor, *, unless_one: bool
) -> None:
    """The gradient for upstream g ([1], or [n_rows]; float32) into dx; unless_one: only where g is not 1."""
    vectors = (*op.vectors(g), g if count is None else count, moments, g)
    flags = (("UNLESS_ONE", unless_one), ("MEAN", count is not None), *op.flags)
    numbers = (op.ignore_index, int(g.numel() > 1), *op.numbers)
    most = FEW_PROGRAMS if unless_one else None
    try:
        launch_rows("cross_entropy_backward", (x, dx), vectors, numbers, flags, plan_elementwise, most=most)
    except KernelUnavailable:
        dx.copy_(_formulas().cross_entropy_gradient(g, x, replace(op, denominator=count)))


def scale_unless_one(dx: Tensor, g: Tensor) -> None:
    """dx *= g ([1], or [n_rows]; float32), where g is not 1."""
    numbers = (int(g.numel() > 1),)
    try:
        launch_rows("scale_unless_one", (dx,), (g,), numbers, (), plan_elementwise, most=FEW_PROGRAMS)
    except KernelUnavailable:
        dx.mul_(g.view(-1, 1))


def count_targets(op: CrossEntropy, n_cols: int) -> Tensor:
    """The mean's denominator: how many targets count, or their weights' sum.  # [1] float32"""
    if op.denominator is not None:
        return op.denominator
    n_rows = op.target.shape[0]
    if n_rows > ONE_PROGRAM_ROWS:
        return _counted(op, n_cols)
    count = torch.empty(1, dtype=torch.float32, device=op.target.device)
    tensors = (op.target, count if op.weight is None else op.weight, count)
    flags = (("WEIGHTED", op.weight is not None), *_shared(n_rows, op, _device_of(count)))
    try:
        launch_flat("count_targets", tensors, (n_rows, n_cols, op.ignore_index), flags, num_warps=8)
    except KernelUnavailable:
        return _counted(op, n_cols)
    return count


def reduce_losses(loss: Tensor, op: CrossEntropy, n_cols: int) -> Tensor:
    """The rows' losses as `op.reduction` has them: a scalar, or as they are.  # float32"""
    if op.reduction == "none":
        return loss
    if op.reduction == "mean" and op.denominator is not None:
        return reduce_losses(loss, replace(op, reduction="sum"), n_cols) / op.denominator[0]
    mean, n_rows = op.reduction == "mean", loss.shape[0]
    if n_rows > ONE_PROGRAM_ROWS:
        return _reduced(loss, op, n_cols)
    out = torch.empty((), dtype=torch.float32, device=loss.device)
    tensors = (loss, op.target, loss if op.weight is None else op.weight, out)
    waits = ("WAITS", _device_of(out).overlaps)
    flags = (("MEAN", mean), ("WEIGHTED", op.weight is not None), waits, *_shared(n_rows, op, _device_of(out)))
    try:
        launch_flat("reduce_losses", tensors, (n_rows, n_cols, op.ignore_index), flags, num_warps=8)
    except KernelUnavailable:
        return _reduced(loss, op, n_cols)
    return out


def _reduced(loss: Tensor, op: CrossEntropy, n_cols: int) -> Tensor:
    if op.reduction == "sum":
        return loss.sum()
    count = _counted(op, n_cols)[0]
    return torch.where(count == 0.0, float("nan"), loss.sum() / count)


def _shared(n_rows: int, op: CrossEntropy, device: Device) -> Flags:
    """How a sum over rows is shared: by the CTAs of a cluster where there are many rows, and clusters.

    Weights are added up by one CTA: where they are looked up, Triton 3.6 does not keep a line in a warp, which the
    exchange of a cluster needs.
    """
    ctas = 16 if n_rows > ONE_CTA_ROWS and device.max_cluster >= 16 and op.weight is None else 1
    parts, lanes = (8, 32) if ctas > 1 else (1, 256)
    return (("CTAS", ctas), ("PARTS", parts), ("LANES", lanes), ("EACH", 8), ("PTX", device.ptx))


def _counted(op: CrossEntropy, n_cols: int) -> Tensor:
    counts = (op.target != op.ignore_index) & (op.target >= 0) & (op.target < n_cols)
    if op.weight is None:
        return counts.sum(dtype=torch.float32).view(1)
    return op.weight[op.target.clamp(0, n_cols - 1)].where(counts, 0.0).sum().view(1)


def _scale_flag(scale: float | Tensor) -> int:
    """How the kernels of statistics scale logits: not at all (0), by one number (1), each row by its own (2)."""
    return 2 if isinstance(scale, Tensor) else int(scale != 1.0)


def statistics(
    x: Tensor, ids: Tensor | None, scale: float | Tensor, entropy: bool, *, invariant: bool = False, keeps: bool = True
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(lse, entropy, log-probabilities of ids, moments) of rows x*scale, float32.

    ids: (n_rows, n_picks) int64, contiguous; moments, where `keeps`: (n_rows, 2), each row's maximum and its sum of
    exponentials, which `statistics_backward` takes.
    """
    lse = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    entropies = torch.empty_like(lse) if entropy else None
    picked = None if ids is None else torch.empty(ids.shape, dtype=torch.float32, device=x.device)
    n_picks = 0 if ids is None else ids.shape[1]
    scales = scale if isinstance(scale, Tensor) else None
    moments = torch.empty((x.shape[0], 2), dtype=torch.float32, device=x.device) if keeps else None
    vectors = tuple(lse if v is None else v for v in (lse, moments, entropies, ids, picked, scales))
    flags: Flags = (("PICKS", power_of_two(n_picks) if n_picks else 0), ("ENTROPY", entropy))
    flags = (*flags, ("SCALE", _scale_flag(scale)), ("KEEPS", keeps))
    numbers = (n_picks, 1.0 if isinstance(scale, Tensor) else float(scale))
    invariant = invariant or is_batch_invariant()
    try:
        launch_rows("row_statistics", (x,), vectors, numbers, flags, plan_statistics, invariant=invariant)
    except KernelUnavailable:
        return _formulas().statistics_and_moments(x, ids, scale, entropy)
    return lse, entropies, picked, moments


def statistics_backward(
    x: Tensor,
    dx: Tensor,
    moments: Tensor,
    scale: float | Tensor,
    *,
    ids: Tensor | None = None,
    g_picked: Tensor | None = None,
    entropy: Tensor | None = None,
    g_entropy: Tensor | None = None,
    g_lse: Tensor | None = None,
) -> None:
    """Into dx the gradient of what `statistics` returns; an upstream gradient that is None counts for nothing.

    moments: (n_rows, 2), as `statistics` returns them, or (n_rows,), the logsumexp.
    """
    g_picked, g_entropy, g_lse = (None if g is None else g.float().contiguous() for g in (g_picked, g_entropy, g_lse))
    n_picks = 0 if ids is None or g_picked is None else ids.shape[1]
    given = (moments, entropy, g_entropy, ids, g_picked, g_lse, scale if isinstance(scale, Tensor) else None)
    flags: Flags = (("PICKS", power_of_two(n_picks) if n_picks else 0), ("ENTROPY", g_entropy is not None))
    flags = (*flags, ("LSE", g_lse is not None), ("SCALE", _scale_flag(scale)), ("KEPT", moments.dim() == 2))
    numbers = (n_picks, 1.0 if isinstance(scale, Tensor) else float(scale))
    vectors = tuple(moments if v is None else v for v in given)
    try:
        launch_rows("row_statistics_backward", (x, dx), vectors, numbers, flags, plan_elementwise)
    except KernelUnavailable:
        dx.copy_(_formulas().statistics_gradient(g_picked, g_lse, g_entropy, x, ids, scale))


def logsumexp_forward(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """logsumexp of x over dims (rising, each in [0, x.dim())) in x's dtype. x is not empty."""
    kept, folded = _folded(x, dims)
    lse, *_ = statistics(folded, None, 1.0, False, keeps=False)
    shape = [1 if d in dims else size for d, size in enumerate(x.shape)] if keepdim else [x.shape[d] for d in kept]
    return lse.to(x.dtype).view(shape)


def logsumexp_backward(g: Tensor, x: Tensor, lse: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """dx = g*exp(x - lse), contiguous, in x's dtype; NaN where a row is nothing but -inf, as torch has it."""
    kept, folded = _folded(x, dims)
    dx = torch.empty(folded.shape, dtype=x.dtype, device=x.device)
    statistics_backward(folded, dx, lse.reshape(-1).float(), 1.0, g_lse=g.reshape(-1))
    order = (*kept, *dims)
    back = sorted(range(x.dim()), key=lambda i: order[i])
    return dx.view([x.shape[d] for d in order]).permute(back).contiguous()


def _folded(x: Tensor, dims: tuple[int, ...]) -> tuple[list[int], Tensor]:
    """(the other dims, x as rows over dims), copied only where its strides leave no other way."""
    kept = [d for d in range(x.dim()) if d not in dims]
    return kept, rows_of(x.permute(*kept, *dims), math.prod(x.shape[d] for d in dims))


def rows_of(x: Tensor, n_cols: int) -> Tensor:
    """x as (n_rows, n_cols) with contiguous columns: a view where its strides allow, else a copy. Differentiable.

    A single row keeps the stride of the tensor that it was taken from, so that it is planned as that tensor's rows are;
    `reshape` would forget it.
    """
    if 1 < x.dim() and x.shape[-1] == n_cols == x.numel() and x.stride(-1) == 1:
        return x if x.dim() == 2 else x.squeeze(tuple(range(x.dim() - 2)))
    rows = x.reshape(-1, n_cols)
    return rows if n_cols == 1 or rows.stride(1) == 1 else rows.contiguous()
