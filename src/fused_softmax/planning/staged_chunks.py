"""How many chunks of a tile of positions are staged in shared memory."""

from __future__ import annotations

# bytes of a program's chunks in shared memory, at most; and of these and the numbers that its warps and CTAs exchange
# (a kernel may have 48 KB, with an mbarrier)
STAGED_BYTES, SHARED_BYTES = 40 << 10, (48 << 10) - 128


def chunks_that_fit(chunk_bytes: int, ctas: int, warps: int, inner: int, other_bytes: int = 0) -> int:
    """The most chunks in shared memory, next to the numbers that warps and CTAs exchange, and to other bytes."""
    return max(0, min(STAGED_BYTES, SHARED_BYTES - merging_bytes(ctas, warps, inner) - other_bytes)) // chunk_bytes


def merging_bytes(ctas: int, warps: int, inner: int) -> int:
    """Bytes of shared memory next to staged chunks.

    (Maximum, sum) of each position: of each CTA, and twice of its own; and a number of each warp.
    """
    return (8 * ctas + 16 + 4 * warps) * inner
