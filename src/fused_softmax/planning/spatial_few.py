"""SpatialProblem + Device -> SpatialConfig, for few positions and many columns: counted, not looked up.

A tile holds all positions where they are up to 64, so its columns are neighbors in memory. The columns are on as few
CTAs as hold them: in registers, and then in shared memory.
"""

from __future__ import annotations

from .spatial_tables import (
    FEW_CHUNKS,
    FEW_COLS,
    FEW_REGISTERS,
    FEW_TILES,
    FEW_WARPS,
    MORE_STAGED,
    MOST_FEW,
    SpatialConfig,
)
from .types import Device, SpatialProblem, power_of_two


def few_positions(problem: SpatialProblem, device: Device) -> tuple[SpatialConfig, ...]:
    """The config of few positions and many columns; or none."""
    few = problem.inner <= MOST_FEW and problem.n_cols > FEW_COLS and not problem.batch_invariant
    aligned = problem.vec == problem.full_vec and problem.dtype == problem.out_dtype
    clusters = device.max_cluster > 1 and device.supports_smem_staging
    if not (few and aligned and clusters):
        return ()
    for width in FEW_TILES:
        inner = min(width, power_of_two(problem.inner))
        several = problem.inner > inner
        halves = several and not problem.whole_sectors
        if halves and inner * problem.itemsize < 64:
            break
        found = _on_ctas(problem, device, inner, several, halves)
        if found is not None:
            return (found,)
    return ()


def _on_ctas(problem: SpatialProblem, device: Device, inner: int, several: bool, halves: bool) -> SpatialConfig | None:
    """The config of tiles of `inner` positions; None where a cluster cannot hold the columns."""
    cols = FEW_WARPS * device.warp_size * problem.full_vec // inner
    most, most_of_several = FEW_CHUNKS[problem.backward]
    wanted = most_of_several if halves or (several and problem.backward) else most
    ctas = 1
    while 2 * ctas <= device.max_cluster and -(-problem.n_cols // (cols * ctas)) > wanted:
        ctas *= 2
    chunks = -(-problem.n_cols // (cols * ctas))
    if chunks > most:
        return None
    (few, low), (more, high) = FEW_REGISTERS
    fits = 2 * chunks <= few if problem.backward else chunks <= few + MORE_STAGED
    room, registers = (few, low) if fits else (more, high)
    held = room - chunks if problem.backward else room  # of a gradient: chunks of dy
    return SpatialConfig(
        problem.n_cols, ctas, FEW_WARPS, inner, max_registers=registers, held=held,
        overlaps=halves and problem.in_phase,
    )  # fmt: skip
