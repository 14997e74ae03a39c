"""Tables of a run: the terminal and the HTML page show the same rows.

`matrix` has a row for each shape of an op and a column for each system, in fractions of the ceiling (or a time, where
there is no ceiling). `everything` has a row for each record, and the columns that any of them fills.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from fused_softmax.lab.bench.cases import SWEEP, shape_text
from fused_softmax.lab.bench.inputs import SHORT
from fused_softmax.lab.bench.shapes import CLASSES, LAYOUTS, class_of
from fused_softmax.lab.record import Header, Record
from fused_softmax.lab.results import read_folder
from fused_softmax.lab.timing import FIRST_CALL, EventStopwatch

# (op, system, dtype, n_cols) -> a record made on a GPU, and the header of its run
Recorded = Mapping[tuple[str, str, str, int], tuple[Header, Record]]
# a kernel that would not launch on the target is as much of a result as one that did not launch here
STYLES = {"wrong": "bold red", "out of resources": "yellow", "refused": "yellow", "error": "red"}


@dataclass(frozen=True)
class Rows:
    """A table as text: a title, column names, rows of cells."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def plural(count: int, noun: str) -> str:
    """Such as `1 case` and `1,040 cases`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def shape(record: Record) -> str:
    """Such as `bf16 4096x128256`, or `bf16 8x19x4096` of a tensor (outer, n_cols, inner)."""
    return f"{SHORT[record.dtype]} {shape_text(record)}"


def fraction_cell(record: Record | None) -> str:
    """The fraction of the ceiling; the time if there is no ceiling; the status if there is no time."""
    if record is None:
        return ""
    if record.status != "ok":
        return record.status
    if record.ms is not None and (record.fraction is None or record.timed_by.startswith("CUDA-graph")):
        return f"{1000 * record.ms:.1f} us" if record.timed_by != FIRST_CALL else f"{record.ms:.1f} ms"
    if record.fraction is not None:
        return f"{record.fraction:.3f}"
    return "not timed" if record.note else "ok"


def ceilings_of(records: Sequence[Record]) -> list[str]:
    """The plain passes that the records are compared with, such as copy."""
    return sorted({r.ceiling for r in records if r.ceiling})


def system_names(records: Sequence[Record]) -> list[str]:
    """Systems in the order in which they appear, ceilings last."""
    ceilings = ceilings_of(records)
    return sorted(dict.fromkeys(r.system for r in records), key=lambda name: name in ceilings)


def by_width(records: Sequence[Record]) -> list[Record]:
    """One record for each op, system, dtype and width, the one with the most rows, for a plot against width.

    Cases timed by graph replay or on the host are left out where there are large ones, timed by events; first calls
    always are.
    """
    records = [r for r in records if r.timed_by != FIRST_CALL and r.inner is None]
    large = [r for r in records if r.timed_by == EventStopwatch.describe or r.ms is None]
    found: dict[tuple[str, str, str, int], Record] = {}
    for record in large if any(r.ms for r in large) else records:
        key = record.op, record.system, record.dtype, record.n_cols
        if key not in found or record.n_rows >= found[key].n_rows:
            found[key] = record
    return list(found.values())


def recorded_results(folder: Path) -> Recorded:
    """The records of a folder's files for plots against width; of several files the later one counts.

    Runs without a ceiling, such as host times, have no fractions and are left out.
    """
    files = [(head, rows) for head, rows in read_folder(folder).values() if any(r.fraction for r in rows)]
    kept = [(head, r) for head, rows in files for r in by_width(rows) if r.fraction is not None or r.status != "ok"]
    return {(r.op, r.system, r.dtype, r.n_cols): (head, r) for head, r in kept}


def origin(head: Header) -> str:
    """Where and when a run was made, in a few words."""
    commit = f"commit {head.commit[:7]}{' with changes' if head.dirty else ''}" if head.commit else "commit unknown"
    versions = ", ".join(f"{name} {head.versions[name]}" for name in ("torch", "triton") if name in head.versions)
    return f"{head.device}, {versions}, {commit}, {head.date[:10]}"


def matrix(op: str, records: Sequence[Record]) -> Rows:
    """An op's shapes down and its systems across; a ceiling's own column is in GB/s."""
    mine = [r for r in records if r.op == op]
    names, ceilings = system_names(mine), ceilings_of(mine)
    cells: dict[str, dict[str, Record]] = {}
    for record in mine:
        cells.setdefault(shape(record), {})[record.system] = record

    def cell(name: str, met: Record | None) -> str:
        fast = met and name in ceilings and met.gbps and not met.timed_by.startswith("CUDA-graph")
        return f"{met.gbps:.0f}" if met and fast else fraction_cell(met)

    rows = tuple((at, *(cell(name, found.get(name)) for name in names)) for at, found in cells.items())
    heads = tuple(f"{name}, GB/s" if name in ceilings else name for name in names)
    title = f"{op}: fraction of {'/'.join(ceilings)} (higher is better)" if ceilings else f"{op}: status or time"
    if any(cell.endswith((" us", " ms")) for row in rows for cell in row[1:]):
        title += "; us: a short call, by graph replay or on the host; ms: a first call (lower is better)"
    return Rows(title, ("shape", *heads), rows)


def matrices(records: Sequence[Record]) -> list[Rows]:
    """A matrix for each op of the run."""
    return [matrix(op, records) for op in dict.fromkeys(r.op for r in records)]


SLOWEST = 10


def shape_classes(records: Sequence[Record]) -> list[Rows]:
    """Of random shapes: fractions of the ceiling by class, and the shapes with the most time next to torch's.

    A class has the shapes whose tensors are far larger than the L2. All shapes are compared with torch.
    """
    mine = [r for r in records if r.inner is not None and r.system == "fused_softmax" and r.ms]
    torch_ms = {(r.op, shape(r)): r.ms for r in records if r.system == "torch" and r.ms}
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for r in mine:
        if r.fraction is not None and r.timed_by == EventStopwatch.describe:
            key = r.op, SHORT[r.dtype], class_of(r.n_cols, r.inner or 0, r.layout)
            groups.setdefault(key, []).append(r)
    order = [*CLASSES, *LAYOUTS]
    lines = []
    for key in sorted(groups, key=lambda key: (*key[:2], order.index(key[2]))):
        met = groups[key]
        worst = min(met, key=lambda r: r.fraction or 0.0)
        mean = geometric_mean([r.fraction or 0.0 for r in met])
        lines.append((*key, str(len(met)), f"{worst.fraction:.3f}", shape_text(worst), f"{mean:.3f}"))
    ratios = [((r.ms or 0.0) / torch_ms[at], r) for r in mine if (at := (r.op, shape(r))) in torch_ms]
    slowest = sorted(ratios, key=lambda pair: pair[0], reverse=True)[:SLOWEST]
    tables = []
    if lines:
        columns = ("op", "dtype", "class", "shapes", "worst", "at", "mean")
        tables.append(Rows("fraction of the ceiling by class (higher is better)", columns, tuple(lines)))
    if slowest:
        cells = tuple((r.op, shape(r), f"{ratio:.2f}", r.plan) for ratio, r in slowest)
        title = f"time over torch's, the {len(cells)} largest of {plural(len(ratios), 'shape')} (lower is better)"
        tables.append(Rows(title, ("op", "shape", "ratio", "plan"), cells))
    return tables


def _error(record: Record) -> str:
    if record.error is None:
        return ""
    return "NaN" if math.isinf(record.error) else f"{record.error:.1e}"


def on_target(record: Record) -> str:
    """Whether the kernel would launch on the GPU that it was cross-compiled for."""
    found = record.resources or {}
    if "registers" not in found and "failed" not in found:
        return ""
    failed = str(found.get("failed", ""))
    return "launches" if not failed else "out of resources" if "out of resource" in failed else "fails"


def _cells(r: Record, recorded: Recorded) -> dict[str, str]:
    """A record's cells by column, empty where it has no value."""
    cells, used = r.n_rows * r.n_cols, r.resources or {}
    found: dict[str, object] = {
        "op": r.op,
        "shape": f"{shape(r)} ({r.case})" if r.case.startswith("real") else shape(r),
        "system": r.system,
        "status": r.status,
        "max error": _error(r),
        "ms": r.ms and f"{r.ms:.4f}",
        "p10 to p90": r.ms_p10 and r.ms_p90 and f"{r.ms_p10:.4f} to {r.ms_p90:.4f}",
        "GB/s": r.gbps and f"{r.gbps:.0f}",
        "fraction": r.fraction and f"{r.fraction:.3f}",
        "peak MB": r.peak_bytes is not None and f"{r.peak_bytes / 1e6:.3f}",
        "reads/MN": cells and r.reads is not None and f"{r.reads / cells:.2f}",
        "writes/MN": cells and r.writes is not None and f"{r.writes / cells:.2f}",
        **{name.replace("_bytes", " B").replace("_", " "): used.get(name) for name in RESOURCES},
        "on an H200": on_target(r),
        "recorded": fraction_cell(recorded[key][1]) if (key := (r.op, r.system, r.dtype, r.n_cols)) in recorded else "",
        "timed by": r.timed_by,
        "note": r.note or ("" if r.case == SWEEP and not r.ms else r.plan),
    }
    return {name: "" if value is None or value is False else str(value) for name, value in found.items()}


