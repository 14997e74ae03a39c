"""The commands that explain: explain for a shape, lesson for the lessons, doctor for the machine."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from fused_softmax.lab.cli import options
from fused_softmax.lab.cli.options import DTYPE_NAMES, dtypes, numbers
from fused_softmax.lab.terminal import Refused


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


def lesson(number: Annotated[int | None, typer.Argument(min=1, help="without it, the list of lessons")] = None) -> None:
    """Print a lesson's five parts and run it: its kernel against float64, then the mistakes it warns of."""
    from fused_softmax.lab import lessons

    if number is None:
        for n in range(1, len(lessons.LESSONS) + 1):
            print(lessons.title(n))
        return
    try:
        lessons.module_name(number)
    except ValueError as error:
        raise Refused(f"{error}: give one of these") from None
    options.interpret_without_gpu()
    lessons.run(number)


def doctor() -> None:
    """Show versions, GPU, regimes, cache folder and extras, and check one kernel; fail where something is broken."""
    from fused_softmax.lab.doctor import main

    raise typer.Exit(main())
