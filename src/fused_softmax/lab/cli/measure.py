"""The commands that measure, and that show results: bench, report, profile."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import typer

from fused_softmax.lab.cli import options
from fused_softmax.lab.cli.options import (
    DTYPE_NAMES,
    Dtype,
    Input,
    Tables,
    columns_between,
    dtypes,
    expect_gpu,
    names,
    numbers,
    shapes_named,
)
from fused_softmax.lab.ending import INTERRUPTED
from fused_softmax.lab.terminal import Refused, refusing, terminal


def bench(
    widths: Annotated[str, typer.Option(help="comma-separated numbers of columns")] = "",
    rows: Annotated[int | None, typer.Option(min=1, help="rows at every width; default: --elements / columns")] = None,
    dtype: Dtype = "",
    systems: Annotated[str, typer.Option(help="comma-separated, such as torch,07_online; default all")] = "",
    input: Input = None,
    out: Annotated[Path, typer.Option(help="folder for the HTML page, CSV and JSON")] = Path("out"),
    op: Annotated[
        str, typer.Option(help="comma-separated ops, such as softmax,log_softmax or cross_entropy, or all")
    ] = "softmax",
    table: Tables = "",
    elements: Annotated[int, typer.Option(min=1, help="elements of each tensor where --rows is not given")] = 2**28,
    record: Annotated[Path | None, typer.Option(help="also write the JSON to this .json, or to a folder by op")] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="processes that compile first (GPU); default: all")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.0, help="seconds for one system in one case")] = None,
    random_widths: Annotated[
        int, typer.Option(min=0, max=1000, help="draw so many widths for each op, half of them odd")
    ] = 0,
    columns: Annotated[
        str,
        typer.Option(help="of --random-widths: from LOW to HIGH columns, given as LOW:HIGH"),
    ] = "",
    shapes: Annotated[
        str,
        typer.Option(help="OUTERxCOLUMNSxINNER, comma-separated: over dimension 1 of tensors of these shapes"),
    ] = "",
    random_shapes: Annotated[
        int, typer.Option(min=0, max=1000, help="draw so many shapes (outer, n_cols, inner) and layouts for each op")
    ] = 0,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="the same seed draws the same widths and shapes; default: a new one",
        ),
    ] = None,
) -> None:
    """Check every system against float64, then time those that passed and the device's own copy."""
    wanted = numbers(widths, "--widths"), dtypes(dtype)
    chosen = names(table, "--table"), names(systems, "--systems")
    if not op.strip():
        raise Refused("names no op: give one, such as softmax, a family, or all", "--op")
    if seconds is not None and not math.isfinite(seconds):
        raise Refused(f"{seconds} is not a number of seconds, such as 0.1", "--seconds")
    if seed is not None and not (random_widths or random_shapes):
        raise Refused("belongs to --random-widths and --random-shapes: give one of them too", "--seed")
    limits = columns_between(columns)
    if limits is not None and not random_widths:
        raise Refused("belongs to --random-widths: give it too", "--columns")
    options.interpret_without_gpu()
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
        columns=limits,
        shapes=shapes_named(shapes, ("outer", "columns", "positions"), "16x19x524288"),
        random_shapes=random_shapes,
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


