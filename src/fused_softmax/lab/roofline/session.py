"""The runs of `fused-softmax profile`: counters of each system, and its time next to its floor.

A record is JSON: the header of a benchmark run, `profiles` (roofline.profile.Profiled) and `floors` (Floored).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from fused_softmax.lab.bench import cases
from fused_softmax.lab.roofline.predict import OURS, predict
from fused_softmax.lab.roofline.profile import EXPLAINED, Profiled, Run, default_runs, items_of, runnable

# 1,024 to 262,144 columns: powers of two, and the vocabularies
FLOOR_WIDTHS = (1024, 2048, 4096, 8192, 16384, 32768, 50257, 65536, 128256, 151936, 262144)
SECONDS = 0.06  # of each width's timing


@dataclass(frozen=True)
class Floored:
    """A kernel's predicted floor and its measured median, in microseconds, next to a plain pass in the same run."""

    system: str
    op: str
    dtype: str
    n_rows: int
    n_cols: int
    floor: float
    binds: str
    measured: float
    passes: str  # the plain pass with the same pattern, and its time for as many bytes
    plain: float

    @property
    def over(self) -> float:
        """Measured time over the floor (lower is better)."""
        return self.measured / self.floor


def floor_runs(ops: Sequence[str] = tuple(EXPLAINED)) -> list[Run]:
    """Our ops at FLOOR_WIDTHS, softmax first, and each lesson at its width."""
    ours = [(OURS, op, n_cols) for op in ops for n_cols in FLOOR_WIDTHS]
    return [*ours, *((name, op, n_cols) for name, op, n_cols in default_runs() if name != OURS and n_cols <= 4096)]


def random_widths(count: int, seed: int) -> tuple[int, ...]:
    """`count` different widths of a seed, from the least to the largest of FLOOR_WIDTHS."""
    return cases.random_widths(count, seed, FLOOR_WIDTHS[0], FLOOR_WIDTHS[-1])


def time_floors(runs: Sequence[Run], dtype: str, elements: int, gpu: str) -> Iterator[Floored]:
    """Time each (system, op, width) on this GPU, next to what the model predicts for `gpu`."""
    import torch

    from fused_softmax.lab.bench.ceilings import ceiling
    from fused_softmax.lab.timing import EventStopwatch, interleave

    device = torch.device("cuda")
    stopwatch = EventStopwatch(device)
    items = items_of(runs, dtype, elements)
    with ThreadPoolExecutor(8) as pool:  # some predictions compile, in processes of their own
        predictions = list(pool.map(lambda i: predict(i.system, i.n_rows, i.n_cols, dtype, gpu, i.op), items))
    for item, said in zip(items, predictions, strict=True):
        call, inputs = runnable(item, device)
        plain, moved = ceiling(said.passes, inputs[0])
        calls = {"it": lambda f=call, a=inputs: f(*a), "plain": lambda f=plain, a=inputs: f(*a)}
        found = interleave(calls, stopwatch, SECONDS)
        scaled = 1000 * found["plain"].ms * said.dram.all / moved
        measured = 1000 * found["it"].ms
        yield Floored(
            item.system, said.op, dtype, item.n_rows, item.n_cols,
            said.floor.least, said.floor.binds, measured, said.passes, scaled,
        )  # fmt: skip


def floor_lines(found: Sequence[Floored]) -> list[str]:
    """The floors as a table of text."""
    head = f"{'floor, us':>10} {'measured':>10} {'over floor':>11} {'plain pass':>11}   binds"
    out = [f"{'kernel':36} {'columns':>9} {head}"]
    for f in found:
        times = f"{f.floor:10.1f} {f.measured:10.1f} {f.over:11.3f} {f.plain:11.1f}"
        out.append(f"{f.op if f.system == OURS else f.system:36} {f.n_cols:9,} {times}   {f.binds}")
    return out


def record(file: Path, profiles: Sequence[Profiled], floors: Sequence[Floored], stopped: str = "") -> None:
    """Write the record, with the machine and the versions."""
    import torch

    from fused_softmax.lab.record import header, write_atomically

    head = header(torch.device("cuda"), interpreted=False)
    head.finished, head.stopped = not stopped, stopped
    whole = {
        "header": asdict(head),
        "profiles": [{**asdict(p), "over_model": p.over_model, "holds": p.holds} for p in profiles],
        "floors": [{**asdict(f), "over": f.over} for f in floors],
    }
    write_atomically(file, json.dumps(whole, indent=1) + "\n")
