"""Processes that compile before anything is timed. They share nothing but the compilers' folders on disk.

A worker that dies leaves only its own part of the list to the process that times.
"""

from __future__ import annotations

import multiprocessing
import queue
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

# seconds after which the workers end; the timed process compiles what remains
LIMIT = 150.0
Job = TypeVar("Job")


def jobs(pairs: Sequence[Job], workers: int) -> list[list[Job]]:
    """Deal pairs to workers in turn: neighbors in a list cost about the same, so they go to different workers."""
    return [part for i in range(workers) if (part := list(pairs[i::workers]))]


def in_processes(
    work: Callable[..., None], parts: Sequence[Sequence[Any]], tick: Callable[[], None] = lambda: None,
    limit: float = LIMIT,
) -> list[str]:  # fmt: skip
    """work(part, done) for each part, in a process of its own, which puts a text into `done` for each finished job.

    The text is empty, or why the job failed. Calls `tick` for each and returns those of `limit` seconds.
    """
    context = multiprocessing.get_context("spawn")
    done: Any = context.Queue()
    processes = [context.Process(target=work, args=(part, done), daemon=True) for part in parts]
    finished: list[str] = []
    # Ctrl-C reaches the whole group; the workers are ended from here, and say nothing
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for process in processes:
            process.start()
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        until = time.monotonic() + limit
        while time.monotonic() < until and (any(p.is_alive() for p in processes) or not done.empty()):
            try:
                finished.append(done.get(timeout=0.5))
            except queue.Empty:
                continue
            tick()
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return finished
