"""One self-contained HTML page: the plot as a data URI, tables that sort on a click, nothing fetched from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

from fused_softmax.lab.bench.record import Header, Record
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
