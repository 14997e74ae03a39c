"""Plans of masked softmax and its gradient: a mask takes as much room as the second row of a gradient.

docs/measurements/thresholds.md has the figures behind the thresholds.
"""

from __future__ import annotations

from dataclasses import replace

from .config_tables import TWO_PASS_CHUNKS, TWO_PASS_WARPS, KernelConfig
from .gathered import gathered_plan
from .masked_tables import (
    MASKED,
    MASKED_BACKWARD_REGISTERS,
    MASKED_CHUNKS,
    MASKED_FEW_CHUNKS,
    MASKED_LANES,
    MASKED_REGISTERS,
    MASKED_UNALIGNED,
    MASKED_WIDE,
    PARTIAL_ELEMENTS,
    PARTIAL_MOST,
)
from .rows import geometry, held_plan, resident_plan, steps_plan, warp_plan
from .types import Device, Plan, Problem

# the tables of each kind of mask, by the numbers of the kernels: none, boolean, additive
KINDS = ("unmasked", "boolean", "additive")
# columns up to which causal rows are read as one piece, too, by the bytes of an element
GATHERED_COLS = {2: 63, 4: 32}
# the same of gradients whose rows start at multiples of 16 bytes, which read only what they see otherwise
ALIGNED_CAUSAL_GRADIENT = {2: 48, 4: 20}
# vectors of a thread up to which causal rows are written as one piece
OUTPUT_GATHERED_CHUNKS = 8
# of their 16-bit programs of 4 warps, so that 8 of them share a multiprocessor; and of 2 warps, with so many vectors of
# a thread at most, so that 12 do, not 10
OUTPUT_GATHERED_REGISTERS = 64
OUTPUT_GATHERED_FEW_CHUNKS, OUTPUT_GATHERED_FEW_REGISTERS = 7, 80
# causal rows of few queries (`_few_queries`): chunks that they see at most. With more a thread has as many registers as
# one that holds the whole row
MOST_SEEN_CHUNKS = 4
# bytes of a program's piece at least, by the bytes of an element: with fewer, twice the rows are faster
FEW_QUERIES_LEAST = {2: 4800, 4: 2100}
SECTOR_BYTES = 32


