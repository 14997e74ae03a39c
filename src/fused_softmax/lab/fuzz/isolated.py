"""Draws that end a CUDA context (targets outside the classes): each in a process of its own.

Torch's answer is a device assertion, and so is ours; nothing outside the tensors is written before it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from random import Random

from .draw import Case
from .worker import Failure, Report

PROCESSES = 3
_PROGRAM = """
import sys, torch, fused_softmax as fs
n, rows, bad, dtype, gradient = {n}, {rows}, {bad}, torch.{dtype}, {gradient}
x = torch.randn(rows, n, dtype=dtype, device="cuda", requires_grad=gradient)
fs.cross_entropy(x, torch.zeros(rows, dtype=torch.int64, device="cuda"))
torch.cuda.synchronize()
target = torch.zeros(rows, dtype=torch.int64, device="cuda")
target[-1] = bad
print("ready", flush=True)
try:  # the assertion ends whatever comes next: a launch, a kernel that is loaded, or the wait
    loss = fs.cross_entropy(x, target)
    if gradient: loss.backward()
    torch.cuda.synchronize()
except Exception as error:
    print("asserted" if "device-side assert" in str(error) else error, flush=True)
else:
    print("nothing was raised", flush=True)
"""


class Isolated:
    """PROCESSES targets outside the classes, all started at once; `report` waits for them."""

    def __init__(self, seed: int) -> None:
        rng = Random(seed)
        self.running: list[tuple[Case, int, subprocess.Popen[str]]] = []
        for _ in range(PROCESSES):
            n = rng.choice((7, 1000, 32000, 128256))
            bad = rng.choice((n, -1, n + 5, 1 << 40))
            dtype, gradient = rng.choice(("float32", "bfloat16", "float16")), rng.random() < 0.5
            direction = "gradient" if gradient else "forward"
            case = Case(
                "cross_entropy", "function", dtype, (9, n), (1,), direction=direction, options={"bad_target": bad}
            )
            text = _PROGRAM.format(n=n, rows=9, bad=bad, dtype=dtype, gradient=gradient)
            command = [sys.executable, "-c", text]
            self.running.append(
                (case, n, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
            )

    def report(self, seconds: float) -> Report:
        """What they gave; one that has not ended after `seconds` is ended, and counts as no case."""
        report, end = Report(), time.monotonic() + seconds
        for case, n, process in self.running:
            try:
                stdout, stderr = process.communicate(timeout=max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.stop()
                return report
            report.cases[case.cell] += 1
            said = stdout.split()
            if said[:1] == ["ready"] and said[1:] == ["asserted"]:
                report.errors[case.cell] += 1
                continue
            report.wrong[case.cell] += 1
            what = json.dumps([stdout[-300:], stderr[-300:]])
            problem = f"target {case.options['bad_target']} of {n}: {what}"
            report.failures.append(Failure(case.to_json(), [problem], case.to_json()))
        return report

    def stop(self) -> None:
        for _, _, process in self.running:
            if process.poll() is None:
                process.kill()
                process.communicate()
