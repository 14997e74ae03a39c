"""masked_softmax over whole tensors, forward and backward: folds scores and mask, and launches.

No autograd and no checks: `masked` and its operator call these with what the kernels take.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from . import loss_formulas, row_losses, rows
from .availability import KernelUnavailable
from .launch import _device_of, problem_of
from .loss_launch import Flags, launch_rows
from .loss_plans import plan_masked
from .operators import refusal
from .problem import Device, Plan, Problem

# the kernels count rows in 32 bits
MAX_ROWS = 2**31
# of scores that follow each other in memory before the same of the next batch; H200: 64 KB are 2% slower
GROUP_BYTES = 2 << 20


def takes(x: Tensor) -> bool:
    """Whether the kernels take scores x, (..., n_cols)."""
    return x.dim() > 0 and x.numel() > 0 and refusal(x, x.dtype) is None and x.numel() // x.shape[-1] < MAX_ROWS


def scales_by(scale: float) -> bool:
    """Whether the kernels take this scale: above 0, as the largest x is taken for the largest score, and normal in
    float32, which has no digits for others."""
    limits = torch.finfo(torch.float32)
    return limits.tiny <= scale <= limits.max


def _planned(problem: Problem, device: Device, masked: bool, backward: bool) -> Plan:
    return plan_masked(replace(problem, backward=backward), device, masked)


# what a launch is planned by; a mask takes as many registers as a second row
_plan_unmasked = functools.lru_cache(functools.partial(_planned, masked=False, backward=False))
_plan_masked = functools.lru_cache(functools.partial(_planned, masked=True, backward=False))
_plan_backward = functools.lru_cache(functools.partial(_planned, masked=False, backward=True))
_plan_masked_backward = functools.lru_cache(functools.partial(_planned, masked=True, backward=True))


def _rows(t: Tensor) -> Tensor:
    return row_losses.rows_of(t, t.shape[-1])


def masked_forward(x: Tensor, mask: Tensor | None, scale: float, causal: bool, zero: bool) -> Tensor:
    """softmax(scale*x) of what the mask (bool or floating, of any strides) and causality leave; contiguous."""
    try:
        return _forward_by_kernel(x, mask, scale, causal, zero)
    except KernelUnavailable:
        return loss_formulas.masked_softmax(x, mask, scale, causal, zero).contiguous()


def _forward_by_kernel(x: Tensor, mask: Tensor | None, scale: float, causal: bool, zero: bool) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x_rows, y_rows = _rows(x), _rows(y)
    n_queries = x.shape[-2] if x.dim() > 1 else 1
    order = _order(x_rows, n_queries, shared=mask is not None)
    planner = _plan_unmasked if mask is None else _plan_masked
    invariant = rows.is_batch_invariant()
    chosen = planner(problem_of(x_rows, y_rows, batch_invariant=invariant), _device_of(x))
    read, of_mask, numbers = _described(mask, x, chosen, y_rows)
    flags: Flags = (*of_mask, ("CAUSAL", causal), ("ZERO", zero), ("STREAM", chosen.regime == "stream"))
    vectors, given = (read,), (*order, *numbers, scale)
    launch_rows(
        "masked_softmax_forward", (x_rows, y_rows), vectors, given, flags, planner, invariant=invariant, aligned=True
    )
    return y


def _described(mask: Tensor | None, x: Tensor, plan: Plan, unused: Tensor) -> tuple[Tensor, Flags, tuple[int, ...]]:
    """(what a kernel of this plan reads, its flags, sizes and strides) of the mask of scores x; `unused` for none."""
    if mask is None:
        return unused, (("MASK", 0), ("MASK_COLS", 0), ("MASK_VEC", 1)), (1, 1, 0, 0, 0, 0, 0)
    kind = 1 if mask.dtype is torch.bool else 2
    read = _readable(mask.detach().view(torch.uint8) if kind == 1 else mask.detach(), plan)
    expanded = read.expand(x.shape if x.dim() > 1 else (1, *x.shape))
    batch = rows._merge([(n, s) for n, s in zip(expanded.shape[:-2], expanded.stride()[:-2], strict=True) if n != 1])
    if len(batch) > 3:  # no three strides describe it
        read = expanded = expanded.contiguous()
        batch = rows._merge(list(zip(expanded.shape[:-2], expanded.stride()[:-2], strict=True)))
    outer, middle, inner = ([(1, 0)] * 3 + batch)[-3:]
    m_query, m_col = expanded.stride()[-2:]
    m_col = 0 if expanded.shape[-1] == 1 else m_col
    cols = m_col if m_col in (0, 1) else 2
    strides = (outer[1], middle[1], inner[1], m_query)
    vec = _mask_vector(expanded, strides) if cols == 1 else 1
    flags: Flags = (("MASK", kind), ("MASK_COLS", cols), ("MASK_VEC", vec))
    return read, flags, (middle[0], inner[0], *(s // vec for s in strides), m_col)


def _readable(mask: Tensor, plan: Plan) -> Tensor:
    """The mask as a kernel of this plan may read it: on a cluster its columns are neighbours, or one value.

    Other strides are copied first. Their tile has a layout that spreads a line over warps (Triton 3.6), and the merge
    over a cluster needs a line to be a warp.
    """
    if plan.ctas == 1 or mask.dim() == 0 or mask.shape[-1] == 1 or mask.stride(-1) in (0, 1):
        return mask
    return mask.contiguous()


@functools.lru_cache(maxsize=4096)
def _divisor(n: int, most: int) -> int:
    """The largest divisor of n up to `most`, and at least 1: remembered, as every call with a mask asks for it."""
    return next(d for d in range(max(1, min(most, n)), 0, -1) if n % d == 0)


def _order(x: Tensor, n_queries: int, shared: bool) -> tuple[int, ...]:
    """(n_queries, n_group, magic, power, n_batch, magic, power) of the kernels' `row_at` and `divide`.

    x: rows (n_rows, n_cols); shared: whether rows of the batch share a mask, so that they should come soon enough after
    each other to find it in L2.
    """
    n_group = n_queries
    if shared:
        n_group = _divisor(n_queries, GROUP_BYTES // (x.shape[1] * x.element_size()))
    numbers = [n_queries]
    for n in (n_group, x.shape[0] // n_queries):
        power = 31 + (n - 1).bit_length()
        numbers += [n, -(-(1 << power) // n), power]
    return tuple(numbers)


def _mask_vector(mask: Tensor, strides: Sequence[int]) -> int:
    """Elements that the mask's address and all its strides are multiples of: at most 16 bytes, a power of two."""
    vec = 16 // mask.element_size()
    while vec > 1 and (mask.data_ptr() % (vec * mask.element_size()) or any(s % vec for s in strides)):
        vec //= 2
    return vec