def plan_masked(
    problem: Problem, device: Device, mask: int, causal: bool = False, seen: int | None = None
) -> Plan:  # fmt: skip
    """The plan of masked softmax, or of its gradient. A causal row writes up to three vectors element by element.

    mask: 0 for none, 1 for a boolean one, 2 for an additive one. A gradient reads a boolean mask or none. causal: rows
    are causal; a forward under a mask is planned without it. seen: columns that no causal row sees beyond; None: any
    row may see all of its columns. No result depends on it.

    >>> plan_masked(Problem(2048, "bfloat16", "bfloat16", vec=8), DEVICES["sm_90"], mask=0).regime
    'block'
    """
    kind = "backward" if problem.backward else KINDS[mask]
    if not causal or mask or problem.n_cols <= _most_causal(problem):
        found = gathered_plan(problem, device, scores=True, masked=mask > 0)
        if found is not None:
            return found
    vec, unaligned = geometry(problem)
    in_vectors = vec == problem.full_vec
    if in_vectors:
        chosen = _narrow_plan(problem, device, kind, causal and not problem.backward)
    else:
        chosen = warp_plan(problem, device, even=0) if problem.n_cols <= 512 else None
        if chosen is not None and chosen.vectors_per_chunk < vec:  # a thread for each column of a vector seen in part
            rows, chunks = max(1, chosen.num_warps * device.warp_size // vec), -(-problem.n_cols // (vec * vec))
            chosen = replace(chosen, rows=rows, vectors_per_chunk=vec, chunks=chunks)
    registers = None if chosen is None else chosen.max_registers
    unaligned_configs = MASKED_UNALIGNED.get((kind, problem.itemsize), ()) if unaligned else ()
    for config in (*MASKED[kind][problem.itemsize], *unaligned_configs):
        if chosen is None and problem.n_cols <= config.max_cols and config.ctas <= device.max_cluster:
            by_warps = config.rows > 1 and in_vectors
            chosen = resident_plan(problem, device, config._replace(num_warps=1) if by_warps else config)
            if chosen is not None and by_warps:
                chosen = _rows_of_warps(chosen, chosen.chunks, config.num_warps, device)
            elif chosen is not None and (mask or config.num_warps == 8) and chosen.ctas == 1 and not problem.backward:
                chosen, registers = _exact(problem, chosen), config.max_registers
            elif chosen is not None and chosen.ctas > 1:
                registers = chosen.max_registers
    if chosen is None:
        # these kernels stage nothing in shared memory, so long rows get more warps
        held = replace(problem, backward=problem.backward or mask > 0)
        chosen = held_plan(held, replace(device, supports_smem_staging=False))
        for above, wide in MASKED_WIDE.get(kind, ()) if problem.itemsize == 2 and chosen.ctas > 1 else ():
            if above < problem.n_cols <= wide.max_cols:
                chosen = resident_plan(held, device, wide) or chosen
                registers = chosen.max_registers
        too_long = chosen.chunks > MASKED_CHUNKS[held.backward] and not problem.backward
        if too_long or (chosen.regime == "two_pass" and not held.backward):
            chosen = resident_plan(held, device, KernelConfig(problem.n_cols, device.max_cluster, 16, True)) or chosen
        if chosen.chunks > MASKED_CHUNKS[held.backward] or chosen.regime == "two_pass":
            # by one program: Triton's cluster planner fails on this kernel's loop
            why = "the row does not fit on chip: it is read twice in steps"
            chosen = steps_plan(problem, device, 1, TWO_PASS_WARPS, TWO_PASS_CHUNKS // 2, why)
    if problem.backward:
        # no cap with a mask: it is read where a row's sum is not finite, which takes more registers
        capped = in_vectors and not mask and chosen.ctas > 1 and chosen.chunks <= 4 and problem.itemsize == 2
        return replace(chosen, max_registers=MASKED_BACKWARD_REGISTERS if capped else None)
    if mask and not in_vectors and chosen.regime == "block":
        chosen = _more_warps(problem, chosen, device)
    full = 0
    if mask and in_vectors and chosen.ctas == 1 and chosen.regime != "two_pass":
        # chunks inside every row: up to two vectors are columns outside of the mask's vectors, or head and tail
        units = problem.n_cols // vec if unaligned else -(-problem.n_cols // vec)
        full = max(0, min(chosen.chunks - 2, (units - 2) // chosen.vectors_per_chunk))
        caps = MASKED_REGISTERS.get((kind, chosen.rows > 1), ()) if problem.itemsize == 2 else ()
        registers = next((cap for fewest, most, cap in caps if fewest <= chosen.chunks <= most), registers)
    # logits under a boolean mask stay in 16 bits, and there is room for exp's results in one program
    recompute, why = chosen.recompute, chosen.why
    if mask and chosen.regime == "block":
        recompute, why = False, f"the row stays in one program, {chosen.chunks} vector(s) per thread"
    found = replace(chosen, unpredicated_chunks=full, max_registers=registers, recompute=recompute, why=why)
    return _few_queries(found, problem, device, seen) if causal and not mask and seen is not None else found


def _most_causal(problem: Problem) -> int:
    """The most columns of causal rows without a mask that are read as one piece."""
    if problem.backward and problem.vec == problem.full_vec:
        return ALIGNED_CAUSAL_GRADIENT[problem.itemsize]
    return GATHERED_COLS[problem.itemsize]


def _narrow_plan(problem: Problem, device: Device, kind: str, causal: bool) -> Plan | None:
    """The plan of rows that a part of a warp holds, as many as its other parts; None for wider rows."""
    vec, unaligned = geometry(problem)
    units = problem.n_cols // vec if unaligned else -(-problem.n_cols // vec)
    lanes = next((lanes for most, lanes in MASKED_LANES[kind][problem.itemsize] if units <= most), None)
    if lanes is None:
        return None
    chunks = max(1, -(-units // lanes))
    num_warps = 4 if chunks <= MASKED_FEW_CHUNKS[kind][problem.itemsize] else 1
    as_piece = causal and problem.packed and device.warp_size == 32 and chunks <= OUTPUT_GATHERED_CHUNKS
    if as_piece:  # a program's rows begin at a multiple of 16 bytes
        num_warps = max(num_warps, vec * lanes // device.warp_size)
    cap = None
    if as_piece and problem.itemsize == 2 and (num_warps == 4 or chunks <= OUTPUT_GATHERED_FEW_CHUNKS):
        cap = _cap_of_pieces(num_warps)
    rows = num_warps * device.warp_size // lanes
    why = f"{rows} rows per program, each in {lanes} threads of a warp: no reduction leaves them"
    return Plan(
        "warp", rows, 1, 1, lanes, vec, chunks, 0, unaligned, False, num_warps, cap, why, output_gathered=as_piece
    )


def _cap_of_pieces(num_warps: int) -> int:
    """The cap on the registers of 16-bit causal rows that a program writes as one piece."""
    return OUTPUT_GATHERED_REGISTERS if num_warps == 4 else OUTPUT_GATHERED_FEW_REGISTERS


def _few_queries(plan: Plan, problem: Problem, device: Device, seen: int) -> Plan:
    """`plan`, whose causal rows see no column from `seen` on, so that most columns are only written.

    A program writes its rows as one piece, and a thread holds the chunks that some row sees. So few registers and much
    memory are in flight. Pieces start at sectors: a sector that two programs write costs a read. A row's sum is added
    up in the same order, because what it does not see adds zeros.
    """
    lanes = plan.vectors_per_chunk
    chunk = lanes * plan.vec
    seen_chunks = 1 if seen <= chunk else MOST_SEEN_CHUNKS  # two kernels for a width
    several = plan.regime == "warp" and not plan.recompute and plan.vec == problem.full_vec
    held = several and problem.packed and device.warp_size == 32
    if not held or seen > seen_chunks * chunk or seen_chunks >= plan.chunks:
        return plan
    for num_warps in (1, 2, 4):
        rows = num_warps * device.warp_size // lanes
        piece = rows * problem.n_cols * problem.itemsize
        enough = num_warps == 4 or piece >= FEW_QUERIES_LEAST[problem.itemsize]
        if enough and piece % SECTOR_BYTES == 0:
            # above what ptxas takes; without it some loads wait for others
            cap = _cap_of_pieces(num_warps) if problem.itemsize == 2 else None
            why = f"{rows} rows per program, each in {lanes} threads of a warp"
            even = plan.chunks + plan.chunks % 2  # so that widths share kernels
            chunks = even if plan.chunks > MOST_SEEN_CHUNKS else plan.chunks
            return replace(
                plan, rows=rows, num_warps=num_warps, max_registers=cap, output_gathered=True, chunks=chunks,
                unseen_chunks=chunks - seen_chunks, why=f"{why}; they see at most {seen_chunks * chunk} columns",
            )  # fmt: skip
    return plan


def _exact(problem: Problem, plan: Plan) -> Plan:
    """The plan without the chunk that `resident_plan` may add, so that widths share kernels."""
    vectors = problem.n_cols // plan.vec if plan.unaligned else -(-problem.n_cols // plan.vec)
    return replace(plan, chunks=-(-vectors // plan.vectors_per_chunk), unpredicated_chunks=0)


def _more_warps(problem: Problem, plan: Plan, device: Device) -> Plan:
    """The plan of rows in partial vectors, with warps added until a thread has at most PARTIAL_ELEMENTS.

    A row has at most PARTIAL_MOST warps.
    """
    units = -(-problem.n_cols // plan.vec)
    while plan.num_warps < PARTIAL_MOST and units * plan.vec > PARTIAL_ELEMENTS * plan.num_warps * device.warp_size:
        vectors = 2 * plan.vectors_per_chunk
        plan = replace(plan, num_warps=2 * plan.num_warps, vectors_per_chunk=vectors, chunks=-(-units // vectors))
    return plan


def _rows_of_warps(plan: Plan, chunks: int, num_warps: int, device: Device) -> Plan:
    """The plan of `num_warps` rows for each program, each in `chunks` chunks of a warp."""
    why = f"{num_warps} row(s) per program, each in one warp: no reduction leaves its warp"
    return replace(
        plan, regime="warp", rows=num_warps, num_warps=num_warps, vectors_per_chunk=device.warp_size, chunks=chunks,
        unpredicated_chunks=0, why=why,
    )  # fmt: skip
