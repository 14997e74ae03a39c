"""`fused-softmax profile`: Nsight Compute's counters of each kernel next to the model's, in words and numbers.

A process of its own runs each system once under ncu: `python -m fused_softmax.lab.roofline.profile JOB`, where JOB is
JSON. A kernel that does nothing marks the beginning of each system.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fused_softmax.lab import lessons
from fused_softmax.lab.bench.inputs import DTYPES
from fused_softmax.lab.bench.ops import OPS, plan_of
from fused_softmax.lab.bench.shapes import shaped
from fused_softmax.lab.bench.workload import Op
from fused_softmax.lab.grading.subjects import SUBJECTS, subject_of
from fused_softmax.lab.roofline import counters
from fused_softmax.lab.roofline.counters import METRICS, NEEDED, STALLS, Kernel, NoProfiler
from fused_softmax.lab.roofline.model import DramBytes
from fused_softmax.lab.roofline.predict import EXPLAINED, OURS, gpu_named, least_bytes, predict

SECONDS, SECONDS_OF_ITEM = 300, 10  # that a process may take, and so many more for each item of its job
Run = tuple[str, str, int]  # system, op and width
# systems whose claim is about wide rows, or about narrow ones
WIDE = ("06_three_pass", "07_online", "09_cluster", "11_over_gpus", OURS)
NARROW = ("15_another_dimension",)
SAID = "profiled: "
MARKER = "spin_kernel"  # of torch.cuda._sleep


class Item(NamedTuple):
    """One run of a job."""

    system: str
    op: str
    dtype: str
    n_rows: int
    n_cols: int
    inner: int = 1  # positions: above 1, tensors are (n_rows / inner, n_cols, inner), and the op is over dimension 1


@dataclass(frozen=True)
class Profiled:
    """One system on one shape: the sums over its kernels, and the model's claim."""

    system: str
    op: str
    dtype: str
    n_rows: int
    n_cols: int
    kernels: tuple[str, ...]
    read: float  # bytes from memory
    written: float
    microseconds: float
    predicted_read: int
    predicted_written: int
    inner: int = 1  # as that of Item
    # of the kernel that takes longest
    counters: Mapping[str, float] = field(default_factory=dict)
    failed: str = ""
    plan: str = ""  # in words; "" of a lesson, and in older records

    @property
    def over_model(self) -> float:
        """Counted bytes over predicted bytes."""
        return (self.read + self.written) / max(1, self.predicted_read + self.predicted_written)

    @property
    def holds(self) -> bool:
        """Whether the model's claim held: its bytes within 3 per cent."""
        return not self.failed and abs(self.over_model - 1) <= 0.03


def run_ncu(job: Sequence[Item]) -> tuple[list[list[Any]], list[Kernel]]:
    """(each item, its plan and failure; all kernels, markers too) of a job; NoProfiler where ncu cannot count."""
    ncu, metrics, seconds = counters.find_ncu(), dict(METRICS), SECONDS + SECONDS_OF_ITEM * len(job)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", __name__, json.dumps(job)]
    # the process alone first: it compiles the kernels, and tells its own errors from the profiler's
    alone = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=seconds)
    if alone.returncode:
        raise NoProfiler(f"the kernels do not run without the profiler: {_last(alone.stderr)}")
    while True:
        line = [ncu, *counters.arguments(list(metrics.values())), *command]
        done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=seconds)
        said = done.stdout + done.stderr
        absent = counters.unknown_metrics(said)
        kept = {name: metric for name, metric in metrics.items() if metric not in absent}
        if len(kept) == len(metrics):
            break
        metrics = kept
        if not all(name in metrics for name in NEEDED):
            raise NoProfiler(f"this GPU has no counter {', '.join(sorted(absent))}")
    kernels = counters.read_csv(done.stdout)
    if not kernels:
        raise NoProfiler(counters.refusal(said) or f"ncu counted nothing: {_last(said)}")
    runs = [json.loads(line[len(SAID) :]) for line in done.stdout.splitlines() if line.startswith(SAID)]
    return runs, kernels


