"""`fused-softmax report --compare OLD NEW`: two runs of the same cases, per op, from their JSON alone.

A case is an op, a dtype, a shape and a way of timing. Only records of `fused_softmax` are compared. Fractions are of
the ceiling that the same run measured; the ratio is of the two medians, new over old.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

from fused_softmax.lab.bench.report import Rows, shape
from fused_softmax.lab.record import Header, Record
from fused_softmax.lab.results import read_folder, read_results

OURS = "fused_softmax"
Key = tuple[str, str, str, str]  # the file's name where folders are compared, then what makes a case


@dataclass(frozen=True)
class Run:
    """The records of `fused_softmax` in a file or in all files of a folder, and each file's header by its name."""

    headers: dict[str, Header]
    records: dict[Key, Record]


@dataclass(frozen=True)
class Extreme:
    """The worst value of several cases, the case that has it, and the geometric mean."""

    worst: float
    at: str
    mean: float


@dataclass(frozen=True)
class Comparison:
    """One op and one way of timing. `old` and `new` are fractions of the ceiling, None where there is no ceiling."""

    op: str
    timed_by: str
    cases: int
    old: Extreme | None
    new: Extreme | None
    ratio: Extreme


def read_run(path: Path) -> Run:
    """Read a results file, or every results file of a folder; raises ValueError for any other path."""
    headers, records = {}, {}
    for file, (head, found) in (read_folder(path) if path.is_dir() else {path: read_results(path)}).items():
        headers[file.name], name = head, file.name if path.is_dir() else ""
        for r in (r for r in found if r.system == OURS):
            records[name, r.op, shape(r), r.timed_by if r.ms else ""] = r
    if not headers:
        raise ValueError(f"{path} holds no results: give a results file of `fused-softmax bench`, or a folder of them")
    return Run(headers, records)


def compare(old: Run, new: Run) -> list[Comparison]:
    """A comparison for each op and way of timing that both runs have cases of."""
    groups: dict[tuple[str, str], list[tuple[Record, Record]]] = {}
    for key, record in new.records.items():
        earlier = old.records.get(key)
        if earlier is not None and earlier.ms and record.ms:
            groups.setdefault((record.op, record.timed_by), []).append((earlier, record))
    found = []
    for (op, timed_by), pairs in groups.items():
        # a case without a ceiling in one run has no fraction to compare in the other
        both = [pair for pair in pairs if pair[0].fraction and pair[1].fraction]
        before = _extreme([(r.fraction or 0.0, shape(r)) for r, _ in both], min)
        after = _extreme([(r.fraction or 0.0, shape(r)) for _, r in both], min)
        ratio = _extreme([((n.ms or 0.0) / (o.ms or 1.0), shape(n)) for o, n in pairs], max)
        assert ratio is not None
        found.append(Comparison(op, timed_by, len(pairs), before, after, ratio))
    ops = list(dict.fromkeys(c.op for c in found))
    return sorted(found, key=lambda c: ops.index(c.op))


def _extreme(values: Sequence[tuple[float, str]], pick: Callable[..., tuple[float, str]]) -> Extreme | None:
    if not values:
        return None
    return Extreme(*pick(values), geometric_mean(value for value, _ in values))


def unmatched(old: Run, new: Run) -> list[str]:
    """Lines on the cases that could not be compared: those that one run lacks, and those that have no time."""
    lines = []
    for name, run, other in (("OLD", old, new), ("NEW", new, old)):
        timed = {key for key, record in run.records.items() if record.ms}
        alone = sorted(key[1:] for key in timed if not (found := other.records.get(key)) or not found.ms)
        if alone:
            ops = ", ".join(f"{op} {sum(key[0] == op for key in alone)}" for op in dict.fromkeys(k[0] for k in alone))
            lines.append(f"timed in {name} only: {ops}")
        for record in run.records.values():
            if record.status != "ok":
                lines.append(f"{record.status} in {name}: {record.op} {shape(record)}: {record.note}")
    return lines


def _cell(found: Extreme | None) -> tuple[str, str]:
    return ("", "") if found is None else (f"{found.worst:.3f} at {found.at}", f"{found.mean:.3f}")


def table(comparisons: Sequence[Comparison]) -> Rows:
    """The comparisons as a table, one row for each."""
    rows = [
        (c.op, c.timed_by, str(c.cases), *_cell(c.old), *_cell(c.new), *_cell(c.ratio)) for c in comparisons
    ]  # fmt: skip
    columns = ("op", "timed by", "cases", "OLD worst", "OLD mean", "NEW worst", "NEW mean")
    title = (
        "fused_softmax: fraction of the ceiling (higher is better), time of NEW over OLD (lower is better); "
        "means are geometric"
    )
    return Rows(title, (*columns, "NEW/OLD worst", "NEW/OLD mean"), tuple(rows))


def machines(name: str, run: Run) -> list[str]:
    """A line for each machine, set of versions and commit that the run's files name."""
    lines: dict[str, list[str]] = {}
    for file, head in run.headers.items():
        versions = ", ".join(
            f"{package} {head.versions[package]}" for package in ("torch", "triton") if package in head.versions
        )
        commit = f"commit {head.commit[:10] or 'unknown'}{' with changes' if head.dirty else ''}"
        speeds = ", ".join(f"{kind} {gbps:.0f} GB/s" for kind, gbps in head.ceilings.items()) or "no ceilings"
        seed = "" if head.seed is None else f"; random widths of seed {head.seed}"
        lines.setdefault(f"{head.device}; {versions}; {commit}; {speeds}{seed}", []).append(file)
    return [f"{name}: {line} ({', '.join(files)})" for line, files in lines.items()]
