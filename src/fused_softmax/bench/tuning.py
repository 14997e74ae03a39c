"""`fused-softmax tune`: time the planner's candidates on this device and print the table that the planner would read.

For each dtype and width every candidate plan is checked, then timed interleaved with a copy; the fastest becomes a row
of a tuple. Nothing is changed by it: a person reads the table, and puts it in plan.py with the measurement beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fused_softmax.bench.checking import Judge, run_poisoned
from fused_softmax.bench.ops import DTYPES, OPS, rows_of_logits
from fused_softmax.bench.plans import problem_for, run_plan
from fused_softmax.bench.timing import Stopwatch, interleave


@dataclass(frozen=True)
class Choice:
    """The fastest plan for a dtype and width, its fraction of copy, and how far behind the second one was."""

    dtype: str
    n_cols: int
    plan: Any
    fraction: float
    runner_up: float
    tried: int
    failed: tuple[str, ...]


Make = Callable[[Any], Callable[..., Any]]  # a plan -> a callable over x that returns a fresh output


def choose(
    x: torch.Tensor, candidates: Iterable[Any], stopwatch: Stopwatch, seconds: float = 0.05, make: Make = run_plan
) -> Choice | None:
    """Check and time candidate plans on x (n_rows, n_cols); None when no candidate passed."""
    judge, out = Judge(OPS["softmax"], (x,)), torch.empty_like(x)
    plans: dict[str, Any] = {}
    calls: dict[str, Callable[[], Any]] = {"copy": lambda: out.copy_(x)}
    failed = []
    for i, plan in enumerate(candidates):
        call = make(plan)
        try:
            verdict = judge.judge(run_poisoned(call, (x,)))
        except Exception as error:
            failed.append(f"{plan}: {type(error).__name__}")
            continue
        if not verdict.ok:
            failed.append(f"{plan}: wrong")
            continue
        name = str(i)
        plans[name], calls[name] = plan, (lambda call=call: call(x))  # type: ignore[misc]
    if not plans:
        return None
    times = interleave(calls, stopwatch, seconds)
    ranked = sorted(plans, key=lambda name: times[name].ms)
    fractions = [times["copy"].ms / times[name].ms for name in ranked]
    return Choice(
        dtype=str(x.dtype).removeprefix("torch."),
        n_cols=x.shape[1],
        plan=plans[ranked[0]],
        fraction=fractions[0],
        runner_up=fractions[1] if len(fractions) > 1 else 0.0,
        tried=len(plans) + len(failed),
        failed=tuple(failed),
    )


def tune(
    dtypes: Sequence[str],
    widths: Sequence[int],
    device: torch.device,
    elements: int,
    candidates: Callable[[Any, Any], Iterable[Any]],
    tick: Callable[[Choice | None], None] = lambda choice: None,
) -> list[Choice]:
    """Choose for each dtype and width on this device; `candidates(problem, device)` comes from the planner."""
    from fused_softmax.bench.timing import EventStopwatch
    from fused_softmax.device import Unsupported, describe

    described = describe(device)
    if isinstance(described, Unsupported):
        raise ValueError(str(described))
    found, stopwatch = [], EventStopwatch(device)
    for dtype in dtypes:
        for n_cols in widths:
            x = rows_of_logits(max(1, elements // n_cols), n_cols, DTYPES[dtype], device)
            choice = choose(x, candidates(problem_for(n_cols, dtype), described), stopwatch)
            tick(choice)
            if choice is not None:
                found.append(choice)
    return found


def as_table(choices: Sequence[Choice], device_name: str) -> str:
    """The planner's table as Python: one tuple a line, the measurement as its comment."""
    about = f"# measured on {device_name} by `fused-softmax tune`: fraction of copy, runner-up, candidates"
    lines = [about, "TUNED = ("]
    for c in choices:
        plan = {name: value for name, value in asdict(c.plan).items() if name != "why"}
        fields = ", ".join(f"{name}={value!r}" for name, value in plan.items())
        note = f"# {c.fraction:.3f}, {c.runner_up:.3f}, {c.tried}"
        lines.append(f"    ({c.dtype!r}, {c.n_cols}, dict({fields})),  {note}")
    return "\n".join([*lines, ")"])
