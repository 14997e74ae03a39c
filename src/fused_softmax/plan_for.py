"""plan_for: which path a call takes, asked of the code that routes the calls."""

from __future__ import annotations

import operator
import warnings
from typing import Any

import torch
from torch import Tensor

from .planning.types import Plan
from .torch_ops.cross_entropy import planned_cross_entropy
from .torch_ops.logsumexp import planned_logsumexp
from .torch_ops.masked_softmax import planned_masked_softmax
from .torch_ops.route import Fallback
from .torch_ops.softmax import planned_softmax
from .torch_ops.token_logprobs import planned_token_logprobs

__all__ = ["Fallback", "plan_for"]

OPS = ("softmax", "log_softmax", "logsumexp", "masked_softmax", "cross_entropy", "token_logprobs")


def plan_for(
    x: Tensor,
    dim: int = -1,
    dtype: torch.dtype | None = None,
    *,
    op: str = "softmax",
    mask: Tensor | None = None,
    backward: bool = False,
    log: bool | None = None,
) -> Plan | Fallback:
    """The plan that a call of `op` with x takes, or a `Fallback` that says why none of our kernels runs.

    Args:
        x: the input; the logits of a loss. No memory of its size is taken.
        dim: the dimension of softmax, log_softmax and logsumexp. masked_softmax and token_logprobs take the last one,
            cross_entropy the classes.
        dtype: of the result, for softmax and log_softmax.
        op: "softmax", "log_softmax", "logsumexp", "masked_softmax", "cross_entropy" or "token_logprobs", each with its
            default options.
        mask: of masked_softmax.
        backward: whether to plan the gradient of such a call. For cross_entropy that is the forward which writes the
            gradient too, where a row fits on chip.
        log: deprecated; log=True is op="log_softmax".

    Returns: a `Plan` or a `Fallback`. Both have `.regime` and `.why`. A Fallback's `.reason` is "unsupported" where our
    kernels cannot take the call, "torch is faster" where PyTorch's should, and "empty" where nothing is launched.

    Raises: ValueError for another op; what the op itself raises for x, dim and dtype, those of integers and complex
    numbers too.

    >>> plan_for(torch.zeros(2, 8, dtype=torch.float64)).regime
    'torch'
    """
    if log is not None:
        warnings.warn('plan_for(log=...) is deprecated: use op="log_softmax"', DeprecationWarning, stacklevel=2)
        op = "log_softmax" if log else op
    if op not in OPS:
        raise ValueError(f"plan_for() knows {', '.join(OPS)}, not {op!r}")
    if op in ("softmax", "log_softmax"):
        return planned_softmax(x, dim, _index(x, dim), dtype, op == "log_softmax", backward)
    if op == "logsumexp":
        return planned_logsumexp(x, dim, _index(x, dim), backward)
    if op == "masked_softmax":
        return planned_masked_softmax(x, mask, backward)
    return (planned_cross_entropy if op == "cross_entropy" else planned_token_logprobs)(x, backward)


def _index(x: Tensor, dim: Any) -> int | None:
    """dim as an int in range, or None: then torch's own function says what is wrong with it."""
    if isinstance(dim, bool) or not hasattr(dim, "__index__"):
        return None
    bound = x.dim() or 1
    index = operator.index(dim)
    return index if -bound <= index < bound else None
