"""The tables of a run of `fused-softmax accuracy`: the terminal and docs/numerics.md show the same rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fused_softmax.lab.bench.inputs import SHORT
from fused_softmax.lab.bench.report import Rows

from .measure import GRADIENT, INTERPRETED_WIDEST, KINDS, UNITS, WIDTH_CLASSES, Row

Pair = tuple[float, float]
KIND_NAMES = {"normal": "normal", "logits": "logits", "wide": "wide range", "offset": "large offset"}


def number(error: float) -> str:
    """An error in ULP, short: 0.50, 4.2, 17, 4.2e+04."""
    if math.isinf(error):
        return "infinite"
    if error < 9.95:
        return f"{error:.2f}" if error < 0.995 else f"{error:.1f}"
    return f"{error:,.0f}" if error < 9999.5 else f"{error:.1e}"


def by_width(rows: Sequence[Row]) -> Rows:
    """The largest error of every kind of values, by width class."""
    known = {(row.low, row.high) for row in rows}
    classes = [c for c in WIDTH_CLASSES if c in known]
    heads = tuple(f"{low:,} to {high:,}" for low, high in classes)

    def pairs(row: Row) -> dict[str, Pair]:
        return {f"{row.low:,} to {row.high:,}": (row.ours, row.torch)}

    return _table("largest error in ULP by number of columns, ours / torch's (lower is better)", rows, heads, pairs)


def by_kind(rows: Sequence[Row]) -> Rows:
    """The largest error of every width, by kind of values."""
    heads = tuple(KIND_NAMES[kind] for kind in KINDS if any(kind in row.by_kind for row in rows))

    def pairs(row: Row) -> dict[str, Pair]:
        return {KIND_NAMES[kind]: pair for kind, pair in row.by_kind.items()}

    return _table("largest error in ULP by values, ours / torch's (lower is better)", rows, heads, pairs)


def _table(title: str, rows: Sequence[Row], heads: tuple[str, ...], pairs: Callable[[Row], dict[str, Pair]]) -> Rows:
    ops, dtypes = list(dict.fromkeys(row.op for row in rows)), list(SHORT)
    lines: dict[tuple[str, str, str, str], dict[str, Pair]] = {}
    for row in sorted(rows, key=lambda row: (ops.index(row.op), row.output == GRADIENT)):
        cells = lines.setdefault((row.op, row.output, row.dtype, row.unit), {})
        for head, pair in pairs(row).items():
            before = cells.get(head, (0.0, 0.0))
            cells[head] = max(before[0], pair[0]), max(before[1], pair[1])
    order = list(dict.fromkeys((op, output) for op, output, _, _ in lines))
    keys = sorted(lines, key=lambda key: (order.index((key[0], key[1])), dtypes.index(key[2])))
    found = [
        (op, output, SHORT[dtype], unit, *(_cell(lines[op, output, dtype, unit].get(head)) for head in heads))
        for op, output, dtype, unit in keys
    ]
    return Rows(title, ("op", "result", "dtype", "unit", *heads), tuple(found))


def _cell(pair: Pair | None) -> str:
    return "" if pair is None else f"{number(pair[0])} / {number(pair[1])}"


def notes(head: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    """Lines under the tables: units, results flushed to zero, the inputs, the machine."""
    used = dict.fromkeys(row.unit for row in rows)
    lines = [f"unit {name}: {text}" for name, text in UNITS.items() if name in used]
    lost = {
        who: {op: n for op in dict.fromkeys(r.op for r in rows) if (n := sum(count(r) for r in rows if r.op == op))}
        for who, count in (("ours", lambda r: r.ours_flushed), ("torch's", lambda r: r.torch_flushed))
    }
    counts = (f"{who} {', '.join(f'{op} {n:,}' for op, n in of.items()) or 'none'}" for who, of in lost.items())
    lines.append(
        "results below float32's smallest normal number (1.2e-38) that are 0, where rounding gives a subnormal number; "
        f"they are left out of the errors: {'; '.join(counts)}"
    )
    size = f"{head['rows']:,} rows a case" if head["rows"] else f"about {head['elements_of_a_cell']:,} elements a cell"
    lines.append(
        f"{sum(row.cases for row in rows):,} results of seed {head['seed']}: for each op, dtype and class "
        f"{head['widths_of_a_cell']} widths, half of them odd; {size}"
    )
    versions = ", ".join(f"{name} {v}" for name, v in head["versions"].items() if name in ("torch", "triton"))
    changed = " with changes" if head["dirty"] else ""
    lines.append(
        f"{head['device']}; {versions}; commit {head['commit'][:10] or 'unknown'}{changed}; {head['date'][:10]}"
    )
    if head["interpreted"]:
        lines.append(
            "run in Triton's interpreter, where bfloat16 stores truncate, by up to 1 ULP, and mishandle subnormal "
            f"numbers; rows above {INTERPRETED_WIDEST:,} columns are left out"
        )
    return lines
