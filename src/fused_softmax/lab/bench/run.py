"""`fused-softmax bench`: choose cases and systems, run the session, show and write the results.

On a GPU it compiles in workers, then checks and times. Without one it checks in Triton's interpreter while a process
cross-compiles for an H200, and shows recorded GPU results in the last column.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fused_softmax.lab.bench.cases import (
    CPU_ROWS,
    ELEMENTS,
    LOSS_FAMILIES,
    PEERS,
    SHAPE_PEERS,
    Case,
    Table,
    named_shapes,
    random_cases,
    real_cases,
    shaped_cases,
    sweep,
    table,
)
from fused_softmax.lab.bench.inputs import one_input
from fused_softmax.lab.bench.ops import OPS, family
from fused_softmax.lab.bench.output import Output
from fused_softmax.lab.bench.report import print_report, recorded_results
from fused_softmax.lab.bench.session import Pair, Session, prebuild
from fused_softmax.lab.bench.shapes import MOST, SHAPED_OPS
from fused_softmax.lab.bench.systems import System, systems_for
from fused_softmax.lab.record import Header, Record, header
from fused_softmax.lab.resources import ROWS, CrossCompiler, keys_of
from fused_softmax.lab.results import results_folder
from fused_softmax.launch.device import device_here, interpreting

# each worker of the prebuild has tensors of a case's size and a context of its own in the device's memory
MOST_WORKERS = 16
# interpreted, a random shape has at most so many elements
CPU_ELEMENTS = 2**14
# seconds that a run without a GPU waits for kernels still being compiled when the interpreter has finished
PATIENCE = 90.0


@dataclass
class Request:
    """The arguments of the command line; empty means the default."""

    ops: tuple[str, ...] = ("softmax",)
    tables: tuple[str, ...] = ()
    widths: tuple[int, ...] = ()
    rows: int | None = None
    dtypes: tuple[str, ...] = ()
    systems: tuple[str, ...] = ()
    input: Path | None = None
    elements: int = ELEMENTS
    out: Path = field(default_factory=lambda: Path("out"))
    record: Path | None = None
    workers: int | None = None  # as many as there are cores
    seconds: float | None = None
    random_widths: int = 0  # how many to draw for each op
    columns: tuple[int, int] | None = None  # the fewest and the most of them; None: the op's own range
    shapes: tuple[tuple[int, ...], ...] = ()  # (outer, n_cols, inner)
    random_shapes: int = 0  # how many of these to draw for each op
    seed: int | None = None  # of the random widths and shapes; None: a new one, which the header names


def requested_tables(request: Request, on_gpu: bool) -> list[Table]:
    """The tables to run: --input, widths and shapes, named or random, make their own.

    The default is `cpu`, or real logits and the ladder on a GPU.
    """
    found = [t for op in request.ops for t in _tables_of(op, request, on_gpu)]
    if request.dtypes:
        found = [replace(t, cases=tuple(c for c in t.cases if c.dtype in request.dtypes or c.source)) for t in found]
    if request.seconds is not None:
        found = [replace(t, seconds=request.seconds) for t in found]
    seen: set[Case] = set()
    for i, t in enumerate(found):
        # --op of a family with --table losses names each case once for every op
        found[i] = replace(t, cases=tuple(c for c in t.cases if c not in seen))
        seen.update(t.cases)
    return [t for t in found if t.cases]


def _tables_of(op: str, request: Request, on_gpu: bool) -> list[Table]:
    found: list[Table] = []
    if request.input is not None:
        if OPS[op].inputs is not one_input:
            served = ", ".join(name for name in OPS if OPS[name].inputs is one_input)
            raise ValueError(f"{op} takes more than one tensor, and --input gives one: name one of {served} by --op")
        found.append(Table("input", real_cases(op, request.input)))
    drawn = request.random_widths or request.random_shapes
    other = request.tables or request.input is not None or request.shapes or drawn
    if request.widths or (request.rows is not None and not other):
        dtypes = request.dtypes or ("bfloat16", "float32")
        rows = request.rows if request.rows is not None or on_gpu else CPU_ROWS
        widths = request.widths or tuple(dict.fromkeys(c.n_cols for c in table("cpu").cases if c.source is None))
        found.append(Table("widths", sweep(op, dtypes, widths, request.elements, rows)))
    if request.random_widths:
        assert request.seed is not None, "run() draws the seed"
        rows = request.rows if request.rows is not None or on_gpu else CPU_ROWS
        cases = random_cases(
            op, request.random_widths, request.seed, request.dtypes, request.elements, rows, request.columns
        )
        # 0.06 s are a hundred rounds, as in the forward table
        found.append(Table("random widths", cases, () if family(op) in LOSS_FAMILIES else PEERS, 0.06))
    for option, asked in {"--shapes": request.shapes, "--random-shapes": request.random_shapes}.items():
        if asked and op not in SHAPED_OPS:
            raise ValueError(f"{op} takes rows only: {option} serves {', '.join(SHAPED_OPS)}")
    if request.shapes:
        cases = named_shapes(op, request.shapes, request.dtypes or ("bfloat16", "float32"))
        found.append(Table("shapes", cases, SHAPE_PEERS, 0.06))
    if request.random_shapes:
        assert request.seed is not None, "run() draws the seed"
        most = min(request.elements, MOST) if on_gpu else CPU_ELEMENTS
        cases = shaped_cases(op, request.random_shapes, request.seed, request.dtypes, most)
        found.append(Table("random shapes", cases, SHAPE_PEERS, 0.06))
    try:
        if "shapes" in request.tables and op not in SHAPED_OPS:
            raise ValueError(f"{op} takes rows only: --table shapes serves {', '.join(SHAPED_OPS)}")
        found += [table(name, op) for name in request.tables]
    except KeyError as error:
        raise ValueError(error.args[0]) from None
    if not found and on_gpu:
        ladder = table("ladder", op)
        real = real_cases(op) if op == "softmax" else ()
        found = [Table("real", real), replace(ladder, cases=_resized(ladder.cases, request.elements))]
    elif not found:
        found = [table("cpu", op)]
    return found


def _resized(cases: Sequence[Case], elements: int) -> tuple[Case, ...]:
    return tuple(replace(c, n_rows=max(1, elements // c.n_cols)) for c in cases)


def available(ops: Sequence[str], names: tuple[str, ...]) -> tuple[list[System], dict[str, str]]:
    """Systems that can run here, and the reasons of those that cannot; ValueError where none can."""
    try:
        chosen = [system for op in ops for system in systems_for(op, names)]
    except KeyError as error:
        raise ValueError(error.args[0]) from None
    missing = {system.name: why for system in chosen if (why := system.missing())}
    found = [system for system in chosen if system.name not in missing]
    if not found:
        why = "; ".join(f"{name} {why}" for name, why in missing.items()) or f"none computes {', '.join(ops)}"
        known = dict.fromkeys(system.name for op in ops for system in systems_for(op))
        raise ValueError(f"no system named {', '.join(names)} can run ({why}): there are {', '.join(known)}")
    return found, missing


def fits(cases: Sequence[Case], device: torch.device) -> None:
    """Raise ValueError for a case whose input and result alone are larger than the memory there is."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for case in cases:
        needed = 2 * case.n_rows * case.n_cols * case.itemsize
        if needed > memory:
            raise ValueError(
                f"{case.label} needs {needed / 1e9:,.0f} GB for its input and result, and there are "
                f"{memory / 1e9:,.0f} GB of memory: give fewer rows, columns or elements"
            )


