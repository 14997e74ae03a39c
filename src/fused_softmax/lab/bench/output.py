"""Files of a run: results.json and results.csv after every case, index.html and ladder.png at its end.

The page is one self-contained HTML file: the plot as a data URI, tables that sort on a click, nothing from a network.
"""

from __future__ import annotations

import base64
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path

from fused_softmax.lab.bench.ops import family
from fused_softmax.lab.bench.plots import draw
from fused_softmax.lab.bench.record import Header, Record, to_csv, to_json, write_atomically
from fused_softmax.lab.bench.report import STYLES, Recorded, Rows, details, matrix, notes, timings

STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem; color: #1b1b1b }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; font-size: 13px }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap }
th { cursor: pointer; background: #f4f4f4; position: sticky; top: 0 }
td:first-child, th:first-child, td:nth-child(2), td:last-child { text-align: left }
td:last-child { white-space: normal; max-width: 30rem }
.wrong, .error { color: #b00020; font-weight: 600 } .limit { color: #8a5a00 } img { max-width: 100% }
.scroll { overflow-x: auto }
"""

# numbers sort as numbers, text as text; a second click turns the order
SCRIPT = """
for (const th of document.querySelectorAll("th")) th.addEventListener("click", () => {
  const body = th.closest("table").tBodies[0], column = th.cellIndex, down = th.dataset.down !== "1";
  th.dataset.down = down ? "1" : "0";
  const value = (row) => row.cells[column].textContent, number = (text) => parseFloat(text);
  [...body.rows].sort((a, b) => {
    const [x, y] = [value(a), value(b)], both = !isNaN(number(x)) && !isNaN(number(y));
    return (both ? number(x) - number(y) : x.localeCompare(y)) * (down ? 1 : -1);
  }).forEach((row) => body.append(row));
});
"""


def _cell(text: str) -> str:
    mark = {"wrong": "wrong", "error": "error"}.get(text, "limit" if text in STYLES else "")
    return f'<td class="{mark}">{escape(text)}</td>' if mark else f"<td>{escape(text)}</td>"


def _table(rows: Rows) -> str:
    top = "".join(f"<th>{escape(column)}</th>" for column in rows.columns)
    body = "\n".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in rows.rows)
    return (
        f'<h2>{escape(rows.title)}</h2><div class="scroll"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def page(head: Header, records: Sequence[Record], recorded: Recorded, plot: bytes | None) -> str:
    """The page as text; `plot` is a PNG."""
    timed = any(r.ms for r in records)
    tables = [matrix(records), timings(records)] if timed else [details(records, recorded)]
    picture = ""
    if plot:
        uri = f"data:image/png;base64,{base64.b64encode(plot).decode()}"
        picture = f'<img alt="width against fraction of the ceiling" src="{uri}">'
    lines = "".join(f"<li>{escape(line)}</li>" for line in notes(head, records))
    about = escape(f"{head.command}, {head.date}, python {head.python}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>fused-softmax bench</title>'
        f"<style>{STYLE}</style></head><body><h1>fused-softmax bench</h1><p>{about}</p>{picture}<ul>{lines}</ul>"
        f"{''.join(_table(rows) for rows in tables)}<script>{SCRIPT}</script></body></html>\n"
    )


@dataclass
class Output:
    """Where a run is written. JSON and CSV after every case; the page and the plot, which take longer, by `finish`."""

    folder: Path
    # a second copy of the JSON, such as benchmarks/results/h200/ladder.json; or a folder, and in it each family's own
    record: Path | None = None
    recorded: Recorded = field(default_factory=dict)

    def make_folders(self) -> None:
        """Make the folders that will be written to; raises OSError where that cannot be done."""
        folders = [self.folder]
        if self.record is not None:
            folders.append(self.record.parent if self.record.suffix == ".json" else self.record)
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(errno.EACCES, "no permission to write into", str(folder))

    def save(self, head: Header, records: Sequence[Record]) -> None:
        """Write the results so far."""
        write_atomically(self.folder / "results.json", to_json(head, records))
        write_atomically(self.folder / "results.csv", to_csv(records))
        for file, kept in self._recorded_in(records):
            write_atomically(file, to_json(head, kept))

    def _recorded_in(self, records: Sequence[Record]) -> list[tuple[Path, Sequence[Record]]]:
        if self.record is None:
            return []
        if self.record.suffix == ".json":
            return [(self.record, records)]
        families = dict.fromkeys(family(r.op) for r in records)
        return [(self.record / f"{name}.json", [r for r in records if family(r.op) == name]) for name in families]

    def finish(self, head: Header, records: Sequence[Record]) -> list[Path]:
        """Write everything; returns the files, the page first."""
        self.save(head, records)
        try:
            plot = draw(head, records)
            # without times of this run the plot shows the recorded ones
            if plot is None:
                ops = {r.op for r in records}
                kept = [r for r in self.recorded.values() if r.op in ops]
                plot = draw(replace(head, device="recorded on an H200"), kept)
        except ModuleNotFoundError:  # matplotlib belongs to an extra; the tables do not wait for it
            plot = None
        write_atomically(self.folder / "index.html", page(head, records, self.recorded, plot))
        files = [self.folder / name for name in ("index.html", "results.json", "results.csv")]
        if plot:
            write_atomically(self.folder / "ladder.png", plot)
            files.append(self.folder / "ladder.png")
        return files + [file for file, _ in self._recorded_in(records)]
