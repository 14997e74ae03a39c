"""cross_entropy of rows (n_rows, n_cols): allocates O(rows), and launches.

No mathematics and no autograd: torch_ops folds tensors into rows, checks them, and calls these. Nothing here waits for
the device. KernelUnavailable, with nothing written, where a kernel over rows does not compile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..planning.losses import (
    plan_capped_loss,
    plan_capped_loss_alone,
    plan_loss,
    plan_loss_alone,
    plan_smoothed_loss,
    plan_smoothed_loss_alone,
)
from ..planning.types import ITEMSIZE, VECTOR_BYTES, Device, Plan, Problem
from . import loss_kernels as kernels
from .availability import KernelUnavailable
from .cache import Cache
from .context import is_batch_invariant, row_invariance
from .last_upstream import LastUpstream, new_slot
from .launcher import (
    RowOp,
    Run,
    Vector,
    device_of,
    launch_rows,
    on_its_device,
    planned,
    prepare_flat,
    prepare_rows,
)
from .layout import (
    Allocator,
    allocator_here,
    described_gradient,
    empty,
    gradient_buffer,
    gradient_stride,
    layout_key,
    places,
    pointer,
    rows_apart,
)
from .options import LOSS_KINDS, CrossEntropy
from .torch_private import current_device

# how much arithmetic a logit takes -> the loss alone, and the loss with its gradient in the same pass
FORWARD = {
    arithmetic: RowOp(planner, kernels.of_loss)
    for arithmetic, planner in (
        ("exponential", plan_loss_alone),
        ("smoothed", plan_smoothed_loss_alone),
        ("capped", plan_capped_loss_alone),
    )
}
WITH_GRADIENT = {
    arithmetic: RowOp(functools.lru_cache(planner), kernels.of_both)
    for arithmetic, planner in (
        ("exponential", plan_loss),
        ("smoothed", plan_smoothed_loss),
        ("capped", plan_capped_loss),
    )
}


def check_targets(target: Tensor, ignore_index: int, n_cols: int) -> None:
    """IndexError for a target outside the classes; for the CPU, as a GPU's kernels assert it themselves."""
    outside = (target != ignore_index) & ((target < 0) | (target >= n_cols))
    if outside.any():
        raise IndexError(f"Target {int(target[outside][0])} is out of bounds.")


class _Launches(NamedTuple):
    """The launches of a cross-entropy of rows of one layout.

    writes: whether the pass that reads the logits writes their gradient. loss: `at` of that pass. counts, reduce: what
    `prepare_count`, and `prepare_reduction` or `prepare_sums`, return; None where PyTorch counts, or adds up. last:
    what the gradient is written for; None: for an upstream gradient of 1. stride: from one row of the gradient to the
    next. new, at: what allocates on `device`, and what makes pointers of its tensors.
    """

    writes: bool
    loss: Callable[..., None]
    counts: Callable[..., None] | None
    reduce: Callable[..., None] | None
    last: LastUpstream | None
    stride: int
    new: Allocator
    at: Callable[[Tensor], Any]
    device: int


_launches = Cache()
_invariant = row_invariance.get


def _launches_of(x: Tensor, n_rows: int, op: CrossEntropy, training: bool, inplace: bool, layout: object) -> _Launches:
    if not x.is_cuda:
        return _prepare(x[:1], n_rows, op, training, inplace)
    key: Any = (op.reduction, op.smoothing > 0.0, kernels.size_class(n_rows), training, inplace, _invariant())
    if layout is not None:  # there are no weights, no softcap and no denominator
        key = (layout, key)
    else:
        key = (layout_key(x), key, op.kind, op.weight_facts is None, op.denominator is None)
    found = _launches.get(key)
    return _launches.store(key, _prepare(x[:1], n_rows, op, training, inplace)) if found is None else found


def fits_on_chip(plan: Plan) -> bool:
    """Whether a row is held while its loss is computed, so that the gradient is written in the same pass."""
    return plan.regime != "two_pass"


