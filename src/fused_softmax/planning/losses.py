"""Plans of losses, of reductions that write a few numbers per row, and of kernels without a reduction.

Each starts from the policy of `softmax` and says where it differs: a loss has longer slices, a reduction holds nothing,
and without a reduction programs share a row. Pure Python, no I/O. The numbers are in `config_tables`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

from .config_tables import (
    ELEMENTWISE,
    FEW_PROGRAMS,
    GRADIENT_ROWS,
    LOSS_CLUSTER,
    LOSS_REGISTERS,
    LOSS_ROWS,
    LOSS_SPILLS,
    LOSS_SPILLS_NOT,
    LOSS_UNPREDICATED,
    MOST_HELD,
    MOST_SMOOTHED,
    PARTIAL_STATISTICS,
    STATISTICS_PARTS,
    STATISTICS_ROWS,
    STATISTICS_STEPS,
    TWO_PASS_CHUNKS,
    TWO_PASS_WARPS,
    HeldRow,
    KernelConfig,
)
from .gathered import gathered_logits
from .piece_costs import LOSS, STATISTICS, STATISTICS_BACKWARD
from .rows import (
    geometry,
    held_plan,
    looped_steps_plan,
    preferred_warp_plan,
    resident_plan,
    steps_plan,
    two_pass_plan,
    warp_plan,
)
from .types import Device, Plan, Problem


def _held_rows(
    problem: Problem, device: Device, table: Mapping[tuple[int, bool], tuple[HeldRow, ...]], most_elements: int
) -> Plan | None:
    """The plan of rows that some threads of a warp hold, by a table; None for others.

    most_elements: of a thread.
    """
    vec, unaligned = geometry(problem)
    if vec < problem.full_vec or device.warp_size != 32:
        return None
    of_dtype = table.get((problem.itemsize, unaligned), ())
    held = next((held for held in of_dtype if held.fewest <= problem.n_cols <= held.most), None)
    if held is None:
        return None
    units = problem.n_cols // vec if unaligned else -(-problem.n_cols // vec)
    chunks = max(held.least_chunks, -(-units // held.threads))
    if chunks * vec * held.rows > most_elements:
        return None
    rows = held.num_warps * device.warp_size // held.threads * held.rows
    why = f"{rows} row(s) per program, each in {held.threads} threads: no reduction leaves its warp"
    return Plan(
        "warp", rows, 1, 1, held.threads, vec, chunks, 0, unaligned, problem.itemsize == 4, held.num_warps, None, why
    )  # fmt: skip


def plan_statistics(problem: Problem, device: Device) -> Plan:
    """The plan of a kernel that reads rows once, in steps, and writes a few numbers per row. Any width.

    >>> plan_statistics(Problem(128256, "bfloat16", "bfloat16", vec=8), DEVICES["sm_90"]).regime
    'two_pass'
    """
    return _statistics(problem, device, MOST_HELD)


def _statistics(problem: Problem, device: Device, most_elements: int) -> Plan:
    """`plan_statistics`, of rows some hundred columns of which a thread holds at most so many elements."""
    held = _held_rows(problem, device, STATISTICS_ROWS, most_elements)
    if (found := held or warp_plan(problem, device, PARTIAL_STATISTICS, even=0)) is not None:
        return found
    steps = STATISTICS_STEPS[problem.itemsize]
    _, ctas, warps, fewest, most = next(step for step in steps if problem.n_cols <= step[0])
    why = "the row is read once, in steps"
    return looped_steps_plan(problem, device, min(ctas, device.max_cluster), warps, fewest, most, why)


def plan_row_statistics(problem: Problem, device: Device) -> Plan:
    """`plan_statistics`; of wide rows in whole vectors, the plan of a kernel that reduces a part.

    >>> plan_row_statistics(Problem(128256, "bfloat16", "bfloat16", vec=8), DEVICES["sm_90"]).part_cols
    4096
    """
    narrow, warps, most = STATISTICS_PARTS[problem.itemsize]
    whole_vectors = geometry(problem)[0] == problem.full_vec
    if device.max_cluster < 16 or not whole_vectors or problem.n_cols <= narrow:
        return plan_statistics(problem, device)
    return parts_plan(problem, device, warps, most)


def plan_statistics_of_one_id(problem: Problem, device: Device) -> Plan:
    """`plan_row_statistics`; of narrow rows, the plan of a kernel that moves them as one piece.

    >>> from .types import DEVICES
    >>> plan_statistics_of_one_id(Problem(19, "bfloat16", "bfloat16", vec=1, packed=True), DEVICES["sm_90"]).gathered
    True
    """
    return gathered_logits(problem, device, STATISTICS) or plan_row_statistics(problem, device)


def parts_plan(problem: Problem, device: Device, warps: int, most: int) -> Plan:
    """The plan of a kernel that reduces a part of a row in a step of at most `most` chunks."""
    why = "independent programs share the row, and a second kernel merges their parts"
    found = steps_plan(problem, device, 1, warps, most, why)
    return replace(found, part_cols=found.chunks * found.vectors_per_chunk * found.vec)


def step_candidates(problem: Problem, device: Device) -> Iterator[Plan]:
    """Plans of a reduction that holds nothing, in steps that divide the row; `fused-softmax tune` measures them."""
    seen = set()
    for warps, most in itertools.product((1, 2, 4), (8, 12, 16)) if device.max_cluster >= 16 else ():
        found = parts_plan(problem, device, warps, most)
        if found.part_cols < problem.n_cols and found not in seen:
            seen.add(found)
            yield found
    for ctas in (c for c in (1, 2, 4) if c <= device.max_cluster and problem.n_cols >= 8192 * (c - 1)):
        for warps in (1, 2, 4, 8):
            for most in range(3, 11):
                found = steps_plan(problem, device, ctas, warps, most, "a candidate")
                if found.chunks > 2 and found not in seen:
                    seen.add(found)
                    yield found


def loss_candidates(problem: Problem, device: Device) -> Iterator[Plan]:
    """Plans that hold a row of a loss on chip, with and without a register cap; `fused-softmax tune` measures them."""
    for ctas in (c for c in (1, 2, 4, 8, 16) if c <= device.max_cluster):
        for warps in (2, 4, 8, 16):
            found = resident_plan(problem, device, KernelConfig(problem.n_cols, ctas, warps, True))
            if found is None or not 3 <= found.chunks <= 24:
                continue
            yield found
            if (cap := _loss_registers(problem, found)) is not None:
                yield replace(found, max_registers=cap)


def plan_capped_statistics(problem: Problem, device: Device) -> Plan:
    """`plan_statistics` of capped logits: one program per row.

    Triton's cluster planner fails on a kernel with as many operations as a tanh takes.

    >>> plan_capped_statistics(Problem(128256, "bfloat16", "bfloat16", vec=8), DEVICES["sm_90"]).ctas
    1
    """
    chosen = _statistics(problem, device, MOST_SMOOTHED)
    return chosen if chosen.ctas == 1 else steps_plan(problem, device, 1, TWO_PASS_WARPS, TWO_PASS_CHUNKS, chosen.why)


def plan_elementwise(problem: Problem, device: Device) -> Plan:
    """The plan of a kernel that reads and writes rows without a reduction: a row may take several programs.

    >>> plan_elementwise(Problem(128256, "bfloat16", "bfloat16", vec=8), DEVICES["sm_90"]).ctas
    1
    """
    held = _held_rows(problem, device, GRADIENT_ROWS, MOST_HELD)
    if (found := held or warp_plan(problem, device)) is not None:
        return found
    return steps_plan(problem, device, 1, *ELEMENTWISE[problem.itemsize], "independent programs share the row")


def plan_statistics_gradient(problem: Problem, device: Device) -> Plan:
    """`plan_elementwise`; of narrow rows, the plan of a kernel that moves them as one piece. Of losses, too.

    >>> from .types import DEVICES
    >>> plan_statistics_gradient(Problem(19, "bfloat16", "bfloat16", vec=1, packed=True), DEVICES["sm_90"]).gathered
    True
    """
    return gathered_logits(problem, device, STATISTICS_BACKWARD) or plan_elementwise(problem, device)


def plan_few_programs(problem: Problem, device: Device) -> Plan:
    """`plan_elementwise` of a launch that most often has nothing to do: the fewer programs, the sooner it ends.

    H200: 4,096 programs of one warp take 3.7 us to find that an upstream gradient is 1.

    >>> plan_few_programs(Problem(128256, "bfloat16", "bfloat16", vec=8), DEVICES["sm_90"]).num_warps
    8
    """
    found = warp_plan(problem, device)
    if found is not None:
        return found
    return steps_plan(problem, device, 1, *FEW_PROGRAMS, "few programs share all rows")


def plan_loss(problem: Problem, device: Device) -> Plan:
    """The plan of a loss with its gradient in one pass: the row as loaded, in longer slices than softmax's.

    >>> plan_loss(Problem(128256, "bfloat16", "bfloat16", vec=8), DEVICES["sm_90"]).ctas
    8
    """
    found = gathered_logits(problem, device, LOSS) or _held_rows(problem, device, LOSS_ROWS, MOST_HELD)
    if found is not None:
        return found
    if preferred_warp_plan(problem, device) is None and device.max_cluster >= 16:
        for config in LOSS_CLUSTER[problem.itemsize]:
            chosen = resident_plan(problem, device, config) if problem.n_cols <= config.max_cols else None
            if chosen is not None and _compiles(problem, chosen):
                may_spill = problem.itemsize == 2 and chosen.unaligned and chosen.ctas > 1
                if may_spill and LOSS_SPILLS <= chosen.chunks <= LOSS_SPILLS_NOT:
                    inside = min(chosen.unpredicated_chunks, LOSS_UNPREDICATED)
                    chosen = replace(chosen, chunks=LOSS_SPILLS_NOT, unpredicated_chunks=inside)
                return replace(chosen, max_registers=_loss_registers(problem, chosen))
    return replace(held_plan(problem, device), max_registers=None)


def _compiles(problem: Problem, chosen: Plan) -> bool:
    """Triton's cluster planner fails on this kernel where rows are read element by element in long slices."""
    return chosen.ctas == 1 or chosen.vec == problem.full_vec or chosen.chunks <= 16


