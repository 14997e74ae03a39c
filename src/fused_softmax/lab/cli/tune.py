"""The command that times other plans than the planner's: tune."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from fused_softmax.lab.cli.options import Dtype, columns_between, dtypes, expect_gpu, names, numbers, shapes_named
from fused_softmax.lab.ending import INTERRUPTED
from fused_softmax.lab.terminal import Refused, refusing

if TYPE_CHECKING:
    from fused_softmax.lab.tune_shapes import Workload


def tune(
    widths: Annotated[str, typer.Option(help="comma-separated numbers of columns; default: the forward table's")] = "",
    dtype: Dtype = "bfloat16,float32",
    op: Annotated[
        str, typer.Option(help="such as softmax or cross_entropy; of shapes several, comma-separated")
    ] = "softmax",
    elements: Annotated[
        str,
        typer.Option(
            help="elements of each tensor, 268435456 without it; of shapes several numbers, comma-separated, and "
            "3000000,16000000,80000000 without it"
        ),
    ] = "",
    random_widths: Annotated[int, typer.Option(min=0, max=1000, help="draw so many widths, half of them odd")] = 0,
    shapes: Annotated[
        str,
        typer.Option(help="COLUMNSxINNER, comma-separated: softmax over dimension 1 of (outer, COLUMNS, INNER)"),
    ] = "",
    random_shapes: Annotated[int, typer.Option(min=0, max=1000, help="draw so many shapes")] = 0,
    columns: Annotated[str, typer.Option(help="of --random-shapes: LOW:HIGH columns; 2:4096 without it")] = "",
    inner: Annotated[str, typer.Option(help="of --random-shapes: LOW:HIGH positions; 2:4096 without it")] = "",
    plans: Annotated[
        int | None, typer.Option(min=0, help="of shapes: other plans of each, at most; all without it")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="the same seed draws the same widths, shapes and plans")] = 0,
    seconds: Annotated[
        float | None, typer.Option(min=0.0, help="of shapes: seconds for each plan and size; 0.003 without it")
    ] = None,
    record: Annotated[Path | None, typer.Option(help="of shapes: write all times to this file, as JSON")] = None,
    workers: Annotated[int, typer.Option(min=0, help="processes that compile first")] = 8,
) -> None:
    """Time other plans than the planner's on this GPU, and print config tables, or the fastest plans of shapes."""
    of_shapes = bool(shapes or random_shapes)
    if of_shapes and (widths or random_widths):
        raise Refused("--widths and --shapes: give one of the two")
    for option, given in {"--columns": columns, "--inner": inner}.items():
        if given and not random_shapes:
            raise Refused("belongs to --random-shapes: give it too", option)
    for option, value in {"--plans": plans, "--seconds": seconds, "--record": record}.items():
        if value is not None and not of_shapes:
            raise Refused("belongs to --shapes and --random-shapes: give one of them too", option)
    if seconds is not None and not math.isfinite(seconds):
        raise Refused(f"{seconds} is not a number of seconds, such as 0.01", "--seconds")
    limits = columns_between(columns) or (2, 4096), columns_between(inner, "--inner") or (2, 4096)
    asked = dtypes(dtype) or dtypes("bfloat16,float32")
    sizes, ops = numbers(elements, "--elements"), tuple(dict.fromkeys(names(op, "--op")))
    if of_shapes:
        named = shapes_named(shapes, ("columns", "positions"), "19x4096,103x42")
        workloads = _workloads(named, random_shapes, seed, limits, ops, asked)
        _tune_shapes(workloads, sizes, plans or 0, seed, 0.003 if seconds is None else seconds, record, workers)
        return
    if len(sizes) > 1:
        raise Refused(f"{elements!r}: widths have tensors of one size", "--elements")
    if len(ops) != 1:
        raise Refused(f"{op!r}: give one op for widths", "--op")
    _tune_widths(numbers(widths, "--widths"), random_widths, ops[0], asked, sizes[0] if sizes else 2**28, seed, workers)


