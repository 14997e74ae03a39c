"""The measured tables of the policy: configs in rising width, one table for each kind of device, pass and element size.

docs/measurements/ describes the measurement behind each number. `fused-softmax tune` measures a device and prints a
table in this form. The planners `softmax` and `losses` use the tables; `masked_tables` has those of masked rows.
docs/measurements/thresholds.md has the figures behind the thresholds.
"""

from __future__ import annotations

from typing import NamedTuple


class KernelConfig(NamedTuple):
    """The numbers for rows of up to `max_cols` columns: CTAs per row, warps per CTA, rows per program.

    recompute: hold a 16-bit row as loaded and compute exp twice. max_registers: a cap on a thread's registers, to reach
    the next step of occupancy, only where cross-compiling shows no spill. unaligned_registers: the same for unaligned
    rows, whose head and tail take registers too. unaligned_warps: the warps of unaligned rows. prefetched_chunks: of
    log_softmax's gradient, the chunks of y that are read before the row's sum is known; None: all. smem_staged: the
    chunks that are staged in shared memory. unaligned_staged: those of unaligned rows; None: one more than of others,
    as head and tail take room, or none. resident_chunks: not 0 in the two_pass regime; these chunks of a slice stay on
    chip, and the rest is read twice, in steps of `step` chunks. odd_chunks: from 13 chunks on, an odd number up to this
    one is not rounded up.
    """

    max_cols: int
    ctas: int
    num_warps: int
    recompute: bool = False
    rows: int = 1
    max_registers: int | None = None
    prefetched_chunks: int | None = None
    smem_staged: int = 0
    resident_chunks: int = 0
    step: int = 4
    unaligned_registers: int | None = None
    unaligned_warps: int | None = None
    odd_chunks: int = 13
    unaligned_staged: int | None = None


class HeldRow(NamedTuple):
    """Rows of `fewest` to `most` columns: threads of each, warps of a program, rows that such a group of threads takes,
    and vectors of a thread, at least, so that widths share kernels."""

    fewest: int
    most: int
    threads: int
    num_warps: int
    rows: int = 1
    least_chunks: int = 1


# the warp regime: a row in one warp or less, so that no reduction leaves its warp. Widths are in vectors per row. A row
# of n < 32 vectors takes n threads, and `rows` counts rows per such group of threads. One vector per thread and 4 warps
# reach torch's own latency and the copy's throughput
WARP = {
    2: (
        KernelConfig(16, 1, 4),
        KernelConfig(32, 1, 4, rows=2),
        KernelConfig(64, 1, 1, rows=2),
        KernelConfig(128, 1, 2),
    ),
    4: (KernelConfig(32, 1, 4), KernelConfig(64, 1, 4), KernelConfig(256, 1, 2)),
}
# of unaligned rows of 16 bits, forward: (fewest and most vectors of a row, threads that hold it, warps, rows per group
# of threads)
WARP_UNALIGNED = ((32, 48, 16, 2, 1), (65, 96, 32, 4, 1))
# of rows of 17 to 32 vectors of 16 bits, forward, of a softmax or of a loss with its gradient: threads that hold a row,
# and warps. Two rows of a warp are reduced at once. float32, log_softmax, has 16 threads of a row, too
WARP_HALVES = {2: (16, 2), 4: (16, 4)}
# of unaligned rows of 16 bits, forward, of a softmax or of a loss with its gradient: the fewest and most vectors of a
# row, and the warps of a program. A row has 16 threads, and they reduce two rows at once
WARP_PAIRS = (8, 14, 2)
# of whole vectors, forward: (fewest and most columns, warps of a program). A warp has one row. Narrower rows are bound
# by how fast programs start
WARP_EACH = {2: ((385, 512, 2), (705, 1024, 1)), 4: ((385, 1024, 1),)}
# vectors of float32 per thread, at most, of which exp is computed once
KEPT_EXPS = 8
WARP_MAX_COLS = 1024
# columns up to which it is preferred. Wider rows of float32 are faster in 4 warps
WARP_COLS = {2: 1024, 4: 896}
# rows in partial vectors, which have fewer bytes than an access may have: the most columns, and the warps of a program.
# Of softmax, those that `gathered` does not take
PARTIAL_COLS, PARTIAL_WARPS = 256, 4
# by the elements of a partial vector: (the fewest vectors of a row in a thread, the most elements in a thread). A row
# takes the most threads that leave each the first number. A thread takes as many rows as the second number allows
PARTIAL_FORWARD = {1: (4, 4), 2: (3, 8), 4: (2, 8)}
PARTIAL_BACKWARD = {1: (3, 4), 2: (2, 8), 4: (3, 8)}
PARTIAL_STATISTICS = {1: (5, 16), 2: (5, 8), 4: (3, 24)}
# of softmax and losses: the most threads of a row whose threads take 6 vectors in place of 5, so that widths share
# kernels
PARTIAL_EVEN = 4
# columns from which unaligned rows are read in vectors, except head and tail
UNALIGNED_MIN_COLS = {2: 64, 4: 32}

