"""Draws that end a CUDA context (targets outside the classes): each in a process of its own.

Torch's answer is a device assertion, and so is ours; nothing outside the tensors is written before it.
"""

from __future__ import annotations

import json
import subprocess
import sys
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
loss = fs.cross_entropy(x, target)
if gradient: loss.backward()
try:
    torch.cuda.synchronize()
except Exception as error:
    print("asserted" if "assert" in str(error) else error, flush=True)
else:
    print("nothing was raised", flush=True)
"""


def run_isolated(seed: int) -> Report:
    """Targets outside the classes, PROCESSES of them."""
    rng, report = Random(seed), Report()
    for _ in range(PROCESSES):
        n = rng.choice((7, 1000, 32000, 128256))
        bad = rng.choice((n, -1, n + 5, 1 << 40))
        dtype, gradient = rng.choice(("float32", "bfloat16", "float16")), rng.random() < 0.5
        direction = "gradient" if gradient else "forward"
        case = Case("cross_entropy", "function", dtype, (9, n), (1,), direction=direction, options={"bad_target": bad})
        text = _PROGRAM.format(n=n, rows=9, bad=bad, dtype=dtype, gradient=gradient)
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300)
        report.cases[case.cell] += 1
        said = done.stdout.split()
        if said[:1] == ["ready"] and said[1:] == ["asserted"]:
            report.errors[case.cell] += 1
        else:
            report.wrong[case.cell] += 1
            text = json.dumps([done.stdout[-300:], done.stderr[-300:]])
            report.failures.append(Failure(case.to_json(), [f"target {bad} of {n}: {text}"], case.to_json()))
    return report
