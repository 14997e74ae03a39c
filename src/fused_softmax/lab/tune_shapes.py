"""`fused-softmax tune --shapes`: other plans than the planner's for columns of a dimension that is not the last.

A plan does not depend on `outer`, so each workload has tensors of several sizes: a plan that is fast where memory holds
them may be slow where the L2 does. All plans of a workload and size are checked as the bench checks a system, and timed
in the same rounds. The command changes no table: a person reads the results and writes a rule.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fused_softmax.lab.bench.ahead import LIMIT, in_processes, jobs
from fused_softmax.lab.bench.cases import Case, shape_text, shaped_case
from fused_softmax.lab.bench.inputs import DTYPES, SHORT
from fused_softmax.lab.bench.report import plural
from fused_softmax.lab.bench.session import Session
from fused_softmax.lab.bench.systems import System, systems_for
from fused_softmax.lab.plans import plan_text, planes_problem, run_planes_plan
from fused_softmax.lab.record import Record
from fused_softmax.lab.shape_candidates import candidates
from fused_softmax.lab.tune import TUNABLE
from fused_softmax.launch.device import device_here
from fused_softmax.planning.types import Device, Plan

OPS = ("softmax", "softmax_backward", "log_softmax", "log_softmax_backward")  # of TUNABLE
PLANNERS = "fused_softmax"  # the system that runs the planner's plan
SIZES = (3_000_000, 16_000_000, 80_000_000)  # elements of a tensor
MOST_ELEMENTS = 2**31  # of one index of `outer`, below


@dataclass(frozen=True)
class Workload:
    """An op over dimension 1 of tensors (outer, n_cols, inner) of any `outer`."""

    op: str
    dtype: str
    n_cols: int
    inner: int

    def __post_init__(self) -> None:
        """ValueError for planes that are too large."""
        _expect_countable(self.n_cols, self.inner)

    @property
    def log(self) -> bool:
        """Whether it is a log_softmax, or its gradient."""
        return TUNABLE[self.op].log

    @property
    def backward(self) -> bool:
        """Whether it is a gradient."""
        return TUNABLE[self.op].backward

    @property
    def label(self) -> str:
        """Such as `softmax_backward bf16 103x42`."""
        return f"{self.op} {SHORT[self.dtype]} {self.n_cols}x{self.inner}"

    def cases(self, sizes: Iterable[int], reason: str) -> list[Case]:
        """The bench's cases with about so many elements, and one index of `outer` at least, each once."""
        outers = dict.fromkeys(max(1, round(size / (self.n_cols * self.inner))) for size in sizes)
        return [shaped_case(self.op, self.dtype, o, self.n_cols, self.inner, "", reason) for o in outers]


def _expect_countable(n_cols: int, inner: int) -> None:
    if n_cols * inner >= MOST_ELEMENTS:
        raise ValueError(f"{n_cols}x{inner} are 2^31 elements or more: give fewer columns or positions")


def drawn(
    count: int, seed: int, columns: tuple[int, int], positions: tuple[int, int], ops: Sequence[str],
    dtypes: Sequence[str],
) -> list[Workload]:  # fmt: skip
    """`count` different workloads of a seed, n_cols and inner log-uniform from the first of its limits to the second.

    `inner` stays as it is drawn, or is rounded down to a multiple of 4 or of 16, a third each. ValueError where the
    limits have fewer than twice as many workloads, or planes of MOST_ELEMENTS.
    """
    _expect_countable(columns[1], positions[1])
    sizes = math.prod(high - low + 1 for low, high in (columns, positions))
    if 2 * count > sizes * len(set(ops)) * len(set(dtypes)):
        raise ValueError(f"{count} shapes are more than half of those in these limits: ask for fewer, or widen them")
    pick, found = random.Random(seed), dict[Workload, None]()
    while len(found) < count:
        n_cols, inner = (round(low * (high / low) ** pick.random()) for low, high in (columns, positions))
        even = inner // (step := pick.choice((1, 4, 16))) * step
        inner = even if even >= positions[0] else inner
        found[Workload(pick.choice(ops), pick.choice(dtypes), n_cols, inner)] = None
    return list(found)


@dataclass(frozen=True)
class Request:
    """What is tuned: `most` candidates of each workload (0: all) that `seed` draws, with each of `sizes` elements."""

    workloads: tuple[Workload, ...]
    sizes: tuple[int, ...] = SIZES
    most: int = 0
    seed: int = 0

    def plans(self, workload: Workload, device: Device) -> list[Plan]:
        """The candidates of a workload."""
        given = workload.n_cols, workload.inner, workload.dtype
        problem = planes_problem(*given, backward=workload.backward, log=workload.log)
        return candidates(problem, device, self.most, self.seed)


def system_of(workload: Workload, number: int, plan: Plan) -> System:
    """A candidate as a system of the bench."""
    make = functools.partial(run_planes_plan, plan, backward=workload.backward, log=workload.log)
    return System(f"plan {number}", workload.op, "ours", make, over=lambda entry: make(), plan=plan_text(plan))


