"""Reductions of INNER numbers at a time over the CTAs of a thread-block cluster, through distributed shared memory.

`cluster` merges one row, whose numbers every thread holds. Here a cluster holds INNER softmaxes, and threads hold
different ones. Each CTA puts its own numbers into its shared memory. Its threads then send them to a slot in every CTA
with `st.async`, which counts the bytes on the receiver's mbarrier. Each CTA waits for its own mbarrier. One thread for
each position merges the slots in the order of their rank, and all threads read the result. So all CTAs compute the same
bits. Nothing is assumed about which thread holds which position.

Each CTA is a program of its own for Triton, and the launch makes clusters of them: Triton's own programs of several
CTAs spread a tile over the CTAs as its planner likes. `declare_exchange` must be the kernel's first statement. The
mbarrier is armed for one phase, so `renew_exchange` comes before another exchange. The loads lie between arming and
exchange, and hide the latency of the cluster's barrier. No CTA ends before all slots have arrived, so its shared memory
lives as long as others write it. Interpreted, one program holds the numbers of all CTAs, and the merge is a reduction
over the tile's first axis.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .numerics import PTX_LOG2E, exp
from .ptx_access import access_of, arm_ptx, await_ptx, send_ptx


@triton.jit
def share_of(pid, CTAS: tl.constexpr, COLS: tl.constexpr, PTX: tl.constexpr):
    """(index of the program or cluster, the columns of its chunk 0: [COLS, 1, 1], or [COLS, CTAS, 1] interpreted)."""
    column = tl.arange(0, COLS)[:, None, None]
    if CTAS == 1:
        return pid, column
    elif PTX:
        return pid // CTAS, pid % CTAS * COLS + column
    else:
        return pid, tl.arange(0, CTAS)[None, :, None] * COLS + column


@triton.constexpr_function
def _declare_ptx(ctas: int, n_values: int, inner: int) -> str:
    n_bytes = 4 * n_values * inner
    ptx = [f".shared .align 16 .b8 spatial_slots[{n_bytes * ctas}];"]
    ptx += [f".shared .align 16 .b8 spatial_{name}[{n_bytes}];" for name in ("own", "merged")]
    return "\n".join([*ptx, ".shared .align 8 .b64 spatial_arrived;", _arm_ptx(ctas, n_values, inner)])


@triton.constexpr_function
def _arm_ptx(ctas: int, n_values: int, inner: int, again: bool = False) -> str:
    """Arms the mbarrier for the numbers of all CTAs. again: after an exchange that all threads have left."""
    ptx = ["{", ".reg .pred first;", ".reg .b32 thread, barrier;"]
    if again:
        ptx += ["mov.u32 thread, %tid.x;", "setp.eq.u32 first, thread, 0;", "mov.u32 barrier, spatial_arrived;"]
        ptx += ["@first mbarrier.inval.shared::cta.b64 [barrier];", "fence.acq_rel.cluster;"]
    return "\n".join([*ptx, *arm_ptx("spatial_arrived", 4 * n_values * inner * ctas), "mov.u32 $0, 0;", "}"])


@triton.constexpr_function
def merged_ptx(ctas: int, names: list[str]) -> list[str]:
    """Merges each CTA's numbers, in the registers a0, b0, ..., a1, ..., into a0, b0, ...; `top` is scratch.

    names: "a" for one sum; or "a" for the maximum, "b" for the sum of exponentials, and others for plain sums.
    """
    ptx = []
    if len(names) > 1:
        ptx += ["mov.f32 top, a0;", *(f"max.f32 top, top, a{c};" for c in range(1, ctas))]
        for c in range(ctas):
            ptx += [f"sub.f32 a{c}, a{c}, top;", f"mul.f32 a{c}, a{c}, {PTX_LOG2E};", f"ex2.approx.ftz.f32 a{c}, a{c};"]
            ptx += [f"mul.rn.f32 b{c}, b{c}, a{c};"]
        ptx += ["mov.f32 a0, top;"]
    for name in names[1:] or names:
        ptx += [f"add.rn.f32 {name}0, {name}0, {name}{c};" for c in range(1, ctas)]
    return ptx


@triton.constexpr_function
def _put_ptx(n_values: int) -> str:
    """$1: the position; then its values."""
    vector, values = access_of([f"${i + 2}" for i in range(n_values)])
    ptx = ["{", ".reg .b32 slot, own;", "mov.u32 own, spatial_own;"]
    ptx += [f"mad.lo.u32 slot, $1, {4 * n_values}, own;", f"st.shared{vector}.f32 [slot], {values};"]
    return "\n".join([*ptx, "mov.u32 $0, 0;", "}"])


@triton.constexpr_function
def _get_ptx(n_values: int) -> str:
    """The position, and an operand whose layout is the result's."""
    vector, values = access_of([f"${i}" for i in range(n_values)])
    ptx = ["{", ".reg .b32 slot, merged;", "mov.u32 merged, spatial_merged;"]
    ptx += [f"mad.lo.u32 slot, ${n_values}, {4 * n_values}, merged;"]
    return "\n".join([*ptx, f"ld.volatile.shared{vector}.f32 {values}, [slot];", "}"])


