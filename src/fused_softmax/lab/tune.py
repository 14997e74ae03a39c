"""`fused-softmax tune`: times the planner's candidates on this device and prints config tables for the planner.

For each dtype and width every candidate plan is checked, then timed interleaved with the op's ceiling. The fastest
becomes a config. The command changes no file: a person reads the tables and puts them in config_tables.py, with the
measurement next to them. Every candidate is a kernel to compile, so expect minutes, and ask for few widths at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fused_softmax.lab.bench.checking import Judge, run_poisoned
from fused_softmax.lab.bench.inputs import DTYPES, Inputs
from fused_softmax.lab.bench.ops import OPS
from fused_softmax.lab.bench.timing import Stopwatch, interleave
from fused_softmax.lab.plans import problem_for, run_backward_plan, run_plan

TUNABLE = {"softmax": run_plan, "softmax_backward": run_backward_plan}


@dataclass(frozen=True)
class Choice:
    """The fastest plan for a dtype and width, its fraction of the ceiling, and the second one's."""

    dtype: str
    n_cols: int
    plan: Any
    fraction: float
    runner_up: float
    tried: int
    failed: tuple[str, ...]


Make = Callable[[Any], Callable[..., Any]]  # a plan -> a callable over the op's inputs that returns a fresh output


def choose(
    op: str,
    inputs: Inputs,
    candidates: Iterable[Any],
    stopwatch: Stopwatch,
    seconds: float = 0.05,
    make: Make | None = None,
) -> Choice | None:
    """Check and time candidate plans on an op's inputs, rows (n_rows, n_cols); None when no candidate passed."""
    from fused_softmax.lab.bench.ceilings import ceiling

    judge, build = Judge(OPS[op], inputs), make or TUNABLE[op]
    n_rows, n_cols = inputs[0].shape
    run, ceiling_bytes = ceiling(OPS[op].ceiling, inputs[0])
    plans: dict[str, Any] = {}
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
        plans[name], calls[name] = plan, (lambda call=call: call(*inputs))  # type: ignore[misc]
    if not plans:
        return None
    times = interleave(calls, stopwatch, seconds)
    ranked = sorted(plans, key=lambda name: times[name].ms)
    of_ceiling = OPS[op].bytes_moved(n_rows, n_cols, inputs[0].element_size()) / ceiling_bytes
    fractions = [of_ceiling * times["ceiling"].ms / times[name].ms for name in ranked]
    return Choice(
        dtype=str(inputs[0].dtype).removeprefix("torch."),
        n_cols=n_cols,
        plan=plans[ranked[0]],
        fraction=fractions[0],
        runner_up=fractions[1] if len(fractions) > 1 else 0.0,
        tried=len(plans) + len(failed),
        failed=tuple(failed),
    )


def tune(
    op: str,
    dtypes: Sequence[str],
    widths: Sequence[int],
    device: torch.device,
    elements: int,
    candidates: Callable[[Any, Any], Iterable[Any]],
    tick: Callable[[Choice | None], None] = lambda choice: None,
) -> list[Choice]:
    """Choose for each dtype and width on this device; `candidates(problem, device)` comes from the planner."""
    from fused_softmax.lab.bench.timing import EventStopwatch
    from fused_softmax.launch.device import Unsupported, describe

    described = describe(device)
    if isinstance(described, Unsupported):
        raise ValueError(str(described))
    found, stopwatch = [], EventStopwatch(device)
    for dtype in dtypes:
        for n_cols in widths:
            inputs = OPS[op].inputs(max(1, elements // n_cols), n_cols, DTYPES[dtype], device, 0)
            problem = problem_for(n_cols, dtype, backward=op == "softmax_backward")
            choice = choose(op, inputs, candidates(problem, described), stopwatch)
            tick(choice)
            if choice is not None:
                found.append(choice)
    return found


def as_config_table(choices: Sequence[Choice], device_name: str) -> str:
    """The choices as config_tables.py has them: for each element size, a tuple of configs in rising width.

    Neighboring widths with the same numbers share a config. Widths where the warp regime wins have no config, because
    the planner tries that regime first.
    """
    lines = [f"# measured on {device_name} by `fused-softmax tune`: fraction of the ceiling, runner-up, candidates"]
    lines.append("CONFIG_TABLE = {")
    for itemsize in sorted({DTYPES[c.dtype].itemsize for c in choices}):
        lines.append(f"    {itemsize}: (")
        mine = sorted((c for c in choices if DTYPES[c.dtype].itemsize == itemsize), key=lambda c: c.n_cols)
        for i, choice in enumerate(mine):
            plan, note = choice.plan, f"# {choice.fraction:.3f}, {choice.runner_up:.3f}, {choice.tried}"
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
