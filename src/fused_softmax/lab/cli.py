"""The command line: arguments only. What they ask for lives in bench/, lessons/ and plan.

Every command imports what it needs when it runs, so that `--help` is quick, and so that a machine without a GPU can
start again with TRITON_INTERPRET=1 before the first kernel is decorated.
"""

from __future__ import annotations

import math
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fused_softmax.lab.ending import INTERRUPTED
from fused_softmax.lab.terminal import Commands, Refused, refusing, terminal

app = typer.Typer(
    cls=Commands,
    help="Softmax kernels that are checked before they are timed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

Input = Annotated[Path | None, typer.Option(help="real data: .safetensors (every floating tensor), .npy or .pt")]
Tables = Annotated[str, typer.Option(help="ladder, forward, losses, random, few_rows, small, host, first_call, cpu")]
Dtype = Annotated[str, typer.Option("--dtype", help="comma-separated: bf16, fp16, fp32 (or the long names)")]


def names(text: str, option: str = "") -> tuple[str, ...]:
    """Split a comma-separated option; an empty one names nothing, which is the default."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if text and not found:
        raise Refused(f"{text!r} names nothing: give names with commas between them", option)
    return found


def numbers(text: str, option: str) -> tuple[int, ...]:
    """Split a comma-separated option into positive integers."""
    try:
        found = tuple(int(part.replace("_", "")) for part in names(text, option))
    except ValueError:
        why = f"{text!r} is not a list of integers: give numbers with commas between them, such as 1024,50257"
        raise Refused(why, option) from None
    if any(not 1 <= n < 2**60 for n in found):
        raise Refused(f"{text!r}: numbers must be positive, and below 2^60", option)
    return found


def dtypes(text: str, option: str = "--dtype") -> tuple[str, ...]:
    """Split and widen dtype names."""
    found = tuple(DTYPE_NAMES.get(name, name) for name in names(text, option))
    for name in found:
        if name not in DTYPE_NAMES.values():
            allowed = ", ".join((*DTYPE_NAMES, *DTYPE_NAMES.values()))
            raise Refused(f"{name!r} is none of {allowed}", option)
    return tuple(dict.fromkeys(found))


def interpret_without_gpu() -> None:
    """Where no GPU is usable, start this command again with Triton's interpreter; kernels must not be imported yet."""
    import torch

    from fused_softmax.launch.device import interpreting

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
    op: Annotated[
        str, typer.Option(help="what is computed, such as softmax,log_softmax or cross_entropy, or all")
    ] = "softmax",
    table: Tables = "",
    elements: Annotated[int, typer.Option(min=1, help="elements of each tensor where --rows is not given")] = 2**28,
    record: Annotated[Path | None, typer.Option(help="also write the JSON to this .json, or to a folder by op")] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="processes that compile first (GPU); default: all")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.0, help="seconds for one system in one case")] = None,
    random_widths: Annotated[
        int, typer.Option(min=0, max=1000, help="draw so many widths for each op, half of them odd")
    ] = 0,
    seed: Annotated[
        int | None, typer.Option(min=0, help="of --random-widths; default: a new one, kept in the results")
    ] = None,
) -> None:
    """Check every system against float64, then time those that passed beside the device's own copy."""
    wanted = numbers(widths, "--widths"), dtypes(dtype)
    chosen = names(table, "--table"), names(systems, "--systems")
    if not op.strip():
        raise Refused("names no op: give one, such as softmax, a family, or all", "--op")
    if seconds is not None and not math.isfinite(seconds):
        raise Refused(f"{seconds} is not a number of seconds, such as 0.1", "--seconds")
    if seed is not None and not random_widths:
        raise Refused("belongs to --random-widths: give --random-widths N too", "--seed")
    interpret_without_gpu()
    from fused_softmax.lab.bench.ops import ops_named
    from fused_softmax.lab.bench.run import Request, prepare, run

    try:
        ops = tuple(dict.fromkeys(found for name in names(op, "--op") for found in ops_named(name)))
    except KeyError as error:
        raise Refused(error.args[0], "--op") from None
    request = Request(
        ops=ops,
        tables=chosen[0],
        widths=wanted[0],
        rows=rows,
        dtypes=wanted[1],
        systems=chosen[1],
        input=input,
        elements=elements,
        out=out,
        record=record,
        workers=workers,
        seconds=seconds,
        random_widths=random_widths,
        seed=seed,
    )
    with refusing(ValueError, OSError):
        prepared = prepare(request)
    console = terminal()
    head, records, files = run(prepared, console)
    console.print(f"{len(records)} results in {', '.join(str(file) for file in files)}", markup=False, soft_wrap=True)
    if head.stopped:
        raise typer.Exit(INTERRUPTED if head.stopped == "interrupted" else 1)
    if any(r.system == "fused_softmax" and r.status in ("wrong", "error") for r in records):
        raise typer.Exit(1)