@dataclass
class Prepared:
    """A request that can be run, with its cases and systems on this machine."""

    request: Request
    device: torch.device
    tables: list[Table]
    systems: list[System]
    missing: dict[str, str]  # systems that cannot run here, and why
    output: Output


def prepare(request: Request) -> Prepared:
    """Find a request's cases and systems, and its folders; raises ValueError or OSError where it cannot be run."""
    if (request.random_widths or request.random_shapes) and request.seed is None:
        request = replace(request, seed=secrets.randbelow(10**6))
    device = device_here()
    tables = requested_tables(request, device.type == "cuda")
    cases = [case for t in tables for case in t.cases]
    if not cases:
        raise ValueError(
            f"no case of {', '.join(request.ops)} has a dtype among {', '.join(request.dtypes) or 'all'} in what was "
            "asked for: give other --dtype or --table, or --widths"
        )
    fits(cases, device)
    systems, missing = available(list(dict.fromkeys(c.op for c in cases)), request.systems)
    results = results_folder()
    output = Output(request.out, request.record, recorded_results(results / "h200") if results else {})
    output.make_folders()
    return Prepared(request, device, tables, systems, missing, output)


@contextmanager
def _bar(console: Console) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield progress


def run(prepared: Prepared, console: Console) -> tuple[Header, list[Record], list[Path]]:
    """Run a prepared request; returns header, records, and the written files."""
    request, device, output = prepared.request, prepared.device, prepared.output
    tables, systems = prepared.tables, prepared.systems
    on_gpu = device.type == "cuda"
    cases = [case for t in tables for case in t.cases]
    head = header(device, interpreting())
    head.seed, head.unavailable = request.seed, prepared.missing
    compiled = keys_of(cases, [s.name for s in systems if s.op == "softmax" and s.kind in ("ours", "lesson")])
    compiler = None if on_gpu else CrossCompiler(compiled)
    session = Session(head, systems, device, timed=on_gpu, save=output.save)
    try:
        workers = min(os.cpu_count() or 1, MOST_WORKERS) if request.workers is None else request.workers
        if on_gpu and workers:
            _prebuild(console, tables, systems, workers)
        if on_gpu:
            from fused_softmax.lab.bench.ceilings import measured

            head.ceilings = measured(device)
        _run_tables(console, session, tables, systems, named=bool(request.systems))
        if compiler is not None:
            if not head.stopped:
                _wait(console, compiler)
            add_resources(session.records, compiler)
    except KeyboardInterrupt:
        head.stopped = head.stopped or "interrupted"
    finally:
        if compiler is not None:
            compiler.close()
    files = output.finish(head, session.records)
    print_report(console, head, session.records, output.recorded)
    return head, session.records, files


