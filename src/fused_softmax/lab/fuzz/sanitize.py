"""Runs drawn cases under compute-sanitizer: processes of their own, whose summaries are read and added up.

Each process runs its share of the cases without workers of its own, so that it ends by itself and its sanitizer
reports. Nothing in it times out except the drawing, after the seconds that are given. Every tensor has its own CUDA
allocation, so that an access one element too far is seen. torch.compile and CUDA graphs are left out: the first costs
minutes there and launches the same kernels, the second needs PyTorch's own allocator.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fused_softmax.lab.registry import OPS

from .draw import Budget

if TYPE_CHECKING:
    from rich.console import Console

    from .session import Request

TOOLS = ("memcheck", "racecheck", "initcheck")
LEFT_OUT = ("compile", "cuda_graph")
CASES = 2000  # where neither cases nor seconds are asked for
PER_CLASS = 2  # cases of one class and way: many kernels, each a few times
GRACE = 180.0  # seconds after its end that a process may take for its last case and its report
# tensors that a process 20 to 100 times slower takes in a second; a few rows reach every regime
BUDGET = Budget(1 << 16, 1 << 8, 1 << 17, strided=1 << 12, widest=0.01, large=1.0, wide=0.3)
# parts of our kernels' names; other kernels are torch's, and cost time
KERNELS = (
    "softmax_", "row_statistics", "cross_entropy_", "count_targets", "reduce_losses", "scale_unless_one",
    "add_partials", "prepare_spatial_targets",
)  # fmt: skip
# a second line counts those that are not printed: there are none with this limit
_ERRORS = re.compile(r"ERROR SUMMARY: (\d+) errors?\s*$", re.MULTILINE)
PRINTED = 10_000_000
_HAZARDS = re.compile(r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)")
_ERROR = re.compile(r"^========= (?=\S)", re.MULTILINE)
# where an error is, and from where that was called within its kernel: the last of them is the kernel
_PLACE = re.compile(r"(?:^=+\s+at |Device Frame: ?| access at )(?:0x[0-9a-f]+ in )?(.+)$", re.MULTILINE)
NO_KERNEL = "no kernel"  # what has none, or is not printed


@dataclasses.dataclass
class Summary:
    """What the processes gave, added up. `lost`: processes that ended without a summary.

    `errors` are in kernels of ours, or in none that the log names; `errors_elsewhere` in those of PyTorch and its
    libraries, which initcheck watches too.
    """

    tool: str
    cases: int = 0
    wrong: int = 0
    errors: int = 0
    errors_elsewhere: int = 0
    warnings: int = 0
    lost: int = 0
    seconds: float = 0.0
    kernels: Counter = dataclasses.field(default_factory=Counter)  # the errors by kernel
    kernels_elsewhere: Counter = dataclasses.field(default_factory=Counter)
    problems: list[str] = dataclasses.field(default_factory=list)

    @property
    def clean(self) -> bool:
        return self.cases > 0 and not (self.wrong or self.errors or self.warnings or self.lost)

    def row(self) -> dict[str, Any]:
        names = ("tool", "cases", "wrong", "errors", "errors_elsewhere", "warnings", "lost")
        kernels = {"kernels": dict(self.kernels), "kernels_elsewhere": dict(self.kernels_elsewhere)}
        return {name: getattr(self, name) for name in names} | {"seconds": round(self.seconds, 1)} | kernels


def find() -> str:
    """The path of compute-sanitizer; ValueError where there is none."""
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(found).exists():
        raise ValueError(
            "--sanitize needs compute-sanitizer, in PATH or in /usr/local/cuda/bin: install the CUDA toolkit"
        )
    return found


def check(request: Request) -> None:
    """ValueError for what makes no sense under a sanitizer."""
    if left := [way for way in request.ways if way in LEFT_OUT]:
        raise ValueError(f"--sanitize runs no {' and no '.join(left)}: give other ways in, or none for all others")
    if request.per_cell is not None:
        raise ValueError("--sanitize takes --cases or --seconds, not --per-cell")


def command_of(found: str, tool: str, log: Path) -> list[str]:
    """The sanitizer's part of a command line."""
    command = [found, "--tool", tool, "--error-exitcode", "3", "--log-file", str(log), "--print-limit", str(PRINTED)]
    known = subprocess.run([found, "--help"], capture_output=True, text=True).stdout
    if re.search(r"--show-backtrace.{,400}\bdevice\b", known, re.DOTALL):  # a host's is long
        command += ["--show-backtrace", "device"]
    if tool != "initcheck":  # which has to see torch's kernels write what ours read
        for part in KERNELS if "--kernel-name" in known else ():
            command += ["--kernel-name", f"kns={part}"]
    return command


