"""masked_softmax: attention's softmax, with the mask read where it lies.

    z = scale*x, hidden where the mask or causality says so;  y = exp(z - max(z)) / sum(exp(z - max(z)))

Adding a mask to the scores, or filling them, reads and writes all of them once more, and a causal mask takes memory.
Here a boolean or additive mask is read with its own strides, broadcast ones included, and causality costs no mask at
all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import row_losses, rows
from .launch import _device_of, problem_of
from .loss_launch import Flags, launch_rows
from .loss_plans import plan_masked
from .operators import is_plain, refusal
from .plan import Device, Plan, Problem

FULLY_MASKED = ("nan", "zero")
# the kernels count rows in 32 bits
MAX_ROWS = 2**31
_MASK_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def masked_softmax(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    fully_masked: str = "nan",
) -> Tensor:
    """softmax(scale*x) over the last dimension, of what the mask and causality leave.

    Args:
        x: (..., Q, K), or (K,); float16, bfloat16 and float32 are ours on a GPU, all else is torch's. Any K.
        mask: broadcasts to x's shape and is not expanded in memory. bool: True keeps a column, as in
            `torch.nn.functional.scaled_dot_product_attention`. Floating: added to scale*x; its gradient is the
            columns' own, summed to its shape.
        scale: a number by which x is multiplied first; unless it is positive and finite, the call is torch's.
        causal: query q sees columns 0 to q, also where Q and K differ (aligned at the top left, as torch's is_causal).
        fully_masked: what a row becomes that sees nothing: "nan", as softmax of -inf is, or "zero", with gradients
        zero.

    Returns: a contiguous tensor of x's shape and dtype. Hidden columns are 0.

    Raises: ValueError for another fully_masked, for a mask that does not broadcast, or causal of one dimension;
    TypeError for a mask of integers.

    >>> masked_softmax(torch.zeros(2, 2), causal=True)
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """
    if fully_masked not in FULLY_MASKED:
        raise ValueError(f"fully_masked must be one of {FULLY_MASKED}, not {fully_masked!r}")
    if causal and x.dim() < 2:
        raise ValueError("causal needs queries and columns: x of two dimensions at least")
    if mask is not None:
        if mask.dtype is not torch.bool and not mask.is_floating_point():
            raise TypeError(f"mask must be bool or floating, not {mask.dtype}")
        if mask.dim() > x.dim() or any(m not in (1, n) for m, n in zip(mask.shape[::-1], x.shape[::-1], strict=False)):
            raise ValueError(f"mask {tuple(mask.shape)} does not broadcast to {tuple(x.shape)}")
    zero = fully_masked == "zero"
    ours = x.dim() > 0 and x.numel() > 0 and is_plain(x) and refusal(x, x.dtype) is None
    ours = ours and 0.0 < scale < math.inf and x.numel() // x.shape[-1] < MAX_ROWS
    if mask is not None:
        known = mask.dtype is torch.bool or mask.dtype in _MASK_DTYPES
        ours = ours and is_plain(mask) and mask.device == x.device and known
    if not ours:
        return _by_torch(x, mask, scale, causal, zero)
    return MaskedSoftmax.apply(x, mask, float(scale), causal, zero)


def _by_torch(x: Tensor, mask: Tensor | None, scale: float, causal: bool, zero: bool) -> Tensor:
    """The same in plain PyTorch, differentiable any number of times."""
    z = (x.float() if x.dtype in (torch.float16, torch.bfloat16) else x) * scale
    if mask is not None:
        z = z.masked_fill(~mask, -float("inf")) if mask.dtype is torch.bool else z + mask.to(z.dtype)
    if causal:
        z = z.masked_fill(torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1), -float("inf"))
    if zero and z.shape[-1:].numel():
        unseen = (z == -float("inf")).all(-1, keepdim=True)
        return torch.softmax(z.masked_fill(unseen, 0.0), -1).masked_fill(unseen, 0.0).to(x.dtype)
    return torch.softmax(z, -1).to(x.dtype)


class MaskedSoftmax(torch.autograd.Function):
    """Keeps the output alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor | None, scale: float, causal: bool, zero: bool) -> Tensor:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _forward(x, mask, y, scale, causal, zero)
        ctx.save_for_backward(y)
        ctx.scale, ctx.causal, ctx.mask = scale, causal, None if mask is None else (mask.shape, mask.dtype)
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        if dy is None:
            return None, None, None, None, None
        (y,) = ctx.saved_tensors
        if torch.is_grad_enabled() or not is_plain(dy):
            y_, dy_ = (t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in (y, dy))
            dz = (y_ * (dy_ - (y_ * dy_).sum(-1, keepdim=True))).to(y.dtype)
            dx = dz * ctx.scale
        elif ctx.needs_input_grad[1] and ctx.scale != 1.0:
            dz = _backward(y, dy, 1.0, ctx.causal)
            dx = dz * ctx.scale
        else:
            dx = dz = _backward(y, dy, ctx.scale, ctx.causal)
        d_mask = None
        if ctx.needs_input_grad[1]:
            shape, dtype = ctx.mask
            d_mask = dz.float().sum_to_size(shape).to(dtype) if dz.shape != shape else dz.to(dtype)
        return dx if ctx.needs_input_grad[0] else None, d_mask, None, None, None


