"""Files of a run: results.json and results.csv after every case, index.html at its end.

The page is one HTML file without a network: plots as inline SVG, tables that sort and filter, light and dark.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from fused_softmax.lab.bench import plots, report
from fused_softmax.lab.bench.ops import family
from fused_softmax.lab.bench.report import Recorded
from fused_softmax.lab.record import Header, Record, to_csv, to_json, write_atomically


@dataclass(frozen=True)
class Figure:
    """A plot on the page: its caption's parts and its SVG."""

    op: str
    dtype: str
    svg: str


def figures(records: Sequence[Record]) -> list[Figure]:
    """A plot for each op and dtype of the records; none where matplotlib, of an extra, is not installed."""
    try:
        return [
            Figure(op, dtype, plots.draw(op, dtype, rows))
            for op, panels in plots.panels_of(records).items()
            for dtype, rows in panels.items()
        ]
    except ModuleNotFoundError:
        return []


def page(head: Header, records: Sequence[Record], recorded: Recorded) -> str:
    """The page as text. Without times of this run it shows the recorded plots of its ops, and says so."""
    ops = list(dict.fromkeys(r.op for r in records))
    timed = any(r.ms for r in records)
    kept = [] if timed else [(head, r) for head, r in recorded.values() if r.op in ops]
    drawn = figures(records) or figures([r for _, r in kept])
    ours = [
        r.fraction
        for panels in plots.panels_of(records).values()
        for rows in panels.values()
        for r in rows
        if r.system == plots.OURS and r.fraction and r.status == "ok"
    ]
    colors = plots.css(":root", False), plots.css(":root", True)
    template = Environment(
        loader=PackageLoader("fused_softmax.lab.bench", "."), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    ).get_template("page.html")  # fmt: skip
    return template.render(
        ops=ops,
        device=head.device,
        timed=timed,
        ours=ours,
        statuses=Counter(r.status for r in records).most_common(),
        figures={op: [f for f in drawn if f.op == op] for op in dict.fromkeys(f.op for f in drawn)},
        recorded={op: sorted({report.origin(head) for head, r in kept if r.op == op}) for op in ops},
        matrices=report.matrices(records) if timed else [],
        everything=report.everything(records, recorded),
        legend=report.LEGEND,
        environment=report.environment(head),
        failures=report.failures(records),
        failing=tuple(report.STYLES),
        colors=colors,
    )


@dataclass
class Output:
    """Where a run is written. JSON and CSV after every case; the page, which takes longer, by `finish`."""

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
        write_atomically(self.folder / "index.html", page(head, records, self.recorded))
        files = [self.folder / name for name in ("index.html", "results.json", "results.csv")]
        return files + [file for file, _ in self._recorded_in(records)]