RESOURCES = ("registers", "spilled_bytes", "shared_bytes", "widest_load_bytes")
LEGEND = (
    "max error: largest absolute difference from float64; reads/MN and writes/MN: elements moved, over the elements of "
    "the matrix; registers, spilled, shared and widest load: as compiled for an H200; recorded: fraction on an H200"
)


def everything(records: Sequence[Record], recorded: Recorded) -> Rows:
    """One row for each record; a column that no record fills is left out."""
    lines = [_cells(r, recorded) for r in records]
    columns = tuple(name for name in (lines[0] if lines else {}) if any(line[name] for line in lines))
    return Rows("every result", columns, tuple(tuple(line[name] for name in columns) for line in lines))


def narrow(records: Sequence[Record], recorded: Recorded) -> list[Rows]:
    """For a terminal: a table for each op, without the columns that take a line of their own."""
    tables = []
    for op in dict.fromkeys(r.op for r in records):
        rows = everything([r for r in records if r.op == op], recorded)
        kept = [i for i, name in enumerate(rows.columns) if name not in ("op", "note", "timed by")]
        lines = tuple(tuple(row[i] for i in kept) for row in rows.rows)
        tables.append(Rows(op, tuple(rows.columns[i] for i in kept), lines))
    return tables


def environment(head: Header) -> dict[str, str]:
    """The machine, the versions and the command of a run, by name."""
    commit = f"{head.commit[:10] or 'unknown'}{' with changes' if head.dirty else ''}"
    found = {
        "device": ", ".join(part for part in (head.device, head.cpu) if part),
        "versions": ", ".join(f"{name} {v}" for name, v in {**head.versions, "python": head.python}.items()),
        "commit": commit,
        "date": head.date,
        "command": head.command,
        "random": "" if head.seed is None else f"seed {head.seed}",
        "own passes over 512 MiB": ", ".join(f"{kind} {gbps:.0f} GB/s" for kind, gbps in head.ceilings.items()),
        "not run": "; ".join(f"{name} ({why})" for name, why in head.unavailable.items()),
        "stopped early": head.stopped,
    }
    return {name: value for name, value in found.items() if value}


