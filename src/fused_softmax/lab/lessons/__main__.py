"""`python -m fused_softmax.lab.lessons N` runs lesson N; with --resources it prints what its kernel compiles to."""

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
    parser.add_argument("--resources", action="store_true", help="cross-compile instead of running; needs no GPU")
    parser.add_argument("--record-steps", type=Path, help="time the steps of a lesson that has some, to this JSON; GPU")
    parser.add_argument("--columns", type=int, nargs="+", default=[4096])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--target", default="sm_90")
    asked = parser.parse_args(argv)
    try:
        module_name(asked.lesson)
    except ValueError as error:
        parser.error(str(error))
    if asked.record_steps:
        record_steps(asked.lesson, asked.record_steps)
        return
    if not asked.resources:
        run(asked.lesson)
        return
    from fused_softmax.lab.lessons.shown import resources

    print(json.dumps([asdict(used) for used in resources(asked.lesson, asked.columns, asked.dtype, asked.target)]))


def record_steps(n: int, file: Path) -> None:
    """Time lesson n's steps and write them, with the machine and the versions."""
    import torch

    from fused_softmax.lab.bench.record import header, write_atomically
    from fused_softmax.lab.lessons.shown import time_steps

    found = time_steps(n)
    head = header(torch.device("cuda"), interpreted=False)
    # the header names the command line, and this is a module
    head.command, head.finished = f"python -m fused_softmax.lab.lessons {n} --record-steps {file.name}", True
    write_atomically(file, json.dumps({"header": asdict(head), "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    run_main(main)