WIDEST = 1 << 62
# forward of float32 beyond 262,144 columns
WIDE_FLOATS = (
    KernelConfig(327680, 16, 8, max_registers=128, unaligned_registers=128),
    KernelConfig(458752, 16, 16, resident_chunks=6, step=4, max_registers=64),
    KernelConfig(524288, 16, 16),
    KernelConfig(WIDEST, 16, 16, resident_chunks=7, step=3, max_registers=64),
)
# forward, where there are clusters; H200. Several warps hold a row where one would be as fast with many rows: with few
# rows a warp waits for its own loads and sums. A multiprocessor must hold about 50 KB of rows
FORWARD_CLUSTER = {
    2: (
        KernelConfig(1280, 1, 1, True),
        KernelConfig(2560, 1, 2),
        KernelConfig(3072, 1, 4, True),
        # exp is computed once: few rows take less time
        KernelConfig(5120, 1, 4),
        KernelConfig(6144, 1, 8),
        # unaligned rows: few of 8 warps would have a fourth vector
        KernelConfig(6656, 1, 8, unaligned_warps=4),
        KernelConfig(10240, 1, 8),
        KernelConfig(12288, 1, 8, True),
        KernelConfig(20480, 2, 4, True),
        KernelConfig(24576, 2, 8, True),
        KernelConfig(40960, 4, 4, True),
        KernelConfig(49152, 4, 8, True),
        KernelConfig(98304, 8, 4, True),
        KernelConfig(106496, 8, 4, True, max_registers=96),
        KernelConfig(131072, 16, 4),
        # unaligned rows are faster in 15 chunks than in 16
        KernelConfig(245760, 16, 4, True, odd_chunks=15),
        KernelConfig(262144, 16, 8, True),
        KernelConfig(524288, 16, 8, True, max_registers=112),
        KernelConfig(WIDEST, 16, 16, resident_chunks=5, step=4, max_registers=64),
    ),
    4: (
        KernelConfig(3584, 1, 4),
        # 32 registers in place of 36 and 38, so that a multiprocessor holds 8 programs and not 6
        KernelConfig(4096, 1, 8, max_registers=32, unaligned_registers=32),
        KernelConfig(8192, 1, 8),
        KernelConfig(16384, 4, 4),
        KernelConfig(32768, 8, 4),
        KernelConfig(45056, 8, 8),
        KernelConfig(65536, 16, 4),
        KernelConfig(131072, 16, 8, max_registers=48),
        KernelConfig(212992, 16, 8),
        # 16 vectors of an unaligned row spill at 80 registers, unless one is staged
        KernelConfig(245760, 16, 8, max_registers=80, unaligned_registers=80, odd_chunks=15),
        KernelConfig(262144, 16, 8, max_registers=80, unaligned_staged=1),
        *WIDE_FLOATS,
    ),
}


def _between(table: tuple[KernelConfig, ...], above: int, max_cols: int) -> tuple[KernelConfig, ...]:
    """The configs of `table` for widths from above + 1 to max_cols."""
    return tuple(config for config in table if above < config.max_cols <= max_cols)