def _loss_registers(problem: Problem, chosen: Plan) -> int | None:
    num_warps, caps = LOSS_REGISTERS[problem.itemsize]
    if chosen.vec < problem.full_vec or chosen.ctas == 1 or chosen.num_warps != num_warps:
        return None
    found = next((registers for chunks, *registers in caps if chosen.chunks <= chunks), None)
    return None if found is None else found[chosen.unaligned]


def plan_smoothed_loss(problem: Problem, device: Device) -> Plan:
    """The plan of a loss with label smoothing or a softcap, which need registers that `plan_loss` does not leave.

    Triton's cluster planner does not take so many operations either, so slices have at most 8 chunks. Rows that are too
    wide for that have the two_pass regime, and their gradient has a kernel of its own.

    >>> plan_smoothed_loss(Problem(128256, "float32", "float32", vec=4), DEVICES["sm_90"]).chunks
    8
    """
    return gathered_logits(problem, device, LOSS) or _with_chunks(problem, device, 8)


def _with_chunks(problem: Problem, device: Device, most: int) -> Plan:
    """softmax's plan, with more CTAs and warps where a slice would have more than `most` chunks."""
    chosen = held_plan(problem, device)
    # 4 chunks of unaligned rows with a softcap in a program of 8 warps spill 8 bytes with Triton 3.6
    most -= most == 4 and chosen.regime == "block" and chosen.unaligned and chosen.num_warps == 8
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
    return gathered_logits(problem, device, LOSS) or _with_chunks(problem, device, 4)