@app.command()
def verify(input: Input = None) -> None:
    """Check every shipped path against float64, each regime forced, and edge cases; fails when one is wrong."""
    interpret_without_gpu()
    from rich.progress import track

    from fused_softmax.lab.bench.verify import checks, examine, summary
    from fused_softmax.launch.device import device_here

    console = terminal()
    with refusing(ValueError, OSError):
        wanted = list(checks(device_here(), input))
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
    wanted = names(op, "--op"), names(way, "--way"), dtypes(dtype)
    interpret_without_gpu()
    from fused_softmax.lab.fuzz import command

    raise typer.Exit(
        command.fuzz(*wanted, seconds, cases, per_cell, columns, seed, workers, record, sanitize, replay, stop, huge)
    )


@app.command()
def accuracy(
    op: Annotated[str, typer.Option(help="comma-separated ops, such as softmax,cross_entropy; default all")] = "",
    dtype: Dtype = "",
    rows: Annotated[
        int | None, typer.Option(min=1, max=2**20, help="rows of each case; default: as many as 2^22 elements give")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="the same seed draws the same inputs")] = 0,
    record: Annotated[Path | None, typer.Option(help="write this JSON record")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="processes; default: one a core on a GPU, else 1")] = None,
) -> None:
    """Measure the largest error in ULP against float64, ours and torch's, by op, dtype and number of columns."""
    wanted = names(op, "--op"), dtypes(dtype)
    interpret_without_gpu()
    from fused_softmax.lab.accuracy.session import Request, run
    from fused_softmax.lab.registry import OPS

    for name in wanted[0]:
        if name not in OPS:
            raise Refused(f"{name!r} is none of {', '.join(OPS)}", "--op")
    with refusing(OSError):
        if record is not None:  # before the run, not after it
            if record.is_dir():
                raise Refused(f"{record} is a directory: give a .json file", "--record")
            record.parent.mkdir(parents=True, exist_ok=True)
        infinite = run(Request(*wanted, rows, seed, record, workers), terminal())
    if infinite:
        raise typer.Exit(1)


@app.command()
def explain(
    shape: Annotated[str, typer.Argument(help="rows x columns, such as 4096x128256")],
    dtype: Annotated[str, typer.Argument(help="bfloat16, float16 or float32")] = "bfloat16",
    device: Annotated[
        str, typer.Option(help="sm_80, sm_89, sm_90, sm_100, sm_120 or gfx942; not needed here")
    ] = "sm_90",
) -> None:
    """Say how softmax of this shape would run: the plan, why, the bytes it moves, what it compiles to."""
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
    from fused_softmax.lab.bench.explain import TARGETS, explain_lines

    if device not in TARGETS:
        raise Refused(f"{device!r} is none of {', '.join(TARGETS)}", "--device")
    for line in explain_lines(n_rows, n_cols, named[0], device):
        print(line)


