"""Compile before timing: worker processes run every system of every case once, so that disk caches are warm.

Time on a GPU goes mostly into compiling; Triton, Inductor and QuACK keep what they compile on disk, and the timed
process then only loads it. Workers use the cases' real shapes (torch.compile specialises on rows as well), unset
inputs, and share nothing: one that dies takes its own part of the list with it, nothing else.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

from fused_softmax.bench.cases import Case

# seconds after which what is still compiling is left to the timed process
LIMIT = 240.0


def jobs(cases: Sequence[Case], systems: Sequence[str], workers: int) -> list[list[tuple[Case, str]]]:
    """Deal (case, system) pairs to workers: neighbours in width are alike in cost, so they go to different workers."""
    pairs = [(case, system) for system in systems for case in cases]
    return [part for i in range(workers) if (part := pairs[i::workers])]


def work(part: Sequence[tuple[Case, str]], done: Any) -> None:
    """One worker: build and call each pair once; failures are left for the timed process to meet and to record."""
    # one compile thread each: the workers are the parallelism
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    import torch

    from fused_softmax.bench.ops import DTYPES, OPS
    from fused_softmax.bench.systems import DeviceFault, device_here, outcome, systems_for

    device = device_here()
    for case, name in part:
        try:
            with torch.no_grad():
                op = OPS[case.op]
                x = torch.zeros(case.n_rows, case.n_cols, dtype=DTYPES[case.dtype], device=device)
                inputs = (x,) if op.ceiling == "copy" else (x, x)
                for system in systems_for(case.op, (name,)):
                    system.build()(*inputs)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                    del x, inputs
                    torch.cuda.empty_cache()
        except Exception as error:
            try:
                outcome(error, "peer")
            except DeviceFault:
                return
        finally:
            done.put(1)


def prebuild(
    cases: Sequence[Case], systems: Sequence[str], workers: int, tick: Callable[[], None] = lambda: None
) -> int:
    """Run all pairs over `workers` processes; calls `tick` for each that is done and returns how many were."""
    context = multiprocessing.get_context("spawn")
    done: Any = context.Queue()
    parts = jobs(cases, systems, workers)
    processes = [context.Process(target=work, args=(part, done), daemon=True) for part in parts]
    finished = 0
    for process in processes:
        process.start()
    try:
        until = time.monotonic() + LIMIT
        while time.monotonic() < until and (any(p.is_alive() for p in processes) or not done.empty()):
            try:
                done.get(timeout=0.5)
            except queue.Empty:
                continue
            finished += 1
            tick()
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return finished