def _planned(problem: Problem, device: Device, masked: bool, backward: bool) -> Plan:
    return plan_masked(replace(problem, backward=backward), device, masked)


# what a launch is planned by; a mask takes as many registers as a second row
_plan_unmasked = functools.lru_cache(functools.partial(_planned, masked=False, backward=False))
_plan_masked = functools.lru_cache(functools.partial(_planned, masked=True, backward=False))
_plan_backward = functools.lru_cache(functools.partial(_planned, masked=False, backward=True))


def _rows(t: Tensor) -> Tensor:
    return row_losses.rows_of(t, t.shape[-1])


def _forward(x: Tensor, mask: Tensor | None, y: Tensor, scale: float, causal: bool, zero: bool) -> None:
    x_rows, y_rows = _rows(x), _rows(y)
    n_queries = x.shape[-2] if x.dim() > 1 else 1
    order = _order(x_rows.shape[0], n_queries)
    numbers: tuple[int, ...] = (1, 1, 0, 0, 0, 0, 0)
    kind, cols, vec, read = 0, 0, 1, y_rows
    if mask is not None:
        kind = 1 if mask.dtype is torch.bool else 2
        read = mask.detach().view(torch.uint8) if kind == 1 else mask.detach()
        expanded = read.expand(x.shape if x.dim() > 1 else (1, *x.shape))
        batch = rows._merge(
            [(n, s) for n, s in zip(expanded.shape[:-2], expanded.stride()[:-2], strict=True) if n != 1]
        )
        if len(batch) > 3:  # no three strides describe it
            read = expanded = expanded.contiguous()
            batch = rows._merge(list(zip(expanded.shape[:-2], expanded.stride()[:-2], strict=True)))
        outer, middle, inner = ([(1, 0)] * 3 + batch)[-3:]
        m_query, m_col = expanded.stride()[-2:]
        m_col = 0 if expanded.shape[-1] == 1 else m_col
        cols = m_col if m_col in (0, 1) else 2
        strides = (outer[1], middle[1], inner[1], m_query)
        vec = _mask_vector(expanded, strides) if cols == 1 else 1
        numbers = (middle[0], inner[0], *(s // vec for s in strides), m_col)
    planner = _plan_masked if kind else _plan_unmasked
    chosen = planner(problem_of(x_rows, y_rows), _device_of(x))
    flags: Flags = (("MASK", kind), ("MASK_COLS", cols), ("MASK_VEC", vec), ("CAUSAL", causal), ("ZERO", zero))
    flags = (*flags, ("STREAM", chosen.regime == "stream"))
    vectors, given = (read,), (*order, *numbers, scale)
    launch_rows("masked_softmax_forward", (x_rows, y_rows), vectors, given, flags, planner, aligned=True)


def _order(n_rows: int, n_queries: int) -> tuple[int, int, int, int]:
    """(n_queries, n_batch, magic, power) of the kernels' `row_at` and `divide`."""
    n_batch = n_rows // n_queries
    power = 31 + (n_batch - 1).bit_length()
    return n_queries, n_batch, -(-(1 << power) // n_batch), power


def _mask_vector(mask: Tensor, strides: Sequence[int]) -> int:
    """Elements that the mask's address and all its strides are multiples of: at most 16 bytes, a power of two."""
    vec = 16 // mask.element_size()
    while vec > 1 and (mask.data_ptr() % (vec * mask.element_size()) or any(s % vec for s in strides)):
        vec //= 2
    return vec


def _backward(y: Tensor, dy: Tensor, scale: float, causal: bool) -> Tensor:
    y_rows, dy_rows = _rows(y), _rows(dy.to(y.dtype))
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    dx_rows = _rows(dx)
    if _plan_backward(problem_of(y_rows, dy_rows, dx_rows), _device_of(y)).regime == "stream":
        gradient = rows.softmax_backward(dy.to(y.dtype), y, -1, y.dtype, False)
        return gradient if scale == 1.0 else gradient.mul_(scale)
    n_queries = y.shape[-2] if y.dim() > 1 else 1
    tensors, flags = (y_rows, dy_rows, dx_rows), (("CAUSAL", causal),)
    launch_rows(
        "masked_softmax_backward", tensors, (), (*_order(y_rows.shape[0], n_queries), scale), flags, _plan_backward
    )
    return dx
