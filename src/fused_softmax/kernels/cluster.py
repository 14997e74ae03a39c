"""Merging what the programs of a thread-block cluster know about their row, through distributed shared memory.

A row on a cluster of n CTAs is a tile [n, BLOCK_N] in a launch with num_ctas=n: each CTA holds one line of it, reduces it
by itself, and then all need the row's own (row_max, row_sum). Each CTA sends its numbers to every other with `st.async`,
which counts the bytes on the receiver's mbarrier; each waits for its own mbarrier and merges the n entries in rank order,
so that all n hold the same bits. Triton before 3.8 cannot reduce across the CTAs of a cluster; hence the inline PTX.

`open_exchange` must be the kernel's first statement and an exchange is used once per launch: the mbarrier is armed for
one phase. In between lies the row's load, behind which the cluster's barrier latency hides. Interpreted, there is one
program for all lines, and the merge is a reduction over the tile's first axis.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import exp, shift_moments

_LOG2E = "0f3FB8AA3B"  # log2(e) as PTX writes a float32
_LOWEST = "0fFF7FFFFF"  # the lowest finite float32


@triton.constexpr_function
def _open_ptx(ctas: int, n_values: int) -> str:
    n_bytes = 4 * n_values * ctas
    return "\n".join(
        (
            f".shared .align 16 .b8 cluster_slots[{n_bytes}];",
            ".shared .align 8 .b64 cluster_arrived;",
            "{",
            ".reg .pred first;",
            ".reg .b32 thread, barrier;",
            "mov.u32 thread, %tid.x;",
            "setp.eq.u32 first, thread, 0;",
            "mov.u32 barrier, cluster_arrived;",
            "@first mbarrier.init.shared::cta.b64 [barrier], 1;",
            "@first fence.mbarrier_init.release.cluster;",
            f"@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [barrier], {n_bytes};",
            "barrier.cluster.arrive.relaxed.aligned;",
            "mov.u32 $0, 0;",
            "}",
        )
    )


@triton.constexpr_function
def _send_ptx(ctas: int, n_values: int, values: str) -> list[str]:
    """Thread i < ctas sends this CTA's values to slot [rank] of CTA i; then every thread waits for all slots."""
    vector = {1: "", 2: ".v2", 4: ".v4"}[n_values]
    return [
        "mov.u32 thread, %tid.x;",
        "mov.u32 slot, %cluster_ctarank;",
        f"mul.lo.u32 slot, slot, {4 * n_values};",
        "mov.u32 slots, cluster_slots;",
        "add.u32 slot, slot, slots;",
        "mov.u32 barrier, cluster_arrived;",
        f"setp.lt.u32 sends, thread, {ctas};",
        "barrier.cluster.wait.aligned;",
        "@sends mapa.shared::cluster.u32 remote_slot, slot, thread;",
        "@sends mapa.shared::cluster.u32 remote_barrier, barrier, thread;",
        f"@sends st.async.shared::cluster.mbarrier::complete_tx::bytes{vector}.f32 [remote_slot], {values}, [remote_barrier];",
        "wait_${:uid}:",
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [barrier], 0;",
        "@!done bra wait_${:uid};",
    ]


_REGISTERS = [".reg .pred sends, done;", ".reg .b32 thread, slot, slots, barrier, remote_slot, remote_barrier;"]


@triton.constexpr_function
def _merge_ptx(ctas: int) -> str:
    lines = ["{", *_REGISTERS, ".reg .f32 m, s, m_b, s_b, m_new;"]
    lines += [*_send_ptx(ctas, 2, "{$2, $3}"), "ld.shared.v2.f32 {m, s}, [slots];"]
    for rank in range(1, ctas):
        lines += [
            f"ld.shared.v2.f32 {{m_b, s_b}}, [slots+{8 * rank}];",
            "max.f32 m_new, m, m_b;",
            "sub.f32 m, m, m_new;",
            "sub.f32 m_b, m_b, m_new;",
            f"mul.f32 m, m, {_LOG2E};",
            f"mul.f32 m_b, m_b, {_LOG2E};",
            "ex2.approx.ftz.f32 m, m;",
            "ex2.approx.ftz.f32 m_b, m_b;",
            "mul.f32 s, s, m;",
            "fma.rn.f32 s, s_b, m_b, s;",
            "mov.f32 m, m_new;",
        ]
    return "\n".join([*lines, "mov.f32 $0, m;", "mov.f32 $1, s;", "}"])