def run(tool: str, request: Request, console: Console) -> Summary:
    """Run the request's cases in `request.workers` processes under the tool; print what they gave."""
    found, start = find(), time.monotonic()
    check(request)
    workers = request.workers
    cases = CASES if request.cases is None and request.seconds is None else request.cases
    summary = Summary(tool)
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for i in range(workers):
            log, results = Path(folder) / f"{i}.log", Path(folder) / f"{i}.json"
            share = None if cases is None else cases // workers + (i < cases % workers)
            if share == 0:
                continue
            given = {
                "ops": request.ops, "ways": request.ways, "dtypes": request.dtypes, "columns": request.columns,
                "seconds": request.seconds, "cases": share, "seed": request.seed + 7919 * i,
            }  # fmt: skip
            program = [sys.executable, "-m", __name__, json.dumps(given), str(results)]
            environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
            with (Path(folder) / f"{i}.out").open("w") as out:
                process = subprocess.Popen(
                    [*command_of(found, tool, log), *program], stdout=out, stderr=out, env=environment
                )
            running.append((process, log, results))
        try:
            for process, log, results in running:
                left = None
                if request.seconds is not None:
                    left = max(1.0, start + request.seconds + GRACE - time.monotonic())
                try:
                    process.wait(left)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                _add(summary, log, results, process.returncode)
        finally:
            for process, *_ in running:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    summary.seconds = time.monotonic() - start
    _show(summary, console)
    return summary


def kernels_of(log: str) -> Counter:
    """How many of a log's errors each kernel has. C++ names are without their parameters; Triton's have none."""
    starts = [found.start() for found in _ERROR.finditer(log)]
    found: Counter = Counter()
    for start, end in zip(starts, [*starts, len(log)][1:], strict=True):
        places = _PLACE.findall(log[start:end])
        found.update([_name(places[-1])] if places else [])
    return found


def _name(place: str) -> str:
    """A kernel's name: "void at::native::reduce_kernel<(int)128, ...>(T3)+0xf0" is at::native::reduce_kernel."""
    name = re.split(r"\+0x|\s+in\s|\(\w+\)$", re.sub(r"^void ", "", place.strip()))[0]
    name = re.sub(r"<unnamed>|\(anonymous namespace\)", "unnamed", name)
    return re.split(r"[<(\s]", name)[0] or place.strip()


def elsewhere(kernel: str) -> bool:
    """Whether a kernel is another library's: ours are functions of Triton, without a C++ namespace."""
    return "::" in kernel


def _add(summary: Summary, log: Path, results: Path, status: int) -> None:
    text = log.read_text() if log.exists() else ""
    errors, hazards = _ERRORS.findall(text), _HAZARDS.findall(text)
    kernels = kernels_of(text)
    told = sum(int(n) for n in errors) + sum(int(n) + int(w) for n, w in hazards)
    kernels[NO_KERNEL] = max(0, told - kernels.total())
    other = Counter({kernel: n for kernel, n in kernels.items() if elsewhere(kernel)})
    summary.kernels += kernels - other
    summary.kernels_elsewhere += other
    summary.warnings += sum(int(w) for _, w in hazards)
    summary.errors += max(0, told - other.total() - sum(int(w) for _, w in hazards))
    summary.errors_elsewhere += other.total()
    if status not in (0, 3) or not (errors or hazards):
        summary.lost += 1
        output = results.with_suffix(".out")
        said = output.read_text()[-500:] if output.exists() else ""
        summary.problems.append(f"a process ended with status {status} and no summary: {text[-500:]}{said}")
    if told > other.total():
        summary.problems.append(text[:3000])
    for line in results.read_text().splitlines() if results.exists() else ():
        report = json.loads(line)
        summary.cases += report["cases"]
        summary.wrong += report["wrong"]
        summary.problems += report["problems"]


def _show(summary: Summary, console: Console) -> None:
    for problem in summary.problems[:20]:
        console.print(problem, markup=False, highlight=False, soft_wrap=True)
    for kernel, n in (summary.kernels + summary.kernels_elsewhere).most_common():
        where = " (not a kernel of this package)" if kernel in summary.kernels_elsewhere else ""
        console.print(f"  {n} in {kernel}{where}", markup=False, highlight=False)
    lost = f", {summary.lost} processes lost" if summary.lost else ""
    other = f" and {summary.errors_elsewhere} in other kernels" if summary.errors_elsewhere else ""
    counts = f"{summary.errors} errors{other}, {summary.warnings} warnings, {summary.wrong} wrong results{lost}"
    console.print(f"{summary.tool}: {summary.cases} cases, {counts}, {summary.seconds:.0f} s", markup=False)


def share(text: str, results: Path) -> None:
    """A process's part: run its cases here, and append a line of JSON for each class and way."""
    from . import session
    from .worker import prepare, run_unit

    given = json.loads(text)
    seconds = given.pop("seconds")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    prepare(device)
    ops = tuple(given.pop("ops")) or tuple(OPS)
    ways = tuple(given.pop("ways")) or tuple({w: 0 for op in ops for w in OPS[op].ways if w not in LEFT_OUT})
    columns = given.pop("columns")
    request = session.Request(
        ops, ways, tuple(given.pop("dtypes")), columns=columns and tuple(columns), per_class=PER_CLASS, **given
    )
    end = float("inf") if seconds is None else time.monotonic() + seconds
    budget = BUDGET if device == "cuda" else Budget.interpreted()
    with results.open("a") as out:
        for unit in session.units(request, device, budget, end):
            if time.monotonic() > end:
                break
            for report in run_unit(unit):
                problems = ["\n".join(session.described(failure)) for failure in report.failures]
                counts = {"cases": report.cases.total(), "wrong": report.wrong.total()}
                out.write(json.dumps({**counts, "problems": problems}) + "\n")
                out.flush()


if __name__ == "__main__":
    share(sys.argv[1], Path(sys.argv[2]))
