"""Tiles of up to 1,408 columns on the fewest CTAs whose threads hold them: one rule for each range.

A thread holds its columns in registers. Where it has few words, instructions and barriers cost as much as the bytes
that a program moves; that shows in tensors that the L2 holds. Where it has many, few programs fit. So a range of
columns has a tile of few warps, and the most words of a thread, from which the CTAs of a cluster follow. Programs start
together, as they did when they were timed (docs/measurements/other-dims-alignment.md; figures: thresholds.md).
"""

from __future__ import annotations

from typing import NamedTuple

from .spatial_tables import SpatialConfig, config_of_words
from .types import SECTOR_BYTES, Device, SpatialProblem

LEAST_POSITIONS = 448  # of a plane; shorter planes have `short_planes`
# positions from which planes in pieces, and other skewed tiles, are not considered
LONG = 1024
# a 16-bit softmax whose tiles share no positions has no cap on registers from so many CTAs on: ptxas takes fewer
# registers where there is no cap
UNCAPPED_CTAS = 4


class Lean(NamedTuple):
    """From `least` to `most` columns: a tile of so many positions, and the words of 4 bytes of a thread, at most.

    num_warps: of a CTA. skewed: as of a SpatialConfig. alone: one program holds the columns. Its tile shares no
    positions with the next one, wherever columns start, and is narrower where it would be nearly half empty
    (`spatial.tiles_plan`). log: only of log_softmax (True), or only of softmax (False); None: of both.
    """

    least: int
    most: int
    positions: int
    num_warps: int
    words: int
    thread_bytes: int = 8
    skewed: int = 0
    alone: bool = False
    log: bool | None = None


def _few(least: int, most: int, log: bool | None = None) -> Lean:
    """Few columns: a thread has whole columns of 4 positions, up to 17 of a gradient's."""
    return Lean(least, most, positions=512, num_warps=4, words=68, alone=True, log=log)


# of a 16-bit softmax: few columns, and those for which tiles of 128 positions (`overlapping_tiles`) have just taken
# twice the CTAs, with half of the words
_FEW = _few(3, 4, log=False), _few(5, 6), _few(15, 18)
_AFTER_STEPS = tuple(Lean(least, most, 64, 4, 80) for least, most in ((229, 320), (457, 640), (913, 1280)))
# by op, bytes of an element, and the bytes at whose multiples columns start
RANGES: dict[tuple[str, int, int], tuple[Lean, ...]] = {
    ("softmax", 2, 32): (
        *_FEW,
        Lean(153, 400, 64, 4, 64),
        Lean(457, 690, 64, 4, 64),
        Lean(780, 1024, 64, 4, 64),
        Lean(1025, 1152, 64, 4, 72),
        Lean(1153, 1408, 64, 4, 64),
    ),
    ("softmax", 2, 16): (
        *_FEW,
        Lean(57, 95, 128, 4, 48, 16, skewed=16, log=False),
        Lean(96, 160, 64, 4, 40),
        *_AFTER_STEPS,
    ),
    ("softmax", 2, 8): (*_FEW, Lean(120, 152, 128, 4, 40, skewed=8), *_AFTER_STEPS),
    ("softmax", 2, 4): (
        Lean(10, 15, 512, 8, 15, 4, alone=True),
        Lean(16, 40, 256, 8, 20, 4, alone=True),
    ),
    ("softmax", 2, 2): (
        Lean(5, 14, 128, 1, 28, alone=True),
        Lean(15, 24, 256, 8, 16, 4, skewed=4),
        Lean(112, 124, 128, 8, 40, skewed=8),
        Lean(641, 704, 128, 4, 48, skewed=8),
    ),
    ("softmax", 4, 32): (
        Lean(7, 9, 256, 2, 40, 16),
        Lean(90, 120, 64, 4, 60),
        Lean(241, 1088, 64, 4, 68),
    ),
    ("softmax", 4, 16): (
        Lean(12, 23, 64, 1, 48, 16),
        Lean(25, 57, 64, 2, 60, 16),
        Lean(58, 992, 64, 4, 62),
    ),
    ("gradient", 2, 32): (
        _few(3, 16),
        Lean(17, 36, 128, 2, 72),
        Lean(37, 64, 64, 2, 64, log=False),
        Lean(65, 1056, 64, 4, 66),
    ),
    ("gradient", 2, 16): (
        _few(3, 4),
        _few(6, 17),
        Lean(18, 37, 256, 4, 76, alone=True),
        Lean(65, 319, 128, 4, 80, 16, skewed=32),
        Lean(385, 896, 128, 4, 80, 16, skewed=32),
    ),
    ("gradient", 2, 8): (
        _few(3, 16),
        Lean(17, 36, 256, 4, 72, alone=True),
        Lean(65, 112, 256, 8, 56, skewed=8),
        Lean(113, 832, 128, 4, 64, skewed=8),
        Lean(833, 960, 128, 4, 64, 16, skewed=16, log=True),
    ),
    ("gradient", 2, 4): (Lean(18, 49, 256, 8, 50, 4, alone=True),),
    ("gradient", 2, 2): (
        Lean(7, 9, 128, 1, 36, alone=True),
        Lean(193, 512, 128, 4, 64, skewed=8),
    ),
    ("gradient", 4, 32): (
        Lean(65, 72, 64, 4, 72),
        Lean(145, 1024, 64, 4, 66),
    ),
    ("gradient", 4, 16): (
        Lean(257, 576, 64, 4, 72),
        Lean(577, 1024, 64, 4, 66, log=False),
    ),
}


def lean_config(problem: SpatialProblem, device: Device) -> SpatialConfig | None:
    """The config of such tiles; None for other columns, where tiles are not filled, and where no cluster holds one.

    >>> from .types import DEVICES
    >>> planes = SpatialProblem(340, 4384, "bfloat16", 8, backward=True)
    >>> config = lean_config(planes, DEVICES["sm_90"])
    >>> config.ctas, config.num_warps
    (4, 4)
    """
    if problem.inner < LEAST_POSITIONS or not problem.may_have_tiles(device):
        return None
    starts = problem.starts * problem.itemsize
    ranges = RANGES.get(("gradient" if problem.backward else "softmax", problem.itemsize, starts), ())
    of = next((of for of in ranges if of.least <= problem.n_cols <= of.most and of.log in (None, problem.log)), None)
    if of is None:
        return None
    overlaps = starts < SECTOR_BYTES and not (of.skewed or of.alone)
    if (of.skewed or overlaps) and not problem.in_phase:
        return None
    if not (of.alone or problem.fills(of.positions, of.skewed // problem.itemsize)):
        return None
    threads = of.num_warps * device.warp_size
    found = problem.fewest_ctas(threads, of.positions, of.thread_bytes, of.words, device.max_cluster)
    if found is None:
        return None
    ctas, words = found
    config = config_of_words(
        problem.n_cols, ctas, of.num_warps, of.positions, of.thread_bytes, words, problem.backward, of.skewed, overlaps
    )
    capped = problem.backward or problem.itemsize == 4 or of.skewed or overlaps
    return config if capped or ctas < UNCAPPED_CTAS else config._replace(max_registers=None)
