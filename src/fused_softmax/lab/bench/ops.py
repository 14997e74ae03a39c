"""The operations that can be benchmarked, by name: softmax's own here, losses and masks in loss_ops.

An entry of OPS is all that a new operation needs here; its systems are entries in systems.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_softmax.lab import reference
from fused_softmax.lab.bench.loss_ops import LOSS_OPS
from fused_softmax.lab.bench.operation import (
    DTYPES,
    SHORT,
    Inputs,
    Op,
    calm,
    one_in_one_out,
    one_input,
    parts_of,
    rows_of_logits,
    two_in_one_out,
)

__all__ = ["DTYPES", "OPS", "SHORT", "Inputs", "Op", "family", "ops_named", "parts_of", "rows_of_logits"]

# a forward and its backward as a program runs them: where their host time is measured
AUTOGRAD = ("softmax_autograd", "log_softmax_autograd")


def _softmax_gradient_inputs(n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    y = torch.softmax(rows_of_logits(n_rows, n_cols, dtype, device, seed), -1)
    return rows_of_logits(n_rows, n_cols, dtype, device, seed + 1), y


def _log_softmax_gradient_inputs(
    n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int
) -> Inputs:
    y = torch.log_softmax(rows_of_logits(n_rows, n_cols, dtype, device, seed), -1)
    return rows_of_logits(n_rows, n_cols, dtype, device, seed + 1), y


def _autograd_inputs(n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """(logits that need a gradient, the result's gradient)."""
    x = calm(rows_of_logits(n_rows, n_cols, dtype, device, seed))
    return x.requires_grad_(), rows_of_logits(n_rows, n_cols, dtype, device, seed + 1)


def through_autograd(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """(logits that need a gradient, the result's gradient) -> the logits' gradient, forward included."""

    def call(x: Tensor, dy: Tensor) -> Tensor:
        # torch.enable_grad() would be a microsecond of what is measured
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)
        try:
            return torch.autograd.grad(forward(x), x, dy)[0]
        finally:
            torch._C._set_grad_enabled(before)

    return call


def _softmax(x: Tensor) -> Tensor:
    return F.softmax(x, -1)


def _log_softmax(x: Tensor) -> Tensor:
    return F.log_softmax(x, -1)


def _there_and_back(n_rows: int, n_cols: int) -> tuple[int, int]:
    """The forward as a copy, whose result autograd keeps; then result and gradient in, gradient out."""
    return 3 * n_rows * n_cols, 2 * n_rows * n_cols


SOFTMAX_OPS = (
    Op("softmax", one_input, _softmax, reference.softmax, one_in_one_out, "copy"),
    Op("log_softmax", one_input, _log_softmax, reference.log_softmax, one_in_one_out, "copy"),
    Op(
        "softmax_backward",
        _softmax_gradient_inputs,
        lambda dy, y: torch._softmax_backward_data(dy, y, -1, y.dtype),
        reference.softmax_backward,
        two_in_one_out,
        "add",
    ),
    Op(
        "log_softmax_backward",
        _log_softmax_gradient_inputs,
        lambda dy, y: torch._log_softmax_backward_data(dy, y, -1, y.dtype),
        reference.log_softmax_backward,
        two_in_one_out,
        "add",
    ),
    Op(
        "softmax_autograd",
        _autograd_inputs,
        through_autograd(_softmax),
        lambda x, dy: reference.softmax_backward(dy, reference.softmax(x)),
        _there_and_back,
        "add",
        family="softmax",
        formula=_softmax,
    ),
    Op(
        "log_softmax_autograd",
        _autograd_inputs,
        through_autograd(_log_softmax),
        lambda x, dy: reference.log_softmax_backward(dy, reference.log_softmax(x)),
        _there_and_back,
        "add",
        family="log_softmax",
        formula=_log_softmax,
    ),
)
OPS: dict[str, Op] = {op.name: op for op in (*SOFTMAX_OPS, *LOSS_OPS)}


def family(op: str) -> str:
    """The results file that an op's records belong to, less its suffix."""
    return OPS[op].family or op


def ops_named(name: str) -> tuple[str, ...]:
    """An op, a family of ops, or `all` ops but those through autograd; raises KeyError with the names there are."""
    if name == "all":
        return tuple(op for op in OPS if op not in AUTOGRAD)
    if name in OPS:
        return (name,)
    found = tuple(op for op in OPS if family(op) == name)
    if not found:
        raise KeyError(f"{name!r} is none of all, {', '.join(dict.fromkeys((*OPS, *map(family, OPS))))}")
    return found
