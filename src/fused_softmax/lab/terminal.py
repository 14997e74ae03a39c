"""How the command line refuses: one line on stderr with the argument, the allowed values and advice; status 2."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

from fused_softmax.lab.ending import INTERRUPTED

PROGRAM = "fused-softmax"
# of click, or of the copy of it that newer versions of typer carry
UsageError: Any = typer.BadParameter.__mro__[1]
ClickException: Any = typer.BadParameter.__mro__[2]


class Refused(UsageError):
    """A bad input; the message has the argument, the allowed values and advice."""

    def __init__(self, why: str, option: str = "") -> None:
        super().__init__(f"{option} {why}" if option else why)


class Terminal(Console):
    """A console that leaves a closed pipe to whoever ends the process."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


def terminal(width: int = 150) -> Terminal:
    """Standard output; in a file or a pipe there is no terminal to fit: 80 columns would fold every cell."""
    return Terminal(width=None if sys.stdout.isatty() else width)


@contextmanager
def refusing(*kinds: type[Exception]) -> Iterator[None]:
    """Turn the exceptions that stand for a bad input into a refusal."""
    try:
        yield
    except BrokenPipeError:
        raise
    except kinds as error:
        why = str(error)
        if isinstance(error, OSError) and error.filename is not None and error.strerror:
            why = f"{error.filename}: {error.strerror.lower()}: give another path"
        raise Refused(why) from None


class Commands(TyperGroup):
    """The group of commands; its errors are one line."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **more: Any,
    ) -> Any:
        """Run a command and end the process with its status."""
        more |= {"prog_name": prog_name, "complete_var": complete_var, "windows_expand_args": windows_expand_args}
        more["standalone_mode"] = False
        args = list(sys.argv[1:] if args is None else args)
        if not standalone_mode:
            return super().main(args, **more)
        try:
            status = super().main(args, **more)
        except typer.Abort:  # what older versions of typer make of Ctrl-C
            status = INTERRUPTED
        except ClickException as error:
            if not args:  # the help, which is many lines
                error.show()
                sys.exit(error.exit_code)
            path = " ".join([PROGRAM, *(name for name in args[:1] if name in self.commands)])
            # the library does not always quote the wrong argument
            given = f"; given: {PROGRAM} {shlex.join(args)}; `{path} --help` lists what is allowed"
            advice = "" if isinstance(error, Refused) else given
            print(f"{path}: {' '.join(error.format_message().split()).rstrip('.')}{advice}", file=sys.stderr)
            sys.exit(error.exit_code)
        if status == INTERRUPTED:
            print("interrupted", file=sys.stderr)
        sys.exit(status if isinstance(status, int) else 0)