@triton.constexpr_function
def _merge_moments_ptx(ctas: int, plain: bool) -> str:
    lines = ["{", *_REGISTERS, ".reg .f32 m, s, t, m_b, s_b, t_b, m_new, unused;"]
    lines += [*_send_ptx(ctas, 4, "{$3, $4, $5, $5}"), "ld.shared.v4.f32 {m, s, t, unused}, [slots];"]
    for rank in range(1, ctas):
        lines += [f"ld.shared.v4.f32 {{m_b, s_b, t_b, unused}}, [slots+{16 * rank}];", "max.f32 m_new, m, m_b;"]
        for part in ("", "_b"):  # t*exp(m - m_new) + s*exp(m - m_new)*(m - m_new), with 0*(-inf) taken as 0
            lines += [
                f"sub.f32 m{part}, m{part}, m_new;",
                f"mul.f32 unused, m{part}, {_LOG2E};",
                "ex2.approx.ftz.f32 unused, unused;",
                f"mul.f32 s{part}, s{part}, unused;",
            ]
            if not plain:
                lines += [
                    f"max.f32 m{part}, m{part}, {_LOWEST};",
                    f"mul.f32 t{part}, t{part}, unused;",
                    f"fma.rn.f32 t{part}, s{part}, m{part}, t{part};",
                ]
        lines += ["add.f32 s, s, s_b;", "add.f32 t, t, t_b;", "mov.f32 m, m_new;"]
    return "\n".join([*lines, "mov.f32 $0, m;", "mov.f32 $1, s;", "mov.f32 $2, t;", "}"])


@triton.constexpr_function
def _sum_ptx(ctas: int) -> str:
    lines = ["{", *_REGISTERS, ".reg .f32 s, s_b;", *_send_ptx(ctas, 1, "$1"), "ld.shared.f32 s, [slots];"]
    for rank in range(1, ctas):
        lines += [f"ld.shared.f32 s_b, [slots+{4 * rank}];", "add.f32 s, s, s_b;"]
    return "\n".join([*lines, "mov.f32 $0, s;", "}"])


@triton.jit
def open_exchange(CTAS: tl.constexpr, N_VALUES: tl.constexpr, PTX: tl.constexpr):
    """Arms this CTA's mbarrier for N_VALUES float32 from each of CTAS. First statement of a kernel, once."""
    if CTAS > 1 and PTX:
        ASM: tl.constexpr = _open_ptx(CTAS, N_VALUES)
        tl.inline_asm_elementwise(ASM, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def merge_over_cluster(m, s, CTAS: tl.constexpr, PTX: tl.constexpr):
    """The row's (row_max, row_sum) from each CTA's own.  # m, s: [CTAS]"""
    if CTAS == 1:
        return m, s
    elif PTX:
        ASM: tl.constexpr = _merge_ptx(CTAS)
        return tl.inline_asm_elementwise(
            ASM, "=f,=f,f,f", [m, s], dtype=(tl.float32, tl.float32), is_pure=False, pack=1
        )
    else:
        row_max = tl.max(m, 0)
        row_sum = tl.sum(s * exp(m - row_max), 0)
        return tl.zeros_like(m) + row_max, tl.zeros_like(s) + row_sum


@triton.jit
def merge_moments_over_cluster(m, s, t, PLAIN: tl.constexpr, CTAS: tl.constexpr, PTX: tl.constexpr):
    """The row's (row_max, row_sum, moment) from each CTA's own.  # [CTAS]

    The moment is sum(exp(x - row_max)*(x - row_max)), or, where PLAIN, a sum that does not depend on the maximum.
    """
    if CTAS == 1:
        return m, s, t
    elif PTX:
        ASM: tl.constexpr = _merge_moments_ptx(CTAS, PLAIN)
        return tl.inline_asm_elementwise(
            ASM, "=f,=f,=f,f,f,f", [m, s, t], dtype=(tl.float32, tl.float32, tl.float32), is_pure=False, pack=1
        )
    else:
        row_max = tl.max(m, 0)
        if PLAIN:
            s = s * exp(m - row_max)
        else:
            m, s, t = shift_moments(m, s, t, row_max)
        zero = tl.zeros_like(m)
        return zero + row_max, zero + tl.sum(s, 0), zero + tl.sum(t, 0)


@triton.jit
def sum_over_cluster(s, CTAS: tl.constexpr, PTX: tl.constexpr):
    """The row's sum from each CTA's own.  # s: [CTAS]"""
    if CTAS == 1:
        return s
    elif PTX:
        ASM: tl.constexpr = _sum_ptx(CTAS)
        return tl.inline_asm_elementwise(ASM, "=f,f", [s], dtype=tl.float32, is_pure=False, pack=1)
    else:
        return tl.zeros_like(s) + tl.sum(s, 0)
