"""cross_entropy of logits (outer, n_cols, inner) as they lie: plans, allocates what is O(outer x inner), and launches.

Where a program or a cluster holds the columns, the gradient of a position needs only its logits, and only the mean's
denominator is kept for backward. Longer columns are read twice, and each position's maximum and sum are kept too. A
backward for an upstream gradient other than 1 computes the gradient again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..planning.cross_entropy_spatial import plan_spatial_loss
from ..planning.types import Device, Plan, tiles_of
from .cache import Cache
from .compile import assert_options, early_start
from .context import is_batch_invariant
from .device import device_of
from .folding import as_crops, as_planes, crops_as_planes
from .kernel_loading import kernel_of
from .layout import as_rows, empty
from .loss_kernels import add_kernel, add_warps, partials_flags
from .options import CrossEntropy
from .spatial import (
    Recipe,
    Run,
    Step,
    cached_run,
    merge_step,
    merge_tile,
    of_layout,
    parts_step,
    prepare,
    problem_of,
    problem_of_crop,
    resident_step,
    sizes_and_steps,
    with_crop,
)

RESIDENT, SHARED = (kernel_of(name, name) for name in ("cross_entropy_spatial", "cross_entropy_spatial_shared"))
PREPARE = kernel_of("spatial_targets", "prepare_spatial_targets")
PARTS = {
    name: kernel_of("cross_entropy_spatial_parts", name)
    for name in ("cross_entropy_spatial_reduce", "cross_entropy_spatial_merge", "cross_entropy_spatial_finish")
}
# targets that one program prepares, in blocks of one for each of its threads' 16 bytes
PREPARED_BLOCK, PREPARED_EACH, PREPARED_WARPS = 512, 8, 8
# PyTorch adds up more than so many losses
MOST_PARTIALS = 65536
# warps that look at an upstream gradient. More of them than fit on the GPU would take turns to find nothing to do
LOOKS = 2048
NO_LOSS, EACH_LOSS, SUM_OF_LOSSES = 0, 1, 2
_runs, _plans = Cache(), Cache()


def planes_of(logits: Tensor) -> Tensor | None:
    """Logits (N, C, d1, ...) as (N, C, d1*...) with contiguous positions; None where they do not fold so.

    Where positions are rows that lie apart, as those of cropped images: (N, C, rows, width).
    """
    if logits.dim() < 3 or not logits.numel():
        return None
    x = as_planes(logits, 1)
    if x is None:
        return as_crops(logits, 1)
    return x if x.shape[2] > 1 else None


def _folded(x: Tensor) -> tuple[Tensor, tuple[int, int] | None]:
    """(x as (outer, n_cols, inner), (width, from a row to the next) where it is cropped)."""
    return (x, None) if x.dim() == 3 else crops_as_planes(x)


def loss_plan(
    x: Tensor, dx: Tensor | None, invariant: bool, device: Device | None = None, shareable: bool = True
) -> Plan:
    """The plan of logits as `planes_of` folds them.

    dx: None where no gradient is written. The plan is that of a loss with one in memory of its own, so that their bits
    are the same. shareable: False of launches that `cross_entropy_spatial_shared` has no code for (`may_share`).
    """
    key = (of_layout((x,) if dx is None else (x, dx)), invariant, device, shareable)
    found: Plan | None = _plans.get(key)
    if found is None:
        to = torch.empty(x.shape, dtype=x.dtype, device="meta") if dx is None else dx
        (planes, crop), (to, _) = _folded(x), _folded(to)
        problem = problem_of(planes, to, batch_invariant=invariant)
        problem = problem if crop is None else problem_of_crop(problem, crop)
        found = _plans.store(key, plan_spatial_loss(problem, device or device_of(x), shareable))
    return found


def may_share(op: CrossEntropy, unless_one: bool) -> bool:
    """Whether `cross_entropy_spatial_shared` has the code: not for label smoothing, nor for programs that loop."""
    return op.smoothing == 0.0 and not unless_one


def plan_of_copy(logits: Tensor) -> Plan | None:
    """The plan of a contiguous copy of logits that are copied first; None where none is, or where they are rows.

    What is neither planes nor rows is copied so, and cropped images whose columns are read twice. A copy to rows would
    move neighbors apart. H200, (188, 5, 1848) cropped from wider images: such a copy took 2.3 times as long as
    PyTorch's whole loss. On AMD GPUs all cropped images are: Triton does not finish to compile kernels that crop.
    """
    if logits.dim() < 3 or not logits.numel() or as_rows(logits.movedim(1, -1), logits.dim() - 1) is not None:
        return None
    x = planes_of(logits)
    if x is not None and x.dim() == 3:
        return None
    if x is not None and device_of(logits).kind != "hip":
        if loss_plan(x, None, is_batch_invariant()).regime != "spatial_two_pass":
            return None
    copy = planes_of(torch.empty(logits.shape, dtype=logits.dtype, device="meta"))
    return None if copy is None else loss_plan(copy, None, is_batch_invariant(), device_of(logits))


# (x, dx, target, weight, weight_facts, count, g, losses, max, sum): what a recipe's launches are over
X, DX, TARGET, WEIGHT, WEIGHT_FACTS, COUNT, G, LOSSES, MAX, SUM = range(10)


def loss_recipe(
    x: Tensor, dx: Tensor, op: CrossEntropy, plan: Plan, device: Device, loss: int, gradient: bool, upstream: int,
    unless_one: bool, inplace: bool, crop: tuple[int, int] | None = None, waits: bool = False,
) -> Recipe:  # fmt: skip
    """The launches over (x, dx, target, weight, weight_facts, count, g, losses, max, sum).

    x, dx: (outer, n_cols, inner). crop: (width, from a row to the next) of a cropped x, as `_folded` gives them.
    waits: the launch in front of these is `add_partials`, which may still run.

    max, sum: of each position, where the columns are read twice. The loss writes them, and the gradient reads them.
    """
    of_op = dict(op.kind.flags)
    mean = op.reduction == "mean"
    smoothed_or_elsewhere = op.smoothing or unless_one or inplace or crop
    assert not plan.skewed or not smoothed_or_elsewhere, "cross_entropy_spatial_shared has no such code"
    if plan.regime != "spatial_two_pass":
        flags = dict(LOSS=loss, GRADIENT=gradient, UPSTREAM=upstream, UNLESS_ONE=unless_one, INPLACE=inplace)
        flags |= dict(WAITS=waits and device.supports_pdl, TRIGGER=device.supports_pdl and loss == SUM_OF_LOSSES)
        # programs that may find nothing to do, or write nothing, start together
        flags |= dict(MEAN=mean, CROPPED=crop is not None, STAGGER=plan.stagger if gradient and not unless_one else 0)
        step = resident_step((SHARED if plan.skewed else RESIDENT)(), (x, dx), 8, plan, device, **flags, **of_op)
        if not plan.skewed:
            step = with_crop(step, plan, crop)
        return Recipe((step._replace(most=max(1, LOOKS // (plan.ctas * plan.num_warps))) if unless_one else step,))
    reduce, merge, finish = (PARTS[f"cross_entropy_spatial_{step}"]() for step in ("reduce", "merge", "finish"))
    steps: list[Step] = []
    inner = x.shape[2]
    parts = -(-x.shape[1] // plan.part_cols)
    maxima, sums, smoothed = range(10, 13)
    if loss != NO_LOSS:
        steps.append(parts_step(reduce, (x,), (X, maxima, sums, smoothed, WEIGHT, WEIGHT_FACTS), plan, device, **of_op))
        over = (X, maxima, sums, smoothed, MAX, SUM, TARGET, WEIGHT, WEIGHT_FACTS, COUNT, LOSSES)
        step = merge_step(merge, device, over, inner, parts, LOSS=loss, MEAN=mean, **of_op)
        n_cols, (outer_stride, col_stride) = x.shape[1], x.stride()[:2]
        steps.append(step._replace(scalars=(n_cols, *step.scalars, outer_stride, col_stride)))
    if gradient:
        flags = dict(UPSTREAM=upstream, UNLESS_ONE=unless_one, MEAN=mean, **of_op)
        sizes, programs, meta = sizes_and_steps(finish, (x, dx), plan, device, **flags)
        read = (X, DX, MAX, SUM, TARGET, WEIGHT, WEIGHT_FACTS, COUNT, G)
        steps.append(
            Step(finish, meta, read, (None, *sizes), programs, most=LOOKS // plan.num_warps if unless_one else None)
        )
    return Recipe(tuple(steps), (parts * inner,) * 3 if loss != NO_LOSS else ())


def prepare_recipe(op: CrossEntropy, n_cols: int, device: Device) -> Recipe:
    """What prepares targets, over (target, weight, targets in fewer bits, a partial count for each program)."""
    meta: dict[str, Any] = dict(WEIGHTED=op.weight is not None, EACH=PREPARED_EACH, BLOCK=PREPARED_BLOCK)
    meta["TRIGGER"] = device.supports_pdl
    meta |= (
        dict(num_warps=PREPARED_WARPS * 32 // device.warp_size) | device.options() | assert_options(PREPARE(), device)
    )
    step = Step(PREPARE(), meta, (0, 1, 2, 3), (None, n_cols, op.ignore_index), 1, PREPARED_EACH * PREPARED_BLOCK)
    return Recipe((step,))


def sum_recipe(device: Device) -> Recipe:
    """What adds up partial sums, over (the partial sums, [n]; their sum, [1])."""
    meta: dict[str, Any] = dict(partials_flags(device))
    meta |= dict(num_warps=add_warps(device)) | device.options() | early_start(meta)
    return Recipe((Step(add_kernel(), meta, (0, 1), (None,), 1, most=1),))


def _adder(partials: Tensor, to: Tensor) -> Run:
    """run((partials, to)): the sum of partials, [n], into `to`. The kernel in front is the one that writes them."""

    def make() -> Run:
        return prepare(sum_recipe(device_of(partials)), (partials, to))

    return cached_run(_runs, ("sum", of_layout((partials, to))), partials, make)


def _run(
    plan: Plan, x: Tensor, dx: Tensor, op: CrossEntropy, count: Tensor, moments: tuple[Tensor, Tensor], g: Tensor,
    losses: Tensor, loss: int, gradient: bool, upstream: int, unless_one: bool, invariant: bool, waits: bool = False,
) -> None:  # fmt: skip
    (x, crop), (dx, _) = _folded(x), _folded(dx)
    tensors = (x, dx, *op.vectors(count), count, g, losses, *moments)
    # the plan follows from what is in the key
    form = (loss, gradient, upstream, unless_one, gradient and dx.data_ptr() == x.data_ptr(), crop, waits)
    key = (of_layout(tensors), op.kind, op.reduction == "mean", form, invariant)

    def make() -> Run:
        return prepare(loss_recipe(x, dx, op, plan, device_of(x), *form), tensors)

    cached_run(_runs, key, x, make)(tensors, (op.ignore_index, *op.numbers))


def _positions(x: Tensor) -> int:
    return x.numel() // x.shape[1]


def _partials(plan: Plan, x: Tensor) -> int:
    """Programs that each write a partial sum of losses."""
    n_cols, inner, outers = x.shape[1], _positions(x) // x.shape[0], plan.outers
    if plan.regime == "spatial_two_pass":
        blocks, outers = -(-inner // merge_tile(-(-n_cols // plan.part_cols))[1]), 1
    else:
        blocks = tiles_of(inner, plan.rows, plan.overlap, plan.skewed)
    return -(-x.shape[0] // outers) * blocks


def _kept(plan: Plan, x: Tensor) -> Tensor:
    """Memory for what backward needs: the mean's denominator, and each position's moments where a plan reads twice."""
    positions = _positions(x)
    size = 4 + 2 * _padded(positions) if plan.regime == "spatial_two_pass" else 1
    return empty((size,), (1,), torch.float32, x)


def _padded(positions: int) -> int:
    """So many float32 that what follows them is aligned."""
    return -(-positions // 4) * 4


def _moments(kept: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    positions = _positions(x)
    if kept.numel() == 1:
        return kept, kept
    start = 4 + _padded(positions)
    return kept[4 : 4 + positions], kept[start : start + positions]


def prepare_targets(op: CrossEntropy, n_cols: int, count: Tensor) -> CrossEntropy:
    """op with targets in fewer bits, -1 where one does not count. Into count, [1]: how many do, or their weights."""
    n = op.target.numel()
    dtype = torch.int8 if n_cols <= 1 << 7 else torch.int16 if n_cols <= 1 << 15 else torch.int32
    prepared = torch.empty(op.target.shape, dtype=dtype, device=op.target.device)
    partial = empty((-(-n // (PREPARED_EACH * PREPARED_BLOCK)),), (1,), torch.float32, op.target)
    tensors = (op.target, partial if op.weight is None else op.weight, prepared, partial)
    key = (of_layout(tensors[:2]), op.weight is None, n_cols, op.ignore_index)

    def make() -> Run:
        return prepare(prepare_recipe(op, n_cols, device_of(op.target)), tensors)

    cached_run(_runs, key, partial, make)(tensors, (), n)
    _adder(partial, count)((partial, count))
    return op._replace(target=prepared)


def cross_entropy_pass(
    x: Tensor, dx: Tensor | None, op: CrossEntropy, invariant: bool | None = None
) -> tuple[Tensor, Tensor]:
    """(the loss, reduced as `op` says; what backward needs), and into dx the gradient for an upstream gradient of 1.

    x, dx: as `planes_of` folds them; dx is not cropped, or it is x, or None where no gradient is wanted.
    """
    invariant = is_batch_invariant() if invariant is None else invariant
    plan = loss_plan(x, dx, invariant, shareable=may_share(op, False))
    n_cols, positions = x.shape[1], _positions(x)
    kept = _kept(plan, x)
    count = kept[:1] if op.denominator is None else op.denominator
    waits = op.reduction == "mean" and op.denominator is None
    if waits:
        op = prepare_targets(op, n_cols, count)
    programs = positions if op.reduction == "none" else _partials(plan, x)
    losses = empty((programs,), (1,), torch.float32, x)
    reduced = empty((), (), torch.float32, x)
    # now, because a kernel that does not compile must be known before anything is written
    add = None if op.reduction == "none" or programs > MOST_PARTIALS else _adder(losses, reduced)
    which = EACH_LOSS if op.reduction == "none" else SUM_OF_LOSSES
    to = x if dx is None else dx
    _run(plan, x, to, op, count, _moments(kept, x), count, losses, which, dx is not None, 0, False, invariant, waits)
    if op.reduction == "none":
        return losses, kept
    if add is None:
        return losses.sum(), kept
    add((losses, reduced))
    return reduced, kept


def cross_entropy_gradient(
    x: Tensor, dx: Tensor, op: CrossEntropy, kept: Tensor, g: Tensor, *, unless_one: bool, invariant: bool
) -> None:
    """The gradient for upstream g ([1], or [outer x inner]; float32) into dx; unless_one: only where g is not 1."""
    count = kept[:1] if op.denominator is None else op.denominator
    upstream = 1 if g.numel() == 1 else 2
    only = unless_one and g.numel() == 1
    plan = loss_plan(x, dx, invariant, shareable=may_share(op, only))
    _run(plan, x, dx, op, count, _moments(kept, x), g, g, NO_LOSS, True, upstream, only, invariant)