def linear(
    op: Annotated[
        str,
        typer.Option(help="comma-separated: linear_cross_entropy, linear_cross_entropy_none, linear_token_logprobs"),
    ] = "",
    shapes: Annotated[
        str, typer.Option(help="comma-separated rows x hidden size x vocabulary, such as 4096x4096x128256")
    ] = "",
    systems: Annotated[str, typer.Option(help="semicolon-separated names; default all that are installed")] = "",
    seconds: Annotated[float, typer.Option(min=0.0, help="seconds for one system in one shape")] = 0.3,
    large: Annotated[bool, typer.Option("--large", help="also 131,072 rows at once")] = False,
    out: Annotated[Path, typer.Option(help="the .json that is written")] = Path("out/linear_losses.json"),
) -> None:
    """Check the linear losses and their peers against float64, then time them with the plain matrix products."""
    import torch

    if not torch.cuda.is_available():
        raise Refused("needs a GPU, and there is none that torch can use here: run it on a machine with one")
    from fused_softmax.lab.linear import measure as bench
    from fused_softmax.lab.linear.systems import OPS
    from fused_softmax.lab.record import in_words

    ops = names(op, "--op") or OPS
    unknown = [name for name in ops if name not in OPS]
    if unknown:
        raise Refused(f"{unknown[0]!r} is none of {', '.join(OPS)}", "--op")
    sizes: tuple[bench.Shape, ...] | None = None
    if shapes:
        try:
            sizes = tuple((int(n), int(h), int(v)) for n, h, v in (shape.split("x") for shape in shapes.split(",")))
        except ValueError:
            raise Refused(f"{shapes!r} is no list of sizes, such as 4096x4096x128256", "--shapes") from None
        if any(min(size) < 1 for size in sizes):
            raise Refused(f"{shapes!r}: sizes are positive", "--shapes")
    chosen = tuple(name.strip() for name in systems.split(";") if name.strip())
    console = terminal()
    show = lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)  # noqa: E731
    records = bench.run(tuple(ops), sizes, chosen, seconds, out, large, lambda record: show(in_words(record)))
    show(f"{len(records)} results in {out}")
    if any(r.system.startswith("fused_softmax") and r.status != "ok" for r in records):
        raise typer.Exit(1)


def report(
    root: Annotated[Path, typer.Option(help="the repository's root")] = Path("."),
    out: Annotated[Path | None, typer.Option(help="write the page, CSV and JSON of each file below here")] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="OLD NEW", help="compare two results files, or two folders of them, case by case"),
    ] = None,
    files: Annotated[list[Path] | None, typer.Argument(help="results to show; default: the recorded")] = None,
) -> None:
    """Show recorded results, or compare two runs."""
    from fused_softmax.lab.bench.report import print_report
    from fused_softmax.lab.results import gpu_folder, read_folder, read_results

    if compare is not None and (files or out is not None):
        raise Refused("--compare stands alone: leave out --out and files")
    with refusing(OSError, ValueError):
        if compare is not None:
            compare_runs(*compare)
            return
        folder = gpu_folder(root)
        found = {file: read_results(file) for file in files} if files else read_folder(folder)
        if not found:
            raise ValueError(f"{folder} holds no results: give results files, or the repository's root with --root")
        for file, (head, records) in found.items():
            print_report(terminal(), head, records, {})
            if out is not None:
                from fused_softmax.lab.bench.output import Output  # the page's packages are in another extra

                Output(out / file.stem).finish(head, records)


def compare_runs(old: Path, new: Path) -> None:
    """Print what two runs have in common: machines, fractions of the ceiling, and times of one over the other."""
    from fused_softmax.lab import compare as comparing
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


