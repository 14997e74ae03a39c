"""The tables of docs/numerics.md, from the recorded run of `fused-softmax accuracy` on a GPU."""

from __future__ import annotations

from pathlib import Path

from fused_softmax.lab.accuracy import session
from fused_softmax.lab.accuracy.table import by_kind, by_width, notes
from fused_softmax.lab.bench.report import Rows
from fused_softmax.lab.record import without_folders

PAGE = Path("docs") / "numerics.md"
RECORD = Path("benchmarks") / "results" / "h200" / "accuracy.json"


def tables(root: Path) -> dict[str, str]:
    """The text between the markers; the page says so if no run is recorded."""
    found = session.load(root / RECORD)
    if found is None:
        return {"accuracy": f"No run is recorded yet: `fused-softmax accuracy --record {RECORD.as_posix()}` on a GPU."}
    head, rows = found
    lines = [f"- {line}" for line in notes(head, rows)]
    made_by = without_folders(head["command"])
    lines.append(f"- kernel sources {head['kernel_hash'][:12]}; made by `{made_by}`")
    return {"accuracy": "\n\n".join([_markdown(by_width(rows)), _markdown(by_kind(rows)), "\n".join(lines)])}


def _markdown(made: Rows) -> str:
    heads = [f"{head} columns" if " to " in head else head for head in made.columns]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(row) + " |" for row in made.rows]
    return f"{made.title[0].upper()}{made.title[1:]}:\n\n" + "\n".join(lines)
