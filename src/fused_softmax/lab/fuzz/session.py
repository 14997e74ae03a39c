"""A fuzz run: which classes are drawn, for how long, what is printed and recorded."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fused_softmax.lab.registry import OPS

from . import record
from .draw import DTYPES, Budget, Case
from .huge import run_huge
from .isolated import Isolated
from .pool import Pool
from .program import program
from .request import Request, lacking, units
from .worker import Failure, Report, Shrinking, Unit

ROUNDS = 3  # cases that a killed process, or a unit that was given up, has not run are drawn again
CLASSES_OF_A_ROUND = 100_000
# after drawing: how long failures are made smaller, as a part of a run's seconds, for each kind and where no seconds
# are given; and how many kinds are
SHRINK_PART = 0.15
SHRINK_SECONDS = 5.0
SHRINK_UNLIMITED = 60.0
SHRINK_KINDS = 60


@dataclass
class Findings(Report):
    """What a run gave, summed over its units."""

    interrupted: bool = False
    known: Counter = field(default_factory=Counter)  # cases that the record had before the run

    def add(self, report: Report) -> None:
        for name in ("cases", "wrong", "errors"):
            getattr(self, name).update(getattr(report, name))
        for cell, seconds in report.seconds.items():
            self.seconds[cell] = self.seconds.get(cell, 0.0) + seconds
        self.failures += report.failures
        self.reached |= report.reached

    @property
    def distinct(self) -> list[Failure]:
        """One failure of each kind: the smallest."""
        found: dict[tuple[str, ...], Failure] = {}
        for failure in self.failures:
            known = found.setdefault(failure.signature, failure)
            if Case.from_json(failure.smallest).numel < Case.from_json(known.smallest).numel:
                found[failure.signature] = failure
        return list(found.values())

    def replace(self, smaller: Failure) -> None:
        """Put a failure that was made smaller in the place of the one that was drawn."""
        self.failures = [smaller if f.case == smaller.case else f for f in self.failures]

    @property
    def counts(self) -> Counter:
        """How many cases are wrong, by op, way, dtype and problem; a case with two problems counts for each."""
        found: Counter = Counter()
        for failure in self.failures:
            case = Case.from_json(failure.case)
            for problem in failure.problems:
                found[case.op, case.way, case.dtype, problem.split("\n")[0][:100]] += 1
        return found


def run(request: Request, console: Console) -> Findings:
    """Draw and judge; write the record; make smaller what failed; print it, the table, and what was not reached.

    A run of `seconds` ends after 1.2 of them and some 15 more. An interrupt or SIGTERM ends the drawing, and the rest
    follows, except the shrinking.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    budget = Budget() if device == "cuda" else Budget.interpreted()
    seconds = request.seconds
    if seconds is None and request.cases is None and request.per_cell is None:
        seconds = 60.0
    start = time.monotonic()
    known = record.read(request.record) if request.record is not None else None
    findings = Findings(known=record.counted(known))
    handler = _terminates_as_an_interrupt()
    pool = Pool(request.workers, device)
    isolated = None
    if device == "cuda" and "cross_entropy" in (request.ops or OPS) and not request.columns:
        isolated = Isolated(request.seed)
    try:
        try:
            _draw(request, findings, pool, budget, start, seconds, console)
            if isolated is not None:
                findings.add(isolated.report(300.0 if seconds is None else 5.0))
            if request.huge and device == "cuda":
                findings.add(run_huge(request.ops or tuple(OPS), request.seed))
        except KeyboardInterrupt:
            findings.interrupted = True
        if request.record is not None:
            record.write(request.record, request, findings, known)
        if not findings.interrupted:
            try:
                _shrink(findings, pool, SHRINK_UNLIMITED if seconds is None else SHRINK_PART * seconds)
            except KeyboardInterrupt:
                findings.interrupted = True
    finally:
        pool.close()
        if isolated is not None:
            isolated.stop()
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)
    for failure in findings.distinct:
        show(failure, console)
    if request.record is not None:
        record.write(request.record, request, findings, known)
        console.print(f"recorded in {request.record}", markup=False)
    summarize(request, findings, time.monotonic() - start, console)
    return findings


