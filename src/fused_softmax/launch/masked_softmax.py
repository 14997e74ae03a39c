"""masked_softmax over whole tensors, forward and backward: folds scores and mask, and launches.

No autograd and no checks: torch_ops calls these with what the kernels take.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..planning.masked_softmax import plan_masked
from ..planning.types import Plan
from .compile import kernel_loader
from .context import is_batch_invariant
from .launcher import Flags, RowOp, always, device_of, launch_rows, planned
from .layout import empty, merge_dims, rows_of, rows_or_copy


@kernel_loader
def _forward() -> Any:
    from ..kernels.masked_softmax import masked_softmax_forward

    return masked_softmax_forward


@kernel_loader
def _backward() -> Any:
    from ..kernels.masked_softmax_backward import masked_softmax_backward

    return masked_softmax_backward


# the kernels count rows in 32 bits
MAX_ROWS = 2**31
# of scores that follow each other in memory before the same of the next batch; H200: 64 KB are 2% slower
GROUP_BYTES = 2 << 20


def _op(kernel: Any, masked: bool, backward: bool) -> RowOp:
    planner = functools.lru_cache(functools.partial(plan_masked, masked=masked))
    return RowOp(planner, always(kernel), backward=backward, aligned=True)


# by whether there is a mask, which takes as many registers as a second row
FORWARD = {masked: _op(_forward, masked, False) for masked in (False, True)}
BACKWARD = {masked: _op(_backward, masked, True) for masked in (False, True)}


def _rows(t: Tensor) -> Tensor:
    return rows_of(t, t.shape[-1])


def masked_forward(x: Tensor, mask: Tensor | None, scale: float, causal: bool, zero: bool) -> Tensor:
    """softmax(scale*x) of what the mask (bool or floating, of any strides) and causality leave; contiguous.

    KernelUnavailable, with nothing written, where the kernel does not compile.
    """
    x_rows = _rows(x)
    n_rows, n_cols = x_rows.shape
    y_rows = empty((n_rows, n_cols), (n_cols, 1), x.dtype, x)
    y = y_rows if x.dim() == 2 else y_rows.view(x.shape)
    n_queries = x.shape[-2] if x.dim() > 1 else 1
    order = row_schedule(x_rows, n_queries, shared=mask is not None)
    op, invariant = FORWARD[mask is not None], is_batch_invariant()
    read, of_mask, numbers = describe_mask(mask, x, lambda: op.plan((x_rows, y_rows), device_of(x), invariant), y_rows)
    flags: Flags = (*of_mask, ("CAUSAL", causal), ("ZERO", zero))
    launch_rows(op, (x_rows, y_rows), (read,), (*order, *numbers, scale), flags, invariant=invariant)
    return y


def planned_forward(x: Tensor, mask: Tensor | None) -> Plan | str:
    """The plan of scores x under such a mask, or why its kernel did not compile in this process."""
    x_rows = rows_or_copy(x)
    y_rows = torch.empty(x_rows.shape, dtype=x.dtype, device="meta")
    op = FORWARD[mask is not None]
    plan = op.plan((x_rows, y_rows), device_of(x), is_batch_invariant())
    read, of_mask, _ = describe_mask(mask, x, plan, y_rows)
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


def describe_mask(
    mask: Tensor | None, x: Tensor, plan: Plan | Callable[[], Plan], unused: Tensor
) -> tuple[Tensor, Flags, tuple[int, ...]]:
    """(what a kernel of this plan reads, its flags, sizes and strides) of the mask of scores x; `unused` for none."""
    if mask is None:
        return unused, (("MASK", 0), ("MASK_COLS", 0), ("MASK_VEC", 1)), (1, 1, 0, 0, 0, 0, 0)
    kind = 1 if mask.dtype is torch.bool else 2
    read = _readable(mask.detach().view(torch.uint8) if kind == 1 else mask.detach(), plan)
    expanded = read.expand(x.shape if x.dim() > 1 else (1, *x.shape))
    batch = merge_dims([(n, s) for n, s in zip(expanded.shape[:-2], expanded.stride()[:-2], strict=True) if n != 1])
    if len(batch) > 3:  # no three strides describe it
        read = expanded = expanded.contiguous()
        batch = merge_dims(list(zip(expanded.shape[:-2], expanded.stride()[:-2], strict=True)))
    outer, middle, inner = ([(1, 0)] * 3 + batch)[-3:]
    m_query, m_col = expanded.stride()[-2:]
    m_col = 0 if expanded.shape[-1] == 1 else m_col
    cols = m_col if m_col in (0, 1) else 2
    strides = (outer[1], middle[1], inner[1], m_query)
    vec = _mask_vector(read, x) if cols == 1 else 1
    flags: Flags = (("MASK", kind), ("MASK_COLS", cols), ("MASK_VEC", vec))
    return read, flags, (middle[0], inner[0], *(s // vec for s in strides), m_col)


def _readable(mask: Tensor, plan: Plan | Callable[[], Plan]) -> Tensor:
    """The mask as a kernel of this plan may read it: on a cluster its columns are neighbors, or one value.

    Other strides are copied first. Triton 3.6 gives their tile a layout that spreads a segment over warps, but a
    reduction over a cluster needs each segment in one warp.
    """
    if mask.dim() == 0 or mask.shape[-1] == 1 or mask.stride(-1) in (0, 1):
        return mask
    plan = plan if isinstance(plan, Plan) else plan()
    return mask if plan.ctas == 1 else mask.contiguous()


@functools.lru_cache(maxsize=4096)
def _divisor(n: int, most: int) -> int:
    """The largest divisor of n up to `most`, and at least 1: remembered, as every call with a mask asks for it."""
    return next(d for d in range(max(1, min(most, n)), 0, -1) if n % d == 0)


def row_schedule(x: Tensor, n_queries: int, shared: bool) -> tuple[int, ...]:
    """The arguments of `scheduled_row`: (n_queries, n_group, multiplier, power, n_batch, multiplier, power).

    The multipliers and powers are for `fast_divmod`. x: rows (n_rows, n_cols). shared: whether rows of the batch share
    a mask; they then follow each other soon enough to find it in L2.
    """
    n_group = n_queries
    if shared:
        n_group = _divisor(n_queries, GROUP_BYTES // (x.shape[1] * x.element_size()))
    numbers = [n_queries]
    for n in (n_group, x.shape[0] // n_queries):
        power = 31 + (n - 1).bit_length()
        numbers += [n, -(-(1 << power) // n), power]
    return tuple(numbers)


def _mask_vector(mask: Tensor, x: Tensor) -> int:
    """Elements of a vector access to the mask of scores x: at most 16 bytes, a power of two.

    The mask's address, its width and its strides are multiples of it. The width and the strides of single rows count
    too: the vector is then the same for a batch and for one of its rows, and so are a row's bits.
    """
    before = x.dim() - mask.dim()
    own = [s for d, s in enumerate(mask.stride()[:-1]) if mask.shape[d] > 1 or x.shape[before + d] == 1]
    vec = 16 // mask.element_size()
    while vec > 1 and (mask.data_ptr() % (vec * mask.element_size()) or any(n % vec for n in (mask.shape[-1], *own))):
        vec //= 2
    return vec


def masked_backward(y: Tensor, dy: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor | None:
    """scale*y*(dy - sum(dy*y)), contiguous, in y's dtype; 0 where the boolean mask or causality hides.

    Causal columns that a row does not see are not read, and the mask only for rows whose sum is not finite: in the
    others y is 0 where it hides. None where a row does not fit on chip, which this kernel does not take;
    KernelUnavailable, with nothing written, where it does not compile.
    """
    y_rows, dy_rows = _rows(y), _rows(dy.to(y.dtype))
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    tensors = (y_rows, dy_rows, _rows(dx))
    op, invariant = BACKWARD[mask is not None], is_batch_invariant()
    plan = op.plan(tensors, device_of(y), invariant)
    if plan.regime == "two_pass":
        return None
    n_queries = y.shape[-2] if y.dim() > 1 else 1
    read, of_mask, numbers = describe_mask(mask, y, plan, y_rows)
    given = (*row_schedule(y_rows, n_queries, shared=False), *numbers, scale)
    launch_rows(op, tensors, (read,), given, (*of_mask, ("CAUSAL", causal)), invariant=invariant)
    return dx
