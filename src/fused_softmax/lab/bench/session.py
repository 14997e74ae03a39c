"""One run: compile ahead in workers, then for every case make inputs, check every system, time those that passed, save.

A system's failure is a record and does not end the run. A fault of the device, or Ctrl-C, ends it; the results so far
are kept. First calls run in processes of their own. Without a GPU nothing is timed: the same systems are checked in
Triton's interpreter.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fused_softmax.lab.bench.ahead import in_processes, jobs
from fused_softmax.lab.bench.cases import Case, workload
from fused_softmax.lab.bench.checking import Judge, WrongShape, run_poisoned
from fused_softmax.lab.bench.inputs import DTYPES, Inputs, load_tensors, one_input
from fused_softmax.lab.bench.ops import OPS, plan_of
from fused_softmax.lab.bench.systems import DeviceFault, System, outcome, systems_for
from fused_softmax.lab.bench.workload import Op
from fused_softmax.lab.first_call import first_calls
from fused_softmax.lab.record import Header, Record
from fused_softmax.lab.timing import (
    GraphStopwatch,
    Stopwatch,
    Timing,
    freeze,
    input_sets,
    interleave,
    peak_bytes,
    rotating,
    stopwatch_for,
)
from fused_softmax.lab.traffic import traffic
from fused_softmax.launch.availability import failures_raised
from fused_softmax.launch.device import device_here

CEILING = "ceiling"
Pair = tuple[Case, str]  # a case and a system's name


def make_inputs(case: Case, device: torch.device, seed: int = 0) -> Inputs:
    """The case's inputs on the device: its tensor of the file that it names, or random rows with planted outliers."""
    dtype = DTYPES[case.dtype]
    if case.source is None:
        of = {} if case.scores is None else {"scores": case.scores}
        return workload(case).inputs(case.n_rows, case.n_cols, dtype, device, seed, **of)
    if OPS[case.op].inputs is not one_input:
        raise ValueError(f"{case.op} takes more than one tensor: --input serves the ops of one input")
    file, name = case.source
    return (load_tensors(Path(file))[name].reshape(case.n_rows, case.n_cols).to(device, dtype).contiguous(),)


@dataclass
class Session:
    """Runs cases over systems and keeps the records; `save` is called after every case, `timed` turns times off."""

    head: Header
    systems: Sequence[System]
    device: torch.device
    seconds: float = 0.2
    timed: bool = True
    save: Callable[[Header, list[Record]], None] = lambda head, records: None
    progress: Callable[[Case, str], None] = lambda case, doing: None
    stopwatch: Callable[[str, torch.device], Stopwatch] | None = None
    records: list[Record] = field(default_factory=list)

    def run(self, cases: Iterable[Case]) -> list[Record]:
        """Run all cases; returns the records, which are also saved so far when it is interrupted (header.stopped)."""
        self.head.finished = False
        try:
            for i, case in enumerate(cases):
                try:
                    with failures_raised():
                        self.case(case)
                except torch.cuda.OutOfMemoryError as error:
                    self.records.append(_record(case, "torch", "out of resources", f"the case itself: {error}"[:160]))
                self.save(self.head, self.records)
                gc.collect()
                if i == 0:
                    freeze()  # every collection would search the modules that the peers have imported
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
            self.head.finished = True
        except KeyboardInterrupt:
            self.head.stopped = "interrupted"
        except DeviceFault as fault:
            self.head.stopped = f"device fault: {fault}"
        self.save(self.head, self.records)
        return self.records

    @torch.no_grad()
    def case(self, case: Case) -> None:
        """Check, then time, every system in one case; a record is kept as soon as its check is done."""
        if case.timed_by == "first_call" and self.timed:
            self.progress(case, "a process with empty caches")
            self.records += first_calls(case, [s.name for s in self.systems if s.op == case.op])
            return
        op = workload(case)
        self.progress(case, "inputs and float64 reference")
        inputs = make_inputs(case, self.device)
        judge = Judge(op, inputs)
        passed: dict[str, Callable[..., Any]] = {}
        checked: dict[str, Record] = {}
        for system in (s for s in self.systems if s.op == case.op):
            self.progress(case, system.name)
            record = checked[system.name] = _record(case, system.name, "ok")
            try:
                call = self._check(case, system, judge, inputs, record)
            except DeviceFault as fault:
                record.status, record.note = "error", f"device fault: {fault}"
                self.records.append(record)
                raise
            self.records.append(record)
            if call is not None:
                passed[system.name] = call
        if self.timed and passed and inputs[0].numel():
            self.progress(case, "timing")
            self._time(case, op, passed, inputs, checked)

    def _check(
        self, case: Case, system: System, judge: Judge, inputs: Inputs, record: Record
    ) -> Callable[..., Any] | None:
        """Run once on poisoned memory and compare; returns the callable when it may be timed."""
        record.torch_error = judge.torch_error
        regime = None
        try:
            if system.plan:
                record.plan = system.plan
            elif system.kind == "ours":
                regime, record.plan = plan_of(judge.op, inputs)
            call = system.made_for(case)
            began = time.perf_counter()
            y = run_poisoned(call, inputs, deterministic=system.poison_by_mode)
            record.first_ms = 1000 * (time.perf_counter() - began)
            verdict = judge.judge(y, ours=system.kind == "ours")
            del y
            if self.timed and inputs[0].is_cuda:
                record.peak_bytes = peak_bytes(call, inputs)
        except WrongShape as error:
            record.status, record.note = "wrong", str(error)
            return None
        except Exception as error:
            record.status, record.note = outcome(error, system.kind)
            return None
        record.error = verdict.error
        over_rows = record.op == "softmax" and case.inner is None
        counted = traffic(system.name, record.n_rows, record.n_cols, regime) if over_rows else None
        if counted:
            record.reads, record.writes = counted.reads, counted.writes
        if not verdict.ok:
            record.status, record.note = "wrong", verdict.why
            return None
        return call

    def _time(
        self, case: Case, op: Op, passed: dict[str, Callable[..., Any]], inputs: Inputs, by_name: dict[str, Record]
    ) -> None:
        make = self.stopwatch or stopwatch_for
        stopwatch = make(case.timed_by, self.device)
        entries: dict[str, Callable[[], Any]] = {}
        ceiling_bytes, moved = 0, op.bytes_moved(case.n_rows, case.n_cols, case.itemsize, case.scores)
        sets = list(input_sets(inputs, case.timed_by, self.device))
        if case.timed_by != "host":
            from fused_softmax.lab.bench.ceilings import ceiling

            run, ceiling_bytes = ceiling(op.ceiling, inputs[0], moved)
            entries[CEILING] = rotating(run, sets)
        entries.update({name: rotating(call, sets) for name, call in passed.items()})
        if isinstance(stopwatch, GraphStopwatch):
            entries = _captured(stopwatch, entries, by_name)
        try:
            times = interleave(entries, stopwatch, self.seconds)
        except Exception as error:
            # every call has run once: what fails now is memory, or the device, which `outcome` raises again
            reason = " ".join(outcome(error, "ours"))
            for name in passed:
                by_name[name].note = by_name[name].note or f"not timed: {reason}"[:160]
            return
        ceiling_gbps = ceiling_bytes / times[CEILING].ms / 1e6 if CEILING in times else None
        for name, taken in times.items():
            if name == CEILING:
                record = _record(case, op.ceiling, "ok")
                by_name[op.ceiling] = record
                self.records.append(record)
                fill_times(record, taken, ceiling_bytes, ceiling_gbps, op.ceiling, stopwatch.describe)
            elif case.timed_by == "host":
                by_name[name].take(taken, stopwatch.describe)
            else:
                fill_times(by_name[name], taken, moved, ceiling_gbps, op.ceiling, stopwatch.describe)


