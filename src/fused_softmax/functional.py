"""The public functions of the softmax family: torch's signatures and torch's errors.

Our kernels take float16, bfloat16 and float32 on a GPU that Triton supports (or on the CPU, interpreted). PyTorch's own
function gets every other call with the same arguments: float64, integers with their errors, subclasses, forward-mode
AD, other devices, no Triton. torch_ops/route.py decides which path a call takes; `plan_for` shows it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from .launch.layout import DTYPE_NAMES
from .torch_ops.arguments import broadcasts, expect_flag, expect_floating, expect_tensors, real, stands_in
from .torch_ops.logsumexp import direct_logsumexp, logsumexp_of
from .torch_ops.masked_softmax import masked_softmax_of
from .torch_ops.route import of_dtensor
from .torch_ops.softmax import direct_out, direct_softmax, softmax_of

FULLY_MASKED = ("nan", "zero")


def softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Tensor:
    """Return the softmax over `dim`, as `torch.softmax`: exp(x - max(x)) / sum(exp(x - max(x))).

    Args:
        input: Any shape and strides. float16, bfloat16 and float32 run our kernels on a GPU; the rest runs torch's.
        dim: The dimension that sums to 1, in [-input.dim(), input.dim()).
        dtype: The input is cast to it first. float16 and bfloat16 to float32 needs no pass of its own.
        out: A tensor to write to, of the result's dtype. It is resized if its shape differs.

    Returns:
        A contiguous tensor of input's shape, in `dtype` or input's dtype. A row with +inf or NaN, or with -inf alone,
        is NaN. Autograd saves the result and nothing else. The gradient is one kernel, and is differentiable.

    Raises:
        IndexError: `dim` is out of range.
        TypeError: `dim` is no integer.
        NotImplementedError: `input` holds integers, and `dtype` is not given.
        RuntimeError: `out` has another dtype than the result.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.softmax.html

    >>> softmax(torch.tensor([2.0, 1.0, 0.1]))
    tensor([0.6590, 0.2424, 0.0986])
    """
    result = direct_softmax(input, dim, dtype, False) if out is None else direct_out(input, dim, dtype, False, out)
    return _softmax(input, dim, dtype, out, False) if result is None else result


def log_softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Tensor:
    """Return the logarithm of the softmax over `dim`, as `torch.log_softmax`: x - max(x) - log(sum(exp(x - max(x)))).

    Arguments, result and errors are those of `softmax`. A -inf among finite values stays -inf.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.log_softmax.html

    >>> log_softmax(torch.tensor([2.0, 1.0, 0.1]))
    tensor([-0.4170, -1.4170, -2.3170])
    """
    result = direct_softmax(input, dim, dtype, True) if out is None else direct_out(input, dim, dtype, True, out)
    return _softmax(input, dim, dtype, out, True) if result is None else result


def logsumexp(input: Tensor, dim: int | tuple[int, ...], keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
    """Return log(sum(exp(x))) over one dimension or several, as `torch.logsumexp`, in one read.

    Args:
        input: Any shape and strides. float16, bfloat16 and float32 run our kernels on a GPU; the rest runs torch's.
        dim: An int or a tuple of ints, each in [-input.dim(), input.dim()).
        keepdim: Whether the reduced dimensions stay, with size 1.
        out: A tensor to write to. It is resized if its shape differs.

    Returns:
        A tensor of input's dtype. A row of -inf alone gives -inf, a row with +inf gives +inf, and a row with NaN NaN.

    Raises:
        IndexError: A dimension is out of range.
        RuntimeError: A dimension is named twice.
        TypeError: `dim` has another type.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.logsumexp.html

    >>> logsumexp(torch.zeros(2, 4), dim=1)
    tensor([1.3863, 1.3863])
    """
    if out is None and (direct := direct_logsumexp(input, dim, keepdim)) is not None:
        return direct
    if not isinstance(input, Tensor) and stands_in(input):
        written = {} if out is None else {"out": out}
        return handle_torch_function(logsumexp, (input,), input, dim, keepdim, **written)
    found = of_dtensor("logsumexp", logsumexp, input, dim, keepdim) if out is None else None
    return logsumexp_of(input, dim, _dims(input, dim), keepdim, out) if found is None else found


def masked_softmax(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    fully_masked: str = "nan",
) -> Tensor:
    """Return softmax(scale*x) over the last dimension, over the columns that the mask and causality keep.

    Args:
        x: (..., Q, K) or (K,), any K. float16, bfloat16 and float32 run our kernels on a GPU; the rest runs torch's
            formulas.
        mask: Broadcasts to x's shape, and is not expanded in memory. A bool mask keeps the columns that are True, as in
            `torch.nn.functional.scaled_dot_product_attention`. A floating mask is added to scale*x; its gradient is
            summed to its shape.
        scale: A number that multiplies x first. A scale that is no positive normal number of float32 runs torch's
            formulas.
        causal: Query q sees columns 0 to q, also where Q and K differ (aligned at the top left, as torch's is_causal).
        fully_masked: What a row without a visible column becomes: "nan", as the softmax of -inf alone, or "zero", with
            gradients of 0.

    Returns:
        A contiguous tensor of x's shape and dtype. Hidden columns are 0. Columns that a bool mask or causality hides
        have a gradient of 0 in every row, also in a row of NaN. A row that an additive mask of -inf hides has a
        gradient of NaN, as softmax(x + mask) has, unless fully_masked is "zero".

    Raises:
        ValueError: `fully_masked` is another word, the mask does not broadcast, or `causal` is set for one dimension.
        TypeError: The mask holds integers, or an argument has another type.
        NotImplementedError: `x` is not floating.
        RuntimeError: The mask is on another device.

    >>> masked_softmax(torch.zeros(2, 2), causal=True)
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """
    if not (isinstance(x, Tensor) and (mask is None or isinstance(mask, Tensor))):
        if stands_in(x, mask):
            return handle_torch_function(
                masked_softmax, (x, mask), x, mask, scale=scale, causal=causal, fully_masked=fully_masked
            )
        expect_tensors("masked_softmax", x=x)
        expect_tensors("masked_softmax", mask=mask)
    if x.dtype not in DTYPE_NAMES:
        expect_floating("masked_softmax", "x", x)
    if type(scale) is not float:
        scale = real("masked_softmax", "scale", scale)
    if type(causal) is not bool:
        expect_flag("masked_softmax", "causal", causal)
    if fully_masked not in FULLY_MASKED:
        raise ValueError(f"fully_masked must be one of {FULLY_MASKED}, not {fully_masked!r}")
    if causal and x.dim() < 2:
        raise ValueError("causal needs queries and columns: x of two dimensions at least")
    if mask is not None:
        if mask.dtype is not torch.bool and not mask.is_floating_point():
            raise TypeError(f"mask must be bool or floating, not {mask.dtype}; mask.bool() keeps what is not 0")
        if mask.dim() > x.dim() or not all(map(broadcasts, mask.shape[::-1], x.shape[::-1])):
            raise ValueError(f"mask {tuple(mask.shape)} does not broadcast to {tuple(x.shape)}")
    return masked_softmax_of(x, mask, scale, causal, fully_masked == "zero")


def _softmax(input: Tensor, dim: int, dtype: torch.dtype | None, out: Tensor | None, log: bool) -> Tensor:
    if not isinstance(input, Tensor) and stands_in(input):
        written = {} if out is None else {"out": out}
        return handle_torch_function(log_softmax if log else softmax, (input,), input, dim, dtype, **written)
    if out is None:
        name, public = ("log_softmax", log_softmax) if log else ("softmax", softmax)
        found = of_dtensor(name, public, input, dim, dtype)
        if found is not None:
            return found
    return softmax_of(input, dim, _index(input, dim), dtype, out, log)


def _index(input: Any, dim: Any) -> int | None:
    """dim as an int in range, or None: then torch's own function takes the call, or says what is wrong with it."""
    if not isinstance(input, Tensor):
        return None
    if type(dim) is not int:
        if isinstance(dim, bool) or not hasattr(dim, "__index__"):
            return None
        dim = operator.index(dim)
    bound = input.dim() or 1
    return dim if -bound <= dim < bound else None


def _dims(input: Any, dim: Any) -> tuple[int, ...] | None:
    """dim as rising dimensions, each once, counted from the first; or None, as `_index`."""
    if not isinstance(dim, (tuple, list)):
        dim = (dim,)
    indices = [_index(input, d) for d in dim]
    if not indices or any(index is None for index in indices):
        return None
    found = sorted({index % (input.dim() or 1) for index in indices if index is not None})
    return tuple(found) if len(found) == len(indices) else None
