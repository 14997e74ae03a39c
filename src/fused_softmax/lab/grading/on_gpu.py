"""A right file on a GPU: its results once more, and its time next to a copy and to the lesson's own kernel."""

from __future__ import annotations

from pathlib import Path

import torch

from fused_softmax.lab import lessons
from fused_softmax.lab.grading.subjects import inputs_of, subject_of
from fused_softmax.lab.grading.trials import as_tuple, close
from fused_softmax.lab.grading.worker import Finding, load_function
from fused_softmax.lab.timing import EventStopwatch, interleave

SECONDS = 0.15


def timed(n: int, file: Path) -> Finding:
    """Check a file on the GPU, then time it. The kernels are compiled."""
    device, subject = torch.device("cuda"), subject_of(n)
    function, own = load_function(file, subject.function), getattr(lessons.load(n), subject.function)
    found = Finding(True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    for name, x in inputs_of(subject).items():
        arguments = tuple(a.to(device) if isinstance(a, torch.Tensor) else a for a in subject.arguments(x))
        expected = as_tuple(subject.exact(*arguments))
        outputs = as_tuple(function(*arguments))
        rtol, atol = 4 * subject.rtol, 4 * subject.atol  # a GPU's exponential has other last digits
        if not all(bool(close(y, e, rtol, atol=atol).all()) for y, e in zip(outputs, expected, strict=True)):
            found.right = False
            found.lines.append(f"{name}: right in the interpreter, and wrong on the GPU")
            found.hint = "Programs run at the same time on a GPU: look for elements that two of them write."
    torch.use_deterministic_algorithms(False)
    if not found.right:
        return found
    x = torch.randn(subject.timed, device=device, dtype=torch.bfloat16)
    arguments = subject.arguments(x)
    y = torch.empty_like(x)
    calls = {"copy": lambda: y.copy_(x), "yours": lambda: function(*arguments), "lesson": lambda: own(*arguments)}
    times = interleave(calls, EventStopwatch(device), SECONDS)
    if hasattr(lessons.load(n), "SUBJECT"):  # softmax of rows moves what a copy moves
        least = subject.moves(*arguments[0].shape)
        found.moved = (least.reads + least.writes) / (2 * x.numel())
    found.milliseconds = {name: timing.ms for name, timing in times.items()}
    return found
