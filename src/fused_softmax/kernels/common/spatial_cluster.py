"""Reductions of INNER numbers at a time over the CTAs of a thread-block cluster, through distributed shared memory.

`cluster` merges one row, whose numbers every thread holds. Here a cluster holds INNER softmaxes, and threads hold
different ones. So each CTA writes its own numbers to its shared memory, one slot for each position. After a barrier of
the cluster, one thread for each position reads the slots of all CTAs in the order of their rank. It writes the merged
numbers to a second slot, and all threads of its CTA read them there. All CTAs compute the same bits. Nothing is assumed
about which thread holds which position: several threads may write the same slot, with the same number.

`leave_exchange` must be the kernel's last statement: a CTA's shared memory lives until the others have read it.
Interpreted, one program holds the numbers of all CTAs, and the merge is a reduction over the tile's first axis.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .numerics import exp

_LOG2E = "0f3FB8AA3B"  # log2(e) as PTX writes a float32


@triton.constexpr_function
def _declare_ptx(n_values: int, inner: int) -> str:
    slots, merged = ".shared .align 16 .b8 spatial_slots", ".shared .align 16 .b8 spatial_merged"
    return f"{slots}[{4 * n_values * inner}];\n{merged}[{4 * n_values * inner}];\nmov.u32 $0, 0;"


@triton.constexpr_function
def _put_ptx(n_values: int) -> str:
    """$1: the position; then its values."""
    vector, values = {1: ("", "$2"), 2: (".v2", "{$2, $3}")}[n_values]
    ptx = ["{", ".reg .b32 slot, slots;", "mov.u32 slots, spatial_slots;"]
    ptx += [f"mad.lo.u32 slot, $1, {4 * n_values}, slots;", f"st.shared{vector}.f32 [slot], {values};"]
    return "\n".join([*ptx, "mov.u32 $0, 0;", "}"])


@triton.constexpr_function
def _get_ptx(n_values: int) -> str:
    """The last operand: the position."""
    vector, values = {1: ("", "$0"), 2: (".v2", "{$0, $1}")}[n_values]
    ptx = ["{", ".reg .b32 slot, slots;", "mov.u32 slots, spatial_merged;"]
    ptx += [f"mad.lo.u32 slot, ${n_values}, {4 * n_values}, slots;"]
    return "\n".join([*ptx, f"ld.volatile.shared{vector}.f32 {values}, [slot];", "}"])


@triton.constexpr_function
def _merge_ptx(ctas: int, inner: int, n_values: int) -> str:
    """Thread i merges position i. Then the threads of the CTA meet. The cluster meets again in `leave_exchange`."""
    names, vector = ("a", "b")[:n_values], ".v2" if n_values == 2 else ""
    ptx = ["{", ".reg .pred merges;", ".reg .b32 slot, slots, remote, thread;"]
    ptx += [f".reg .f32 {', '.join(f'{name}{c}' for c in range(ctas) for name in names)}, top, total;"]
    ptx += ["barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;"]
    ptx += ["mov.u32 thread, %tid.x;", f"setp.lt.u32 merges, thread, {inner};"]
    ptx += ["mov.u32 slots, spatial_slots;", f"mad.lo.u32 slot, thread, {4 * n_values}, slots;"]
    for c in range(ctas):
        target = f"a{c}" if n_values == 1 else f"{{a{c}, b{c}}}"
        ptx += [f"@merges mapa.shared::cluster.u32 remote, slot, {c};"]
        ptx += [f"@merges ld.shared::cluster{vector}.f32 {target}, [remote];"]
    if n_values == 2:
        ptx += ["mov.f32 top, a0;", *(f"max.f32 top, top, a{c};" for c in range(1, ctas))]
        for c in range(ctas):
            ptx += [f"sub.f32 a{c}, a{c}, top;", f"mul.f32 a{c}, a{c}, {_LOG2E};", f"ex2.approx.ftz.f32 a{c}, a{c};"]
            ptx += [f"mul.rn.f32 b{c}, b{c}, a{c};"]
    summed = names[-1]
    ptx += [f"mov.f32 total, {summed}0;", *(f"add.rn.f32 total, total, {summed}{c};" for c in range(1, ctas))]
    ptx += ["mov.u32 slots, spatial_merged;", f"mad.lo.u32 slot, thread, {4 * n_values}, slots;"]
    ptx += [f"@merges st.shared{vector}.f32 [slot], {'{top, total}' if n_values == 2 else 'total'};"]
    return "\n".join([*ptx, "bar.sync 0;", "barrier.cluster.arrive.relaxed.aligned;", "mov.u32 $0, 0;", "}"])


@triton.jit
def declare_exchange(CTAS: tl.constexpr, N_VALUES: tl.constexpr, INNER: tl.constexpr, PTX: tl.constexpr):
    """Room for N_VALUES float32 of each position, of the CTA and merged. A kernel's first statement."""
    if PTX:
        ASM: tl.constexpr = _declare_ptx(N_VALUES, INNER)
        tl.inline_asm_elementwise(ASM, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _places(CTAS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr):
    """The position of each element of a chunk.  # [CTAS, COLS*INNER]"""
    return tl.arange(0, CTAS)[:, None] * 0 + (tl.arange(0, COLS * INNER) % INNER)[None, :]


@triton.jit
def exchange_max_sum(m, s, CTAS: tl.constexpr, COLS: tl.constexpr, PTX: tl.constexpr):
    """(maximum, sum of exponentials) for each element of a chunk, from those of each CTA.

    # m, s: [CTAS, INNER]; results [CTAS, COLS*INNER]. There is a thread for each of the INNER positions.
    """
    INNER: tl.constexpr = m.shape[1]
    if PTX:
        PUT: tl.constexpr = _put_ptx(2)
        tl.inline_asm_elementwise(
            PUT, "=r,r,f,f", [_places(CTAS, 1, INNER), m, s], dtype=tl.int32, is_pure=False, pack=1
        )
        MERGE: tl.constexpr = _merge_ptx(CTAS, INNER, 2)
        tl.inline_asm_elementwise(MERGE, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        GET: tl.constexpr = _get_ptx(2)
        return tl.inline_asm_elementwise(
            GET, "=f,=f,r", [_places(CTAS, COLS, INNER)], dtype=(tl.float32, tl.float32), is_pure=False, pack=1
        )
    else:
        top = tl.max(m, 0)
        total = tl.sum(s * exp(m - top[None, :]), 0)
        everywhere = tl.zeros([CTAS, COLS, INNER], tl.float32)
        return (
            tl.reshape(everywhere + top[None, None, :], (CTAS, COLS * INNER)),
            tl.reshape(everywhere + total[None, None, :], (CTAS, COLS * INNER)),
        )


@triton.jit
def exchange_sum(s, CTAS: tl.constexpr, COLS: tl.constexpr, PTX: tl.constexpr):
    """The sum for each element of a chunk, from that of each CTA.  # s: [CTAS, INNER]; result [CTAS, COLS*INNER]"""
    INNER: tl.constexpr = s.shape[1]
    if PTX:
        PUT: tl.constexpr = _put_ptx(1)
        tl.inline_asm_elementwise(PUT, "=r,r,f", [_places(CTAS, 1, INNER), s], dtype=tl.int32, is_pure=False, pack=1)
        MERGE: tl.constexpr = _merge_ptx(CTAS, INNER, 1)
        tl.inline_asm_elementwise(MERGE, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        GET: tl.constexpr = _get_ptx(1)
        return tl.inline_asm_elementwise(
            GET, "=f,r", [_places(CTAS, COLS, INNER)], dtype=tl.float32, is_pure=False, pack=1
        )
    else:
        everywhere = tl.zeros([CTAS, COLS, INNER], tl.float32)
        return tl.reshape(everywhere + tl.sum(s, 0)[None, None, :], (CTAS, COLS * INNER))


@triton.jit
def leave_exchange(PTX: tl.constexpr):
    """Waits until no CTA reads this one's shared memory. A kernel's last statement."""
    if PTX:
        WAIT: tl.constexpr = "barrier.cluster.wait.aligned;\nmov.u32 $0, 0;"
        tl.inline_asm_elementwise(WAIT, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
