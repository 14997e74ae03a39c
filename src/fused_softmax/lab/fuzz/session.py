"""A fuzz run: which classes are drawn, for how long, what is printed and recorded."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fused_softmax.lab.registry import OPS

from . import record
from .draw import DTYPES, Budget, Case, draw_class
from .huge import run_huge
from .isolated import run_isolated
from .pool import run_units
from .program import program
from .worker import Failure, Report, Unit

# cases of one class and way: eager ones share what was compiled, the others compile or capture for each
PER_CLASS = 16
PER_CLASS_INTERPRETED = 4
SLOW_WAYS = ("compile", "cuda_graph")


@dataclass(frozen=True)
class Request:
    """What a run is asked for. Without seconds and counts: 60 seconds."""

    ops: tuple[str, ...] = ()
    ways: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    seconds: float | None = None
    cases: int | None = None
    per_cell: int | None = None
    seed: int = 0
    workers: int = 1
    columns: tuple[int, int] | None = None
    record: Path | None = None
    huge: bool = False
    stop_at_first: bool = False


@dataclass
class Findings:
    """What a run gave, summed over its units."""

    cases: Counter = field(default_factory=Counter)
    wrong: Counter = field(default_factory=Counter)
    seconds: dict[tuple[str, str, str], float] = field(default_factory=dict)
    errors: Counter = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    reached: set[tuple[str, str]] = field(default_factory=set)

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


def ways_of(op: str, request: Request, device: str) -> tuple[str, ...]:
    return tuple(
        way
        for way in OPS[op].ways
        if (not request.ways or way in request.ways) and (way != "cuda_graph" or device == "cuda")
    )


def units(request: Request, device: str, budget: Budget) -> Iterator[Unit]:
    """Classes in turn over ops and dtypes, until the counts that are asked for are reached."""
    per_class = PER_CLASS if device == "cuda" else PER_CLASS_INTERPRETED
    drawn: Counter = Counter()
    groups = [(op, dtype) for op in request.ops or tuple(OPS) for dtype in request.dtypes or DTYPES]
    for index in count():
        given = 0
        rng = Random(f"{request.seed} {index}")
        for op, dtype in rng.sample(groups, len(groups)):
            of = draw_class(op, dtype, request.seed * 1_000_003 + index, budget, request.columns)
            wanted = []
            possible = ways_of(op, request, device)
            if device == "cpu" and request.per_cell is None:  # few ways of many classes, since a case costs more
                possible = tuple(rng.sample(possible, min(2, len(possible))))
            for way in possible:
                n = max(1, per_class // 8) if way in SLOW_WAYS else per_class
                if request.per_cell is not None:
                    share = (
                        max(1, request.per_cell // 10) if way in SLOW_WAYS and not request.ways else request.per_cell
                    )
                    n = min(n, share - drawn[op, way, dtype])
                if request.cases is not None:
                    n = min(n, request.cases - drawn.total())
                if n > 0:
                    drawn[op, way, dtype] += n
                    wanted.append((way, n))
            if wanted:
                given += 1
                yield Unit(of, tuple(wanted), budget, device)
        if not given:
            return


def run(request: Request, console: Console) -> Findings:
    """Run, print what is wrong as it is found, the table, and what was not reached; write the record."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    budget = Budget() if device == "cuda" else Budget.interpreted()
    seconds = request.seconds
    if seconds is None and request.cases is None and request.per_cell is None:
        seconds = 60.0
    start = time.monotonic()
    findings, shown = Findings(), set()

    def until_the_end() -> Iterator[Unit]:
        for unit in units(request, device, budget):
            if seconds is not None and time.monotonic() - start > seconds:
                return
            if request.stop_at_first and findings.failures:
                return
            yield unit

    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("fuzzing", total=seconds)
        for report in run_units(until_the_end(), request.workers, device):
            findings.add(report)
            elapsed = time.monotonic() - start
            progress.update(
                task, completed=elapsed if seconds else None,
                description=f"{findings.cases.total()} cases, {findings.wrong.total()} wrong",
            )  # fmt: skip
            for failure in report.failures:
                if failure.signature not in shown:
                    shown.add(failure.signature)
                    show(failure, console)
    if device == "cuda" and "cross_entropy" in (request.ops or OPS) and not request.columns:
        findings.add(run_isolated(request.seed))
    if request.huge and device == "cuda":
        report = run_huge(request.ops or tuple(OPS), request.seed)
        findings.add(report)
        for failure in report.failures:
            console.print(f"WRONG {failure.case}: {'; '.join(failure.problems)}", markup=False, soft_wrap=True)
    summarize(request, findings, time.monotonic() - start, console)
    if request.record is not None:
        record.write(request.record, request, findings)
        console.print(f"recorded in {request.record}", markup=False)
    return findings


def show(failure: Failure, console: Console) -> None:
    """A failure: what is wrong, its seed, and a program that shows it."""
    case = Case.from_json(failure.smallest)
    lines = [
        f"WRONG {case.op}, {case.way}, {case.dtype}, {case.shape}, {case.direction}: {'; '.join(failure.problems)}"
    ]
    if failure.excess:
        lines.append(f"  error over what is allowed: {failure.excess}")
    lines += [f"  replay: fused-softmax fuzz --replay '{failure.smallest}'", *(f"    {line}" for line in program(case))]
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
    found = f"{findings.cases.total()} cases, {findings.wrong.total()} wrong ({len(findings.distinct)} kinds)"
    console.print(f"seed {request.seed}: {found}, {seconds:.0f} s", markup=False)
