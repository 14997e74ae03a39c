"""masked_softmax over whole tensors, forward and backward: folds scores and mask, and launches.

No autograd and no checks: torch_ops calls these with tensors that the kernels take.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..planning.masked_softmax import plan_masked
from ..planning.types import Device, Plan, power_of_two
from .cache import Cache
from .context import is_batch_invariant
from .kernel_loading import kernel_loader
from .launcher import RowOp, device_of, launch_rows, planned, prepare_rows
from .layout import empty, rows_of, rows_or_copy, starts
from .masks import (
    ORDER,
    describe_mask,
    describe_mask_of_pieces,
    kind_of,
    mask_alignment,
    queries_of,
    row_order,
    row_schedule,
)
from .options import Flags
from .prepared_calls import contiguous_strides
from .torch_private import current_device, empty_strided_cuda


@kernel_loader
def _resident() -> Any:
    from ..kernels.masked_softmax_resident import masked_softmax_resident

    return masked_softmax_resident


@kernel_loader
def _two_pass() -> Any:
    from ..kernels.masked_softmax_two_pass import masked_softmax_two_pass

    return masked_softmax_two_pass


@kernel_loader
def _gathered() -> Any:
    from ..kernels.masked_softmax_gathered import masked_softmax_gathered

    return masked_softmax_gathered


@kernel_loader
def _backward_gathered() -> Any:
    from ..kernels.masked_softmax_gathered import masked_softmax_backward_gathered

    return masked_softmax_backward_gathered


@kernel_loader
def _backward_resident() -> Any:
    from ..kernels.masked_softmax_backward import masked_softmax_backward

    return masked_softmax_backward


# the allocation behind torch.empty; None in a build without CUDA, where no tensor is_cuda
_empty = empty_strided_cuda


def _forward(plan: Plan) -> Any:
    if plan.gathered:
        return _gathered()
    return (_two_pass if plan.regime == "two_pass" else _resident)()


def _backward(plan: Plan) -> Any:
    return _backward_gathered() if plan.gathered else _backward_resident()


def _op(
    kernel: Callable[[Plan], Any], mask: int, backward: bool, causal: bool = False, seen: int | None = None
) -> RowOp:
    planner = functools.lru_cache(functools.partial(plan_masked, mask=mask, causal=causal, seen=seen))
    return RowOp(planner, kernel, backward=backward, alignment=mask_alignment)


# by the kind of mask that they read (`kind_of`), as masks take registers
FORWARD = {kind: _op(_forward, kind, False) for kind in (0, 1, 2)}
CAUSAL = _op(_forward, 0, False, causal=True)  # without a mask
BACKWARD = {kind: _op(_backward, kind, True) for kind in (0, 1)}
CAUSAL_BACKWARD = {kind: _op(_backward, kind, True, causal=True) for kind in (0, 1)}


@functools.lru_cache
def _causal_of(seen: int) -> RowOp:
    """CAUSAL, of rows that see no column from `seen` on: a power of two, so that there are few ops."""
    return _op(_forward, 0, False, causal=True, seen=seen)


def causal_op(x: Tensor) -> RowOp:
    """The op of causal scores x. Scores of two dimensions share a prepared call for all numbers of queries."""
    queries = queries_of(x)
    return _causal_of(power_of_two(queries)) if x.dim() > 2 and queries < x.shape[-1] else CAUSAL


class Masked(NamedTuple):
    """What a launch under a mask takes besides the rows."""

    op: RowOp
    read: Tensor  # the mask, as the kernel reads it
    flags: Flags
    order: tuple[int, ...]  # of the rows
    numbers: tuple[int, ...]  # of the mask; scale follows them
    phase: int = 0  # elements from the aligned address, which the kernel takes, to the mask


def forward_of(
    x: Tensor, rows: tuple[Tensor, ...], mask: Tensor | None, causal: bool, zero: bool, device: Device,
    invariant: bool,
) -> Masked:  # fmt: skip
    """The forward of scores x, folded to `rows` (x, y), under a mask."""
    op = causal_op(x) if causal and mask is None else FORWARD[kind_of(mask)]
    plan = op.plan(rows, device, invariant)
    if plan.gathered:
        read, flags, order, numbers, pieces = describe_mask_of_pieces(mask, x, plan, rows[-1], causal)
        return Masked(op, read, (*flags, ("CAUSAL", causal), ("ZERO", zero)), order, (*numbers, *pieces))
    read, flags, numbers = describe_mask(mask, x, plan, rows[-1], forward=True)
    flags = (*flags, ("CAUSAL", causal), ("ZERO", zero))
    return Masked(op, read, flags, numbers[:ORDER], numbers[ORDER:], numbers[-1])


def backward_of(
    y: Tensor, rows: tuple[Tensor, ...], mask: Tensor | None, causal: bool, device: Device, invariant: bool
) -> Masked | None:
    """The gradient of y, folded to `rows` (y, dy, dx), under a mask; None where a row does not fit on chip."""
    op = (CAUSAL_BACKWARD if causal else BACKWARD)[kind_of(mask)]
    plan = op.plan(rows, device, invariant)
    if plan.regime == "two_pass":
        return None
    if plan.gathered:
        read, flags, order, numbers, _ = describe_mask_of_pieces(mask, y, plan, rows[0], causal)
        return Masked(op, read, (*flags, ("CAUSAL", causal)), order, numbers)
    read, flags, numbers = describe_mask(mask, y, plan, rows[0])
    return Masked(op, read, (*flags, ("CAUSAL", causal)), row_order(queries_of(y)), numbers)


def _rows(t: Tensor) -> Tensor:
    return rows_of(t, t.shape[-1])


def masked_forward(x: Tensor, mask: Tensor | None, scale: float, causal: bool, zero: bool) -> Tensor:
    """softmax(scale*x) over the columns that the mask (bool or floating, any strides) and causality keep; contiguous.

    KernelUnavailable, with nothing written, where the kernel does not compile.
    """
    call = _call(_prepare_forward, (x,), mask, x, causal, zero) if x.is_cuda and _empty is not None else None
    if call is not None:
        return call((x,), mask, scale)
    x_rows = _rows(x)
    n_rows, n_cols = x_rows.shape
    y_rows = empty((n_rows, n_cols), (n_cols, 1), x.dtype, x)
    y = y_rows if x.dim() == 2 else y_rows.view(x.shape)
    rows, invariant = (x_rows, y_rows), is_batch_invariant()
    op, read, flags, order, numbers, phase = forward_of(x, rows, mask, causal, zero, device_of(x), invariant)
    (read,) = starts((read,), phase)
    launch_rows(op, rows, (read,), (*order, *numbers, scale), flags, invariant=invariant)
    return y


def planned_forward(x: Tensor, mask: Tensor | None, causal: bool) -> Plan | str:
    """The plan of scores x under such a mask, causal or not, or why its kernel did not compile in this process."""
    x_rows = rows_or_copy(x)
    y_rows = torch.empty(x_rows.shape, dtype=x.dtype, device="meta")
    rows = (x_rows, y_rows)
    op, read, flags, *_ = forward_of(x, rows, mask, causal, False, device_of(x), is_batch_invariant())
    return planned(op, rows, (read.dtype,), flags, x)


def planned_backward(x: Tensor, mask: Tensor | None, causal: bool) -> Plan | str | None:
    """The plan of the gradient of scores x under such a mask, as `planned_forward`; None where none takes a row."""
    rows = (torch.empty((x.numel() // x.shape[-1], x.shape[-1]), dtype=x.dtype, device="meta"),) * 3
    boolean = mask is not None and mask.dtype is torch.bool
    found = backward_of(x, rows, mask if boolean else None, causal, device_of(x), is_batch_invariant())
    return None if found is None else planned(found.op, rows, (found.read.dtype,), found.flags, x)


def masked_backward(y: Tensor, dy: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor | None:
    """scale*y*(dy - sum(dy*y)), contiguous, in y's dtype; 0 where the boolean mask or causality hides.

    Causal columns that a row does not see are not read, and the mask only for rows whose sum is not finite: in the
    others y is 0 where it hides. None where a row does not fit on chip, which this kernel does not take;
    KernelUnavailable, with nothing written, where it does not compile.
    """
    tensors = (y, dy)
    call = _call(_prepare_backward, tensors, mask, y, causal, False) if _direct(y, dy) else None
    if call is not None:
        return call(tensors, mask, scale)
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    rows = (_rows(y), _rows(dy.to(y.dtype)), _rows(dx))
    invariant = is_batch_invariant()
    found = backward_of(y, rows, mask, causal, device_of(y), invariant)
    if found is None:
        return None
    numbers = (*found.order, *found.numbers, scale)
    launch_rows(found.op, rows, (found.read,), numbers, found.flags, invariant=invariant)
    return dx


def _direct(y: Tensor, dy: Tensor) -> bool:
    return y.is_cuda and _empty is not None and dy.dtype is y.dtype and dy.shape == y.shape


# --- prepared calls ---------------------------------------------------------------------------------------------------


_calls = Cache()
# call(tensors, mask, scale) -> a new contiguous tensor
Call = Callable[[tuple[Tensor, ...], "Tensor | None", float], Tensor]


def _call(
    prepare: Callable[..., Any], tensors: tuple[Tensor, ...], mask: Tensor | None, x: Tensor, causal: bool, zero: bool
) -> Call | None:
    """The call that `prepare` makes for such tensors and mask; None where something is copied first.

    Scores of two dimensions have one call for all numbers of rows, those of more have one for each shape.
    """
    sizes: Any = x.shape
    of_mask = None
    if mask is not None:
        start = mask.data_ptr() & 31
        if start and mask.untyped_storage().data_ptr() & 31:  # then no kernel may read from the aligned address on
            start = -start
        of_mask = (mask.shape, mask.stride(), mask.dtype, start, mask.get_device())
    if len(sizes) == 2:
        if mask is not None and mask.dim() == 2:
            of_mask = (mask.shape[0] == 1, mask.shape[1], *of_mask[1:])  # type: ignore[index]
        sizes = (sizes[0] == 1, sizes[1])
    layouts = tuple([(t.stride(), t.data_ptr() & 31) for t in tensors])
    key = (prepare, sizes, layouts, of_mask, x.dtype, x.get_device(), causal, zero, is_batch_invariant())
    found = _calls.get(key)
    if found is None:
        found = _calls.store(key, prepare(tensors, mask, causal, zero))
    return None if found is False or current_device() != x.get_device() else found


def _rows_of_call(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """A call's tensors and its output, folded to rows; None where one of them is copied first."""
    out = torch.empty(tensors[0].shape, dtype=tensors[0].dtype, device=tensors[0].device)
    rows = tuple(_rows(t) for t in (*tensors, out))
    copied = any(t.data_ptr() != r.data_ptr() for t, r in zip(tensors, rows, strict=False))
    return None if copied or out.data_ptr() % 32 else rows