def _run_tables(
    console: Console, session: Session, tables: Sequence[Table], systems: Sequence[System], named: bool
) -> None:
    with _bar(console) as progress:
        total = sum(len(t.cases) for t in tables)
        task = progress.add_task("", total=total)
        seen: list[Case] = []

        def show(case: Case, doing: str) -> None:
            if not seen or seen[-1] is not case:
                seen.append(case)
                if not console.is_terminal:  # a log gets a line for each case, a terminal the bar
                    console.print(f"{len(seen)} of {total}: {case.label}", markup=False, highlight=False)
                progress.update(task, completed=len(seen) - 1)
            progress.update(task, description=f"{case.label}: {doing}")

        session.progress = show
        for t in tables:
            # a table's own choice of systems holds unless systems were named
            only = t.systems if not named or t.systems == SHAPE_PEERS else ()
            session.systems = [s for s in systems if not only or s.name in only]
            session.seconds = t.seconds
            session.run(t.cases)
            if session.head.stopped:
                break


def prebuilt(tables: Sequence[Table], systems: Sequence[System]) -> list[Pair]:
    """What workers compile ahead: not PyTorch's own kernels, and not first calls, which are timed as they compile."""
    return [
        (case, s.name)
        for t in tables
        for s in systems
        for case in t.cases
        if s.op == case.op and s.kind != "torch" and (not t.systems or s.name in t.systems)
        if case.timed_by != "first_call"
    ]


def _prebuild(console: Console, tables: Sequence[Table], systems: Sequence[System], workers: int) -> None:
    pairs = prebuilt(tables, systems)
    if not pairs:
        return
    began = time.monotonic()
    with _bar(console) as progress:
        task = progress.add_task(f"compiling in {workers} processes", total=len(pairs))
        done = prebuild(pairs, workers, lambda: progress.advance(task))
    taken = time.monotonic() - began
    failed = [why for why in done if why]
    also = f"; {len(failed)} failed there, the first: {failed[0]}" if failed else ""
    text = f"compiled {len(done) - len(failed)} of {len(pairs)} in {taken:.0f} s, {workers} processes{also}"
    console.print(text, highlight=False)


def _wait(console: Console, compiler: CrossCompiler) -> None:
    with _bar(console) as progress:
        task = progress.add_task("compiling for sm_90", total=len(compiler.keys))
        until = time.monotonic() + PATIENCE
        while not compiler.wait(0.3) and time.monotonic() < until and compiler.thread.is_alive():
            progress.update(task, completed=len(compiler.found))


def add_resources(records: Sequence[Record], compiler: CrossCompiler) -> None:
    """Put what each softmax kernel compiles to into its records."""
    for record in (record for record in records if record.op == "softmax"):
        found = compiler.found.get((record.system, record.dtype, ROWS, record.n_cols))
        if found:
            record.resources = found
