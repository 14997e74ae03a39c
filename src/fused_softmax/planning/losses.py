"""Plans of losses, of reductions that write a few numbers per row, and of kernels without a reduction.

Each starts from the policy of `softmax` and says where it differs: a loss has longer slices, a reduction holds nothing,
and without a reduction programs share a row. Pure Python, no I/O. The numbers are in `config_tables`.
"""

from __future__ import annotations

from dataclasses import replace

from .config_tables import (
    ELEMENTWISE_CHUNKS,
    ELEMENTWISE_WARPS,
    LOSS_CLUSTER,
    STATISTICS_STEPS,
    TWO_PASS_CHUNKS,
    TWO_PASS_WARPS,
    KernelConfig,
)
from .softmax import geometry, plan, preferred_warp_plan, resident_plan, two_pass_plan, warp_plan
from .types import Device, Plan, Problem


def plan_statistics(problem: Problem, device: Device) -> Plan:
    """The plan of a kernel that reads rows once, in steps, and writes a few numbers per row. Any width.

    >>> plan_statistics(Problem(128256, "bfloat16", "bfloat16", vec=8), DEVICES["sm_90"]).regime
    'two_pass'
    """
    found = warp_plan(problem, device)
    if found is not None:
        return found
    _, ctas, warps, most = next(step for step in STATISTICS_STEPS if problem.n_cols * problem.itemsize <= step[0] * 2)
    ctas = min(ctas, device.max_cluster)
    return steps_plan(problem, device, ctas, warps, most, "the row is read once, in steps")


def plan_capped_statistics(problem: Problem, device: Device) -> Plan:
    """`plan_statistics` of capped logits: one program per row.

    Triton's cluster planner fails on a kernel with as many operations as a tanh takes.

    >>> plan_capped_statistics(Problem(128256, "bfloat16", "bfloat16", vec=8), DEVICES["sm_90"]).ctas
    1
    """
    chosen = plan_statistics(problem, device)
    return chosen if chosen.ctas == 1 else steps_plan(problem, device, 1, TWO_PASS_WARPS, TWO_PASS_CHUNKS, chosen.why)


def plan_elementwise(problem: Problem, device: Device) -> Plan:
    """The plan of a kernel that reads and writes rows without a reduction: a row may take several programs.

    >>> plan_elementwise(Problem(128256, "bfloat16", "bfloat16", vec=8), DEVICES["sm_90"]).ctas
    1
    """
    found = warp_plan(problem, device)
    if found is not None:
        return found
    why = "independent programs share the row"
    _, unaligned = geometry(problem)
    return steps_plan(problem, device, 1, ELEMENTWISE_WARPS[unaligned], ELEMENTWISE_CHUNKS, why)


def steps_plan(problem: Problem, device: Device, ctas: int, warps: int, chunks: int, why: str) -> Plan:
    """The plan of rows that `ctas` programs read in steps of `chunks` chunks and do not hold."""
    vec, unaligned = geometry(problem)
    num_warps = max(1, warps * 32 // device.warp_size)
    vectors = num_warps * device.warp_size * (problem.full_vec // vec)
    return Plan("two_pass", 1, ctas, 1, vectors, vec, chunks, 0, unaligned, False, num_warps, None, why)


def plan_loss(problem: Problem, device: Device) -> Plan:
    """The plan of a loss with its gradient in one pass: the row as loaded, in longer slices than softmax's.

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
    """The plan of a loss with label smoothing or a softcap, which need registers that `plan_loss` does not leave.

    Triton's cluster planner does not take so many operations either, so slices have at most 8 chunks. Rows that are too
    wide for that have the two_pass regime, and their gradient has a kernel of its own.

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
    """The plan of a loss with a softcap. tanh takes so many operations that slices have at most 4 chunks.

    >>> plan_capped_loss(Problem(128256, "float32", "float32", vec=4), DEVICES["sm_90"]).chunks
    4
    """
    return _with_chunks(problem, device, 4)
