"""The lab: one file a lesson, in rising order, from five eager passes to the shipped kernel, and other ops after it.

Each lesson's docstring holds five parts (problem, mechanism, resource trade-off, common failure mode, measurement).
Then come its kernel, `launches(x, y)`, the driver `softmax(x)` for 2-D rows, and MISTAKES: what its failure mode looks
like when it runs. A lesson on another op has a SUBJECT that names its function, and `launches_for(x)`. run(n) prints
and runs a lesson; parts(n) needs neither Triton nor a GPU.

To add a lesson: its file here, its name in LESSONS (the number is part of the name), and, for `lesson N --puzzle`, a
right answer in puzzles/ and its classic mistakes in fused_softmax.lab.grading.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import subprocess
import sys
from types import ModuleType

LESSONS: tuple[str, ...] = (
    "l01_naive_passes",
    "l02_one_row_per_program",
    "l03_driver_and_heuristics",
    "l04_persistent",
    "l05_vectorized",
    "l06_three_pass_tiles",
    "l07_online_softmax",
    "l08_many_rows_per_program",
    "l09_row_on_a_cluster",
    "l10_the_shipped_kernel",
    "l11_a_row_over_gpus",
    "l12_the_gradient",
    "l13_cross_entropy_in_one_pass",
    "l14_masks",
    "l15_another_dimension",
    "l16_one_idea_at_a_time",
)
PARTS = ("Problem", "Mechanism", "Resource trade-off", "Common failure mode", "Measurement")


def numbers() -> tuple[int, ...]:
    """The lessons' numbers, from their names: a number may be missing."""
    return tuple(int(name[1:3]) for name in LESSONS)


def module_name(n: int) -> str:
    """Lesson n's dotted name; ValueError says which lessons there are."""
    named = dict(zip(numbers(), LESSONS, strict=True))
    if n not in named:
        raise ValueError(f"lesson {n} is not one of {', '.join(map(str, named))}")
    return f"{__name__}.{named[n]}"


def load(n: int) -> ModuleType:
    """Import lesson n (2 and later need Triton)."""
    return importlib.import_module(module_name(n))


def title(n: int) -> str:
    """The lesson's first line."""
    return _docstring(n).splitlines()[0]


def parts(n: int) -> dict[str, str]:
    """Lesson n's five parts by heading, read from its file without importing it.

    >>> list(parts(1)) == list(PARTS)
    True
    """
    found: dict[str, list[str]] = {}
    for line in _docstring(n).splitlines():
        if line in PARTS:
            found[line] = []
        elif found:
            found[list(found)[-1]].append(line)
    return {heading: inspect.cleandoc("\n".join(lines)).strip() for heading, lines in found.items()}


def run(n: int) -> None:
    """Print lesson n's five parts, then run it: the worked examples, its mistakes, its traffic, what it compiles to.

    On a GPU the kernels run there; elsewhere in a second process, through Triton's interpreter.
    """
    import torch

    from fused_softmax.launch.device import triton_error

    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        from fused_softmax.lab.lessons.shown import show

        show(n)
        return
    reason = triton_error()
    if reason is not None and n > 1:  # the first lesson has no Triton kernel
        sys.exit(f"lesson {n} runs Triton kernels: {reason}")
    sys.stdout.flush()
    command = [sys.executable, "-m", __name__, str(n)]
    status = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}).returncode
    if status:  # the second process has said why
        sys.exit(status)


def _docstring(n: int) -> str:
    spec = importlib.util.find_spec(module_name(n))
    assert spec is not None and spec.origin is not None, f"the file of lesson {n} is missing"
    with open(spec.origin, encoding="utf-8") as file:
        return ast.get_docstring(ast.parse(file.read())) or ""
