"""cross_entropy of logits (outer, n_cols, inner) as they lie: plans, allocates what is O(outer x inner), and launches.

The gradient of a position needs only its logits, because its columns are on chip. So only the mean's denominator is
kept for backward. A backward for an upstream gradient other than 1 computes the gradient again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..planning.spatial import plan_spatial_loss
from ..planning.types import Device, Plan
from .cache import Cache
from .compile import Launch, assert_options, kernel_loader
from .context import is_batch_invariant
from .device import device_of
from .layout import as_rows, empty
from .options import CrossEntropy
from .spatial import Recipe, Run, Step, as_planes, of_layout, prepare, problem_of, remembered, resident_step


@kernel_loader
def _loss() -> Any:
    from ..kernels.cross_entropy_spatial import cross_entropy_spatial

    return cross_entropy_spatial


@kernel_loader
def _prepare() -> Any:
    from ..kernels.cross_entropy_spatial import prepare_spatial_targets

    return prepare_spatial_targets


# targets that one program prepares, in blocks of one for each of its threads' 16 bytes
PREPARED_BLOCK, PREPARED_EACH, PREPARED_WARPS = 512, 8, 8
NO_LOSS, EACH_LOSS, SUM_OF_LOSSES = 0, 1, 2
_runs, _plans = Cache(), Cache()


def planes_of(logits: Tensor) -> Tensor | None:
    """Logits (N, C, d1, ...) as (N, C, d1*...) with contiguous positions; None where they do not fold so."""
    x = as_planes(logits, 1) if logits.dim() > 2 and logits.numel() else None
    return x if x is not None and x.shape[2] > 1 else None


def loss_plan(x: Tensor, dx: Tensor, invariant: bool, device: Device | None = None) -> Plan | None:
    """The plan of logits (outer, n_cols, inner), or None where their columns do not fit on chip."""
    key = (of_layout((x, dx)), invariant, device)
    found = _plans.get(key)
    if found is None:
        problem = problem_of(x, dx, batch_invariant=invariant)
        found = _plans.remember(key, (plan_spatial_loss(problem, device or device_of(x)),))
    return found[0]


def plan_of_copy(logits: Tensor) -> Plan | None:
    """The plan of a contiguous copy of logits that `planes_of` refuses; None where they are rows, or do not fit.

    What is neither planes nor rows, such as cropped images, is copied so: a copy to rows would move neighbors apart.
    H200, (188, 5, 1848) cropped from wider images: such a copy to rows took 2.3 times as long as PyTorch's whole loss.
    """
    if logits.dim() < 3 or not logits.numel() or as_rows(logits.movedim(1, -1), logits.dim() - 1) is not None:
        return None
    copy = planes_of(torch.empty(logits.shape, dtype=logits.dtype, device="meta"))
    return None if copy is None else loss_plan(copy, copy, is_batch_invariant(), device_of(logits))


def loss_recipe(
    x: Tensor, dx: Tensor, op: CrossEntropy, plan: Plan, device: Device, loss: int, gradient: bool, upstream: int,
    unless_one: bool, inplace: bool,
) -> Recipe:  # fmt: skip
    """The one launch over (x, dx, target, weight, weight_sum, count, g, losses)."""
    flags = dict(
        LOSS=loss, GRADIENT=gradient, UPSTREAM=upstream, UNLESS_ONE=unless_one, INPLACE=inplace,
        MEAN=op.reduction == "mean", **dict(op.kind.flags),
    )  # fmt: skip
    return Recipe((resident_step(_loss(), (x, dx), 8, plan, device, **flags),))


def prepare_recipe(op: CrossEntropy, n_cols: int, device: Device) -> Recipe:
    """What prepares targets, over (target, weight, targets in 16 bits, a partial count for each program)."""
    meta: dict[str, Any] = dict(WEIGHTED=op.weight is not None, EACH=PREPARED_EACH, BLOCK=PREPARED_BLOCK)
    meta |= (
        dict(num_warps=PREPARED_WARPS * 32 // device.warp_size) | device.options() | assert_options(_prepare(), device)
    )
    step = Step(_prepare(), meta, (0, 1, 2, 3), (None, n_cols, op.ignore_index), 1, PREPARED_EACH * PREPARED_BLOCK)
    return Recipe((step,))


def _run(
    x: Tensor, dx: Tensor, op: CrossEntropy, count: Tensor, g: Tensor, losses: Tensor, loss: int, gradient: bool,
    upstream: int, unless_one: bool, invariant: bool,
) -> None:  # fmt: skip
    tensors = (x, dx, *op.vectors(count), count, g, losses)
    form = (loss, gradient, upstream, unless_one, gradient and dx.data_ptr() == x.data_ptr())
    key = (of_layout(tensors), op.kind, op.reduction == "mean", form, invariant)

    def make() -> Run:
        plan = loss_plan(x, dx, invariant)
        assert plan is not None
        return prepare(loss_recipe(x, dx, op, plan, device_of(x), *form), tensors)

    remembered(_runs, key, x, make)(tensors, (op.ignore_index, *op.numbers))


def prepare_targets(op: CrossEntropy, n_cols: int) -> tuple[CrossEntropy, Tensor]:
    """(op with targets in 16 bits, -1 where one does not count; how many count, or the sum of their weights, [1])."""
    n = op.target.numel()
    prepared = torch.empty(op.target.shape, dtype=torch.int16, device=op.target.device)
    partial = empty((-(-n // (PREPARED_EACH * PREPARED_BLOCK)),), (1,), torch.float32, op.target)
    tensors = (op.target, partial if op.weight is None else op.weight, prepared, partial)
    key = (of_layout(tensors[:2]), op.weight is None, n_cols, op.ignore_index)

    def make() -> Run:
        return prepare(prepare_recipe(op, n_cols, device_of(op.target)), tensors)

    remembered(_runs, key, partial, make)(tensors, (), n)
    return op._replace(target=prepared), partial.sum().view(1)


def cross_entropy_pass(
    x: Tensor, dx: Tensor | None, op: CrossEntropy, invariant: bool | None = None
) -> tuple[Tensor, Tensor]:
    """(the loss, reduced as `op` says; the mean's denominator), and into dx the gradient for an upstream gradient of 1.

    x, dx: (outer, n_cols, inner) with contiguous inner; dx may be x, or None where no gradient is wanted.
    """
    invariant = is_batch_invariant() if invariant is None else invariant
    n_cols, positions = x.shape[1], x.shape[0] * x.shape[2]
    count = empty((1,), (1,), torch.float32, x) if op.denominator is None else op.denominator
    if op.reduction == "mean" and op.denominator is None:
        op, count = prepare_targets(op, n_cols)
    if op.reduction == "none":
        losses = empty((positions,), (1,), torch.float32, x)
    else:
        plan = loss_plan(x, x if dx is None else dx, invariant)
        assert plan is not None
        programs = -(-x.shape[0] // plan.outers) * -(-x.shape[2] // plan.rows)
        losses = empty((programs,), (1,), torch.float32, x)
    which = EACH_LOSS if op.reduction == "none" else SUM_OF_LOSSES
    to = x if dx is None else dx
    _run(x, to, op, count, count, losses, which, dx is not None, 0, False, invariant)
    if op.reduction == "none":
        return losses, count
    return losses.sum(), count


def cross_entropy_gradient(
    x: Tensor, dx: Tensor, op: CrossEntropy, count: Tensor, g: Tensor, *, unless_one: bool, invariant: bool
) -> None:
    """The gradient for upstream g ([1], or [outer x inner]; float32) into dx; unless_one: only where g is not 1."""
    _run(x, dx, op, count, g, g, NO_LOSS, True, 1 if g.numel() == 1 else 2, unless_one and g.numel() == 1, invariant)


def loss_launches(x: Tensor, op: CrossEntropy, device: Device, plan: Plan) -> list[Launch]:
    """The launches of a mean with its gradient, as records: to be cross-compiled, not to be run."""
    number = torch.empty(1)
    prepared = op.target.to(torch.int16)
    tensors = (x, x, prepared, *(number,) * 5)
    recipe = loss_recipe(x, x, op, plan, device, SUM_OF_LOSSES, True, 0, False, False)
    numbers = (op.ignore_index, *op.numbers)
    of_loss = [Launch(s.kernel, (1,), (*tensors, *s.numbers(1), *numbers), s.meta) for s in recipe.steps]
    of_targets = [
        Launch(s.kernel, (1,), (op.target, number, prepared, number, *s.numbers(1)), s.meta)
        for s in prepare_recipe(op, x.shape[1], device).steps
    ]
    return of_loss + of_targets
