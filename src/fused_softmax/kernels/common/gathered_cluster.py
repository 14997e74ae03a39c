"""Planes (n_cols, inner) that the CTAs of a cluster share, and what they tell each other of each position.

Each CTA has a range of the columns, which is one piece of memory (`gathered_planes`), and reduces all positions over
its columns into its shared memory. Then each CTA reads the numbers of all CTAs (distributed shared memory), merges them
in the order of their rank, and keeps the result: all CTAs compute the same bits. No CTA may end before the others have
read its numbers, so `leave_planes` is a kernel's last statement.

Each CTA is a program of its own for Triton, as in `spatial_cluster`. Interpreted, one program has the threads of all
CTAs, [CTAS*THREADS], and the merge is a reduction over CTAS.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gathered_rows import numbers_at
from .numerics import exp
from .ptx_access import access_of
from .spatial_cluster import merged_ptx

POSITIONS = 512  # of a plane at most: the room for their numbers


@triton.jit
def share_of_plane(n_cols, inner, CTAS: tl.constexpr, THREADS: tl.constexpr, PTX: tl.constexpr):
    """(first element, elements, columns) of the CTA's share; interpreted, those of each thread's.  # [CTAS*THREADS]"""
    pid = tl.program_id(0)
    if PTX:
        plane, rank = pid // CTAS, pid % CTAS
    else:
        plane, rank = pid, tl.arange(0, CTAS * THREADS) // THREADS
    first = rank * n_cols // CTAS
    columns = (rank + 1) * n_cols // CTAS - first
    return plane.to(tl.int64) * (n_cols * inner) + first * inner, columns * inner, columns


@triton.constexpr_function
def tile_of(ctas: int, threads: int, ptx: bool) -> int:
    """Threads of a program: those of a CTA; interpreted, of all CTAs."""
    return threads if ptx else ctas * threads


@triton.jit
def position_of_share(k, n, inner, LANES: tl.constexpr, THREADS: tl.constexpr, CTAS: tl.constexpr, PTX: tl.constexpr):
    """In round k: (place of each thread's first column, places to its next one, whether it exists, its position).

    n: elements of the share. A thread without a position stays behind it, where no thread writes.
    """
    thread = tl.arange(0, tile_of(CTAS, THREADS, PTX)) % THREADS
    position = thread // LANES + k * (THREADS // LANES)
    exists = position < inner
    at = tl.where(exists, position + thread % LANES * inner, n)
    return at, tl.where(exists, LANES * inner, 0), exists, tl.minimum(position, inner - 1)


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
def over_ctas(x, CTAS: tl.constexpr):
    """[CTAS*THREADS] -> [CTAS, THREADS], interpreted."""
    return tl.reshape(x, (CTAS, x.shape[0] // CTAS))


@triton.jit
def interpreted_max_sum(m, s, CTAS: tl.constexpr):
    """What `max_sum_of` finds, in each thread.  # [CTAS*THREADS]"""
    ms = over_ctas(m, CTAS)
    top = tl.max(ms, 0)[None, :]
    total = tl.sum(over_ctas(s, CTAS) * exp(ms - top), 0)[None, :]
    return tl.reshape(top + tl.zeros_like(ms), m.shape), tl.reshape(total + tl.zeros_like(ms), m.shape)


@triton.jit
def leave_planes(PTX: tl.constexpr):
    """Waits until no other CTA reads this one's numbers. A kernel's last statement."""
    if PTX:
        tl.inline_asm_elementwise(
            "barrier.cluster.wait.aligned; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