def _record(case: Case, system: str, status: str, note: str = "") -> Record:
    return Record(
        case.op, system, case.dtype, case.n_rows, case.n_cols, status, note, case=case.reason,
        outer=case.outer, inner=case.inner, layout=case.layout,
    )  # fmt: skip


def fill_times(
    record: Record, taken: Timing, moved: int, ceiling_gbps: float | None, ceiling: str, timed_by: str
) -> None:
    """Put a time into a record, with the GB/s and the fraction of the ceiling that follow from it."""
    record.take(taken, timed_by)
    record.bytes, record.gbps = moved, moved / taken.ms / 1e6
    if ceiling_gbps:
        record.ceiling, record.ceiling_gbps, record.fraction = ceiling, ceiling_gbps, record.gbps / ceiling_gbps


def _captured(
    stopwatch: GraphStopwatch, entries: dict[str, Callable[[], Any]], by_name: dict[str, Record]
) -> dict[str, Callable[[], Any]]:
    """Capture every entry; one that cannot be captured keeps its check and gets a note instead of a time."""
    kept = {}
    for name, call in entries.items():
        try:
            stopwatch.capture(name, call)
            kept[name] = call
        except Exception as error:
            status, reason = outcome(error, "peer")
            if name in by_name:
                by_name[name].note = f"not timed, capture {status}: {reason}"
    return kept


# --- compiling ahead --------------------------------------------------------------------------------------------------
# Most time on a GPU goes into compiling. Triton, Inductor and QuACK keep compiled kernels on disk, and the timed
# process then loads it. The workers use the cases' real shapes, because torch.compile specializes on rows as well, and
# inputs of their own. They share nothing: a worker that dies leaves only its own part of the list to the timed process.


def work(part: Sequence[Pair], done: Any) -> None:
    """One worker: build and call each pair once; failures are left for the timed process to meet and to record."""
    # one compile thread each: the workers are the parallelism
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    device = device_here()
    for case, name in part:
        failed = ""
        try:
            with torch.no_grad():
                inputs = make_inputs(case, device)
                for system in systems_for(case.op, (name,)):
                    system.made_for(case)(*inputs)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                    del inputs
                    torch.cuda.empty_cache()
        except Exception as error:
            try:
                failed = ": ".join(outcome(error, "peer"))
            except DeviceFault as fault:
                failed = f"device fault: {fault}"
                return
        finally:
            done.put(failed)


def prebuild(pairs: Sequence[Pair], workers: int, tick: Callable[[], None] = lambda: None) -> list[str]:
    """Run all pairs over `workers` processes; calls `tick` for each that is done.

    Returns a text for each of those: empty, or why it failed.
    """
    return in_processes(work, jobs(pairs, workers), tick)