FORWARD_LOG_CLUSTER = {
    2: (
        *_between(FORWARD_CLUSTER[2], 0, 131072),
        KernelConfig(163840, 16, 4, True, max_registers=80),
        KernelConfig(212992, 16, 4, True, max_registers=96),
        KernelConfig(262144, 16, 4, True, max_registers=112),
        KernelConfig(524288, 16, 8, True, max_registers=120),
        FORWARD_CLUSTER[2][-1],
    ),
    4: (
        *_between(FORWARD_CLUSTER[4], 0, 65536),
        KernelConfig(114688, 16, 8),
        KernelConfig(131072, 8, 16, max_registers=64),
        *_between(FORWARD_CLUSTER[4], 131072, WIDEST),
    ),
}
# backward, where there are clusters; H200. No clusters for 4,096 columns or less: where kernels start early, a GPU
# starts the CTAs of clusters too slowly
BACKWARD_CLUSTER = {
    2: (
        KernelConfig(1280, 1, 1, True),
        KernelConfig(1536, 1, 2),
        KernelConfig(2048, 1, 8, True),
        KernelConfig(3072, 1, 4, True),
        KernelConfig(4096, 1, 8, True),
        KernelConfig(7168, 1, 4, True),
        KernelConfig(8192, 2, 8, True, max_registers=56, unaligned_warps=4),
        KernelConfig(10240, 1, 8, True),
        KernelConfig(12288, 2, 4, True),
        KernelConfig(16384, 2, 8, True, unaligned_warps=4),
        KernelConfig(24576, 2, 8, True),
        KernelConfig(32768, 4, 4, True, max_registers=96),
        KernelConfig(57344, 8, 4, True),
        KernelConfig(65536, 8, 8, True, max_registers=80, unaligned_warps=4),
        KernelConfig(163840, 16, 4, True),
        # faster than with 5 chunks staged or 8 warps, and in 15 chunks than in 16
        KernelConfig(262144, 16, 4, True, max_registers=168, unaligned_registers=168, odd_chunks=15),
        KernelConfig(524288, 16, 8, True, smem_staged=5, max_registers=128),
        KernelConfig(655360, 16, 16, resident_chunks=8, step=3),
        KernelConfig(WIDEST, 16, 16, resident_chunks=8, step=4, max_registers=128),
    ),
    4: (
        KernelConfig(2560, 1, 8),
        KernelConfig(6144, 1, 16),
        KernelConfig(12288, 4, 8),
        KernelConfig(16384, 8, 4),
        KernelConfig(32768, 8, 8),
        KernelConfig(131072, 16, 8),
        KernelConfig(163840, 16, 8, max_registers=112, unaligned_registers=112),
        # faster than with 3 chunks staged
        KernelConfig(229376, 16, 8),
        # faster in 15 chunks than in 16, and unaligned rows with 2 staged chunks than with 3. Triton 3.9 spills in some
        KernelConfig(245760, 16, 8, smem_staged=1, max_registers=128, odd_chunks=15),
        KernelConfig(262144, 16, 8, smem_staged=2, max_registers=128, unaligned_staged=2),
        KernelConfig(327680, 16, 16, resident_chunks=8, step=3),
        KernelConfig(WIDEST, 16, 16, resident_chunks=8, step=4, max_registers=128),
    ),
}
BACKWARD_LOG_CLUSTER = {
    2: (
        KernelConfig(1280, 1, 1, True),
        KernelConfig(1536, 1, 2),
        KernelConfig(3584, 1, 4, True),
        KernelConfig(4096, 1, 8, True),
        *(config._replace(unaligned_warps=None) for config in _between(BACKWARD_CLUSTER[2], 4096, 32768)),
        KernelConfig(65536, 8, 4, True),
        KernelConfig(131072, 16, 4, True),
        KernelConfig(147456, 16, 4, True, unaligned_registers=112),
        KernelConfig(163840, 16, 4, True),
        # faster than uncapped with Triton 3.6, though the narrowest spill
        KernelConfig(196608, 16, 4, True, unaligned_registers=128),
        KernelConfig(229376, 16, 4, True, smem_staged=1, max_registers=128),
        # faster in 15 chunks than in 16
        KernelConfig(262144, 16, 4, True, max_registers=160, odd_chunks=15),
        KernelConfig(524288, 16, 8, True, smem_staged=4, max_registers=128),
        KernelConfig(1048576, 16, 16, True, smem_staged=2, prefetched_chunks=4, max_registers=128),
        KernelConfig(WIDEST, 16, 8, resident_chunks=16, step=4, prefetched_chunks=4, max_registers=128),
    ),
    4: (
        KernelConfig(2560, 1, 8),
        KernelConfig(6144, 1, 16),
        *_between(BACKWARD_CLUSTER[4], 6144, 229376),
        KernelConfig(262144, 16, 16, prefetched_chunks=2, max_registers=64),
        KernelConfig(524288, 16, 8, smem_staged=10, prefetched_chunks=4, max_registers=128),
        KernelConfig(WIDEST, 16, 8, resident_chunks=16, step=4, prefetched_chunks=4, max_registers=128),
    ),
}
# the tables where there are clusters, by (backward, log)
CLUSTER = {
    (False, False): FORWARD_CLUSTER,
    (False, True): FORWARD_LOG_CLUSTER,
    (True, False): BACKWARD_CLUSTER,
    (True, True): BACKWARD_LOG_CLUSTER,
}
# without clusters: one program per row as long as its registers hold the row (the H200's figures for one program)
FORWARD_BLOCK = {
    2: (KernelConfig(4096, 1, 4), KernelConfig(16384, 1, 16), KernelConfig(57344, 1, 16, True)),
    4: (KernelConfig(4096, 1, 4), KernelConfig(16384, 1, 16), KernelConfig(32768, 1, 16)),
}
BACKWARD_BLOCK = {
    # longer rows spill with Triton 3.9
    2: (KernelConfig(4096, 1, 8, True), KernelConfig(28672, 1, 16, True)),
    4: (KernelConfig(4096, 1, 8), KernelConfig(16384, 1, 16)),
}
# a step of the two_pass regime: warps and chunks of one program
TWO_PASS_WARPS, TWO_PASS_CHUNKS = 8, 4

