"""The PTX that the exchanges of a cluster share: an mbarrier for what arrives, sends to a CTA, and the wait.

An exchange declares the registers that they name: first, done (.pred); thread, barrier, remote, remote_barrier (.b32).
"""

from __future__ import annotations

import triton

from .ptx_access import access_of


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
