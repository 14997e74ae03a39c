"""Reductions over the programs of a thread-block cluster, through distributed shared memory.

A row on a cluster is a tile of CTAS x WARPS_PER_ROW segments in a launch with num_ctas=CTAS. Each CTA holds
WARPS_PER_ROW segments, one for each of its warps (or one in all), and each segment is reduced by itself. Then every
thread needs the row's own numbers. The lanes of each warp send the warp's numbers to a slot in every CTA with
`st.async`, which counts the bytes on the receiver's mbarrier. Each CTA waits for its own mbarrier. Each warp then
merges all slots across its lanes by operations that commute, so every thread of the cluster holds the same bits. No
barrier within a CTA is needed, and no reduction through its shared memory. Triton before 3.8 cannot reduce across the
CTAs of a cluster, so this is inline PTX.

`init_cluster_barrier` must be the kernel's first statement and `leave_cluster` its last. A launch uses one exchange
only, because the mbarrier is armed for one phase. The load of the row lies in between and hides the latency of the
cluster's barrier. Interpreted, one program holds all segments, and the merge is a reduction over the tile's first axis.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .numerics import PTX_LOG2E, TRITON, exp, rescale_moments, rounded_product
from .ptx_access import access_of, arm_ptx, await_ptx, send_ptx

# Triton 3.8 and later end a kernel on a cluster with a cluster barrier
_CLOSING_BARRIER = tl.constexpr(TRITON >= (3, 8))
_LOWEST = "0fFF7FFFFF"  # the lowest finite float32


@triton.constexpr_function
def _open_ptx(ctas: int, n_values: int, warps_per_row: int) -> str:
    n_bytes = 4 * n_values * ctas * warps_per_row
    return "\n".join(
        (
            f".shared .align 16 .b8 cluster_slots[{n_bytes}];",
            ".shared .align 8 .b64 cluster_arrived;",
            "{",
            ".reg .pred first;",
            ".reg .b32 thread, barrier;",
            *arm_ptx("cluster_arrived", n_bytes),
            "mov.u32 $0, 0;",
            "}",
        )
    )


@triton.constexpr_function
def _exchange(ctas: int, warps_per_row: int, registers: list[str]) -> list[str]:
    """Sends this segment's values to its slot in every CTA: lane i < ctas of its warp to CTA i. Waits for all slots."""
    n_values = len(registers)
    sender = "lane" if warps_per_row > 1 else "thread"
    return [
        "mov.u32 thread, %tid.x;",
        "and.b32 lane, thread, 31;",
        "mov.u32 slot, %cluster_ctarank;",
        f"mul.lo.u32 slot, slot, {warps_per_row};",
        *(["shr.u32 part, thread, 5;", "add.u32 slot, slot, part;"] if warps_per_row > 1 else []),
        f"mul.lo.u32 slot, slot, {4 * n_values};",
        "mov.u32 slots, cluster_slots;",
        "add.u32 slot, slot, slots;",
        "mov.u32 barrier, cluster_arrived;",
        f"setp.lt.u32 sends, {sender}, {ctas};",
        "barrier.cluster.wait.aligned;",
        *send_ptx(registers, "slot", sender, "@sends "),
        *await_ptx(),
        f"mad.lo.u32 slot, lane, {4 * n_values}, slots;",
    ]


