"""Markdown tables of recorded results: what the README shows between its markers.

Fractions are of the device's own plain pass of the same tensor in the same run; ours are bold. A system that is wrong,
refuses, or runs out of resources is shown as that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fused_softmax.lab.bench.cases import LOSS_SHAPES, PEERS
from fused_softmax.lab.bench.ops import SHORT
from fused_softmax.lab.bench.record import Header, Record
from fused_softmax.lab.bench.report import by_width, fraction_cell, system_names

# narrow, odd, wide, and the vocabularies: the columns that a reader of the README looks for
SHOWN_WIDTHS = (256, 1000, 4096, 16384, 32768, 50257, 65536, 128256, 151936, 262144)
OURS = "fused_softmax"


def measured_on(head: Header, records: Sequence[Record]) -> str:
    """Where and with what, and the ceilings' own speed."""
    speeds = []
    for kind in dict.fromkeys(r.ceiling for r in records if r.ceiling):
        found = [r.gbps for r in records if r.system == kind and r.gbps and r.ms and r.ms > 0.1]
        if found:
            speeds.append(f"{kind} {min(found):,.0f} to {max(found):,.0f} GB/s")
    versions = ", ".join(f"{name} {version}" for name, version in head.versions.items() if name != "numpy")
    return f"{head.device}, {', '.join(speeds) or 'not timed'}; {versions}; commit {head.commit[:10] or 'unknown'}."


def ladder_tables(records: Sequence[Record]) -> list[str]:
    """Every system down, widths across, bfloat16 and float32: fractions of copy."""
    return _by_width(records, None, ("bfloat16", "float32"))


def peer_tables(records: Sequence[Record]) -> list[str]:
    """Ours and the peers down, widths across: bfloat16, and float32 for softmax; the files have all dtypes."""
    forward = any(r.op == "softmax" for r in records)
    return _by_width(records, PEERS, ("bfloat16", "float32") if forward else ("bfloat16",))


def _by_width(records: Sequence[Record], systems: Sequence[str] | None, dtypes: Sequence[str]) -> list[str]:
    records = by_width(records)
    ceilings = {r.ceiling for r in records if r.ceiling}
    names = [name for name in system_names(records) if name not in ceilings and (systems is None or name in systems)]
    tables = []
    for dtype in dtypes:
        by = {(r.system, r.n_cols): r for r in records if r.dtype == dtype}
        widths = [w for w in SHOWN_WIDTHS if any(n_cols == w for _, n_cols in by)]
        if widths:
            of = "/".join(sorted(ceilings)) or "copy"
            top = (f"{SHORT[dtype]}, fraction of {of}, columns", *(f"{w:,}" for w in widths))
            tables.append(_table(top, [(name, [_fraction(by.get((name, w))) for w in widths]) for name in names]))
    return tables


def loss_tables(records: Sequence[Record]) -> list[str]:
    """A table for each op: shapes down, systems across; time over the ceiling's, or fraction; peak memory beside."""
    tables = []
    for op in dict.fromkeys(r.op for r in records):
        mine = [r for r in records if r.op == op]
        ceilings = {r.ceiling for r in mine if r.ceiling}
        names = [name for name in system_names(mine) if name not in ceilings]
        # what reads and writes the logits once is compared with a copy by its time, which is what a user waits
        over = op == "cross_entropy"
        of = "/".join(sorted(ceilings)) or "copy"
        shapes = sorted({(r.n_rows, r.n_cols) for r in mine}, key=lambda s: (s not in LOSS_SHAPES, s[1]))
        by = {(r.system, r.n_rows, r.n_cols): r for r in mine}
        what = "time over that of copying the logits" if over else f"fraction of {of}"
        top = (f"{op}, {what} (peak MB)", *(f"{rows} x {cols:,}" for rows, cols in shapes))
        cell: Callable[[Record | None], str] = _times_over if over else _fraction
        lines = [(name, [_with_peak(cell, by.get((name, *shape))) for shape in shapes]) for name in names]
        tables.append(_table(top, lines))
    return tables


def _fraction(record: Record | None) -> str:
    if record and record.fraction is not None and record.status == "ok":
        return f"{record.fraction:.2f}"
    return fraction_cell(record)


def _times_over(record: Record | None) -> str:
    if record and record.ms and record.bytes and record.ceiling_gbps and record.status == "ok":
        return f"{record.ms / (record.bytes / record.ceiling_gbps / 1e6):.2f}x"
    return fraction_cell(record)


def _with_peak(cell: Callable[[Record | None], str], record: Record | None) -> str:
    if record is None or record.peak_bytes is None or record.status != "ok":
        return cell(record)
    megabytes = record.peak_bytes / 1e6
    return f"{cell(record)} ({megabytes:,.0f})" if megabytes >= 10 else f"{cell(record)} ({megabytes:.2f})"


def _table(top: Sequence[str], lines: Sequence[tuple[str, Sequence[str]]]) -> str:
    rows = ["| " + " | ".join(top) + " |", "|---|" + "---|" * (len(top) - 1)]
    for name, cells in lines:
        if not any(cells):
            continue
        mark = "**" if name.startswith(OURS) else ""
        shown = [f"{mark}{cell}{mark}" if cell else "" for cell in cells]
        rows.append(f"| {mark}`{name}`{mark} | {' | '.join(shown)} |")
    return "\n".join(rows)
