"""`python -m fused_softmax.lab.lessons N` runs lesson N; with --record-steps it times the lesson's steps."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from fused_softmax.lab.ending import run_main
from fused_softmax.lab.lessons import module_name, run


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m fused_softmax.lab.lessons", description=__doc__)
    parser.add_argument("lesson", type=int)
    parser.add_argument("--record-steps", type=Path, help="time the steps of a lesson that has some, to this JSON; GPU")
    asked = parser.parse_args(argv)
    try:
        module_name(asked.lesson)
    except ValueError as error:
        parser.error(str(error))
    if asked.record_steps:
        record_steps(asked.lesson, asked.record_steps)
        return
    run(asked.lesson)


def record_steps(n: int, file: Path) -> None:
    """Time lesson n's steps and write them, with the machine and the versions."""
    import torch

    from fused_softmax.lab.lessons.shown import time_steps
    from fused_softmax.lab.record import header, write_atomically

    found = time_steps(n)
    head = header(torch.device("cuda"), interpreted=False)
    # the header names the command line, and this is a module
    head.command, head.finished = f"python -m fused_softmax.lab.lessons {n} --record-steps {file.name}", True
    write_atomically(file, json.dumps({"header": asdict(head), "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    run_main(main)
