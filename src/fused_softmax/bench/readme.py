"""The README's table and plot, made from benchmarks/results/h200/*.json between markers, and the check for staleness.

The opening marker carries a hash of the results; the table is compared as text, the plot by that hash, because pixels
differ between versions of matplotlib. Any set of result files will do: what is not there is not shown.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from fused_softmax.bench.ops import SHORT
from fused_softmax.bench.plots import draw
from fused_softmax.bench.record import Header, Record, from_json, write_atomically
from fused_softmax.bench.report import Recorded, by_width, fraction_cell, system_names

MARKED = re.compile(r"<!-- results:begin[^>]*-->.*?<!-- results:end -->", re.DOTALL)
# narrow, odd, wide, and the vocabularies: the rows that a reader of the README looks for
SHOWN_WIDTHS = (256, 1000, 4096, 16384, 32768, 50257, 65536, 128256, 151936, 262144)
SHOWN_DTYPES = ("bfloat16", "float32")


def result_files(folder: Path) -> list[Path]:
    """Result files of one GPU, by name; none when the folder is not there."""
    return sorted(folder.glob("*.json")) if folder.is_dir() else []


def gpu_folder(root: Path) -> Path:
    """benchmarks/results/h200 of a repository."""
    return root / "benchmarks" / "results" / "h200"


def recorded_results(files: Iterable[Path]) -> Recorded:
    """Records made on a GPU by (op, system, dtype, n_cols); of several files the later one counts."""
    records = [record for file in files for record in by_width(from_json(file.read_text())[1])]
    return {(r.op, r.system, r.dtype, r.n_cols): r for r in records}


def ladder(folder: Path) -> tuple[Header, list[Record]] | None:
    """The ladder's results, or any other softmax forward file's when there is no ladder."""
    files = {file.stem: file for file in result_files(folder)}
    name = next((n for n in ("ladder", "softmax") if n in files), next(iter(files), None))
    return from_json(files[name].read_text()) if name else None


def digest(folder: Path) -> str:
    """Hash of the results that the README is made from."""
    result = ladder(folder)
    if result is None:
        return "none"
    rows = [f"{r.key} {r.status} {r.fraction}" for r in result[1]]
    return hashlib.sha256("\n".join([result[0].device, *rows]).encode()).hexdigest()[:16]


def markdown(head: Header, records: list[Record]) -> str:
    """A Markdown table for each dtype: systems down, widths across, fractions of copy, ours in bold."""
    records = by_width(records)
    ceilings = {r.ceiling for r in records if r.ceiling}
    names = [name for name in system_names(records) if name not in ceilings]
    parts = []
    for dtype in SHOWN_DTYPES:
        by = {(r.system, r.n_cols): r for r in records if r.dtype == dtype and r.op == "softmax"}
        widths = [w for w in SHOWN_WIDTHS if any(n_cols == w for _, n_cols in by)]
        if not widths:
            continue
        parts.append(f"| {SHORT[dtype]}, columns | " + " | ".join(f"{w:,}" for w in widths) + " |")
        parts.append("|---|" + "---|" * len(widths))
        for name in names:
            cells = [_short(by.get((name, w))) for w in widths]
            if any(cells):
                mark = "**" if name == "fused_softmax" else ""
                shown = [f"{mark}{cell}{mark}" if cell else "" for cell in cells]
                parts.append(f"| {mark}`{name}`{mark} | {' | '.join(shown)} |")
        parts.append("")
    copy = [r.gbps for r in records if r.system == "copy" and r.gbps and r.ms and r.ms > 0.1]
    measured = f", copy {min(copy):,.0f} to {max(copy):,.0f} GB/s" if copy else ""
    versions = ", ".join(f"{n} {v}" for n, v in head.versions.items() if n != "numpy")
    about = (
        f"Fraction of the device's own copy of the same tensor in the same run: {head.device}{measured}; {versions}."
    )
    return "\n".join([about, "", *parts]).rstrip()


def _short(record: Record | None) -> str:
    cell = fraction_cell(record)
    return f"{record.fraction:.2f}" if record and record.fraction is not None and record.status == "ok" else cell


def section(root: Path) -> str:
    """What belongs between the markers now, markers included."""
    folder = gpu_folder(root)
    result = ladder(folder)
    opening = f"<!-- results:begin {digest(folder)} made by `fused-softmax report --readme` -->"
    if result is None:
        body = "No results have been recorded yet."
    else:
        body = f"![fraction of copy against width](docs/images/ladder.png)\n\n{markdown(*result)}"
    return f"{opening}\n{body}\n<!-- results:end -->"


def write(root: Path) -> None:
    """Rewrite README.md between its markers, and docs/images/ladder.png; raises ValueError without markers."""
    readme = root / "README.md"
    text = readme.read_text()
    if not MARKED.search(text):
        raise ValueError(f"{readme} has no <!-- results:begin --> ... <!-- results:end -->")
    new = section(root)
    write_atomically(readme, MARKED.sub(lambda _: new, text))
    result = ladder(gpu_folder(root))
    picture = draw(*result) if result else None
    if picture:
        write_atomically(root / "docs" / "images" / "ladder.png", picture)


def stale(root: Path) -> str:
    """'' when README.md is what `write` would make of the results, else what is out of date."""
    found = MARKED.search((root / "README.md").read_text())
    if not found:
        return "README.md has no markers for the results"
    if found.group(0) != section(root):
        return "README.md's table is not what the results give: run `fused-softmax report --readme`"
    result = ladder(gpu_folder(root))
    if result and any(r.fraction for r in result[1]) and not (root / "docs" / "images" / "ladder.png").is_file():
        return "docs/images/ladder.png is missing: run `fused-softmax report --readme`"
    return ""
