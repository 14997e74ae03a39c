"""`fused-softmax tune --shapes`: other plans than the planner's for columns of a dimension that is not the last.

A plan does not depend on `outer`, so each shape (n_cols, inner) has tensors of several sizes: a plan that is fast in
memory may be slow in the L2. All plans of a shape and size are checked as the bench checks a system, and timed in the
same rounds. The command changes no file: a person reads the results and writes a rule.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fused_softmax.lab.bench.ahead import in_processes, jobs
from fused_softmax.lab.bench.cases import Case, shaped_case
from fused_softmax.lab.bench.inputs import DTYPES, SHORT
from fused_softmax.lab.bench.session import Session
from fused_softmax.lab.bench.systems import System, systems_for
from fused_softmax.lab.plans import plan_text, planes_problem, run_planes_plan
from fused_softmax.lab.record import Record
from fused_softmax.lab.shape_candidates import candidates
from fused_softmax.launch.device import device_here, device_of
from fused_softmax.planning.types import Device, Plan

OPS = ("softmax", "softmax_backward", "log_softmax", "log_softmax_backward")
TODAY = "fused_softmax"  # the system that runs the planner's choice
SIZES = (3 * 10**6, 16 * 10**6, 8 * 10**7)  # elements of a tensor


@dataclass(frozen=True)
class Columns:
    """The columns of a softmax, or of its gradient, in tensors (outer, n_cols, inner) of any `outer`."""

    op: str
    dtype: str
    n_cols: int
    inner: int

    @property
    def log(self) -> bool:
        """Whether it is a log_softmax, or its gradient."""
        return self.op.startswith("log_")

    @property
    def backward(self) -> bool:
        """Whether it is a gradient."""
        return self.op.endswith("_backward")

    @property
    def label(self) -> str:
        """Such as `softmax_backward bf16 103x42`."""
        return f"{self.op} {SHORT[self.dtype]} {self.n_cols}x{self.inner}"

    def case(self, elements: int, reason: str) -> Case:
        """The bench's case with about so many elements, and one index of `outer` at least."""
        outer = max(1, round(elements / (self.n_cols * self.inner)))
        return shaped_case(self.op, self.dtype, outer, self.n_cols, self.inner, "", reason)


def drawn(
    count: int, seed: int, columns: tuple[int, int], positions: tuple[int, int], ops: Sequence[str],
    dtypes: Sequence[str],
) -> list[Columns]:  # fmt: skip
    """`count` different columns of a seed, both sizes log-uniform from the first of its limits to the second.

    A third each of `inner` is any number, a multiple of 4, and of 16, where the limits have some. ValueError where the
    limits have fewer than twice as many columns.
    """
    sizes = math.prod(high - low + 1 for low, high in (columns, positions))
    if 2 * count > sizes * len(ops) * len(dtypes):
        raise ValueError(f"{count} shapes are more than half of those in these limits: ask for fewer, or widen them")
    pick, found = random.Random(seed), dict[Columns, None]()
    while len(found) < count:
        n_cols, inner = (round(low * (high / low) ** pick.random()) for low, high in (columns, positions))
        even = inner // (step := pick.choice((1, 4, 16))) * step
        inner = even if even >= positions[0] else inner
        found[Columns(pick.choice(ops), pick.choice(dtypes), n_cols, inner)] = None
    return list(found)


@functools.cache
def plans_of(columns: Columns, device: Device, most: int, seed: int) -> list[Plan]:
    """The candidates of these columns, at most so many of them as the seed draws; 0: all."""
    given = columns.n_cols, columns.inner, columns.dtype
    problem = planes_problem(*given, backward=columns.backward, log=columns.log)
    return candidates(problem, device, most, seed)


def system_of(columns: Columns, number: int, plan: Plan) -> System:
    """A candidate as a system of the bench."""
    make = functools.partial(run_planes_plan, plan, backward=columns.backward, log=columns.log)
    return System(f"plan {number}", columns.op, "ours", make, over=lambda entry: make(), plan=plan_text(plan))


@dataclass(frozen=True)
class Request:
    """What is tuned: `most` candidates of each shape (0: all), as `seed` draws them, with each of `sizes` elements."""

    columns: tuple[Columns, ...]
    sizes: tuple[int, ...] = SIZES
    most: int = 0
    seed: int = 0


