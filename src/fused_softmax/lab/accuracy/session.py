"""Measures cells in processes, prints the tables and writes the record.

A record has a header as bench's, a hash of the kernels' sources, and one row for each result of each cell.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from fused_softmax.lab.bench.report import print_rows
from fused_softmax.lab.fuzz import interpreter
from fused_softmax.lab.fuzz.record import kernel_hash
from fused_softmax.lab.record import header, write_atomically
from fused_softmax.launch.device import device_here, interpreting

from .measure import EACH, KINDS, Cell, Row, cells, measure
from .table import by_kind, by_width, notes

# each process has a context of its own in the device's memory
MOST_WORKERS = 16


@dataclass(frozen=True)
class Request:
    """The arguments of the command; empty or None means the default."""

    ops: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    rows: int | None = None
    seed: int = 0
    record: Path | None = None
    workers: int | None = None


def run(request: Request, console: Console) -> int:
    """Measure, print and record; the number of cases with a NaN or an infinity out of place."""
    start = time.perf_counter()
    device, interpreted = device_here(), interpreting()
    wanted = cells(request.ops, request.dtypes, request.seed, request.rows, interpreted)
    place = {cell: at for at, cell in enumerate(wanted)}
    workers = request.workers or (1 if interpreted else min(MOST_WORKERS, os.cpu_count() or 1))
    steps = track(_measured(wanted, workers), "measuring", len(wanted), console=console, transient=True)
    # processes finish in any order
    by_cell = dict(sorted(steps, key=lambda step: place[step[0]]))
    found = [row for rows in by_cell.values() for row in rows]
    head = asdict(header(device, interpreted)) | {
        "seed": request.seed,
        "rows": request.rows,
        "elements_of_a_cell": None if request.rows else wanted[0].elements,
        "widths_of_a_cell": EACH,
        "values": list(KINDS),
        "seconds": round(time.perf_counter() - start, 1),
    }
    for made in (by_width(found), by_kind(found)):
        print_rows(console, made)
    for line in notes(head, found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    infinite = [line for row in found for line in row.infinite]
    for line in infinite[:30]:
        console.print(f"WRONG {line}", markup=False, highlight=False, soft_wrap=True)
    if request.record is not None:
        write_atomically(request.record, to_json(head, found))
        console.print(f"wrote {request.record}", markup=False, soft_wrap=True)
    if infinite:
        console.print(f"{len(infinite)} results have a NaN or an infinity out of place", markup=False)
    return len(infinite)


def _prepare() -> None:
    """Once in a process that measures: one thread, and Ctrl-C is the parent's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _quiet()


def _quiet() -> None:
    torch.set_num_threads(1)
    if interpreting():
        interpreter.patch_once()
        # numpy's, on the infinities and NaN that are meant
        warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")


def _measured(wanted: Sequence[Cell], workers: int) -> Iterator[tuple[Cell, list[Row]]]:
    """Each cell with its rows, as they come. Processes compile side by side: most of a first run is compiling."""
    if workers == 1:
        _quiet()
        yield from ((cell, measure(cell)) for cell in wanted)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _prepare)
    try:
        started = {pool.submit(measure, cell): cell for cell in wanted}
        for done in as_completed(started):
            yield started[done], done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def to_json(head: dict[str, Any], rows: Sequence[Row]) -> str:
    """The record: a header, the kernels' hash, and one row a line. An infinite error is the text 'inf'."""
    unused = ("ceilings", "unavailable", "stopped", "finished")
    opening = json.dumps({k: v for k, v in head.items() if k not in unused}, indent=2).replace("\n", "\n  ")
    body = ",\n    ".join(json.dumps(_plain(asdict(row)), allow_nan=False) for row in rows)
    return f'{{\n  "header": {opening},\n  "kernel_hash": "{kernel_hash()}",\n  "rows": [\n    {body}\n  ]\n}}\n'


def from_json(text: str) -> tuple[dict[str, Any], list[Row]]:
    """(header, rows) of what to_json wrote."""
    content = json.loads(text)
    rows = []
    for fields in content["rows"]:
        pairs = {kind: (float(ours), float(own)) for kind, (ours, own) in fields["by_kind"].items()}
        known = {**fields, "ours": float(fields["ours"]), "torch": float(fields["torch"]), "by_kind": pairs}
        rows.append(Row(**{**known, "infinite": tuple(fields["infinite"])}))
    return content["header"] | {"kernel_hash": content["kernel_hash"]}, rows


def load(file: Path) -> tuple[dict[str, Any], list[Row]] | None:
    """(header, rows) of a record; None where there is no file."""
    return from_json(file.read_text(encoding="utf-8")) if file.is_file() else None


def _plain(value: Any) -> Any:
    """Numbers with four digits; JSON knows no infinity."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return "inf" if math.isinf(value) else float(f"{value:.4g}")
    return value
