"""The commands that compare results with float64: verify, fuzz, accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fused_softmax.lab.cli import options
from fused_softmax.lab.cli.options import Dtype, Input, columns_between, dtypes, names
from fused_softmax.lab.terminal import Refused, refusing, terminal


def verify(input: Input = None) -> None:
    """Check every shipped path against float64, each regime forced, and edge cases; fails when one is wrong."""
    options.interpret_without_gpu()
    from rich.progress import track

    from fused_softmax.lab.verify import checks, examine, summary
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


def fuzz(
    op: Annotated[
        str, typer.Option(help="comma-separated ops; default all, without the linear losses, which run by themselves")
    ] = "",
    way: Annotated[str, typer.Option(help="comma-separated ways in, such as function,vmap; default all")] = "",
    dtype: Dtype = "",
    seconds: Annotated[
        float | None,
        typer.Option(min=0.0, help="draw for this many seconds; default: 60, or no limit with a count"),
    ] = None,
    cases: Annotated[int | None, typer.Option(min=1, help="how many cases in all")] = None,
    per_cell: Annotated[
        int | None,
        typer.Option(min=1, help="draw this many cases of each op, way and dtype; compiled ways a tenth"),
    ] = None,
    columns: Annotated[str, typer.Option(help="draw only numbers of columns from LOW to HIGH, given as LOW:HIGH")] = "",
    seed: Annotated[int, typer.Option(help="the same seed draws the same cases")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="processes")] = 1,
    record: Annotated[Path | None, typer.Option(help="write or add to this JSON record")] = None,
    add: Annotated[str, typer.Option(help="draw nothing: add these comma-separated records to --record")] = "",
    sanitize: Annotated[str, typer.Option(help="run under compute-sanitizer: memcheck, racecheck, initcheck")] = "",
    replay: Annotated[str, typer.Option(help="one case, as the JSON that a failure printed")] = "",
    huge: Annotated[bool, typer.Option("--huge", help="also tensors of more than 2^31 elements (GPU)")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="stop at the first failure")] = False,
) -> None:
    """Draw calls of every op, way in, dtype, layout and value; judge them against float64; fail when one is wrong."""
    wanted, added = (names(op, "--op"), names(way, "--way"), dtypes(dtype)), [Path(f) for f in names(add, "--add")]
    limits = columns_between(columns)
    options.interpret_without_gpu()
    from fused_softmax.lab.fuzz import command

    raise typer.Exit(
        command.fuzz(
            *wanted, seconds, cases, per_cell, limits, seed, workers, record, sanitize, replay, stop, huge, added
        )
    )


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
    options.interpret_without_gpu()
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
