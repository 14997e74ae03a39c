"""The measured tables of softmax over a dimension that is not the last: configs in rising number of columns.

H200, bfloat16 and float32, 2^26 to 2^28 elements; docs/measurements/ says how, and
thresholds.md there has figures. `spatial` uses the tables.
"""

from __future__ import annotations

from typing import NamedTuple


class SpatialConfig(NamedTuple):
    """The numbers for up to `max_cols` columns: CTAs for a column, warps of a CTA, and positions of a tile.

    A chunk has as many columns as fill all threads with thread_bytes. recompute: hold 16-bit columns as loaded and
    compute exp twice. max_registers: a cap on a thread's registers, so that several programs share a multiprocessor.
    thread_bytes: with 8, a thread has half as many positions, and keeps half as many numbers of each. held: chunks in
    registers, where the others (of a gradient: of dy), or `most_staged` of them, are staged in shared memory.
    whole_sectors: only for columns that start at a multiple of 32 bytes (True), or only for others (False), which need
    wider tiles. least_cols: fewer columns take another config. skewed: each column of a tile starts at its own place,
    a multiple of so many bytes, so that all accesses are aligned vectors of thread_bytes. Such threads have registers
    as SKEWED_REGISTERS says. overlaps: tiles share a sector less the multiple at which columns start, so that each
    sector has one writer where columns start within one.
    """

    max_cols: int
    ctas: int
    num_warps: int
    inner: int
    recompute: bool = True
    max_registers: int | None = None
    thread_bytes: int = 16
    held: int | None = None
    whole_sectors: bool | None = None
    most_staged: int | None = None
    least_cols: int = 0
    skewed: int = 0
    overlaps: bool = False


# words of a 16-bit softmax whose exponentials are kept, at most (with more they are computed twice); and the cap on a
# thread's registers, by the words that it holds, at most
MOST_KEPT = 12
REGISTERS = ((28, None), (44, 80), (76, 112), (80, 128))


def config_of_words(
    n_cols: int, ctas: int, num_warps: int, positions: int, thread_bytes: int, words: int, backward: bool,
    skewed: int, overlaps: bool,
) -> SpatialConfig:  # fmt: skip
    """The config of a tile whose threads hold so many words of 4 bytes of the columns."""
    cap = next(cap for most, cap in REGISTERS if words <= most)
    recompute = backward or words > MOST_KEPT
    return SpatialConfig(
        n_cols, ctas, num_warps, positions, recompute, cap, thread_bytes, skewed=skewed, overlaps=overlaps
    )


class LongTile(NamedTuple):
    """A tile of fewer than `inner` positions and many columns, of at most so many elements, in one program."""

    elements: int
    num_warps: int
    inner: int
    recompute: bool = True
    max_registers: int | None = None


class RunRule(NamedTuple):
    """How many columns a chunk takes where positions are few, so that its columns are neighbors in memory.

    They are doubled while fewer than least_bytes of a chunk follow one another, or while there are more than
    most_chunks and a chunk has fewer than LEAST_RUN bytes; but not where fewer than least_chunks would be left.
    """

    least_bytes: int
    most_chunks: int
    least_chunks: int


class PartsTile(NamedTuple):
    """The tile of a kernel that reads columns in parts, which threads fill with vectors of 16 bytes.

    n_bytes: along `inner`, at most. chunks: of a step of a part. finish_bytes, finish_chunks: of a program that writes
    the result, where they are others. steps: of a part. Where it is 0, a part has least_cols to MOST_PART_COLS columns,
    or bundles, with `programs` for one index of `outer` in between. Beyond MOST_PARTS parts have more.
    """

    n_bytes: int
    num_warps: int
    chunks: int
    finish_bytes: int = 0
    finish_chunks: int = 0
    steps: int = 0
    least_cols: int = 256
    programs: int = 384


