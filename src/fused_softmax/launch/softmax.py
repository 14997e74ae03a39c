"""softmax and log_softmax, forward and backward, over a dim of whole tensors: folds them into rows, and launches.

Where a dim's elements are neighbors and all rows share one stride, the row kernels take them as they lie. Where the
dimensions after it are contiguous, or a crop of such ones, the kernels of `spatial` do. Other views go to the kernels
of `views`, or are copied first, as the planner chooses. Outputs are contiguous, as torch's are. No autograd and no
checks of arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..planning import softmax as planning
from ..planning.spatial import cropped_plan
from ..planning.types import Device, Plan
from . import spatial
from .availability import KernelUnavailable
from .cache import Cache
from .compile import Launch, Shaped, launch_failure, prepare_launch
from .context import is_batch_invariant
from .folding import as_crops, as_planes, crops_as_planes, folded
from .kernel_loading import kernel_loader
from .launcher import RowOp, device_of, launch_rows, planned, prepare_rows, row_launch
from .layout import as_rows
from .options import Flags

if TYPE_CHECKING:
    from .views import InPlace

# elements, from which on the copy of a transposition or a step has a kernel of ours: fewer take as long as a launch
LEAST_COPIED = 1 << 16


@kernel_loader
def _resident() -> Any:
    from ..kernels.softmax_resident import softmax_resident

    return softmax_resident


@kernel_loader
def _two_pass() -> Any:
    from ..kernels.softmax_two_pass import softmax_two_pass

    return softmax_two_pass


@kernel_loader
def _backward_resident() -> Any:
    from ..kernels.softmax_resident import softmax_backward_resident

    return softmax_backward_resident


@kernel_loader
def _backward_two_pass() -> Any:
    from ..kernels.softmax_two_pass import softmax_backward_two_pass

    return softmax_backward_two_pass


@kernel_loader
def _gathered() -> Any:
    from ..kernels.softmax_gathered import softmax_gathered

    return softmax_gathered


@kernel_loader
def _backward_gathered() -> Any:
    from ..kernels.softmax_gathered import softmax_backward_gathered

    return softmax_backward_gathered


def _forward_kernel(plan: Plan) -> Any:
    if plan.gathered:
        return _gathered()
    return _two_pass() if plan.regime == "two_pass" else _resident()


def _backward_kernel(plan: Plan) -> Any:
    if plan.gathered:
        return _backward_gathered()
    return _backward_two_pass() if plan.regime == "two_pass" else _backward_resident()


_OPS = {
    (log, backward): RowOp(planning.plan, _backward_kernel if backward else _forward_kernel, backward, log)
    for log in (False, True)
    for backward in (False, True)
}


def softmax_op(log: bool, backward: bool = False) -> tuple[RowOp, Flags]:
    """(the op, its flags) of softmax or log_softmax, or of its gradient, over rows (x, y) or (y, dy, dx)."""
    return _OPS[log, backward], (("LOG", log),)


def softmax_launch(
    tensors: tuple[Tensor, ...], plan: Plan, *, log: bool = False, backward: bool = False, device: Device | None = None
) -> Launch:
    """The launch over row tensors, (x, y) or for a gradient (y, dy, dx), as the given plan runs it.

    `device` stands in for the tensors' own where a launch is to be cross-compiled.
    """
    op, flags = softmax_op(log, backward)
    return row_launch(op, tensors, (), (), flags, plan, device or device_of(tensors[0]))


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
        op, flags = softmax_op(log)
        launch_rows(op, (x_rows, y_rows), (), (), flags, invariant=is_batch_invariant())
    elif (planes := folded((x, y), dim)) is not None:
        spatial.prepare_softmax(planes, log, False, is_batch_invariant())(planes)
    elif (run := _in_place(x, y, dim, log)) is not None:
        run(x, y)
    elif not x.is_contiguous():
        softmax_forward(_contiguous(x), dim, out_dtype, log, y)
    else:  # the strides of `out` do not fold: into new memory first
        y.copy_(softmax_forward(x, dim, out_dtype, log))
    return y


def prepare_softmax(x: Tensor, y: Tensor, dim: int, log: bool) -> Any:
    """What launches over tensors that lie as x and y do; None where `out` is written by a copy."""
    x_rows, y_rows = as_rows(x, dim), as_rows(y, dim)
    if x_rows is None or y_rows is None:
        planes = folded((x, y), dim)
        if planes is not None:
            run = spatial.prepare_softmax(planes, log, False, is_batch_invariant())
            return _of_one_shape(run, x.get_device(), planes[0].shape[0])
        in_place = _in_place(x, y, dim, log)
        return in_place if in_place is not None or x.is_contiguous() else _prepare_after_copy(x, y, dim, log)
    op, flags = softmax_op(log)
    return prepare_rows(op, (x_rows, y_rows), (), flags, is_batch_invariant())


def _of_one_shape(run: spatial.Run, index: int, outer: int) -> Callable[..., None]:
    """run(x, y) over tensors (x, y) of one `outer`; where it is one launch, its `one` has the parts of it.

    It has `apart` where y must not be x.
    """

    def shaped(x: Tensor, y: Tensor) -> None:
        run((x, y), (), outer)

    if hasattr(run, "apart"):
        shaped.apart = True  # type: ignore[attr-defined]
    steps = getattr(run, "steps", ())
    for step, (call, prefix, trailing) in steps:
        if step.tensors == (0, 1):
            one = (index, call, step.grid(outer), prefix, (*step.numbers(outer), *trailing))
            shaped.one = one  # type: ignore[attr-defined]
    return shaped


def prepare_backward(y: Tensor, dy: Tensor, dx: Tensor, log: bool, invariant: bool) -> Any:
    """What launches the gradient over the last dimension; None where the tensors do not fold into rows."""
    folded = tuple(rows for t in (y, dy, dx) if (rows := as_rows(t, t.dim() - 1)) is not None)
    op, flags = softmax_op(log, backward=True)
    return prepare_rows(op, folded, (), flags, invariant) if len(folded) == 3 else None


def softmax_backward(
    dy: Tensor, y: Tensor, dim: int, in_dtype: torch.dtype, log: bool, invariant: bool | None = None
) -> Tensor:
    """The gradient of softmax or log_softmax over dim from its output y, contiguous, in the forward's input dtype.

    `invariant`: whether the forward was batch invariant, where that is not what this thread says. KernelUnavailable
    where a kernel does not compile.
    """
    if invariant is None:
        invariant = is_batch_invariant()
    dx = torch.empty(y.shape, dtype=in_dtype, device=y.device)
    if y.numel() == 0:
        return dx
    if y.dim() == 0:
        return softmax_backward(dy.view(1), y.view(1), 0, in_dtype, log, invariant).view(())
    dim %= y.dim()
    if dim != y.dim() - 1 and math.prod(y.shape[dim + 1 :]) > 1:
        y, dy = (t if as_planes(t, dim) is not None else _contiguous(t) for t in (y, dy))
        planes = folded((y, dy, dx), dim)
        assert planes is not None
        spatial.prepare_softmax(planes, log, True, invariant)(planes)
        return dx
    y_rows, dy_rows, dx_rows = as_rows(y, dim), as_rows(dy, dim), as_rows(dx, dim)
    y_rows = as_rows(_contiguous(y), dim) if y_rows is None else y_rows
    dy_rows = as_rows(_contiguous(dy), dim) if dy_rows is None else dy_rows
    assert y_rows is not None and dy_rows is not None and dx_rows is not None
    op, flags = softmax_op(log, backward=True)
    launch_rows(op, (y_rows, dy_rows, dx_rows), (), (), flags, invariant=invariant)
    return dx


def planned_elsewhere(x: Tensor, y: Tensor, dim: int, log: bool) -> Plan | str:
    """The plan of x over a dim that does not fold into rows; or why its kernel did not compile. y may be on meta."""
    planes = folded((x, y), dim)
    if planes is not None:
        return spatial.planned_softmax(planes, log, False, x)
    found = _as_they_lie(x, y, dim, log)
    if found is None:
        return _planned_after_copy(x, y, dim, log)
    try:
        return launch_failure(found.launch(x, y), x, y) or found.plan
    except KernelUnavailable as error:
        return str(error)


def _planned_after_copy(x: Tensor, y: Tensor, dim: int, log: bool) -> Plan | str:
    copied = torch.empty(x.shape, dtype=x.dtype, device="meta")
    rows = as_rows(copied, dim), as_rows(y, dim)
    if rows[0] is not None and rows[1] is not None:
        op, flags = softmax_op(log)
        plan = planned(op, rows, (), flags, x)  # type: ignore[arg-type]
    else:
        planes = folded((copied, y), dim)
        assert planes is not None
        plan = spatial.planned_softmax(planes, log, False, x)
    return plan if isinstance(plan, str) else plan.after_copy


def planned_backward(y: Tensor, in_dtype: torch.dtype, dim: int, log: bool, on: Tensor) -> Plan | str:
    """The plan of the gradient over dim from a contiguous output y, which may be a meta tensor, for a contiguous dy."""
    dx = torch.empty(y.shape, dtype=in_dtype, device="meta")
    planes = folded((y, y, dx), dim)
    if planes is not None:
        return spatial.planned_softmax(planes, log, True, on)
    y_rows, dx_rows = as_rows(y, dim), as_rows(dx, dim)
    assert y_rows is not None and dx_rows is not None
    op, flags = softmax_op(log, backward=True)
    return planned(op, (y_rows, y_rows, dx_rows), (), flags, on)


def _as_they_lie(x: Tensor, y: Tensor, dim: int, log: bool) -> InPlace | None:
    """How a kernel takes x to y as they lie; None where x is copied first. y may be on meta.

    Within batch_invariant() none does: plans of rows follow from the number of neighbors, and those of crops from their
    width. Those of a copy do not.
    """
    if is_batch_invariant():
        return None
    from .views import in_place

    return cropped(x, y, dim, log, device_of(x)) or in_place(x, y, dim, log)


def cropped(x: Tensor, y: Tensor, dim: int, log: bool, device: Device) -> InPlace | None:
    """How tiles of positions take crops to y, whose positions are neighbors; None for other views.

    None on AMD GPUs, too: Triton does not finish to compile kernels that crop.
    """
    crops, to = as_crops(x, dim), as_planes(y, dim)
    if crops is None or to is None or device.kind == "hip":
        return None
    planes, crop = crops_as_planes(crops)
    plan = cropped_plan(spatial.problem_of_crop(spatial.problem_of(planes, to, log=log), crop), device)
    if plan is None:
        return None
    plan = replace(plan, why=f"{plan.why}; positions are rows of {crop[0]} that lie apart")

    def launch(x: Tensor, y: Tensor) -> Launch:
        crops, to = as_crops(x, dim), as_planes(y, dim)
        assert crops is not None and to is not None
        planes, crop = crops_as_planes(crops)
        step = spatial.softmax_step((planes, to), plan, log, device, crop)
        outer = planes.shape[0]
        return Launch(step.kernel, (step.grid(outer),), (planes, to, *step.numbers(outer)), step.meta)

    from .views import InPlace

    return InPlace(plan, launch)


_in_places = Cache()


def _in_place(x: Tensor, y: Tensor, dim: int, log: bool) -> Shaped | None:
    """What takes tensors that lie as x to y, without a copy; None where x is copied first."""
    starts = x.data_ptr() & 31, y.data_ptr() & 31
    lies = (x.shape, x.stride(), y.stride(), x.dtype, y.dtype, *starts, x.get_device())
    key = (lies, dim, log, is_batch_invariant())
    run: Any = _in_places.get(key) if x.is_cuda else None
    if run is None:
        found = _as_they_lie(x, y, dim, log)
        run = False if found is None else prepare_launch(found.launch, x, y)
        if x.is_cuda:
            _in_places.store(key, run)
    return None if run is False else run


def _prepare_after_copy(x: Tensor, y: Tensor, dim: int, log: bool) -> Shaped | None:
    """What copies a tensor that lies as x does, and launches over the copy; None where y does not fold."""
    copied, invariant = torch.empty(x.shape, dtype=x.dtype, device=x.device), is_batch_invariant()
    planes, (op, flags) = folded((copied, y), dim), softmax_op(log)
    if as_rows(copied, dim) is not None and as_rows(y, dim) is not None:
        run_rows = prepare_rows(op, (as_rows(copied, dim), as_rows(y, dim)), (), flags, invariant)  # type: ignore[arg-type]
        return lambda x, y: run_rows((as_rows(_contiguous(x), dim), as_rows(y, dim)), (), ())
    if planes is None:
        return None
    run = spatial.prepare_softmax(planes, log, False, invariant)
    return lambda x, y: run(folded((_contiguous(x), y), dim))


def _contiguous(t: Tensor) -> Tensor:
    """t.contiguous(), by a kernel of ours where t is large, and a transposition or elements one step apart."""
    if t.is_contiguous() or t.numel() < LEAST_COPIED:
        return t.contiguous()
    from .views import contiguous

    return contiguous(t)
