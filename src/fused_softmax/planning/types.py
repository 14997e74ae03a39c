"""What the policy is told, a Device and a Problem, and what it answers, a Plan. Pure Python, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

REGIMES = ("warp", "block", "cluster", "two_pass")
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
VECTOR_BYTES = 16


@dataclass(frozen=True)
class Device:
    """What the policy needs to know of a device; `fused_softmax.device` fills it in, tests write it down."""

    name: str
    kind: str  # "cuda", "hip" or "interpreter"
    warp_size: int = 32
    max_warps: int = 32  # of one program
    registers: int = 65536  # of one multiprocessor, 32 bits each
    max_cluster: int = 1  # CTAs in a thread-block cluster; 1: none
    supports_smem_staging: bool = (
        False  # whether chunks of a row may lie in shared memory: Hopper, where that is measured
    )

    @property
    def ptx(self) -> bool:
        """Whether kernels may use inline PTX."""
        return self.kind == "cuda"

    @property
    def supports_pdl(self) -> bool:
        """Whether a kernel may be launched before the one that it waits for is done: programmatic dependent launch."""
        return self.kind == "cuda" and self.max_cluster > 1

    def registers_within(self, cap: int, num_warps: int) -> int:
        """A cap of registers that was measured on Hopper, here: one step more elsewhere, where a small one spills."""
        most = self.registers // (num_warps * self.warp_size)
        return cap if self.supports_smem_staging or cap >= 96 else max(cap, min(cap + 8, most))

    def options(self, num_stages: int | None = None) -> dict[str, Any]:
        """The launch options whose defaults differ between versions of Triton, or may; empty where interpreted.

        enable_fp_fusion: the multiply-adds that exp(x - m) is made of; off by default from Triton 3.10 on. num_stages:
        of loops; None: what each backend's default was when the kernels were measured.
        """
        if self.kind == "interpreter":
            return {}
        return {"enable_fp_fusion": True, "num_stages": num_stages or (3 if self.kind == "cuda" else 2)}


DEVICES = {
    "sm_80": Device("sm_80", "cuda"),
    "sm_89": Device("sm_89", "cuda"),
    "sm_90": Device("sm_90", "cuda", max_cluster=16, supports_smem_staging=True),
    "sm_100": Device("sm_100", "cuda", max_cluster=16),
    "sm_120": Device("sm_120", "cuda", max_cluster=8),
    "gfx942": Device("gfx942", "hip", warp_size=64, max_warps=16, registers=131072),
    # the interpreter runs the kernels of the richest device, with merges in plain Triton
    "interpreter": Device("interpreter", "interpreter", max_cluster=16),
}


@dataclass(frozen=True)
class Problem:
    """One row-wise operation, less its number of rows.

    `vec` is the number of elements that every row's start, in every tensor, is a multiple of (a power of two, at most
    16 bytes of the narrowest dtype); `in_phase` says that though rows start anywhere, all tensors' rows start at the
    same distance from a 16-byte boundary, so that all but a row's ends can still be read and written in vectors.
    """

    n_cols: int
    dtype: str
    out_dtype: str
    vec: int
    in_phase: bool = False
    backward: bool = False
    log: bool = False

    @property
    def full_vec(self) -> int:
        return VECTOR_BYTES // min(ITEMSIZE[self.dtype], ITEMSIZE[self.out_dtype])

    @property
    def itemsize(self) -> int:
        """Bytes of the narrowest element."""
        return VECTOR_BYTES // self.full_vec


@dataclass(frozen=True)
class Plan:
    """How a row is run: in `ctas` slices of `chunks` x `lanes` x `vec` columns, `rows` rows a program."""

    regime: str
    rows: int
    ctas: int
    warps_per_row: int  # lines that share a CTA's slice of a row: its warps, or one
    vectors_per_chunk: int  # of a CTA's slice, over all parts
    vec: int
    chunks: int  # of a step, where the regime is stream
    unpredicated_chunks: int  # chunks that lie inside the row whatever its slice
    unaligned: bool  # rows start unaligned: head and tail apart
    recompute: bool  # keep the row as loaded and compute exp twice
    num_warps: int
    max_registers: int | None
    why: str
    prefetched_chunks: int | None = (
        None  # of a gradient: chunks of y that are read before the row's sum is known; None: all
    )
    resident_chunks: int = 0  # chunks of a slice that stay on chip, where the regime is stream
    smem_staged: int = 0  # of a gradient: chunks of a slice that stay in shared memory, not in registers

    def constexprs(self) -> dict[str, object]:
        """What any kernel may take of the plan at compile time, by the kernels' names; a kernel takes some of these."""
        held = self.resident_chunks if self.regime == "two_pass" else self.chunks
        ahead = held if self.prefetched_chunks is None else min(held, self.prefetched_chunks)
        found: dict[str, object] = dict(ROWS=self.rows, CTAS=self.ctas, WARPS_PER_ROW=self.warps_per_row)
        found |= dict(
            VECTORS=self.vectors_per_chunk // self.warps_per_row, VEC=self.vec, CHUNKS=self.chunks,
            UNPREDICATED=self.unpredicated_chunks,
        )  # fmt: skip
        found |= dict(
            UNALIGNED=self.unaligned, RECOMPUTE=self.recompute, RESIDENT_CHUNKS=self.resident_chunks, PREFETCHED=ahead,
            SMEM_STAGED=self.smem_staged,
        )  # fmt: skip
        return found | dict(TWO_PASS=self.regime == "two_pass")


def power_of_two(n: int) -> int:
    """The least power of two that is at least n, and at least 1."""
    return 1 << max(0, n - 1).bit_length()
