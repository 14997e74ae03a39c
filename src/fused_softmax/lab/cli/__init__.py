"""The command line: arguments only. The modules of the lab that a command names do the work.

Every command imports its modules when it runs, so that `--help` is quick. A machine without a GPU then starts the
command again with TRITON_INTERPRET=1 before the first kernel is decorated.
"""

from __future__ import annotations

from typing import Annotated

import typer

from fused_softmax import __version__
from fused_softmax.lab.cli.check import accuracy, fuzz, verify
from fused_softmax.lab.cli.measure import bench, linear, profile, report
from fused_softmax.lab.cli.programs import host, parallel
from fused_softmax.lab.cli.show import doctor, explain, lesson
from fused_softmax.lab.cli.tune import tune
from fused_softmax.lab.terminal import Commands

__all__ = ["app"]

app = typer.Typer(
    cls=Commands,
    help="Softmax kernels that are checked before they are timed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        print(f"fused-softmax {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="the version")] = False,
) -> None:
    pass


for command in (doctor, bench, linear, parallel, host, verify, fuzz, accuracy, explain, profile, tune, lesson, report):
    app.command()(command)
