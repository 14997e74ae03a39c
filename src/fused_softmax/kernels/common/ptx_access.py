"""PTX that kernels share: an access to one, two or four registers, and what CTAs of a cluster send each other.

An exchange declares the registers that its parts name: first, done (.pred); thread, barrier, remote, remote_barrier
(.b32).
"""

from __future__ import annotations

import triton


@triton.constexpr_function
def access_of(registers: list[str]) -> tuple[str, str]:
    """(the suffix of the instruction, its operand): ("", "a") or (".v2", "{a, b}")."""
    assert len(registers) in (1, 2, 4)
    if len(registers) == 1:
        return "", registers[0]
    return f".v{len(registers)}", "{" + ", ".join(registers) + "}"


@triton.constexpr_function
def arm_ptx(arrived: str, n_bytes: int | str) -> list[str]:
    """Thread 0 makes the mbarrier `arrived`, for one phase of n_bytes. Then all arrive at the cluster's barrier."""
    return [
        "mov.u32 thread, %tid.x;",
        "setp.eq.u32 first, thread, 0;",
        f"mov.u32 barrier, {arrived};",
        "@first mbarrier.init.shared::cta.b64 [barrier], 1;",
        "@first fence.mbarrier_init.release.cluster;",
        f"@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [barrier], {n_bytes};",
        "barrier.cluster.arrive.relaxed.aligned;",
    ]


@triton.constexpr_function
def send_ptx(registers: list[str], place: str, cta: int | str, guard: str = "") -> list[str]:
    """Sends registers to a place of this CTA's shared memory in another CTA, and counts them on its mbarrier."""
    vector, values = access_of(registers)
    send = f"st.async.shared::cluster.mbarrier::complete_tx::bytes{vector}.f32"
    return [
        f"{guard}mapa.shared::cluster.u32 remote, {place}, {cta};",
        f"{guard}mapa.shared::cluster.u32 remote_barrier, barrier, {cta};",
        f"{guard}{send} [remote], {values}, [remote_barrier];",
    ]


@triton.constexpr_function
def await_ptx() -> list[str]:
    """Waits until all bytes have arrived at this CTA's mbarrier. Its label is the target of other branches, too."""
    return [
        "wait_${:uid}:",
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [barrier], 0;",
        "@!done bra wait_${:uid};",
    ]