def masked_backward(y: Tensor, dy: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """scale*y*(dy - sum(dy*y)), contiguous, in y's dtype; 0 where the boolean mask or causality hides.

    Causal columns that a row does not see are not read, and the mask only for rows whose sum is not finite: in the
    others y is 0 where it hides.
    """
    try:
        return _backward_by_kernel(y, dy, mask, scale, causal)
    except KernelUnavailable:
        return loss_formulas.masked_softmax_gradient(y, dy, mask, scale, causal).contiguous()


def _backward_by_kernel(y: Tensor, dy: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    y_rows, dy_rows = _rows(y), _rows(dy.to(y.dtype))
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    dx_rows = _rows(dx)
    invariant = rows.is_batch_invariant()
    problem = problem_of(y_rows, dy_rows, dx_rows, batch_invariant=invariant)
    planner = _plan_backward if mask is None else _plan_masked_backward
    chosen = planner(problem, _device_of(y))
    if chosen.regime == "stream":
        gradient = rows.softmax_backward(dy.to(y.dtype), y, -1, y.dtype, False, invariant)
        gradient = loss_formulas.hide_gradient(gradient, mask, causal)
        return gradient if scale == 1.0 else gradient.mul_(scale)
    n_queries = y.shape[-2] if y.dim() > 1 else 1
    read, of_mask, numbers = _described(mask, y, chosen, y_rows)
    tensors, flags = (y_rows, dy_rows, dx_rows), (*of_mask, ("CAUSAL", causal))
    given = (*_order(y_rows, n_queries, shared=False), *numbers, scale)
    launch_rows("masked_softmax_backward", tensors, (read,), given, flags, planner, invariant=invariant, aligned=True)
    return dx