def run(
    request: Request, session: Session, device: Device, tick: Callable[[Workload], None] = lambda workload: None
) -> list[Record]:
    """Check and time all plans of all workloads; calls `tick` after each workload. Returns the session's records."""

    def cases() -> Iterator[Case]:
        for workload in request.workloads:
            others = (system_of(workload, i, plan) for i, plan in enumerate(request.plans(workload, device)))
            session.systems = [*systems_for(workload.op, (PLANNERS,)), *others]
            yield from workload.cases(request.sizes, f"tune, seed {request.seed}")
            tick(workload)

    return session.run(cases())


# --- what the times say -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """A plan of a workload, in words. fractions: of the ceiling, by the number of elements.

    gain: geometric mean of its speeds over those of the planner's plan. worst: the least of these speeds.
    """

    workload: Workload
    plan: str
    fractions: dict[int, float]
    gain: float
    worst: float


def outcomes(records: Iterable[Record]) -> list[list[Outcome]]:
    """For each workload the planner's plan, then the others that were timed with every size, fastest first.

    A workload has no entry where the planner's plan was not timed with every size.
    """
    by_workload: dict[Workload, dict[str, dict[int, Record]]] = {}
    for r in records:
        if r.plan and r.outer is not None and r.inner is not None:
            workload = Workload(r.op, r.dtype, r.n_cols, r.inner)
            by_workload.setdefault(workload, {}).setdefault(r.system, {})[r.n_rows * r.n_cols] = r
    found = []
    for workload, systems in by_workload.items():
        planners = _times(systems.get(PLANNERS, {}))
        if planners is None:
            continue
        ranked = []
        for system, of_sizes in systems.items():
            times = _times(of_sizes)
            if times is not None and times.keys() == planners.keys():
                speeds = [planners[size] / ms for size, ms in times.items()]
                fractions = {size: r.fraction or 0.0 for size, r in of_sizes.items()}
                gain = math.prod(speeds) ** (1 / len(speeds))
                outcome = Outcome(workload, next(iter(of_sizes.values())).plan, fractions, gain, min(speeds))
                ranked.append((system != PLANNERS, -gain, outcome))
        found.append([outcome for *_, outcome in sorted(ranked, key=lambda r: r[:2])])
    return found


def _times(of_sizes: dict[int, Record]) -> dict[int, float] | None:
    """Milliseconds by the number of elements; None where one was not timed."""
    times = {size: r.ms for size, r in of_sizes.items()}
    return None if not times or None in times.values() else times  # type: ignore[return-value]


def lines(found: Sequence[Sequence[Outcome]], shown: int = 3) -> list[str]:
    """A paragraph for each workload: the planner's plan and the fastest others, with fractions of the ceiling."""
    text = []
    for planners, *others in found:
        sizes = ", ".join(f"{size:.1e}" for size in planners.fractions)
        text.append(f"{planners.workload.label}, {plural(len(others), 'other plan')}; fractions at {sizes} elements")
        text.append(f"  the planner's  {_fractions(planners)}  {planners.plan}")
        for other in others[:shown]:
            gain = f"{other.gain:.2f} ({other.worst:.2f})"
            text.append(f"  {gain:<14} {_fractions(other)}  {other.plan}")
    return text


def _fractions(outcome: Outcome) -> str:
    return " ".join(f"{fraction:.2f}" for fraction in outcome.fractions.values())


def failures(request: Request, records: Iterable[Record], found: Iterable[Sequence[Outcome]]) -> list[str]:
    """A line for each plan that was not timed, and for each workload that has no outcome in `found`."""
    untimed = [r for r in records if r.plan and r.ms is None]
    text = [f"{r.op} {SHORT[r.dtype]} {shape_text(r)}, {r.system}: {r.status} {r.note}; {r.plan}" for r in untimed]
    with_outcome = {planners.workload for planners, *_ in found}
    return text + [f"{workload.label}: no times" for workload in request.workloads if workload not in with_outcome]


# --- compiling ahead --------------------------------------------------------------------------------------------------

Job = tuple[Workload, Plan]
SECONDS = 4.0  # for a job, in which a worker compiles up to three kernels


def jobs_of(request: Request, device: Device) -> list[Job]:
    """One job for each candidate."""
    return [(workload, plan) for workload in request.workloads for plan in request.plans(workload, device)]


def compile_ahead(wanted: Sequence[Job], workers: int, tick: Callable[[], None] = lambda: None) -> list[str]:
    """Run each job once over `workers` processes. Returns a text for each: empty, or why it failed.

    Workers end after SECONDS for each job of one. The process that times compiles what they left.
    """
    parts = jobs(wanted, workers)
    limit = LIMIT + SECONDS * max(map(len, parts), default=0)
    return in_processes(_compile, parts, tick, limit)


def _compile(part: Sequence[Job], done: Any) -> None:
    """One worker: run each candidate on one index of `outer`."""
    on = device_here()
    for workload, plan in part:
        failed = ""
        try:
            x = torch.zeros(1, workload.n_cols, workload.inner, dtype=DTYPES[workload.dtype], device=on)
            call = run_planes_plan(plan, backward=workload.backward, log=workload.log)
            call(*[x] * (1 + workload.backward))
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"[:160]
        finally:
            done.put(failed)
