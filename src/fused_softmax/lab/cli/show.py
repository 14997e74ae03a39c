"""The commands that explain: explain for a shape, lesson for the lessons, doctor for the machine."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from fused_softmax.lab.cli import options
from fused_softmax.lab.cli.options import DTYPE_NAMES, dtypes, numbers
from fused_softmax.lab.terminal import Refused, refusing


def explain(
    shape: Annotated[str, typer.Argument(help="rows x columns, such as 4096x128256")],
    dtype: Annotated[str, typer.Argument(help="bfloat16, float16 or float32")] = "bfloat16",
    device: Annotated[
        str, typer.Option(help="sm_80, sm_89, sm_90, sm_100, sm_120 or gfx942; not needed here")
    ] = "sm_90",
) -> None:
    """Say how softmax of this shape would run: the plan, the reason, the bytes it moves, the compiled kernel."""
    found = re.fullmatch(r"(\d[\d_]*)\s*[x*]\s*(\d[\d_]*)", shape.strip().lower(), re.ASCII)
    if not found:
        raise Refused(f"{shape!r}: give rows x columns, such as 4096x128256", "SHAPE")
    n_rows, n_cols = (numbers(part, "SHAPE")[0] for part in found.groups())
    if n_rows * n_cols >= 2**60:
        raise Refused(f"{shape!r}: give fewer than 2^60 elements", "SHAPE")
    named = dtypes(dtype, "DTYPE")
    if len(named) != 1:
        why = f"{dtype!r}: give one of {', '.join(DTYPE_NAMES.values())}"
        raise Refused(why, "DTYPE")
    from fused_softmax.lab.explain import TARGETS, explain_lines

    if device not in TARGETS:
        raise Refused(f"{device!r} is none of {', '.join(TARGETS)}", "--device")
    for line in explain_lines(n_rows, n_cols, named[0], device):
        print(line)


def lesson(
    number: Annotated[int | None, typer.Argument(min=1, help="without it, the list of lessons")] = None,
    puzzle: Annotated[bool, typer.Option("--puzzle", help="write the lesson's kernel with its core left out")] = False,
    out: Annotated[Path | None, typer.Option(help="the puzzle's file; lesson_NN.py without it")] = None,
    tried: Annotated[Path | None, typer.Option("--try", help="grade this file; status 1 where it is not right")] = None,
) -> None:
    """Print a lesson's five parts and run it: its kernel against float64, then the mistakes it warns of.

    --puzzle writes a file to fill in, and --try grades it, in a process of its own and without a GPU, too.
    """
    from fused_softmax.lab import lessons

    if number is None:
        if puzzle or tried is not None:
            raise Refused("needs the number of a lesson: give one", "--puzzle" if puzzle else "--try")
        for n in lessons.numbers():
            print(lessons.title(n))
        return
    with refusing(ValueError):
        lessons.module_name(number)
    if puzzle:
        _write_puzzle(number, out or Path(f"lesson_{number:02}.py"))
    if tried is not None:
        _grade(number, tried)
    if puzzle or tried is not None:
        return
    options.interpret_without_gpu()
    lessons.run(number)


def _write_puzzle(number: int, file: Path) -> None:
    from fused_softmax.lab import grading

    with refusing(ValueError, OSError):
        text = grading.puzzle(number)
        if file.exists():
            raise Refused(f"{file} exists already: move it, or give another file by --out", "--puzzle")
        file.write_text(text, encoding="utf-8")
    print(f"wrote {file}. Fill in the marked lines, then: fused-softmax lesson {number} --try {file}")


def _grade(number: int, file: Path) -> None:
    import torch

    from fused_softmax.lab import grading
    from fused_softmax.launch.device import triton_error

    if not file.is_file():
        raise Refused(f"{file} is no file: give the file that --puzzle wrote", "--try")
    with refusing(ValueError):
        grading.answer(number)
    reason = triton_error()
    if reason is not None and number > 1:  # the first lesson has no Triton kernel
        raise typer.Exit(_said(f"lesson {number} runs Triton kernels: {reason}"))
    found = grading.grade(number, file, gpu=torch.cuda.is_available())
    for line in found.lines:
        print(line)
    raise typer.Exit(0 if found.right else 1)


def _said(message: str) -> int:
    print(message, file=sys.stderr)
    return 1


def doctor() -> None:
    """Show versions, GPU, regimes, cache folder and extras, and check one kernel; fail where something is broken."""
    from fused_softmax.lab.doctor import main

    raise typer.Exit(main())
