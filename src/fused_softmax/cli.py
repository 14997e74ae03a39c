"""The command line: arguments only. What they ask for lives in bench/, lessons/ and plan.

Every command imports what it needs when it runs, so that `--help` is quick, and so that a machine without a GPU can
start again with TRITON_INTERPRET=1 before the first kernel is decorated.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    help="Softmax kernels that are checked before they are timed.", no_args_is_help=True, pretty_exceptions_enable=False
)
DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

Input = Annotated[Path | None, typer.Option(help="real data: .safetensors (every floating tensor), .npy or .pt")]
Tables = Annotated[str, typer.Option(help="ladder, forward, losses, random, few_rows, small, host, first_call, cpu")]
Dtype = Annotated[str, typer.Option("--dtype", help="comma-separated: bf16, fp16, fp32 (or the long names)")]


def names(text: str) -> tuple[str, ...]:
    """Split a comma-separated option."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(text: str, option: str) -> tuple[int, ...]:
    """Split a comma-separated option into positive integers."""
    try:
        found = tuple(int(part.replace("_", "")) for part in names(text))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of integers", param_hint=option) from None
    if any(n < 1 for n in found):
        raise typer.BadParameter("must be positive", param_hint=option)
    return found


def dtypes(text: str) -> tuple[str, ...]:
    """Split and widen dtype names."""
    found = tuple(DTYPE_NAMES.get(name, name) for name in names(text))
    for name in found:
        if name not in DTYPE_NAMES.values():
            raise typer.BadParameter(f"{name!r} is none of {', '.join(DTYPE_NAMES.values())}", param_hint="--dtype")
    return found


def interpret_without_gpu() -> None:
    """Where no GPU is usable, start this command again with Triton's interpreter; kernels must not be imported yet."""
    import torch

    from fused_softmax.device import interpreting

    # numpy's, from inside the interpreter, on the infinities and NaN that are meant
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")
    if torch.cuda.is_available() or interpreting():
        return
    again = [sys.executable, "-m", "fused_softmax", *sys.argv[1:]]
    os.execve(sys.executable, again, {**os.environ, "TRITON_INTERPRET": "1"})


@app.command()
def bench(
    widths: Annotated[str, typer.Option(help="comma-separated numbers of columns")] = "",
    rows: Annotated[int | None, typer.Option(min=1, help="rows at every width; default: --elements / columns")] = None,
    dtype: Dtype = "",
    systems: Annotated[str, typer.Option(help="comma-separated, such as torch,07_online; default all")] = "",
    input: Input = None,
    out: Annotated[Path, typer.Option(help="folder for the table, plot, CSV, JSON and HTML page")] = Path("out"),
    op: Annotated[str, typer.Option(help="what is computed, such as softmax,log_softmax or cross_entropy")] = "softmax",
    table: Tables = "",
    elements: Annotated[int, typer.Option(min=1, help="elements of each tensor where --rows is not given")] = 2**28,
    record: Annotated[Path | None, typer.Option(help="also write the JSON to this .json, or to a folder by op")] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="processes that compile first (GPU); default: all")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.0, help="seconds for one system in one case")] = None,
) -> None:
    """Check every system against float64, then time those that passed beside the device's own copy."""
    wanted = numbers(widths, "--widths"), dtypes(dtype)
    interpret_without_gpu()
    from fused_softmax.bench.ops import ops_named
    from fused_softmax.bench.run import Request, run

    try:
        ops = tuple(dict.fromkeys(found for name in names(op) for found in ops_named(name)))
    except KeyError as error:
        raise typer.BadParameter(error.args[0], param_hint="--op") from None
    # in a file or a pipe there is no terminal to fit: 80 columns would fold every cell
    console = Console(width=None if sys.stdout.isatty() else 150)
    request = Request(
        ops, names(table), wanted[0], rows, wanted[1], names(systems), input, elements, out, record, workers, seconds
    )
    try:
        records, files = run(request, console)
    except (KeyError, ValueError, OSError) as error:
        console.print(f"bench: {error.args[0] if isinstance(error, KeyError) else error}", markup=False)
        raise typer.Exit(2) from None
    console.print(f"{len(records)} results in {', '.join(str(file) for file in files)}", markup=False, soft_wrap=True)
    if any(r.system == "fused_softmax" and r.status in ("wrong", "error") for r in records):
        raise typer.Exit(1)


@app.command()
def verify(input: Input = None) -> None:
    """Check every shipped path against float64, each regime forced, and edge cases; fails when one is wrong."""
    interpret_without_gpu()
    from rich.progress import track

    from fused_softmax.bench.verify import checks, examine, summary
    from fused_softmax.device import device_here

    console = Console()
    try:
        wanted = list(checks(device_here(), input))
    except (ValueError, OSError) as error:
        console.print(f"verify: {error}", markup=False)
        raise typer.Exit(2) from None
    found = [examine(check) for check in track(wanted, "checking", console=console, transient=True)]
    for path, name, passed, largest in summary(found):
        console.print(f"{path:24} {name:10} {passed:>12} right, largest error {largest}", markup=False, highlight=False)
    wrong = [f for f in found if not f.ok]
    for f in wrong[:30]:
        why = f"WRONG {f.path}, {f.dtype}, {f.about}: {f.why}"
        console.print(why, markup=False, highlight=False, soft_wrap=True)
    if wrong:
        console.print(f"{len(wrong)} of {len(found)} wrong")
        raise typer.Exit(1)
    console.print(f"all {len(found)} right")


