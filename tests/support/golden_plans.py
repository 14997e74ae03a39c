"""The golden table of plans: `python tests/support/golden_plans.py` rewrites golden/plans.txt from the planner.

A change to a table in plan.py then shows in a diff as what it is: which widths run differently, and on which devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from planned import DTYPES, LAYOUTS, WIDTHS, problem

from fused_softmax.planning.softmax import plan
from fused_softmax.planning.types import DEVICES, Device, Plan, Problem

GOLDEN = Path(__file__).parent / "golden" / "plans.txt"
COMMAND = "python tests/support/golden_plans.py"
TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
LEGEND = f"""\
# What the planner chooses, made by `{COMMAND}`. A cell: regime, rows of a program x CTAs of a row,
# warps, lanes*vec*chunks; then, where they apply: +n chunks without a mask, edge: head and tail apart, twice: exp
# computed twice, <=n: registers a thread; piece: rows moved as one piece; parked n: chunks in shared memory, kept n:
# chunks of a row that is walked twice, n ahead: chunks of y read early. "=" is the plan of the device to its
# left. float16 is planned as bfloat16 is.
"""


def cases() -> Iterator[tuple[tuple[str, str], bool, bool, str, int]]:
    """(dtypes, backward, log, layout, n_cols): every way rows lie for softmax, contiguous rows for all else."""
    for dtypes in DTYPES:
        if dtypes == ("float16", "float16"):
            continue
        for backward, log in ((False, False), (True, False), (False, True), (True, True)):
            for layout in LAYOUTS[:1] if backward or log else LAYOUTS:
                for n_cols in WIDTHS:
                    yield dtypes, backward, log, layout, n_cols


def chosen() -> Iterator[tuple[Problem, Device, Plan]]:
    """Every plan of the table."""
    for dtypes, backward, log, layout, n_cols in cases():
        for target in TARGETS:
            asked = problem(n_cols, dtypes, layout, backward, log)
            yield asked, DEVICES[target], plan(asked, DEVICES[target])


def cell(p: Plan) -> str:
    said = f"{p.regime} {p.rows}x{p.ctas} {p.num_warps}w {p.vectors_per_chunk}*{p.vec}*{p.chunks}"
    said += f" +{p.unpredicated_chunks}" * (p.unpredicated_chunks > 0) + " edge" * p.unaligned + " twice" * p.recompute
    said += " piece" * (p.gathered or p.output_gathered)
    said += f" parked {p.smem_staged}" * (p.smem_staged > 0) + f" kept {p.resident_chunks}" * (p.resident_chunks > 0)
    said += f" {p.prefetched_chunks} ahead" * (p.prefetched_chunks is not None)
    return said + (f" <={p.max_registers}" if p.max_registers is not None else "")


def table() -> str:
    """The whole file."""
    lines, heading = [LEGEND], None
    for dtypes, backward, log, layout, n_cols in cases():
        asked = problem(n_cols, dtypes, layout, backward, log)
        if heading != (heading := (dtypes, backward, log, layout)):
            op = "log_" * log + "softmax" + " backward" * backward
            lines.append(f"\n{op}, {'->'.join(dict.fromkeys(dtypes))}, {layout} rows")
            lines.append(_line("columns", TARGETS))
        cells = [cell(plan(asked, DEVICES[target])) for target in TARGETS]
        repeated = ["=" if i and c == cells[i - 1] else c for i, c in enumerate(cells)]
        lines.append(_line(str(n_cols), repeated))
    return "\n".join(lines) + "\n"


def _line(first: str, cells: tuple[str, ...] | list[str]) -> str:
    return f"{first:>8} | {' | '.join(cells)}"


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(table(), encoding="utf-8")
    print(f"wrote {GOLDEN}: {len(table().splitlines())} lines")
