"""The planners' inputs, Device and Problem, their answer, Plan, and the hardware table. Pure Python, no I/O.

docs/measurements/thresholds.md has the figures behind the thresholds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

REGIMES = ("warp", "block", "cluster", "two_pass")
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
VECTOR_BYTES, SECTOR_BYTES = 16, 32
ENOUGH_TILES = 4  # from so many on, a last one that is partly empty costs little
# narrower tiles read so many positions twice that there are at least ENOUGH_TILES of them
LEAST_FILLED = 64
WIDE_POSITIONS = 128  # of a tile
# positions of whole tiles over those that exist, at most, where positions are fewer than four tiles
FILLED = 1.15


@dataclass(frozen=True)
class Device:
    """A device as a planner sees it. `launch.device` finds it; tests name one of DEVICES."""

    name: str
    kind: str  # "cuda", "hip" or "interpreter"
    warp_size: int = 32
    max_warps: int = 32  # of one program
    registers: int = 65536  # of one multiprocessor, 32 bits each
    max_cluster: int = 1  # CTAs in a thread-block cluster; 1: none
    supports_smem_staging: bool = False  # of chunks of a row: Hopper, where it is measured
    captures_pdl: bool = True  # whether its driver captures a kernel that starts early in a CUDA graph

    @property
    def ptx(self) -> bool:
        """Whether kernels may use inline PTX."""
        return self.kind == "cuda"

    @property
    def staggers(self) -> bool:
        """Whether programs may start one after the other: Hopper, as measured on an H200 and an H100."""
        return self.ptx and self.supports_smem_staging

    @property
    def adds_shared_memory(self) -> bool:
        """Whether launches add shared memory for large planes, or share them: Hopper, as measured on an H100."""
        return self.supports_smem_staging or self.kind == "interpreter"

    @property
    def copies_in_bulk(self) -> bool:
        """Whether one thread may copy any piece of shared memory to memory (cp.async.bulk): sm_90 and later."""
        return self.kind == "cuda" and self.max_cluster > 1

    @property
    def supports_pdl(self) -> bool:
        """Whether a kernel may start before the previous one of its stream ends: programmatic dependent launch."""
        return self.kind == "cuda" and self.max_cluster > 1 and self.captures_pdl

    def registers_within(self, cap: int, num_warps: int) -> int:
        """A register cap that was measured on Hopper, for this device.

        Caps are as low as spills nothing on sm_90, so that one program more shares a multiprocessor. ptxas needs other
        numbers of registers elsewhere. There the cap leaves room for one program less, or for fewer where that loosens
        it, as registers come in units of 8. A thread has at most 255.
        """
        if self.supports_smem_staging:
            return cap
        threads = num_warps * self.warp_size
        fewer = range(max(1, self.registers // (cap * threads) - 1), 0, -1)
        caps = (min(255, self.registers // (programs * threads) // 8 * 8) for programs in fewer)
        return next((looser for looser in caps if looser > cap), cap)

    def options(self, num_stages: int | None = None) -> dict[str, Any]:
        """The launch options whose defaults may differ between versions of Triton; empty where interpreted.

        enable_fp_fusion: the multiply-adds of exp(x - m), off by default from Triton 3.10 on. num_stages: of loops;
        None: the backend's default at the time of the measurements.
        """
        if self.kind == "interpreter":
            return {}
        return {"enable_fp_fusion": True, "num_stages": num_stages or (3 if self.kind == "cuda" else 2)}


def looser_cap(cap: int, num_warps: int) -> int | None:
    """The next looser cap on the registers of a thread, on any CUDA device; None where there is none.

    All registers that as many programs leave on a multiprocessor, or fewer. Programs of few warps take the steps of
    four warps, because each cap that is tried is a compilation.

    >>> looser_cap(96, 4), looser_cap(112, 4), looser_cap(80, 1), looser_cap(128, 16)
    (128, 128, 96, None)
    """
    registers, threads = Device.registers, max(4, num_warps) * Device.warp_size
    programs = range(registers // (cap * threads), 0, -1)
    caps = (min(255, registers // (n * threads) // 8 * 8) for n in programs)
    return next((looser for looser in caps if looser > cap), None)


def cuda_device(major: int, minor: int) -> Device:
    """The Device of a CUDA compute capability, at least 8.0."""
    max_cluster = {9: 16, 10: 16}.get(major, 8 if major > 8 else 1)
    return Device(f"sm_{major}{minor}", "cuda", max_cluster=max_cluster, supports_smem_staging=major == 9)


def hip_device(name: str) -> Device:
    """The Device of an AMD GPU with wavefronts of 64."""
    return Device(name, "hip", warp_size=64, max_warps=16, registers=131072)


class Multiprocessor(NamedTuple):
    """One multiprocessor (SM or CU): the resources that its resident programs share. Bytes, and 32-bit registers."""

    count: int  # type: ignore[assignment]  # multiprocessors of the device; not a tuple's method
    registers: int
    register_unit: int  # a warp's registers are allocated in multiples of this
    shared: int
    shared_per_program: int  # the most that one program may ask for
    shared_reserved: int  # taken by the system from each program's share
    warps: int
    programs: int
    warp_size: int = 32


def _hardware() -> Iterator[tuple[Device, Multiprocessor]]:
    """The hardware table: one row for each target that plans and cross-compiled kernels are checked for.

    Source: CUDA C++ programming guide, "Compute Capabilities"; AMD Instinct MI300 instruction set architecture guide.
    """
    rows = (
        # device, multiprocessors, register unit, KiB of shared memory (all; one program's), reserved, warps, programs
        (cuda_device(8, 0), 108, 256, 164, 163, 1024, 64, 32),  # A100
        (cuda_device(8, 9), 142, 256, 100, 99, 1024, 48, 24),  # L40S
        (cuda_device(9, 0), 132, 256, 228, 227, 1024, 64, 32),  # H200
        (cuda_device(10, 0), 148, 256, 228, 227, 1024, 64, 32),  # B200
        (cuda_device(12, 0), 170, 256, 100, 99, 1024, 48, 24),  # RTX 5090
        (hip_device("gfx942"), 304, 512, 64, 64, 0, 32, 32),  # MI300X
    )
    for device, count, unit, shared, most, reserved, warps, programs in rows:
        of_program = (shared << 10, most << 10, reserved, warps, programs)
        yield device, Multiprocessor(count, device.registers, unit, *of_program, device.warp_size)


_HARDWARE = {device.name: (device, multiprocessor) for device, multiprocessor in _hardware()}
MULTIPROCESSORS: Mapping[str, Multiprocessor] = MappingProxyType({name: row[1] for name, row in _HARDWARE.items()})
# the interpreter runs the kernels of the richest device, with cluster reductions in plain Triton
DEVICES = {name: row[0] for name, row in _HARDWARE.items()}
DEVICES["interpreter"] = Device("interpreter", "interpreter", max_cluster=16)


@dataclass(frozen=True)
class Problem:
    """One row-wise operation, without its number of rows.

    vec: every row of every tensor starts at a multiple of so many elements (a power of two, at most 16 bytes of the
    narrowest dtype). in_phase: rows start anywhere, but the rows of all tensors start at the same distance from a
    16-byte boundary, so that each row can be read and written in vectors, except its head and tail. packed: all tensors
    have one dtype, and in each one the rows follow each other without a gap.
    """

    n_cols: int
    dtype: str
    out_dtype: str
    vec: int
    in_phase: bool = False
    backward: bool = False
    log: bool = False
    packed: bool = False

    @property
    def full_vec(self) -> int:
        return VECTOR_BYTES // min(ITEMSIZE[self.dtype], ITEMSIZE[self.out_dtype])

    @property
    def itemsize(self) -> int:
        """Bytes of the narrowest element."""
        return VECTOR_BYTES // self.full_vec


@dataclass(frozen=True)
class SpatialProblem:
    """One softmax over n_cols of a tensor (outer, n_cols, inner), without `outer`.

    dtype: of the widest tensor, so that a cast is planned as float32 is, without `packed` and `in_phase`. vec: every
    run of `inner` elements of every tensor starts at a multiple of so many elements (a power of two, at most 16 bytes
    of `dtype`). whole_sectors: every run of the output starts at a multiple of 32 bytes. in_phase: tiles that are
    skewed or overlap, and those of a loss that shares factors, may hold the tensors, because their runs start at the
    same distances from a 16-byte boundary, and the output has memory of its own. packed: all tensors have one dtype,
    start at multiples of 16 bytes, and have no gaps.
    """

    n_cols: int
    inner: int
    dtype: str
    vec: int
    backward: bool = False
    log: bool = False
    batch_invariant: bool = False
    whole_sectors: bool = True
    in_phase: bool = False
    packed: bool = False

    @property
    def full_vec(self) -> int:
        return VECTOR_BYTES // self.itemsize

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEMSIZE[self.dtype]

    @property
    def plane_bytes(self) -> int:
        """Bytes of one index of `outer`."""
        return self.n_cols * self.inner * self.itemsize

    @property
    def sector(self) -> int:
        """Elements of 32 bytes of memory."""
        return SECTOR_BYTES // self.itemsize

    @property
    def starts(self) -> int:
        """Elements at whose multiples the columns of every tensor start, up to a sector.

        >>> SpatialProblem(1500, 192, "bfloat16", 1).starts  # an input with gaps, whatever the output has
        1
        """
        return self.sector if self.whole_sectors and self.vec == self.full_vec else self.vec

    @property
    def period(self) -> int:
        """The columns after which runs start at multiples of 32 bytes again: a power of two, up to 16.

        >>> SpatialProblem(30000, 12, "bfloat16", 4, packed=True).period
        4
        """
        return period_of(self.inner, self.itemsize)

    def overlap_of(self, unit: int) -> int:
        """Positions that a skewed tile, whose columns start at multiples of `unit`, shares with the next one."""
        return unit if 2 * self.vec >= unit else 2 * unit

    def words(self, cols: int, thread_bytes: int) -> int:
        """Words of 4 bytes that a thread has of the columns, where it has thread_bytes of each chunk of `cols`."""
        return (1 + self.backward) * -(-self.n_cols // cols) * thread_bytes // 4

    def fewest_ctas(
        self, threads: int, positions: int, thread_bytes: int, most_words: int, most_ctas: int
    ) -> tuple[int, int] | None:
        """The fewest CTAs of so many threads that hold the columns in so few words each, and these words; else None.

        positions: of a tile. thread_bytes: of a thread in a chunk.
        """
        cols = threads * thread_bytes // self.itemsize // positions  # that a CTA has of a chunk
        for ctas in (1, 2, 4, 8, 16):
            words = self.words(cols * ctas, thread_bytes)
            if words <= most_words and ctas <= most_ctas:
                return ctas, words
        return None

    def shared_by(self, unit: int = 0) -> int:
        """Positions that a tile shares with the next one. unit: as of `fills`; 0: overlapping tiles, or plain ones."""
        return self.overlap_of(unit) if unit else self.sector - self.starts

    def fills(self, positions: int, unit: int = 0) -> bool:
        """Whether whole tiles of so many positions have few more than exist, or the tensor has some tiles anyway.

        unit: positions at whose multiples the columns of skewed tiles start; 0: tiles are not skewed.
        """
        if self.inner >= ENOUGH_TILES * positions:
            return True
        if self.inner <= positions or positions < LEAST_FILLED:
            return False
        overlap = self.shared_by(unit)
        return tiles_of(self.inner, positions, overlap, unit) * (positions - overlap) <= FILLED * self.inner

    def may_have_tiles(self, device: Device) -> bool:
        """Whether tiles by a rule (`few_positions`, `overlapping_tiles`, `lean_tiles`) may hold it, as was measured."""
        return not self.batch_invariant and device.supports_smem_staging and device.max_cluster > 1


@dataclass(frozen=True)
class Plan:
    """How a row is run: `ctas` slices of `chunks` x `vectors_per_chunk` x `vec` columns, `rows` rows per program."""

    regime: str
    rows: int
    ctas: int
    warps_per_row: int  # segments of a CTA's slice of a row: one for each of its warps, or one
    vectors_per_chunk: int  # of a CTA's slice, over all segments
    vec: int
    chunks: int  # of a step, where the regime is two_pass
    unpredicated_chunks: int  # chunks that lie inside every slice of every row
    unaligned: bool  # rows have an unaligned head and tail
    recompute: bool  # hold the row as loaded and compute exp twice
    num_warps: int
    max_registers: int | None
    why: str
    prefetched_chunks: int | None = None  # of a gradient: chunks of y read before the row's sum is known; None: all
    resident_chunks: int = 0  # chunks of a slice that stay on chip, where the regime is two_pass
    smem_staged: int = 0  # chunks of a slice that stay in shared memory, not in registers; of a gradient: of dy
    # over a dimension that is not the last, and part_cols of statistics of wide rows, too
    outers: int = 1  # indices of the dimensions before it that a program takes
    part_cols: int = 0  # columns of the part that a program reduces, at most, where programs share the columns
    invariant: bool = False  # columns are merged in an order that no layout changes
    # UNIT of the kernels of skewed tiles, in positions: each column of a tile starts at its own multiple of so many. Of
    # a loss maybe all at the same one, and then overlap is 0. 0: of other kernels
    skewed: int = 0
    overlap: int = 0  # positions that a tile shares with the next one
    finish_rows: int = 0  # where programs share the columns: rows of one that writes, if not `rows`
    finish_chunks: int = 0  # and its chunks
    gathered: bool = False  # a program reads and writes its rows as one piece of memory
    piece: int = 0  # of that piece: the most elements, where it holds planes (n_cols, inner)
    runs: bool = False  # the chunks of a thread follow each other, where rows are gathered
    output_gathered: bool = False  # a program writes its causal rows as one piece
    stagger: int = 0  # cycles between the starts of two programs on one multiprocessor; 0: all start at once
    fitting: int = 1  # programs of a multiprocessor that wait in turn, where stagger > 0: as many as fit with the cap
    periodic: int = 0  # vectors from a thread's chunk to its next one, which positions of planes divide; 0: others
    dynamic_bytes: int = 0  # of shared memory that the launch adds, for a piece of more than a kernel declares
    unseen_chunks: int = 0  # of causal rows that are one piece: the last chunks, of which no row sees a column
    bundle: int = 0  # columns that follow one another in memory and are read as one; 0: columns are read as they are

    @property
    def after_copy(self) -> Plan:
        """This plan, of a copy of the tensor."""
        return replace(self, why=f"after a copy to contiguous memory, {self.why}")

    @property
    def finish(self) -> Plan:
        """This plan in the tile of the programs that write, where others reduce parts of the columns."""
        rows, chunks = self.finish_rows or self.rows, self.finish_chunks or self.chunks
        return replace(self, rows=rows, vectors_per_chunk=self.rows * self.vectors_per_chunk // rows, chunks=chunks)

    @property
    def fitting_planes(self) -> int:
        """Programs on a multiprocessor that hold a plane each in the shared memory that the launch adds."""
        of_device = MULTIPROCESSORS["sm_90"]
        return of_device.shared // (self.dynamic_bytes + of_device.shared_reserved)

    def filled_up(self, inner: int) -> float:
        """Positions of whole tiles over those that exist."""
        return -(-inner // self.rows) * self.rows / inner

    def constexprs(self) -> dict[str, object]:
        """The plan's compile-time arguments for any kernel, by the kernels' names; a kernel takes some of these."""
        held = self.resident_chunks if self.regime == "two_pass" else self.chunks
        prefetched = held if self.prefetched_chunks is None else min(held, self.prefetched_chunks)
        return dict(
            ROWS=self.rows, CTAS=self.ctas, WARPS_PER_ROW=self.warps_per_row,
            VECTORS=self.vectors_per_chunk // self.warps_per_row, VEC=self.vec, CHUNKS=self.chunks,
            UNPREDICATED=self.unpredicated_chunks, UNALIGNED=self.unaligned, RECOMPUTE=self.recompute,
            RESIDENT_CHUNKS=self.resident_chunks, PREFETCHED=prefetched, SMEM_STAGED=self.smem_staged,
            TWO_PASS=self.regime == "two_pass", THREADS=32 * self.num_warps, OUTPUT_GATHERED=self.output_gathered,
            RUNS=self.runs, UNSEEN=self.unseen_chunks,
        )  # fmt: skip


def power_of_two(n: int) -> int:
    """The least power of two that is at least n, and at least 1."""
    return 1 << max(0, n - 1).bit_length()


def period_of(inner: int, itemsize: int) -> int:
    """The columns after which runs of `inner` positions start at multiples of a sector again."""
    unit = SECTOR_BYTES // itemsize
    return unit // min(unit, inner & -inner)


def bundles_of(n_cols: int, period: int, bundle: int) -> int:
    """The bundles of `bundle` columns that a plane has wherever it starts: up to period - 1 columns lie in front."""
    return (n_cols - period + 1) // bundle


# bytes of a program's chunks in shared memory, at most; and of these and the numbers that its warps and CTAs exchange
# (a kernel may have 48 KB, with an mbarrier)
STAGED_BYTES, SHARED_BYTES = 40 << 10, (48 << 10) - 128


def chunks_that_fit(chunk_bytes: int, ctas: int, warps: int, inner: int, other_bytes: int = 0) -> int:
    """The most chunks in shared memory, next to the numbers that warps and CTAs exchange, and to other bytes."""
    return max(0, min(STAGED_BYTES, SHARED_BYTES - merging_bytes(ctas, warps, inner) - other_bytes)) // chunk_bytes


def merging_bytes(ctas: int, warps: int, inner: int) -> int:
    """Bytes of shared memory next to staged chunks.

    (Maximum, sum) of each position: of each CTA, and twice of its own; and a number of each warp.
    """
    return (8 * ctas + 16 + 4 * warps) * inner


def tiles_of(inner: int, rows: int, overlap: int, unit: int = 0) -> int:
    """Tiles of `rows` positions that hold `inner` of them. unit: of skewed tiles; 0, or no overlap: of others."""
    step = rows - overlap
    if unit and overlap:  # a tile may end half a unit before the next one begins, where tiles overlap by one
        return -(-(inner + unit - overlap // 2) // step)
    return max(1, -(-(inner - overlap) // step))