@triton.constexpr_function
def _registers(n_slots: int, *names: str) -> list[str]:
    """Declarations. A lane takes every 32nd slot, so each value has the names 0, 1, ..."""
    own = [f"{name}{k}" for name in names for k in range(-(-n_slots // 32))]
    return [
        ".reg .pred sends, done, taken;",
        ".reg .b32 thread, lane, part, slot, slots, barrier, remote, remote_barrier, bits, sign;",
        f".reg .f32 {', '.join(own)}, row_max, by, other;",
    ]


@triton.constexpr_function
def _load(n_slots: int, *names_and_neutrals: tuple[str, str]) -> list[str]:
    """Loads each lane's slots, or the neutral value where a lane has no slot."""
    n_values = {1: 1, 2: 2, 3: 4}[len(names_and_neutrals)]
    ptx = []
    for k in range(-(-n_slots // 32)):
        names = [f"{name}{k}" for name, _ in names_and_neutrals] + ["other"] * (n_values - len(names_and_neutrals))
        vector, target = access_of(names)
        ptx += [f"mov.f32 {name}{k}, {neutral};" for name, neutral in names_and_neutrals]
        ptx += [f"setp.lt.u32 taken, lane, {n_slots - 32 * k};"]
        ptx += [f"@taken ld.shared{vector}.f32 {target}, [slot+{128 * n_values * k}];"]
    return ptx


@triton.constexpr_function
def _max_over_lanes(n_slots: int) -> list[str]:
    """row_max, by one instruction on integers that have the order of the floats."""
    ordered = ["shr.s32 sign, bits, 31;", "and.b32 sign, sign, 0x7fffffff;", "xor.b32 bits, bits, sign;"]
    ptx = ["mov.f32 row_max, m0;"]
    ptx += [f"max.f32 row_max, row_max, m{k};" for k in range(1, -(-n_slots // 32))]
    ptx += ["mov.b32 bits, row_max;", *ordered, "redux.sync.max.s32 bits, bits, 0xffffffff;", *ordered]
    return [*ptx, "mov.b32 row_max, bits;"]


@triton.constexpr_function
def _sum_over_lanes(name: str, n_slots: int) -> list[str]:
    ptx = [f"add.rn.f32 {name}0, {name}0, {name}{k};" for k in range(1, -(-n_slots // 32))]
    for step in (16, 8, 4, 2, 1):
        ptx += [f"shfl.sync.bfly.b32 other, {name}0, {step}, 31, 0xffffffff;", f"add.rn.f32 {name}0, {name}0, other;"]
    return ptx


@triton.constexpr_function
def _merge_ptx(ctas: int, warps_per_row: int) -> str:
    n_slots = ctas * warps_per_row
    ptx = ["{", *_registers(n_slots, "m", "s"), *_exchange(ctas, warps_per_row, ["$2", "$3"])]
    ptx += [*_load(n_slots, ("m", _LOWEST), ("s", "0f00000000")), *_max_over_lanes(n_slots)]
    for k in range(-(-n_slots // 32)):
        ptx += [f"sub.f32 m{k}, m{k}, row_max;", f"mul.f32 m{k}, m{k}, {PTX_LOG2E};", f"ex2.approx.ftz.f32 m{k}, m{k};"]
        ptx += [f"mul.rn.f32 s{k}, s{k}, m{k};"]
    return "\n".join([*ptx, *_sum_over_lanes("s", n_slots), "mov.f32 $0, row_max;", "mov.f32 $1, s0;", "}"])


@triton.constexpr_function
def _merge_moments_ptx(ctas: int, warps_per_row: int, plain: bool) -> str:
    n_slots = ctas * warps_per_row
    ptx = ["{", *_registers(n_slots, "m", "s", "t"), *_exchange(ctas, warps_per_row, ["$3", "$4", "$5", "$5"])]
    ptx += [*_load(n_slots, ("m", _LOWEST), ("s", "0f00000000"), ("t", "0f00000000")), *_max_over_lanes(n_slots)]
    for k in range(-(-n_slots // 32)):  # t*exp(m - row_max) + s*exp(m - row_max)*(m - row_max), 0*(-inf) taken as 0
        ptx += [f"sub.f32 m{k}, m{k}, row_max;", f"mul.f32 by, m{k}, {PTX_LOG2E};", "ex2.approx.ftz.f32 by, by;"]
        ptx += [f"mul.rn.f32 s{k}, s{k}, by;"]
        if not plain:
            ptx += [f"max.f32 m{k}, m{k}, {_LOWEST};", f"mul.f32 t{k}, t{k}, by;"]
            ptx += [f"fma.rn.f32 t{k}, s{k}, m{k}, t{k};"]
    ptx += [*_sum_over_lanes("s", n_slots), *_sum_over_lanes("t", n_slots)]
    return "\n".join([*ptx, "mov.f32 $0, row_max;", "mov.f32 $1, s0;", "mov.f32 $2, t0;", "}"])


@triton.constexpr_function
def _sum_ptx(ctas: int, warps_per_row: int) -> str:
    n_slots = ctas * warps_per_row
    ptx = [
        "{",
        *_registers(n_slots, "s"),
        *_exchange(ctas, warps_per_row, ["$1"]),
        *_load(n_slots, ("s", "0f00000000")),
    ]
    return "\n".join([*ptx, *_sum_over_lanes("s", n_slots), "mov.f32 $0, s0;", "}"])


@triton.jit
def init_cluster_barrier(
    CTAS: tl.constexpr, N_VALUES: tl.constexpr, PTX: tl.constexpr, WARPS_PER_ROW: tl.constexpr = 1
):
    """Arms this CTA's mbarrier for N_VALUES float32 from each of CTAS x WARPS_PER_ROW segments. A kernel's first
    statement.
    """
    if CTAS > 1 and PTX:
        ASM: tl.constexpr = _open_ptx(CTAS, N_VALUES, WARPS_PER_ROW)
        tl.inline_asm_elementwise(ASM, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def keep_segment_layout(x, CTAS: tl.constexpr, PTX: tl.constexpr):
    """x, in a layout that keeps each segment in its CTA.

    It is for a load that only a reduction uses, where a row is on a cluster. Triton 3.9 gives such a load the CTA
    layout that its planner prefers for the reduction, which spreads a segment over CTAs. The exchange would then send
    other segments' values. Triton leaves a load alone if its user may have side effects. The user here is a register
    move, which ptxas removes.
    """
    if CTAS > 1 and PTX and x.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    elif CTAS > 1 and PTX:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)
    else:
        return x


@triton.jit
def leave_cluster(CTAS: tl.constexpr, PTX: tl.constexpr):
    """Ends the kernel without the barrier that Triton 3.8 and later put there. A kernel's last statement.

    That barrier first waits until all of the CTA's stores have reached memory, while its registers hold no other row.
    It keeps a CTA's shared memory alive for CTAs that still write there. No CTA does so here: each CTA has waited for
    every slot that the others fill, so all writes to its memory have landed, and the others wait for its own writes.
    Threads that have exited count as arrived.
    """
    if CTAS > 1 and PTX and _CLOSING_BARRIER:
        tl.inline_asm_elementwise("mov.u32 $0, 0;\nexit;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def cluster_reduce_max_sum(m, s, CTAS: tl.constexpr, PTX: tl.constexpr, WARPS_PER_ROW: tl.constexpr = 1):
    """The row's (row_max, row_sum) from each segment's own.  # m, s: [CTAS*WARPS_PER_ROW]"""
    if CTAS == 1:
        return m, s
    elif PTX:
        ASM: tl.constexpr = _merge_ptx(CTAS, WARPS_PER_ROW)
        return tl.inline_asm_elementwise(
            ASM, "=f,=f,f,f", [m, s], dtype=(tl.float32, tl.float32), is_pure=False, pack=1
        )
    else:
        row_max = tl.max(m, 0)
        row_sum = tl.sum(rounded_product(s, exp(m - row_max)), 0)
        return tl.zeros_like(m) + row_max, tl.zeros_like(s) + row_sum


@triton.jit
def cluster_reduce_moments(
    m, s, t, PLAIN: tl.constexpr, CTAS: tl.constexpr, PTX: tl.constexpr, WARPS_PER_ROW: tl.constexpr = 1
):
    """The row's (row_max, row_sum, moment) from each segment's own.  # [CTAS*WARPS_PER_ROW]

    The moment is sum(exp(x - row_max)*(x - row_max)), or, where PLAIN, a sum that does not depend on the maximum.
    """
    if CTAS == 1:
        return m, s, t
    elif PTX:
        ASM: tl.constexpr = _merge_moments_ptx(CTAS, WARPS_PER_ROW, PLAIN)
        return tl.inline_asm_elementwise(
            ASM, "=f,=f,=f,f,f,f", [m, s, t], dtype=(tl.float32, tl.float32, tl.float32), is_pure=False, pack=1
        )
    else:
        row_max, zero = tl.max(m, 0), tl.zeros_like(m)
        if PLAIN:
            s = rounded_product(s, exp(m - row_max))
        else:
            _, s, t = rescale_moments(m, s, t, row_max, True)
        return zero + row_max, zero + tl.sum(s, 0), zero + tl.sum(t, 0)


@triton.jit
def cluster_reduce_sum(s, CTAS: tl.constexpr, PTX: tl.constexpr, WARPS_PER_ROW: tl.constexpr = 1):
    """The row's sum from each segment's own.  # s: [CTAS*WARPS_PER_ROW]"""
    if CTAS == 1:
        return s
    elif PTX:
        ASM: tl.constexpr = _sum_ptx(CTAS, WARPS_PER_ROW)
        return tl.inline_asm_elementwise(ASM, "=f,f", [s], dtype=tl.float32, is_pure=False, pack=1)
    else:
        return tl.zeros_like(s) + tl.sum(s, 0)
