"""Who reads and writes what, and when: the accesses of each lesson's kernel on a small input, as data for a diagram.

`python -m fused_softmax.lab.grading.accesses` prints them as JSON. A process that does not interpret starts one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fused_softmax.lab import lessons, reference
from fused_softmax.lab.grading.subjects import subject_of
from fused_softmax.lab.grading.watch import watching

SECONDS = 300
# three rows, wider than two tiles; another shape where a lesson is about rows
SHAPES = {4: (5, 1000), 8: (20, 1000), 10: (3, 1003), 14: (16, 16), 15: (256, 19)}
SHAPE = (3, 5000)


@dataclass(frozen=True)
class Diagram:
    """The accesses of one call: (program, "read" or "write", tensor, first element, last element, elements)."""

    lesson: int
    shape: tuple[int, int]
    accesses: list[tuple[int, str, str, int, int, int]]
    reads: int
    writes: int


def diagram(n: int) -> Diagram:
    """Run lesson n on a small input, interpreted, and keep its accesses."""
    lesson, subject = lessons.load(n), subject_of(n)
    arguments = subject.arguments(torch.randn(SHAPES.get(n, SHAPE), generator=torch.Generator().manual_seed(0)))
    shape = tuple(arguments[0].shape)
    if n == 1:  # PyTorch's passes: each reads and writes whole tensors
        passes = reference.traffic(lesson.softmax, *arguments)
        found = [
            (i, kind, p.op, 0, max(0, count - 1), count)
            for i, p in enumerate(passes)
            for kind, count in (("read", p.reads), ("write", p.writes))
        ]
        return Diagram(n, shape, found, sum(p.reads for p in passes), sum(p.writes for p in passes))
    if n == 4:  # fewer programs than rows
        (launch,) = lesson.launches(arguments[0], torch.empty_like(arguments[0]), programs=2)
        with watching(log=True) as seen:
            launch()
    else:
        with watching(log=True) as seen:
            getattr(lesson, subject.function)(*arguments)
    accesses = [(a.program, a.kind, a.tensor, a.first, a.last, a.elements) for a in seen.log or ()]
    return Diagram(n, shape, accesses, seen.reads, seen.writes)


def diagrams() -> dict[int, Diagram]:
    """The diagrams of all lessons, from a process that interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        timeout=SECONDS,
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return {fields["lesson"]: Diagram(**fields) for fields in found}


def main() -> None:
    """Print all diagrams as one JSON list."""
    warnings.simplefilter("ignore")
    print(json.dumps([asdict(diagram(n)) for n in lessons.numbers()]))


if __name__ == "__main__":
    main()
