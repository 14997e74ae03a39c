"""`fused-softmax tune`: times the planner's candidates on this device and prints config tables for the planner.

For each dtype and width every candidate plan is compiled in workers, checked, then timed interleaved with the op's
ceiling and with the plan that the planner chooses today. The fastest becomes a config. The command changes no file: a
person reads the tables and puts them in config_tables.py, with the measurement next to them.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import torch

from fused_softmax.lab import plans
from fused_softmax.lab.bench.checking import Judge, run_poisoned
from fused_softmax.lab.bench.inputs import DTYPES, Inputs
from fused_softmax.lab.bench.ops import OPS
from fused_softmax.lab.timing import Stopwatch, interleave
from fused_softmax.planning import losses, softmax
from fused_softmax.planning.types import Device, Plan, Problem

Planner = Callable[[Problem, Device], Plan]


@dataclass(frozen=True)
class Tunable:
    """How an op of the bench runs through a given plan, the plan that it has today, and its candidates."""

    make: plans.Make
    today: Planner
    candidates: Callable[[Problem, Device], Iterable[Plan]]
    backward: bool = False
    log: bool = False

    def problem(self, n_cols: int, dtype: str) -> Problem:
        """Contiguous rows of that width, as the op's tensors start them."""
        return plans.problem_for(n_cols, dtype, backward=self.backward, log=self.log)

    def tried(self, problem: Problem, device: Device) -> list[Plan]:
        """Today's plan, then every other candidate."""
        today = self.today(problem, device)
        return [today, *(c for c in self.candidates(problem, device) if c != today)]


TUNABLE = {
    "softmax": Tunable(plans.run_plan(), softmax.plan, softmax.candidates),
    "log_softmax": Tunable(plans.run_plan(log=True), softmax.plan, softmax.candidates, log=True),
    "softmax_backward": Tunable(plans.run_backward_plan(), softmax.plan, softmax.candidates, backward=True),
    "log_softmax_backward": Tunable(
        plans.run_backward_plan(log=True), softmax.plan, softmax.candidates, backward=True, log=True
    ),
    "cross_entropy": Tunable(plans.run_loss_plan, losses.plan_loss, losses.loss_candidates),
    "token_logprobs": Tunable(plans.run_statistics_plan, losses.plan_statistics_of_one_id, losses.step_candidates),
}


@dataclass(frozen=True)
class Choice:
    """The fastest plan for a dtype and width. Fractions of the ceiling: its own, the second one's, today's plan's."""

    dtype: str
    n_cols: int
    plan: Any
    fraction: float
    runner_up: float
    today: float  # 0 where that plan failed
    tried: int
    failed: tuple[str, ...]


def choose(
    op: str,
    inputs: Inputs,
    candidates: Iterable[Any],
    stopwatch: Stopwatch,
    seconds: float = 0.05,
    make: plans.Make | None = None,
) -> Choice | None:
    """Check and time candidate plans, today's first, on an op's inputs; None when no candidate passed."""
    from fused_softmax.lab.bench.ceilings import ceiling

    judge, build = Judge(OPS[op], inputs), make or TUNABLE[op].make
    n_rows, n_cols = inputs[0].shape
    run, ceiling_bytes = ceiling(OPS[op].ceiling, inputs[0])
    right: dict[str, Any] = {}
    calls: dict[str, Callable[[], Any]] = {"ceiling": lambda: run(*inputs)}
    failed = []
    for i, plan in enumerate(candidates):
        call = build(plan)
        try:
            verdict = judge.judge(run_poisoned(call, inputs))
        except Exception as error:
            failed.append(f"{plan}: {type(error).__name__}")
            continue
        if not verdict.ok:
            failed.append(f"{plan}: wrong")
            continue
        name = str(i)
        right[name], calls[name] = plan, (lambda call=call: call(*inputs))  # type: ignore[misc]
    if not right:
        return None
    times = interleave(calls, stopwatch, seconds)
    ranked = sorted(right, key=lambda name: times[name].ms)
    of_ceiling = OPS[op].bytes_moved(n_rows, n_cols, inputs[0].element_size()) / ceiling_bytes
    fraction = {name: of_ceiling * times["ceiling"].ms / times[name].ms for name in ranked}
    return Choice(
        dtype=str(inputs[0].dtype).removeprefix("torch."),
        n_cols=n_cols,
        plan=right[ranked[0]],
        fraction=fraction[ranked[0]],
        runner_up=fraction[ranked[1]] if len(ranked) > 1 else 0.0,
        today=fraction.get("0", 0.0),
        tried=len(right) + len(failed),
        failed=tuple(failed),
    )