def run(request: Request, session: Session, device: Device, tick: Callable[[Columns], None]) -> list[Record]:
    """Check and time all plans of all columns; stops where the session stops. Calls `tick` after each of `columns`."""
    for columns in request.columns:
        plans = plans_of(columns, device, request.most, request.seed)
        today = systems_for(columns.op, (TODAY,))
        session.systems = [*today, *(system_of(columns, i, plan) for i, plan in enumerate(plans))]
        session.run([columns.case(size, f"tune, seed {request.seed}") for size in request.sizes])
        if session.head.stopped:
            break
        tick(columns)
    return session.records


# --- what the times say -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """A plan of some columns. fractions: of the ceiling, by the number of elements. gain: mean speed over today's."""

    columns: Columns
    plan: str
    fractions: dict[int, float]
    gain: float
    worst: float  # of the sizes, the least speed over today's


def outcomes(records: Iterable[Record]) -> list[list[Outcome]]:
    """For each of the columns today's plan, then the others that passed with every size, fastest first.

    Speeds over several sizes are geometric means. Columns whose plan of today was not timed are left out.
    """
    by_columns: dict[Columns, dict[str, dict[int, Record]]] = {}
    for r in records:
        if r.plan and r.outer is not None and r.inner is not None:
            columns = Columns(r.op, r.dtype, r.n_cols, r.inner)
            by_columns.setdefault(columns, {}).setdefault(r.system, {})[r.n_rows * r.n_cols] = r
    found = []
    for columns, systems in by_columns.items():
        today = _times(systems.get(TODAY, {}))
        if today is None:
            continue
        ranked = []
        for system, of_sizes in systems.items():
            times = _times(of_sizes)
            if times is not None and times.keys() == today.keys():
                speeds = [today[size] / ms for size, ms in times.items()]
                fractions = {size: r.fraction or 0.0 for size, r in of_sizes.items()}
                gain = math.prod(speeds) ** (1 / len(speeds))
                outcome = Outcome(columns, next(iter(of_sizes.values())).plan, fractions, gain, min(speeds))
                ranked.append((system != TODAY, -gain, outcome))
        found.append([outcome for *_, outcome in sorted(ranked, key=lambda r: r[:2])])
    return found


def _times(of_sizes: dict[int, Record]) -> dict[int, float] | None:
    """Milliseconds by the number of elements; None where one was not timed."""
    times = {size: r.ms for size, r in of_sizes.items()}
    return None if not times or None in times.values() else times  # type: ignore[return-value]


def lines(found: Sequence[Sequence[Outcome]], shown: int = 3) -> list[str]:
    """A paragraph for each of the columns: today's plan and the fastest others, with fractions of the ceiling."""
    text = []
    for today, *others in found:
        text.append(f"{today.columns.label}, {len(others)} other plans; fractions at {_sizes(today)} elements")
        text.append(f"  today        {_fractions(today)}  {today.plan}")
        for other in others[:shown]:
            gain = f"{other.gain:.2f} ({other.worst:.2f})"
            text.append(f"  {gain:<12} {_fractions(other)}  {other.plan}")
    return text


def _sizes(outcome: Outcome) -> str:
    return ", ".join(f"{size:.1e}" for size in outcome.fractions)


def _fractions(outcome: Outcome) -> str:
    return " ".join(f"{fraction:.2f}" for fraction in outcome.fractions.values())


# --- compiling ahead --------------------------------------------------------------------------------------------------

Job = tuple[Columns, int, int, int]  # columns, the number of a candidate, and the request's `most` and `seed`


def jobs_of(request: Request, device: Device) -> list[Job]:
    """One job for each candidate."""
    most, seed = request.most, request.seed
    return [(of, i, most, seed) for of in request.columns for i in range(len(plans_of(of, device, most, seed)))]


def compile_ahead(
    request: Request, device: Device, workers: int, tick: Callable[[], None] = lambda: None, limit: float = 300.0
) -> list[str]:
    """Compile all candidates over `workers` processes, for at most `limit` seconds; a text for each, why it failed."""
    return in_processes(_compile, jobs(jobs_of(request, device), workers), tick, limit)


def _compile(part: Sequence[Job], done: Any) -> None:
    """One worker: run each candidate once, on one index of `outer`; what fails is left for the process that times."""
    on = device_here()
    for columns, number, most, seed in part:
        failed = ""
        try:
            x = torch.zeros(1, columns.n_cols, columns.inner, dtype=DTYPES[columns.dtype], device=on)
            plan = plans_of(columns, device_of(x), most, seed)[number]
            system_of(columns, number, plan).build()(*[x] * (1 + columns.backward))
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"[:160]
        finally:
            done.put(failed)