# by (backward, bytes of an element). The first that fits is taken: one without clusters follows those on clusters
ON_CHIP = {
    (False, 2): (
        SpatialConfig(6, 1, 2, 512, recompute=False),
        SpatialConfig(14, 1, 2, 256, thread_bytes=8),
        SpatialConfig(24, 1, 2, 128, thread_bytes=8),
        SpatialConfig(40, 1, 2, 128, thread_bytes=8, whole_sectors=True),
        SpatialConfig(76, 1, 2, 64, thread_bytes=8, whole_sectors=True),
        SpatialConfig(152, 1, 4, 64, thread_bytes=8, whole_sectors=True),
        SpatialConfig(40, 1, 2, 128, thread_bytes=8, max_registers=96),
        SpatialConfig(60, 1, 2, 128, thread_bytes=8, max_registers=128),
        SpatialConfig(176, 1, 4, 128, thread_bytes=8),
        SpatialConfig(256, 2, 8, 256, thread_bytes=8, skewed=32, whole_sectors=False),
        SpatialConfig(464, 1, 4, 64, overlaps=True, max_registers=128, held=18),
        SpatialConfig(544, 4, 2, 64, overlaps=True, max_registers=128),
        SpatialConfig(960, 2, 4, 64, overlaps=True, max_registers=168),
        SpatialConfig(1216, 4, 8, 128, thread_bytes=8, skewed=32, whole_sectors=False),
        SpatialConfig(1280, 8, 8, 128, thread_bytes=8, skewed=32, whole_sectors=False, max_registers=80),
        SpatialConfig(1856, 4, 4, 64, overlaps=True, max_registers=168),
        SpatialConfig(3712, 8, 4, 64, overlaps=True, max_registers=168),
        SpatialConfig(256, 1, 4, 64),
        SpatialConfig(352, 1, 4, 64, max_registers=128, held=18, whole_sectors=True),
        SpatialConfig(544, 1, 4, 32, max_registers=128, whole_sectors=True),
        SpatialConfig(736, 1, 4, 32, max_registers=168, whole_sectors=True),
        SpatialConfig(928, 2, 4, 32, max_registers=128, whole_sectors=True),
        SpatialConfig(1024, 8, 2, 64, max_registers=128, whole_sectors=True),
        SpatialConfig(1088, 2, 4, 32, max_registers=128, whole_sectors=True),
        SpatialConfig(1408, 2, 4, 32, max_registers=168, whole_sectors=True),
        SpatialConfig(1920, 4, 4, 64, max_registers=168, whole_sectors=True),
        SpatialConfig(2176, 4, 4, 32, max_registers=128, whole_sectors=True),
        SpatialConfig(2560, 4, 4, 32, max_registers=168, whole_sectors=True),
        SpatialConfig(4352, 8, 4, 32, max_registers=128, whole_sectors=True),
        SpatialConfig(17408, 16, 4, 32, max_registers=168, held=27, whole_sectors=True, least_cols=11265),
        SpatialConfig(28672, 16, 8, 32, max_registers=128, held=18, whole_sectors=True, least_cols=17409),
        SpatialConfig(288, 1, 4, 128, max_registers=128, held=1, whole_sectors=False),
        SpatialConfig(496, 2, 4, 128, max_registers=128, held=4, whole_sectors=False),
        SpatialConfig(640, 2, 4, 64, max_registers=128),
        SpatialConfig(1024, 4, 4, 128, max_registers=128, held=4, whole_sectors=False),
        SpatialConfig(1216, 4, 4, 64, max_registers=128, held=1, whole_sectors=False),
        SpatialConfig(1664, 8, 4, 128, max_registers=128, held=4, whole_sectors=False),
        SpatialConfig(2944, 8, 4, 64, max_registers=128, held=6, whole_sectors=False),
        SpatialConfig(352, 1, 8, 64, max_registers=80),
        SpatialConfig(512, 1, 4, 64),
        SpatialConfig(1280, 4, 4, 64, max_registers=128),
        SpatialConfig(1024, 1, 8, 32, max_registers=128),
        SpatialConfig(1792, 8, 4, 64, max_registers=96),
        SpatialConfig(2560, 8, 4, 64, max_registers=128, whole_sectors=False),
        SpatialConfig(2944, 4, 8, 64, max_registers=128),
        SpatialConfig(3328, 8, 8, 64, max_registers=64, held=4),
        SpatialConfig(4096, 16, 4, 64, max_registers=128, held=6, whole_sectors=False),
        SpatialConfig(4096, 16, 4, 64, max_registers=128),
        SpatialConfig(2048, 1, 16, 32),
        SpatialConfig(5120, 16, 4, 64, max_registers=128, held=4, whole_sectors=False, most_staged=16),
        SpatialConfig(30720, 16, 8, 32, max_registers=128, held=4, whole_sectors=True, most_staged=9, least_cols=28673),
    ),
    (False, 4): (
        SpatialConfig(6, 1, 2, 256),
        SpatialConfig(12, 1, 1, 64, whole_sectors=True),
        SpatialConfig(24, 1, 2, 64, whole_sectors=True),
        SpatialConfig(24, 1, 2, 128),
        SpatialConfig(64, 1, 4, 64, overlaps=True, max_registers=128, least_cols=25),
        SpatialConfig(64, 1, 2, 64),
        SpatialConfig(256, 1, 4, 32, max_registers=128, whole_sectors=True),
        SpatialConfig(152, 1, 4, 64, overlaps=True, max_registers=128),
        SpatialConfig(304, 2, 4, 64, overlaps=True, max_registers=128),
        SpatialConfig(608, 4, 4, 64, overlaps=True, max_registers=128),
        SpatialConfig(1216, 8, 4, 64, overlaps=True, max_registers=128),
        SpatialConfig(1856, 8, 4, 64, overlaps=True, max_registers=128, held=18),
        SpatialConfig(2560, 8, 4, 64, overlaps=True, max_registers=168, held=27),
        SpatialConfig(1536, 8, 4, 64, overlaps=True, max_registers=168),
        SpatialConfig(2432, 16, 4, 64, overlaps=True, max_registers=128),
        SpatialConfig(3584, 16, 4, 64, overlaps=True, max_registers=168),
        SpatialConfig(4864, 16, 4, 64, overlaps=True, max_registers=168, held=27),
        SpatialConfig(7168, 16, 4, 32, overlaps=True, max_registers=128, held=16, least_cols=4865),
        SpatialConfig(11264, 16, 4, 32, overlaps=True, max_registers=168, held=26, least_cols=7169),
        SpatialConfig(14336, 16, 4, 32, overlaps=True, held=44, least_cols=11265),
        SpatialConfig(152, 1, 4, 64, max_registers=128, held=4, whole_sectors=False),
        SpatialConfig(152, 1, 4, 64),
        SpatialConfig(256, 2, 4, 64, max_registers=128, held=4, whole_sectors=False),
        SpatialConfig(256, 1, 8, 64),
        SpatialConfig(320, 4, 4, 64, max_registers=128),
        SpatialConfig(512, 4, 4, 64, max_registers=128, held=1, whole_sectors=False),
        SpatialConfig(512, 4, 4, 64, max_registers=128),
        SpatialConfig(512, 1, 8, 32),
        SpatialConfig(928, 4, 4, 64, max_registers=128, held=18, whole_sectors=True),
        SpatialConfig(640, 8, 4, 64, max_registers=128),
        SpatialConfig(1024, 8, 4, 64, max_registers=128, held=1, whole_sectors=False),
        SpatialConfig(1344, 8, 4, 64, max_registers=128, held=8, whole_sectors=False),
        SpatialConfig(1344, 8, 4, 64, max_registers=128),
        SpatialConfig(1856, 8, 4, 64, max_registers=128, held=18, whole_sectors=True),
        SpatialConfig(2560, 8, 4, 64, max_registers=168, held=27, whole_sectors=True),
        SpatialConfig(3712, 16, 4, 64, max_registers=128, held=18, whole_sectors=True),
        SpatialConfig(9216, 16, 4, 32, max_registers=128, held=16, whole_sectors=True, least_cols=3713),
        SpatialConfig(2432, 16, 4, 64, max_registers=128),
        SpatialConfig(4096, 16, 4, 64, max_registers=128, held=1),
        SpatialConfig(1024, 1, 16, 32),
        SpatialConfig(2816, 16, 4, 64, max_registers=128, whole_sectors=False),
        SpatialConfig(2048, 8, 4, 32, max_registers=128),
        SpatialConfig(2048, 1, 16, 16),
        SpatialConfig(4096, 8, 8, 32, max_registers=128),
        SpatialConfig(7168, 8, 8, 16, max_registers=128),
        SpatialConfig(8192, 8, 8, 16, max_registers=128),
        SpatialConfig(9216, 16, 8, 32, max_registers=128),
        SpatialConfig(11520, 16, 4, 32, max_registers=168, held=4, whole_sectors=True, most_staged=16),
        SpatialConfig(14336, 16, 8, 32, max_registers=128, held=4, whole_sectors=True, most_staged=8),
        SpatialConfig(16384, 16, 8, 32, max_registers=128, held=1, whole_sectors=True),
        SpatialConfig(22528, 16, 8, 16, max_registers=128, held=18, whole_sectors=True, least_cols=16385),
        SpatialConfig(28160, 16, 4, 16, held=44, whole_sectors=True, least_cols=22529),
    ),
    (True, 2): (
        SpatialConfig(8, 1, 2, 512),
        SpatialConfig(16, 1, 1, 128, max_registers=128),
        SpatialConfig(44, 1, 2, 128),
        SpatialConfig(64, 1, 4, 128, thread_bytes=8, max_registers=128, whole_sectors=False, least_cols=45),
        SpatialConfig(64, 1, 4, 64, thread_bytes=8),
        SpatialConfig(72, 1, 2, 64, max_registers=128),
        SpatialConfig(144, 2, 2, 64, overlaps=True, max_registers=128, least_cols=73),
        SpatialConfig(208, 2, 2, 64, overlaps=True, max_registers=168, least_cols=73),
        SpatialConfig(288, 4, 2, 64, overlaps=True, max_registers=128, least_cols=73),
        SpatialConfig(144, 2, 2, 64, max_registers=128, whole_sectors=True, least_cols=73),
        SpatialConfig(176, 2, 2, 64, max_registers=168, whole_sectors=True, least_cols=73),
        SpatialConfig(288, 4, 2, 64, max_registers=128, whole_sectors=True, least_cols=73),
        SpatialConfig(152, 1, 4, 128, max_registers=168, least_cols=73),
        SpatialConfig(176, 1, 8, 128),
        SpatialConfig(304, 4, 8, 256, thread_bytes=8, skewed=32, whole_sectors=False),
        SpatialConfig(416, 8, 8, 256, thread_bytes=8, skewed=32, whole_sectors=False),
        SpatialConfig(704, 4, 4, 64, overlaps=True, max_registers=168, least_cols=641),
        SpatialConfig(960, 8, 4, 128, overlaps=True, max_registers=128, held=4, least_cols=833),
        SpatialConfig(1024, 8, 4, 128, overlaps=True, max_registers=168, least_cols=705),
        SpatialConfig(1152, 8, 4, 64, overlaps=True, max_registers=128, least_cols=1025),
        SpatialConfig(1792, 8, 4, 64, overlaps=True, max_registers=168, least_cols=1153),
        SpatialConfig(2176, 8, 4, 64, overlaps=True, max_registers=168, held=10, least_cols=1793),
        SpatialConfig(2816, 16, 4, 64, overlaps=True, max_registers=128, least_cols=2177),
        SpatialConfig(4096, 16, 4, 64, overlaps=True, max_registers=168, least_cols=2817),
        SpatialConfig(5120, 16, 4, 64, overlaps=True, max_registers=128, held=1, least_cols=4097),
        SpatialConfig(5632, 16, 4, 64, overlaps=True, max_registers=168, held=5, least_cols=5121),
        SpatialConfig(6144, 16, 8, 64, overlaps=True, max_registers=128, least_cols=5121),
        SpatialConfig(9216, 16, 4, 32, overlaps=True, max_registers=168, held=9, least_cols=7169),
        SpatialConfig(14336, 16, 8, 32, overlaps=True, max_registers=128, held=4, least_cols=11265),
        SpatialConfig(256, 1, 8, 128),
        SpatialConfig(288, 2, 4, 128, max_registers=128, held=2, whole_sectors=False),
        SpatialConfig(384, 4, 4, 128, max_registers=128, whole_sectors=False),
        SpatialConfig(576, 4, 4, 128, max_registers=128, held=2, whole_sectors=False),
        SpatialConfig(768, 8, 4, 128, max_registers=128, whole_sectors=False),
        SpatialConfig(1152, 8, 4, 128, max_registers=128, held=2, whole_sectors=False),
        SpatialConfig(1536, 16, 4, 128, max_registers=128, whole_sectors=False),
        SpatialConfig(2304, 16, 4, 128, max_registers=128, held=2, whole_sectors=False),
        SpatialConfig(2816, 16, 4, 128, max_registers=168, held=4, whole_sectors=False),
        SpatialConfig(320, 2, 4, 64, max_registers=128),
        SpatialConfig(448, 2, 4, 64, max_registers=168),
        SpatialConfig(576, 8, 2, 64, max_registers=128, whole_sectors=True),
        SpatialConfig(896, 4, 4, 64, max_registers=168),
        SpatialConfig(1152, 8, 4, 64, max_registers=128),
        SpatialConfig(512, 1, 8, 64),
        SpatialConfig(1024, 1, 8, 32),
        SpatialConfig(1792, 8, 4, 64, max_registers=168),
        SpatialConfig(2304, 16, 4, 64, max_registers=96),
        SpatialConfig(3584, 16, 4, 64, max_registers=168, whole_sectors=True),
        SpatialConfig(4096, 16, 4, 64, max_registers=128, held=2, whole_sectors=True),
        SpatialConfig(5632, 16, 4, 64, max_registers=168, held=6, whole_sectors=True),
        SpatialConfig(7168, 16, 4, 32, max_registers=168, held=13, whole_sectors=True, least_cols=5633),
        SpatialConfig(9216, 16, 4, 32, max_registers=168, held=9, whole_sectors=True, least_cols=7169),
        SpatialConfig(2816, 8, 8, 64, max_registers=128),
        SpatialConfig(3072, 8, 8, 64, max_registers=128, whole_sectors=False),
        SpatialConfig(3584, 16, 8, 64, max_registers=96, whole_sectors=False),
        SpatialConfig(4096, 16, 8, 64, max_registers=128, whole_sectors=False),
        SpatialConfig(4096, 8, 8, 32, max_registers=128),
        SpatialConfig(6144, 16, 8, 64, max_registers=128),
        SpatialConfig(11264, 16, 8, 32, max_registers=128),
        SpatialConfig(14336, 16, 8, 32, max_registers=128, held=4, whole_sectors=True, least_cols=11265),
        SpatialConfig(17408, 16, 8, 32, whole_sectors=True, least_cols=14337),
    ),
    (True, 4): (
        SpatialConfig(12, 1, 1, 128),
        SpatialConfig(20, 1, 1, 64),
        SpatialConfig(36, 1, 2, 64),
        SpatialConfig(72, 2, 2, 64, max_registers=128),
        SpatialConfig(144, 4, 2, 64, max_registers=128),
        SpatialConfig(208, 4, 2, 64, overlaps=True, max_registers=168, least_cols=145),
        SpatialConfig(208, 4, 2, 64, max_registers=168, whole_sectors=True),
        SpatialConfig(352, 4, 4, 64, max_registers=128),
        SpatialConfig(64, 1, 4, 64),
        SpatialConfig(256, 1, 8, 64),
        SpatialConfig(704, 8, 4, 64, max_registers=128),
        SpatialConfig(1408, 16, 4, 64, max_registers=128),
        SpatialConfig(2304, 16, 4, 64, overlaps=True, max_registers=168),
        SpatialConfig(3200, 16, 4, 64, overlaps=True, max_registers=168, held=1),
        SpatialConfig(4096, 16, 8, 64, overlaps=True, max_registers=128, held=1),
        SpatialConfig(4608, 16, 4, 32, overlaps=True, max_registers=168, held=9, least_cols=4097),
        SpatialConfig(5632, 16, 4, 32, overlaps=True, max_registers=168, held=5, least_cols=4609),
        SpatialConfig(7168, 16, 8, 32, overlaps=True, max_registers=128, held=4, least_cols=5633),
        SpatialConfig(11264, 16, 8, 32, overlaps=True, least_cols=7169),
        SpatialConfig(1536, 16, 4, 64, max_registers=128, whole_sectors=True),
        SpatialConfig(1792, 16, 4, 64, max_registers=168, whole_sectors=True),
        SpatialConfig(2304, 16, 4, 32, max_registers=128, whole_sectors=True, least_cols=513),
        SpatialConfig(2816, 16, 4, 32, max_registers=168, whole_sectors=True, least_cols=513),
        SpatialConfig(512, 1, 16, 32),
        SpatialConfig(1024, 4, 8, 32, max_registers=128),
        SpatialConfig(1024, 1, 16, 16),
        SpatialConfig(1536, 8, 8, 32, max_registers=80),
        SpatialConfig(3200, 16, 4, 64, max_registers=168, held=1, whole_sectors=False),
        SpatialConfig(2816, 16, 8, 64, max_registers=128, whole_sectors=False),
        SpatialConfig(2304, 8, 8, 32, max_registers=96),
        SpatialConfig(3328, 8, 8, 32, max_registers=128),
        SpatialConfig(4096, 16, 8, 32, max_registers=96),
        SpatialConfig(4096, 8, 8, 16, max_registers=128),
        SpatialConfig(5632, 16, 8, 32, max_registers=128),
        SpatialConfig(7168, 16, 8, 32, max_registers=128, held=4, whole_sectors=True, least_cols=6145),
        SpatialConfig(10240, 16, 8, 16, max_registers=128),
        SpatialConfig(11264, 16, 8, 32, whole_sectors=True, least_cols=10241),
        SpatialConfig(14336, 16, 8, 16, max_registers=128, held=4, whole_sectors=True, least_cols=11265),
        SpatialConfig(22528, 16, 8, 16, whole_sectors=True, least_cols=14337),
    ),
}
# of fewer positions than the tables' tiles, and more columns: by (backward, bytes of an element). The first that fits
# is taken
LONG = {
    (False, 2): (
        LongTile(3072, 2, 512, recompute=False), LongTile(20480, 4, 1024), LongTile(22528, 4, 128),
        LongTile(32768, 4, 64), LongTile(65536, 16, 32),
    ),
    (False, 4): (
        LongTile(1536, 2, 256), LongTile(3072, 2, 128), LongTile(4096, 2, 64), LongTile(9728, 4, 64, max_registers=128),
        LongTile(16384, 8, 64), LongTile(32768, 16, 32),
    ),
    (True, 2): (LongTile(4096, 2, 512), LongTile(5632, 2, 128), LongTile(32768, 8, 128)),
    (True, 4): (LongTile(1536, 1, 128), LongTile(2304, 2, 64), LongTile(4096, 4, 64), LongTile(16384, 8, 64)),
}  # fmt: skip
# elements that are read one by one take a register each until they are packed: such a tile has fewer of them, at most
MOST_SINGLE = 49152
# FEWEST to MOST_FEW positions and more columns than FEW_COLS: `spatial` counts the CTAs of their tiles. Fewer positions
# than LEAST_FEW take one program where it holds their columns
FEWEST, LEAST_FEW, MOST_FEW, FEW_COLS, FEW_WARPS = 9, 17, 255, 512, 4
FEW_TILES = (64, 32, 16)  # positions, widest first. The first that holds the columns is taken
# chunks that a CTA is to have at most, by backward, and fewer: of a gradient of several tiles, or of several tiles in
# halves of sectors. Where a cluster has no more CTAs, the first number holds
FEW_CHUNKS = {False: (40, 20), True: (20, 14)}
# vectors of a thread in registers, and the cap that holds them. A softmax stages MORE_STAGED before it takes more
FEW_REGISTERS, MORE_STAGED = ((18, 128), (27, 168)), 7
# programs that share a multiprocessor start one after the other (`spatial.staggered`): so many cycles later for each
# KiB that a program reads. H200; on an H100, whose memory is slower, 115 is no better
CYCLES_PER_KIB = 80
# bytes that such a program reads at least, by (backward, bytes of an element), unless its tile is skewed. With fewer it
# is as fast or slower
STAGGERED_BYTES = {(False, 2): 41 << 10, (False, 4): 32 << 10, (True, 2): 36 << 10, (True, 4): 36 << 10}
# warps that hold a column of a softmax or a loss at most, by bytes of an element
STAGGERED_WARPS = {2: 32, 4: 64}
# programs of a gradient that fit on a multiprocessor at most, unless tiles are skewed: 1,927 bfloat16 columns, 5
# programs, 0.849 of an add without the stagger and 0.811 with it
STAGGERED_FITTING = 4
# positions of a tile at most, unless tiles overlap: the gradient of 1,530 bfloat16 columns, 128 positions, 0.869
# without it and 0.808 with it
STAGGERED_POSITIONS = 64
# bytes that a program of skewed tiles reads at least, by (backward, positions, CTAs, warps): of 16 bits, not of
# log_softmax, with this cap on registers. Others gain nothing, lose, or were not measured
STAGGERED_SKEWED = {(True, 128, 16, 8): 80 << 10, (True, 64, 16, 4): 26 << 10, (False, 64, 8, 8): 64 << 10}
STAGGERED_CAP = 128
# bytes of a chunk that follow one another in memory, at least, where positions are few: its columns are neighbors
LEAST_RUN = 128
WHOLE_RUN = RunRule(LEAST_RUN, 1 << 31, 1)
# a 16-bit softmax of up to so many positions and columns: a thread has half a vector, and more chunks
HALF_POSITIONS, HALF_COLS, HALF_RUN = 8, 192, RunRule(64, 12, 5)
NARROW = 16  # positions, at most, of which a program of one warp takes some
# where runs of positions start anywhere: skewed tiles, and tiles whose elements are read one by one
UNALIGNED = {
    (False, 2): (
        SpatialConfig(10, 1, 1, 256, recompute=False),
        SpatialConfig(16, 1, 4, 128, thread_bytes=4, skewed=4),
        SpatialConfig(152, 1, 8, 256, thread_bytes=8, skewed=8),
        SpatialConfig(15, 1, 2, 256),
        SpatialConfig(30, 1, 4, 128, thread_bytes=4, skewed=4),
        SpatialConfig(160, 1, 8, 128, thread_bytes=8, skewed=8),
        SpatialConfig(304, 2, 8, 256, thread_bytes=8, skewed=8),
        SpatialConfig(400, 4, 8, 256, thread_bytes=8, skewed=8),
        SpatialConfig(576, 4, 4, 128, thread_bytes=8, skewed=8),
        SpatialConfig(704, 4, 8, 256, thread_bytes=8, skewed=8),
        SpatialConfig(896, 8, 8, 256, thread_bytes=8, skewed=8),
        SpatialConfig(960, 8, 8, 256, thread_bytes=8, skewed=8, max_registers=80, held=4),
        SpatialConfig(1152, 8, 4, 128, thread_bytes=8, skewed=8),
        SpatialConfig(1408, 4, 8, 128, thread_bytes=8, skewed=8),
        SpatialConfig(2944, 8, 8, 128, thread_bytes=8, skewed=8),
        SpatialConfig(3136, 8, 8, 128, thread_bytes=8, skewed=16, max_registers=128, held=4),
        SpatialConfig(4864, 16, 8, 128, thread_bytes=8, skewed=8, max_registers=128),
        SpatialConfig(6528, 16, 8, 128, thread_bytes=8, skewed=8, max_registers=128, held=28, least_cols=4865),
        SpatialConfig(40, 1, 2, 256),
        SpatialConfig(96, 1, 2, 64, whole_sectors=False),
        SpatialConfig(192, 1, 4, 32, recompute=False),
        SpatialConfig(240, 1, 4, 64),
        SpatialConfig(272, 2, 4, 64, max_registers=128),
        SpatialConfig(320, 4, 4, 64, max_registers=96),
        SpatialConfig(512, 8, 4, 128, max_registers=128),
        SpatialConfig(768, 4, 4, 32, max_registers=96),
        SpatialConfig(1024, 4, 8, 64, max_registers=128),
        SpatialConfig(1792, 8, 8, 64, max_registers=128),
        SpatialConfig(256, 1, 4, 64),
        SpatialConfig(512, 1, 4, 32, max_registers=128),
    ),
    (False, 4): (
        SpatialConfig(2, 1, 4, 256),
        SpatialConfig(6, 1, 1, 128),
        SpatialConfig(56, 1, 4, 128, skewed=16),
        SpatialConfig(96, 2, 4, 128, skewed=32),
        SpatialConfig(208, 4, 4, 128, skewed=32),
        SpatialConfig(480, 8, 4, 128, skewed=32),
        SpatialConfig(560, 4, 8, 128, thread_bytes=8, skewed=8),
        SpatialConfig(704, 8, 4, 128, skewed=32),
        SpatialConfig(960, 8, 4, 64, skewed=32, least_cols=705),
        SpatialConfig(1408, 8, 8, 128, skewed=32),
        SpatialConfig(1664, 16, 4, 64, skewed=32, max_registers=96, least_cols=1409),
        SpatialConfig(1792, 16, 4, 64, skewed=32, max_registers=112, least_cols=1409),
        SpatialConfig(1984, 16, 4, 128, skewed=32, max_registers=128, held=1, least_cols=1793),
        SpatialConfig(2432, 16, 8, 128, skewed=32),
        SpatialConfig(2560, 16, 4, 64, skewed=32, least_cols=2433),
        SpatialConfig(4864, 16, 8, 64, skewed=16, max_registers=128, least_cols=2561),
        SpatialConfig(24, 1, 1, 128),
        SpatialConfig(40, 1, 4, 64),
        SpatialConfig(56, 1, 8, 128, max_registers=128),
        SpatialConfig(80, 2, 4, 128, max_registers=96),
        SpatialConfig(176, 4, 4, 128, max_registers=96),
        SpatialConfig(224, 4, 4, 128, max_registers=128),
        SpatialConfig(352, 8, 4, 128, max_registers=96),
        SpatialConfig(544, 8, 4, 128, max_registers=128),
        SpatialConfig(832, 4, 8, 64, max_registers=128),
        SpatialConfig(1280, 16, 4, 64, max_registers=96),
        SpatialConfig(1664, 16, 4, 64, max_registers=128),
        SpatialConfig(192, 1, 8, 128, max_registers=128),
    ),
    (True, 2): (
        SpatialConfig(6, 1, 1, 256),
        SpatialConfig(10, 1, 4, 128, thread_bytes=8, skewed=8),
        SpatialConfig(30, 1, 8, 256, thread_bytes=8, skewed=8),
        SpatialConfig(10, 1, 1, 256),
        SpatialConfig(30, 1, 4, 128, thread_bytes=4, skewed=4),
        SpatialConfig(128, 2, 8, 256, thread_bytes=8, skewed=8),
        SpatialConfig(304, 4, 8, 256, thread_bytes=8, skewed=8),
        SpatialConfig(640, 8, 8, 256, thread_bytes=8, skewed=8),
        SpatialConfig(96, 2, 4, 128, thread_bytes=8, skewed=8),
        SpatialConfig(304, 4, 4, 128, thread_bytes=8, skewed=8),
        SpatialConfig(640, 8, 4, 128, thread_bytes=8, skewed=8),
        SpatialConfig(1344, 16, 4, 128, thread_bytes=8, skewed=8),
        SpatialConfig(2688, 16, 8, 128, thread_bytes=8, skewed=8, max_registers=128),
        SpatialConfig(3328, 16, 8, 128, thread_bytes=8, skewed=8, max_registers=128, least_cols=2689),
        SpatialConfig(5888, 16, 8, 64, thread_bytes=8, skewed=8, max_registers=128, least_cols=3329),
        SpatialConfig(44, 1, 4, 128),
        SpatialConfig(192, 1, 4, 32),
        SpatialConfig(256, 4, 4, 64, max_registers=96),
        SpatialConfig(256, 1, 4, 64),
        SpatialConfig(512, 1, 8, 64),
        SpatialConfig(768, 8, 4, 32, max_registers=96),
        SpatialConfig(1024, 16, 4, 64, max_registers=128),
        SpatialConfig(1792, 16, 8, 64, max_registers=128),
    ),
    (True, 4): (
        SpatialConfig(3, 1, 1, 128),
        SpatialConfig(32, 1, 8, 256, skewed=16),
        SpatialConfig(12, 1, 1, 128),
        SpatialConfig(32, 1, 4, 128, skewed=16),
        SpatialConfig(80, 2, 4, 128, skewed=16),
        SpatialConfig(160, 4, 4, 128, skewed=16),
        SpatialConfig(352, 8, 4, 128, skewed=16),
        SpatialConfig(704, 16, 4, 128, skewed=16),
        SpatialConfig(832, 16, 8, 128, thread_bytes=8, skewed=8),
        SpatialConfig(1408, 16, 4, 64, skewed=16, least_cols=833),
        SpatialConfig(2816, 16, 8, 64, skewed=16, least_cols=1409),
        SpatialConfig(56, 1, 4, 64),
        SpatialConfig(80, 4, 4, 128, max_registers=96),
        SpatialConfig(160, 8, 4, 128, max_registers=96),
        SpatialConfig(256, 8, 4, 128, max_registers=128),
        SpatialConfig(59, 1, 4, 64),
        SpatialConfig(384, 8, 4, 64, max_registers=128),
        SpatialConfig(512, 16, 4, 128, max_registers=128),
        SpatialConfig(1024, 16, 4, 64, max_registers=128),
        SpatialConfig(1792, 16, 8, 64, max_registers=128),
    ),
}
# where runs of positions start at multiples of a half or a quarter of a vector: by (backward, bytes of an element,
# elements of that part). These come first. Few columns are in wide tiles that are not skewed: each run of such a tile
# shares a sector with the next tile's, so that wide tiles share fewer. Other GPUs, float16, and tiles that are not
# skewed of other layouts take them untimed
PART_VECTORS = {
    (False, 2, 4): (
        SpatialConfig(14, 1, 4, 512, thread_bytes=8, whole_sectors=False, least_cols=7),
        SpatialConfig(46, 1, 4, 256, thread_bytes=8, whole_sectors=False, least_cols=7),
        SpatialConfig(56, 1, 8, 512, thread_bytes=8, whole_sectors=False, least_cols=47),
        SpatialConfig(192, 2, 8, 256, thread_bytes=8, skewed=8, least_cols=153),
        SpatialConfig(240, 2, 4, 128, skewed=16, least_cols=193),
        SpatialConfig(304, 2, 8, 256, skewed=16, least_cols=241),
        SpatialConfig(448, 4, 8, 256, thread_bytes=8, skewed=8, least_cols=305),
        SpatialConfig(480, 4, 4, 128, skewed=16, least_cols=449),
        SpatialConfig(608, 4, 8, 256, skewed=16, least_cols=481),
        SpatialConfig(960, 8, 4, 128, skewed=16, least_cols=769),
        SpatialConfig(1408, 8, 8, 128, thread_bytes=8, skewed=8, least_cols=1217),
    ),
    (False, 2, 2): (SpatialConfig(16, 1, 8, 512, thread_bytes=8, whole_sectors=False, least_cols=11),),
    (False, 4, 2): (SpatialConfig(12, 1, 4, 128, skewed=32, least_cols=10),),
    (True, 2, 4): (
        SpatialConfig(32, 1, 8, 512, thread_bytes=8, whole_sectors=False, least_cols=9),
        SpatialConfig(64, 1, 8, 256, thread_bytes=8, whole_sectors=False, least_cols=9),
        SpatialConfig(96, 2, 8, 256, skewed=16, least_cols=65),
        SpatialConfig(192, 4, 8, 256, skewed=16, least_cols=129),
        SpatialConfig(288, 4, 8, 256, skewed=16, least_cols=193),
        SpatialConfig(448, 8, 4, 128, skewed=16, least_cols=417),
        SpatialConfig(576, 8, 8, 256, skewed=16, least_cols=449),
        SpatialConfig(1024, 16, 4, 128, skewed=16, least_cols=961),
        SpatialConfig(1536, 16, 4, 64, skewed=16, least_cols=1345),
        SpatialConfig(2944, 16, 8, 128, thread_bytes=8, skewed=8, max_registers=168, least_cols=2689),
        SpatialConfig(3328, 16, 4, 64, skewed=16, max_registers=168, least_cols=2945),
        SpatialConfig(4608, 16, 8, 64, skewed=16, max_registers=128, least_cols=3329),
    ),
    (True, 2, 2): (
        SpatialConfig(16, 1, 8, 256, thread_bytes=8, whole_sectors=False, least_cols=7),
        SpatialConfig(3328, 16, 4, 64, skewed=16, max_registers=168, least_cols=2689),
        SpatialConfig(4096, 16, 8, 64, thread_bytes=8, skewed=8, max_registers=128, least_cols=3329),
    ),
}
# skewed tiles without a cap of their own, by (backward, warps of a program): registers that a thread's chunks take, at
# most, and the cap on all
SKEWED_REGISTERS: dict[tuple[bool, int], tuple[tuple[int, int | None], ...]] = {
    (False, 4): ((28, None), (48, 80), (64, 96), (76, 112), (1 << 31, 128)),
    (True, 4): ((28, None), (36, 80), (48, 96), (1 << 31, 128)),
    (False, 8): ((28, None), (56, 80), (1 << 31, 128)),
    (True, 8): ((28, None), (54, 80), (1 << 31, 128)),
}
# the fewest columns whose tiles are skewed where runs of positions start at multiples of half a vector
SKEWED_COLS = {2: 31, 4: 13}
# a kernel that reads columns in parts
PARTS = PartsTile(256, 4, 4)
ANY = 1 << 31  # programs: a part has least_cols, whatever the positions
# columns of a part within batch_invariant(), and at most where a tile has no `steps`; parts
MOST_PART_COLS, MOST_PARTS = 1024, 512
# columns that are read twice, by (backward, bytes of an element); of 16-bit gradients that start at halves of sectors;
# of log_softmax gradients, whose first kernel loads a step ahead; and of 16-bit gradients of bundles. A program of one
# step takes long to start and to end, and one of many leaves multiprocessors idle at the end
SOFTMAX_PARTS = {
    (False, 2): PartsTile(128, 4, 12, finish_bytes=512, finish_chunks=12, steps=2),
    (False, 4): PartsTile(256, 4, 8, finish_bytes=1024, finish_chunks=4, programs=ANY),
    (True, 2): PartsTile(256, 4, 16, finish_chunks=4),
    (True, 4): PartsTile(256, 4, 16, finish_bytes=1024, finish_chunks=2),
}
HALVES_GRADIENT = PartsTile(1024, 4, 16, finish_chunks=4)
LOG_GRADIENT = {
    2: PartsTile(128, 4, 8, finish_bytes=256, finish_chunks=4, steps=2),
    4: PartsTile(256, 4, 8, finish_bytes=1024, finish_chunks=2, steps=4),
}
BUNDLED_GRADIENT = PARTS._replace(least_cols=128, programs=768)
# from UNALIGNED_POSITIONS on, where columns start within a vector. Neighbors along `inner` share a sector there, and
# wide tiles share fewer
UNALIGNED_PARTS, UNALIGNED_POSITIONS = {2: PartsTile(512, 8, 2), 4: PartsTile(1024, 8, 2)}, 512
# of 16-bit gradients there, except where columns start anywhere: single elements would take too many registers
PARTLY_ALIGNED_PARTS = PartsTile(512, 8, 8, finish_chunks=4)
# up to so many positions, of a softmax and of float32 gradients
NARROW_PARTS, NARROW_POSITIONS = PartsTile(256, 4, 8), 48
