"""Processes that run units, and survive the death of any of them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

from .draw import Case
from .worker import Failure, Report, Unit, prepare, run_unit

_SPAWN = multiprocessing.get_context("spawn")


def _serve(pipe: Connection, device: str) -> None:
    # inductor would start processes of its own, which a daemon may not have
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    prepare(device)
    while True:
        try:
            unit = pipe.recv()
        except EOFError:
            return
        if unit is None:
            return
        try:
            pipe.send(run_unit(unit, lambda case: pipe.send(case)))
        except Exception as error:
            # a lost CUDA context, or a mistake of the fuzzer's own: the process ends, the unit is run again with care
            pipe.send(f"!{type(error).__name__}: {error}")
            return


class _Worker:
    def __init__(self, device: str) -> None:
        self.pipe, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_serve, args=(theirs, device), daemon=True)
        self.process.start()
        theirs.close()
        self.unit: Unit | None = None
        self.last = ""

    def give(self, unit: Unit) -> None:
        self.unit, self.last = unit, ""
        self.pipe.send(unit)

    def stop(self) -> None:
        try:
            self.pipe.send(None)
            self.process.join(2)
        except (BrokenPipeError, OSError):
            pass
        if self.process.is_alive():
            self.process.terminate()
        self.process.join(5)
        self.pipe.close()


def run_units(units: Iterable[Unit], workers: int, device: str) -> Iterator[Report]:
    """The report of each unit, as they come. With one worker and no GPU, in this process."""
    if workers <= 1 and device == "cpu":
        prepare(device)
        for unit in units:
            yield run_unit(unit)
        return
    pending = iter(units)
    again: list[Unit] = []
    alive = [_Worker(device) for _ in range(max(1, workers))]
    try:
        for worker in alive:
            _next(worker, again, pending)
        while busy := [w for w in alive if w.unit is not None]:
            for pipe in wait([w.pipe for w in busy]):
                worker = next(w for w in busy if w.pipe is pipe)
                message, given = _received(worker), worker.unit
                assert given is not None
                if isinstance(message, str) and not message.startswith("!"):
                    worker.last = message
                    continue
                if isinstance(message, Report):
                    yield message
                else:
                    if given.careful:
                        yield _death(worker.last, message)
                    else:
                        again.append(replace(given, careful=True))
                    worker.stop()
                    alive[alive.index(worker)] = worker = _Worker(device)
                _next(worker, again, pending)
    finally:
        for worker in alive:
            worker.stop()


def _next(worker: _Worker, again: list[Unit], pending: Iterator[Unit]) -> None:
    worker.unit = None
    found = again.pop() if again else next(pending, None)
    if found is not None:
        worker.give(found)


def _received(worker: _Worker) -> Any:
    try:
        return worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join(5)
        return None


def _death(case: str, message: str | None) -> Report:
    """A failure of the case that a process died in."""
    if not case:
        raise RuntimeError(f"a fuzz process ended before its first case: {message or 'killed'}")
    report = Report()
    found = Case.from_json(case)
    report.cases[found.cell] += 1
    report.wrong[found.cell] += 1
    report.failures.append(Failure(case, [f"ends the process: {message or 'killed'}"], case))
    return report
