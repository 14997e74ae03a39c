"""Tables of a run: what the terminal, the HTML page and the README show, from the same rows.

`matrix` has one row per shape and one column per system, in fractions of the ceiling (or ms, where there is none);
`details` has one row per system and shape, with error, traffic, and what the kernel compiles to for an H200.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from fused_softmax.lab.bench.cases import SWEEP
from fused_softmax.lab.bench.inputs import SHORT
from fused_softmax.lab.bench.record import Header, Record
from fused_softmax.lab.bench.timing import FIRST_CALL, EventStopwatch

Recorded = Mapping[tuple[str, str, str, int], Record]  # (op, system, dtype, n_cols) -> a record made on a GPU


@dataclass(frozen=True)
class Rows:
    """A table as text: a title, column names, rows of cells."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def shape(record: Record) -> str:
    """Such as `bf16 4096x128256`."""
    return f"{SHORT[record.dtype]} {record.n_rows}x{record.n_cols}"


def fraction_cell(record: Record | None) -> str:
    """The fraction of the ceiling; the time where there is no ceiling; the status of what was not timed."""
    if record is None:
        return ""
    if record.status != "ok":
        return record.status
    if record.fraction is not None:
        return f"{record.fraction:.3f}"
    if record.ms is not None:
        return f"{1000 * record.ms:.1f} us" if record.timed_by != FIRST_CALL else f"{record.ms:.1f} ms"
    return "not timed" if record.note else "ok"


def system_names(records: Sequence[Record]) -> list[str]:
    """Systems in the order in which they appear, ceilings last."""
    names = dict.fromkeys(r.system for r in records)
    ceilings = {r.ceiling for r in records if r.ceiling}
    return [n for n in names if n not in ceilings] + [n for n in names if n in ceilings]


def by_width(records: Sequence[Record]) -> list[Record]:
    """One record for each op, system, dtype and width, the one with the most rows: what a plot against width can show.

    Cases timed by graph replay or on the host are left out where there are large ones, timed by events; first calls
    always are.
    """
    records = [r for r in records if r.timed_by != FIRST_CALL]
    large = [r for r in records if r.timed_by == EventStopwatch.describe or r.ms is None]
    found: dict[tuple[str, str, str, int], Record] = {}
    for record in large if any(r.ms for r in large) else records:
        key = record.op, record.system, record.dtype, record.n_cols
        if key not in found or record.n_rows >= found[key].n_rows:
            found[key] = record
    return list(found.values())


def matrix(records: Sequence[Record]) -> Rows:
    """One row per shape, one column per system."""
    names = system_names(records)
    ceilings = {r.ceiling for r in records if r.ceiling}
    cells: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        cells.setdefault((record.op, shape(record)), {})[record.system] = record
    rows = []
    for (op, at), found in cells.items():
        shown = []
        for name in names:
            met = found.get(name)
            if met and met.ms is not None and met.timed_by.startswith("CUDA-graph"):
                shown.append(f"{1000 * met.ms:.1f} us")
            else:
                shown.append(f"{met.gbps:.0f}" if met and name in ceilings and met.gbps else fraction_cell(met))
        rows.append((op, at, *shown))
    title = (
        "fraction of the ceiling (the ceiling itself in GB/s); us: time of a short call by graph replay, or on the "
        "host; ms: of a first call"
    )
    return Rows(title, ("op", "shape", *names), tuple(rows))


def _error(record: Record) -> str:
    if record.error is None:
        return ""
    return "NaN" if math.isinf(record.error) else f"{record.error:.1e}"


def _count(elements: int | None, of: int) -> str:
    """Elements in multiples of the matrix."""
    return "" if elements is None or not of else f"{elements / of:.2f}"


def _resource(record: Record, name: str) -> str:
    value = (record.resources or {}).get(name)
    return "" if value is None else str(value)


def on_target(record: Record) -> str:
    """Whether the kernel would launch on the GPU that it was cross-compiled for."""
    found = record.resources or {}
    if "registers" not in found and "failed" not in found:
        return ""
    failed = str(found.get("failed", ""))
    return "launches" if not failed else "out of resources" if "out of resource" in failed else "fails"


