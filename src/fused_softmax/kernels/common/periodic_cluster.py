"""What the CTAs of a cluster that hold a plane (n_cols, inner) tell each other of each position.

Each CTA reduces all positions over its part of the plane into its shared memory. Then it reads the numbers of all CTAs
(distributed shared memory), merges them in the order of their rank, and keeps the result: all CTAs compute the same
bits. No CTA may end before the others have read its numbers, so `leave_planes` is a kernel's last statement.

Each CTA is a program of its own for Triton, as in `spatial_cluster`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gathered_rows import numbers_at
from .spatial_cluster import access_of, merged_ptx

POSITIONS = 256  # of a plane at most: the room for their numbers


@triton.constexpr_function
def sums_bytes(n_values: int) -> int:
    """Bytes of the first region: n_values float32 of each position, the CTA's own, and then the merged ones."""
    return 2 * 4 * n_values * POSITIONS


@triton.constexpr_function
def _merge_ptx(ctas: int, n_values: int, threads: int) -> str:
    """Merges the numbers of $1 positions over all CTAs, thread i the positions i, i + threads, ..."""
    names = ["a", "b"][:n_values]
    of_rank = [access_of([f"{name}{c}" for name in names]) for c in range(ctas)]
    ptx = ["{", ".reg .pred merges;", ".reg .b32 thread, position, own, there;"]
    ptx += [f".reg .f32 {', '.join(f'{name}{c}' for c in range(ctas) for name in names)}, top;"]
    ptx += ["mov.u32 thread, %tid.x;", "barrier.cluster.arrive.aligned;", "barrier.cluster.wait.aligned;"]
    for k in range(-(-POSITIONS // threads)):
        ptx += [f"add.u32 position, thread, {k * threads};", "setp.lt.u32 merges, position, $1;"]
        ptx += ["mov.u32 own, gathered_rows;", f"mad.lo.u32 own, position, {4 * n_values}, own;"]
        for c in range(ctas):
            suffix, values = of_rank[c]
            ptx += [f"mapa.shared::cluster.u32 there, own, {c};"]
            ptx += [f"@merges ld.shared::cluster{suffix}.f32 {values}, [there];"]
        suffix, values = of_rank[0]
        ptx += [*merged_ptx(ctas, names), f"@merges st.shared{suffix}.f32 [own+{4 * n_values * POSITIONS}], {values};"]
    return "\n".join([*ptx, "barrier.cluster.arrive.aligned;", "bar.sync 0;", "mov.u32 $0, 0;", "}"])


@triton.jit
def merge_sums(positions, N_VALUES: tl.constexpr, CTAS: tl.constexpr, THREADS: tl.constexpr):
    """Merges the numbers of so many positions, at most POSITIONS, over all CTAs. Each CTA put its own at byte 0."""
    ASM: tl.constexpr = _merge_ptx(CTAS, N_VALUES, THREADS)
    tl.inline_asm_elementwise(ASM, "=r,r", [positions], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def max_sum_of(position):
    """The merged (maximum, sum) of a position.  # [THREADS]"""
    return numbers_at(position, 2, sums_bytes(2) // 2)


@triton.jit
def sum_at(position):
    """The merged sum of a position.  # [THREADS]"""
    return numbers_at(position, 1, sums_bytes(1) // 2)[0]


@triton.jit
def leave_planes(PTX: tl.constexpr):
    """Waits until no other CTA reads this one's numbers. A kernel's last statement."""
    if PTX:
        tl.inline_asm_elementwise(
            "barrier.cluster.wait.aligned; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
