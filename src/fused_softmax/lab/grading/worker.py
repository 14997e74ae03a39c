"""`python -m fused_softmax.lab.grading.worker N FILE [SECONDS]`: one grading, in a process of its own.

The last line of standard output is the result, as JSON. What the file prints goes to standard error. With SECONDS the
process computes no longer than that, once this module is imported.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fused_softmax.lab import lessons
from fused_softmax.lab.grading.mistakes import TRACES, Mistake, find, more_reads
from fused_softmax.lab.grading.puzzle import EMPTY
from fused_softmax.lab.grading.subjects import Subject, inputs_of, subject_of
from fused_softmax.lab.grading.trials import Trial, as_tuple, close, try_on
from fused_softmax.lab.timing import EventStopwatch, interleave

TIMING_SECONDS = 0.15


@dataclass
class Finding:
    """What a file gave. `lines` are for the reader; `mistake` is the name of the classic mistake, or empty."""

    right: bool
    lines: list[str] = field(default_factory=list)
    mistake: str = ""
    hint: str = ""
    reads: int = 0  # of the widest input, and what the lesson's model counts
    writes: int = 0
    model_reads: int = 0
    model_writes: int = 0
    inputs: int = 0
    milliseconds: dict[str, float] = field(default_factory=dict)
    moved: float = 1.0  # elements that the op must move, over those of a copy


class NoFunction(Exception):
    """The file cannot be used; the message says why."""


def load_function(file: Path, name: str) -> Callable[..., Any]:
    """The graded function of a file; NoFunction with the reason where there is none."""
    spec = importlib.util.spec_from_file_location("graded", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["graded"] = module  # triton looks for the source of a kernel there
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise NoFunction(f"line {error.lineno} is no Python: {error.msg}") from None
    except BaseException as error:
        line = next(
            (f.lineno for f in reversed(traceback.extract_tb(error.__traceback__)) if f.filename == str(file)), "?"
        )
        raise NoFunction(f"the file ends at line {line}: {type(error).__name__}: {error}") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise NoFunction(f"the file defines no function {name}(...)")
    return function


def lesson_mistakes(n: int) -> tuple[Mistake, ...]:
    """The classic mistakes of lesson n, without the traces that any kernel may leave."""
    from fused_softmax.lab.grading.more_mistakes import OF_NEW_LESSON
    from fused_softmax.lab.grading.softmax_mistakes import OF_LESSON, OF_SOFTMAX

    if n in OF_NEW_LESSON:
        return OF_NEW_LESSON[n]
    # PyTorch's passes have no lanes
    of_any = (mistake for mistake in OF_SOFTMAX if n > 1 or "lanes" not in mistake.name)
    return (*OF_LESSON.get(n, ()), *of_any)


def mistakes_of(n: int) -> tuple[Mistake, ...]:
    """The mistakes that are looked for in lesson n's puzzle, in that order."""
    return (*lesson_mistakes(n), *TRACES)


def judge(n: int, function: Callable[..., Any], subject: Subject, text: str) -> Finding:
    """Try a function on all inputs, and name its mistake."""
    trials = []
    for name, x in inputs_of(subject).items():
        trial = try_on(function, subject, name, x)
        if n == 1:
            _count_passes(function, trial)
        trials.append(trial)
        if trial.error:  # the others would fail alike
            break
    wrong = [t for t in trials if t.error or t.wrong or t.watched.outside]
    widest = max(trials, key=lambda t: sum(t.moves))
    found = Finding(
        right=not wrong,
        reads=widest.watched.reads,
        writes=widest.watched.writes,
        model_reads=widest.moves[0],
        model_writes=widest.moves[1],
        inputs=len(trials),
    )
    strict = n == 1 and any(t.watched.reads != t.moves[0] for t in trials)
    moved = more_reads(trials) or any(t.watched.rewritten or t.uncoalesced for t in trials) or strict
    if not wrong and not moved:
        return found
    found.right = False
    if EMPTY in text:
        found.mistake, found.hint = "the core is still empty", f"Replace each line `{EMPTY}`."
        return found
    for trial in wrong[:2]:
        said = trial.error or trial.wrong or "the result is right"
        found.lines.append(f"{trial.name} ({trial.shape}, {str(trial.arguments[0].dtype)[6:]}): {said}")
        found.lines += [f"    {event}" for event in trial.watched.outside[:1]]
    if len(wrong) > 2:
        found.lines.append(f"and {len(wrong) - 2} more of {len(trials)} inputs")
    named = find(mistakes_of(n), trials)
    if named:
        found.mistake, found.hint = named.name, named.hint
    return found


def _count_passes(function: Callable[..., Any], trial: Trial) -> None:
    """Lesson 01 has no kernel: PyTorch's own operations are counted."""
    from fused_softmax.lab.reference import traffic

    with contextlib.suppress(Exception):
        passes = traffic(function, *trial.arguments)
        trial.watched.reads = sum(p.reads for p in passes)
        trial.watched.writes = sum(p.writes for p in passes)


def interpreted(n: int, file: Path) -> Finding:
    """Grade a file in this process, which interprets kernels."""
    with contextlib.suppress(AttributeError):  # a newer Triton's interpreter has other parts, and is slower
        from fused_softmax.lab.fuzz.interpreter import patch_once

        patch_once()
    _accept_new_numpy()
    torch.use_deterministic_algorithms(True, warn_only=True)
    # unwritten elements are NaN
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    subject = subject_of(n)
    return judge(n, load_function(file, subject.function), subject, file.read_text(encoding="utf-8"))


def _accept_new_numpy() -> None:
    """The interpreter of Triton 3.6 makes integers of arrays with one element, which numpy 2.4 and later refuse."""
    from triton.runtime import interpreter

    from fused_softmax.kernels.common.numerics import TRITON

    if TRITON > (3, 6):
        return
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, *more: Any) -> None:
        patch(tensor, *more)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def compute_at_most(seconds: float) -> None:
    """End this process, by SIGXCPU, when it has used so much more of the processor's time; not on Windows."""
    with contextlib.suppress(ImportError):
        import resource

        limit, most = resource.getrlimit(resource.RLIMIT_CPU)
        # at the hard limit it would be a SIGKILL
        others = [n for n in (limit, most - 1) if n >= 0]
        wanted = min([math.ceil(time.process_time() + seconds), *others])
        resource.setrlimit(resource.RLIMIT_CPU, (wanted, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


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
    times = interleave(calls, EventStopwatch(device), TIMING_SECONDS)
    if hasattr(lessons.load(n), "SUBJECT"):  # softmax of rows moves what a copy moves
        least = subject.moves(*arguments[0].shape)
        found.moved = (least.reads + least.writes) / (2 * x.numel())
    found.milliseconds = {name: timing.ms for name, timing in times.items()}
    return found


def main() -> None:
    """Grade, with the file's own output on standard error."""
    n, file = int(sys.argv[1]), Path(sys.argv[2])
    for seconds in sys.argv[3:4]:
        compute_at_most(float(seconds))
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the file prints, in any way
    warnings.simplefilter("ignore")
    try:
        if os.environ.get("TRITON_INTERPRET") == "1":
            found = interpreted(n, file)
        else:
            found = timed(n, file)
    except NoFunction as error:
        found = Finding(False, [str(error)])
    print(json.dumps(asdict(found)), file=answer, flush=True)


if __name__ == "__main__":
    main()
