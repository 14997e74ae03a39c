"""The site's page of the command line, from the commands themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from fused_softmax.lab.cli import app

PAGE = Path("docs") / "api" / "command.md"


def _option(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in parameter.opts) or f"`{parameter.name}`"
    default = parameter.default
    shown = "" if default in (None, "", False, ()) or callable(default) else f"`{default}`"
    about = (getattr(parameter, "help", None) or "").replace("|", "\\|")
    return f"| {names} | {about} | {shown} |"


def page() -> str:
    """The page as Markdown: a section for each command, with its options."""
    group: Any = typer.main.get_command(app)
    parts = [
        "# The command line",
        "`fused-softmax COMMAND`, or `python -m fused_softmax COMMAND`. It needs the extra `cli` or `bench`, except "
        "`fused-softmax doctor` and `fused-softmax --version`. A bad argument ends with status 2 and one line that "
        "says what is allowed. Ctrl-C ends with status 130.",
    ]
    for name, command in group.commands.items():
        parts += [f"## {name}", (command.help or "").strip()]
        options = [_option(p) for p in command.params if p.name != "help"]
        if options:
            parts.append("\n".join(["| option | meaning | default |", "|---|---|---|", *options]))
    return "\n\n".join(parts) + "\n"


def write(root: Path) -> list[Path]:
    """Write the page; returns its file."""
    (root / PAGE).write_text(page(), encoding="utf-8")
    return [root / PAGE]
