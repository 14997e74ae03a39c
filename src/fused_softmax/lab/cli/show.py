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
    shape: Annotated[str, typer.Argument(help="rows x columns, such as 4096x128256")] = "",
    dtype: Annotated[str | None, typer.Argument(help="bfloat16, float16 or float32; bfloat16 without it")] = None,
    rows: Annotated[str, typer.Option(help="the number of rows, in place of SHAPE")] = "",
    cols: Annotated[str, typer.Option(help="the number of columns, in place of SHAPE")] = "",
    type: Annotated[str, typer.Option("--dtype", help="bf16, fp16, fp32 (or the long names)")] = "",
    op: Annotated[str, typer.Option(help="softmax, cross_entropy, token_logprobs, softmax_backward, ...")] = "softmax",
    system: Annotated[str, typer.Option(help="fused_softmax, or a lesson's kernel, such as 07_online")] = "",
    gpu: Annotated[str, typer.Option(help="h200, h100, a100, l40s, rtx4090, rtx5090, b200, mi300x or this")] = "",
    device: Annotated[str, typer.Option(help="in place of --gpu: sm_80, sm_89, sm_90, sm_100, sm_120 or gfx942")] = "",
    hidden: Annotated[int, typer.Option(min=0, help="hidden size, of the linear losses")] = 0,
    json: Annotated[bool, typer.Option("--json", help="print plain data")] = False,
    svg: Annotated[Path | None, typer.Option(help="draw the roofline to this file")] = None,
) -> None:
    """Say how a call would run on a GPU that need not be here.

    The plan, the bytes, the least time and what binds, and what the kernel compiles to.
    """
    n_rows, n_cols = _shape(shape, rows, cols)
    given, option = (type, "--dtype") if type else ("bfloat16" if dtype is None else dtype, "DTYPE")
    named = dtypes(given, option)
    if len(named) != 1:
        raise Refused(f"{given!r}: give one of {', '.join(DTYPE_NAMES.values())}", option)
    from fused_softmax.lab import explain as explaining

    if gpu and device:
        raise Refused("says what --gpu says: give one of the two", "--device")
    if device and device not in explaining.TARGETS:
        raise Refused(f"{device!r} is none of {', '.join(explaining.TARGETS)}", "--device")
    if op not in (*explaining.OPERATIONS, *explaining.LINEAR):
        raise Refused(f"{op!r} is none of {', '.join((*explaining.OPERATIONS, *explaining.LINEAR))}", "--op")
    if op in explaining.LINEAR and not hidden:
        raise Refused(f"{op} needs --hidden: give the hidden size, such as --hidden 4096", "--op")
    if hidden and op not in explaining.LINEAR:
        raise Refused(f"goes with {' and '.join(explaining.LINEAR)}: leave it out for {op}", "--hidden")
    if system not in ("", *explaining.SYSTEMS):
        raise Refused(f"{system!r} is none of {', '.join(explaining.SYSTEMS)}", "--system")
    if system not in ("", "fused_softmax") and op != "softmax":
        raise Refused(f"{system} computes softmax: leave out --op", "--system")
    on = explaining.TARGETS[device] if device else gpu or "h200"
    if on not in (*explaining.GPUS, "this"):
        raise Refused(f"{on!r} is none of {', '.join(explaining.GPUS)}, this", "--gpu")
    try:
        explaining.gpu_named(on)
    except RuntimeError as error:
        raise Refused(f"this: {error}: give one of {', '.join(explaining.GPUS)}", "--gpu") from None
    if hidden:
        _explain_linear(op, n_rows, n_cols, hidden, named[0], on, json, svg)
        return
    arguments = (n_rows, n_cols, named[0], on, op, system or "fused_softmax")
    try:
        said = explaining.predicted(*arguments)
    except NotImplementedError as error:
        print(f"{op} of {n_rows} x {n_cols} {named[0]} on {on}: PyTorch's own kernel runs, because of {error}")
        return
    if json:
        from json import dumps

        print(dumps(explaining.as_data(said), indent=1))
    else:
        for line in explaining.lines(said):
            print(line)
    if svg is not None:
        from fused_softmax.lab.roofline.picture import roofline_svg

        with refusing(OSError):
            svg.write_text(roofline_svg(said), encoding="utf-8")


def _explain_linear(
    op: str, n_rows: int, n_cols: int, hidden: int, dtype: str, gpu: str, json: bool, svg: Path | None
) -> None:
    from json import dumps

    from fused_softmax.lab.roofline import linear

    if svg is not None:
        raise Refused("draws one kernel: leave it out for a linear loss", "--svg")
    with refusing(ValueError):
        said = linear.predict_linear(op, n_rows, n_cols, hidden, dtype, gpu)
    print(dumps(linear.as_data(said), indent=1) if json else "\n".join(linear.lines(said)))


def _shape(shape: str, rows: str, cols: str) -> tuple[int, int]:
    if rows or cols:
        if shape or not (rows and cols):
            raise Refused("and --cols go together, and without SHAPE: give both", "--rows")
        n_rows, n_cols = (numbers(text, option)[0] for text, option in ((rows, "--rows"), (cols, "--cols")))
    else:
        found = re.fullmatch(r"(\d[\d_]*)\s*[x*]\s*(\d[\d_]*)", shape.strip().lower(), re.ASCII)
        if not found:
            given = f"{shape!r}" if shape else "no shape"
            raise Refused(f"{given}: give rows x columns, such as 4096x128256, or --rows and --cols", "SHAPE")
        n_rows, n_cols = (numbers(part, "SHAPE")[0] for part in found.groups())
    if n_rows * n_cols >= 2**60:
        raise Refused(f"{n_rows} x {n_cols}: give fewer than 2^60 elements", "SHAPE")
    return n_rows, n_cols


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
    if puzzle and tried is not None:
        raise Refused("would grade another file than --puzzle writes: give one of the two", "--try")
    if puzzle:
        _write_puzzle(number, out or Path(f"lesson_{number:02}.py"))
    if tried is not None:
        _grade(number, tried)
    if puzzle or tried is not None:
        return
    options.interpret_without_gpu()
    from fused_softmax.launch.availability import KernelUnavailable

    with refusing(KernelUnavailable):
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
    import numpy  # noqa: F401  # the interpreter's: a missing one is named before a process starts
    import torch

    from fused_softmax.lab import grading
    from fused_softmax.launch.device import triton_error

    if file.suffix != ".py":
        raise Refused(f"{file}: give a Python file (.py), as --puzzle writes it", "--try")
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