@app.command()
def tune(
    widths: Annotated[str, typer.Option(help="comma-separated numbers of columns; default: the forward table's")] = "",
    dtype: Dtype = "bfloat16,float32",
    op: Annotated[str, typer.Option(help="softmax or softmax_backward")] = "softmax",
    elements: Annotated[int, typer.Option(min=1, help="elements of each tensor")] = 2**28,
) -> None:
    """Time the planner's candidates on this GPU and print config tables for the planner."""
    asked = numbers(widths, "--widths"), dtypes(dtype) or dtypes("bfloat16,float32")
    import torch
    from rich.progress import Progress

    from fused_softmax.lab.bench.cases import FORWARD_WIDTHS
    from fused_softmax.lab.bench.tuning import TUNABLE, as_config_table
    from fused_softmax.lab.bench.tuning import tune as measure
    from fused_softmax.launch.device import device_here, interpreting

    console = Console(stderr=True)
    if op not in TUNABLE:
        raise Refused(f"{op!r} is none of {', '.join(TUNABLE)}", "--op")
    if not torch.cuda.is_available() or interpreting():
        raise Refused("needs a GPU, and there is none that torch can use here: run it on a machine with one")
    from fused_softmax.planning.softmax import candidates

    wanted = asked[0] or FORWARD_WIDTHS
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("tuning", total=len(wanted) * len(asked[1]))
        with refusing(ValueError):
            choices = measure(
                op, asked[1], wanted, device_here(), elements, candidates, lambda choice: progress.advance(task)
            )
    print(as_config_table(choices, torch.cuda.get_device_name()))


@app.command()
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
    interpret_without_gpu()
    lessons.run(number)


@app.command()
def report(
    readme: Annotated[bool, typer.Option("--readme", help="rewrite README.md from the results")] = False,
    check: Annotated[bool, typer.Option("--check", help="fail when README.md is stale")] = False,
    root: Annotated[Path, typer.Option(help="the repository's root")] = Path("."),
    out: Annotated[Path | None, typer.Option(help="write page, plot, CSV and JSON of each file below here")] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="OLD NEW", help="compare two results files, or two folders of them, case by case"),
    ] = None,
    files: Annotated[list[Path] | None, typer.Argument(help="results to show; default: the recorded")] = None,
) -> None:
    """Show recorded results, compare two runs, or make the README's table and plot of the recorded results."""
    from fused_softmax.lab.bench import readme as pages
    from fused_softmax.lab.bench.output import Output
    from fused_softmax.lab.bench.record import read_results
    from fused_softmax.lab.bench.report import print_report

    if compare is not None and (readme or check or files or out is not None):
        raise Refused("--compare stands alone: leave out --readme, --check, --out and files")
    if files and (readme or check):
        raise Refused("--readme and --check read the recorded results: leave out files")
    with refusing(OSError, ValueError):
        if compare is not None:
            compare_runs(*compare)
            return
        if readme:
            pages.write(root)
        if readme or check:
            why = pages.stale(root)
            print(why or "README.md is what the results give")
            raise typer.Exit(1 if why else 0)
        folder = pages.gpu_folder(root)
        found = {file: read_results(file) for file in files} if files else pages.read_folder(folder)
        if not found:
            raise ValueError(f"{folder} holds no results: give results files, or the repository's root with --root")
        for file, (head, records) in found.items():
            print_report(terminal(), head, records, {})
            if out is not None:
                Output(out / file.stem).finish(head, records)


def compare_runs(old: Path, new: Path) -> None:
    """Print what two runs have in common: machines, fractions of the ceiling, and times of one over the other."""
    from fused_softmax.lab.bench import compare as comparing
    from fused_softmax.lab.bench.report import print_rows

    if old.is_dir() != new.is_dir():
        raise ValueError(f"{old} and {new} are a folder and a file: give two results files, or two folders of them")
    runs = comparing.read_run(old), comparing.read_run(new)
    found = comparing.compare(*runs)
    if found:
        print_rows(terminal(180), comparing.table(found))
    else:
        print("the two runs have no timed case in common")
    for line in (*comparing.machines("OLD", runs[0]), *comparing.machines("NEW", runs[1]), *comparing.unmatched(*runs)):
        print(line)
