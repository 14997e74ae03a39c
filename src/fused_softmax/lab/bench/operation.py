"""What an operation is to the benchmark: inputs, PyTorch's own call, a float64 reference of rows, bytes, a ceiling.

`elements` counts what any implementation must read and write, and GB/s of every system is computed from that same
count. `ceiling` names the plain pass that moves memory in the same pattern: copy (one stream in, one out), read (in
only), add (two in, one out). Inputs carry planted outliers in the first, middle and last columns, so that an uncovered
tail changes the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Ceiling = Literal["copy", "read", "add"]
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Op:
    """One operation. A result is a tensor, or a tuple of tensors named by `parts`: rows first, or one number.

    `reference` takes float64 rows of the first `by_row` inputs (None: of all) and the other inputs as they are, and
    returns float64 rows of every part; a part of which a system returns one number is the sum of its rows.
    """

    name: str
    inputs: Callable[[int, int, torch.dtype, torch.device, int], Inputs]
    torch_call: Callable[..., Any]
    reference: Callable[..., Any]
    elements: Callable[[int, int], tuple[int, int]]  # (n_rows, n_cols) -> elements that must be (read, written)
    ceiling: Ceiling
    parts: tuple[str, ...] = ("y",)
    by_row: int | None = None
    # torch rounds intermediate results to the inputs' dtype: its error is no measure of what can be reached
    coarse: bool = False
    family: str = ""  # the results file that it belongs to, where that is not its own
    formula: Callable[..., Any] | None = None  # what torch.compile is given, where that is not torch_call

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


def calm(x: Tensor) -> Tensor:
    """A quarter of the logits: where one column has all of a row but 1%, of its gradient only rounding is left."""
    return x / 4


def one_input(n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """Logits alone: what a file of real data can stand in for."""
    return (rows_of_logits(n_rows, n_cols, dtype, device, seed),)


def one_in_one_out(n_rows: int, n_cols: int) -> tuple[int, int]:
    """As a copy."""
    return n_rows * n_cols, n_rows * n_cols


def two_in_one_out(n_rows: int, n_cols: int) -> tuple[int, int]:
    """As an addition."""
    return 2 * n_rows * n_cols, n_rows * n_cols


def parts_of(result: Any) -> tuple[Tensor, ...]:
    """A result as a tuple of tensors."""
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)
