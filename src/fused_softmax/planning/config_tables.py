"""The measured tables of the policy: rungs in rising width, one ladder for each kind of device, pass and element size.

Each number was set by a measurement that docs/measurements.md describes; `fused-softmax tune` measures a device and
prints ladders in this form. What is done with them is `plan`'s.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rung:
    """Up to `max_cols` columns: so many CTAs a row, warps a CTA, rows a program.

    `recompute` keeps a 16-bit row as loaded and computes exp twice. `max_registers` caps a thread's registers, to reach
    the next step of occupancy; only where cross-compiling shows that nothing spills. `edge_registers` does so for rows
    that start unaligned, whose ends take registers too. `ahead`: of log_softmax's
    gradient, the chunks of y that are read before the row's sum is known, where it is not all of them. `parked`: of a
    gradient, the chunks that lie in shared memory. `kept` makes the rung one of the stream regime: so many chunks of a
    slice stay on chip, and the rest is walked twice, in steps of `step` chunks.
    """

    max_cols: int
    ctas: int
    num_warps: int
    recompute: bool = False
    rows: int = 1
    max_registers: int | None = None
    ahead: int | None = None
    parked: int = 0
    kept: int = 0
    step: int = 4
    edge_registers: int | None = None


# the tile regime: a row in one warp or less, so that no reduction leaves it. Rungs are in vectors of a row; a row of
# fewer than 32 vectors takes as many lanes, and `rows` counts rows for each lane set. H200: one vector a thread and
# 4 warps hold torch's own latency (1.2 to 1.6 us) at every narrow width, and the copy's throughput from 8 columns on
TILE = {
    2: (Rung(16, 1, 4), Rung(32, 1, 4, rows=2), Rung(64, 1, 1, rows=2), Rung(128, 1, 2)),
    4: (Rung(32, 1, 4), Rung(64, 1, 4), Rung(256, 1, 2)),
}
TILE_MAX_COLS = 1024
# columns up to which it is preferred: 1,024 of float32 are .993 of a copy with 4 warps a row, .972 with a warp for each
TILE_COLS = {2: 1024, 4: 896}
# rows that are read element by element: up to so many columns, 4 elements a thread of so many warps
TILE_SCALAR_COLS, TILE_SCALAR_WARPS = 256, 4
# columns from which rows that start unaligned are read in vectors, with their ends apart
EDGE_MIN_COLS = {2: 64, 4: 32}

WIDEST = 1 << 62
# forward, where there are clusters; H200
FORWARD_CLUSTER = {
    2: (
        Rung(2048, 1, 2),
        Rung(3072, 1, 1),
        Rung(4096, 1, 1, True),
        Rung(5120, 1, 2, True),
        Rung(6144, 1, 4, True),
        Rung(7680, 2, 4),
        Rung(8192, 1, 16, True),
        Rung(10240, 2, 4),
        Rung(12288, 1, 16),
        Rung(14336, 2, 8, True),
        Rung(22528, 4, 4),
        Rung(24576, 2, 16, True, max_registers=40),
        Rung(28672, 4, 4),
        Rung(32768, 4, 8),
        Rung(40960, 8, 4),
        Rung(49152, 4, 8, True),
        Rung(61440, 8, 4, True),
        Rung(65536, 8, 8),
        Rung(77824, 8, 8, True),
        Rung(81920, 8, 8),
        Rung(98304, 8, 8, True),
        Rung(106496, 8, 4, True, max_registers=96),
        Rung(131072, 16, 4),
        Rung(245760, 16, 4, True),
        Rung(262144, 16, 8, True),
        Rung(524288, 16, 8, True, max_registers=112),
        Rung(1048576, 16, 16, True, max_registers=112),
    ),
    4: (
        Rung(1024, 1, 4),
        Rung(2560, 1, 1),
        Rung(3584, 1, 4),
        Rung(8192, 1, 16),
        Rung(11264, 4, 4),
        Rung(14336, 1, 16),
        Rung(24576, 8, 4),
        Rung(32768, 4, 16),
        Rung(45056, 8, 8),
        Rung(65536, 16, 4),
        Rung(131072, 16, 8, max_registers=48),
        Rung(212992, 16, 8),
        Rung(262144, 16, 8, max_registers=80),
        Rung(524288, 16, 16),
        Rung(WIDEST, 16, 16, kept=8, step=2, max_registers=64),
    ),
}


def _between(ladder: tuple[Rung, ...], above: int, max_cols: int) -> tuple[Rung, ...]:
    """The rungs of `ladder` for widths from above + 1 to max_cols."""
    return tuple(rung for rung in ladder if above < rung.max_cols <= max_cols)


FORWARD_LOG_CLUSTER = {
    2: (
        *_between(FORWARD_CLUSTER[2], 0, 61440),
        Rung(65536, 8, 8, edge_registers=48),
        *_between(FORWARD_CLUSTER[2], 65536, 131072),
        Rung(163840, 16, 4, True, max_registers=80),
        Rung(212992, 16, 4, True, max_registers=96),
        Rung(262144, 16, 4, True, max_registers=112),
        Rung(524288, 16, 8, True, max_registers=120),
        Rung(1048576, 16, 16, True, max_registers=112),
    ),
    4: (
        *_between(FORWARD_CLUSTER[4], 0, 65536),
        Rung(114688, 16, 8),
        Rung(131072, 8, 16, max_registers=64),
        Rung(212992, 16, 8),
        Rung(262144, 16, 16, max_registers=64),
        Rung(524288, 16, 16),
        Rung(WIDEST, 16, 16, kept=8, step=2, max_registers=64),
    ),
}
# backward, where there are clusters; H200
BACKWARD_CLUSTER = {
    2: (
        Rung(1536, 1, 4, True),
        Rung(2048, 1, 8, True),
        Rung(2560, 1, 4, True),
        Rung(3584, 1, 8, True),
        Rung(4096, 2, 2, True),
        Rung(6144, 1, 8, True),
        Rung(8192, 2, 8, True, max_registers=56),
        Rung(12288, 4, 4, True, max_registers=72),
        Rung(32768, 4, 8),
        Rung(57344, 8, 4, True),
        Rung(65536, 8, 8, True, max_registers=80),
        Rung(114688, 16, 4, True),
        Rung(131072, 16, 8, True),
        Rung(212992, 16, 4, True),
        Rung(262144, 16, 8, True),
        Rung(524288, 16, 8, True, parked=5, max_registers=128),
        Rung(655360, 16, 16, kept=8, step=3),
        Rung(WIDEST, 16, 16, kept=9, step=3),
    ),
    4: (
        Rung(1792, 1, 8),
        Rung(2048, 2, 8),
        Rung(2560, 1, 8),
        Rung(3584, 1, 16),
        Rung(4096, 4, 4),
        Rung(6144, 1, 16),
        Rung(12288, 4, 8),
        Rung(16384, 8, 4),
        Rung(32768, 8, 8),
        Rung(212992, 16, 8),
        Rung(262144, 16, 8, parked=3, max_registers=128),
        Rung(327680, 16, 16, kept=8, step=3),
        Rung(WIDEST, 16, 16, kept=10, step=3),
    ),
}
BACKWARD_LOG_CLUSTER = {
    2: (
        Rung(2560, 1, 4, True),
        Rung(6144, 1, 8, True),
        *_between(BACKWARD_CLUSTER[2], 6144, 131072),
        Rung(196608, 16, 4, True),
        Rung(212992, 16, 4, True, parked=1, max_registers=128),
        Rung(262144, 16, 4, True, max_registers=160),
        Rung(524288, 16, 8, True, parked=4, max_registers=128),
        Rung(1048576, 16, 16, True, parked=2, ahead=4, max_registers=128),
        Rung(WIDEST, 16, 8, kept=16, step=4, ahead=4, max_registers=128),
    ),
    4: (
        Rung(2560, 1, 8),
        Rung(6144, 1, 16),
        *_between(BACKWARD_CLUSTER[4], 6144, 212992),
        Rung(262144, 16, 16, ahead=2, max_registers=64),
        Rung(524288, 16, 8, parked=10, ahead=4, max_registers=128),
        Rung(WIDEST, 16, 8, kept=16, step=4, ahead=4, max_registers=128),
    ),
}
# the ladders where there are clusters, by (backward, log)
CLUSTER = {
    (False, False): FORWARD_CLUSTER,
    (False, True): FORWARD_LOG_CLUSTER,
    (True, False): BACKWARD_CLUSTER,
    (True, True): BACKWARD_LOG_CLUSTER,
}
# where there are none: one program a row as far as its registers reach (the H200's one-program figures)
FORWARD_BLOCK = {
    2: (Rung(4096, 1, 4), Rung(16384, 1, 16), Rung(57344, 1, 16, True)),
    4: (Rung(4096, 1, 4), Rung(16384, 1, 16), Rung(32768, 1, 16)),
}
BACKWARD_BLOCK = {
    # longer rows spill 72 to 96 bytes a thread with Triton 3.9
    2: (Rung(4096, 1, 8, True), Rung(28672, 1, 16, True)),
    4: (Rung(4096, 1, 8), Rung(16384, 1, 16)),
}
# a step of the stream regime: warps and chunks of one program
STREAM_WARPS, STREAM_CHUNKS = 8, 4

# --- what is not softmax ---
# a loss with its gradient in the same pass: columns of 16 bits, half as many of float32. H200, bfloat16: 13 to 20
# vectors a thread and few CTAs are 1.02 to 1.06 of a copy where softmax's own plan is 1.13 to 1.27
LOSS_CLUSTER = (
    Rung(3072, 1, 4, True),
    Rung(8192, 1, 8, True),
    Rung(12288, 2, 4, True, max_registers=72),
    Rung(16384, 2, 4, True, max_registers=80),
    Rung(24576, 2, 8, True, max_registers=64),
    Rung(26624, 2, 4, True, max_registers=96),
    Rung(32768, 2, 4, True, max_registers=112),
    Rung(40960, 4, 4, True, max_registers=80),
    Rung(53248, 4, 4, True, max_registers=96),
    Rung(65536, 4, 4, True, max_registers=112),
    Rung(81920, 8, 4, True, max_registers=80),
    Rung(106496, 8, 4, True, max_registers=96),
    Rung(114688, 8, 4, True, max_registers=112),
    Rung(131072, 4, 8, True, max_registers=112),
    Rung(163840, 8, 4, True, max_registers=128),
    Rung(212992, 16, 4, True, max_registers=96),
    Rung(262144, 16, 4, True, max_registers=112),
)
# masked softmax without a mask (causal), with one, and its gradient: up to 8,192 columns; softmax's beyond
MASKED = {
    "unmasked": (Rung(1024, 1, 1), Rung(2048, 1, 2), Rung(4096, 1, 2, True), Rung(8192, 1, 4, True)),
    "masked": (
        Rung(1024, 1, 1),
        Rung(1536, 1, 2),
        Rung(3072, 1, 4),
        Rung(8192, 1, 8),
    ),
    "backward": (Rung(1024, 1, 1, True), Rung(2048, 1, 2, True), Rung(4096, 1, 4, True), Rung(8192, 1, 8, True)),
}
# of a masked gradient on a cluster whose threads hold at most 4 vectors of 16 bits a tensor. H200, bfloat16, causal:
# 253 us for 302 us without a cap at 32,000 columns, 248 us for 295 us at 128,256 (2^28 elements)
MASKED_BACKWARD_REGISTERS = 80
# vectors a thread holds of a longer row: alone, and with as many of a mask or of a gradient's second row beside
MASKED_CHUNKS = {False: 16, True: 13}
# up to so many columns of 16 bits, half as many of float32: CTAs of a row, warps of each, chunks of a step. H200: steps
# that fit a row, so that little is left over for a last one (12,288 columns: 6 chunks 4,460 GB/s, 8 chunks 4,050)
STATISTICS_STEPS = (
    (2048, 1, 1, 8),
    (4096, 1, 2, 8),
    (8192, 1, 4, 8),
    (12288, 1, 4, 6),
    (16384, 1, 4, 8),
    (24576, 1, 4, 6),
    (45056, 1, 8, 8),
    (57344, 1, 8, 5),
    (73728, 1, 8, 8),
    (114688, 2, 4, 8),
    (163840, 2, 8, 8),
    (229376, 4, 4, 8),
    (WIDEST, 2, 8, 8),
)
# warps of one program, by whether rows start unaligned, and its chunks, whatever the width
ELEMENTWISE_WARPS, ELEMENTWISE_CHUNKS = {False: 4, True: 2}, 4
