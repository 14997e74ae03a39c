"""Running and describing plans directly: any regime on any rows, on this device or for one that is not here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fused_softmax.lab.bench.inputs import DTYPES
from fused_softmax.launch.layout import problem_of
from fused_softmax.launch.softmax import softmax_launch

if TYPE_CHECKING:
    from fused_softmax.launch.compile import Launch
    from fused_softmax.planning.types import Device, Plan, Problem


def described_rows(n_rows: int, n_cols: int, dtype: str) -> tuple[Tensor, Tensor]:
    """Contiguous, aligned (n_rows, n_cols) input and output without memory: enough to plan and to compile for."""
    x = torch.empty(n_rows, n_cols, dtype=DTYPES[dtype], device="meta")
    return x, torch.empty_like(x)


def problem_for(n_cols: int, dtype: str, *, backward: bool = False) -> Problem:
    """Softmax, or its backward, of contiguous rows of that width, in tensors that start aligned as allocations do."""
    return problem_of(*described_rows(2, n_cols, dtype), backward=backward)


def launches_for(n_rows: int, n_cols: int, dtype: str, plan: Plan, device: Device) -> list[Launch]:
    """What `plan` launches for such rows on a described device: to be cross-compiled, not to be run."""
    return [softmax_launch(described_rows(n_rows, n_cols, dtype), plan, device=device)]


def run_backward_plan(plan: Plan) -> Callable[..., Any]:
    """A callable that runs softmax's backward, (dy, y) -> dx of 2-D rows, through a given plan."""

    def call(dy: Tensor, y: Tensor) -> Tensor:
        dx = torch.empty_like(y)
        softmax_launch((y, dy, dx), plan, backward=True)()
        return dx

    return call


def run_plan(plan: Plan) -> Callable[..., Any]:
    """A callable that runs softmax of 2-D rows through a given plan."""

    def call(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        softmax_launch((x, y), plan)()
        return y

    return call


def plan_text(plan: Plan) -> str:
    """Such as `cluster: 16 CTAs of 8 warps, 3 chunks of 2048 columns, exp twice; the row stays in ...`."""
    ctas = f"{plan.ctas} CTA{'s' * (plan.ctas > 1)} of {plan.num_warps} warp{'s' * (plan.num_warps > 1)}"
    rows = f", {plan.rows} rows a program" if plan.rows > 1 else ""
    chunks = f", {plan.chunks} chunk{'s' * (plan.chunks > 1)} of {plan.vectors_per_chunk * plan.vec} columns"
    more = ", ends apart" * plan.unaligned + ", exp twice" * plan.recompute
    registers = f", {plan.max_registers} registers" if plan.max_registers else ""
    return f"{plan.regime}: {ctas}{rows}{chunks}{more}{registers}; {plan.why}"