@triton.constexpr_function
def _merge_ptx(ctas: int, inner: int, n_values: int, threads: int, to: str = "", inverse: bool = False) -> str:
    """Sends every position's numbers to every CTA, waits for those of all CTAs, and merges: thread i position i.

    to: the shared memory of the results, whose places are those of `spatial_skewed`. inverse: of the sum.
    """
    names, size = ["a", "b", "c", "d"][:n_values], 4 * n_values
    vector, values = access_of([f"{name}0" for name in names])
    ptx = ["{", ".reg .pred sends, merges, done;"]
    ptx += [".reg .b32 thread, rank, item, position, to, slot, slots, own, remote, barrier, remote_barrier;"]
    ptx += [f".reg .f32 {', '.join(f'{name}{c}' for c in range(ctas) for name in names)}, top;"]
    ptx += ["mov.u32 thread, %tid.x;", "mov.u32 rank, %cluster_ctarank;", "mov.u32 barrier, spatial_arrived;"]
    ptx += ["mov.u32 slots, spatial_slots;", "mov.u32 own, spatial_own;"]
    ptx += ["bar.sync 0;", "barrier.cluster.wait.aligned;"]
    for k in range(-(-inner * ctas // threads)):
        ptx += [f"add.u32 item, thread, {k * threads};", f"setp.lt.u32 sends, item, {inner * ctas};"]
        ptx += [f"and.b32 position, item, {inner - 1};", f"shr.u32 to, item, {inner.bit_length() - 1};"]
        ptx += [f"mad.lo.u32 slot, position, {size}, own;", f"@sends ld.volatile.shared{vector}.f32 {values}, [slot];"]
        ptx += [f"mad.lo.u32 slot, rank, {inner}, position;", f"mad.lo.u32 slot, slot, {size}, slots;"]
        ptx += send_ptx([f"{name}0" for name in names], "slot", "to", "@sends ")
    ptx += await_ptx()
    ptx += [f"setp.lt.u32 merges, thread, {inner};", f"mad.lo.u32 slot, thread, {size}, slots;"]
    for c in range(ctas):
        _, slot = access_of([f"{name}{c}" for name in names])
        ptx += [f"@merges ld.volatile.shared{vector}.f32 {slot}, [slot+{c * inner * size}];"]
    ptx += merged_ptx(ctas, names)
    if inverse:
        ptx += ["rcp.rn.f32 b0, b0;"]
    ptx += ["mov.u32 position, thread;", f"mov.u32 slots, {to or 'spatial_merged'};"]
    if to:  # a gap after each 16 positions, against bank conflicts
        ptx += ["shr.u32 position, thread, 4;", "add.u32 position, position, thread;"]
    ptx += [f"mad.lo.u32 slot, position, {size}, slots;"]
    ptx += [f"@merges st.shared{vector}.f32 [slot], {values};"]
    return "\n".join([*ptx, "bar.sync 0;", "mov.u32 $0, 0;", "}"])


@triton.jit
def declare_exchange(CTAS: tl.constexpr, N_VALUES: tl.constexpr, INNER: tl.constexpr, PTX: tl.constexpr):
    """Room for N_VALUES float32 of each position and CTA, and an mbarrier. A kernel's first statement."""
    if CTAS > 1 and PTX:
        ASM: tl.constexpr = _declare_ptx(CTAS, N_VALUES, INNER)
        tl.inline_asm_elementwise(ASM, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def renew_exchange(CTAS: tl.constexpr, N_VALUES: tl.constexpr, INNER: tl.constexpr, PTX: tl.constexpr):
    """Arms the mbarrier again. After the last block of a loop nothing uses it."""
    if CTAS > 1 and PTX:
        ASM: tl.constexpr = _arm_ptx(CTAS, N_VALUES, INNER, True)
        tl.inline_asm_elementwise(ASM, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def exchange_own(
    N_VALUES: tl.constexpr, CTAS: tl.constexpr, INNER: tl.constexpr, THREADS: tl.constexpr, TO: tl.constexpr,
    INVERSE: tl.constexpr = False,
):  # fmt: skip
    """Merges over the CTAs what each has in its `spatial_own`, into the shared memory TO; INVERSE: of a sum."""
    tl.static_assert(INNER <= THREADS, "a thread merges one position")
    MERGE: tl.constexpr = _merge_ptx(CTAS, INNER, N_VALUES, THREADS, TO, INVERSE)
    tl.inline_asm_elementwise(MERGE, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def exchange_max_sum(m, s, CTAS: tl.constexpr, THREADS: tl.constexpr, PTX: tl.constexpr):
    """(maximum, sum of exponentials) of each position, from those of each CTA.  # [1, INNER]

    # m, s: [1, INNER], or [CTAS, INNER] interpreted. There is a thread for each of the INNER positions.
    """
    if CTAS == 1:
        return m, s
    elif PTX:
        INNER: tl.constexpr = m.shape[1]
        place = tl.arange(0, INNER)[None, :]
        PUT: tl.constexpr = _put_ptx(2)
        tl.inline_asm_elementwise(PUT, "=r,r,f,f", [place, m, s], dtype=tl.int32, is_pure=False, pack=1)
        MERGE: tl.constexpr = _merge_ptx(CTAS, INNER, 2, THREADS)
        tl.inline_asm_elementwise(MERGE, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        GET: tl.constexpr = _get_ptx(2)
        return tl.inline_asm_elementwise(
            GET, "=f,=f,r,f", [place, m], dtype=(tl.float32, tl.float32), is_pure=False, pack=1
        )
    else:
        top = tl.max(m, 0)[None, :]
        return top, tl.sum(s * exp(m - top), 0)[None, :]


@triton.jit
def exchange_with_sums(m, s, t, u, CTAS: tl.constexpr, THREADS: tl.constexpr, PTX: tl.constexpr):
    """`exchange_max_sum` of m and s, and the sums of t and of u over the CTAs."""
    if CTAS == 1:
        return m, s, t, u
    elif PTX:
        INNER: tl.constexpr = m.shape[1]
        place = tl.arange(0, INNER)[None, :]
        PUT: tl.constexpr = _put_ptx(4)
        tl.inline_asm_elementwise(PUT, "=r,r,f,f,f,f", [place, m, s, t, u], dtype=tl.int32, is_pure=False, pack=1)
        MERGE: tl.constexpr = _merge_ptx(CTAS, INNER, 4, THREADS)
        tl.inline_asm_elementwise(MERGE, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        GET: tl.constexpr = _get_ptx(4)
        # the dtypes stand here: Triton 3.9 does not take them as a constexpr
        return tl.inline_asm_elementwise(
            GET, "=f,=f,=f,=f,r,f", [place, m], dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False,
            pack=1,
        )  # fmt: skip
    else:
        top = tl.max(m, 0)[None, :]
        return top, tl.sum(s * exp(m - top), 0)[None, :], tl.sum(t, 0)[None, :], tl.sum(u, 0)[None, :]


@triton.jit
def exchange_sum(s, CTAS: tl.constexpr, THREADS: tl.constexpr, PTX: tl.constexpr):
    """The sum of each position, from that of each CTA.  # s: [1, INNER], or [CTAS, INNER] interpreted"""
    if CTAS == 1:
        return s
    elif PTX:
        INNER: tl.constexpr = s.shape[1]
        place = tl.arange(0, INNER)[None, :]
        PUT: tl.constexpr = _put_ptx(1)
        tl.inline_asm_elementwise(PUT, "=r,r,f", [place, s], dtype=tl.int32, is_pure=False, pack=1)
        MERGE: tl.constexpr = _merge_ptx(CTAS, INNER, 1, THREADS)
        tl.inline_asm_elementwise(MERGE, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        GET: tl.constexpr = _get_ptx(1)
        return tl.inline_asm_elementwise(GET, "=f,r,f", [place, s], dtype=tl.float32, is_pure=False, pack=1)
    else:
        return tl.sum(s, 0)[None, :]
