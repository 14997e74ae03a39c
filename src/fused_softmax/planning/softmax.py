"""Problem + Device -> Plan: which regime a row of so many columns takes, and with which numbers. Pure Python, no I/O.

A plan sees columns, dtypes, alignment and device, never the number of rows: a row's bits do not depend on the batch it
came in. The numbers of the policy are in `config_tables`, tuples of configs in rising width, each set by a measurement.

What makes a config good, in the order in which it matters (measured on an H200, bfloat16 and float32, 2^28 elements):
bytes in flight (several programs on each multiprocessor, and few lanes without a column), registers just under the next
step of occupancy, no reduction across warps where a warp can hold the row, no mask where the slice is known to be full.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .config_tables import (
    BACKWARD_BLOCK,
    CLUSTER,
    FORWARD_BLOCK,
    TWO_PASS_CHUNKS,
    TWO_PASS_WARPS,
    UNALIGNED_MIN_COLS,
    WARP,
    WARP_COLS,
    WARP_MAX_COLS,
    WARP_SCALAR_COLS,
    WARP_SCALAR_WARPS,
    KernelConfig,
)  # fmt: skip
from .types import ITEMSIZE, REGIMES, VECTOR_BYTES, Device, Plan, Problem, power_of_two

CONVERSION_BYTES = 96 << 10  # of shared memory, for a chunk that changes its layout: what every target has
SMEM_STAGED_BYTES = 46 << 10  # of shared memory for chunks that stay there; 48 KB is what a kernel may declare
STRIDED_TILE = 4096  # elements of a tile of the strided kernel
MAX_CHUNKS = 24  # what a thread's 255 registers hold of a row, in vectors, without spilling


def config_table(problem: Problem, device: Device) -> tuple[KernelConfig, ...]:
    """The configs beyond the tile regime for this problem on this device."""
    if device.max_cluster >= 16:
        return CLUSTER[problem.backward, problem.log][problem.itemsize]
    return (BACKWARD_BLOCK if problem.backward else FORWARD_BLOCK)[problem.itemsize]


def candidates(problem: Problem, device: Device) -> Iterator[Plan]:
    """Every plan that could hold the row without spilling: what `fused-softmax tune` measures."""
    if (tile := warp_plan(problem, device)) is not None:
        yield tile
    for ctas in (1, 2, 4, 8, 16):
        for num_warps in (1, 2, 4, 8, 16):
            for recompute in (False, True) if problem.itemsize == 2 else (False,):
                if ctas > device.max_cluster or problem.n_cols < 512 * ctas * num_warps // problem.itemsize:
                    continue
                found = resident_plan(problem, device, KernelConfig(problem.n_cols, ctas, num_warps, recompute))
                if found is not None:
                    yield found
    yield two_pass_plan(problem, device)


def plan(problem: Problem, device: Device, regime: str | None = None) -> Plan:
    """The plan for `problem` on `device`; `regime` forces one (ValueError where it cannot hold such a row).

    >>> plan(Problem(4096, "bfloat16", "bfloat16", vec=8), DEVICES["sm_90"]).regime
    'block'
    """
    if regime is None:
        return next(_regimes(problem, device))
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


def torch_is_faster_reason(problem: Problem, device: Device) -> str | None:
    """Why torch's own kernel is the better choice for such rows, or None where ours is.

    H200, graph replay: up to 7 columns that are no whole vector, torch is ahead by up to 30% (bfloat16, 5 columns).
    """
    if device.kind == "cuda" and problem.n_cols < 8 and problem.vec < problem.full_vec:
        return f"rows of {problem.n_cols} column(s) are too short for vectors, and torch's own kernel is as fast"
    return None


def _regimes(problem: Problem, device: Device) -> Iterator[Plan]:
    """The plans worth taking, best first; the last always exists."""
    if (tile := preferred_warp_plan(problem, device)) is not None:
        yield tile
    for config in config_table(problem, device):
        if problem.n_cols <= config.max_cols and config.ctas <= device.max_cluster:
            found = (
                two_pass_plan(problem, device, config)
                if config.resident_chunks
                else resident_plan(problem, device, config)
            )
            if found is not None:
                yield found
    yield two_pass_plan(problem, device)


def geometry(problem: Problem) -> tuple[int, bool]:
    """(vec, edge): the width of a vector access, and whether a row's ends are apart."""
    if problem.vec < problem.full_vec and problem.in_phase and problem.n_cols >= UNALIGNED_MIN_COLS[problem.itemsize]:
        return problem.full_vec, True
    return problem.vec, False


