"""README.md's results, made from benchmarks/results/h200/*.json between markers, and the check for staleness.

The opening marker carries a hash of the results; the tables are compared as text, the plot by that hash, because pixels
differ between versions of matplotlib. Any set of result files will do: what is not there is not shown.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from pathlib import Path

from fused_softmax.lab.bench.cases import LOSS_FAMILIES, PEERS
from fused_softmax.lab.bench.markdown import ladder_tables, loss_tables, measured_on, peer_tables
from fused_softmax.lab.bench.plots import draw
from fused_softmax.lab.bench.record import Header, NotResults, Record, read_results, write_atomically
from fused_softmax.lab.bench.report import Recorded, by_width

MARKED = re.compile(r"<!-- results:begin[^>]*-->.*?<!-- results:end -->", re.DOTALL)
LADDER = "ladder"
ROW_OPS = ("softmax", "softmax_backward", "log_softmax", "log_softmax_backward")
SHOWN_FILES = (LADDER, *ROW_OPS, *LOSS_FAMILIES)
PLOT = Path("docs") / "images" / "softmax.png"
Results = dict[str, tuple[Header, list[Record]]]


def result_files(folder: Path) -> list[Path]:
    """Result files of one GPU, by name; none when the folder is not there."""
    return sorted(folder.glob("*.json")) if folder.is_dir() else []


def gpu_folder(root: Path) -> Path:
    """benchmarks/results/h200 of a repository."""
    return root / "benchmarks" / "results" / "h200"


def read_folder(folder: Path) -> dict[Path, tuple[Header, list[Record]]]:
    """The benchmark's runs in a folder, by file; records of other commands, such as a fuzzer's, are passed over."""
    found = {}
    for file in result_files(folder):
        with suppress(NotResults):
            found[file] = read_results(file)
    return found


def recorded_results(folder: Path) -> Recorded:
    """Records made on a GPU by (op, system, dtype, n_cols); of several files the later one counts."""
    records = [record for _, run in read_folder(folder).values() for record in by_width(run)]
    return {(r.op, r.system, r.dtype, r.n_cols): r for r in records}


def results(folder: Path) -> Results:
    """What the README shows, by file name less its suffix, in the order in which it is shown."""
    files = {file.stem: file for file in result_files(folder)}
    return {name: read_results(files[name]) for name in SHOWN_FILES if name in files}


def digest(found: Results) -> str:
    """Hash of the results that the README is made from."""
    if not found:
        return "none"
    lines = []
    for name, (head, records) in found.items():
        lines.append(f"{name} {head.device} {sorted(head.versions.items())}")
        lines += [f"{r.key} {r.status} {r.ms} {r.fraction} {r.gbps} {r.peak_bytes}" for r in records]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def plotted(found: Results) -> tuple[Header, list[Record]] | None:
    """Ours and the peers, bfloat16, softmax: the forward's records, or the ladder's where there are no others."""
    name = next((name for name in ("softmax", LADDER) if name in found), None)
    if name is None:
        return None
    head, records = found[name]
    kept = [r for r in records if r.op == "softmax" and r.dtype == "bfloat16" and r.system in (*PEERS, r.ceiling)]
    return head, kept


def body(found: Results) -> str:
    """The text between the markers."""
    if not found:
        return "No results have been recorded yet."
    parts = []
    drawn = plotted(found)
    if drawn and any(r.fraction for r in drawn[1]):
        parts.append(f"![fraction of copy against width, softmax of bfloat16 rows]({PLOT.as_posix()})")
    for name, (head, records) in found.items():
        make = ladder_tables if name == LADDER else loss_tables if name in LOSS_FAMILIES else peer_tables
        tables = make(records)
        if tables:
            parts += [f"**{_title(name)}** {measured_on(head, records)}", *tables]
    return "\n\n".join(parts)


def _title(name: str) -> str:
    return {
        LADDER: "The ladder.",
        "softmax": "softmax beside its peers.",
        "softmax_backward": "softmax's gradient.",
        "log_softmax": "log_softmax.",
        "log_softmax_backward": "log_softmax's gradient.",
        "cross_entropy": "Cross-entropy.",
        "token_logprobs": "Token log-probabilities, with entropy and logsumexp.",
        "masked_softmax": "Masked softmax.",
    }[name]


def section(root: Path) -> str:
    """What belongs between the markers now, markers included."""
    found = results(gpu_folder(root))
    opening = f"<!-- results:begin {digest(found)} made by `fused-softmax report --readme` -->"
    return f"{opening}\n{body(found)}\n<!-- results:end -->"


def write(root: Path) -> None:
    """Rewrite README.md between its markers, and the plot; raises ValueError without markers."""
    readme = root / "README.md"
    text = readme.read_text()
    if not MARKED.search(text):
        raise ValueError(f"{readme} has no <!-- results:begin --> ... <!-- results:end -->")
    new = section(root)
    write_atomically(readme, MARKED.sub(lambda _: new, text))
    drawn = plotted(results(gpu_folder(root)))
    picture = draw(*drawn) if drawn else None
    if picture:
        write_atomically(root / PLOT, picture)


def stale(root: Path) -> str:
    """'' when README.md is what `write` would make of the results, else what is out of date."""
    found = MARKED.search((root / "README.md").read_text())
    if not found:
        return "README.md has no markers for the results"
    if found.group(0) != section(root):
        return "README.md's tables are not what the results give: run `fused-softmax report --readme`"
    if PLOT.as_posix() in found.group(0) and not (root / PLOT).is_file():
        return f"{PLOT.as_posix()} is missing: run `fused-softmax report --readme`"
    return ""