# --- other ops ---
# rows of logits of some hundred columns, in whole vectors, by element size and whether rows start anywhere. A row has a
# target, a logarithm and factors of its own, which each of its threads computes: so few threads hold many vectors.
# Without a logarithm programs of one row take the fewest instructions
LOSS_ROWS: dict[tuple[int, bool], tuple[HeldRow, ...]] = {
    (2, False): (HeldRow(417, 960, 16, 4), HeldRow(1025, 1280, 16, 2, least_chunks=10)),
    (2, True): (HeldRow(385, 1024, 16, 4), HeldRow(1025, 1280, 16, 2, least_chunks=10)),
}
_OF_FLOATS = HeldRow(97, 128, 8, 2, rows=2), HeldRow(129, 416, 8, 4), HeldRow(417, 704, 16, 4)
STATISTICS_ROWS: dict[tuple[int, bool], tuple[HeldRow, ...]] = {
    (2, False): (HeldRow(385, 1408, 16, 4),),
    (2, True): (HeldRow(331, 512, 16, 2, rows=2), HeldRow(513, 1408, 16, 4)),
    (4, False): _OF_FLOATS,
    (4, True): _OF_FLOATS,
}
GRADIENT_ROWS = {of: (HeldRow(545, 1024, 32, 1),) for of in ((2, False), (2, True), (4, False), (4, True))}
# elements of a thread of these, at most; and of a loss with label smoothing, which takes three registers for each, and
# of capped logits, which may be smoothed, too
MOST_HELD, MOST_SMOOTHED = 128, 40
# a loss with its gradient in the same pass, by element size. As few CTAs of few warps as hold the row: a thread's many
# vectors are all in flight, and few threads have no column
LOSS_CLUSTER = {
    2: (
        KernelConfig(1792, 1, 1, True),
        KernelConfig(3584, 1, 2, True),
        KernelConfig(24576, 1, 4, True, odd_chunks=12),
        KernelConfig(49152, 2, 4, True, odd_chunks=21),
        KernelConfig(98304, 4, 4, True, odd_chunks=21),
        KernelConfig(196608, 8, 4, True, odd_chunks=21),
        KernelConfig(262144, 16, 4, True, odd_chunks=21),
        KernelConfig(524288, 16, 8, True),
        KernelConfig(1048576, 16, 16, True),
    ),
    4: (
        KernelConfig(1792, 1, 2, True),
        KernelConfig(8192, 1, 4, True),
        KernelConfig(13312, 2, 4, True),
        KernelConfig(26624, 4, 4, True),
        KernelConfig(53248, 8, 4, True),
        KernelConfig(114688, 8, 8, True, odd_chunks=12),
        KernelConfig(262144, 16, 8, True, odd_chunks=15),
        KernelConfig(524288, 16, 16, True),
    ),
}
# on clusters, by element size: the warps of a CTA, and (vectors per thread, the cap on its registers, the same for
# unaligned rows)
LOSS_REGISTERS = {
    2: (4, ((16, 96, 96), (17, 96, 104), (18, 96, 112), (19, 112, 112), (24, 128, 128))),
    4: (8, ((7, None, None), (8, None, 64), (10, 64, 64), (12, None, None), (15, 80, 80), (16, 96, 96))),
}
# of unaligned 16-bit rows of a loss on clusters: 22 vectors per thread spill, and 24 do not, though two are empty. At
# most LOSS_UNPREDICATED of 24 have no predicate, whether 22 or all of them hold columns: so widths share kernels
LOSS_SPILLS, LOSS_SPILLS_NOT, LOSS_UNPREDICATED = 22, 24, 20
# of a reduction that holds nothing, by element size: (columns, CTAs per row, warps per CTA, the fewest and the most
# chunks per step)
STATISTICS_STEPS = {
    2: (
        (6656, 1, 1, 4, 8),
        (13312, 1, 2, 4, 8),
        (45056, 1, 4, 4, 8),
        (122880, 1, 8, 4, 8),
        (WIDEST, 4, 4, 6, 8),
    ),
    4: (
        (4608, 1, 2, 4, 8),
        (12288, 1, 4, 4, 8),
        (49152, 1, 8, 4, 8),
        (WIDEST, 2, 8, 3, 6),
    ),
}
# the same of wide rows, parts of which have programs of their own, by element size: the columns above which they have,
# the warps of a program, and its chunks at most
STATISTICS_PARTS = {2: (5376, 1, 16), 4: (98304, 4, 8)}
# of a kernel without a reduction, by element size: warps of one program, and its chunks at most, for any width
ELEMENTWISE = {2: (1, 8), 4: (2, 6)}
# warps of one program, and its chunks at most, of a launch that most often has nothing to do
FEW_PROGRAMS = (8, 4)
