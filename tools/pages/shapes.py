"""The tables of docs/other-dims.md, from the recorded runs of `fused-softmax bench --random-shapes` on a GPU."""

from __future__ import annotations

from pathlib import Path

from fused_softmax.lab.bench.report import Rows, shape_classes
from fused_softmax.lab.bench.shapes import CLASSES, LAYOUTS
from fused_softmax.lab.record import Header, Record
from fused_softmax.lab.results import read_folder
from pages.performance import command, markdown
from pages.readme import origins

PAGE = Path("docs") / "other-dims.md"
RESULTS = Path("benchmarks") / "results" / "h200-shapes"
DTYPES = ("bf16", "fp32")


def load(root: Path) -> dict[int, tuple[list[Header], list[Record]]]:
    """The headers and the records of the recorded runs, by their seed."""
    found: dict[int, tuple[list[Header], list[Record]]] = {}
    for head, records in read_folder(root / RESULTS).values():
        if head.seed is not None:
            heads, all_records = found.setdefault(head.seed, ([], []))
            heads.append(head)
            all_records += records
    return found


def by_class(made: Rows, op: str) -> Rows:
    """The classes of one op, with a column for each dtype: worst, geometric mean, and shapes."""
    cells: dict[str, dict[str, str]] = {}
    for name, dtype, group, count, worst, _, mean in made.rows:
        if name == op:
            cells.setdefault(group, {})[dtype] = f"{worst} / {mean} ({count})"
    groups = sorted(cells, key=[*CLASSES, *LAYOUTS].index)
    rows = tuple((group, *(cells[group].get(dtype, "") for dtype in DTYPES)) for group in groups)
    return Rows(op, (f"`{op}`", *DTYPES), rows)


def tables(root: Path) -> dict[str, str]:
    """The text between the markers; the page says so if no run is recorded."""
    parts = []
    for seed, (heads, records) in load(root).items():
        for made in shape_classes(records):
            if "class" in made.columns:
                parts.append(f"Seed {seed}. Worst fraction / geometric mean (number of shapes), higher is better:")
                parts += [markdown(by_class(made, op)) for op in dict.fromkeys(row[0] for row in made.rows)]
            else:  # of a run with torch
                parts.append(f"{made.title[0].upper()}{made.title[1:]}:")
                parts.append(markdown(Rows("", made.columns[:3], tuple(row[:3] for row in made.rows))))
        parts.append(f"{origins(heads)} Made by:")
        parts += [f"    {line}" for line in dict.fromkeys(command(head) for head in heads)]
    return {"shapes": "\n\n".join(parts) or "No run is recorded yet."}
