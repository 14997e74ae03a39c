"""Grading a file: processes of its own with a limit of time, and the result in words."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

INTERPRETED_SECONDS = 20.0  # of the processor: other work on the machine takes none of them
GPU_SECONDS = 120.0  # of the clock
WAITS = 10  # seconds of the clock for one of the processor


@dataclass
class Grade:
    """Whether a file solves the puzzle, the name of its mistake where one was found, and the report."""

    right: bool
    mistake: str = ""
    lines: list[str] = field(default_factory=list)


def grade(n: int, file: Path, *, gpu: bool = False, seconds: float = INTERPRETED_SECONDS) -> Grade:
    """Grade `file` as an answer to lesson n's puzzle; with `gpu`, a right one is also timed there.

    The file runs in another process. It is ended when it has computed for `seconds`, not counting what the process
    needs to start, and after ten times as many seconds of the clock in any case.
    """
    interpreted: dict[str, str | None] = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    found = _run(n, file, interpreted, WAITS * seconds, computes=seconds)
    if isinstance(found, str):
        return Grade(False, found, [f"not right: {found}"])
    lines = _report(found)
    right = bool(found["right"])
    if right and gpu:
        on_gpu = _run(n, file, {"TRITON_INTERPRET": None}, GPU_SECONDS)
        if isinstance(on_gpu, str):
            return Grade(False, on_gpu, [*lines, f"on the GPU: {on_gpu}"])
        right = bool(on_gpu["right"])
        lines += _times(on_gpu["milliseconds"], on_gpu["moved"]) if right else _report(on_gpu)
    return Grade(right, found["mistake"], lines)


def _run(
    n: int, file: Path, changes: dict[str, str | None], seconds: float, computes: float | None = None
) -> dict[str, Any] | str:
    """The worker's answer, or in words why it gave none. `computes`: the most seconds of the processor."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    for name, value in changes.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    command = [sys.executable, "-m", "fused_softmax.lab.grading.worker", str(n), str(file.resolve())]
    command += [] if computes is None else [str(computes)]
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _end(process)
        return f"no end within {seconds:.0f} seconds: does each loop advance, or does it wait for something?"
    except BaseException:
        _end(process)
        raise
    if computes is not None and -process.returncode == getattr(signal, "SIGXCPU", None):
        _kill(process)  # what it has started
        return f"no end within {computes:.0f} seconds of the processor: does each loop advance?"
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        return f"the process ended by {name}: an address outside of all tensors is the usual cause"
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        said = [line.strip() for line in err.splitlines() if line.strip()]
        last = next((line for line in reversed(said) if re.match(r"[\w.]*Error: ", line)), said[-1] if said else "")
        return f"the file ended its process with status {process.returncode}" + (f": {last[:200]}" if last else "")
    return json.loads(lines[-1])


def _kill(process: subprocess.Popen[str]) -> None:
    """End the worker and what it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _end(process: subprocess.Popen[str]) -> None:
    """End the worker and what it started, and wait for it."""
    _kill(process)
    process.communicate()


def _report(found: dict[str, Any]) -> list[str]:
    lines = []
    if found["right"]:
        lines.append(f"right: {found['inputs']} inputs agree with float64")
    else:
        lines += ["not right", *(f"    {line}" for line in found["lines"])]
    if found["model_reads"] and (found["reads"] or found["writes"]):
        lines.append(f"reads  {found['reads']:,} elements, the lesson's model counts {found['model_reads']:,}")
        lines.append(f"writes {found['writes']:,} elements, the lesson's model counts {found['model_writes']:,}")
    if found["mistake"]:
        lines.append(f"mistake: {found['mistake']}")
    if found["hint"]:
        lines.append(f"hint: {found['hint']}")
    return lines


def _times(milliseconds: dict[str, float], moved: float) -> list[str]:
    """`moved`: elements that the lesson's op must move, over those that the copy moves."""
    copy = milliseconds["copy"]
    lines = ["on the GPU, 2^26 elements of bfloat16 (speed as a fraction of the copy's, higher is better)"]
    for name, label in (("copy", "copy"), ("lesson", "the lesson's kernel"), ("yours", "yours")):
        ms = milliseconds[name]
        lines.append(f"    {label:20} {1000 * ms:8.1f} us   {(1.0 if name == 'copy' else moved) * copy / ms:.2f}")
    return lines