def _last(said: str) -> str:
    return next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "no message")[:300]


def lesson_systems() -> tuple[str, ...]:
    """The systems of all lessons, in their order."""
    from fused_softmax.lab.bench.systems import LESSON_SYSTEMS

    return tuple(sorted((*(system.name for system in LESSON_SYSTEMS), *SUBJECTS)))


def default_runs() -> list[Run]:
    """(system, op, width): every lesson and every op of ours, and at 131,072 columns what is about wide rows."""
    every = [*((name, "softmax") for name in lesson_systems()), *((OURS, op) for op in EXPLAINED)]
    runs = [(name, op, 64 if name in NARROW else 4096) for name, op in every]
    return [*runs, *((name, op, 131072) for name, op in every if name in WIDE and not op.startswith("masked"))]


def items_of(runs: Sequence[Run], dtype: str, elements: int, inner: int = 1) -> list[Item]:
    """The runs with tensors of about `elements`; inner above 1: of (outer, width, inner), over dimension 1."""
    rows = lambda n_cols: inner * max(1, elements // n_cols // inner)  # noqa: E731
    return [Item(system, op, dtype, rows(n_cols), n_cols, inner) for system, op, n_cols in runs]


def tensor_items(tensors: Sequence[tuple[int, ...]], dtypes: Sequence[str], ops: Sequence[str]) -> list[Item]:
    """Our ops over dimension 1 of each (outer, n_cols, inner) in each dtype."""
    return [Item(OURS, op, dtype, o * i, n_cols, i) for o, n_cols, i in tensors for op in ops for dtype in dtypes]


def profile(items: Sequence[Item], gpu: str) -> list[Profiled]:
    """Profile the items on this GPU, all in one process; NoProfiler where that cannot be done."""
    gpu_named(gpu)  # "this" is measured before others use the GPU
    with ThreadPoolExecutor(8) as pool:  # some predictions compile, in processes of their own
        said = dict(zip(items, pool.map(lambda item: _predicted(item, gpu), items), strict=True))
    ran, kernels = run_ncu(items)
    groups = grouped(kernels)
    if len(groups) != len(ran):
        raise NoProfiler(f"{len(ran)} systems ran, and ncu saw {len(groups)}")
    found = [(Item(*item), plan, failed) for *item, plan, failed in ran]
    return [
        _profiled(item, mine, *said[item], plan, failed)
        for (item, plan, failed), mine in zip(found, groups, strict=True)
    ]


def _predicted(item: Item, gpu: str) -> tuple[str, DramBytes]:
    """(the op's name, its bytes): over another dimension those that any implementation must move."""
    system, op, dtype, n_rows, n_cols, inner = item
    if inner > 1:
        return op, least_bytes(op, n_rows, n_cols, dtype, gpu)
    one = predict(system, n_rows, n_cols, dtype, gpu, op)
    return one.op, one.dram


def grouped(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """The kernels of each system: those after each marker."""
    groups: list[list[Kernel]] = []
    for kernel in kernels:
        if MARKER in kernel.name:
            groups.append([])
        elif groups:
            groups[-1].append(kernel)
    return groups


def _profiled(item: Item, kernels: Sequence[Kernel], op: str, dram: DramBytes, plan: str, failed: str) -> Profiled:
    longest = max(kernels, key=lambda k: k.values.get("nanoseconds", 0.0), default=Kernel("", {}))
    return Profiled(
        item.system, op, item.dtype, item.n_rows, item.n_cols, tuple(k.name for k in kernels),
        read=sum(k.values.get("read", 0.0) for k in kernels),
        written=sum(k.values.get("written", 0.0) for k in kernels),
        microseconds=sum(k.values.get("nanoseconds", 0.0) for k in kernels) / 1e3,
        predicted_read=dram.read, predicted_written=dram.written - dram.unsent, inner=item.inner,
        counters=dict(longest.values), failed=failed, plan=plan,
    )  # fmt: skip


def lines(found: Profiled) -> list[str]:
    """A profile in words and numbers."""
    shape = f"{found.n_rows:,} x {found.n_cols:,}"
    if found.inner > 1:
        shape = f"({found.n_rows // found.inner:,}, {found.n_cols:,}, {found.inner:,}) over dimension 1,"
    head = f"{found.system}, {found.op} of {shape} {found.dtype}"
    if found.failed:
        return [f"{head}: {found.failed}"]
    many = f"{len(found.kernels)} kernels" if len(found.kernels) > 1 else found.kernels[0]
    out = [f"{head}: {many}, {found.microseconds:,.1f} us under the profiler"]
    verdict = "the model's claim held" if found.holds else "the model's claim did not hold"
    for name, counted, said in (
        ("read", found.read, found.predicted_read),
        ("written", found.written, found.predicted_written),
    ):
        out.append(f"    {name:8} {counted / 1e6:12,.1f} MB, the model says {said / 1e6:,.1f} MB")
    out.append(f"    memory   {found.over_model:.3f} of the model's bytes: {verdict}")
    if len(found.kernels) > 1:
        out.append("             the L2 is emptied before each kernel, so a second read comes from memory here")
    c = found.counters
    if "peak" in c:
        out.append(f"    peak     {c['peak'] / 100:.2f} of the memory's peak throughput (higher is better)")
    if "l2_hits" in c:
        out.append(f"    L2       {c['l2_hits']:.0f} per cent of the sectors hit")
    if "l2_busy" in c and "issued" in c:
        out.append(
            f"    busy     L2 {c['l2_busy'] / 100:.2f} of its sectors' peak, {c['issued'] / 100:.2f} of the issue slots"
        )
    if "waves" in c:
        out.append(f"    waves    {c['waves']:.2f}: the programs over those that fit at a time")
    if "load_sectors" in c and "store_sectors" in c:
        out.append(
            f"    sectors  {c['load_sectors']:.1f} for each load of a warp, {c['store_sectors']:.1f} for each store"
        )
    stalls = sorted(((v, name[6:]) for name, v in c.items() if name.startswith("stall_")), reverse=True)
    total = sum(v for v, _ in stalls)
    for value, name in stalls[:3]:
        out.append(f"    a warp   {value / total:.2f} of the time: {STALLS[name]} ({name})")
    return out


# --- the process under ncu --------------------------------------------------------------------------------------------


def runnable(item: Item, device: torch.device) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What is run for an item, and its arguments: random ones."""
    from fused_softmax.lab.bench.systems import systems_for

    system, op, dtype, n_rows, n_cols, inner = item
    if system in SUBJECTS:
        subject, lesson = subject_of(SUBJECTS[system]), lessons.load(SUBJECTS[system])
        x = torch.randn(n_rows, n_cols, device=device, dtype=DTYPES[dtype])
        return getattr(lesson, subject.function), subject.arguments(x)
    (entry,) = systems_for(op, (system,))
    of_shape = workload(item)
    arguments = of_shape.inputs(n_rows, n_cols, DTYPES[dtype], device, 0)
    if inner == 1:
        return entry.build(), arguments
    assert entry.over is not None, f"{system} takes rows only"
    return entry.over(of_shape), arguments


def workload(item: Item) -> Op:
    """The benchmark's workload of an item."""
    return shaped(item.op, item.n_rows // item.inner, item.inner, "") if item.inner > 1 else OPS[item.op]


def main() -> None:
    """Run each item once without the profiler, and once with it, after a kernel that marks its beginning."""
    for item in map(Item._make, json.loads(sys.argv[1])):
        failed, plan, call, arguments = "", "", None, ()
        try:
            call, arguments = runnable(item, torch.device("cuda"))
            plan = plan_of(workload(item), arguments)[1] if item.system == OURS else ""
            call(*arguments)
        except Exception as error:  # out of resources is a result
            failed = (str(error) or type(error).__name__).splitlines()[0][:160]
        torch.cuda.empty_cache()  # the profiler saves what is allocated before each of its passes
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.cuda._sleep(1)
        if call is not None and not failed:
            call(*arguments)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        print(SAID + json.dumps([*item, plan, failed]), flush=True)
        del call, arguments


if __name__ == "__main__":
    main()
