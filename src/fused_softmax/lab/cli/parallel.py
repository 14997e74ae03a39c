"""The command that measures losses of rows that are spread over GPUs: parallel."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fused_softmax.lab.cli.options import names, numbers
from fused_softmax.lab.terminal import Refused


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