def _tune_widths(
    widths: tuple[int, ...], random_widths: int, op: str, asked: tuple[str, ...], elements: int, seed: int, workers: int
) -> None:
    import torch

    from fused_softmax.lab.bench.cases import FORWARD_WIDTHS, RANDOM_RANGE, RANDOM_RANGES
    from fused_softmax.lab.bench.cases import random_widths as drawn
    from fused_softmax.lab.bench.ops import family
    from fused_softmax.lab.tune import TUNABLE, as_config_table
    from fused_softmax.lab.tune import tune as measure
    from fused_softmax.launch.device import device_here

    if op not in TUNABLE:
        raise Refused(f"{op!r} is none of {', '.join(TUNABLE)}", "--op")
    expect_gpu()
    wanted = widths or (() if random_widths else FORWARD_WIDTHS)
    if random_widths:
        wanted = (*wanted, *drawn(random_widths, seed, *RANDOM_RANGES.get(family(op), RANDOM_RANGE)))
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("tuning", total=len(wanted) * len(asked))
        with refusing(ValueError):
            choices = measure(
                op, asked, wanted, device_here(), elements, lambda choice: progress.advance(task), workers
            )
    print(as_config_table(choices, torch.cuda.get_device_name()))


def _workloads(
    shapes: tuple[tuple[int, ...], ...], random_shapes: int, seed: int, limits: tuple[tuple[int, int], tuple[int, int]],
    ops: tuple[str, ...], asked: tuple[str, ...],
) -> tuple[Workload, ...]:  # fmt: skip
    """Those of the named shapes in all ops and dtypes, and those drawn; each once."""
    from fused_softmax.lab import tune_shapes as tuning

    if unknown := [name for name in ops if name not in tuning.OPS]:
        raise Refused(f"{unknown[0]!r} is none of {', '.join(tuning.OPS)}", "--op")
    with refusing(ValueError):
        named = [tuning.Workload(o, d, *shape) for o in ops for d in asked for shape in shapes]
        drawn = tuning.drawn(random_shapes, seed, *limits, ops, asked) if random_shapes else []
    return tuple(dict.fromkeys((*named, *drawn)))


def _tune_shapes(
    workloads: tuple[Workload, ...], sizes: tuple[int, ...], plans: int, seed: int, seconds: float,
    record: Path | None, workers: int,
) -> None:  # fmt: skip
    from fused_softmax.lab import tune_shapes as tuning
    from fused_softmax.lab.bench.ceilings import measured
    from fused_softmax.lab.bench.session import Session
    from fused_softmax.lab.record import Header, Record, header, to_json, write_atomically
    from fused_softmax.launch.device import describe, device_here

    expect_gpu()
    on = device_here()
    device, head = describe(on), header(on, interpreted=False)
    if isinstance(device, str):
        raise Refused(device)
    request = tuning.Request(workloads, sizes or tuning.SIZES, plans, seed)

    def save(head: Header, records: Sequence[Record]) -> None:
        if record is not None:
            write_atomically(record, to_json(head, records))

    head.seed = seed
    with refusing(OSError):  # before a run of minutes
        save(head, [])
    with Progress(console=Console(stderr=True), transient=True) as progress:
        if workers:
            jobs = tuning.jobs_of(request, device)
            task = progress.add_task(f"compiling in {workers} processes", total=len(jobs))
            done = tuning.compile_ahead(jobs, workers, lambda: progress.advance(task))
            text = f"compiled {done.count('')} of {len(jobs)}, {workers} processes"
            progress.console.print(text, highlight=False)
        head.ceilings = measured(on)
        task = progress.add_task("tuning", total=len(workloads))
        session = Session(head, (), on, seconds, save=save)
        records = tuning.run(request, session, device, lambda workload: progress.advance(task))
    found = tuning.outcomes(records)
    for line in tuning.failures(request, records, found):
        print(line, file=sys.stderr)
    if found:
        print("\n".join(tuning.lines(found)))
    if head.stopped or not found:
        raise typer.Exit(INTERRUPTED if head.stopped == "interrupted" else 1)