def _prepare(x: Tensor, n_rows: int, op: CrossEntropy, training: bool, inplace: bool) -> _Launches:
    """The launches for n_rows rows that lie as the first one, x, does."""
    kind, invariant = op.kind, is_batch_invariant()
    mean, real = op.reduction == "mean", torch.float32
    unused = torch.empty(1, dtype=real, device=x.device)
    vectors = op.vectors(unused)
    count = reduce = loss = None
    if op.reduction != "none":
        divided = mean and op.denominator is None
        with suppress(KernelUnavailable):
            count = prepare_count(op.weight is not None, n_rows, x) if divided and training else None
    # weights and smoothing together read a weight for each logit, twice: then the gradient has a kernel of its own
    if training and op.reduction != "none" and op.weight_facts is None:
        dx, row_op = x if inplace else gradient_buffer(x), WITH_GRADIENT[kind.arithmetic]
        plan = row_op.plan((x, dx), device_of(x), invariant)
        if fits_on_chip(plan):
            waits, losses = count is not None and device_of(x).supports_pdl, kernels.EACH_ROW
            with suppress(KernelUnavailable):
                added = prepare_sums(x, n_rows, plan.rows) if plan.gathered else None
                if added is not None:
                    losses = kernels.SUMS_OVER_COUNT if divided else kernels.SUMS
            flags = kernels.with_gradient_flags(kind, mean, inplace, not inplace, waits, losses)
            with suppress(KernelUnavailable):
                loss = prepare_rows(row_op, (x, dx), (*vectors, unused, unused, unused), flags, invariant)
                reduce = added if losses != kernels.EACH_ROW else None
    writes = loss is not None
    if reduce is None and op.reduction != "none":
        with suppress(KernelUnavailable):
            reduce = prepare_reduction(x, n_rows, divided, op.weight is not None, has_count=count is not None)
    if loss is None:
        loss = prepare_rows(FORWARD[kind.arithmetic], (x,), (*vectors, unused, unused), kind.flags, invariant)
    # with weights or smoothing, compilers may fuse a product of backward's kernel otherwise than this one's: other bits
    expects = writes and not inplace and op.weight is None and op.smoothing == 0.0 and x.is_cuda
    last = new_slot() if expects else None
    made = allocator_here(x), pointer(x), x.get_device()
    return _Launches(writes, loss.at, count, reduce, last, gradient_stride(x), *made)


def cross_entropy_forward(
    x: Tensor, op: CrossEntropy, training: bool = False, inplace: bool = False, layout: object = None
) -> tuple[Tensor, Tensor, Tensor | None, LastUpstream | None]:
    """(the loss, reduced; memory for `parts_of`; the gradient, or None; where another upstream gradient is reported).

    `training`: the gradient is written in the pass that reads the logits, for an upstream gradient that this memory
    has: the last one that was reported, or 1. `inplace`: over x, for 1. It is None where a row does not fit on chip,
    and for losses that are not reduced. layout: where it is given, a key of how x lies.
    """
    n_rows, n_cols = x.shape
    launches = _launches_of(x, n_rows, op, training, inplace, layout)
    if layout is not None and current_device() == launches.device:  # on a GPU
        return _run(launches, x, n_rows, n_cols, op, training, inplace)
    return on_its_device(x, _run, launches, x, n_rows, n_cols, op, training, inplace)


