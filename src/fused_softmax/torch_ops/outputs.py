"""What ops return: the rules for an `out=` tensor, how its memory overlaps, and log-probabilities with statistics."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


def takes_out(out: Any, x: Tensor, dtype: torch.dtype) -> bool:
    """Whether out may be written here. torch reports what is wrong with it, and rejects it under autograd."""
    if not isinstance(out, Tensor) or out.dtype is not dtype or out.device != x.device:
        return False
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        return False
    if not torch.compiler.is_compiling() and out.is_inference() and not torch.is_inference_mode_enabled():
        out.as_strided((0,), (1,)).zero_()  # raises torch's error; torch.softmax raises it after it wrote
    return out.layout is torch.strided


def written(result: Tensor, out: Tensor) -> Tensor:
    """out, with the result in it."""
    return (out if out.shape == result.shape else out.resize_(result.shape)).copy_(result)


def is_its_own(out: Tensor) -> bool:
    """Whether each element of out has memory of its own; False also where the strides do not show it."""
    if out.is_contiguous():
        return True
    reach = 0  # the offset of the last element in the dimensions so far, the closest elements first
    for stride, size in sorted(zip(out.stride(), out.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return False
            reach += stride * (size - 1)
    return True


def may_write_while_reading(out: Tensor, x: Tensor) -> bool:
    """Whether a kernel may write out while it reads x: their memory is apart, or the same element by element.

    Else the result goes through a temporary, as in torch. A kernel reads a row before it writes there, so equal rows
    are safe. Views that interleave count as overlapping.
    """
    start, x_start = out.data_ptr(), x.data_ptr()
    if start == x_start and out.element_size() == x.element_size() and out.stride() == x.stride():
        return True
    return start + _n_bytes(out) <= x_start or x_start + _n_bytes(x) <= start


def _n_bytes(t: Tensor) -> int:
    """Bytes from t's first element to the end of its last; 0 where it is empty, which is contiguous."""
    if t.is_contiguous():
        return t.numel() * t.element_size()
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.element_size()


class TokenStatistics(NamedTuple):
    """The result of token_logprobs where more than log-probabilities is asked for. Parts not asked for are None."""

    logprobs: Tensor
    entropy: Tensor | None
    logsumexp: Tensor | None
