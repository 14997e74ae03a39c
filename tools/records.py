"""Makes records again, by the command that each names in its header, on one or several GPUs.

    python tools/records.py h200-triton3.6/softmax.json@0 h200/fuzz.json@1
    python tools/records.py --out new --limit 500 "h200-shapes/named.json=bench --op softmax --table shapes"

Paths are those below benchmarks/results; `PATH=ARGUMENTS` makes a new one. The records of one GPU are made one after
another, in this order. Nothing is replaced: records and what was printed are written below --out. At --limit seconds
the command that runs is interrupted and writes what it has, and later ones are left out. Records of `linear`,
`parallel` and `python` are refused before anything runs, because these commands have no --record.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from fused_softmax.lab.record import without_folders

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# commands that write one record to --record; others are run by hand, as their header names them
REMADE = ("bench", "fuzz", "accuracy", "profile", "host")
# seconds that an interrupted command has to write its record
GRACE = 15


def arguments_of(what: str) -> tuple[str, list[str]]:
    """(path below RESULTS, arguments of `fused-softmax` without those that say where to write)."""
    path, given, command = what.partition("=")
    if not given:
        header = json.loads((RESULTS / path).read_text())["header"]
        command = header["command"].removeprefix("fused-softmax ")
    return path, shlex.split(without_folders(command))


def make(path: str, arguments: list[str], gpu: str, out: Path, seconds: float) -> tuple[bool, str]:
    """Runs one command on one GPU. Returns whether it ended by itself and well, and the line that says how it ended."""
    record, begin = out / path, time.monotonic()
    record.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "fused_softmax", *arguments, "--record", str(record)]
    if arguments[0] == "bench":
        command += ["--out", str(record.with_suffix(""))]
    with record.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu}, stdout=log, stderr=subprocess.STDOUT
        )
        done = False
        try:
            status = process.wait(seconds)
            done, ended = status == 0, f"status {status}"
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            ended = "interrupted at the limit"
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                ended = "killed: it did not end when it was interrupted"
    return done, f"{path} on GPU {gpu}: {ended}, {time.monotonic() - begin:.0f} s"


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", metavar="PATH[=ARGUMENTS][@GPU]")
    parser.add_argument("--out", type=Path, default=ROOT / "out", help="folder to write to; default out/")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for all of them")
    asked = parser.parse_args(given)
    end, failed = time.monotonic() + asked.limit, list[str]()
    lanes: dict[str, list[tuple[str, list[str]]]] = {}
    for what in asked.what:
        rest, at, gpu = what.rpartition("@")
        path, arguments = arguments_of(rest if at else what)
        if arguments[0] not in REMADE:
            print(
                f"records.py: {path} is made by `{shlex.join(arguments)}`: this tool remakes only records of "
                f"{', '.join(REMADE)}. Run the command by hand",
                file=sys.stderr,
            )
            return 2
        lanes.setdefault(gpu if at else "0", []).append((path, arguments))

    def run(gpu: str) -> None:
        for path, arguments in lanes[gpu]:
            left = end - time.monotonic()
            done, line = False, f"{path}: no time left"
            if left > GRACE:
                done, line = make(path, arguments, gpu, asked.out, left)
            if not done:
                failed.append(path)
            print(line, flush=True)

    threads = [threading.Thread(target=run, args=(gpu,)) for gpu in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
