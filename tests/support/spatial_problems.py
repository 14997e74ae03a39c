"""Problems over a dimension that is not the last, by where their columns start: the keys of tables of tiles."""

from __future__ import annotations

from fused_softmax.planning.types import SECTOR_BYTES, SpatialProblem

NAMES = {2: "bfloat16", 4: "float32"}


def starting_at(key: tuple[str, int, int], n_cols: int, positions: int, log: bool = False) -> SpatialProblem:
    """A problem whose columns start at multiples of so many bytes, not of twice as many.

    key: the op ("softmax", "gradient" or "log gradient"), bytes of an element, and those bytes.
    """
    op, itemsize, starts = key
    whole = starts == SECTOR_BYTES
    inner = positions if whole else positions + starts // itemsize
    name, vec, log = NAMES[itemsize], min(starts, 16) // itemsize, log or op == "log gradient"
    return SpatialProblem(n_cols, inner, name, name, vec, op != "softmax", log, whole_sectors=whole, in_phase=True)
