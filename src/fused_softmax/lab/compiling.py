"""Compiles kernels in other processes, for a GPU that need not be here: a process that interprets cannot compile.

Triton decides between the two when a kernel is decorated. A worker, `python -m fused_softmax.lab.compiling`, reads
requests as lines of JSON, {system, op, dtype, n_rows, n_cols, target}, and answers each with a line. Workers are kept
for the next request: to start one takes longer than to compile most kernels.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fused_softmax.lab.roofline.compiled import Compiled, compile_kernel

SECONDS = 180  # for one kernel


class Worker:
    """A process that compiles. One request at a time; close it, or leave it to `compiled`."""

    def __init__(self) -> None:
        plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
            text=True, env={**plain, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )  # fmt: skip

    def ask(self, request: Mapping[str, Any], seconds: float = SECONDS) -> Compiled:
        """The answer; `failed` says why there is none, and the worker is then of no more use."""
        assert self.process.stdin is not None and self.process.stdout is not None
        late = threading.Timer(seconds, self.process.kill)
        late.start()
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            answer = next((line for line in self.process.stdout if line.startswith("{")), "")
        except (BrokenPipeError, ValueError):
            answer = ""
        finally:
            overdue = not late.is_alive()
            late.cancel()
        if answer:
            return Compiled(**json.loads(answer))
        self.process.wait()
        if overdue:
            return Compiled(failed=f"not compiled within {seconds:.0f} seconds")
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors if line.strip()]
        return Compiled(failed=(lines or ["no answer"])[-1][:200])

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        """End the process, busy or not."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.errors):
            if pipe is not None:
                pipe.close()


_idle: list[Worker] = []
_lock = threading.Lock()


def compiled(system: str, dtype: str, n_rows: int, n_cols: int, target: str, op: str = "softmax") -> Compiled:
    """What the system's kernel compiles to, by an idle worker or a new one; `failed` or `none` say why it does not."""
    with _lock:
        worker = _idle.pop() if _idle else None
    worker = worker if worker is not None and worker.alive else Worker()
    request = dict(system=system, dtype=dtype, n_rows=n_rows, n_cols=n_cols, target=target, op=op)
    try:
        found = worker.ask(request)
    except BaseException:
        worker.close()
        raise
    if worker.alive:
        with _lock:
            _idle.append(worker)
    return found


@atexit.register
def close_idle() -> None:
    """End the workers that wait for a request."""
    with _lock:
        while _idle:
            _idle.pop().close()


def main() -> None:
    """Answer each line of standard input with one line."""
    for line in sys.stdin:
        print(json.dumps(asdict(compile_kernel(json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