def _draw(
    request: Request, findings: Findings, pool: Pool, budget: Budget, start: float, seconds: float | None,
    console: Console,
) -> None:  # fmt: skip
    """Run units until the end, adding what they give; each kind of failure is named when it is first seen."""
    end = math.inf if seconds is None else start + seconds
    shown, turn = set(), 0

    def until_the_first() -> Iterator[Unit]:
        for unit in units(
            request, pool.device, budget, end, findings.known + findings.cases, CLASSES_OF_A_ROUND * turn
        ):
            if request.stop_at_first and findings.failures:
                return
            yield unit

    def reports() -> Iterator[Report | Failure]:
        nonlocal turn
        yield from pool.run(until_the_first(), None if seconds is None else end)
        stopped = request.stop_at_first and findings.failures
        while turn < ROUNDS - 1 and not stopped and lacking(request, pool.device, findings.known + findings.cases):
            turn += 1
            yield from pool.run(until_the_first(), None if seconds is None else end)

    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("fuzzing", total=seconds)
        for report in reports():
            assert isinstance(report, Report)
            findings.add(report)
            elapsed = time.monotonic() - start
            progress.update(
                task, completed=elapsed if seconds else None,
                description=f"{findings.cases.total()} cases, {findings.wrong.total()} wrong",
            )  # fmt: skip
            for failure in report.failures:
                if failure.signature not in shown:
                    shown.add(failure.signature)
                    console.print("\n".join(described(failure)), markup=False, highlight=False, soft_wrap=True)


def _shrink(findings: Findings, pool: Pool, seconds: float) -> None:
    """Make one failure of each kind smaller, as long as there is time."""
    end = time.monotonic() + seconds
    # what ends its process would end another with each step
    kinds = [f for f in findings.distinct if not f.problems[0].startswith("ends the process")]
    kinds = [f for f in kinds if "bad_target" not in f.case][:SHRINK_KINDS]
    tasks = (Shrinking(failure, pool.device, SHRINK_SECONDS, end) for failure in kinds)
    for smaller in pool.run(tasks, end):
        assert isinstance(smaller, Failure)
        findings.replace(smaller)


def _terminates_as_an_interrupt() -> Any:
    """From now on SIGTERM is a KeyboardInterrupt; returns what it was, None where only the main thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        return None

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    return signal.signal(signal.SIGTERM, interrupt)


def described(failure: Failure) -> list[str]:
    """What is wrong with which case."""
    case = Case.from_json(failure.smallest)
    lines = [
        f"WRONG {case.op}, {case.way}, {case.dtype}, {case.shape}, {case.direction}: {'; '.join(failure.problems)}"
    ]
    if failure.excess:
        lines.append(f"  error over what is allowed: {failure.excess}")
    return [*lines, f"  replay: fused-softmax fuzz --replay '{failure.smallest}'"]


def show(failure: Failure, console: Console) -> None:
    """A failure: what is wrong, its seed, and a program that shows it."""
    lines = described(failure)
    if "bad_target" not in failure.case:  # those have a program of their own
        lines += [f"    {line}" for line in program(Case.from_json(failure.smallest))]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def summarize(request: Request, findings: Findings, seconds: float, console: Console) -> None:
    table = Table("op", "way", *(request.dtypes or DTYPES), "wrong", title="cases")
    for op in request.ops or tuple(OPS):
        for way in OPS[op].ways:
            cells = [(op, way, dtype) for dtype in request.dtypes or DTYPES]
            if any(findings.cases[cell] for cell in cells):
                wrong = sum(findings.wrong[cell] for cell in cells)
                table.add_row(op, way, *(str(findings.cases[cell]) for cell in cells), str(wrong or ""))
    console.print(table)
    from . import coverage

    missing = sorted(f"{kernel} {flag}".strip() for kernel, flag in coverage.everything() - findings.reached)
    total = len(coverage.everything())
    console.print(f"reached {total - len(missing)} of {total} kernels, regimes and flags", markup=False)
    if missing:
        console.print("not reached: " + ", ".join(missing), markup=False, soft_wrap=True)
    for kind, n in findings.counts.most_common():
        console.print(f"  {n} wrong: {', '.join(kind)}", markup=False, highlight=False, soft_wrap=True)
    found = f"{findings.cases.total()} cases, {findings.wrong.total()} wrong ({len(findings.distinct)} kinds)"
    short = lacking(request, "cuda" if torch.cuda.is_available() else "cpu", findings.known + findings.cases)
    ended = f", {short} short of --per-cell" if short else ""
    ended += ", interrupted" if findings.interrupted else ""
    console.print(f"seed {request.seed}: {found}, {seconds:.0f} s{ended}", markup=False)
