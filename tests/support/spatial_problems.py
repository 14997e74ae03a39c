"""Problems over a dimension that is not the last, by where their columns start, and plans of planes in registers."""

from __future__ import annotations

from fused_softmax.planning.held_planes import LEAST_SPEED
from fused_softmax.planning.register_planes import best_way, held_plan
from fused_softmax.planning.types import SECTOR_BYTES, Device, Plan, SpatialProblem

NAMES = {2: "bfloat16", 4: "float32"}


def starting_at(key: tuple[str, int, int], n_cols: int, positions: int, log: bool = False) -> SpatialProblem:
    """A problem whose columns start at multiples of so many bytes, not of twice as many.

    key: the op ("softmax", "gradient" or "log gradient"), bytes of an element, and those bytes.
    """
    op, itemsize, starts = key
    whole = starts == SECTOR_BYTES
    inner = positions if whole else positions + starts // itemsize
    name, vec, log = NAMES[itemsize], min(starts, 16) // itemsize, log or op == "log gradient"
    return SpatialProblem(n_cols, inner, name, vec, op != "softmax", log, whole_sectors=whole, in_phase=True)


def periodic_plan(problem: SpatialProblem, device: Device) -> Plan | None:
    """The plan of planes in registers in the fastest way, whatever else is faster; None where none has LEAST_SPEED."""
    way = best_way(problem, device)
    return held_plan(problem, way) if way is not None and way.speed >= LEAST_SPEED else None