def _run(
    launches: _Launches, x: Tensor, n_rows: int, n_cols: int, op: CrossEntropy, training: bool, inplace: bool
) -> tuple[Tensor, Tensor, Tensor | None, LastUpstream | None]:
    target, weight, weight_facts, ignore_index, reduction, smoothing, softcap, z_loss, denominator = op
    new, at = launches.new, launches.at
    # one allocation: each row's moments, the mean's denominator, the upstream gradient of dx, each row's loss
    kept = new((3 * n_rows + 2,), (1,), torch.float32)
    moments = at(kept)
    if type(moments) is int:
        count = moments + 8 * n_rows
        losses = count + 8
    else:
        moments, count, losses = places(kept, 0, 2 * n_rows, 2 * n_rows + 2)
    if reduction == "none":
        loss = new((n_rows,), (1,), torch.float32)
        losses = at(loss)
    else:
        loss = new((), (), torch.float32)
    targets = at(target)
    weights = losses if weight is None else at(weight)
    size = (n_rows, n_rows, n_cols, ignore_index)
    if launches.counts is not None:
        launches.counts((targets, weights, count), size)
    elif training and reduction == "mean":
        kept[2 * n_rows : 2 * n_rows + 1].copy_(counted(op, n_cols))
    vectors = (targets, weights, losses if weight_facts is None else at(weight_facts))
    numbers = (ignore_index, smoothing, 1.0 if softcap is None else softcap, z_loss)
    dx = None
    if launches.writes:
        dx = x.detach() if inplace else rows_apart(new, n_rows, n_cols, launches.stride, x.dtype)
        upstream = 1.0 if launches.last is None else launches.last.expected()
        launches.loss(n_rows, (at(x), at(dx)), (*vectors, count, losses, moments), (*numbers, upstream))
    else:
        launches.loss(n_rows, (at(x),), (*vectors, losses, moments), numbers)
    if reduction == "none":
        return loss, kept, dx, None
    if launches.reduce is not None:
        reduced = at(loss)
        launches.reduce((losses, targets, weights, reduced, reduced if launches.counts is None else count), size)
    else:
        loss = kept[2 * n_rows + 2 :].sum()
    if reduction == "mean" and denominator is not None:
        loss = loss / denominator[0]
    elif reduction == "mean" and launches.reduce is None:
        total = counted(op, n_cols)[0]
        loss = torch.where(total == 0.0, float("nan"), loss / total)
    return loss, kept, dx, launches.last


def planned_cross_entropy(x: Tensor, on: Tensor, gradient: bool) -> Plan | str:
    """The plan of rows x, which may be a meta tensor, on `on`'s device, for a mean with default options; or why its
    kernel did not compile. gradient: the forward writes it, where a row fits on chip."""
    real, op = torch.float32, "exponential"
    kind = LOSS_KINDS[False, False, False]
    if gradient:
        dx = described_gradient(x)
        vectors = (torch.int64, real, real, real, real, real)
        waits = device_of(on).supports_pdl
        flags = kernels.with_gradient_flags(kind, True, False, True, waits, kernels.SUMS_OVER_COUNT)
        plan = planned(WITH_GRADIENT[op], (x, dx), vectors, flags, on)
        if isinstance(plan, str) or fits_on_chip(plan):
            return plan
    return planned(FORWARD[op], (x,), (torch.int64, real, real, real, real), kind.flags, on)


# --- sums over rows ---------------------------------------------------------------------------------------------------


def _prepare_add(on: Tensor) -> Run:
    """run((partials, to), (n,)): the sum of n partial sums, of the launch in front, into to, [1]."""
    device = device_of(on)
    flags, warps = kernels.partials_flags(device), kernels.add_warps(device)
    return prepare_flat(kernels.add_kernel, (torch.float32,) * 2, flags, warps, on)


