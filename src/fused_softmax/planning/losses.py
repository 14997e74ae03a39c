"""Plans of what is not softmax: losses, walks that write a few numbers a row, masks, and kernels without a reduction.

Each starts from the policy of `plan` and says where it departs from it: a loss keeps longer slices, a walk keeps
nothing, a mask takes the room of a second row. Pure Python, no I/O; the numbers are in `config_tables`.
"""

from __future__ import annotations

from dataclasses import replace

from .config_tables import (
    ELEMENTWISE_CHUNKS,
    ELEMENTWISE_WARPS,
    LOSS_CLUSTER,
    MASKED,
    MASKED_BACKWARD_REGISTERS,
    MASKED_CHUNKS,
    STATISTICS_STEPS,
    TWO_PASS_CHUNKS,
    TWO_PASS_WARPS,
    KernelConfig,
)  # fmt: skip
from .softmax import geometry, plan, preferred_warp_plan, resident_plan, two_pass_plan, warp_plan
from .types import Device, Plan, Problem


def plan_statistics(problem: Problem, device: Device) -> Plan:
    """The plan of a kernel that reads rows once, in steps, and writes a few numbers a row; any width.

    >>> plan_statistics(Problem(128256, "bfloat16", "bfloat16", vec=8), DEVICES["sm_90"]).regime
    'two_pass'
    """
    tile = warp_plan(problem, device)
    if tile is not None:
        return tile
    _, ctas, warps, most = next(step for step in STATISTICS_STEPS if problem.n_cols * problem.itemsize <= step[0] * 2)
    ctas = min(ctas, device.max_cluster)
    return _steps(problem, device, ctas, warps, most, "the row is walked once, in steps")


def plan_capped_statistics(problem: Problem, device: Device) -> Plan:
    """`plan_statistics` of capped logits: one program a row, as a tanh takes more operations than Triton's planner of
    clusters takes.

    >>> plan_capped_statistics(Problem(128256, "bfloat16", "bfloat16", vec=8), DEVICES["sm_90"]).ctas
    1
    """
    chosen = plan_statistics(problem, device)
    return chosen if chosen.ctas == 1 else _steps(problem, device, 1, TWO_PASS_WARPS, TWO_PASS_CHUNKS, chosen.why)


def plan_elementwise(problem: Problem, device: Device) -> Plan:
    """The plan of a kernel that reads and writes rows without a reduction: a row may take several programs.

    >>> plan_elementwise(Problem(128256, "bfloat16", "bfloat16", vec=8), DEVICES["sm_90"]).ctas
    1
    """
    tile = warp_plan(problem, device)
    if tile is not None:
        return tile
    why = "programs share the row, and need nothing of each other"
    _, edge = geometry(problem)
    return _steps(problem, device, 1, ELEMENTWISE_WARPS[edge], ELEMENTWISE_CHUNKS, why)


def _steps(problem: Problem, device: Device, ctas: int, warps: int, chunks: int, why: str) -> Plan:
    vec, edge = geometry(problem)
    num_warps = max(1, warps * 32 // device.warp_size)
    lanes = num_warps * device.warp_size * (problem.full_vec // vec)
    return Plan("two_pass", 1, ctas, 1, lanes, vec, chunks, 0, edge, False, num_warps, None, why)


def plan_loss(problem: Problem, device: Device) -> Plan:
    """The plan of a loss with its gradient in one pass: the row as loaded in longer slices than softmax's.

    >>> plan_loss(Problem(128256, "bfloat16", "bfloat16", vec=8), DEVICES["sm_90"]).ctas
    4
    """
    if preferred_warp_plan(problem, device) is None and device.max_cluster >= 16:
        for config in LOSS_CLUSTER:
            if problem.n_cols * problem.itemsize <= config.max_cols * 2:
                chosen = resident_plan(problem, device, replace(config, max_registers=None))
                if chosen is not None:
                    return replace(
                        chosen, max_registers=config.max_registers if chosen.vec == problem.full_vec else None
                    )
    return replace(plan(problem, device), max_registers=None)


def plan_smoothed_loss(problem: Problem, device: Device) -> Plan:
    """The plan of a loss with label smoothing or a softcap, which take registers that `plan_loss` has no room for.

    Nor has Triton's planner of clusters for so many operations: slices have 8 chunks at most. Rows that are too wide
    for that have the stream regime, and a kernel of their own for the gradient.

    >>> plan_smoothed_loss(Problem(128256, "float32", "float32", vec=4), DEVICES["sm_90"]).chunks
    8
    """
    return _with_chunks(problem, device, 8)


def _with_chunks(problem: Problem, device: Device, most: int) -> Plan:
    """softmax's plan, with more CTAs and warps where a slice would have more than `most` chunks."""
    chosen = plan(problem, device)
    if chosen.chunks > most and chosen.regime != "two_pass":
        configs = (KernelConfig(problem.n_cols, device.max_cluster, num_warps, True) for num_warps in (4, 8, 16))
        wider = (resident_plan(problem, device, config) for config in configs)
        chosen = next((p for p in wider if p is not None and p.chunks <= most), two_pass_plan(problem, device))
    return replace(chosen, max_registers=None)


def plan_capped_loss(problem: Problem, device: Device) -> Plan:
    """The plan of a loss with a softcap, whose tanh takes so many operations that slices have 4 chunks at most.

    >>> plan_capped_loss(Problem(128256, "float32", "float32", vec=4), DEVICES["sm_90"]).chunks
    4
    """
    return _with_chunks(problem, device, 4)


def plan_masked(problem: Problem, device: Device, masked: bool) -> Plan:
    """The plan of masked softmax, or of its gradient; the ends of a causal row take three vectors' worth of lanes.

    >>> plan_masked(Problem(2048, "bfloat16", "bfloat16", vec=8), DEVICES["sm_90"], masked=False).regime
    'block'
    """
    chosen = warp_plan(problem, device) if problem.n_cols <= 512 else None
    if chosen is not None and chosen.vectors_per_chunk < device.warp_size:
        chunks = -(-chosen.chunks * chosen.vectors_per_chunk // device.warp_size)
        chosen = replace(chosen, vectors_per_chunk=device.warp_size, chunks=chunks, rows=chosen.num_warps)
    for config in MASKED["backward" if problem.backward else "masked" if masked else "unmasked"]:
        if chosen is None and problem.n_cols * problem.itemsize <= config.max_cols * 2:
            chosen = resident_plan(problem, device, config)
    if chosen is None:
        # a mask takes as much room as a gradient's second row; these kernels park nothing, so long rows get more warps
        held = replace(problem, backward=problem.backward or masked)
        chosen = plan(held, replace(device, supports_smem_staging=False))
        if chosen.chunks > MASKED_CHUNKS[held.backward] and not problem.backward:
            chosen = resident_plan(held, device, KernelConfig(problem.n_cols, device.max_cluster, 16, True)) or chosen
        if chosen.chunks > MASKED_CHUNKS[held.backward] or chosen.regime == "two_pass":
            # by one program: Triton's planner of clusters gives up on this kernel's walk
            chosen = _steps(
                problem, device, 1, TWO_PASS_WARPS, TWO_PASS_CHUNKS // 2, "the row is walked twice in steps"
            )
    # a mask, which is read where a row's sum is not finite, has no room under the cap
    capped = problem.backward and not masked and chosen.ctas > 1 and chosen.chunks <= 4 and problem.itemsize == 2
    return replace(chosen, max_registers=MASKED_BACKWARD_REGISTERS if capped and chosen.vec == 8 else None)