def details(records: Sequence[Record], recorded: Recorded) -> Rows:
    """One row per shape and system: the view without a GPU."""
    rows = []
    for r in records:
        cells = r.n_rows * r.n_cols
        on_gpu = recorded.get((r.op, r.system, r.dtype, r.n_cols))
        rows.append((
            f"{shape(r)} ({r.case})" if r.case not in ("", SWEEP) else shape(r),
            r.system,
            r.status,
            _error(r),
            _count(r.reads, cells),
            _count(r.writes, cells),
            *(_resource(r, n) for n in ("registers", "spilled_bytes", "shared_bytes", "widest_load_bytes")),
            on_target(r),
            fraction_cell(on_gpu),
        ))  # fmt: skip
    columns = (
        *("shape", "system", "status", "error", "reads", "writes"),
        *("registers", "spilled", "shared", "load", "on an H200", "of copy"),
    )
    title = (
        "checked against float64; reads and writes in multiples of the matrix (MN); registers, spilled, shared and "
        "widest load in bytes as compiled for an H200 (sm_90); of copy: recorded on an H200"
    )
    return Rows(title, columns, tuple(rows))


def timings(records: Sequence[Record]) -> Rows:
    """One row per shape and system with milliseconds and their spread: the HTML page's second table."""
    rows = [
        (
            r.op,
            shape(r),
            r.system,
            r.status,
            "" if r.ms is None else f"{r.ms:.4f}",
            "" if r.ms_p10 is None or r.ms_p90 is None else f"{r.ms_p10:.4f} to {r.ms_p90:.4f}",
            "" if r.gbps is None else f"{r.gbps:.0f}",
            "" if r.fraction is None else f"{r.fraction:.3f}",
            "" if r.peak_bytes is None else f"{r.peak_bytes / 1e6:.3f}",
            _error(r),
            r.timed_by,
            r.note or r.plan,
        )
        for r in records
    ]
    columns = (
        *("op", "shape", "system", "status", "ms", "p10 to p90", "GB/s", "fraction", "peak MB"),
        *("max error", "timed by", "note"),
    )
    return Rows("times", columns, tuple(rows))


def notes(head: Header, records: Sequence[Record]) -> list[str]:
    """Lines that belong under a table: the machine, what did not run, and why."""
    versions = ", ".join(f"{name} {v}" for name, v in head.versions.items())
    machine = ", ".join(part for part in (head.device, head.cpu) if part)
    lines = [f"{machine}; {versions}; commit {head.commit[:10] or 'unknown'}{' with changes' if head.dirty else ''}"]
    if head.seed is not None:
        lines.append(f"random widths of seed {head.seed}")
    if head.ceilings:
        measured = ", ".join(f"{kind} {gbps:.0f} GB/s" for kind, gbps in head.ceilings.items())
        lines.append(f"this device's own passes over 512 MiB: {measured}")
    if not any(r.ms for r in records):
        lines.append("times need a GPU: here every system was checked in Triton's interpreter, and none was timed")
    if head.unavailable:
        lines.append("not run: " + "; ".join(f"{name} ({why})" for name, why in head.unavailable.items()))
    seen: dict[tuple[str, str], str] = {}
    for r in records:
        if r.status != "ok":
            seen.setdefault((r.system, r.status), f"{r.system}, {r.status} at {shape(r)}: {r.note}")
    if head.stopped:
        lines.append(f"stopped early: {head.stopped}")
    return lines + list(seen.values())


# a kernel that would not launch on the target is as much of a result as one that did not launch here
STYLES = {"wrong": "bold red", "out of resources": "yellow", "refused": "yellow", "error": "red"}


def print_rows(console: Console, rows: Rows) -> None:
    """Print one table; where the first column is the shape, each shape becomes a heading over its systems."""
    grouped = rows.columns[0] == "shape"
    view = RichTable(title=rows.title, box=SIMPLE, pad_edge=False, title_justify="left")
    for i, column in enumerate(rows.columns[grouped:]):
        view.add_column(column, justify="left" if i < 2 else "right", no_wrap=i == 0)
    last = None
    for row in rows.rows:
        if grouped and row[0] != last:
            if last is not None:
                view.add_section()
            last = row[0]
            view.add_row(f"[bold]{escape(last)}[/]")
        view.add_row(*(f"[{STYLES[c]}]{c}[/]" if c in STYLES else escape(c) for c in row[grouped:]))
    console.print(view)


def print_report(console: Console, head: Header, records: Sequence[Record], recorded: Recorded) -> None:
    """The whole report on the terminal: the matrix where something was timed, the details where nothing was."""
    if not records:
        console.print("no results")
        return
    print_rows(console, matrix(records) if any(r.ms for r in records) else details(records, recorded))
    for line in notes(head, records):
        console.print(line, markup=False, highlight=False)