def prepare_count(weighted: bool, n_rows: int, on: Tensor) -> Run:
    """run((targets, weights, count), (n_rows, n_rows, n_cols, ignore_index)): the mean's denominator into count, [1].

    It is the number of targets that count, or the sum of their weights. The next kernel may start before its end.
    """
    real, device, way = torch.float32, device_of(on), kernels.size_class(n_rows)
    flags = kernels.sum_flags(False, False, weighted, way == kernels.BY_CLUSTER, device)
    count = prepare_flat(kernels.count_kernel, (torch.int64, real, real), flags, 8, on)
    if way != kernels.SHARED:
        return count
    add = _prepare_add(on)
    new, at = allocator_here(on), pointer(on)

    def run(vectors: tuple[Any, ...], size: tuple[int, ...]) -> None:
        targets, weights, to = vectors
        n_rows, _, *rest = size
        programs = -(-n_rows // kernels.ROWS_OF_PROGRAM)
        partial = new((programs,), (1,), real)
        count((targets, weights, at(partial)), (n_rows, kernels.ROWS_OF_PROGRAM, *rest), programs)
        add((at(partial), to), (programs,))

    return run


def prepare_reduction(
    on: Tensor, n_rows: int, divided: bool, weighted: bool, keeps_count: bool = False, has_count: bool = False
) -> Run:
    """run((losses, targets, weights, to, count), (n_rows, n_rows, n_cols, ignore_index)): the losses' sum into to, [1].

    divided: over the number of targets that count, NaN where none does. has_count: `count` has that number. If not,
    the targets are counted, and keeps_count: `count` takes the number. The kernel in front is the one that writes the
    losses, and may still run.
    """
    real, device, way = torch.float32, device_of(on), kernels.size_class(n_rows)
    kinds = (real, torch.int64, real, real, real)

    def reduction(mean: bool, counted: bool, keeps: bool) -> Run:
        flags = kernels.sum_flags(True, mean, weighted, way == kernels.BY_CLUSTER, device)
        flags = (("KEEPS_COUNT", keeps), ("HAS_COUNT", counted), *flags)
        return prepare_flat(kernels.reduce_kernel, kinds, flags, 8, on)

    if way != kernels.SHARED:
        return reduction(divided, has_count, keeps_count)
    counts = prepare_count(weighted, n_rows, on) if divided and not has_count else None
    reduce, merge = reduction(False, True, False), reduction(divided, True, False)
    new = allocator_here(on)

    def run(vectors: tuple[Any, ...], size: tuple[int, ...]) -> None:
        losses, targets, weights, to, count = vectors
        n_rows, _, *rest = size
        programs = -(-n_rows // kernels.ROWS_OF_PROGRAM)
        found = new((1 + programs,), (1,), real)  # the count, and each program's sum
        own, partial = places(found, 0, 1)
        if counts is not None:
            count = count if keeps_count else own
            counts((targets, weights, count), size)
        reduce((losses, targets, weights, partial, partial), (n_rows, kernels.ROWS_OF_PROGRAM, *rest), programs)
        merge((partial, targets, weights, to, count if divided else partial), (programs, programs, *rest))

    return run


def prepare_sums(on: Tensor, n_rows: int, rows: int) -> Run:
    """`prepare_reduction` of losses that each program has added up, of `rows` rows, for numbers of rows like n_rows."""
    add = _prepare_add(on)
    many = kernels.size_class(n_rows) == kernels.SHARED
    shared = prepare_reduction(on, kernels.ONE_PROGRAM_ROWS + 1, False, False, has_count=True) if many else None

    def run(vectors: tuple[Any, ...], size: tuple[int, ...]) -> None:
        n_rows, _, *rest = size
        programs = -(-n_rows // rows)
        if shared is None or programs <= kernels.ONE_PROGRAM_ROWS:
            add((vectors[0], vectors[3]), (programs,))
        else:
            shared(vectors, (programs, programs, *rest))

    return run


def count_targets(op: CrossEntropy, x: Tensor) -> Tensor:
    """The mean's denominator: how many targets count, or their weights' sum.  # [1] float32"""
    n_rows, n_cols = x.shape
    if op.denominator is None:
        count = empty((1,), (1,), torch.float32, x)
        with suppress(KernelUnavailable):
            run, at = prepare_count(op.weight is not None, n_rows, x), pointer(x)
            vectors = (at(op.target), at(count if op.weight is None else op.weight), at(count))
            on_its_device(x, run, vectors, (n_rows, n_rows, n_cols, op.ignore_index))
            return count
    return counted(op, n_cols)


def counted(op: CrossEntropy, n_cols: int) -> Tensor:
    """`count_targets` by PyTorch."""
    if op.denominator is not None:
        return op.denominator
    counts = (op.target != op.ignore_index) & (op.target >= 0) & (op.target < n_cols)
    if op.weight is None:
        return counts.sum(dtype=torch.float32).view(1)
    return op.weight[op.target.clamp(0, n_cols - 1)].where(counts, 0.0).sum().view(1)


def reduce_losses(losses: Tensor, op: CrossEntropy, size: int) -> tuple[Tensor, Tensor | None]:
    """(the rows' losses, reduced; what a mean divides by, [1]). op: of all `size` columns, without weights."""
    n_rows, mean = losses.shape[0], op.reduction == "mean"
    loss, at = empty((), (), torch.float32, losses), pointer(losses)
    count = empty((1,), (1,), torch.float32, losses) if mean else None
    run = prepare_reduction(losses, n_rows, mean, False, mean)
    vectors = tuple(at(t) for t in (losses, op.target, losses, loss, loss if count is None else count))
    on_its_device(losses, run, vectors, (n_rows, n_rows, size, op.ignore_index))
    return loss, count


# --- a chunk of rows, whose losses are reduced over all chunks: linear_cross_entropy ----------------------------------


def losses_of_chunk(x: Tensor, op: CrossEntropy) -> tuple[Tensor, Tensor]:
    """(each row's loss, its (row_max, row_sum)), float32; one read."""
    losses, moments = _losses_and_moments(x)
    write_losses(x, op, losses, moments)
    return losses, moments


def write_losses(x: Tensor, op: CrossEntropy, losses: Vector, moments: Vector) -> None:
    """`losses_of_chunk` into memory."""
    vectors, numbers = (*op.vectors(losses), losses, moments), (op.ignore_index, *op.numbers)
    kind = op.kind
    launch_rows(FORWARD[kind.arithmetic], (x,), vectors, numbers, kind.flags, invariant=is_batch_invariant())


def _planned_as_wide(op: RowOp) -> RowOp:
    """`op` for float32 rows whose gradient has 16 bits: a plan counts what a row takes on chip, which is the former."""

    def planner(problem: Problem, device: Device) -> Plan:
        vec = min(problem.vec, VECTOR_BYTES // ITEMSIZE["float32"])
        return op.planner(replace(problem, dtype="float32", out_dtype="float32", vec=vec), device)

    return RowOp(planner, op.kernel)


WIDE_WITH_GRADIENT = {arithmetic: _planned_as_wide(op) for arithmetic, op in WITH_GRADIENT.items()}


def losses_and_gradient_of_chunk(
    x: Tensor, dx: Tensor, op: CrossEntropy, divides: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(each row's loss, None), and into dx, which may be x, the gradient of their sum over `divides`, [1] float32.

    Where a row does not fit on chip: (each row's loss, its moments), and the gradient is `cross_entropy_gradient`'s.
    """
    kind, invariant = op.kind, is_batch_invariant()
    row_op = (WITH_GRADIENT if dx.dtype is x.dtype else WIDE_WITH_GRADIENT)[kind.arithmetic]
    # weights and smoothing together read a weight for each logit, twice: then the gradient has a kernel of its own
    if op.weight_facts is None and fits_on_chip(row_op.plan((x, dx), device_of(x), invariant)):
        losses, moments = _losses_and_moments(x)
        vectors = (*op.vectors(losses), losses if divides is None else divides, losses, moments)
        flags = kernels.with_gradient_flags(kind, divides is not None, dx.data_ptr() == x.data_ptr())
        launch_rows(row_op, (x, dx), vectors, kernels.with_gradient_numbers(op), flags, invariant=invariant)
        return losses, None
    return losses_of_chunk(x, op)


def _losses_and_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    n_rows = x.shape[0]
    return empty((n_rows,), (1,), torch.float32, x), empty((n_rows, 2), (2, 1), torch.float32, x)
