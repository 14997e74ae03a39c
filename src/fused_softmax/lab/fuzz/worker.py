"""What a fuzz process does: run the cases of draw classes and judge them; make a failing case smaller."""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fused_softmax.lab.timing import freeze
from fused_softmax.launch.device import interpreting

from . import coverage, interpreter, ways
from .draw import Budget, Case, DrawClass, draw_cases
from .judge import Outcome, evaluate, resolve
from .shrink import shrink

AT_ONCE = 16  # cases that wait for the device together


@dataclass(frozen=True)
class Unit:
    """A draw class and how many cases of each way are drawn from it."""

    of: DrawClass
    ways: tuple[tuple[str, int], ...]
    budget: Budget
    device: str
    careful: bool = False  # each case is announced first: it may end the process
    end: float = math.inf  # time.monotonic() after which no case is begun

    def without_first_way(self) -> Unit:
        return replace(self, ways=self.ways[1:])


@dataclass
class Failure:
    """A case that is wrong, as it was drawn and as small as it was made."""

    case: str
    problems: list[str]
    smallest: str
    excess: str = ""

    @property
    def signature(self) -> tuple[str, ...]:
        case = Case.from_json(self.case)
        return (case.op, case.way, *sorted(p.split(":")[0][:60] for p in self.problems))


@dataclass
class Report:
    """What a unit gave: per cell cases, wrong and seconds; the failures; what was reached."""

    cases: Counter = field(default_factory=Counter)
    wrong: Counter = field(default_factory=Counter)
    seconds: dict[tuple[str, str, str], float] = field(default_factory=dict)
    errors: Counter = field(default_factory=Counter)  # errors that torch has, and ours
    failures: list[Failure] = field(default_factory=list)
    reached: set[tuple[str, str]] = field(default_factory=set)


@dataclass(frozen=True)
class Shrinking:
    """A failure that is to be made smaller, for `seconds` at most."""

    failure: Failure
    device: str
    seconds: float
    end: float = math.inf


Task = Unit | Shrinking


class Lost(Exception):
    """A CUDA graph's capture failed: what follows in this process may fail for that reason alone."""


_shown: Counter = Counter()


def prepare(device: str) -> None:
    """Once in a process: one thread, poisoned memory, counted launches."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    # torch says with every call that an operator has no vmap rule of its own
    getattr(torch._C._functorch, "_set_vmap_fallback_warning_enabled", bool)(False)
    coverage.install()
    if interpreting():
        interpreter.patch_once()
    freeze()  # a CUDA graph's capture collects garbage first, which takes long among all that was imported
    if device == "cpu":
        # torch.empty gives NaN; the GPU's fast path does not run under this mode, so memory is poisoned otherwise there
        torch.use_deterministic_algorithms(True, warn_only=True)


def perform(task: Task, announce: Callable[[str], Any] | None) -> Iterator[Report | Failure]:
    """Do a task: a report for each way of a unit, or the failure made smaller."""
    if isinstance(task, Shrinking):
        yield smaller(task)
        if Case.from_json(task.failure.case).way == "cuda_graph" and announce is not None:
            raise Lost  # captures failed in this process
    else:
        yield from run_unit(task, announce)


def run_unit(unit: Unit, announce: Callable[[str], Any] | None = None) -> Iterator[Report]:
    """Run a class, with a report for each way; `announce` is told of each case first where the unit is careful."""
    at_once = 1 if unit.careful or unit.device == "cpu" else AT_ONCE
    for way, count in unit.ways:
        report, start = Report(), time.perf_counter()
        waiting, cell, lost = [], (unit.of.op, way, unit.of.dtype), False
        for case in draw_cases(unit.of, way, count, unit.budget):
            if time.monotonic() > unit.end:
                break
            if announce is not None and unit.careful:
                announce(case.to_json())
            waiting.append(evaluate(case, unit.device))
            lost = lost or waiting[-1].lost
            if lost:
                break
            if len(waiting) >= at_once:
                _settle(report, waiting, cell)
                waiting = []
        _settle(report, waiting, cell)
        report.seconds[cell] = report.seconds.get(cell, 0.0) + time.perf_counter() - start
        report.reached = set(coverage.reached)
        yield report
        if lost:
            raise Lost
    ways.forget_compiled()


def _settle(report: Report, waiting: list[Any], cell: tuple[str, str, str]) -> None:
    for outcome, found in zip(waiting, resolve(waiting), strict=True):
        report.cases[cell] += 1
        report.errors[cell] += bool(outcome.error)
        if found:
            report.wrong[cell] += 1
            report.failures.append(_failure(outcome, found))


def _failure(outcome: Outcome, found: list[str]) -> Failure:
    text = outcome.case.to_json()
    failure = Failure(text, found, text)
    _shown[failure.signature] += 1
    if _shown[failure.signature] == 1:
        failure.excess = outcome.largest_excess()
    return failure


def smaller(task: Shrinking) -> Failure:
    """The failure with the smallest case that was found to fail in the same way."""
    failure, first = task.failure, task.failure.problems[0].split(":")[0][:40]

    def fails(case: Case) -> bool:
        return any(p.startswith(first) for p in evaluate(case, task.device).found())

    smallest = shrink(Case.from_json(failure.case), fails, min(task.seconds, task.end - time.monotonic()))
    if smallest.to_json() == failure.case:
        return failure
    return replace(failure, smallest=smallest.to_json(), excess=evaluate(smallest, task.device).largest_excess())
