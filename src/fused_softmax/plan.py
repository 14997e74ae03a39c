"""Problem + Device -> Plan: which regime a row of so many columns takes, and with which numbers. Pure Python, no I/O.

A plan sees columns, dtypes, alignment and device, never the number of rows: a row's bits do not depend on the batch it
came in. The policy is in the ladders below, tuples of rungs in rising width, each set by a measurement that
docs/measurements.md describes; `fused-softmax tune` measures a device and prints its own.

What makes a rung good, in the order in which it matters (measured on an H200, bfloat16 and float32, 2^28 elements):
bytes in flight (several programs on each multiprocessor, and few lanes without a column), registers just under the next
step of occupancy, no reduction across warps where a warp can hold the row, no mask where the slice is known to be full.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

REGIMES = ("tile", "block", "cluster", "stream")
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
VECTOR_BYTES = 16
MAX_CHUNKS = 24  # what a thread's 255 registers hold of a row, in vectors, without spilling


@dataclass(frozen=True)
class Device:
    """What the policy needs to know of a device; `fused_softmax.device` fills it in, tests write it down."""

    name: str
    kind: str  # "cuda", "hip" or "interpreter"
    warp_size: int = 32
    max_warps: int = 32  # of one program
    registers: int = 65536  # of one multiprocessor, 32 bits each
    max_cluster: int = 1  # CTAs in a thread-block cluster; 1: none

    @property
    def ptx(self) -> bool:
        """Whether kernels may use inline PTX."""
        return self.kind == "cuda"


DEVICES = {
    "sm_80": Device("sm_80", "cuda"),
    "sm_90": Device("sm_90", "cuda", max_cluster=16),
    "sm_100": Device("sm_100", "cuda", max_cluster=16),
    "sm_120": Device("sm_120", "cuda", max_cluster=8),
    "gfx942": Device("gfx942", "hip", warp_size=64, max_warps=16, registers=131072),
    # the interpreter runs the kernels of the richest device, with merges in plain Triton
    "interpreter": Device("interpreter", "interpreter", max_cluster=16),
}


@dataclass(frozen=True)
class Problem:
    """One row-wise operation, less its number of rows.

    `vec` is the number of elements that every row's start, in every tensor, is a multiple of (a power of two, at most 16
    bytes of the narrowest dtype); `in_phase` says that though rows start anywhere, all tensors' rows start at the same
    distance from a 16-byte boundary, so that all but a row's ends can still be read and written in vectors.
    """

    n_cols: int
    dtype: str
    out_dtype: str
    vec: int
    in_phase: bool = False
    backward: bool = False

    @property
    def full_vec(self) -> int:
        return VECTOR_BYTES // min(ITEMSIZE[self.dtype], ITEMSIZE[self.out_dtype])


@dataclass(frozen=True)
class Plan:
    """How a row is run. A slice of the row is `chunks` x `lanes` x `vec` columns; slices: `ctas` a row, `rows` a program."""

    regime: str
    rows: int
    ctas: int
    lanes: int
    vec: int
    chunks: int  # of a step, where the regime is stream
    unmasked: int  # chunks that lie inside the row whatever its slice
    edge: bool  # rows start unaligned: head and tail apart
    recompute: bool  # keep the row as loaded and compute exp twice
    num_warps: int
    max_registers: int | None
    why: str

    def meta(self, device: Device, *, log: bool) -> dict[str, object]:
        """The kernel's constexprs and the launch's own meta-parameters."""
        meta: dict[str, object] = dict(LOG=log, CTAS=self.ctas, LANES=self.lanes, VEC=self.vec, CHUNKS=self.chunks)
        meta |= dict(EDGE=self.edge, PTX=device.ptx, num_warps=self.num_warps, num_ctas=self.ctas)
        if self.regime != "stream":
            meta |= dict(ROWS=self.rows, UNMASKED=self.unmasked, RECOMPUTE=self.recompute)
        if self.max_registers is not None and device.kind == "cuda":
            meta["maxnreg"] = self.max_registers
        if device.kind != "cuda":
            meta.pop("num_ctas")
        return meta


@dataclass(frozen=True)
class Rung:
    """Up to `max_cols` columns: so many CTAs, warps, and whether exp is computed twice."""

    max_cols: int
    ctas: int
    num_warps: int
    recompute: bool = False


# one warp a row, no reduction leaves it; beyond, a row takes several warps
TILE_MAX_COLS = 2048
# columns of 16-bit or 32-bit rows below which rows that start unaligned are read element by element
EDGE_MIN_COLS = 256
# a program of the tile regime covers at least so many columns: a warp with less to do waits for its own loads
TILE_PROGRAM_COLS = {2: 1024, 4: 512}

# forward, where there are clusters; H200
FORWARD_CLUSTER = {
    2: (
        Rung(4096, 1, 2, True),
        Rung(8192, 2, 4),
        Rung(12288, 2, 8),
        Rung(16384, 4, 4),
        Rung(32768, 4, 8),
        Rung(57344, 8, 4),
        Rung(65536, 8, 8),
        Rung(155648, 8, 4, True),
        Rung(262144, 16, 4, True),
        Rung(524288, 16, 16, True),
        Rung(1048576, 16, 32, True),
    ),
    4: (
        Rung(4096, 1, 4),
        Rung(16384, 2, 16),
        Rung(32768, 4, 16),
        Rung(57344, 16, 4),
        Rung(262144, 16, 8),
        Rung(524288, 16, 16),
    ),
}
# backward, where there are clusters; H200
BACKWARD_CLUSTER = {
    2: (
        Rung(4096, 1, 16),
        Rung(16384, 4, 4),
        Rung(32768, 8, 4),
        Rung(57344, 8, 4),
        Rung(65536, 16, 4, True),
        Rung(163840, 16, 8, True),
        Rung(262144, 8, 16, True),
    ),
    4: (
        Rung(4096, 4, 8),
        Rung(16384, 8, 8),
        Rung(131072, 16, 8),
        Rung(262144, 16, 16),
    ),
}
# where there are none: one program a row as far as its registers reach (the H200's one-program figures)
FORWARD_BLOCK = {
    2: (Rung(4096, 1, 4), Rung(16384, 1, 16), Rung(65536, 1, 16, True)),
    4: (Rung(4096, 1, 4), Rung(16384, 1, 16), Rung(32768, 1, 16)),
}
BACKWARD_BLOCK = {
    2: (Rung(4096, 1, 8), Rung(32768, 1, 16, True)),
    4: (Rung(4096, 1, 8), Rung(16384, 1, 16)),
}
# a step of the stream regime: warps and chunks of one program
STREAM_WARPS, STREAM_CHUNKS = 8, 4


def ladder(problem: Problem, device: Device) -> tuple[Rung, ...]:
    """The rungs beyond the tile regime for this problem on this device."""
    if device.max_cluster >= 16:
        tables = BACKWARD_CLUSTER if problem.backward else FORWARD_CLUSTER
    else:
        tables = BACKWARD_BLOCK if problem.backward else FORWARD_BLOCK
    return tables[VECTOR_BYTES // problem.full_vec]


def plan(problem: Problem, device: Device, regime: str | None = None) -> Plan:
    """The plan for `problem` on `device`; `regime` forces one (ValueError where it cannot hold such a row).

    >>> plan(Problem(4096, "bfloat16", "bfloat16", vec=8), DEVICES["sm_90"]).regime
    'block'
    """
    if regime is None:
        for candidate in _regimes(problem, device):
            return candidate
    if regime not in REGIMES:
        raise ValueError(f"regime must be one of {REGIMES}, not {regime!r}")
    chosen = {
        "tile": _tile,
        "block": lambda p, d: _resident(p, d, _widest(p, d, 1)),
        "cluster": lambda p, d: _resident(p, d, _widest(p, d, d.max_cluster)) if d.max_cluster > 1 else None,
        "stream": _stream,
    }[regime](problem, device)
    if chosen is None:
        raise ValueError(f"the {regime} regime cannot hold {problem.n_cols} columns of {problem.dtype} on {device.name}")
    return replace(chosen, why=f"regime {regime} was asked for")


def _regimes(problem: Problem, device: Device) -> Iterator[Plan]:
    """The plans worth taking, best first; the last always exists."""
    n_cols = problem.n_cols
    if n_cols <= TILE_MAX_COLS:
        tile = _tile(problem, device)
        if tile is not None:
            yield tile
    for rung in ladder(problem, device):
        if n_cols <= rung.max_cols and rung.ctas <= device.max_cluster:
            resident = _resident(problem, device, rung)
            if resident is not None:
                yield resident
    yield _stream(problem, device)


def _geometry(problem: Problem) -> tuple[int, bool]:
    """(vec, edge): the width of a vector access, and whether a row's ends are apart."""
    if problem.vec < problem.full_vec and problem.in_phase and problem.n_cols >= EDGE_MIN_COLS:
        return problem.full_vec, True
    return problem.vec, False