@app.command()
def fuzz(
    op: Annotated[str, typer.Option(help="comma-separated ops; default all")] = "",
    way: Annotated[str, typer.Option(help="comma-separated ways in, such as function,vmap; default all")] = "",
    dtype: Dtype = "",
    seconds: Annotated[float | None, typer.Option(min=0.0, help="how long; default 60, without a count")] = None,
    cases: Annotated[int | None, typer.Option(min=1, help="how many cases in all")] = None,
    per_cell: Annotated[
        int | None, typer.Option(min=1, help="cases of each op, way and dtype; a tenth compiled")
    ] = None,
    columns: Annotated[str, typer.Option(help="widths drawn from LOW:HIGH alone")] = "",
    seed: Annotated[int, typer.Option(help="the same seed draws the same cases")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="processes")] = 1,
    record: Annotated[Path | None, typer.Option(help="write or add to this JSON record")] = None,
    sanitize: Annotated[str, typer.Option(help="run under compute-sanitizer: memcheck, racecheck, initcheck")] = "",
    replay: Annotated[str, typer.Option(help="one case, as the JSON that a failure printed")] = "",
    huge: Annotated[bool, typer.Option("--huge", help="also tensors of more than 2^31 elements (GPU)")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="stop at the first failure")] = False,
) -> None:
    """Draw calls of every op, way in, dtype, layout and value; judge them against float64; fail when one is wrong."""
    wanted = names(op), names(way), dtypes(dtype)
    interpret_without_gpu()
    from fused_softmax.lab.fuzz import command

    raise typer.Exit(
        command.fuzz(*wanted, seconds, cases, per_cell, columns, seed, workers, record, sanitize, replay, stop, huge)
    )


@app.command()
def explain(
    shape: Annotated[str, typer.Argument(help="rows x columns, such as 4096x128256")],
    dtype: Annotated[str, typer.Argument(help="bfloat16, float16 or float32")] = "bfloat16",
    device: Annotated[str, typer.Option(help="sm_80, sm_90, sm_100, sm_120 or gfx942; not needed here")] = "sm_90",
) -> None:
    """Say how softmax of this shape would run: the plan, why, the bytes it moves, what it compiles to."""
    parts = shape.lower().replace("*", "x").split("x")
    if len(parts) != 2:
        raise typer.BadParameter("give rows x columns, such as 4096x128256", param_hint="SHAPE")
    n_rows, n_cols = (numbers(part, "SHAPE")[0] if part else 0 for part in parts)
    (name,) = dtypes(dtype)
    from fused_softmax.bench.explain import explain_lines

    try:
        for line in explain_lines(n_rows, n_cols, name, device):
            print(line)
    except KeyError as error:
        raise typer.BadParameter(f"no described device {error}", param_hint="--device") from None


@app.command()
def tune(
    widths: Annotated[str, typer.Option(help="comma-separated numbers of columns; default: the forward table's")] = "",
    dtype: Dtype = "bfloat16,float32",
    op: Annotated[str, typer.Option(help="softmax or softmax_backward")] = "softmax",
    elements: Annotated[int, typer.Option(min=1, help="elements of each tensor")] = 2**28,
) -> None:
    """Time the planner's candidates on this GPU and print the ladders that the planner would read."""
    import torch
    from rich.progress import Progress

    from fused_softmax.bench.cases import FORWARD_WIDTHS
    from fused_softmax.bench.tuning import TUNABLE, as_ladders
    from fused_softmax.bench.tuning import tune as measure
    from fused_softmax.device import device_here, interpreting

    console = Console(stderr=True)
    if not torch.cuda.is_available() or interpreting():
        console.print("tune: needs a GPU")
        raise typer.Exit(2)
    from fused_softmax.plan import candidates

    if op not in TUNABLE:
        raise typer.BadParameter(f"{op!r} is none of {', '.join(TUNABLE)}", param_hint="--op")
    wanted = numbers(widths, "--widths") or FORWARD_WIDTHS
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("tuning", total=len(wanted) * len(dtypes(dtype)))
        choices = measure(
            op, dtypes(dtype), wanted, device_here(), elements, candidates, lambda choice: progress.advance(task)
        )
    print(as_ladders(choices, torch.cuda.get_device_name()))


@app.command()
def lesson(number: Annotated[int | None, typer.Argument(min=1, help="without it, the list of lessons")] = None) -> None:
    """Print a lesson's five parts and run it: its kernel against float64, then the mistakes it warns of."""
    from fused_softmax import lessons

    if number is None:
        for n in range(1, len(lessons.LESSONS) + 1):
            print(lessons.title(n))
        return
    try:
        lessons.module_name(number)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="N") from None
    lessons.run(number)


@app.command()
def report(
    readme: Annotated[bool, typer.Option("--readme", help="rewrite README.md from the results")] = False,
    check: Annotated[bool, typer.Option("--check", help="fail when README.md is stale")] = False,
    root: Annotated[Path, typer.Option(help="the repository's root")] = Path("."),
    out: Annotated[Path | None, typer.Option(help="write page, plot, CSV and JSON of each file below here")] = None,
    files: Annotated[list[Path] | None, typer.Argument(help="results to show; default: the recorded")] = None,
) -> None:
    """Show recorded results, or make the README's table and plot of them."""
    from fused_softmax.bench import readme as pages
    from fused_softmax.bench.output import Output
    from fused_softmax.bench.record import from_json
    from fused_softmax.bench.report import print_report

    try:
        if readme:
            pages.write(root)
        if readme or check:
            why = pages.stale(root)
            print(why or "README.md is what the results give")
            raise typer.Exit(1 if why else 0)
        for file in files or pages.result_files(pages.gpu_folder(root)):
            head, records = from_json(file.read_text())
            print_report(Console(width=None if sys.stdout.isatty() else 150), head, records, {})
            if out is not None:
                Output(out / file.stem).finish(head, records)
    except (OSError, ValueError, KeyError) as error:
        print(f"report: {error}")
        raise typer.Exit(2) from None