def plan_loss_alone(problem: Problem, device: Device) -> Plan:
    """The plan of a loss without a gradient: `plan_statistics`, except of narrow rows, which are moved as one piece.

    >>> from .types import DEVICES
    >>> plan_loss_alone(Problem(19, "bfloat16", "bfloat16", vec=1, packed=True), DEVICES["sm_90"]).gathered
    True
    """
    return gathered_logits(problem, device, STATISTICS) or plan_statistics(problem, device)


def plan_smoothed_loss_alone(problem: Problem, device: Device) -> Plan:
    """`plan_loss_alone` of a loss with label smoothing, whose logits take three times as many registers.

    >>> plan_smoothed_loss_alone(Problem(1000, "bfloat16", "bfloat16", vec=8), DEVICES["sm_90"]).chunks
    4
    """
    return gathered_logits(problem, device, STATISTICS) or _statistics(problem, device, MOST_SMOOTHED)


def plan_capped_loss_alone(problem: Problem, device: Device) -> Plan:
    """`plan_loss_alone` of capped logits; others as `plan_capped_statistics`.

    >>> plan_capped_loss_alone(Problem(128256, "bfloat16", "bfloat16", vec=8), DEVICES["sm_90"]).ctas
    1
    """
    return gathered_logits(problem, device, STATISTICS) or plan_capped_statistics(problem, device)
