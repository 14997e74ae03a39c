"""README.md's results, made from benchmarks/results/h200/*.json between markers, and the check for staleness.

The opening marker carries a hash of the results. The check compares the tables as text and the plot by that hash,
because pixels differ between versions of matplotlib. A missing result file leaves its tables out. Fractions are of the
device's own plain pass over the same tensor in the same run (higher is better). Our rows are bold. The cell of a system
that is wrong, refuses, or runs out of resources says so.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from fused_softmax.lab.bench.cases import LOSS_FAMILIES, LOSS_SHAPES, PEERS
from fused_softmax.lab.bench.inputs import SHORT
from fused_softmax.lab.bench.plots import draw
from fused_softmax.lab.bench.record import Header, NotResults, Record, read_results, write_atomically
from fused_softmax.lab.bench.report import Recorded, by_width, fraction_cell, system_names

MARKED = re.compile(r"<!-- results:begin[^>]*-->.*?<!-- results:end -->", re.DOTALL)
LADDER = "ladder"
ROW_OPS = ("softmax", "softmax_backward", "log_softmax", "log_softmax_backward")
SHOWN_FILES = (LADDER, *ROW_OPS, *LOSS_FAMILIES)
PLOT = Path("docs") / "images" / "softmax.png"
Results = dict[str, tuple[Header, list[Record]]]
# narrow, odd, wide, and the vocabularies: the columns that a reader of the README looks for
SHOWN_WIDTHS = (256, 1000, 4096, 16384, 32768, 50257, 65536, 128256, 151936, 262144)
OURS = "fused_softmax"


def result_files(folder: Path) -> list[Path]:
    """Result files of one GPU, by name; none when the folder is not there."""
    return sorted(folder.glob("*.json")) if folder.is_dir() else []


def gpu_folder(root: Path) -> Path:
    """benchmarks/results/h200 of a repository."""
    return root / "benchmarks" / "results" / "h200"


def read_folder(folder: Path) -> dict[Path, tuple[Header, list[Record]]]:
    """The benchmark's runs in a folder, by file; records of other commands, such as a fuzzer's, are passed over."""
    found = {}
    for file in result_files(folder):
        with suppress(NotResults):
            found[file] = read_results(file)
    return found


def recorded_results(folder: Path) -> Recorded:
    """Records made on a GPU by (op, system, dtype, n_cols); of several files the later one counts."""
    records = [record for _, run in read_folder(folder).values() for record in by_width(run)]
    return {(r.op, r.system, r.dtype, r.n_cols): r for r in records}


def results(folder: Path) -> Results:
    """What the README shows, by file name less its suffix, in the order in which it is shown."""
    files = {file.stem: file for file in result_files(folder)}
    return {name: read_results(files[name]) for name in SHOWN_FILES if name in files}


def digest(found: Results) -> str:
    """Hash of the results that the README is made from."""
    if not found:
        return "none"
    lines = []
    for name, (head, records) in found.items():
        lines.append(f"{name} {head.device} {sorted(head.versions.items())}")
        lines += [f"{r.key} {r.status} {r.ms} {r.fraction} {r.gbps} {r.peak_bytes}" for r in records]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def plotted(found: Results) -> tuple[Header, list[Record]] | None:
    """Ours and the peers, bfloat16, softmax: the forward's records, or the ladder's where there are no others."""
    name = next((name for name in ("softmax", LADDER) if name in found), None)
    if name is None:
        return None
    head, records = found[name]
    kept = [r for r in records if r.op == "softmax" and r.dtype == "bfloat16" and r.system in (*PEERS, r.ceiling)]
    return head, kept


def body(found: Results) -> str:
    """The text between the markers."""
    if not found:
        return "No results have been recorded yet."
    parts = []
    drawn = plotted(found)
    if drawn and any(r.fraction for r in drawn[1]):
        parts.append(f"![fraction of copy against width, softmax of bfloat16 rows]({PLOT.as_posix()})")
    for name, (head, records) in found.items():
        make = ladder_tables if name == LADDER else loss_tables if name in LOSS_FAMILIES else peer_tables
        tables = make(records)
        if tables:
            parts += [f"**{_title(name)}** {measured_on(head, records)}", *tables]
    return "\n\n".join(parts)


def _title(name: str) -> str:
    return {
        LADDER: "The ladder.",
        "softmax": "softmax beside its peers.",
        "softmax_backward": "softmax's gradient.",
        "log_softmax": "log_softmax.",
        "log_softmax_backward": "log_softmax's gradient.",
        "cross_entropy": "Cross-entropy.",
        "token_logprobs": "Token log-probabilities, with entropy and logsumexp.",
        "masked_softmax": "Masked softmax.",
    }[name]


def section(root: Path) -> str:
    """What belongs between the markers now, markers included."""
    found = results(gpu_folder(root))
    opening = f"<!-- results:begin {digest(found)} made by `fused-softmax report --readme` -->"
    return f"{opening}\n{body(found)}\n<!-- results:end -->"


def write(root: Path) -> None:
    """Rewrite README.md between its markers, and the plot; raises ValueError without markers."""
    readme = root / "README.md"
    text = readme.read_text()
    if not MARKED.search(text):
        raise ValueError(f"{readme} has no <!-- results:begin --> ... <!-- results:end -->")
    new = section(root)
    write_atomically(readme, MARKED.sub(lambda _: new, text))
    drawn = plotted(results(gpu_folder(root)))
    picture = draw(*drawn) if drawn else None
    if picture:
        write_atomically(root / PLOT, picture)


def stale(root: Path) -> str:
    """'' when README.md is what `write` would make of the results, else what is out of date."""
    found = MARKED.search((root / "README.md").read_text())
    if not found:
        return "README.md has no markers for the results"
    if found.group(0) != section(root):
        return "README.md's tables are not what the results give: run `fused-softmax report --readme`"
    if PLOT.as_posix() in found.group(0) and not (root / PLOT).is_file():
        return f"{PLOT.as_posix()} is missing: run `fused-softmax report --readme`"
    return ""


# --- tables --------------------------------------------------------------------------------------------------------


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
    """A table for each op: shapes down, systems across; time over the ceiling's, or fraction; then peak memory."""
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
