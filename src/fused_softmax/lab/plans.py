"""Running and describing plans directly: any regime on any rows, on this device or for one that is not here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fused_softmax.lab.bench.inputs import DTYPES, IGNORED
from fused_softmax.launch import cross_entropy, loss_kernels, row_statistics, spatial
from fused_softmax.launch.device import device_of
from fused_softmax.launch.launcher import RowOp, launch_rows
from fused_softmax.launch.layout import pointer, problem_of
from fused_softmax.launch.options import CrossEntropy
from fused_softmax.launch.softmax import softmax_launch, softmax_op

if TYPE_CHECKING:
    from fused_softmax.launch.compile import Launch
    from fused_softmax.planning.types import Device, Plan, Problem, SpatialProblem


def described_rows(n_rows: int, n_cols: int, dtype: str) -> tuple[Tensor, Tensor]:
    """Contiguous, aligned (n_rows, n_cols) input and output without memory: enough to plan and to compile for."""
    x = torch.empty(n_rows, n_cols, dtype=DTYPES[dtype], device="meta")
    return x, torch.empty_like(x)


def problem_for(n_cols: int, dtype: str, *, backward: bool = False, log: bool = False) -> Problem:
    """Softmax, or its backward, of contiguous rows of that width, in tensors that start aligned as allocations do."""
    return problem_of(*described_rows(2, n_cols, dtype), backward=backward, log=log)


def launches_for(n_rows: int, n_cols: int, dtype: str, plan: Plan, device: Device) -> list[Launch]:
    """What `plan` launches for such rows on a described device: to be cross-compiled, not to be run."""
    return [softmax_launch(described_rows(n_rows, n_cols, dtype), plan, device=device)]


Make = Callable[["Plan"], Callable[..., Any]]  # a plan -> a callable over the inputs of the bench's op


def run_plan(log: bool = False) -> Make:
    """Runs softmax of 2-D rows, x -> y, through a given plan."""
    op, flags = softmax_op(log)

    def make(plan: Plan) -> Callable[..., Any]:
        def call(x: Tensor) -> Tensor:
            y = torch.empty_like(x)
            launch_rows(_fixed(op, plan), (x, y), (), (), flags)
            return y

        return call

    return make


def run_backward_plan(log: bool = False) -> Make:
    """Runs softmax's gradient of 2-D rows, (dy, y) -> dx, through a given plan."""
    op, flags = softmax_op(log, backward=True)

    def make(plan: Plan) -> Callable[..., Any]:
        def call(dy: Tensor, y: Tensor) -> Tensor:
            dx = torch.empty_like(y)
            launch_rows(_fixed(op, plan), (y, dy, dx), (), (), flags)
            return dx

        return call

    return make


