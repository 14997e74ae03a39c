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
from typing import Any

import torch

from fused_softmax.lab import lessons
from fused_softmax.lab.bench.ops import OPS
from fused_softmax.lab.grading.subjects import SUBJECTS, subject_of
from fused_softmax.lab.roofline import counters
from fused_softmax.lab.roofline.counters import METRICS, NEEDED, STALLS, Kernel, NoProfiler
from fused_softmax.lab.roofline.model import DramBytes
from fused_softmax.lab.roofline.predict import EXPLAINED, OURS, least_bytes, predict

SECONDS = 300
Run = tuple[str, str, int]  # system, op and width
# systems whose claim is about wide rows, or about narrow ones
WIDE = ("06_three_pass", "07_online", "09_cluster", "11_over_gpus", OURS)
NARROW = ("15_another_dimension",)
SAID = "profiled: "
MARKER = "spin_kernel"  # of torch.cuda._sleep


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
    inner: int = 1  # positions: above 1, tensors are (n_rows / inner, n_cols, inner), and the op is over dimension 1
    # of the kernel that takes longest
    counters: Mapping[str, float] = field(default_factory=dict)
    failed: str = ""

    @property
    def over_model(self) -> float:
        """Counted bytes over predicted bytes."""
        return (self.read + self.written) / max(1, self.predicted_read + self.predicted_written)

    @property
    def holds(self) -> bool:
        """Whether the model's claim held: its bytes within 3 per cent."""
        return not self.failed and abs(self.over_model - 1) <= 0.03


def run_ncu(job: Mapping[str, Any]) -> tuple[list[list[Any]], list[Kernel]]:
    """(system, shape and failure of each run; all kernels, markers too) of a job; NoProfiler where ncu cannot count."""
    ncu, metrics = counters.find_ncu(), dict(METRICS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", __name__, json.dumps(job)]
    # the process alone first: it compiles the kernels, and tells its own errors from the profiler's
    alone = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=SECONDS)
    if alone.returncode:
        raise NoProfiler(f"the kernels do not run without the profiler: {_last(alone.stderr)}")
    while True:
        line = [ncu, *counters.arguments(list(metrics.values())), *command]
        done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=SECONDS)
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


def profile(runs: Sequence[Run], dtype: str, elements: int, gpu: str, inner: int = 1) -> list[Profiled]:
    """Profile (system, op, width) on this GPU; NoProfiler where that cannot be done.

    inner: above 1, the widths are those of dimension 1 of tensors (outer, n_cols, inner), of OURS alone.
    """
    shapes = [(system, op, inner * max(1, elements // n_cols // inner), n_cols) for system, op, n_cols in runs]
    if inner > 1:
        said = {shape: (shape[1], least_bytes(*shape[1:], dtype, gpu)) for shape in shapes}
    else:
        with ThreadPoolExecutor(8) as pool:  # some predictions compile, in processes of their own
            found = pool.map(lambda shape: predict(shape[0], shape[2], shape[3], dtype, gpu, shape[1]), shapes)
            said = {shape: (one.op, one.dram) for shape, one in zip(shapes, found, strict=True)}
    ran, kernels = run_ncu({"shapes": shapes, "dtype": dtype, "inner": inner})
    groups = grouped(kernels)
    if len(groups) != len(ran):
        raise NoProfiler(f"{len(ran)} systems ran, and ncu saw {len(groups)}")
    return [
        _profiled(tuple(shape), dtype, inner, mine, *said[tuple(shape)], failed)
        for (*shape, failed), mine in zip(ran, groups, strict=True)
    ]


def grouped(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """The kernels of each system: those after each marker."""
    groups: list[list[Kernel]] = []
    for kernel in kernels:
        if MARKER in kernel.name:
            groups.append([])
        elif groups:
            groups[-1].append(kernel)
    return groups


def _profiled(
    shape: tuple[str, str, int, int], dtype: str, inner: int, kernels: Sequence[Kernel], op: str, dram: DramBytes,
    failed: str,
) -> Profiled:  # fmt: skip
    longest = max(kernels, key=lambda k: k.values.get("nanoseconds", 0.0), default=Kernel("", {}))
    system, _, n_rows, n_cols = shape
    return Profiled(
        system, op, dtype, n_rows, n_cols, tuple(k.name for k in kernels),
        read=sum(k.values.get("read", 0.0) for k in kernels),
        written=sum(k.values.get("written", 0.0) for k in kernels),
        microseconds=sum(k.values.get("nanoseconds", 0.0) for k in kernels) / 1e3,
        predicted_read=dram.read, predicted_written=dram.written - dram.unsent, inner=inner,
        counters=dict(longest.values), failed=failed,
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


def runnable(
    system: str, op: str, n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, inner: int = 1
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What is run for a system, and its arguments: random ones; of positions of dimension 1 where inner is above 1."""
    from fused_softmax.lab.bench.shapes import shaped
    from fused_softmax.lab.bench.systems import systems_for

    if system in SUBJECTS:
        subject, lesson = subject_of(SUBJECTS[system]), lessons.load(SUBJECTS[system])
        x = torch.randn(n_rows, n_cols, device=device, dtype=dtype)
        return getattr(lesson, subject.function), subject.arguments(x)
    (entry,) = systems_for(op, (system,))
    if inner > 1:
        of_shape = shaped(op, n_rows // inner, inner, "")
        assert entry.over is not None, f"{system} takes rows only"
        return entry.over(of_shape), of_shape.inputs(n_rows, n_cols, dtype, device, 0)
    return entry.build(), OPS[op].inputs(n_rows, n_cols, dtype, device, 0)


def main() -> None:
    """Run each system once without the profiler, and once with it, after a kernel that marks its beginning."""
    job = json.loads(sys.argv[1])
    dtype = getattr(torch, job["dtype"])
    for system, op, n_rows, n_cols in job["shapes"]:
        failed, call, arguments = "", None, ()
        try:
            call, arguments = runnable(system, op, n_rows, n_cols, dtype, torch.device("cuda"), job["inner"])
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
        print(SAID + json.dumps([system, op, n_rows, n_cols, failed]), flush=True)
        del call, arguments


if __name__ == "__main__":
    main()
