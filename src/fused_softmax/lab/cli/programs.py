"""The commands that time whole calls: host (host time) and parallel (losses of rows spread over GPUs)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fused_softmax.lab.cli.options import Dtype, dtypes, names, numbers
from fused_softmax.lab.terminal import Refused, terminal


def host(
    dtype: Dtype = "",
    wall: Annotated[bool, typer.Option("--wall", help="wall time of loops of real steps, not host time")] = False,
    record: Annotated[Path | None, typer.Option(help="write the results to this .json")] = None,
    seconds: Annotated[float, typer.Option(min=0.01, max=60.0, help="seconds for one system in one case")] = 0.3,
    workers: Annotated[int | None, typer.Option(min=0, help="processes that compile first; default: all cores")] = None,
) -> None:
    """Host time of each op's calls next to torch's own way, forward and backward; each is checked before."""
    wanted = dtypes(dtype)
    import torch

    if not torch.cuda.is_available():
        raise Refused("needs a GPU, and there is none that torch can use here: run it on a machine with one")
    from fused_softmax.lab import steps
    from fused_softmax.lab.bench.inputs import DTYPES
    from fused_softmax.lab.record import Record

    kinds = [DTYPES[name] for name in wanted] if dtype else [torch.bfloat16, torch.float32]
    device, console = torch.device("cuda", torch.cuda.current_device()), terminal()
    times: dict[tuple[str, ...], float] = {}

    def show(found: Record) -> None:
        key = (found.op, found.case, found.dtype, str(found.n_rows), str(found.n_cols))
        if found.status != "ok":
            console.print(f"{' '.join(key)}: {found.status}, {found.note}", markup=False)
        elif found.ms is not None and found.system == "torch" and key in times:
            ours = times.pop(key)
            console.print(
                f"{found.op:16} {found.case:36} {found.dtype:9} {found.n_rows:6} x {found.n_cols:6}  "
                f"ours {1000 * ours:9.2f} us  torch {1000 * found.ms:9.2f} us  ours/torch {ours / found.ms:5.2f}",
                markup=False, highlight=False,
            )  # fmt: skip
        elif found.ms is not None:
            times[key] = found.ms
            if found.system == "copy" or "rows" in found.case or "upstream" in found.case:
                console.print(
                    f"{' '.join(key)} {found.system}: {1000 * found.ms:.2f} us", markup=False, highlight=False
                )

    shapes = steps.WALL_SHAPES if wall else [steps.HOST_SHAPE]
    steps.compile_ahead(kinds, shapes, (os.cpu_count() or 1) if workers is None else workers)
    made = (steps.wall if wall else steps.host)(kinds, device, seconds=seconds)
    raise typer.Exit(1 if steps.run(made, record, device, show) else 0)


def parallel(
    op: Annotated[str, typer.Option(help="comma-separated: cross_entropy, token_logprobs")] = "",
    columns: Annotated[str, typer.Option(help="comma-separated numbers of columns of all GPUs; 0: no times")] = "",
    rows: Annotated[int, typer.Option(min=1, help="rows")] = 8192,
    compiled: Annotated[
        str, typer.Option(help="columns at which compiled systems run too, comma-separated; default: all; 0: none")
    ] = "",
    ranks: Annotated[int | None, typer.Option(min=2, help="GPUs; default: all that torch sees")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="timed rounds of each system")] = 7,
    workers: Annotated[
        int | None, typer.Option(min=0, help="processes that compile first; default: as many as cores, up to 48")
    ] = None,
    out: Annotated[Path, typer.Option(help="the .json that is written")] = Path("out/parallel.json"),
    equality: Annotated[
        Path | None,
        typer.Option(help="also compare each op with one GPU, and bits of 1, 2, 4, 8 ranks; write this record"),
    ] = None,
) -> None:
    """Check and time losses of rows spread over the GPUs of this machine; torchrun starts it as well."""
    import torch

    found = torch.cuda.device_count()
    wanted = ranks or found
    if found < 2 or wanted > found:
        raise Refused(f"needs {max(2, wanted)} GPUs, and torch sees {found}: run it on a machine with as many")
    from fused_softmax.lab.parallel import measure
    from fused_softmax.lab.parallel.systems import OPS

    ops = names(op, "--op") or OPS
    unknown = [name for name in ops if name not in OPS]
    if unknown:
        raise Refused(f"{unknown[0]!r} is none of {', '.join(OPS)}", "--op")
    sizes = () if columns == "0" else numbers(columns, "--columns") or measure.COLUMNS
    uneven = [n for n in sizes if n % wanted]
    if uneven:
        raise Refused(f"{uneven[0]} columns are not even over {wanted} GPUs", "--columns")
    with_compiled = sizes if not compiled else () if compiled == "0" else numbers(compiled, "--compiled")
    with_compiled = with_compiled if sizes else ()
    arguments = (tuple(ops), tuple(sizes), rows, tuple(with_compiled), rounds, out, equality)
    measure.launch(wanted, arguments, min(os.cpu_count() or 1, 48) if workers is None else workers)
