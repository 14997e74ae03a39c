"""SpatialProblem + Device -> Plan: how a softmax over a dimension that is not the last is run. Pure Python, no I/O.

The tensor is (outer, n_cols, inner), and each of the outer x inner positions is a softmax. A plan sees n_cols, inner,
the widest dtype, alignment and device, never `outer`; within batch_invariant() what decides a position's bits does not
depend on `inner` either. In a Plan, `rows` are the positions of a tile, and `vectors_per_chunk` the columns of a chunk.
Columns may have tiles of their own (`lean_tiles`, `overlapping_tiles`, `short_planes`, `skewed_tiles`), small planes
(n_cols, inner) may be faster as pieces of memory (`planes`), and columns that are read twice in bundles
(`bundled_columns`). `softmax_plan` in `launch/spatial.py` asks all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .spatial_tables import (
    BUNDLED_GRADIENT,
    CYCLES_PER_KIB,
    FEW_CHUNKS,
    FEW_COLS,
    FEW_REGISTERS,
    FEW_TILES,
    FEW_WARPS,
    FEWEST,
    HALF_COLS,
    HALF_POSITIONS,
    HALF_RUN,
    HALVES_GRADIENT,
    LEAST_FEW,
    LEAST_RUN,
    LOG_GRADIENT,
    LONG,
    MORE_STAGED,
    MOST_FEW,
    MOST_PART_COLS,
    MOST_PARTS,
    MOST_SINGLE,
    NARROW,
    NARROW_PARTS,
    NARROW_POSITIONS,
    ON_CHIP,
    PART_VECTORS,
    PARTLY_ALIGNED_PARTS,
    PARTS,
    SKEWED_COLS,
    SKEWED_REGISTERS,
    SOFTMAX_PARTS,
    STAGGERED_BYTES,
    STAGGERED_CAP,
    STAGGERED_FITTING,
    STAGGERED_POSITIONS,
    STAGGERED_SKEWED,
    STAGGERED_WARPS,
    UNALIGNED,
    UNALIGNED_PARTS,
    UNALIGNED_POSITIONS,
    WHOLE_RUN,
    PartsTile,
    RunRule,
    SpatialConfig,
)
from .types import (
    FILLED,
    MULTIPROCESSORS,
    VECTOR_BYTES,
    Device,
    Plan,
    SpatialProblem,
    bundles_of,
    chunks_that_fit,
    merging_bytes,
    power_of_two,
)


def resident_plan(
    problem: SpatialProblem, device: Device, inner: int, cols: int, num_warps: int, ctas: int = 1,
    recompute: bool = False, max_registers: int | None = None, thread_bytes: int = VECTOR_BYTES, staged: int = 0,
    skewed: int = 0, overlaps: bool = False, together: bool = False,
) -> Plan:  # fmt: skip
    """The plan of tiles of `inner` positions and chunks of `cols` columns, or of `cols` for each CTA of a cluster.

    A thread holds thread_bytes of a chunk. Where a chunk has fewer, a program takes several indices of `outer`. The
    first `staged` chunks are in shared memory. skewed, overlaps: of a SpatialConfig. together: the columns of a
    tile start at multiples of `skewed`, so that it shares no position with the next one.
    """
    elements = num_warps * device.warp_size * thread_bytes // problem.itemsize
    outers = max(1, elements // (inner * cols)) if ctas == 1 else 1
    chunks = -(-problem.n_cols // (cols * ctas))
    where = f"the {ctas} CTAs of a cluster" if ctas > 1 else "one program"
    tile = "an overlapping tile of " if overlaps else "a skewed tile of " if skewed and not together else ""
    why = f"the columns of {tile}{inner} position(s) stay in {where}, in {chunks} chunk(s) of {cols * ctas} columns"
    unit, of_a_thread = skewed // problem.itemsize, thread_bytes // problem.itemsize
    overlap = problem.sector - problem.vec if overlaps else 0 if together else problem.overlap_of(unit)
    return Plan(
        "spatial" if ctas == 1 else "spatial_cluster", rows=inner, ctas=ctas, warps_per_row=1, vectors_per_chunk=cols,
        vec=of_a_thread if skewed or overlaps or staged else min(problem.vec, inner), chunks=chunks,
        unpredicated_chunks=0 if skewed else problem.n_cols // (cols * ctas),
        unaligned=False, recompute=recompute, num_warps=num_warps, max_registers=max_registers, why=why, outers=outers,
        smem_staged=staged, invariant=problem.batch_invariant, skewed=unit, overlap=overlap,
    )  # fmt: skip


def parts_plan(problem: SpatialProblem, device: Device, tile: PartsTile = PARTS) -> Plan:
    """The plan of columns that programs reduce in parts, merge, and read again.

    Within batch_invariant() the parts depend on n_cols alone.
    """
    widest = tile.n_bytes // problem.itemsize
    inner = _filled_tile(problem, tile.n_bytes)
    a_warp = device.warp_size * problem.full_vec
    warps = max(1, tile.num_warps * 32 // device.warp_size)
    if problem.batch_invariant:  # the columns of a chunk do not depend on `inner`
        cols = max(1, warps * a_warp // widest)
        warps = max(1, min(warps, cols * inner // a_warp))
    else:
        cols = max(1, warps * a_warp // inner)
    step = cols * tile.chunks
    if problem.batch_invariant:
        steps = -(-MOST_PART_COLS // step)
    else:
        of_programs = -(-problem.inner // inner) * problem.n_cols // tile.programs
        steps = tile.steps or max(tile.least_cols, min(of_programs, MOST_PART_COLS)) // step
    steps = max(1, steps, -(-problem.n_cols // (MOST_PARTS * step)))
    part_cols = min(steps, -(-problem.n_cols // step)) * step
    parts = -(-problem.n_cols // part_cols)
    why = f"the columns do not fit on chip: they are read twice, and reduced in {parts} part(s)"
    return Plan(
        "spatial_two_pass", rows=inner, ctas=1, warps_per_row=1, vectors_per_chunk=cols, vec=min(problem.vec, inner),
        chunks=tile.chunks, unpredicated_chunks=0, unaligned=False, recompute=False, num_warps=warps,
        max_registers=None, why=why, part_cols=part_cols, invariant=problem.batch_invariant,
        finish_chunks=tile.finish_chunks,
        finish_rows=_filled_tile(problem, tile.finish_bytes) if tile.finish_bytes else 0,
    )  # fmt: skip


def _filled_tile(problem: SpatialProblem, n_bytes: int) -> int:
    """The positions of a tile of at most n_bytes: fewer, down to those of PARTS, where tiles would be partly empty."""
    inner = min(power_of_two(problem.inner), n_bytes // problem.itemsize)
    while inner > PARTS.n_bytes // problem.itemsize and padded(problem, inner) > 1.5 * problem.inner:
        inner //= 2
    return inner


def bundled_plan(problem: SpatialProblem, device: Device, bundle: int) -> Plan:
    """The plan of columns that are read twice, `bundle` of them as one (`bundled_columns`).

    >>> planes = SpatialProblem(400000, 5, "bfloat16", 1, packed=True)
    >>> bundled_plan(planes, DEVICES["sm_90"], 48).vec
    8
    """
    n_bundles = bundles_of(problem.n_cols, problem.period, bundle)
    bundles = replace(problem, n_cols=n_bundles, inner=bundle * problem.inner, vec=problem.full_vec)
    found = parts_plan(bundles, device, _parts_tile(bundles, bundled=True))
    parts = -(-n_bundles // found.part_cols)
    why = f"the columns are read twice, {bundle} of them as one, and reduced in {parts} part(s)"
    return replace(found, bundle=bundle, part_cols=bundle * found.part_cols, why=why)


def padded(problem: SpatialProblem, inner: int) -> int:
    """Positions, in whole tiles of `inner`."""
    return -(-problem.inner // inner) * inner


def narrowed(problem: SpatialProblem, inner: int) -> int:
    """The positions of a tile of `inner`, or of a narrower one that is filled much better."""
    while inner > 32 and padded(problem, inner // 2) < 0.85 * padded(problem, inner):
        inner //= 2
    return inner


def _in_chunks(problem: SpatialProblem, cols: int) -> int:
    """Columns, in whole chunks of `cols`."""
    return -(-problem.n_cols // cols) * cols


def _takes_half_threads(problem: SpatialProblem, config: SpatialConfig) -> bool:
    """Whether a thread is to have 8 bytes of a chunk: a 16-bit softmax of few positions and few columns."""
    few = power_of_two(problem.inner) <= HALF_POSITIONS and problem.n_cols <= HALF_COLS
    return few and config.ctas == 1 and problem.itemsize == 2 and not (problem.backward or problem.batch_invariant)


def _longer_run(problem: SpatialProblem, cols: int, inner: int, per_chunk: int, run: RunRule) -> int:
    """Columns of a chunk, doubled until so many bytes of it follow one another in memory as `run` says."""
    while 2 * cols * inner <= per_chunk:
        chunks, n_bytes = -(-problem.n_cols // cols), cols * inner * problem.itemsize
        longer = n_bytes < run.least_bytes or (chunks > run.most_chunks and n_bytes < LEAST_RUN)
        filled = _in_chunks(problem, 2 * cols) <= 1.2 * problem.n_cols
        if not (longer and filled and -(-problem.n_cols // (2 * cols)) >= run.least_chunks):
            break
        cols *= 2
    return cols


def _cols_of_few(problem: SpatialProblem, cols: int, inner: int, per_chunk: int, run: RunRule) -> int:
    """Columns of a chunk of few positions that has no more of them than `run` asks for. cols: those of its config."""
    wanted = power_of_two(-(-problem.n_cols // run.most_chunks))
    longest = max(1, min(wanted, LEAST_RUN // (inner * problem.itemsize)))
    if -(-problem.n_cols // longest) > run.most_chunks:
        return min(wanted, max(longest, cols))
    return _longer_run(problem, longest, inner, per_chunk, run)


def tiles_plan(
    problem: SpatialProblem, device: Device, config: SpatialConfig, few: RunRule | None = None, halves: bool = False
) -> Plan:
    """The plan of tiles as `config` says, with fewer positions where `inner` has fewer.

    few: of a loss, which has fewer columns in a chunk where positions are few.
    halves: whether threads may have 8 bytes of a chunk where `config` says more.
    """
    halves = halves and _takes_half_threads(problem, config)
    if halves:
        config = config._replace(thread_bytes=VECTOR_BYTES // 2)
    warps = max(1, config.num_warps * 32 // device.warp_size)
    cols = max(1, warps * device.warp_size * config.thread_bytes // problem.itemsize // config.inner)
    per_chunk = warps * device.warp_size * config.thread_bytes // problem.itemsize
    recompute = config.recompute and problem.itemsize == 2
    inner = min(config.inner, power_of_two(problem.inner))
    # a last block with few positions wastes the time of the others
    # (not where chunks are staged: a program of several indices of `outer` stages those of one)
    if config.ctas == 1 and config.held is None and not (config.skewed or config.overlaps):
        inner = narrowed(problem, inner)
    # few positions: columns are neighbors in memory, and a chunk of more of them is a longer run
    if config.ctas == 1 and not problem.batch_invariant:
        if few and inner <= NARROW:
            cols = _cols_of_few(problem, cols, inner, per_chunk, few)
        else:
            cols = _longer_run(problem, cols, inner, per_chunk, HALF_RUN if halves else WHOLE_RUN)
    # warps of a program wait for each other, so that it has one of them where that holds whole columns
    if config.ctas == 1 and inner <= NARROW:
        warps = max(1, warps * cols * inner // per_chunk)
    staged = 0
    if config.held is not None:
        other = 0
        if config.skewed:  # those of each element of a chunk, and a gap after each 16 positions
            other = 8 * (cols * inner + config.skewed // problem.itemsize + inner // 16)
        room = chunks_that_fit(warps * device.warp_size * config.thread_bytes, config.ctas, warps, inner, other)
        most = room if config.most_staged is None else min(room, config.most_staged)
        staged = min(max(0, -(-problem.n_cols // (cols * config.ctas)) - config.held), most)
        recompute = recompute or staged > 0  # a chunk that is read a second time is not kept
    registers = config.max_registers
    if config.skewed and registers is None:
        held = problem.words(cols * config.ctas, config.thread_bytes) - staged * config.thread_bytes // 4
        registers = next(cap for most, cap in SKEWED_REGISTERS[problem.backward, config.num_warps] if held <= most)
    return resident_plan(
        problem, device, inner, cols, warps, config.ctas, recompute, registers, config.thread_bytes, staged,
        config.skewed, config.overlaps,
    )  # fmt: skip


def staggered(plan: Plan, problem: SpatialProblem, device: Device) -> Plan:
    """`plan`, whose programs start one after the other where that is faster (`kernels.common.staggered_start`).

    How many fit follows from the cap on registers, and from the shared memory of staged chunks and of merges. A kernel
    that takes fewer registers than its cap may have one more program, which starts with the first.
    """
    wide = plan.rows > STAGGERED_POSITIONS and plan.overlap == 0
    few = plan.rows < (32 if plan.ctas == 1 else 16)  # not measured
    if plan.max_registers is None or wide or few or not device.staggers:
        return plan
    itemsize, of_device = problem.itemsize, MULTIPROCESSORS[device.name]
    chunk = plan.vectors_per_chunk * plan.rows * itemsize
    n_bytes = (1 + problem.backward) * plan.chunks * chunk
    shared = plan.smem_staged * chunk + merging_bytes(plan.ctas, plan.num_warps, plan.rows) + of_device.shared_reserved
    threads = plan.num_warps * device.warp_size
    fitting = min(of_device.registers // (plan.max_registers * threads), of_device.shared // shared)
    if plan.skewed:
        gains = itemsize == 2 and not problem.log and plan.max_registers == STAGGERED_CAP
        least = STAGGERED_SKEWED.get((problem.backward, plan.rows, plan.ctas, plan.num_warps))
    else:
        warps = plan.ctas * plan.num_warps
        gains = fitting <= STAGGERED_FITTING if problem.backward else warps <= STAGGERED_WARPS[itemsize]
        least = STAGGERED_BYTES[problem.backward, itemsize]
    if not gains or least is None or n_bytes < least:
        return plan
    why = f"{plan.why}; programs start one after the other"
    return replace(plan, stagger=CYCLES_PER_KIB * n_bytes >> 10, fitting=fitting, why=why)


Table = tuple[SpatialConfig, ...]


def configs_of(
    problem: SpatialProblem, device: Device, table: Table, unaligned_table: Table = (), softmax: bool = False,
    first: Table = (),
) -> Iterator[SpatialConfig]:  # fmt: skip
    """The configs whose tiles hold the columns, best first: those of `first` in front of all others.

    softmax: of a softmax or its gradient, not of a loss.
    """
    unaligned = problem.vec < problem.full_vec // 2 and not problem.batch_invariant
    staged = device.supports_smem_staging
    skewed = problem.in_phase and device.kind != "hip"
    halves = problem.in_phase and problem.vec == problem.full_vec and not problem.whole_sectors

    def fills_tiles(config: SpatialConfig) -> bool:
        # whole tiles have few positions beyond the tensor, or it has at least four of them
        plain = softmax and problem.inner > config.inner and not (config.skewed or config.overlaps)
        filled = plain and padded(problem, config.inner) <= FILLED * problem.inner
        return filled or problem.inner >= 4 * config.inner

    def fits(config: SpatialConfig) -> bool:
        # tiles of such configs are wide, and they merge in an order of their own
        overlaps = config.skewed > 0 or config.overlaps
        special = config.ctas > 1 or config.whole_sectors is not None or config.held is not None or overlaps
        return (
            config.least_cols <= problem.n_cols <= config.max_cols
            and (not special or (fills_tiles(config) and not problem.batch_invariant))
            and (config.ctas == 1 or device.max_cluster >= config.ctas)
            and (config.held is None or (staged and (config.skewed > 0 or problem.vec == problem.full_vec)))
            and (not config.skewed or skewed)
            and (not config.overlaps or halves)
            and config.whole_sectors in (None, problem.whole_sectors)
        )

    yield from filter(fits, first)
    if unaligned:
        yield from filter(fits, unaligned_table)
    elif problem.vec < problem.full_vec and problem.n_cols >= SKEWED_COLS[problem.itemsize]:
        yield from (config for config in unaligned_table if config.skewed and fits(config))
    # elements that are read one by one take more registers
    yield from (config for config in table if fits(config) and not (unaligned and config.ctas > 1))


def on_chip(problem: SpatialProblem, device: Device, part_vectors: bool = True) -> Iterator[SpatialConfig]:
    """The configs of a softmax or a gradient, best first. part_vectors: with those of PART_VECTORS."""
    kind = problem.backward, problem.itemsize
    if problem.inner >= LEAST_FEW and (few := few_positions(problem, device)) is not None:
        yield few
    first = PART_VECTORS.get((*kind, problem.vec), ()) if part_vectors else ()
    yield from configs_of(problem, device, ON_CHIP[kind], UNALIGNED[kind], softmax=True, first=first)


def few_positions(problem: SpatialProblem, device: Device) -> SpatialConfig | None:
    """The config of few positions and many columns; or None.

    A tile of all positions is one piece of memory, so it is taken where they are up to 64 and CTAs hold its columns.
    The columns are on as few CTAs as hold them in FEW_CHUNKS, in registers and then in shared memory.
    """
    few = FEWEST <= problem.inner <= MOST_FEW and problem.n_cols > FEW_COLS
    if not (few and problem.vec == problem.full_vec and problem.may_have_tiles(device)):
        return None
    for inner in dict.fromkeys(min(width, power_of_two(problem.inner)) for width in FEW_TILES):
        several = problem.inner > inner
        halves = several and not problem.whole_sectors
        if halves and inner * problem.itemsize < 64:
            break
        found = _on_ctas(problem, device, inner, several, halves)
        if found is not None:
            return found
    return None


def _on_ctas(problem: SpatialProblem, device: Device, inner: int, several: bool, halves: bool) -> SpatialConfig | None:
    """The config of tiles of `inner` positions; None where a cluster cannot hold the columns."""
    cols = FEW_WARPS * device.warp_size * problem.full_vec // inner
    most, fewer = FEW_CHUNKS[problem.backward]
    wanted = fewer if halves or (several and problem.backward) else most
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


def _long_and_narrow(problem: SpatialProblem, device: Device) -> Plan | None:
    """The plan of so few positions that one program's tile holds more columns than the tables say; or None."""
    inner = power_of_two(problem.inner)
    elements, single = problem.n_cols * inner, problem.vec < problem.full_vec // 2
    if single and elements > MOST_SINGLE:
        return None
    for tile in LONG[problem.backward, problem.itemsize]:
        if inner < tile.inner and elements <= tile.elements:
            warps = max(1, tile.num_warps * 32 // device.warp_size)
            cols = warps * device.warp_size * problem.full_vec // inner
            recompute = tile.recompute and problem.itemsize == 2
            return resident_plan(problem, device, inner, cols, warps, 1, recompute, tile.max_registers)
    return None


def _resident_plans(problem: SpatialProblem, device: Device) -> Iterator[Plan]:
    """The plans that keep the columns on chip, best first."""
    yield from (tiles_plan(problem, device, config, halves=True) for config in on_chip(problem, device))
    if problem.batch_invariant:
        return
    if (found := _long_and_narrow(problem, device)) is not None:
        yield found
    if (few := few_positions(problem, device)) is not None:
        yield tiles_plan(problem, device, few)


def plan_spatial(problem: SpatialProblem, device: Device, regime: str | None = None) -> Plan:
    """The plan for `problem` on `device`; `regime` forces one (ValueError where it cannot hold such columns).

    >>> plan_spatial(SpatialProblem(19, 4096, "bfloat16", vec=8), DEVICES["sm_90"]).regime
    'spatial'
    """
    found = None
    if regime != "spatial_two_pass":
        plans = _resident_plans(problem, device)
        found = next((plan for plan in plans if regime in (None, plan.regime)), None)
    if found is None and regime not in (None, "spatial_two_pass"):
        what = f"{problem.n_cols} columns of {problem.dtype}"
        raise ValueError(f"the {regime} regime cannot hold {what} on {device.name}")
    if found is not None:
        return staggered(found, problem, device)
    return parts_plan(problem, device, _parts_tile(problem))


def cropped_plan(problem: SpatialProblem, device: Device) -> Plan | None:
    """The plan of a softmax whose positions are rows that lie apart: tiles that stage nothing; None for more columns.

    >>> cropped_plan(SpatialProblem(19, 4000, "bfloat16", vec=4), DEVICES["sm_90"]).regime
    'spatial'
    """
    found = next((plan for plan in _resident_plans(problem, device) if not plan.smem_staged), None)
    return None if found is None else staggered(found, problem, device)


def _parts_tile(problem: SpatialProblem, bundled: bool = False) -> PartsTile:
    """The tile of a softmax or a gradient whose columns, or bundles, are read twice."""
    # the number of chunks decides a position's bits, which within batch_invariant() do not depend on `inner`
    if problem.batch_invariant:
        return PARTS
    kind = problem.backward, problem.itemsize
    if problem.vec < problem.full_vec:
        if problem.inner >= UNALIGNED_POSITIONS:
            partly = kind == (True, 2) and problem.vec > 1
            return PARTLY_ALIGNED_PARTS if partly else UNALIGNED_PARTS[problem.itemsize]
        return NARROW_PARTS if problem.inner <= NARROW_POSITIONS and kind != (True, 2) else PARTS
    if problem.backward and problem.log:
        return LOG_GRADIENT[problem.itemsize]
    if kind == (True, 2) and bundled:
        return BUNDLED_GRADIENT
    return HALVES_GRADIENT if kind == (True, 2) and not problem.whole_sectors else SOFTMAX_PARTS[kind]
