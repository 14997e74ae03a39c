"""Running and describing plans directly: any regime on any rows, on this device or for one that is not here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fused_softmax.bench.ops import DTYPES
from fused_softmax.launch import problem_of, softmax_launches

if TYPE_CHECKING:
    from fused_softmax.launch import Launch
    from fused_softmax.plan import Device, Plan, Problem


def described_rows(n_rows: int, n_cols: int, dtype: str) -> tuple[Tensor, Tensor]:
    """Contiguous, aligned (n_rows, n_cols) input and output without memory: enough to plan and to compile for."""
    x = torch.empty(n_rows, n_cols, dtype=DTYPES[dtype], device="meta")
    return x, torch.empty_like(x)


def problem_for(n_cols: int, dtype: str) -> Problem:
    """Softmax of contiguous rows of that width, in tensors that start aligned as allocations do."""
    return problem_of(*described_rows(2, n_cols, dtype))


def launches_for(n_rows: int, n_cols: int, dtype: str, plan: Plan, device: Device) -> list[Launch]:
    """What `plan` launches for such rows on a described device: to be cross-compiled, not to be run."""
    return softmax_launches(*described_rows(n_rows, n_cols, dtype), plan, device=device)


def run_plan(plan: Plan) -> Callable[..., Any]:
    """A callable that runs softmax of 2-D rows through a given plan."""

    def call(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        for launch in softmax_launches(x, y, plan):
            launch()
        return y

    return call
