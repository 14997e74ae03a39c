"""README's plot and table, from benchmarks/results/h200.

The plot's SVG carries a hash of its records, because pixels differ between versions of matplotlib: the check for
staleness compares the table as text and the plot by this hash.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from fused_softmax.lab.bench import plots
from fused_softmax.lab.bench.report import Recorded, fraction_cell, recorded_results
from fused_softmax.lab.record import Header, Record, write_atomically
from fused_softmax.lab.results import gpu_folder
from pages.compatibility import floors
from pages.targets import GPUS, measured_targets
from pages.version_runs import measured

PAGE = Path("README.md")
PLOT = Path("docs") / "images" / "softmax.svg"
PEERS = ("fused_softmax", "torch", "torch.compile", "liger", "quack")
# the op of the plot, and the rows of the table: op, dtype and columns of each, at most 8
DRAWN = ("softmax", "bfloat16")
SHOWN = (
    ("softmax", "bfloat16", 4096),
    ("softmax", "bfloat16", 128256),
    ("softmax_backward", "bfloat16", 128256),
    ("log_softmax", "bfloat16", 128256),
    ("cross_entropy", "bfloat16", 128256),
    ("token_logprobs", "bfloat16", 128256),
    ("masked_softmax_causal", "bfloat16", 2048),
)
NAMES = {"cross_entropy": "cross_entropy, loss and gradient"}


def address(root: Path) -> str:
    """The repository's address, which stands in pyproject.toml alone."""
    found = re.search(r'^Repository = "(.+)"$', (root / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise ValueError("pyproject.toml names no Repository under [project.urls]")
    return found[1]


def cell(record: Record | None) -> str:
    """A fraction with two digits, a status, or nothing where there is no such record."""
    if record and record.fraction is not None and record.status == "ok":
        return f"{record.fraction:.2f}"
    return fraction_cell(record) or "–"


def origins(heads: Iterable[Header]) -> str:
    """Device, versions and commits of several runs, each once."""
    heads = list(heads)
    commits = dict.fromkeys(f"{head.commit[:7] or 'unknown'} ({head.date[:10]})" for head in heads)
    packages = {name: version for head in heads for name, version in head.versions.items() if name != "numpy"}
    versions = ", ".join(f"{name} {version}" for name, version in packages.items())
    devices = " and ".join(dict.fromkeys(head.device for head in heads))
    return f"{devices}; {versions}; recorded at commit{'s' * (len(commits) > 1)} {', '.join(commits)}."


def table(recorded: Recorded) -> str:
    """The table with its origin; each fraction is of the device's own pass of the row's kind."""
    rows, heads = [], []
    for key in SHOWN:
        found = {name: recorded.get((key[0], name, *key[1:])) for name in PEERS}
        ours = found["fused_softmax"]
        if ours is None:
            continue
        heads += [pair[0] for pair in found.values() if pair]
        cells = [cell(pair[1] if pair else None) for pair in found.values()]
        cells[0] = f"**{cells[0]}**"
        shape = f"{ours[1].n_rows:,} x {ours[1].n_cols:,}"
        rows.append(" | ".join([f"| {NAMES.get(key[0], key[0])}", shape, ours[1].ceiling, *cells]) + " |")
    heads_of = ("fraction of the device's own pass (higher is better)", "bf16 rows x columns", "pass")
    top = "| " + " | ".join((*heads_of, "ours", "torch", "compile", "Liger", "QuACK")) + " |"
    return "\n".join([top, "|---|---|---|---|---|---|---|---|", *rows, "", origins(heads)]) if rows else "Not recorded."


def tables(root: Path) -> dict[str, str]:
    """The text between README's markers."""
    recorded = recorded_results(gpu_folder(root))
    parts = [table(recorded)]
    if plotted(recorded):
        picture = f"{address(root)}/raw/main/{PLOT.as_posix()}"
        parts.insert(0, f"![Softmax of bfloat16 rows on an H200: fraction of copy by number of columns]({picture})")
    return {"results": "\n\n".join(parts), "where": where(root)}


def where(root: Path) -> str:
    """The GPUs and versions that were measured, those that were only compiled for, and the oldest versions."""
    results = root / "benchmarks" / "results"
    runs = measured(results)
    found = []
    # a run on several GPUs names their number first
    one = {run: re.sub(r"^\d+ x ", "", run.device) for run in runs}
    for device in dict.fromkeys(one.values()):
        pairs = sorted({(run.torch.split("+")[0], run.triton) for run in runs if one[run] == device})
        found.append(f"{device}, with " + ", ".join(f"torch {t} and Triton {v}" for t, v in pairs))
    lines = [f"- **Measured**: {'; '.join(found)}."]
    others = [gpus for target, gpus in GPUS.items() if target not in measured_targets(results)]
    lines.append(f"- **Compiled for, not measured**: {', '.join(others)}.")
    return "\n".join([*lines, f"- **Versions**: {floors()}"])


def plotted(recorded: Recorded) -> list[Record]:
    """The records of README's plot: ours and the peers."""
    op, dtype = DRAWN
    mine = [r for _, r in recorded.values() if (r.op, r.dtype) == DRAWN and r.system in PEERS]
    return plots.panels_of(mine).get(op, {}).get(dtype, [])


def digest(records: Iterable[Record]) -> str:
    """Hash of the plot's records."""
    lines = sorted(f"{r.key} {r.status} {r.fraction}" for r in records)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def write_plot(root: Path) -> Path | None:
    """Write README's plot where there is one to write; returns its file."""
    records = plotted(recorded_results(gpu_folder(root)))
    if not records:
        return None
    svg = plots.draw(*DRAWN, records, standalone=True)
    write_atomically(root / PLOT, svg.replace("<svg", f'<svg data-records="{digest(records)}"', 1))
    return root / PLOT


def stale_plot(root: Path) -> str:
    """'' when README's plot is of the records, else a line that says so."""
    records = plotted(recorded_results(gpu_folder(root)))
    if not records:
        return ""
    file = root / PLOT
    if not file.is_file() or f'data-records="{digest(records)}"' not in file.read_text(encoding="utf-8"):
        return f"{PLOT.as_posix()} is not of the records: `make pages` draws it"
    return ""
