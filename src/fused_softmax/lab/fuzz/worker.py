"""A process that runs draw classes, judges their cases and shrinks what fails."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fused_softmax.device import interpreting

from . import coverage, interpreter, ways
from .draw import Budget, Case, DrawClass, draw_cases
from .judge import evaluate, resolve
from .shrink import shrink

AT_ONCE = 16  # cases that wait for the device together
SHRINK_SECONDS = 20.0


@dataclass(frozen=True)
class Unit:
    """A draw class and how many cases of each way are drawn from it."""

    of: DrawClass
    ways: tuple[tuple[str, int], ...]
    budget: Budget
    device: str
    careful: bool = False  # each case is announced first: it may end the process


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
    if device == "cpu":
        # torch.empty gives NaN; the GPU's fast path does not run under this mode, so memory is poisoned otherwise there
        torch.use_deterministic_algorithms(True, warn_only=True)


def run_unit(unit: Unit, announce: Callable[[str], Any] | None = None) -> Report:
    """Run every way of a class; `announce` is told of each case first where the unit is careful."""
    report = Report()
    at_once = 1 if unit.careful or unit.device == "cpu" else AT_ONCE
    for way, count in unit.ways:
        start = time.perf_counter()
        waiting, cell = [], (unit.of.op, way, unit.of.dtype)
        for case in draw_cases(unit.of, way, count, unit.budget):
            if announce is not None and unit.careful:
                announce(case.to_json())
            waiting.append(evaluate(case, unit.device))
            if len(waiting) >= at_once:
                _settle(report, waiting, cell, unit)
                waiting = []
        _settle(report, waiting, cell, unit)
        report.seconds[cell] = report.seconds.get(cell, 0.0) + time.perf_counter() - start
    ways.forget_compiled()
    report.reached = set(coverage.reached)
    return report


def _settle(report: Report, waiting: list[Any], cell: tuple[str, str, str], unit: Unit) -> None:
    for outcome, found in zip(waiting, resolve(waiting), strict=True):
        report.cases[cell] += 1
        report.errors[cell] += bool(outcome.error)
        if found:
            report.wrong[cell] += 1
            report.failures.append(_failure(outcome.case, found, unit))


def _failure(case: Case, found: list[str], unit: Unit) -> Failure:
    failure = Failure(case.to_json(), found, case.to_json())
    _shown[failure.signature] += 1
    if _shown[failure.signature] > 1 or unit.careful:
        return failure
    first = found[0].split(":")[0][:40]

    def fails(smaller: Case) -> bool:
        return any(p.startswith(first) for p in evaluate(smaller, unit.device).found())

    smallest = shrink(case, fails, SHRINK_SECONDS)
    outcome = evaluate(smallest, unit.device)
    failure.smallest, failure.excess = smallest.to_json(), outcome.largest_excess()
    return failure
