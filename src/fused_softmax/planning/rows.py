"""The regimes that hold a row, for all ops over rows: Problem + Device -> Plan, by the tables. Pure Python, no I/O.

A plan sees columns, dtypes, alignment and device, not the number of rows, so a row's bits do not depend on its batch.
`config_tables` has the numbers of the policy, as tuples of configs in rising width, each set by a measurement.

A config is good for these reasons, in the order of their weight (measured on an H200, bfloat16 and float32, 2^28
elements): many bytes in flight (several programs on each multiprocessor, and few threads without a column), registers
just under the next step of occupancy, no reduction across warps where a warp can hold the row, and no mask where a
slice is known to be full. docs/measurements/thresholds.md has the figures behind the thresholds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from .config_tables import (
    BACKWARD_BLOCK,
    CLUSTER,
    FORWARD_BLOCK,
    PARTIAL_BACKWARD,
    PARTIAL_COLS,
    PARTIAL_EVEN,
    PARTIAL_FORWARD,
    PARTIAL_WARPS,
    TWO_PASS_CHUNKS,
    TWO_PASS_WARPS,
    UNALIGNED_MIN_COLS,
    WARP,
    WARP_COLS,
    WARP_HALVES,
    WARP_MAX_COLS,
    WARP_PAIRS,
    WARP_UNALIGNED,
    KernelConfig,
)
from .types import ITEMSIZE, VECTOR_BYTES, Device, Plan, Problem, power_of_two

CONVERSION_BYTES = 96 << 10  # of shared memory, for the layout conversion of a chunk; every target has as much
SMEM_STAGED_BYTES = 46 << 10  # of shared memory, for staged chunks; a kernel may declare 48 KB in all
MAX_CHUNKS = 24  # vectors of a row that a thread's 255 registers hold without spilling


def config_table(problem: Problem, device: Device) -> tuple[KernelConfig, ...]:
    """The configs of the block and cluster regimes for this problem on this device."""
    if device.max_cluster >= 16:
        return CLUSTER[problem.backward, problem.log][problem.itemsize]
    return (BACKWARD_BLOCK if problem.backward else FORWARD_BLOCK)[problem.itemsize]


def held_plan(problem: Problem, device: Device) -> Plan:
    """The plan of a row as the tables have it, for kernels that keep more of a row than softmax does."""
    return next(_regimes(problem, device))


def _regimes(problem: Problem, device: Device) -> Iterator[Plan]:
    """The plans worth taking, best first. The last always exists."""
    if (found := preferred_warp_plan(problem, device)) is not None:
        yield found
    for config in config_table(problem, device):
        if problem.n_cols <= config.max_cols and config.ctas <= device.max_cluster:
            make = two_pass_plan if config.resident_chunks else resident_plan
            found = make(problem, device, config)
            if found is not None:
                yield found
    yield two_pass_plan(problem, device)


def geometry(problem: Problem) -> tuple[int, bool]:
    """(vec, unaligned): the width of a vector access, and whether rows have an unaligned head and tail."""
    if problem.vec < problem.full_vec and problem.in_phase and problem.n_cols >= UNALIGNED_MIN_COLS[problem.itemsize]:
        return problem.full_vec, True
    return problem.vec, False


def warp_plan(
    problem: Problem, device: Device, partial: Mapping[int, tuple[int, int]] | None = None, even: int = PARTIAL_EVEN
) -> Plan | None:
    """The plan of the warp regime, or None for rows that are too wide for it.

    partial, even: the table of rows in partial vectors, and the most threads of such a row with an even number of
    chunks, as `config_tables` has them. None: the table of softmax.
    """
    if problem.n_cols > WARP_MAX_COLS:
        return None
    vec, unaligned = geometry(problem)
    units = max(1, problem.n_cols // vec if unaligned else -(-problem.n_cols // vec))
    vectors = min(power_of_two(units), device.warp_size)
    if vec == problem.full_vec:
        vectors = max(vectors, 2 * vec) if unaligned else vectors
        if problem.itemsize == 2 and device.warp_size < units <= 3 * device.warp_size // 2:
            # three vectors for each of 16 threads, not one or two for each of 32, except unaligned rows of a gradient,
            # which take many registers with Triton 3.9
            vectors = device.warp_size // (1 if unaligned and problem.backward else 2)
        config = next(c for c in WARP[problem.itemsize] if units <= c.max_cols)
        num_warps, rows_a_thread = max(1, config.num_warps * 32 // device.warp_size), config.rows
        if unaligned and vectors == device.warp_size and units <= vectors:
            num_warps, rows_a_thread = 1, 4  # faster than the table's
        if unaligned and problem.itemsize == 2 and not problem.backward:
            of_row = (row[2:] for row in WARP_UNALIGNED if row[0] <= units <= row[1])
            vectors, num_warps, rows_a_thread = next(of_row, (vectors, num_warps, rows_a_thread))
    elif problem.n_cols <= PARTIAL_COLS:
        num_warps = max(1, PARTIAL_WARPS * 32 // device.warp_size)
        fewest, elements = (partial or (PARTIAL_BACKWARD if problem.backward else PARTIAL_FORWARD))[vec]
        while vectors > 1 and -(-units // vectors) < fewest:
            vectors //= 2
        rows_a_thread = power_of_two(max(1, elements // (vec * -(-units // vectors))) + 1) // 2
    else:  # as many elements as whole vectors have
        num_warps, rows_a_thread = 1, 1
        vectors *= problem.full_vec // vec
    chunks = -(-units // vectors)
    if vectors >= device.warp_size or (vec < problem.full_vec and vectors <= even):
        chunks += chunks > 4 and chunks % 2  # widths share kernels
    rows = max(1, num_warps * device.warp_size // vectors * rows_a_thread)
    why = f"{rows} row(s) per program, each in one warp or less: no reduction leaves its warp"
    return Plan("warp", rows, 1, 1, vectors, vec, chunks, 0, unaligned, problem.itemsize == 4, num_warps, None, why)


def preferred_warp_plan(problem: Problem, device: Device) -> Plan | None:
    """The plan of the warp regime where it is the fastest, or None."""
    found = warp_plan(problem, device) if problem.n_cols <= WARP_COLS[problem.itemsize] else None
    if found is None or found.vec < problem.full_vec or problem.backward:
        return found
    fewest, most, num_warps = WARP_PAIRS
    pairs = found.unaligned and problem.itemsize == 2 and device.warp_size == 32
    if pairs and fewest <= problem.n_cols // found.vec <= most:
        rows = 2 * num_warps * device.warp_size // found.vectors_per_chunk
        why = f"{rows} rows per program, two in each half of a warp: no reduction leaves its warp"
        return replace(found, rows=rows, num_warps=num_warps, why=why)
    if found.chunks == 1 and found.vectors_per_chunk == device.warp_size == 32:
        vectors, num_warps = WARP_HALVES[problem.itemsize]
        rows = num_warps * device.warp_size // vectors
        why = f"{rows} rows per program, each in half a warp: no reduction leaves its warp"
        return replace(found, rows=rows, vectors_per_chunk=vectors, chunks=2, num_warps=num_warps, why=why)
    return found


def resident_plan(problem: Problem, device: Device, config: KernelConfig) -> Plan | None:
    """The plan of the block or cluster regime as `config` says, or None where a thread cannot hold its columns."""
    vec, unaligned = geometry(problem)
    if unaligned and config.unaligned_warps is not None:
        config = config._replace(num_warps=config.unaligned_warps, max_registers=None)
    num_warps = max(1, min(config.num_warps * 32 // device.warp_size, device.max_warps))
    vectors = num_warps * device.warp_size * (problem.full_vec // vec)
    units = problem.n_cols // vec if unaligned else -(-problem.n_cols // vec)
    slice_units = -(-units // config.ctas)
    chunks = _round_chunks(max(1, -(-slice_units // vectors)), config.odd_chunks)
    # an unaligned row leaves less room for exp's results
    recompute = config.recompute or problem.itemsize == 4 or (unaligned and chunks > 5)
    whole = vec == problem.full_vec and problem.dtype == problem.out_dtype
    # only for whole vectors of a row on a cluster, so that each thread knows its own
    warps_reduce_separately = config.ctas > 1 and whole
    unpredicated = unpredicated_chunks_of(units, config.ctas, vectors, chunks, unaligned, problem.backward)
    # an unaligned row's head and tail take room too
    tensors = 2 if problem.backward and config.prefetched_chunks is None else 1
    room = SMEM_STAGED_BYTES // (VECTOR_BYTES * vectors * tensors)
    wanted = config.smem_staged
    if unaligned and config.unaligned_staged is not None:
        wanted = config.unaligned_staged
    elif unaligned and wanted:
        wanted += 1
    staged = min(wanted, unpredicated, room) if device.supports_smem_staging and warps_reduce_separately else 0
    if (
        not _fits(problem, config, chunks - staged, recompute, device)
        or _conversion_bytes(problem, config.ctas * vectors * vec) > CONVERSION_BYTES
    ):
        return None
    max_registers = config.unaligned_registers if unaligned else config.max_registers
    if wanted:
        max_registers = config.max_registers if staged else None
    regime = "cluster" if config.ctas > 1 else "block"
    where = f"the {config.ctas} CTAs of a cluster" if config.ctas > 1 else "one program"
    why = f"the row stays in {where}, {chunks} vector(s) per thread" + (", exp computed twice" if recompute else "")
    why += f", {staged} of them in shared memory" if staged else ""
    return Plan(
        regime, rows=1, ctas=config.ctas, warps_per_row=num_warps if warps_reduce_separately else 1,
        vectors_per_chunk=vectors, vec=vec, chunks=chunks, unpredicated_chunks=unpredicated, unaligned=unaligned,
        recompute=recompute, num_warps=num_warps, max_registers=max_registers if whole else None,
        why=why, prefetched_chunks=config.prefetched_chunks if problem.log else None, smem_staged=staged,
    )  # fmt: skip


def two_pass_plan(problem: Problem, device: Device, config: KernelConfig | None = None) -> Plan:
    """The plan of the two_pass regime. Chunks are resident as `config` says, where every slice is that long."""
    if ITEMSIZE[problem.out_dtype] > ITEMSIZE[problem.dtype]:
        config = None  # the conversion of a wider chunk would not fit in shared memory
    vec, unaligned = geometry(problem)
    num_warps = max(1, (TWO_PASS_WARPS if config is None else config.num_warps) * 32 // device.warp_size)
    vectors = num_warps * device.warp_size * (problem.full_vec // vec)
    # 16-bit rows element by element: four chunks of two tensors spill at 255 registers
    chunks = TWO_PASS_CHUNKS // 2 if vec < problem.full_vec == 8 else TWO_PASS_CHUNKS
    ctas = device.max_cluster if problem.n_cols >= device.max_cluster * vectors * vec * chunks else 1
    warps_reduce_separately = ctas > 1 and vec == problem.full_vec and problem.dtype == problem.out_dtype
    shortest = _shortest(problem.n_cols // vec if unaligned else -(-problem.n_cols // vec), ctas, unaligned)
    resident, prefetched, max_registers, also = 0, None, None, ""
    if warps_reduce_separately and config is not None and config.resident_chunks * vectors <= shortest:
        # the head and tail of an unaligned row take room too, where registers are capped
        resident = config.resident_chunks - (unaligned and config.max_registers is not None)
        prefetched, chunks = config.prefetched_chunks if problem.log else None, config.step
        max_registers = config.max_registers
        also = f", except {resident} resident vector(s) per thread"
    why = f"the row does not fit on chip: {ctas} CTA(s) read it twice in steps{also}"
    warps_per_row = num_warps if warps_reduce_separately else 1
    return Plan(
        "two_pass", 1, ctas, warps_per_row, vectors, vec, chunks, 0, unaligned, False, num_warps, max_registers, why,
        prefetched, resident,
    )  # fmt: skip


def steps_plan(problem: Problem, device: Device, ctas: int, warps: int, most: int, why: str) -> Plan:
    """The plan of rows that `ctas` programs read in steps of at most `most` chunks and do not hold.

    The steps divide the row evenly, so that few threads of the last one have no column.
    """
    num_warps, vectors, units = _step_geometry(problem, device, warps)
    steps = -(-units // (ctas * vectors * most))
    return _stepped(problem, ctas, num_warps, vectors, -(-units // (ctas * vectors * steps)), why)


def looped_steps_plan(
    problem: Problem, device: Device, ctas: int, warps: int, fewest: int, most: int, why: str
) -> Plan:
    """`steps_plan` of a reduction, whose last step is shorter where few columns are left (`online_reduction`).

    Of `fewest` to `most` chunks per step, those with the least work: chunks, empty ones too, and half a chunk
    for each step.
    """
    num_warps, vectors, units = _step_geometry(problem, device, warps)
    slice_units = -(-units // ctas)

    def work(chunks: int) -> float:
        few = -(-chunks // 4)
        whole = slice_units // (chunks * vectors)
        rest = -(-(slice_units - whole * chunks * vectors) // vectors)  # chunks
        last = 0 if not rest else few if rest <= few else chunks
        return whole * chunks + last + 0.5 * (whole + (last > 0))

    fewest = min(fewest, -(-slice_units // vectors))
    return _stepped(problem, ctas, num_warps, vectors, min(range(most, fewest - 1, -1), key=work), why)


def _step_geometry(problem: Problem, device: Device, warps: int) -> tuple[int, int, int]:
    """Warps of a program, vectors of a chunk, vectors of a row."""
    vec, unaligned = geometry(problem)
    num_warps = max(1, warps * 32 // device.warp_size)
    units = max(1, problem.n_cols // vec if unaligned else -(-problem.n_cols // vec))
    return num_warps, num_warps * device.warp_size * (problem.full_vec // vec), units


def _stepped(problem: Problem, ctas: int, num_warps: int, vectors: int, chunks: int, why: str) -> Plan:
    vec, unaligned = geometry(problem)
    return Plan("two_pass", 1, ctas, 1, vectors, vec, chunks, 0, unaligned, False, num_warps, None, why)


def _fits(problem: Problem, config: KernelConfig, chunks: int, recompute: bool, device: Device) -> bool:
    """Whether a thread's registers hold its columns and the arithmetic; the numbers are from cross-compiling."""
    itemsize = ITEMSIZE[problem.dtype]
    registers = problem.full_vec * itemsize // 4 * (2 if itemsize == 2 and not recompute else 1)
    if geometry(problem)[0] < problem.full_vec == 8:
        registers += 6  # 16-bit rows element by element: 10 to 13 registers per chunk
    tiles = chunks * (2 if problem.backward else 1)
    if problem.backward and problem.log and config.prefetched_chunks is not None:
        tiles = chunks + min(chunks, config.prefetched_chunks)
    needed = tiles * registers + 28
    return chunks <= MAX_CHUNKS and needed <= min(255, device.registers // (config.num_warps * 32) // 8 * 8)


def _conversion_bytes(problem: Problem, columns: int) -> int:
    """Bytes of shared memory for the layout conversion of a chunk from 16-bit vectors to float32 ones.

    Triton 3.6 and 3.7 give each CTA of a cluster room for the whole cluster's chunk: 256 KB for 16 CTAs of 16 warps.
    """
    return 4 * columns if ITEMSIZE[problem.out_dtype] > ITEMSIZE[problem.dtype] else 0


def _round_chunks(chunks: int, odd: int) -> int:
    """`chunks`, rounded so that widths share kernels: steps of 2 above 9, except from 13 to `odd`."""
    return chunks if chunks <= 9 or 13 <= chunks <= odd else -(-chunks // 2) * 2


def unpredicated_chunks_of(
    units: int, ctas: int, vectors: int, chunks: int, unaligned: bool, backward: bool = False
) -> int:
    """Chunks that lie inside every slice: all where powers of two divide the row so, else all except the last two.

    Or three, where the number of chunks was rounded up and the last slice is shorter. An unaligned row of n columns has
    n//vec or one vector fewer between head and tail, and the last slice is the shortest. Long gradients keep two
    predicates that they do not need. Without them the compiler orders their loads so that they are slower.
    """
    if backward and chunks >= 8:
        unaligned = True
    if not unaligned and units == ctas * vectors * chunks and chunks in (1, 2, 3, 4, 8, 16):  # widths share kernels
        return chunks
    shortest = _shortest(units, ctas, unaligned)
    return next((n for n in (chunks - 2, chunks - 3) if n > 0 and shortest >= n * vectors), 0)


def _shortest(units: int, ctas: int, unaligned: bool) -> int:
    """Vectors of the row's shortest slice, the last. An unaligned row may have one less between head and tail."""
    return min(u - (ctas - 1) * -(-u // ctas) for u in ((units, units - 1) if unaligned else (units,)))
