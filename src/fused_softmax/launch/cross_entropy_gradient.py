"""The gradient of cross_entropy of rows from what its forward kept: allocates nothing, and launches.

KernelUnavailable, with nothing written, where a kernel does not compile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..planning.losses import plan_elementwise, plan_few_programs, plan_statistics_gradient
from ..planning.types import Device, Plan
from .availability import KernelUnavailable
from .cache import Cache
from .device import describe
from .kernel_loading import kernel_loader
from .last_upstream import LastUpstream
from .launcher import FEW_WARPS, RowOp, Vector, always, launch_rows, on_its_device, prepare_rows
from .layout import DTYPE_NAMES, as_rows, expect_rows, layout_key, places, pointer, restored
from .options import LOSS_KINDS, CrossEntropy, Flags, LossKind
from .recent_calls import RecentCalls
from .torch_private import current_device


@kernel_loader
def _backward() -> Any:
    from ..kernels.cross_entropy_backward import cross_entropy_backward

    return cross_entropy_backward


@kernel_loader
def _backward_gathered() -> Any:
    from ..kernels.cross_entropy_gathered import cross_entropy_backward_gathered

    return cross_entropy_backward_gathered


@kernel_loader
def _scale_unless_one() -> Any:
    from ..kernels.cross_entropy_backward import scale_unless_one

    return scale_unless_one


def _by_plan(plan: Plan) -> Any:
    return _backward_gathered() if plan.gathered else _backward()


BACKWARD = RowOp(plan_statistics_gradient, _by_plan)
OF_SHARDS = RowOp(plan_elementwise, always(_backward))
BACKWARD_UNLESS_WRITTEN = RowOp(plan_few_programs, always(_backward), most_warps=FEW_WARPS)
SCALE_UNLESS_ONE = RowOp(plan_few_programs, always(_scale_unless_one), most_warps=FEW_WARPS)


def parts_of(kept: Tensor, n_rows: int) -> list[Any]:
    """What a gradient's launch takes, of what the forward kept: each row's (row_max, row_sum), the mean's denominator,
    and the upstream gradient that the forward's gradient is for.

    From these two numbers backward has p = exp(z - row_max)/row_sum with all its digits. One number, the logsumexp, is
    rounded where it is large.
    """
    return places(kept, 0, 2 * n_rows, 2 * n_rows + 1)


def gradient_flags(
    kind: LossKind, mean: bool, inplace: bool, sharded: bool = False, unless_written: bool = False,
    reports: bool = False,
) -> Flags:  # fmt: skip
    """The flags of the kernel that writes the gradient from known moments; sharded: of a part of the columns."""
    of_call = (("UNLESS_WRITTEN", unless_written), ("REPORTS", reports), ("MEAN", mean), ("INPLACE", inplace))
    return (*of_call, ("SHARDED", sharded), *kind.flags)


_gradients = Cache()


def cross_entropy_gradient(
    x: Tensor, dx: Tensor, op: CrossEntropy, moments: Vector, count: Vector | None, g: Tensor,
    written: Vector | None = None, last: LastUpstream | None = None, invariant: bool = False,
) -> Any:  # fmt: skip
    """The gradient for upstream g ([1], or [n_rows]; float32) into dx, which may be x; the launch.

    count: what the gradient is divided by, [1] float32, such as a mean's denominator; None: nothing. written: an
    upstream gradient, [1] float32, that dx already holds the gradient for; then g has one element, and nothing is done
    where both are equal. last: where another g is reported. invariant: the plan does not depend on how rows lie.
    """
    kind, inplace = op.kind, dx.data_ptr() == x.data_ptr()
    vectors: tuple[Vector, ...] = (
        *op.vectors(g), g if count is None else count, moments, g, g if written is None else written,
        g if last is None else last.vector,
    )  # fmt: skip
    unless = written is not None
    how = (inplace, op.weight_facts is None, unless, last is None, invariant)
    key = (layout_key(x), layout_key(dx), kind, count is None, how)
    launch = _gradients.get(key)
    if launch is None:
        expect_rows(x, dx)
        flags = gradient_flags(kind, count is not None, inplace, False, unless, last is not None)
        launch = prepare_rows(BACKWARD_UNLESS_WRITTEN if unless else BACKWARD, (x, dx), vectors, flags, invariant).at
        if x.is_cuda:
            _gradients.store(key, launch)
    at = pointer(x)
    addresses = tuple([v if type(v) is int else at(v) for v in vectors])
    numbers = (op.ignore_index, int(g.numel() > 1), 0, *op.numbers)
    on_its_device(x, launch, x.shape[0], (at(x), at(dx)), addresses, numbers)
    return launch


_recent = RecentCalls()


def gradient_unless_written(
    layout: object, x: Tensor, dx: Tensor, target: Tensor, kept: Tensor, n_rows: int, options: list[Any], g: Tensor,
    last: LastUpstream | None,
) -> bool:  # fmt: skip
    """Whether it launched `cross_entropy_gradient`, for tensors like recent ones; without weights and softcap.

    dx holds the gradient for the upstream gradient that `kept` says, and stays where g is equal. layout: a key of how
    x lies. options: of a CrossEntropy, from ignore_index to z_loss.
    """
    ignore_index, reduction, smoothing, _, z_loss = options
    mean = reduction == "mean"
    for check, phase, dx_phase, index, launch in _recent.get((layout, mean, last is None, smoothing > 0.0), ()):
        if check(x, dx, target, kept, g):
            shape, address, dx_address = x.shape, x.data_ptr(), dx.data_ptr()
            if shape[0] != n_rows or dx.shape != shape or current_device() != index:
                return False
            if address & 31 == phase and dx_address & 31 == dx_phase:
                moments, upstream = kept.data_ptr(), g.data_ptr()
                count = moments + 8 * n_rows
                vectors = (
                    target.data_ptr(), upstream, upstream, count if mean else upstream, moments, upstream, count + 4,
                    upstream if last is None else last.vector,
                )  # fmt: skip
                launch(n_rows, (address, dx_address), vectors, (ignore_index, 0, 0, smoothing, 1.0, z_loss))
                return True
    return False


def cache_gradient(
    launch: Any, layout: object, x: Tensor, dx: Tensor, kept: Tensor, op: CrossEntropy, g: Tensor,
    last: LastUpstream | None,
) -> None:  # fmt: skip
    """Lets `gradient_unless_written` find what `cross_entropy_gradient` launched for these."""
    key = layout, op.reduction == "mean", last is None, op.smoothing > 0.0
    phases = x.data_ptr() & 31, dx.data_ptr() & 31
    _recent.add(key, (x, dx, op.target, kept, g), True, *phases, x.get_device(), launch)


_of_shards = Cache()


def shard_gradient(
    x: Tensor, dx: Tensor, target: Tensor, moments: Tensor, factors: Tensor, weight: Tensor | None, start: int,
    ignore_index: int, smooth: bool, softcap: float | None, invariant: bool,
) -> None:  # fmt: skip
    """A rank's part of the gradient, in columns from `start` on, into dx, which may be x.

    weight: of these columns, where `smooth`. invariant: the plan does not depend on where rows start.
    """
    weight = restored(weight, torch.float32) if smooth and weight is not None else None
    target, moments = restored(target, torch.int64), restored(moments, torch.float32)
    vectors = (target, *(factors if t is None else t for t in (weight, None, None)), moments, factors, factors, factors)
    inplace = dx.data_ptr() == x.data_ptr()
    key = (layout_key(x), layout_key(dx), inplace, weight is None, smooth, softcap is None, invariant)
    run = _of_shards.get(key)
    if run is None:
        expect_rows(x, dx)
        kind = LOSS_KINDS[weight is not None, smooth, softcap is not None]
        flags = gradient_flags(kind, mean=False, inplace=inplace, sharded=True)
        run = prepare_rows(OF_SHARDS, (x, dx), vectors, flags, invariant)
        if x.is_cuda:
            _of_shards.store(key, run)
    run((x, dx), vectors, (ignore_index, 3, start, 0.0, 1.0 if softcap is None else softcap, 0.0))


def restored_loss(op: CrossEntropy, real: torch.dtype = torch.float32) -> CrossEntropy:
    """`op` with its tensors as they were saved, whatever a hook of saved tensors made of them."""
    weight, weight_facts, denominator = (
        None if t is None else restored(t, real) for t in (op.weight, op.weight_facts, op.denominator)
    )
    target = restored(op.target, torch.int64)
    return op._replace(target=target, weight=weight, weight_facts=weight_facts, denominator=denominator)


def scaled_in_place(t: Tensor, g: Tensor) -> Tensor:
    """t*g in t's memory, which the device leaves alone where g, one number in float32 or wider, is 1.

    PyTorch multiplies what the kernels do not take, and what does not fold to rows: a hook of saved tensors may give it
    back so.
    """
    ours = t.dim() > 1 and t.numel() and t.dtype in DTYPE_NAMES and isinstance(describe(t.device), Device)
    rows = as_rows(t, t.dim() - 1) if ours else None
    if rows is not None:
        try:
            launch_rows(SCALE_UNLESS_ONE, (rows,), (g.view(1),), (0,), ())
            return t
        except KernelUnavailable:
            pass
    return t.mul_(g.view([1] * t.dim()))  # a g of no dimensions would be rounded to t's dtype first
