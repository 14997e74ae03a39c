"""Processes that run units and shrinkings, and survive the death of any of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from .draw import Case
from .worker import Failure, Lost, Report, Task, Unit, perform, prepare

_SPAWN = multiprocessing.get_context("spawn")
GRACE = 5.0  # seconds after a task's end that a case may still take


def _serve(pipe: Connection, device: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the session ends its processes
    # inductor would start processes of its own, which a daemon may not have
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    prepare(device)
    while (task := _received(pipe)) is not None:
        try:
            for reply in perform(task, pipe.send):
                pipe.send(reply)
            pipe.send(None)
        except Lost:
            return
        except Exception as error:
            # a lost CUDA context, or a mistake of the fuzzer's own: the process ends, the unit is run again with care
            pipe.send(f"!{type(error).__name__}: {error}")
            return


def visible_devices() -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls each GPU that this process sees."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(torch.cuda.device_count())] if listed is None else listed.split(",")
    return [name.strip() for name in names[: torch.cuda.device_count()]]


@contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    """A variable that a process started within inherits; None: as it is."""
    before = os.environ.get(name)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before
        elif value is not None:
            del os.environ[name]


class _Worker:
    def __init__(self, device: str, gpu: str | None) -> None:
        self.gpu = gpu
        self.pipe, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_serve, args=(theirs, device), daemon=True)
        with _environment("CUDA_VISIBLE_DEVICES", gpu):
            self.process.start()
        theirs.close()
        self.task: Task | None = None
        self.last = ""

    def give(self, task: Task | None) -> None:
        self.task, self.last = task, ""
        if task is not None:
            self.pipe.send(task)


class Pool:
    """`workers` processes, in turn on the GPUs that are visible; with one worker and no GPU, this process."""

    def __init__(self, workers: int, device: str) -> None:
        self.device = device
        here = workers <= 1 and device == "cpu"
        if here:
            prepare(device)
        gpus: list[str | None] = [*visible_devices()] if device == "cuda" else [None]
        self.workers = [] if here else [_Worker(device, gpus[i % len(gpus)]) for i in range(max(1, workers))]

    def run(self, tasks: Iterable[Task], end: float | None = None) -> Iterator[Report | Failure]:
        """What each task gives, as it comes; after `end` (time.monotonic) no task is begun, and after GRACE more
        seconds those that still run are given up."""
        pending = iter(tasks)
        again: list[Task] = []

        def following() -> Task | None:
            if end is not None and time.monotonic() > end:
                return None
            return again.pop() if again else next(pending, None)

        if not self.workers:
            while (task := following()) is not None:
                yield from perform(task, None)
            return
        for worker in self.workers:
            worker.give(following())
        while busy := [w for w in self.workers if w.task is not None]:
            left = None if end is None else max(0.0, end + GRACE - time.monotonic())
            ready = wait([w.pipe for w in busy], left)
            if not ready:
                for worker in busy:
                    self._replace(worker)
                return
            for pipe in ready:
                worker = next(w for w in self.workers if w.pipe is pipe)
                task = worker.task
                assert task is not None
                message = _received(worker.pipe, "")
                if isinstance(message, str) and message and not message.startswith("!"):
                    worker.last = message
                elif isinstance(message, Report):
                    if isinstance(task, Unit):
                        worker.task = task.without_first_way()
                    yield message
                elif isinstance(message, Failure):
                    yield message
                elif message is None:
                    worker.give(following())
                else:
                    if isinstance(task, Unit) and task.ways:
                        if task.careful:
                            yield _death(worker.last, message)
                        else:
                            again.append(replace(task, careful=True))
                    self._replace(worker).give(following())

    def _replace(self, worker: _Worker) -> _Worker:
        """A fresh process in place of this one."""
        _end([worker])
        fresh = self.workers[self.workers.index(worker)] = _Worker(self.device, worker.gpu)
        return fresh

    def close(self) -> None:
        """End all processes: those that rest by themselves, so that a sanitizer can report."""
        for worker in self.workers:
            if worker.task is None:
                try:
                    worker.pipe.send(None)
                except (BrokenPipeError, OSError):
                    pass
        end = time.monotonic() + 3.0
        for worker in self.workers:
            if worker.task is None:
                worker.process.join(max(0.0, end - time.monotonic()))
        _end(self.workers)
        self.workers = []


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.process.terminate()
    for worker in workers:
        worker.process.join(1)
        if worker.process.is_alive():
            worker.process.kill()
        worker.pipe.close()


def _received(pipe: Connection, ended: Any = None) -> Any:
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        return ended


def _death(case: str, message: str) -> Report:
    """A failure of the case that a process died in."""
    if not case:
        raise RuntimeError(f"a fuzz process ended before its first case: {message or 'killed'}")
    report = Report()
    found = Case.from_json(case)
    report.cases[found.cell] += 1
    report.wrong[found.cell] += 1
    report.failures.append(Failure(case, [f"ends the process: {message or 'killed'}"], case))
    return report
