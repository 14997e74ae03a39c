"""The runs of `fused-softmax profile`: counters of each system, and the shipped kernel's time next to its floor.

A record is JSON: the header of a benchmark run, `profiles` (roofline.profile.Profiled) and `floors` (Floored).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fused_softmax.lab.roofline.predict import OURS, predict
from fused_softmax.lab.roofline.profile import Profiled

# 1,024 to 262,144 columns: powers of two, and the vocabularies
FLOOR_WIDTHS = (1024, 2048, 4096, 8192, 16384, 32768, 50257, 65536, 128256, 151936, 262144)
SECONDS = 0.15  # of each width's timing


@dataclass(frozen=True)
class Floored:
    """The shipped kernel's predicted floor and its measured median, in microseconds, next to a copy in the same run."""

    dtype: str
    n_rows: int
    n_cols: int
    floor: float
    binds: str
    measured: float
    copy: float

    @property
    def over(self) -> float:
        """Measured time over the floor (lower is better)."""
        return self.measured / self.floor


def time_floors(widths: Sequence[int], dtype: str, elements: int, gpu: str) -> Iterator[Floored]:
    """Time fused_softmax.softmax at each width on this GPU, next to what the model predicts for `gpu`."""
    import torch

    import fused_softmax
    from fused_softmax.lab.bench.inputs import DTYPES
    from fused_softmax.lab.bench.timing import EventStopwatch, interleave

    stopwatch = EventStopwatch(torch.device("cuda"))
    for n_cols in widths:
        n_rows = max(1, elements // n_cols)
        said = predict(OURS, n_rows, n_cols, dtype, gpu)
        x = torch.randn(n_rows, n_cols, device="cuda").to(DTYPES[dtype])
        y = torch.empty_like(x)

        def copy(x: Any = x, y: Any = y) -> None:
            y.copy_(x)

        def softmax(x: Any = x) -> None:
            fused_softmax.softmax(x, -1)

        found = interleave({OURS: softmax, "copy": copy}, stopwatch, SECONDS)
        taken = {name: 1000 * timing.ms for name, timing in found.items()}
        yield Floored(dtype, n_rows, n_cols, said.floor.least, said.floor.binds, taken[OURS], taken["copy"])


def floor_lines(found: Sequence[Floored]) -> list[str]:
    """The floors as a table of text."""
    out = [f"{'columns':>9} {'floor, us':>10} {'measured':>10} {'over floor':>11} {'copy':>8}   binds"]
    for f in found:
        out.append(f"{f.n_cols:9,} {f.floor:10.1f} {f.measured:10.1f} {f.over:11.3f} {f.copy:8.1f}   {f.binds}")
    return out


def record(file: Path, profiles: Sequence[Profiled], floors: Sequence[Floored], stopped: str = "") -> None:
    """Write the record, with the machine and the versions."""
    import torch

    from fused_softmax.lab.bench.record import header, write_atomically

    head = header(torch.device("cuda"), interpreted=False)
    head.finished, head.stopped = not stopped, stopped
    whole = {
        "header": asdict(head),
        "profiles": [{**asdict(p), "over_model": p.over_model, "holds": p.holds} for p in profiles],
        "floors": [{**asdict(f), "over": f.over} for f in floors],
    }
    write_atomically(file, json.dumps(whole, indent=1) + "\n")