def failures(records: Sequence[Record]) -> list[str]:
    """A line for each system and status that is not ok: how often, and the first case with its reason."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for r in records:
        if r.status != "ok":
            groups.setdefault((r.system, r.status), []).append(r)
    return [
        f"{system}, {status} in {plural(len(met), 'case')}, first {met[0].op} {shape(met[0])}: {met[0].note}"
        for (system, status), met in groups.items()
    ]


def print_rows(console: Console, rows: Rows) -> None:
    """Print one table."""
    view = RichTable(title=rows.title, box=SIMPLE, pad_edge=False, title_justify="left")
    for i, column in enumerate(rows.columns):
        view.add_column(column, justify="left" if i == 0 else "right", no_wrap=i < 2)
    for row in rows.rows:
        view.add_row(*(f"[{STYLES[c]}]{c}[/]" if c in STYLES else escape(c) for c in row))
    console.print(view)


def print_report(console: Console, head: Header, records: Sequence[Record], recorded: Recorded) -> None:
    """The whole report on the terminal: matrices where something was timed, every result where nothing was."""
    if not records:
        console.print("no results")
        return
    timed = any(r.ms for r in records)
    for rows in matrices(records) if timed else narrow(records, recorded):
        print_rows(console, rows)
    for rows in shape_classes(records) if timed else ():
        print_rows(console, rows)
    lines = [f"{name}: {value}" for name, value in environment(head).items()]
    if not timed:
        lines += [LEGEND, "times need a GPU: here Triton's interpreter checked every system, and none was timed"]
    for line in (*lines, *failures(records)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
