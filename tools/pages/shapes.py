"""The tables of docs/other-dims.md, from runs of `bench --table shapes` and `bench --random-shapes` on a GPU."""

from __future__ import annotations

from pathlib import Path

from fused_softmax.lab.bench.cases import SHAPES
from fused_softmax.lab.bench.report import Rows, shape_classes
from fused_softmax.lab.bench.shapes import CLASSES, LAYOUTS
from fused_softmax.lab.record import Header, Record
from fused_softmax.lab.results import read_folder
from pages.performance import command, markdown
from pages.readme import origins

PAGE = Path("docs") / "other-dims.md"
RESULTS = Path("benchmarks") / "results" / "h200-shapes"
DTYPES = ("bf16", "fp32")
# seeds whose tables the page has, next to the newest with torch for each of these ops; older ones are named
SHOWN, NEXT_TO_TORCH = 6, {"softmax", "softmax_backward"}
# a column of the named shapes: (op, system), and its name
NAMED = {
    ("softmax", "fused_softmax"): "softmax",
    ("softmax_backward", "fused_softmax"): "its gradient",
    ("cross_entropy", "fused_softmax"): "cross_entropy",
    ("softmax", "torch"): "torch's softmax",
    ("softmax_backward", "torch"): "torch's gradient",
}
Runs = list[tuple[Header, list[Record]]]


def load(root: Path) -> Runs:
    """The recorded runs, the newest first."""
    return sorted(read_folder(root / RESULTS).values(), key=lambda run: run[0].date, reverse=True)


def by_seed(runs: Runs) -> dict[int, tuple[list[Header], list[Record]]]:
    """The headers and the records of random shapes, by their seed."""
    found: dict[int, tuple[list[Header], list[Record]]] = {}
    for head, records in runs:
        if head.seed is not None:
            heads, all_records = found.setdefault(head.seed, ([], []))
            heads.append(head)
            all_records += records
    return found


def shown(seeds: dict[int, tuple[list[Header], list[Record]]]) -> list[int]:
    """The seeds that the page has, the newest first: the comparison with torch stays as newer seeds come."""
    missing, found = NEXT_TO_TORCH, []
    for place, (seed, (_, records)) in enumerate(seeds.items()):
        new = {r.op for r in records if r.system == "torch"} & missing
        missing = missing - new
        if place < SHOWN or new:
            found.append(seed)
    return found


def made_by(heads: list[Header]) -> list[str]:
    """Paragraphs: where the runs come from, and each command once."""
    return [f"{origins(heads)} Made by:", *(f"    {line}" for line in dict.fromkeys(map(command, heads)))]


def named(runs: Runs) -> str:
    """The named shapes: the newest fraction of each, bf16 / fp32."""
    fractions: dict[tuple[object, ...], str] = {}
    heads = []
    for head, records in runs:
        for r in records if head.seed is None else ():
            key = (r.outer, r.n_cols, r.inner, r.op, r.system, r.dtype)
            asked = key[:3] in SHAPES and (r.op, r.system) in NAMED
            if asked and r.fraction is not None and key not in fractions:
                fractions[key] = f"{r.fraction:.2f}"
                heads.append(head)
    rows = []
    for shape in SHAPES:
        pairs = [[fractions.get((*shape, *of, dtype), "") for dtype in ("bfloat16", "float32")] for of in NAMED]
        if any(map(any, pairs)):
            rows.append((str(shape), *(" / ".join(pair) if any(pair) else "" for pair in pairs)))
    if not rows:
        return "No run is recorded yet."
    table = markdown(Rows("", ("`(outer, n_cols, inner)`", *NAMED.values()), tuple(rows)))
    return "\n\n".join((table, *made_by(heads)))


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
    runs = load(root)
    parts, seeds = [], by_seed(runs)
    for seed in (of_page := shown(seeds)):
        heads, records = seeds[seed]
        for made in shape_classes(records):
            if "class" in made.columns:
                parts.append(f"Seed {seed}. Worst fraction / geometric mean (number of shapes), higher is better:")
                parts += [markdown(by_class(made, op)) for op in dict.fromkeys(row[0] for row in made.rows)]
            else:  # of a run with torch
                parts.append(f"{made.title[0].upper()}{made.title[1:]}:")
                parts.append(markdown(Rows("", made.columns[:3], tuple(row[:3] for row in made.rows))))
        parts += made_by(heads)
    if (others := len(seeds) - len(of_page)) > 0:
        parts.append(f"`{RESULTS}` has runs of {others} older seeds, too.")
    return {"named": named(runs), "shapes": "\n\n".join(parts) or "No run is recorded yet."}
