"""The operations that can be benchmarked: inputs, float64 reference, elements that must move, and the ceiling to beat.

An entry of OPS is all that a new operation needs here; its systems are entries in systems.py. `elements` counts what
any implementation must read and write, and GB/s of every system is computed from that same count. `ceiling` names
the plain pass that moves memory in the same pattern: copy (one stream in, one out), read (in only), add (two in, one
out). Inputs carry planted outliers in the first, middle and last columns, so that an uncovered tail changes the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fused_softmax import reference

Ceiling = Literal["copy", "read", "add"]
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True)
class Op:
    """One operation: `torch_call` is PyTorch's own, `reference` takes float64 rows and returns float64 rows."""

    name: str
    inputs: Callable[[int, int, torch.dtype, torch.device, int], tuple[Tensor, ...]]
    torch_call: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    elements: Callable[[int, int], tuple[int, int]]  # (n_rows, n_cols) -> elements that must be (read, written)
    ceiling: Ceiling

    def bytes_moved(self, n_rows: int, n_cols: int, itemsize: int) -> int:
        """Bytes that any implementation must read and write: the numerator of everyone's GB/s."""
        return sum(self.elements(n_rows, n_cols)) * itemsize


def rows_of_logits(n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """(n_rows, n_cols) random normal rows with outliers planted in every third row, at the row's start, middle, end."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(n_rows, n_cols, dtype=dtype, device=device, generator=generator)
    if n_rows and n_cols:
        x[0::3, n_cols - 1] = 12.0
        x[1::3, n_cols // 2] = 11.0
        x[2::3, 0] = 10.0
    return x


def _one_input(n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    return (rows_of_logits(n_rows, n_cols, dtype, device, seed),)


def _softmax_gradient_inputs(
    n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[Tensor, ...]:
    y = torch.softmax(rows_of_logits(n_rows, n_cols, dtype, device, seed), -1)
    return rows_of_logits(n_rows, n_cols, dtype, device, seed + 1), y


def _log_softmax_gradient_inputs(
    n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[Tensor, ...]:
    y = torch.log_softmax(rows_of_logits(n_rows, n_cols, dtype, device, seed), -1)
    return rows_of_logits(n_rows, n_cols, dtype, device, seed + 1), y


def _one_in_one_out(n_rows: int, n_cols: int) -> tuple[int, int]:
    return n_rows * n_cols, n_rows * n_cols


def _two_in_one_out(n_rows: int, n_cols: int) -> tuple[int, int]:
    return 2 * n_rows * n_cols, n_rows * n_cols


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op("softmax", _one_input, lambda x: torch.softmax(x, -1), reference.softmax, _one_in_one_out, "copy"),
        Op(
            "log_softmax",
            _one_input,
            lambda x: torch.log_softmax(x, -1),
            reference.log_softmax,
            _one_in_one_out,
            "copy",
        ),
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
}