def run_loss_plan(plan: Plan) -> Callable[..., Any]:
    """Runs a mean cross-entropy with its gradient, (x, target, count) -> (loss, dx), through a given plan."""

    def call(x: Tensor, target: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        op = CrossEntropy(target, None, None, IGNORED, "mean", 0.0, None, 0.0)
        dx, losses = torch.empty_like(x), x.new_empty(x.shape[0], dtype=torch.float32)
        moments, divides = x.new_empty(x.shape[0], 2, dtype=torch.float32), count.float().view(1)
        vectors = (*op.vectors(losses), divides, losses, moments)
        flags = loss_kernels.with_gradient_flags(op.kind)
        row_op = _fixed(cross_entropy.WITH_GRADIENT[op.kind.arithmetic], plan)
        launch_rows(row_op, (x, dx), vectors, loss_kernels.with_gradient_numbers(op), flags)
        return losses.sum() / divides[0], dx

    return call


def run_statistics_plan(plan: Plan) -> Callable[..., Any]:
    """Runs token log-probabilities with entropy and logsumexp, (x, ids) -> all three, through a given plan."""
    flags = (("PICKS", 1), ("ENTROPY", True), ("RANK", False), ("SCALE", 0), ("KEEP_MOMENTS", False))

    def call(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        lse, entropy, picked = x.new_empty(3, x.shape[0], dtype=torch.float32).unbind()
        op, at = _fixed(row_statistics.FORWARD, plan), pointer(x)
        launch = row_statistics.prepare_statistics(op, x, lse.dtype, flags, False)
        launch(x.shape[0], (at(x),), tuple(at(v) for v in (lse, lse, entropy, ids, picked, lse)), (1, 1.0))
        return picked, entropy, lse

    return call


def planes_problem(n_cols: int, inner: int, dtype: str, *, backward: bool = False, log: bool = False) -> SpatialProblem:
    """Softmax over dimension 1 of contiguous (outer, n_cols, inner), or its backward, as allocations start."""
    tensors = [torch.empty(2, n_cols, inner, dtype=DTYPES[dtype], device="meta") for _ in range(2 + backward)]
    return spatial.problem_of(*tensors, backward=backward, log=log)


def run_planes_plan(plan: Plan, *, backward: bool = False, log: bool = False) -> Callable[..., Tensor]:
    """Runs softmax over dimension 1, x -> y, or its gradient, (dy, y) -> dx, through a given plan.

    All tensors (outer, n_cols, inner) of its calls have the layout of the first call's, except `outer`.
    """
    prepared: list[spatial.Run] = []

    def call(*inputs: Tensor) -> Tensor:
        y = inputs[-1]
        tensors = (*reversed(inputs), torch.empty_like(y))
        if not prepared:
            recipe = spatial.softmax_recipe(tensors, plan, log, backward, device_of(y))
            prepared.append(spatial.prepare(recipe, tensors))
        prepared[0](tensors)
        return tensors[-1]

    return call


def _fixed(op: RowOp, plan: Plan) -> RowOp:
    """`op` with this plan for every row."""
    return RowOp(_planner_of(plan), op.kernel, op.backward, op.log, op.alignment, op.most_warps)


@functools.cache  # a plan has one planner, so that its launch is prepared once
def _planner_of(plan: Plan) -> Callable[[Problem, Device], Plan]:
    return lambda problem, device: plan


def plan_text(plan: Plan) -> str:
    """Such as `cluster: 16 CTAs of 8 warps, 3 chunks of 2048 columns, exp twice; the row stays in ...`.

    Over another dimension than the last the second part is that of a tile of positions, or of planes.
    """
    ctas = f"{_count(plan.ctas, 'CTA')} of {_count(plan.num_warps, 'warp')}"
    holds = _held_planes_text(plan) if plan.regime.startswith("spatial") else _held_rows_text(plan)
    more = ", exp twice" * plan.recompute
    registers = f", {plan.max_registers} registers" if plan.max_registers else ""
    return f"{plan.regime}: {ctas}, {holds}{more}{registers}; {plan.why}"


def _held_rows_text(plan: Plan) -> str:
    rows = f"{plan.rows} rows a program, " if plan.rows > 1 else ""
    chunks = f"{_count(plan.chunks, 'chunk')} of {_count(plan.vectors_per_chunk * plan.vec, 'column')}"
    return rows + chunks + ", unaligned head and tail" * plan.unaligned


def _held_planes_text(plan: Plan) -> str:
    if plan.gathered:
        return f"{_count(plan.outers, 'plane')} a program, up to {_count(plan.chunks, 'column')} a thread"
    if plan.periodic:
        return f"up to {_count(plan.chunks, 'vector')} of {plan.vec} elements a thread"
    # bundles of columns are read as columns are
    of, along = ("bundle", "elements") if plan.bundle else ("column", "positions")
    chunks = f"{_count(plan.chunks, 'chunk')} of {_count(plan.vectors_per_chunk, of)} a CTA"
    last = plan.finish
    writes = f", written by {_count(last.chunks, 'chunk')} of {last.rows} {along}" * (last != plan)
    return f"tiles of {plan.rows} {along} in accesses of {_count(plan.vec, 'element')}, {chunks}{writes}"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"
