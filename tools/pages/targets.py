"""What each target GPU moves for a row, by its plan alone: nothing is compiled and nothing is measured."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from fused_softmax.lab.bench.inputs import DTYPES
from fused_softmax.lab.plans import problem_for
from fused_softmax.lab.traffic import regime_traffic
from fused_softmax.planning.softmax import plan
from fused_softmax.planning.types import DEVICES, Device

WIDTHS = (50257, 128256, 262144)
# target -> a GPU that has it
GPUS = {
    "sm_80": "A100",
    "sm_89": "L4, RTX 4090",
    "sm_90": "H100, H200",
    "sm_100": "B200",
    "sm_120": "RTX 5090",
    "gfx942": "MI300X",
}


def measured_targets(results: Path) -> set[str]:
    """The targets that benchmarks/results has records of, by the capability in each record's header."""
    heads = [json.loads(file.read_text())["header"] for file in results.glob("*/*.json")]
    return {"sm_" + head["capability"].replace(".", "") for head in heads if not head.get("interpreted")}


def device_of(target: str) -> Device:
    """The planner's view of a target; one without a description of its own has no clusters."""
    return DEVICES.get(target) or Device(target, "cuda")


def moved(target: str, n_cols: int, dtype: str) -> tuple[int, float, str]:
    """(bytes that softmax asks memory for in a row, over the least possible, regime) by the plan for `target`."""
    chosen = plan(problem_for(n_cols, dtype), device_of(target))
    found = regime_traffic(chosen.regime, 1, n_cols)
    if found is None:
        raise ValueError(f"the traffic of regime {chosen.regime!r} is not known")
    size = DTYPES[dtype].itemsize
    elements = found.reads + found.writes
    regime = f"{chosen.regime}, {chosen.ctas} CTAs" if chosen.ctas > 1 else chosen.regime
    return elements * size, elements / (2 * n_cols), regime


def targets_table(measured: Collection[str] = (), dtype: str = "bfloat16") -> str:
    """For each target whether it was measured, and the bytes of softmax at each width, as a table in Markdown."""
    heads = [f"{n_cols:,} columns" for n_cols in WIDTHS]
    lines = ["| target | GPUs | state | " + " | ".join(heads) + " |", "|" + "---|" * (3 + len(WIDTHS))]
    for target, gpus in GPUS.items():
        cells = [target, gpus, "measured" if target in measured else "only compiled"]
        for n_cols in WIDTHS:
            n_bytes, over, regime = moved(target, n_cols, dtype)
            cells.append(f"{n_bytes / 1024:,.0f} KiB, {over:.2f} x, {regime}")
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        f"Softmax of {dtype} rows: the bytes that one row asks memory for, over the least possible (one read and one",
        "write), and the plan's regime. `two_pass` reads a row twice; the second read may come from the L2 cache.",
    ]
    return "\n".join(lines)
