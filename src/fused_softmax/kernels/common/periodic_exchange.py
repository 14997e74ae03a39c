"""Exchange of each position's numbers between the CTAs of a cluster, and the places that slots read.

Each CTA reduces all positions over its vectors (`periodic_slots`) and puts their numbers into its shared memory. Its
threads send them to every CTA with `st.async`, which counts the bytes on the receiver's mbarrier, as in
`spatial_cluster`. Each CTA waits for its own mbarrier and merges the numbers in the order of rank: all CTAs compute the
same bits, and no CTA ends before all of its numbers have arrived.

The terms that slots need replace the position's own numbers. They stand once more at each multiple of `inner` behind
them, so a thread finds those of all of its slots from the place of its first one on.

    place      0 1 2 3 4 5 ...       3 positions: a thread whose slots are of positions 2, 0, 1, 2
    position   0 1 2 0 1 2 ...       reads places 2, 3, 4, 5

A launch uses one exchange, and `declare_exchange` must come before its loads: they hide the latency of the cluster's
barrier.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gathered_ptx import get_numbers_ptx
from .gathered_rows import await_threads, numbers_at, put_numbers
from .numerics import exp, scaled
from .ptx_access import access_of, arm_ptx, await_ptx, send_ptx

POSITIONS = 256  # of a plane at most: the room for their numbers
OWN_BYTES = (48 << 10) - 16  # of shared memory that a kernel may declare, less an mbarrier


@triton.constexpr_function
def places_bytes(n_values: int, vec: int) -> int:
    """Bytes of n_values float32 for each place."""
    return 4 * n_values * (POSITIONS + vec)


@triton.constexpr_function
def arrivals_bytes(n_values: int, ctas: int, others: int) -> int:
    """Bytes for the numbers of all CTAs, in addition to so many others: for all POSITIONS, or what is left."""
    return min(4 * n_values * ctas * POSITIONS, OWN_BYTES - others) if ctas > 1 else 0


@triton.constexpr_function
def _declare_ptx(ctas: int, n_values: int) -> str:
    ptx = [".shared .align 8 .b64 periodic_arrived;", "{", ".reg .pred first;", ".reg .b32 thread, barrier, n_bytes;"]
    ptx += [f"mul.lo.u32 n_bytes, $1, {4 * n_values * ctas};", *arm_ptx("periodic_arrived", "n_bytes")]
    return "\n".join([*ptx, "mov.u32 $0, 0;", "}"])


@triton.constexpr_function
def _send_ptx(ctas: int, n_values: int, threads: int, arrivals: int) -> str:
    """Sends the numbers of $1 positions to all CTAs, thread i the positions i, i + threads, ..., and waits for theirs.

    arrivals: where those of all CTAs of position 0 arrive, in bytes.
    """
    size, registers = 4 * n_values, ["a", "b"][:n_values]
    vector, values = access_of(registers)
    ptx = ["{", ".reg .pred sends, done;", ".reg .f32 a, b;"]
    ptx += [".reg .b32 position, rank, regions, own, at, remote, barrier, remote_barrier;"]
    ptx += ["mov.u32 position, %tid.x;", "mov.u32 rank, %cluster_ctarank;", "mov.u32 barrier, periodic_arrived;"]
    ptx += ["mov.u32 regions, gathered_rows;", "bar.sync 0;", "barrier.cluster.wait.aligned;"]
    ptx += ["send_${:uid}:", "setp.lt.u32 sends, position, $1;", "@!sends bra wait_${:uid};"]
    ptx += [f"mad.lo.u32 own, position, {size}, regions;", f"ld.volatile.shared{vector}.f32 {values}, [own];"]
    ptx += [f"mad.lo.u32 at, position, {ctas}, rank;", f"mad.lo.u32 at, at, {size}, regions;"]
    ptx += [f"add.u32 at, at, {arrivals};"]
    for c in range(ctas):
        ptx += send_ptx(registers, "at", c)
    ptx += [f"add.u32 position, position, {threads};", "bra send_${:uid};", *await_ptx()]
    return "\n".join([*ptx, "mov.u32 $0, 0;", "}"])


@triton.jit
def _arrived(position, c, N_VALUES: tl.constexpr, CTAS: tl.constexpr, ARRIVALS: tl.constexpr):
    """The numbers of a position that came from CTA c; of one CTA its own, at byte 0."""
    return numbers_at(position * CTAS + c, N_VALUES, ARRIVALS if CTAS > 1 else 0)


@triton.jit
def declare_exchange(inner, CTAS: tl.constexpr, N_VALUES: tl.constexpr, PTX: tl.constexpr):
    """Arms this CTA's mbarrier for N_VALUES float32 of each position from each CTA."""
    if CTAS > 1 and PTX:
        ASM: tl.constexpr = _declare_ptx(CTAS, N_VALUES)
        tl.inline_asm_elementwise(ASM, "=r,r", [inner], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def send_own(
    inner, N_VALUES: tl.constexpr, CTAS: tl.constexpr, THREADS: tl.constexpr, ARRIVALS: tl.constexpr
):  # fmt: skip
    """Sends each position's own numbers, at byte 0, to all CTAs, and waits for theirs; one CTA for its threads."""
    if CTAS > 1:
        SEND: tl.constexpr = _send_ptx(CTAS, N_VALUES, THREADS, ARRIVALS)
        tl.inline_asm_elementwise(SEND, "=r,r", [inner], dtype=tl.int32, is_pure=False, pack=1)
    else:
        await_threads(True)


@triton.jit
def place_to_read(position, inner, CTAS: tl.constexpr, VEC: tl.constexpr):
    """Where a thread reads the numbers of its position. Those behind the last one read numbers that they do not use.

    Of one CTA these are at a place that no thread writes: the last position's is written meanwhile (`put_for_slots`).
    """
    if CTAS > 1:
        return tl.minimum(position, inner - 1)
    else:
        return tl.where(position < inner, position, inner + VEC - 1)


@triton.jit
def merged_max_sum(position, CTAS: tl.constexpr, ARRIVALS: tl.constexpr):
    """(maximum, sum of exponentials) of a position over all CTAs. Read twice: of 16 CTAs registers would hold too few.

    # [THREADS]
    """
    top, total = _arrived(position, 0, 2, CTAS, ARRIVALS)
    if CTAS > 1:
        for c in range(1, CTAS):
            top = tl.maximum(top, _arrived(position, c, 2, CTAS, ARRIVALS)[0])
        total = tl.zeros_like(top)
        for c in range(CTAS):
            m, s = _arrived(position, c, 2, CTAS, ARRIVALS)
            total += scaled(s, exp(m - top), True)
    return top, total


@triton.jit
def merged_sum(position, CTAS: tl.constexpr, ARRIVALS: tl.constexpr):
    """The sum of a position over all CTAs.  # [THREADS]"""
    total = _arrived(position, 0, 1, CTAS, ARRIVALS)[0]
    for c in range(1, CTAS):
        total += _arrived(position, c, 1, CTAS, ARRIVALS)[0]
    return total


@triton.jit
def put_for_slots(values, position, inner, N_VALUES: tl.constexpr, VEC: tl.constexpr):
    """Puts what slots read of each position, in place of its own numbers and at the next places of the same position.

    A position behind the last one puts nothing. No thread may read own numbers of others any more.
    """
    put_numbers(values, position, position < inner, N_VALUES, 0)
    for k in range(inner, inner + VEC - 1, inner):
        put_numbers(values, position + k, (position < inner) & (position + k < inner + VEC - 1), N_VALUES, 0)


@triton.jit
def await_put():
    """Waits until all threads have put what slots read. Returns 0, for `numbers_of`."""
    return tl.inline_asm_elementwise("bar.sync 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def numbers_of(place, put, N_VALUES: tl.constexpr):
    """The N_VALUES numbers at each place. put: what `await_put` returned.

    The assembly is pure and needs that number, so it stays behind the barrier. Triton has a second copy of it, in a
    layout that nothing reads, and could not leave that one out otherwise.
    """
    ASM: tl.constexpr = get_numbers_ptx(N_VALUES, 0)
    if N_VALUES == 1:
        return (tl.inline_asm_elementwise(ASM, "=f,r", [place + put], dtype=tl.float32, is_pure=True, pack=1),)
    else:
        return tl.inline_asm_elementwise(
            ASM, "=f,=f,r", [place + put], dtype=(tl.float32, tl.float32), is_pure=True, pack=1
        )
