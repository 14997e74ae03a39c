"""SpatialProblem + Device -> Plan of logsumexp over a dimension that is not the last, and of its gradient.

Columns are read once, in steps, and nothing of them is kept, so tiles need not hold them. A program of few bytes takes
longer to start than to read them, so a program has several small planes. docs/measurements/logsumexp.md has figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from .spatial import narrowed, on_chip, parts_plan, resident_plan, tiles_plan
from .spatial_tables import ANY, PartsTile
from .types import Device, Plan, SpatialProblem, power_of_two

# of other columns, by the bytes of an element: for up to each of PARTS_COLS columns, and for more. Up to the larger
# number one part has all columns, and nothing is merged
PARTS_COLS = 512, 1024
PARTS_TILES = {
    2: (PartsTile(128, 2, 4), PartsTile(128, 4, 8), PartsTile(64, 2, 8)),
    4: (PartsTile(128, 2, 4), PartsTile(128, 4, 16), PartsTile(256, 4, 8)),
}
# a gradient in a softmax's tile: columns, at most; bytes of a program of small planes, at least; 16-bit elements of a
# thread, at most, where each has an address of its own
TILE_COLS, TILE_BYTES, TILE_SINGLE = 128, 2 << 10, 40
# short runs: positions, and elements of a thread, at most; of several planes, in all and of a chunk; elements of a
# program of a logsumexp, at least
SHORT, SHORT_HELD, SHORT_SEVERAL, SHORT_CHUNK, SHORT_ELEMENTS = 32, 112, 80, 32, 1024


class WholeColumns(NamedTuple):
    """Threads that hold whole columns. elements: that a thread is to have. positions, cols: at most."""

    elements: int
    positions: int
    cols: int


# by the bytes of an element: of logsumexp, and of its gradient
WHOLE = {2: WholeColumns(64, 16, 64), 4: WholeColumns(64, 8, 64)}
WHOLE_GRADIENT = {2: WholeColumns(16, 8, 3), 4: WholeColumns(16, 4, 3)}
# bytes that a thread holds, at most, because a vector may have more positions than `elements` gives; warps of a program
WHOLE_BYTES, WHOLE_WARPS = 640, 2


def plan_logsumexp(problem: SpatialProblem, device: Device) -> Plan:
    """The plan of a kernel that reads the columns once, in steps, and writes one number for each position."""
    found = _whole_columns(problem, device, WHOLE) or _short_runs(problem, device, SHORT_ELEMENTS)
    if found is None and problem.itemsize == 4 and problem.n_cols <= WHOLE[4].cols:  # too many bytes of a thread
        found = _in_one_step(problem, device)
    if found is None:
        larger = sum(problem.n_cols > most for most in PARTS_COLS)
        tile = PARTS_TILES[problem.itemsize][larger]._replace(
            least_cols=512 if larger == 2 else PARTS_COLS[1], programs=ANY
        )
        found = parts_plan(problem, device, tile)
    return replace(found, why=f"the columns are read once, in steps{_of_planes(found)}")


def plan_logsumexp_gradient(problem: SpatialProblem, device: Device) -> Plan:
    """The plan of a kernel that reads and writes columns without a reduction."""
    found = _whole_columns(problem, device, WHOLE_GRADIENT) or _in_one_step(problem, device)
    found = found or _short_runs(problem, device, 1) or parts_plan(problem, device)
    return replace(found, why=f"independent programs read and write columns{_of_planes(found)}")


def _of_planes(plan: Plan) -> str:
    return f"; a program has {plan.outers} planes" if plan.outers > 1 else ""


def _one_step(plan: Plan) -> Plan:
    """The plan of programs that take all columns in one step, in the tile of `plan`."""
    part_cols = plan.chunks * plan.vectors_per_chunk
    return replace(plan, regime="spatial_two_pass", unpredicated_chunks=0, part_cols=part_cols, smem_staged=0)


def _whole_columns(problem: SpatialProblem, device: Device, wanted: Mapping[int, WholeColumns]) -> Plan | None:
    """The plan of threads that hold whole columns of several positions; None where these are too many.

    A program has the positions of several planes where one has few.
    """
    most, n_cols = wanted[problem.itemsize], problem.n_cols
    several = power_of_two(most.elements // n_cols + 1) // 2  # a power of two, at most elements/n_cols
    of_thread = max(problem.vec, min(most.positions, several))
    too_many = n_cols > most.cols or n_cols * of_thread * problem.itemsize > WHOLE_BYTES
    if too_many or problem.batch_invariant:
        return None
    warps = max(1, WHOLE_WARPS * 32 // device.warp_size)
    positions = warps * device.warp_size * of_thread
    inner = narrowed(problem, min(positions, power_of_two(problem.inner)))
    found = resident_plan(problem, device, inner, 1, warps)
    return replace(_one_step(found), outers=positions // inner)


def _short_runs(problem: SpatialProblem, device: Device, least: int) -> Plan | None:
    """The plan of one step of few positions, on one warp or two; None for more positions or columns.

    A program has as many planes as fill a chunk, and more until it has `least` elements.
    """
    inner, n_cols = power_of_two(problem.inner), problem.n_cols
    if inner > SHORT or problem.batch_invariant:
        return None
    for num_warps in (1, 2):
        warps = max(1, num_warps * 32 // device.warp_size)
        threads = warps * device.warp_size
        cols = min(power_of_two(n_cols), max(1, threads * problem.full_vec // inner))
        found = resident_plan(problem, device, inner, cols, warps)
        held, outers = found.chunks * cols * inner, found.outers
        if held * outers > SHORT_HELD * threads:
            continue
        most = min(SHORT_SEVERAL // found.chunks, SHORT_CHUNK) * threads
        while outers * n_cols * problem.inner < least and 2 * outers * cols * inner <= most:
            outers *= 2
        return replace(_one_step(found), outers=outers)
    return None


def _in_one_step(problem: SpatialProblem, device: Device) -> Plan | None:
    """The plan of one step in the tile of a softmax of so few columns; None where there are more.

    A program has several planes where one has few bytes.
    """
    configs = on_chip(problem, device, part_vectors=False)
    config = next((c for c in configs if c.ctas == 1 and not (c.skewed or c.overlaps)), None)
    if config is None or problem.n_cols > TILE_COLS or problem.batch_invariant:
        return None
    found = _one_step(tiles_plan(problem, device, config))
    outers, n_bytes = found.outers, min(problem.inner, found.rows) * problem.n_cols * problem.itemsize
    if problem.inner < 2 * found.rows:
        while outers * n_bytes < TILE_BYTES:
            outers *= 2
    rows, threads = found.rows, found.num_warps * device.warp_size
    if problem.vec == 1 and problem.itemsize == 2:
        most = TILE_SINGLE * threads // found.part_cols
        while outers > 1 and outers * rows > most:
            outers //= 2
        while rows > SHORT and rows > most:
            rows //= 2
    return replace(found, outers=outers, rows=rows)
