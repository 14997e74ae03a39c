"""Runs with other versions of torch and Triton: the records, and the site's table of them.

A record is written by tests/extended/versions.py when a run ends, and by nothing else. A run with the same `what`,
torch, Triton and Python replaces an older one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

RECORDS = Path("benchmarks") / "compatibility.json"
WHAT = {
    "below the floor": "import, CPU results and gradients, `patch()`, `plan_for`, the command line",
    "interpreted": "kernels on CPU tensors through Triton's interpreter",
    "compiled": "kernels cross-compiled for the targets",
    "measured": "kernels measured on a GPU",
}


@dataclass(frozen=True)
class Run:
    """One run of tests with one set of versions. `tests`: the files or checks that were run."""

    what: str
    torch: str
    triton: str
    python: str
    passed: int
    failed: int
    skipped: int
    tests: tuple[str, ...]
    commit: str
    date: str
    device: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        return self.what, self.torch, self.triton, self.python, self.device

    @property
    def order(self) -> tuple[object, ...]:
        return list(WHAT).index(self.what), numbers(self.torch), numbers(self.triton), self.python, self.device


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, for order: "2.13.0+cpu" is (2, 13, 0)."""
    parts = version.split("+")[0].split(".")
    return tuple(int(part) if part.isdigit() else -1 for part in parts)


def load(file: Path) -> list[Run]:
    """The recorded runs; none where there is no file."""
    if not file.is_file():
        return []
    return [Run(**{**fields, "tests": tuple(fields["tests"])}) for fields in json.loads(file.read_text())]


def record(file: Path, run: Run) -> None:
    """Writes `run` to the file, in the place of an older run of its kind."""
    runs = {r.key: r for r in load(file)} | {run.key: run}
    lines = [asdict(r) for r in sorted(runs.values(), key=lambda r: r.order)]
    file.write_text(json.dumps(lines, indent=1) + "\n")


def measured(results: Path) -> list[Run]:
    """The GPU runs in benchmarks/results: of each folder, device and set of versions how many results, by outcome."""
    counts: dict[tuple[str, str, str, str, str], list[object]] = {}
    for file in sorted(results.glob("*/*.json")):
        content = json.loads(file.read_text())
        head = content.get("header", {})
        versions = head.get("versions", {})
        # a fuzzer's and a table of errors have rows, not the benchmark's records
        if head.get("interpreted") or "records" not in content or not {"torch", "triton"} <= set(versions):
            continue
        ours = [r for r in content["records"] if r.get("system") == "fused_softmax"]
        wrong = sum(r.get("status") in ("wrong", "error") for r in ours)
        key = (versions["torch"], versions["triton"], head.get("python", ""), head["device"], file.parent.name)
        passed, failed, files, commit, date = counts.get(key, [0, 0, [], "", ""])
        assert isinstance(passed, int) and isinstance(failed, int) and isinstance(files, list)
        newest = max((str(date), str(commit)), (head["date"], head["commit"]))
        counts[key] = [passed + len(ours) - wrong, failed + wrong, [*files, file.stem], newest[1], newest[0]]
    runs = []
    for (torch, triton, python, device, _), (passed, failed, files, commit, date) in counts.items():
        assert isinstance(passed, int) and isinstance(failed, int) and isinstance(files, list)
        runs.append(
            Run("measured", torch, triton, python, passed, failed, 0, tuple(files), str(commit), str(date), device)
        )
    return runs


def outcome(run: Run) -> str:
    """The result in words; a failure is never hidden by what passed."""
    kind = "results" if run.what == "measured" else "checks" if run.what == "below the floor" else "tests"
    skipped = f", {run.skipped} skipped" if run.skipped else ""
    if run.failed:
        return f"**{run.failed} of {run.passed + run.failed} {kind} fail**{skipped}"
    return f"all {run.passed} {kind} pass{skipped}"


def version_table(runs: Iterable[Run]) -> str:
    """The runs as a table in Markdown, a row for each."""
    lines = ["| torch | Triton | Python | what was run | result | commit, date |", "|---|---|---|---|---|---|"]
    for run in sorted(runs, key=lambda r: r.order):
        what = f"measured on {run.device}" if run.what == "measured" else f"{run.what}: {', '.join(run.tests)}"
        # a + says that the tree had changes
        commit = run.commit if run.commit.endswith("+") else run.commit[:7]
        cells = (run.torch, run.triton, run.python, what, outcome(run), f"{commit}, {run.date[:10]}")
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *(f"- {name}: {text}" for name, text in WHAT.items())]
    return "\n".join(lines)
