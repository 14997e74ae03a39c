"""What a user calls: torch's signatures, torch's checks, then the operator; and which path a tensor takes.

Our kernels take float16, bfloat16 and float32 on a GPU that Triton supports (or on the CPU, interpreted). Everything else
(float64, integers with their errors, other devices, no Triton) is PyTorch's own, called with the same arguments.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import rows
from .device import describe
from .launch import DTYPE_NAMES, problem_of
from .plan import Device, Plan, plan as make_plan


@dataclass(frozen=True)
class Fallback:
    """PyTorch's own kernel runs, and `why`."""

    why: str
    regime: str = "torch"


def softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Tensor:
    """softmax(x) = exp(x - max(x)) / sum(exp(x - max(x))) over `dim`: `torch.softmax`, at the speed of a copy.

    Args:
        input: any shape and strides; float16, bfloat16 and float32 are ours on a GPU, all else is torch's.
        dim: the dimension that sums to 1, in [-input.dim(), input.dim()).
        dtype: the input is cast to it first. float16 and bfloat16 to float32 costs no pass of its own.
        out: a tensor to write to, of the result's dtype; it is resized if its shape differs.

    Returns: a contiguous tensor of input's shape, in `dtype` or input's. Rows with +inf, NaN or nothing but -inf are NaN.

    Raises: IndexError for a dim out of range, TypeError for one that is no integer, NotImplementedError for integers
    without dtype=, RuntimeError for an `out` of another dtype.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.softmax.html

    >>> softmax(torch.tensor([2.0, 1.0, 0.1]))
    tensor([0.6590, 0.2424, 0.0986])
    """
    return _forward(input, dim, dtype, out, log=False)


def _forward(input: Tensor, dim: int, dtype: torch.dtype | None, out: Tensor | None, *, log: bool) -> Tensor:
    dim = _check(input, dim)
    reason = _fallback(input, dtype)
    if reason is not None:
        function = torch.log_softmax if log else torch.softmax
        return function(input, dim, dtype) if out is None else function(input, dim, dtype, out=out)
    out_dtype = input.dtype if dtype is None else dtype
    if out_dtype is not input.dtype and not (out_dtype is torch.float32 and input.dtype in DTYPE_NAMES):
        input = input.to(out_dtype)
    if out is None:
        return rows.softmax_forward(input, dim, out_dtype, log)
    if out.dtype is not out_dtype:
        raise RuntimeError(f"Expected out tensor to have dtype {out_dtype}, but got {out.dtype} instead")
    if out.device != input.device:
        raise RuntimeError(f"Expected out tensor on {input.device}, but it is on {out.device}")
    torch._resize_output_(out, input.shape, input.device) if out.shape != input.shape else None
    return rows.softmax_forward(input, dim, out_dtype, log, out)


def _check(input: Any, dim: Any) -> int:
    """`dim` as an int, or the error that torch raises."""
    if not isinstance(input, Tensor):
        raise TypeError(f"softmax(): argument 'input' must be Tensor, not {type(input).__name__}")
    if type(dim) is not int:
        if isinstance(dim, bool) or not hasattr(dim, "__index__"):
            raise TypeError(f"softmax(): argument 'dim' must be int, not {type(dim).__name__}")
        dim = operator.index(dim)
    bound = max(1, input.dim())
    if not -bound <= dim < bound:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-bound}, {bound - 1}], but got {dim})")
    return dim


def _fallback(input: Tensor, dtype: torch.dtype | None) -> str | None:
    """Why this call is PyTorch's, or None where it is ours."""
    out_dtype = input.dtype if dtype is None else dtype
    if out_dtype not in DTYPE_NAMES:
        return f"{out_dtype} is PyTorch's: the kernels compute in float32"
    if dtype is not None and input.dtype is torch.float64:
        return "float64 is PyTorch's"
    device = describe(input.device)
    return None if isinstance(device, Device) else str(device)


def plan_for(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Plan | Fallback:
    """The plan that `softmax(x, dim, dtype)` takes, or a `Fallback` that says why PyTorch's own kernel is called.

    Nothing is launched and no memory of x's size is taken. Both have `.regime` and `.why`.

    >>> plan_for(torch.zeros(2, 8, dtype=torch.float64)).regime
    'torch'
    """
    dim = _check(x, dim)
    reason = _fallback(x, dtype)
    if reason is not None:
        return Fallback(reason)
    device = describe(x.device)
    assert isinstance(device, Device)
    out_dtype = x.dtype if dtype is None else dtype
    folded = rows.as_rows(x, dim % x.dim()) if x.dim() else x.view(1, 1)
    if folded is None or x.numel() == 0 or (x.dim() and dim % x.dim() != x.dim() - 1 and folded.shape[0] > 1):
        return Fallback("dim's elements or rows are not neighbours: the strided kernel", regime="strided")
    # the output is new, so aligned and contiguous: a meta tensor stands in for it
    in_dtype = x.dtype if x.dtype in DTYPE_NAMES and out_dtype is torch.float32 else out_dtype
    out = torch.empty(folded.shape, dtype=out_dtype, device="meta")
    like = folded if in_dtype is x.dtype else torch.empty(folded.shape, dtype=in_dtype, device="meta")
    return make_plan(problem_of(like, out, batch_invariant=rows.is_batch_invariant()), device)
