"""Compile before timing: worker processes run every system of every case once, so that disk caches are warm.

Time on a GPU goes mostly into compiling; Triton, Inductor and QuACK keep what they compile on disk, and the timed
process then only loads it. Workers use the cases' real shapes (torch.compile specialises on rows as well) and
inputs of their own, and share nothing: one that dies takes its own part of the list with it, nothing else.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from fused_softmax.lab.bench.cases import Case

# seconds after which what is still compiling is left to the timed process
LIMIT = 150.0


Pair = tuple[Case, str]  # a case and a system's name


def jobs(pairs: Sequence[Pair], workers: int) -> list[list[Pair]]:
    """Deal pairs to workers in turn: neighbours in a list are alike in cost, so they go to different workers."""
    return [part for i in range(workers) if (part := list(pairs[i::workers]))]


def work(part: Sequence[Pair], done: Any) -> None:
    """One worker: build and call each pair once; failures are left for the timed process to meet and to record."""
    # one compile thread each: the workers are the parallelism
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    import torch

    from fused_softmax.lab.bench.session import make_inputs
    from fused_softmax.lab.bench.systems import DeviceFault, outcome, systems_for
    from fused_softmax.launch.device import device_here

    device = device_here()
    for case, name in part:
        try:
            with torch.no_grad():
                inputs = make_inputs(case, device)
                for system in systems_for(case.op, (name,)):
                    system.build()(*inputs)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                    del inputs
                    torch.cuda.empty_cache()
        except Exception as error:
            try:
                outcome(error, "peer")
            except DeviceFault:
                return
        finally:
            done.put(1)


def prebuild(pairs: Sequence[Pair], workers: int, tick: Callable[[], None] = lambda: None) -> int:
    """Run all pairs over `workers` processes; calls `tick` for each that is done and returns how many were."""
    context = multiprocessing.get_context("spawn")
    done: Any = context.Queue()
    parts = jobs(pairs, workers)
    processes = [context.Process(target=work, args=(part, done), daemon=True) for part in parts]
    finished = 0
    # Ctrl-C reaches the whole group; the workers are ended from here, and say nothing
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for process in processes:
            process.start()
    finally:
        signal.signal(signal.SIGINT, before)
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