def profile(
    systems: Annotated[str, typer.Option(help="comma-separated: lessons such as 07_online, and fused_softmax")] = "",
    widths: Annotated[str, typer.Option(help="comma-separated; 4096 without it, and 131072 for some lessons")] = "",
    op: Annotated[str, typer.Option(help="of fused_softmax: comma-separated ops, or all")] = "",
    dtype: Dtype = "bfloat16",
    elements: Annotated[int, typer.Option(min=1, help="elements of each tensor: many times the L2")] = 2**30,
    floors: Annotated[
        bool, typer.Option("--floors", help="time them next to their floors, in place of counting")
    ] = False,
    random_widths: Annotated[
        int, typer.Option(min=0, max=1000, help="draw so many widths, half of them odd, 1,024 to 262,144 columns")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="the same seed draws the same --random-widths")] = 0,
    inner: Annotated[
        int,
        typer.Option(min=1, help="widths are those of dimension 1 of (outer, width, INNER), of fused_softmax alone"),
    ] = 1,
    shapes: Annotated[
        str,
        typer.Option(
            help="comma-separated OUTERxCOLSxINNER, over dimension 1, of fused_softmax alone; --op softmax without it"
        ),
    ] = "",
    record: Annotated[Path | None, typer.Option(help="write what was found to this file, as JSON")] = None,
) -> None:
    """Count what kernels do on this GPU with Nsight Compute, and compare with the model: bytes, peak, L2, stalls.

    The status is 1 where a kernel's bytes differ from the model's by more than 3 per cent.
    """
    asked, named, ops = numbers(widths, "--widths"), names(systems, "--systems"), names(op, "--op")
    found = dtypes(dtype)
    tensors = shapes_named(shapes, ("outer", "columns", "positions"), "2x112x17172,9x64x49")
    if not found or len(found) > 1 and not tensors:
        raise Refused(f"{dtype!r}: give one of {', '.join(DTYPE_NAMES.values())}, or several with --shapes", "--dtype")
    if tensors and (asked or random_widths or inner > 1 or floors):
        raise Refused("names whole shapes: leave out --widths, --random-widths, --inner and --floors", "--shapes")

    from fused_softmax.lab.bench.shapes import SHAPED_OPS
    from fused_softmax.lab.roofline import profile as profiling

    runs = profiling.default_runs()
    known = tuple(dict.fromkeys(name for name, _, _ in runs))
    if unknown := [name for name in ops if name not in ("all", *profiling.EXPLAINED)]:
        raise Refused(f"{unknown[0]!r} is none of all, {', '.join(profiling.EXPLAINED)}", "--op")
    if unknown := [name for name in named if name not in known]:
        raise Refused(f"{unknown[0]!r} is none of {', '.join(known)}", "--systems")
    along = "--shapes" if tensors else "--inner" if inner > 1 else ""
    if along and (floors or set(named) - {profiling.OURS} or not set(ops) <= set(SHAPED_OPS)):
        raise Refused(f"counts fused_softmax alone, and of its ops {', '.join(SHAPED_OPS)}", along)
    if inner > 1 and not (asked or random_widths):
        raise Refused("give --widths or --random-widths too", "--inner")
    expect_gpu()
    from fused_softmax.lab.roofline import session
    from fused_softmax.lab.roofline.counters import NoProfiler

    asked = (*asked, *session.random_widths(random_widths, seed))
    ops = ops if ops and "all" not in ops else tuple(profiling.EXPLAINED)
    wanted = named or ((profiling.OURS,) if op or inner > 1 else known)
    ours = ops if op else ("softmax",)
    if asked:  # a lesson has one op
        of = {profiling.OURS: ours}
        runs = [(name, o, n_cols) for n_cols in asked for name in wanted for o in of.get(name, ("softmax",))]
    else:
        runs = [run for run in runs if run[0] in wanted and (run[0] != profiling.OURS or run[1] in ops)]
    gpu, profiles, timed, stopped = _gpu_here(), [], [], ""
    if floors:
        runs = runs if named or asked or op else session.floor_runs()
        timed = list(session.time_floors(runs, found[0], min(elements, 2**28), gpu))
        print("\n".join(session.floor_lines(timed)))
    else:
        try:
            if tensors:
                items = profiling.tensor_items(tensors, found, ours)
            else:
                items = profiling.items_of(runs, found[0], elements, inner)
            profiles = profiling.profile(items, gpu)
        except NoProfiler as error:
            stopped = str(error)
            print(f"no counters: {stopped}", file=sys.stderr)
        for one in profiles:
            print("\n".join(profiling.lines(one)))
    if record is not None:
        with refusing(OSError):
            session.record(record, profiles, timed, stopped)
    if stopped or not all(one.holds for one in profiles if not one.failed):
        raise typer.Exit(1)


def _gpu_here() -> str:
    """The name of this GPU in the table, or "this", whose copy is then measured."""
    import torch

    from fused_softmax.lab.roofline.gpus import GPUS

    here = torch.cuda.get_device_name()
    return next((name for name, gpu in GPUS.items() if here == f"NVIDIA {gpu.name}"), "this")
