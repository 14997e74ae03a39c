"""plan_for: the path that a call takes, from the code that routes the calls."""

from __future__ import annotations

import importlib
import operator
import warnings
from typing import Any

import torch
from torch import Tensor

from .launch.availability import KernelUnavailable
from .planning.types import Plan
from .torch_ops.route import PLANNED, Fallback, PlanRequest

__all__ = ["Fallback", "plan_for"]


def plan_for(
    x: Tensor,
    dim: int = -1,
    dtype: torch.dtype | None = None,
    *,
    op: str = "softmax",
    mask: Tensor | None = None,
    backward: bool = False,
    log: bool | None = None,
    linear_weight: Tensor | None = None,
    causal: bool = False,
) -> Plan | Fallback:
    """Return the plan that a call of `op` with x takes, or a `Fallback` that says why none of our kernels runs.

    Args:
        x: The input; the logits of a loss; the hidden states of a linear loss. No memory of its size is allocated.
        dim: The dimension, for the ops that take one. masked_softmax and token_logprobs take the last dimension,
            cross_entropy the classes.
        dtype: The dtype of the result, for the ops that take one.
        op: The name of a function of this package that runs a kernel, such as "cross_entropy", with its default
            options.
        mask: The mask of masked_softmax.
        backward: Whether to plan the gradient of such a call. For cross_entropy that is the forward that also writes
            the gradient, where a row fits on chip.
        log: Deprecated; log=True is op="log_softmax".
        linear_weight: (V, H), the weight of linear_cross_entropy and linear_token_logprobs. The answer is the plan of
            a chunk's logits; `.why` says how many rows a chunk has. The products are cuBLAS's, with any plan. backward
            counts the gradients of input and weight as needed.
        causal: Whether masked_softmax is asked for causal scores.

    Returns:
        A `Plan` or a `Fallback`. Both have `.regime` and `.why`. A Fallback's `.reason` is "unsupported" where our
        kernels cannot take the call, and "empty" where nothing is launched.

    Raises:
        ValueError: `op` is none of the names that it lists. The op's own errors for x, dim and dtype are raised, too.

    >>> plan_for(torch.zeros(2, 8, dtype=torch.float64)).regime
    'torch'
    """
    if log is not None:
        warnings.warn('plan_for(log=...) is deprecated: use op="log_softmax"', DeprecationWarning, stacklevel=2)
        op = "log_softmax" if log else op
    if op not in PLANNED:  # the package has imported all other ops by now
        for file in ("linear_operator", "linear_token_logprobs"):
            importlib.import_module(f".torch_ops.{file}", __package__)
    if op not in PLANNED:
        raise ValueError(f"plan_for() knows {', '.join(sorted(PLANNED))}, not {op!r}")
    try:
        found = PLANNED[op](PlanRequest(x, dim, _index(x, dim), dtype, mask, backward, linear_weight, causal))
    except KernelUnavailable as error:  # such as rows of more columns than the kernels count
        found = str(error)
    return Fallback(found) if isinstance(found, str) else found


def _index(x: Tensor, dim: Any) -> int | None:
    """dim as an int in range, or None: then torch's own function says what is wrong with it."""
    if not isinstance(x, Tensor) or isinstance(dim, bool) or not hasattr(dim, "__index__"):
        return None
    bound = x.dim() or 1
    index = operator.index(dim)
    return index if -bound <= index < bound else None
