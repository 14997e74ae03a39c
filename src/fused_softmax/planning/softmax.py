"""Plans of softmax, log_softmax and their gradients over rows. Pure Python, no I/O.

Narrow rows that start anywhere are moved as one piece (`gathered`). All others are held on chip or read twice, by the
regimes and tables that the other ops over rows share (`rows`).
docs/measurements/thresholds.md has the figures behind the thresholds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .config_tables import KEPT_EXPS, WARP_EACH, KernelConfig
from .gathered import gathered_plan
from .rows import config_table, geometry, held_plan, resident_plan, two_pass_plan, unpredicated_chunks_of, warp_plan
from .types import REGIMES, Device, Plan, Problem


def plan(problem: Problem, device: Device, regime: str | None = None) -> Plan:
    """The plan for `problem` on `device`; `regime` forces one (ValueError where it cannot hold such a row).

    >>> from .types import DEVICES
    >>> plan(Problem(4096, "bfloat16", "bfloat16", vec=8), DEVICES["sm_90"]).regime
    'block'
    """
    if regime is None:
        found = gathered_plan(problem, device) or _row_of_a_warp(problem, device) or held_plan(problem, device)
        return _keeping_exps(problem, found)
    if regime not in REGIMES:
        raise ValueError(f"regime must be one of {REGIMES}, not {regime!r}")
    chosen = {
        "warp": warp_plan,
        "block": lambda p, d: resident_plan(p, d, _widest(p, d, 1)),
        "cluster": lambda p, d: resident_plan(p, d, _widest(p, d, d.max_cluster)) if d.max_cluster > 1 else None,
        "two_pass": two_pass_plan,
    }[regime](problem, device)
    if chosen is None:
        raise ValueError(
            f"the {regime} regime cannot hold {problem.n_cols} columns of {problem.dtype} on {device.name}"
        )
    return replace(chosen, why=f"regime {regime} was asked for")


def candidates(problem: Problem, device: Device) -> Iterator[Plan]:
    """Every plan that could hold the row without spilling. `fused-softmax tune` measures them."""
    for make in (gathered_plan, warp_plan):
        if (found := make(problem, device)) is not None:
            yield found
    for ctas in (1, 2, 4, 8, 16):
        for num_warps in (1, 2, 4, 8, 16):
            for recompute in (False, True) if problem.itemsize == 2 else (False,):
                if ctas > device.max_cluster or problem.n_cols < 512 * ctas * num_warps // problem.itemsize:
                    continue
                found = resident_plan(problem, device, KernelConfig(problem.n_cols, ctas, num_warps, recompute))
                if found is not None:
                    yield found
    yield two_pass_plan(problem, device)


def _keeping_exps(problem: Problem, chosen: Plan) -> Plan:
    """The plan with exp computed once, for rows of float32 of few vectors per thread: results take no more registers.

    Few rows take less time then. Many rows take the same.
    """
    floats = problem.itemsize == 4 and problem.dtype == problem.out_dtype and not (problem.backward or problem.log)
    whole = chosen.vec == problem.full_vec and not chosen.unaligned
    held = chosen.regime in ("warp", "block") or (chosen.regime == "cluster" and chosen.max_registers is None)
    if not (floats and whole and held and chosen.recompute and chosen.chunks <= KEPT_EXPS):
        return chosen
    return replace(chosen, recompute=False, why=chosen.why.removesuffix(", exp computed twice"))


def _row_of_a_warp(problem: Problem, device: Device) -> Plan | None:
    """The plan of rows that a warp holds each, in programs of one or two, where such programs are the fastest."""
    found = warp_plan(problem, device) if device.kind == "cuda" and not problem.backward else None
    if found is None or found.vec < problem.full_vec or found.unaligned or problem.dtype != problem.out_dtype:
        return None
    of_width = (warps for fewest, most, warps in WARP_EACH[problem.itemsize] if fewest <= problem.n_cols <= most)
    warps = next(of_width, None)
    if warps is None:
        return None
    units = -(-problem.n_cols // found.vec)
    full = unpredicated_chunks_of(units, 1, device.warp_size, found.chunks, False) if warps == 1 else 0
    why = f"{warps} row(s) per program, each in one warp: no reduction leaves its warp"
    return replace(found, rows=warps, num_warps=warps, unpredicated_chunks=full, why=why)


def _widest(problem: Problem, device: Device, ctas: int) -> KernelConfig:
    """A config for a forced regime: enough warps for a few chunks per thread."""
    held = [c for c in config_table(problem, device) if problem.n_cols <= c.max_cols and not c.resident_chunks]
    own = [c for c in held if (c.ctas == 1) == (ctas == 1)]
    if own:
        return own[0]
    vec, _ = geometry(problem)
    warps = 4
    while warps < 16 and problem.n_cols > ctas * warps * device.warp_size * vec * 8:
        warps *= 2
    return KernelConfig(problem.n_cols, min(ctas, 4 if problem.n_cols < 4096 else ctas), warps, problem.itemsize == 2)
