"""Running and describing plans directly: any regime on any rows, on this device or for one that is not here.

`plan_of` says in a line what a benchmark's case runs: what a record keeps, so that a time can be traced to its rung.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fused_softmax.bench.ops import DTYPES
from fused_softmax.launch import backward_launches, problem_of, softmax_launches

if TYPE_CHECKING:
    from fused_softmax.launch import Launch
    from fused_softmax.problem import Device, Plan, Problem


def described_rows(n_rows: int, n_cols: int, dtype: str) -> tuple[Tensor, Tensor]:
    """Contiguous, aligned (n_rows, n_cols) input and output without memory: enough to plan and to compile for."""
    x = torch.empty(n_rows, n_cols, dtype=DTYPES[dtype], device="meta")
    return x, torch.empty_like(x)


def problem_for(n_cols: int, dtype: str, *, backward: bool = False) -> Problem:
    """Softmax, or its backward, of contiguous rows of that width, in tensors that start aligned as allocations do."""
    return problem_of(*described_rows(2, n_cols, dtype), backward=backward)


def launches_for(n_rows: int, n_cols: int, dtype: str, plan: Plan, device: Device) -> list[Launch]:
    """What `plan` launches for such rows on a described device: to be cross-compiled, not to be run."""
    return softmax_launches(*described_rows(n_rows, n_cols, dtype), plan, device=device)


def run_backward_plan(plan: Plan) -> Callable[..., Any]:
    """A callable that runs softmax's backward, (dy, y) -> dx of 2-D rows, through a given plan."""

    def call(dy: Tensor, y: Tensor) -> Tensor:
        dx = torch.empty_like(y)
        for launch in backward_launches(y, dy, dx, plan):
            launch()
        return dx

    return call


def run_plan(plan: Plan) -> Callable[..., Any]:
    """A callable that runs softmax of 2-D rows through a given plan."""

    def call(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        for launch in softmax_launches(x, y, plan):
            launch()
        return y

    return call


def plan_of(op: str, inputs: tuple[Tensor, ...]) -> tuple[str, str]:
    """(regime, the plan in words) of our kernel for an op of the benchmark; ('torch', why) where torch's own runs."""
    from fused_softmax.device import Unsupported, describe
    from fused_softmax.functional import Fallback, plan_for
    from fused_softmax.loss_plans import plan_elementwise, plan_loss, plan_masked, plan_statistics
    from fused_softmax.plan import plan

    x = inputs[0]
    device = describe(x.device)
    if isinstance(device, Unsupported):
        return "torch", str(device)
    # a fresh output starts where allocations do, on 16 bytes and more
    y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    problem = problem_of(x, y)
    if op.removesuffix("_autograd") in ("softmax", "log_softmax"):
        found = plan_for(x, log=op.startswith("log_softmax"))
        return ("torch", found.why) if isinstance(found, Fallback) else (found.regime, plan_text(found))
    if op in ("softmax_backward", "log_softmax_backward"):
        chosen = plan(problem_of(*inputs, y, backward=True, log=op.startswith("log_softmax")), device)
    elif op == "cross_entropy":
        chosen = plan_loss(problem, device)
        if chosen.regime == "stream":
            chosen = plan_statistics(problem_of(x), device)
    elif op in ("cross_entropy_forward", "token_logprobs"):
        chosen = plan_statistics(problem_of(x), device)
    elif op == "token_logprobs_backward":
        chosen = plan_elementwise(problem, device)
    elif op in ("masked_softmax_causal_backward", "masked_softmax_additive_backward"):
        problem = problem_of(*inputs[:2], y, backward=True)
        chosen = plan_masked(problem, device, masked=False)
        if chosen.regime == "stream":  # softmax's own gradient takes such rows
            chosen = plan(problem, device)
    else:
        chosen = plan_masked(problem, device, masked=op == "masked_softmax_additive")
    return chosen.regime, plan_text(chosen)


def plan_text(plan: Plan) -> str:
    """Such as `cluster: 16 CTAs of 8 warps, 3 chunks of 2048 columns, exp twice; the row stays in ...`."""
    ctas = f"{plan.ctas} CTA{'s' * (plan.ctas > 1)} of {plan.num_warps} warp{'s' * (plan.num_warps > 1)}"
    rows = f", {plan.rows} rows a program" if plan.rows > 1 else ""
    chunks = f", {plan.chunks} chunk{'s' * (plan.chunks > 1)} of {plan.lanes * plan.vec} columns"
    more = ", ends apart" * plan.edge + ", exp twice" * plan.recompute
    registers = f", {plan.max_registers} registers" if plan.max_registers else ""
    return f"{plan.regime}: {ctas}{rows}{chunks}{more}{registers}; {plan.why}"
