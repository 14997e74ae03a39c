"""The operations that can be benchmarked, by name: softmax's own here, losses and masks in loss_ops.

An entry of OPS is all that a new operation needs here; its systems are entries in systems.py.
"""

from __future__ import annotations

import torch

from fused_softmax import reference
from fused_softmax.bench.loss_ops import LOSS_OPS
from fused_softmax.bench.operation import (
    DTYPES,
    SHORT,
    Inputs,
    Op,
    one_in_one_out,
    one_input,
    parts_of,
    rows_of_logits,
)

__all__ = ["DTYPES", "OPS", "SHORT", "Inputs", "Op", "family", "ops_named", "parts_of", "rows_of_logits"]


def _softmax_gradient_inputs(n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    y = torch.softmax(rows_of_logits(n_rows, n_cols, dtype, device, seed), -1)
    return rows_of_logits(n_rows, n_cols, dtype, device, seed + 1), y


def _log_softmax_gradient_inputs(
    n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int
) -> Inputs:
    y = torch.log_softmax(rows_of_logits(n_rows, n_cols, dtype, device, seed), -1)
    return rows_of_logits(n_rows, n_cols, dtype, device, seed + 1), y


def _two_in_one_out(n_rows: int, n_cols: int) -> tuple[int, int]:
    return 2 * n_rows * n_cols, n_rows * n_cols


SOFTMAX_OPS = (
    Op("softmax", one_input, lambda x: torch.softmax(x, -1), reference.softmax, one_in_one_out, "copy"),
    Op("log_softmax", one_input, lambda x: torch.log_softmax(x, -1), reference.log_softmax, one_in_one_out, "copy"),
    Op(
        "softmax_backward",
        _softmax_gradient_inputs,
        lambda dy, y: torch._softmax_backward_data(dy, y, -1, y.dtype),
        reference.softmax_backward,
        _two_in_one_out,
        "add",
    ),
    Op(
        "log_softmax_backward",
        _log_softmax_gradient_inputs,
        lambda dy, y: torch._log_softmax_backward_data(dy, y, -1, y.dtype),
        reference.log_softmax_backward,
        _two_in_one_out,
        "add",
    ),
)
OPS: dict[str, Op] = {op.name: op for op in (*SOFTMAX_OPS, *LOSS_OPS)}


def family(op: str) -> str:
    """The results file that an op's records belong to, less its suffix."""
    return OPS[op].family or op


def ops_named(name: str) -> tuple[str, ...]:
    """An op, or all ops of a family, by name; raises KeyError with the names there are."""
    if name in OPS:
        return (name,)
    found = tuple(op for op in OPS if family(op) == name)
    if not found:
        raise KeyError(f"{name!r} is none of {', '.join(dict.fromkeys((*OPS, *map(family, OPS))))}")
    return found
