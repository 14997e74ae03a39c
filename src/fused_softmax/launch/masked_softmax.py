"""masked_softmax over whole tensors, forward and backward: folds scores and mask, and launches.

No autograd and no checks: torch_ops calls these with tensors that the kernels take.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..planning.masked_softmax import plan_masked
from ..planning.types import Plan
from .cache import Cache
from .compile import kernel_loader
from .context import is_batch_invariant
from .launcher import RowOp, always, device_of, launch_rows, planned, prepare_rows
from .layout import empty, rows_of, rows_or_copy, starts
from .masks import ORDER, describe_mask, kind_of, queries_of, row_order, row_schedule
from .options import Flags
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
def _backward() -> Any:
    from ..kernels.masked_softmax_backward import masked_softmax_backward

    return masked_softmax_backward


# the allocation behind torch.empty; None in a build without CUDA, where no tensor is_cuda
_empty = empty_strided_cuda


def _forward(plan: Plan) -> Any:
    return (_two_pass if plan.regime == "two_pass" else _resident)()


def _op(kernel: Callable[[Plan], Any], mask: int, backward: bool) -> RowOp:
    planner = functools.lru_cache(functools.partial(plan_masked, mask=mask))
    return RowOp(planner, kernel, backward=backward, aligned=True)


# by the kind of mask that they read (`kind_of`), as masks take registers
FORWARD = {kind: _op(_forward, kind, False) for kind in (0, 1, 2)}
BACKWARD = {kind: _op(always(_backward), kind, True) for kind in (0, 1)}


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
    op, invariant = FORWARD[kind_of(mask)], is_batch_invariant()
    plan = op.plan((x_rows, y_rows), device_of(x), invariant)
    read, of_mask, numbers = describe_mask(mask, x, plan, y_rows, forward=True)
    (read,) = starts((read,), numbers[-1])
    flags: Flags = (*of_mask, ("CAUSAL", causal), ("ZERO", zero))
    launch_rows(op, (x_rows, y_rows), (read,), (*numbers, scale), flags, invariant=invariant)
    return y


def planned_forward(x: Tensor, mask: Tensor | None) -> Plan | str:
    """The plan of scores x under such a mask, or why its kernel did not compile in this process."""
    x_rows = rows_or_copy(x)
    y_rows = torch.empty(x_rows.shape, dtype=x.dtype, device="meta")
    op = FORWARD[kind_of(mask)]
    plan = op.plan((x_rows, y_rows), device_of(x), is_batch_invariant())
    read, of_mask, _ = describe_mask(mask, x, plan, y_rows, forward=True)
    flags = (*of_mask, ("CAUSAL", False), ("ZERO", False))
    return planned(op, (x_rows, y_rows), (read.dtype,), flags, x)


def planned_backward(x: Tensor, mask: Tensor | None) -> Plan | str:
    """The plan of the gradient of scores x under such a mask, as `planned_forward`.

    A two_pass plan stands for rows that softmax's own gradient takes.
    """
    rows = (torch.empty((x.numel() // x.shape[-1], x.shape[-1]), dtype=x.dtype, device="meta"),) * 3
    boolean = mask is not None and mask.dtype is torch.bool
    op = BACKWARD[boolean]
    plan = op.plan(rows, device_of(x), is_batch_invariant())
    if plan.regime == "two_pass":
        return plan
    read, of_mask, _ = describe_mask(mask if boolean else None, x, plan, rows[0])
    return planned(op, rows, (read.dtype,), (*of_mask, ("CAUSAL", False)), x)


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
    op, invariant = BACKWARD[kind_of(mask)], is_batch_invariant()
    plan = op.plan(rows, device_of(y), invariant)
    if plan.regime == "two_pass":
        return None
    read, of_mask, numbers = describe_mask(mask, y, plan, rows[0])
    order = row_order(queries_of(y))
    launch_rows(op, rows, (read,), (*order, *numbers, scale), (*of_mask, ("CAUSAL", causal)), invariant=invariant)
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
        of_mask = (mask.shape, mask.stride(), mask.dtype, mask.data_ptr() & 31, mask.get_device())
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


def _prepare_forward(tensors: tuple[Tensor, ...], mask: Tensor | None, causal: bool, zero: bool) -> Any:
    flags: Flags = (("CAUSAL", causal), ("ZERO", zero))
    return _prepare(FORWARD[kind_of(mask)], tensors, mask, flags)


def _prepare_backward(tensors: tuple[Tensor, ...], mask: Tensor | None, causal: bool, zero: bool) -> Any:
    return _prepare(BACKWARD[kind_of(mask)], tensors, mask, (("CAUSAL", causal),))


def _prepare(op: RowOp, tensors: tuple[Tensor, ...], mask: Tensor | None, flags: Flags) -> Any:
    """The call; False where one of the tensors is copied first, or a row of a gradient does not fit on chip."""
    x = tensors[0]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = tuple(_rows(t) for t in (*tensors, out))
    copied = any(t.data_ptr() != r.data_ptr() for t, r in zip(tensors, rows, strict=False))
    invariant = is_batch_invariant()
    plan = op.plan(rows, device_of(x), invariant)
    if copied or out.data_ptr() % 32 or (op.backward and plan.regime == "two_pass"):
        return False
    read, of_mask, numbers = describe_mask(mask, x, plan, rows[-1], forward=not op.backward)
    if mask is not None and read.data_ptr() != mask.data_ptr():
        return False
    to_mask = 0 if op.backward else numbers[-1] * read.element_size()
    if to_mask:
        (read,) = starts((read,), numbers[-1])
    launch = prepare_rows(op, rows, (read,), (*of_mask, *flags), invariant).at
    shape, dtype, n_cols = tuple(x.shape), x.dtype, x.shape[-1]
    strides = out.stride()
    known_rows, of_two, backward = rows[0].shape[0], x.dim() == 2, op.backward
    order, of_rows = (row_order(queries_of(x)), numbers) if backward else (numbers[:ORDER], numbers[ORDER:])

    def call(tensors: tuple[Tensor, ...], mask: Tensor | None, scale: float) -> Tensor:
        if of_two:
            n_rows = tensors[0].shape[0]
            y = _empty((n_rows, n_cols), strides, dtype)
            scheduled = order
            if n_rows != known_rows:
                scheduled = row_order(n_rows) if backward else row_schedule(n_rows)
        else:
            n_rows, scheduled = known_rows, order
            y = _empty(shape, strides, dtype)
        address = y.data_ptr()
        vectors = (address if mask is None else mask.data_ptr() - to_mask,)
        launch(n_rows, (*[t.data_ptr() for t in tensors], address), vectors, (*scheduled, *of_rows, scale))
        return y

    return call