def _prepare_forward(tensors: tuple[Tensor, ...], mask: Tensor | None, causal: bool, zero: bool) -> Any:
    rows, (x,) = _rows_of_call(tensors), tensors
    if rows is None:
        return False
    return _prepare(x, rows, mask, forward_of(x, rows, mask, causal, zero, device_of(x), is_batch_invariant()))


def _prepare_backward(tensors: tuple[Tensor, ...], mask: Tensor | None, causal: bool, zero: bool) -> Any:
    rows, y = _rows_of_call(tensors), tensors[0]
    if rows is None:
        return False
    found = backward_of(y, rows, mask, causal, device_of(y), is_batch_invariant())
    return False if found is None else _prepare(y, rows, mask, found)


def _prepare(x: Tensor, rows: tuple[Tensor, ...], mask: Tensor | None, found: Masked) -> Any:
    """The call; False where the mask is copied first."""
    op, read, flags, order, of_mask, phase = found
    if mask is not None and read.data_ptr() != mask.data_ptr():
        return False
    to_mask = phase * read.element_size()
    if to_mask:
        (read,) = starts((read,), phase)
    launch = prepare_rows(op, rows, (read,), flags, is_batch_invariant()).at
    shape, dtype, n_cols = tuple(x.shape), x.dtype, x.shape[-1]
    strides = contiguous_strides(shape)
    known_rows, of_two = rows[0].shape[0], x.dim() == 2
    order_of = row_schedule if len(order) == ORDER else row_order

    def call(tensors: tuple[Tensor, ...], mask: Tensor | None, scale: float) -> Tensor:
        if of_two:
            n_rows = tensors[0].shape[0]
            y = _empty((n_rows, n_cols), strides, dtype)
            scheduled = order
            if n_rows != known_rows:
                scheduled = order_of(n_rows)
        else:
            n_rows, scheduled = known_rows, order
            y = _empty(shape, strides, dtype)
        address = y.data_ptr()
        vectors = (address if mask is None else mask.data_ptr() - to_mask,)
        launch(n_rows, (*[t.data_ptr() for t in tensors], address), vectors, (*scheduled, *of_mask, scale))
        return y

    return call
