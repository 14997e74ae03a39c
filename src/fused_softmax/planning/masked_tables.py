"""The measured tables of masked rows and their gradients, as `config_tables` has those of softmax.

docs/measurements/thresholds.md has the figures behind the thresholds.
"""

from __future__ import annotations

from .config_tables import KernelConfig

# masked softmax without a mask (causal), with one, and its gradient, by element size; wider rows take softmax's. Few
# warps with many vectors per thread are the fastest. rows: as many warps have a row each
MASKED: dict[str, dict[int, tuple[KernelConfig, ...]]] = {
    "unmasked": {
        2: (
            KernelConfig(1024, 1, 2, rows=2),
            KernelConfig(2048, 1, 1, True),
            KernelConfig(4608, 1, 2, True),
            KernelConfig(16384, 1, 4, True),
        ),
        4: (
            KernelConfig(512, 1, 2, rows=2),
            KernelConfig(1024, 1, 1),
            KernelConfig(2304, 1, 2),
            KernelConfig(8192, 1, 4),
            KernelConfig(16384, 1, 8),
        ),
    },
    "boolean": {
        2: (
            KernelConfig(2816, 1, 1),
            KernelConfig(5632, 1, 2),
            KernelConfig(14336, 1, 4),
            KernelConfig(16384, 1, 4, unaligned_warps=8),
        ),
        4: (
            KernelConfig(768, 1, 1),
            KernelConfig(1792, 1, 2),
            KernelConfig(3072, 1, 4),
            KernelConfig(6144, 1, 8, unaligned_warps=4),
            KernelConfig(16384, 1, 8),
        ),
    },
    "backward": {
        2: (
            KernelConfig(1792, 1, 1, True),
            KernelConfig(3584, 1, 2, True),
            KernelConfig(16384, 1, 4, True),
        ),
        4: (
            KernelConfig(512, 1, 4, rows=4),
            KernelConfig(896, 1, 1),
            KernelConfig(1792, 1, 2),
            KernelConfig(9216, 1, 4),
            KernelConfig(13312, 1, 8),
            KernelConfig(16384, 4, 4),
        ),
    },
}
# an additive mask takes more registers than a boolean one
MASKED["additive"] = {
    2: (
        KernelConfig(2304, 1, 1),
        KernelConfig(4096, 1, 2),
        KernelConfig(16384, 1, 4),
    ),
    4: (
        *MASKED["boolean"][4][:2],
        KernelConfig(3584, 1, 4),
        KernelConfig(4096, 1, 4, unaligned_warps=8),
        KernelConfig(6144, 1, 4),
        KernelConfig(8192, 1, 8, max_registers=80),
        # most wider rows are faster on 4 CTAs than with 8 warps
        KernelConfig(9216, 1, 8),
        KernelConfig(16384, 4, 4),
    ),
}
# rows of 16 bits with a mask, and their gradients, of more than so many columns and up to max_cols: not as softmax's
MASKED_WIDE = {
    "additive": (
        (61440, KernelConfig(73728, 8, 4, True)),
        (114688, KernelConfig(147456, 16, 4, True)),
        (147456, KernelConfig(196608, 16, 8, True, unaligned_warps=4, unaligned_registers=128)),
        (196608, KernelConfig(212992, 16, 8, True, max_registers=80, unaligned_warps=4)),
        (212992, KernelConfig(262144, 16, 8, True, max_registers=80, unaligned_registers=128)),
    ),
    "boolean": (
        (114688, KernelConfig(131072, 16, 4, True, max_registers=128)),
        (131072, KernelConfig(163840, 16, 8, True, unaligned_warps=4)),
        (163840, KernelConfig(196608, 16, 8, True, max_registers=80, unaligned_warps=4)),
        (196608, KernelConfig(212992, 16, 8, True, max_registers=80, unaligned_warps=4, unaligned_registers=128)),
        (212992, KernelConfig(262144, 16, 8, True, max_registers=80, unaligned_registers=80)),
    ),
    "backward": ((114688, KernelConfig(131072, 16, 8, True)),),
}
# unaligned rows beyond those of MASKED: a mask whose vectors are not the row's takes more registers and more of L1
MASKED_UNALIGNED: dict[tuple[str, int], tuple[KernelConfig, ...]] = {
    ("boolean", 2): (KernelConfig(22528, 1, 8), KernelConfig(26624, 1, 8, max_registers=128)),
    # 12 vectors per thread spill with a cap of 128
    ("additive", 2): (
        KernelConfig(22528, 1, 8, max_registers=128),
        KernelConfig(24576, 2, 8, True),
        KernelConfig(26624, 1, 8),
    ),
    ("boolean", 4): (
        KernelConfig(32768, 8, 4),
        KernelConfig(65536, 16, 4),
        KernelConfig(147456, 16, 8),
        KernelConfig(212992, 16, 8, unaligned_registers=128),
    ),
}
# of narrow rows, by element size: (most vectors of a row, threads that hold it). Instructions limit these rows, and a
# warp with 8 threads for each of 4 rows reduces them at once. Rows of few chunks are in programs of 4 warps
MASKED_LANES: dict[str, dict[int, tuple[tuple[int, int], ...]]] = {
    "unmasked": {2: ((80, 8),), 4: ((40, 8), (80, 16))},
    "boolean": {2: ((40, 8), (112, 16)), 4: ((40, 8), (80, 16))},
    "additive": {2: ((80, 8),), 4: ((40, 8), (80, 16))},
    "backward": {2: ((40, 8), (128, 16)), 4: ((40, 8), (80, 16))},
}
MASKED_FEW_CHUNKS = {
    "unmasked": {2: 5, 4: 3},
    "boolean": {2: 2, 4: 3},
    "additive": {2: 3, 4: 3},
    "backward": {2: 4, 4: 3},
}
# caps on registers of rows of 16 bits under a mask, by its kind and whether several rows share a warp: (the fewest
# and the most chunks, the cap). ptxas aims at fewer registers without a cap, so that loads wait for others
MASKED_REGISTERS = {
    ("additive", True): ((4, 6, 80), (7, 8, 96), (9, 9, 112)),
    ("additive", False): ((7, 8, 96), (12, 12, 128), (14, 16, 168)),
    ("boolean", False): ((14, 14, 128),),
}
# of a masked gradient on a cluster whose threads hold at most 4 vectors of 16 bits per tensor: faster than uncapped
MASKED_BACKWARD_REGISTERS = 80
# vectors per thread of a longer row: alone, and together with as many of a mask or of a gradient's second row
MASKED_CHUNKS = {False: 16, True: 13}
# rows in partial vectors: the elements of a thread above which a row takes twice the warps, and the most warps
PARTIAL_ELEMENTS, PARTIAL_MOST = 32, 8
