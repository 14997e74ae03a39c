"""Files of a run: results.json and results.csv after every case, index.html and ladder.png at its end."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fused_softmax.lab.bench.ops import family
from fused_softmax.lab.bench.page import page
from fused_softmax.lab.bench.plots import draw
from fused_softmax.lab.bench.record import Header, Record, to_csv, to_json, write_atomically
from fused_softmax.lab.bench.report import Recorded


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
