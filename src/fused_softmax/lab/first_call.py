"""The cost of the first call of a new shape: each case has its own process, in which no cache holds its kernel.

`python -m fused_softmax.lab.first_call CASE SYSTEM...` makes a context and calls each system on a tiny input of
another dtype, which pays for imports and for what Triton builds once. It then times one call until the device has
finished. A case of this tiny input is the very first call of its process, with all of that in its time. Results are
checked afterwards.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from fused_softmax.lab.bench.cases import TINY, Case
from fused_softmax.lab.bench.checking import Judge, WrongShape, poisoned
from fused_softmax.lab.bench.inputs import DTYPES, Inputs
from fused_softmax.lab.bench.ops import OPS, plan_of
from fused_softmax.lab.bench.systems import System, outcome, systems_for
from fused_softmax.lab.record import Record
from fused_softmax.lab.timing import FIRST_CALL
from fused_softmax.launch.device import device_here

# seconds after which a process is given up
LIMIT = 180.0


def first_calls(case: Case, names: Sequence[str]) -> list[Record]:
    """The records of the systems named, from a new process with empty caches; its failure is theirs."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {f"{owner}_CACHE_DIR": os.path.join(folder, owner) for owner in ("TRITON", "TORCHINDUCTOR")}
        path = os.pathsep.join(path for path in sys.path if path)
        line = [sys.executable, "-m", __name__, json.dumps(asdict(case)), *names]
        environment = {**os.environ, **caches, "PYTHONPATH": path}
        try:
            done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT, env=environment)
        except subprocess.TimeoutExpired:
            return [_record(case, name, "error", f"no answer in {LIMIT:.0f} s") for name in names]
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
        return [_record(case, name, "error", f"exit status {done.returncode}: {said}"[:160]) for name in names]
    return [Record(**found) for found in json.loads(done.stdout.splitlines()[-1])]


@torch.no_grad()
def measure(
    case: Case, systems: Sequence[System], device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> list[Record]:
    """Each system's first call of the case in this process, by `clock` in seconds; a wrong result has no time."""
    op = OPS[case.op]
    inputs, tiny = (
        op.inputs(n_rows, n_cols, DTYPES[dtype], device, 0)
        for dtype, n_rows, n_cols in ((case.dtype, case.n_rows, case.n_cols), TINY)
    )
    very_first = (case.dtype, case.n_rows, case.n_cols) == TINY
    records = [_record(case, system.name, "ok") for system in systems]
    taken: list[tuple[Any, float] | None] = []
    for system, record in zip(systems, records, strict=True):
        try:
            call = system.build()
            if not very_first:
                call(*tiny)
            taken.append(_timed(call, inputs, clock))
        except Exception as error:
            record.status, record.note = outcome(error, system.kind)
            taken.append(None)
    judge = Judge(op, inputs)  # calls torch's own: not before torch's first call
    for system, record, found in zip(systems, records, taken, strict=True):
        record.torch_error = judge.torch_error
        if found is not None:
            _check(record, system, judge, *found)
    return records


def _timed(call: Callable[..., Any], inputs: Inputs, clock: Callable[[], float]) -> tuple[Any, float]:
    """A call's result, on memory that is NaN where the device's allocator can be made to give it, and milliseconds."""
    with poisoned(inputs[0], deterministic=False):
        _synchronize(inputs[0].device)
        began = clock()
        y = call(*inputs)
        _synchronize(inputs[0].device)
        return y, 1000 * (clock() - began)


def _check(record: Record, system: System, judge: Judge, y: Any, ms: float) -> None:
    ours = system.kind == "ours"
    try:
        verdict = judge.judge(y, ours=ours)
    except WrongShape as error:
        record.status, record.note = "wrong", str(error)
        return
    record.error = verdict.error
    if not verdict.ok:
        record.status, record.note = "wrong", verdict.why
        return
    record.ms, record.rounds, record.timed_by = ms, 1, FIRST_CALL
    if ours:
        record.plan = plan_of(judge.op, judge.inputs)[1]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _record(case: Case, system: str, status: str, note: str = "") -> Record:
    return Record(case.op, system, case.dtype, case.n_rows, case.n_cols, status, note, case=case.reason)


def main() -> None:
    """Answer with the records as one line of JSON."""
    case = Case(**json.loads(sys.argv[1]))
    records = measure(case, systems_for(case.op, tuple(sys.argv[2:])), device_here())
    print(json.dumps([asdict(record) for record in records]))


if __name__ == "__main__":
    main()