def _compile(op: str, dtype: str, work: Sequence[tuple[int, Plan]]) -> None:
    """Run plans once on a few rows, in a worker: the kernels are then in Triton's cache on disk."""
    for n_cols, plan in work:
        try:
            TUNABLE[op].make(plan)(*OPS[op].inputs(2, n_cols, DTYPES[dtype], torch.device("cuda"), 0))
        except Exception:
            continue  # the process that times says which ones fail


def compile_ahead(op: str, dtype: str, work: Sequence[tuple[int, Plan]], workers: int) -> None:
    """Compile all plans over `workers` processes. A compiler that ends its process ends only what that one had left."""
    context, size = multiprocessing.get_context("spawn"), 6
    with ProcessPoolExecutor(workers, context) as pool:
        parts = [pool.submit(_compile, op, dtype, work[i : i + size]) for i in range(0, len(work), size)]
        for part in parts:
            try:
                part.result()
            except BrokenProcessPool:
                return


def tune(
    op: str,
    dtypes: Sequence[str],
    widths: Sequence[int],
    device: torch.device,
    elements: int,
    tick: Callable[[Choice | None], None] = lambda choice: None,
    workers: int = 0,
) -> list[Choice]:
    """Choose for each dtype and width on this device, a GPU."""
    from fused_softmax.lab.timing import EventStopwatch
    from fused_softmax.launch.device import Unsupported, describe

    described = describe(device)
    if isinstance(described, Unsupported):
        raise ValueError(str(described))
    found, stopwatch, tunable = [], EventStopwatch(device), TUNABLE[op]
    for dtype in dtypes:
        tried = {n_cols: tunable.tried(tunable.problem(n_cols, dtype), described) for n_cols in widths}
        if workers:
            compile_ahead(op, dtype, [(n_cols, plan) for n_cols, some in tried.items() for plan in some], workers)
        for n_cols, candidates in tried.items():
            inputs = OPS[op].inputs(max(1, elements // n_cols), n_cols, DTYPES[dtype], device, 0)
            choice = choose(op, inputs, candidates, stopwatch)
            tick(choice)
            if choice is not None:
                found.append(choice)
    return found


def as_config_table(choices: Sequence[Choice], device_name: str) -> str:
    """The choices as config_tables.py has them: for each element size, a tuple of configs in rising width.

    Neighboring widths with the same numbers share a config. Widths where the warp regime wins have no config, because
    the planner tries that regime first.
    """
    lines = [
        f"# measured on {device_name} by `fused-softmax tune`: fraction of the ceiling (higher is better), that of the",
        "# runner-up, that of today's plan, and the number of candidates",
    ]
    lines.append("CONFIG_TABLE = {")
    for itemsize in sorted({DTYPES[c.dtype].itemsize for c in choices}):
        lines.append(f"    {itemsize}: (")
        mine = sorted((c for c in choices if DTYPES[c.dtype].itemsize == itemsize), key=lambda c: c.n_cols)
        for i, choice in enumerate(mine):
            plan, note = (
                choice.plan,
                f"# {choice.fraction:.3f}, {choice.runner_up:.3f}, {choice.today:.3f}, {choice.tried}",
            )
            if plan.regime in ("warp", "two_pass"):
                lines.append(f"        {note}: {plan.regime} at {choice.n_cols}")
            elif i + 1 < len(mine) and _numbers(mine[i + 1].plan) == _numbers(plan):
                lines.append(f"        {note}: the same config at {choice.n_cols}")
            else:
                recompute = ", True" if plan.recompute and itemsize == 2 else ""
                lines.append(
                    f"        KernelConfig({choice.n_cols}, {plan.ctas}, {plan.num_warps}{recompute}),  {note}"
                )
        lines.append("    ),")
    return "\n".join([*lines, "}"])


def _numbers(plan: Any) -> tuple[Any, ...]:
    return plan.regime, plan.ctas, plan.num_warps, plan.recompute