def _tile(problem: Problem, device: Device) -> Plan | None:
    vec, edge = _geometry(problem)
    units = max(1, -(-problem.n_cols // vec))
    lanes = min(_power_of_two(units), device.warp_size)
    if edge:
        lanes = max(lanes, 2 * vec)
    chunks = _round_chunks(-(-units // lanes))
    if vec < problem.full_vec and chunks > 4:  # element by element: more lanes, for fewer and wider steps
        lanes, chunks = lanes * _power_of_two(-(-chunks // 4)), -(-units // (lanes * _power_of_two(-(-chunks // 4))))
    itemsize = VECTOR_BYTES // problem.full_vec
    if chunks > MAX_CHUNKS or problem.n_cols > 2 * TILE_MAX_COLS:
        return None
    covered = lanes * vec * chunks
    rows = max(1, _power_of_two(TILE_PROGRAM_COLS[itemsize] // (2 if problem.backward else 1) // covered))
    # no row may share its warp's threads with idle ones: a program has a warp's lanes at least
    rows = max(rows, device.warp_size // lanes)
    why = f"{rows} row(s) of one warp: no reduction leaves the warp"
    return Plan("tile", rows, 1, lanes, vec, chunks, 0, edge, False, 1, None, why)


def _widest(problem: Problem, device: Device, ctas: int) -> Rung:
    """A rung for a forced regime: as many warps as give each lane a few chunks."""
    own = [r for r in ladder(problem, device) if (r.ctas == 1) == (ctas == 1) and problem.n_cols <= r.max_cols]
    if own:
        return own[0]
    vec, _ = _geometry(problem)
    warps = 4
    while warps < 16 and problem.n_cols > ctas * warps * device.warp_size * vec * 8:
        warps *= 2
    return Rung(problem.n_cols, min(ctas, 4 if problem.n_cols < 4096 else ctas), warps)


def _resident(problem: Problem, device: Device, rung: Rung) -> Plan | None:
    vec, edge = _geometry(problem)
    num_warps = max(1, min(rung.num_warps * 32 // device.warp_size, device.max_warps))
    lanes = num_warps * device.warp_size * (problem.full_vec // vec)
    units = problem.n_cols // vec if edge else -(-problem.n_cols // vec)
    per_cta = -(-units // rung.ctas)
    chunks = _round_chunks(max(1, -(-per_cta // lanes)))
    registers = _registers(problem, rung, chunks, device)
    if registers is None:
        return None
    unmasked = _unmasked(units, rung.ctas, lanes, chunks, edge)
    regime = "cluster" if rung.ctas > 1 else "block"
    where = f"the {rung.ctas} CTAs of a cluster" if rung.ctas > 1 else "one program"
    why = f"the row stays in {where}, {chunks} vector(s) a thread" + (", exp computed twice" if rung.recompute else "")
    cap = registers if rung.recompute and device.kind == "cuda" else None
    return Plan(
        regime, 1, rung.ctas, lanes, vec, chunks, unmasked, edge, rung.recompute, num_warps, cap, why
    )


def _stream(problem: Problem, device: Device) -> Plan:
    vec, edge = _geometry(problem)
    num_warps = max(1, STREAM_WARPS * 32 // device.warp_size)
    lanes = num_warps * device.warp_size * (problem.full_vec // vec)
    ctas = device.max_cluster if problem.n_cols >= device.max_cluster * lanes * vec * STREAM_CHUNKS else 1
    why = f"the row is walked twice in steps by {ctas} CTA(s): it does not fit on chip"
    return Plan("stream", 1, ctas, lanes, vec, STREAM_CHUNKS, 0, edge, False, num_warps, None, why)


def _registers(problem: Problem, rung: Rung, chunks: int, device: Device) -> int | None:
    """Registers a thread may take: its part of the row and what the arithmetic needs, at the next step of occupancy.

    None where they do not suffice. Measured by cross-compiling: 32 beside 16-bit rows kept as loaded, 16 to 26 beside
    float32; the cap took 200,019 columns of bfloat16 from .90 to .96 of copy, since 97 registers made 4 programs of 5.
    """
    tensors = 2 if problem.backward else 1
    raw = VECTOR_BYTES // 4
    kept = raw if rung.recompute or problem.full_vec == 4 else 2 * raw
    needed = tensors * chunks * kept + 28
    threads = rung.num_warps * 32
    limit = min(255, device.registers // threads // 8 * 8)
    if chunks > MAX_CHUNKS or needed > limit:
        return None
    programs = max(1, device.registers // (threads * (-(-needed // 8) * 8)))
    return min(255, device.registers // (threads * programs) // 8 * 8)


def _round_chunks(chunks: int) -> int:
    """Widths share kernels: above 16, chunks come in steps of 2."""
    return chunks if chunks <= 16 else -(-chunks // 2) * 2


def _unmasked(units: int, ctas: int, lanes: int, chunks: int, edge: bool) -> int:
    """Chunks that lie inside every slice: all where the slices divide the row, else all but the last two.

    An unaligned row of n columns has n//vec or one vector fewer between its ends, and the last slice is the shortest.
    """
    if not edge and units == ctas * lanes * chunks:
        return chunks
    shortest = min(u - (ctas - 1) * -(-u // ctas) for u in ((units, units - 1) if edge else (units,)))
    return max(0, chunks - 2) if shortest >= (chunks - 2) * lanes else 0


def _power_of_two(n: int) -> int:
    """The least power of two that is at least n, and at least 1."""
    return 1 << max(0, n - 1).bit_length()