def warp_plan(problem: Problem, device: Device) -> Plan | None:
    """The tile regime, or None for rows that are too wide for it."""
    if problem.n_cols > WARP_MAX_COLS:
        return None
    vec, edge = geometry(problem)
    units = max(1, problem.n_cols // vec if edge else -(-problem.n_cols // vec))
    lanes = min(power_of_two(units), device.warp_size)
    if vec == problem.full_vec:
        lanes = max(lanes, 2 * vec) if edge else lanes
        config = next(r for r in WARP[problem.itemsize] if units <= r.max_cols)
        num_warps, rows_a_thread = max(1, config.num_warps * 32 // device.warp_size), config.rows
        if edge and lanes == device.warp_size and units <= lanes:
            num_warps, rows_a_thread = 1, 4  # 257 columns of bfloat16: .98 of copy against .93
    elif problem.n_cols <= WARP_SCALAR_COLS:
        num_warps = max(1, WARP_SCALAR_WARPS * 32 // device.warp_size)
        rows_a_thread = max(1, 4 * device.warp_size // (lanes * -(-units // lanes)) * lanes // device.warp_size)
    else:  # a warp's vectors, element by element
        num_warps, rows_a_thread = 1, 1
        lanes *= problem.full_vec // vec
    chunks = -(-units // lanes)
    chunks += chunks > 4 and chunks % 2  # widths share kernels
    rows = max(1, num_warps * device.warp_size // lanes * rows_a_thread)
    why = f"{rows} row(s) a program, each in one warp or less: no reduction leaves it"
    return Plan("warp", rows, 1, 1, lanes, vec, chunks, 0, edge, problem.itemsize == 4, num_warps, None, why)


def preferred_warp_plan(problem: Problem, device: Device) -> Plan | None:
    """The tile regime where it is the fastest, or None."""
    return warp_plan(problem, device) if problem.n_cols <= WARP_COLS[problem.itemsize] else None


def _widest(problem: Problem, device: Device, ctas: int) -> KernelConfig:
    """A config for a forced regime: as many warps as give each lane a few chunks."""
    own = [
        r
        for r in config_table(problem, device)
        if (r.ctas == 1) == (ctas == 1) and problem.n_cols <= r.max_cols and not r.resident_chunks
    ]
    if own:
        return own[0]
    vec, _ = geometry(problem)
    warps = 4
    while warps < 16 and problem.n_cols > ctas * warps * device.warp_size * vec * 8:
        warps *= 2
    return KernelConfig(problem.n_cols, min(ctas, 4 if problem.n_cols < 4096 else ctas), warps, problem.itemsize == 2)


def resident_plan(problem: Problem, device: Device, config: KernelConfig) -> Plan | None:
    """The block or cluster regime as `config` says, or None where a thread cannot hold its part of the row."""
    vec, edge = geometry(problem)
    num_warps = max(1, min(config.num_warps * 32 // device.warp_size, device.max_warps))
    lanes = num_warps * device.warp_size * (problem.full_vec // vec)
    units = problem.n_cols // vec if edge else -(-problem.n_cols // vec)
    slice_units = -(-units // config.ctas)
    chunks = _round_chunks(max(1, -(-slice_units // lanes)))
    # a row apart from its ends has less room beside it for exp's results (50,257 columns: .99 of copy against .96)
    recompute = config.recompute or problem.itemsize == 4 or (edge and chunks > 5)
    # only whole vectors of a row that is on a cluster, so that each thread knows its own
    warps_reduce_separately = config.ctas > 1 and vec == problem.full_vec and problem.dtype == problem.out_dtype
    unmasked = _unmasked(units, config.ctas, lanes, chunks, edge, problem.backward)
    # an unaligned row's ends take room too
    tensors = 2 if problem.backward and config.prefetched_chunks is None else 1
    room = SMEM_STAGED_BYTES // (VECTOR_BYTES * lanes * tensors)
    parked = (
        min(config.smem_staged + edge, unmasked, room)
        if device.supports_smem_staging and warps_reduce_separately and config.smem_staged
        else 0
    )
    if (
        not _fits(problem, config, chunks - parked, recompute, device)
        or _conversion_bytes(problem, config.ctas * lanes * vec) > CONVERSION_BYTES
    ):
        return None
    max_registers = config.unaligned_registers if edge else config.max_registers
    if config.smem_staged:
        max_registers = config.max_registers if parked else None
    regime = "cluster" if config.ctas > 1 else "block"
    where = f"the {config.ctas} CTAs of a cluster" if config.ctas > 1 else "one program"
    why = f"the row stays in {where}, {chunks} vector(s) a thread" + (", exp computed twice" if recompute else "")
    why += f", {parked} of them in shared memory" if parked else ""
    return Plan(
        regime, rows=1, ctas=config.ctas, warps_per_row=num_warps if warps_reduce_separately else 1,
        vectors_per_chunk=lanes, vec=vec, chunks=chunks, unpredicated_chunks=unmasked, unaligned=edge,
        recompute=recompute, num_warps=num_warps, max_registers=max_registers if warps_reduce_separately else None,
        why=why, prefetched_chunks=config.prefetched_chunks if problem.log else None, smem_staged=parked,
    )  # fmt: skip


def two_pass_plan(problem: Problem, device: Device, config: KernelConfig | None = None) -> Plan:
    """The stream regime, keeping what `config` says of a slice where each of the row's slices is that long."""
    vec, edge = geometry(problem)
    num_warps = max(1, (TWO_PASS_WARPS if config is None else config.num_warps) * 32 // device.warp_size)
    lanes = num_warps * device.warp_size * (problem.full_vec // vec)
    # 16-bit rows element by element: four chunks of two tensors spill at 255 registers
    chunks = TWO_PASS_CHUNKS // 2 if vec < problem.full_vec == 8 else TWO_PASS_CHUNKS
    ctas = device.max_cluster if problem.n_cols >= device.max_cluster * lanes * vec * chunks else 1
    warps_reduce_separately = ctas > 1 and vec == problem.full_vec and problem.dtype == problem.out_dtype
    shortest = _shortest(problem.n_cols // vec if edge else -(-problem.n_cols // vec), ctas, edge)
    kept, ahead, max_registers, also = 0, None, None, ""
    if warps_reduce_separately and config is not None and config.resident_chunks * lanes <= shortest:
        # an unaligned row's ends take room too, where registers are capped
        kept = config.resident_chunks - (edge and config.max_registers is not None)
        ahead, chunks = config.prefetched_chunks if problem.log else None, config.step
        max_registers = config.max_registers
        also = f" but for {kept} vector(s) a thread that stay"
    why = f"the row is walked twice in steps by {ctas} CTA(s){also}: it does not fit on chip"
    parts = num_warps if warps_reduce_separately else 1
    return Plan(
        "two_pass", 1, ctas, parts, lanes, vec, chunks, 0, edge, False, num_warps, max_registers, why, ahead, kept
    )


def strided_plan(n_rows: int, n_cols: int, along_cols: bool) -> Plan:
    """The plan of columns or rows that lie anywhere: a tile of `rows` neighboring rows and `lanes` columns a step.

    n_rows: neighbors of one dimension; along_cols: columns, and not rows, are neighbors in memory.
    """
    cols = min(power_of_two(n_cols), 1024 if along_cols else 64)
    rows = max(1, min(power_of_two(n_rows), STRIDED_TILE // cols))
    steps = -(-n_cols // cols)
    why = f"dim's elements or rows are not neighbors: tiles of {rows} rows, {steps} step(s) of {cols} columns"
    return Plan("strided", rows, 1, 1, cols, 1, steps, 0, False, False, 4, None, why)


def _fits(problem: Problem, config: KernelConfig, chunks: int, recompute: bool, device: Device) -> bool:
    """Whether a thread's registers hold its part of the row and what the arithmetic needs, by cross-compiling."""
    itemsize = ITEMSIZE[problem.dtype]
    kept = problem.full_vec * itemsize // 4 * (2 if itemsize == 2 and not recompute else 1)
    if geometry(problem)[0] < problem.full_vec == 8:
        kept += 6  # 16-bit rows element by element: 10 to 13 registers a chunk
    tiles = chunks * (2 if problem.backward else 1)
    if problem.backward and problem.log and config.prefetched_chunks is not None:
        tiles = chunks + min(chunks, config.prefetched_chunks)
    needed = tiles * kept + 28
    return chunks <= MAX_CHUNKS and needed <= min(255, device.registers // (config.num_warps * 32) // 8 * 8)


def _conversion_bytes(problem: Problem, columns: int) -> int:
    """Bytes of shared memory through which a chunk goes on its way from 16-bit vectors to float32 ones.

    Triton 3.6 and 3.7 give each CTA of a cluster room for the whole cluster's chunk: 256 KB for 16 CTAs of 16 warps.
    """
    return 4 * columns if ITEMSIZE[problem.out_dtype] > ITEMSIZE[problem.dtype] else 0


def _round_chunks(chunks: int) -> int:
    """Widths share kernels: above 9, chunks come in steps of 2, but for 13, which two vocabularies need."""
    return chunks if chunks <= 9 or chunks == 13 else -(-chunks // 2) * 2


def _unmasked(units: int, ctas: int, lanes: int, chunks: int, edge: bool, backward: bool = False) -> int:
    """Chunks that lie inside every slice: all where the slices divide the row, else all but the last two.

    An unaligned row of n columns has n//vec or one vector fewer between its ends, and the last slice is the shortest.
    Long gradients keep two masks that they do not need: at 262,144 columns of bfloat16, with none, the compiler issues
    their loads in an order that reaches .86 of the add where this reaches .98.
    """
    if backward and chunks >= 8:
        edge = True
    if not edge and units == ctas * lanes * chunks and (chunks <= 9 or chunks == 16):
        return chunks
    return max(0, chunks - 2) if _shortest(units, ctas, edge) >= (chunks - 2) * lanes else 0


def _shortest(units: int, ctas: int, edge: bool) -> int:
    """Vectors of the shortest of a row's slices, the last one; an unaligned row may have one less between its ends."""
    return min(u - (ctas - 1) * -(-u // ctas) for u in ((units, units - 1) if edge else (units,)))
