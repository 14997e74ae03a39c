"""What a fuzz run is asked for, and the units that it is made of."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from fused_softmax.lab.registry import OPS

from .draw import DTYPES, Budget, draw_class
from .worker import Unit

# cases of one class and way: eager ones share what was compiled, which takes longer than they do, the others compile
# or capture for each
PER_CLASS = 50
PER_CLASS_INTERPRETED = 4
SLOW_WAYS = ("compile", "cuda_graph")


@dataclass(frozen=True)
class Request:
    """What a run is asked for. Without seconds and counts: 60 seconds.

    per_cell: until each cell has so many cases, and a tenth of them by the slow ways, those in `record` counted.
    """

    ops: tuple[str, ...] = ()
    ways: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    seconds: float | None = None
    cases: int | None = None
    per_cell: int | None = None
    seed: int = 0
    workers: int = 1
    columns: tuple[int, int] | None = None
    record: Path | None = None
    huge: bool = False
    stop_at_first: bool = False
    per_class: int | None = None  # cases of one class and way


def ways_of(op: str, request: Request, device: str) -> tuple[str, ...]:
    return tuple(
        way
        for way in OPS[op].ways
        if (not request.ways or way in request.ways) and (way != "cuda_graph" or device == "cuda")
    )


def share(request: Request, way: str) -> int:
    """How many cases a cell of this way is to have."""
    assert request.per_cell is not None
    return max(1, request.per_cell // 10) if way in SLOW_WAYS and not request.ways else request.per_cell


def lacking(request: Request, device: str, had: Counter) -> int:
    """How many cases the cells lack, of those that are asked for of each."""
    if request.per_cell is None:
        return 0
    cells = ((op, way, dtype) for op, dtype in groups_of(request) for way in ways_of(op, request, device))
    return sum(max(0, share(request, cell[1]) - had[cell]) for cell in cells)


def groups_of(request: Request) -> list[tuple[str, str]]:
    return [(op, dtype) for op in request.ops or tuple(OPS) for dtype in request.dtypes or DTYPES]


def units(
    request: Request, device: str, budget: Budget, end: float = math.inf, had: Counter | None = None, first: int = 0
) -> Iterator[Unit]:
    """Classes, from number `first` on, until the counts that are asked for are reached: of the op and dtype whose cells
    are emptiest, or of each in turn where no count for each cell is asked for.

    `had`: the cases that each cell has already, of the count for each cell.
    """
    per_class = request.per_class or (PER_CLASS if device == "cuda" else PER_CLASS_INTERPRETED)
    drawn: Counter = Counter()
    had = had or Counter()
    turns = dict.fromkeys(groups_of(request), first)

    def chance(group: tuple[str, str]) -> Random:
        return Random(f"{request.seed} {turns[group]} {group}")

    def next_first(group: tuple[str, str]) -> tuple[float, int, float]:
        filled = 0.0
        if request.per_cell is not None:
            cells = [(group[0], way, group[1]) for way in ways_of(group[0], request, device)]
            filled = min((had[cell] + drawn[cell]) / share(request, cell[1]) for cell in cells) if cells else 1.0
        return filled, turns[group], chance(group).random()

    while turns:
        op, dtype = group = min(turns, key=next_first)
        possible = ways_of(op, request, device)
        if device == "cpu" and request.per_cell is None:  # few ways of many classes, since a case costs more
            possible = tuple(chance(group).sample(possible, min(2, len(possible))))
        of = draw_class(op, dtype, request.seed * 1_000_003 + turns[group], budget, request.columns)
        # a case of such rows takes longer, and few kernels take them
        of_class = max(1, per_class // 8) if of.n_cols > budget.columns and not request.columns else per_class
        wanted = []
        for way in possible:
            cell = op, way, dtype
            n = max(1, of_class // 8) if way in SLOW_WAYS else of_class
            if request.per_cell is not None:
                n = min(n, share(request, way) - had[cell] - drawn[cell])
            if request.cases is not None:
                n = min(n, request.cases - drawn.total())
            if n > 0:
                drawn[cell] += n
                wanted.append((way, n))
        turns[group] += 1
        if wanted:
            yield Unit(of, tuple(wanted), budget, device, end=end)
        else:
            del turns[group]
