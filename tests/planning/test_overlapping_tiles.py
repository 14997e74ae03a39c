"""Overlapping tiles: what the rule gives each number of columns, where it gives nothing, and what a softmax runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from spatial_problems import starting_at

from fused_softmax.launch import spatial
from fused_softmax.planning.overlapping_tiles import FEW, FEW_RANGES, HELD, RANGES, Range, Tile, overlapping_config
from fused_softmax.planning.spatial import tiles_plan
from fused_softmax.planning.types import DEVICES, Plan, SpatialProblem

HOPPER = DEVICES["sm_90"]
OTHER_DIMS = Path(__file__).parents[2] / "docs" / "other-dims.md"
SECTOR, MOST_CHUNKS = 32, 120  # bytes; a kernel of so many chunks takes 6 to 10 s to compile on one core

ALL = [(key, of, 8192) for key, ranges in RANGES.items() for of in ranges]
ALL += [(key, of, 320) for key, ranges in FEW_RANGES.items() for of in ranges]
FIRST = [(key, ranges, 8192) for key, ranges in RANGES.items()]
FIRST += [(key, ranges, 320) for key, ranges in FEW_RANGES.items()]


def plan_of(problem: SpatialProblem) -> Plan:
    config = overlapping_config(problem, HOPPER)
    assert config is not None, problem
    return tiles_plan(problem, HOPPER, config)


def room(plan: Plan, held: int, words: int) -> int:
    """Bytes of shared memory that are left where a thread keeps `held` of so many words."""
    staged = max(0, words - held) * 4 * 32 * plan.num_warps
    merged = (8 * plan.ctas + 16 + 4 * plan.num_warps) * plan.rows
    return min((40 << 10) - staged, (48 << 10) - 128 - staged - merged)


def is_filled(key: tuple[str, int, int], tile: Tile, positions: int) -> bool:
    """Whether there are four tiles, or few positions in whole tiles that do not exist."""
    overlap = (SECTOR - key[2]) // key[1]
    step = tile.positions - overlap
    return positions >= 4 * tile.positions or -(-(positions - overlap) // step) * step <= 1.15 * positions


def words_of(problem: SpatialProblem, tile: Tile, ctas: int) -> int:
    """Of 4 bytes, that a thread has of the columns."""
    thread_bytes = min(8, problem.starts * problem.itemsize)
    threads = tile.num_warps * 32 * ctas
    per_thread = -(-problem.n_cols * tile.positions * problem.itemsize // (threads * thread_bytes))
    return (1 + problem.backward) * per_thread * thread_bytes // 4


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("key", "of", "positions"), ALL)
def test_what_a_thread_holds(key: tuple[str, int, int], of: Range, positions: int):
    """For all columns of a range: all of them in few chunks, in registers and shared memory as HELD says."""
    _, itemsize, starts = key
    filled = [tile for tile in of.tiles if positions >= tile.least_inner and is_filled(key, tile, positions)]
    options = [(tile, ctas) for tile in filled for ctas in tile.ctas]
    for n_cols in range(of.least, of.most + 1):
        problem = starting_at(key, n_cols, positions)
        plan = plan_of(problem)
        of_a_chunk = plan.vectors_per_chunk * plan.ctas
        assert (plan.chunks - 1) * of_a_chunk < n_cols <= plan.chunks * of_a_chunk and plan.chunks <= MOST_CHUNKS
        thread_bytes = min(8, starts)
        assert plan.vec * itemsize == thread_bytes or not (plan.overlap or plan.smem_staged)
        tensors = 1 + problem.backward
        words = tensors * plan.chunks * thread_bytes // 4
        staged_words = plan.smem_staged * thread_bytes // 4
        wanted = [held for held in HELD[problem.backward, plan.num_warps] if words <= held.words]
        found = next(held for held in wanted if held.max_registers == plan.max_registers)
        assert max(0, words - found.held) == staged_words, n_cols
        assert found == wanted[0] or room(plan, wanted[0].held, words) < 0, "another one fits"
        # the first tile, on the fewest CTAs, whose threads may have that many words
        tile, ctas = next(pair for pair in options if words_of(problem, *pair) <= pair[0].words)
        assert (tile.positions, tile.num_warps, ctas) == (plan.rows, plan.num_warps, plan.ctas), n_cols
        # what it stages fits next to what it merges, and has whole chunks only
        assert room(plan, found.held, words) >= 0
        assert plan.smem_staged <= plan.unpredicated_chunks
        assert plan.overlap == (0 if starts == SECTOR else (SECTOR - starts) // itemsize)
        # a column starts in a sector as that of the next chunk does
        assert of_a_chunk * starts % SECTOR == 0 and plan.outers == 1


@pytest.mark.parametrize(("key", "ranges", "positions"), FIRST)
def test_where_there_are_none(key: tuple[str, int, int], ranges: tuple[Range, ...], positions: int):
    least, most = ranges[0].least, ranges[-1].most
    problem = starting_at(key, least, positions)
    assert overlapping_config(problem, HOPPER)
    others = [
        replace(problem, batch_invariant=True),
        replace(problem, n_cols=least - 1),
        *(replace(problem, n_cols=of.most + 1) for of, after in pairwise(ranges) if of.most + 1 < after.least),
    ]
    for of in ranges:  # those that planes of any length have, in tiles that must be filled
        if of.tiles[-1].positions == 64 and of.tiles[-1].least_inner == 1:
            one_tile = replace(problem, n_cols=of.least, inner=64)
            others += [one_tile, replace(one_tile, inner=72, whole_sectors=False)]
    if positions > FEW:  # beyond the columns of FEW_RANGES there are those of RANGES
        others.append(replace(problem, n_cols=most + 1))
    assert not any(overlapping_config(other, HOPPER) for other in others)
    in_place = overlapping_config(replace(problem, in_phase=False), HOPPER)
    assert (in_place is not None) == problem.whole_sectors, "tiles that overlap write what other programs read"
    # an input with other strides, whose columns start at any element
    assert not overlapping_config(replace(problem, vec=1, in_phase=False), HOPPER)
    devices = (device for name, device in DEVICES.items() if name != "sm_90")
    assert not any(overlapping_config(problem, device) for device in devices)


def test_where_positions_are_few():
    key = "softmax", 4, 8
    few, more = starting_at(key, 1000, FEW - 9), starting_at(key, 1000, FEW + 1)
    assert overlapping_config(few, HOPPER) and not overlapping_config(more, HOPPER)
    assert overlapping_config(replace(few, inner=FEW, vec=1), HOPPER) and FEW == 511
    assert not overlapping_config(replace(few, inner=FEW + 2, vec=1), HOPPER)
    # more columns than those of FEW_RANGES have the tiles of many positions
    assert [plan_of(starting_at(key, n_cols, FEW - 9)).rows for n_cols in (4352, 4353, 6000)] == [64, 64, 32]
    # four tiles may be partly empty; fewer are filled but for 15%
    whole = SpatialProblem(1500, 512, "bfloat16", 8)
    assert [plan_of(replace(whole, inner=inner)).rows for inner in (496, 512, 528)] == [128, 128, 128]
    in_tiles = [overlapping_config(replace(whole, inner=inner), HOPPER) for inner in (320, 352, 384, 400)]
    assert [config and config.inner for config in in_tiles] == [64, 128, 128, 64]
    # tiles of 64 that overlap by 12 begin at each 52nd position: 2 of them have 116
    at_quarters = starting_at(("softmax", 2, 8), 900, 100)
    in_tiles = [overlapping_config(replace(at_quarters, inner=inner), HOPPER) for inner in (84, 92, 108, 116, 132)]
    assert [config is not None for config in in_tiles] == [False, True, True, True, False]
    # 64 where 128 would be half empty
    of = starting_at(("softmax", 2, 8), 900, 180)
    assert plan_of(of).rows == 64 and plan_of(replace(of, inner=900)).rows == 128
    # a cluster of 8 holds more columns where a plane has many tiles
    assert [plan_of(replace(of, inner=inner, n_cols=3649)).ctas for inner in (4092, 4100)] == [16, 8]
    # gradients of fewer columns have such tiles where planes are long
    long = starting_at(("gradient", 2, 8), 2000, 8192)
    assert plan_of(long).rows == 128 and plan_of(replace(long, inner=8188)).rows == 64
    # tiles of 128 are on 8 CTAs at most
    assert [plan_of(replace(of, inner=8196, n_cols=n)).rows for n in (1824, 1825)] == [128, 64]


def test_gradients_of_2049_to_2688_columns():
    # 128 positions where tiles of them are filled, and 64 where registers of a cluster do not hold a plane faster
    few = [starting_at(("gradient", 2, 8), n_cols, 316) for n_cols in (2048, 2049, 2432, 2433, 2688)]
    found = [overlapping_config(of, HOPPER) for of in few]
    assert [config and config.inner for config in found] == [None, 128, 128, 128, 128]
    found = [overlapping_config(replace(of, inner=156), HOPPER) for of in few]
    assert [config and config.inner for config in found] == [None, None, None, 64, 64]
    # a cluster's registers hold the plane faster up to some positions
    for op, n_cols, inner in (
        ("gradient", 2480, 148), ("gradient", 2481, 104), ("log gradient", 2480, 148), ("log gradient", 2481, 112),
    ):  # fmt: skip
        eighths = replace(starting_at((op, 2, 4), n_cols, 200), inner=inner - 2)
        assert not overlapping_config(eighths, HOPPER) and plan_of(replace(eighths, inner=inner + 2)).rows == 64
    eighths = starting_at(("gradient", 2, 4), 2240, 342)
    assert plan_of(eighths).rows == 128 and not overlapping_config(replace(eighths, n_cols=2241), HOPPER)
    # in planes of any length of log_softmax, and in long ones of softmax
    logs = starting_at(("log gradient", 2, 8), 2049, 1000)
    assert plan_of(logs).rows == plan_of(replace(logs, n_cols=2688)).rows == 128
    assert plan_of(starting_at(("gradient", 2, 8), 2688, 8192)).rows == 128


@pytest.mark.parametrize(
    ("shape", "dtype", "backward", "log", "overlaps"),
    [
        ((2, 1500, 8196), torch.bfloat16, False, False, 12),
        ((2, 1500, 8198), torch.float16, False, True, 14),
        ((2, 1500, 8200), torch.bfloat16, False, False, 8),
        ((2, 1500, 8196), torch.bfloat16, True, True, 12),
        ((2, 3000, 300), torch.bfloat16, False, False, 12),  # in place of skewed tiles
        ((2, 2571, 310), torch.float16, True, False, 14), ((2, 2200, 316), torch.bfloat16, True, False, 12),
        ((2, 2300, 210), torch.bfloat16, True, True, 14),
        ((2, 767, 207), torch.float32, False, False, 7),  # of planes on a cluster
        ((2, 2000, 8194), torch.float32, False, False, 6),
        ((2, 12000, 2052), torch.bfloat16, False, True, 12),  # of columns that were read twice
        ((2, 9000, 2050), torch.float16, False, False, 14),
        ((2, 9000, 2049), torch.float32, False, False, 7),
        ((2, 7000, 2052), torch.float16, True, False, 12),
        ((2, 5000, 2050), torch.bfloat16, True, True, 14),
        ((2, 5000, 2050), torch.float32, True, False, 6),
        ((2, 5000, 2049), torch.float32, True, True, 7),
    ],
)  # fmt: skip
def test_what_a_softmax_runs(shape, dtype, backward, log, overlaps):
    tensors = tuple(torch.empty(shape, dtype=dtype, device="meta") for _ in range(2 + backward))
    plan = spatial.softmax_plan(tensors, log, backward, False, HOPPER)
    assert (plan.overlap, plan.skewed, plan.periodic, plan.gathered) == (overlaps, 0, 0, False)
    whole = tuple(torch.empty((2, 1500, 8192), dtype=dtype, device="meta") for _ in range(2 + backward))
    assert spatial.softmax_plan(whole, log, backward, False, HOPPER).overlap == 0


# by `backward`, bytes of an element, and the bytes at whose multiples columns start: the most columns that are read
# once, as docs/other-dims.md lists them
LONGEST = {
    (False, 2): {32: 30720, 16: 16640, 8: 13568, 4: 13056, 2: 6528},
    (False, 4): {32: 28160, 16: 14336, 8: 14080, 4: 11520},
    (True, 2): {32: 17408, 16: 14336, 8: 11264, 4: 8064, 2: 5888},
    (True, 4): {32: 22528, 16: 11264, 8: 10240, 4: 7936},
}


@pytest.mark.parametrize(("kind", "longest"), LONGEST.items())
def test_which_columns_are_read_once(kind: tuple[bool, int], longest: dict[int, int]):
    """All up to a number, and none beyond: there is no gap between two ranges or entries of tables."""
    backward, itemsize = kind
    row = "| " + ("gradient" if backward else "softmax") + (", 16 bits" if itemsize == 2 else ", float32")
    listed = next(line for line in OTHER_DIMS.read_text().splitlines() if line.startswith(row))
    assert [int(cell.replace(",", "")) for cell in listed.split("|")[2:-1] if cell.strip()] == [*longest.values()]
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    ends = {n for ranges in RANGES.values() for of in ranges for n in (of.least - 1, of.least, of.most, of.most + 1)}
    for starts, most in longest.items():
        inner = 4096 + (starts // itemsize if starts < SECTOR else 0)
        for n_cols in sorted({most, most + 1, *range(641, most + 2000, 97), *ends}):
            tensors = tuple(torch.empty((2, n_cols, inner), dtype=dtype, device="meta") for _ in range(2 + backward))
            plan = spatial.softmax_plan(tensors, False, backward, False, HOPPER)
            assert (plan.regime == "spatial_two_pass") == (n_cols > most), (starts, n_cols)


def test_an_input_that_starts_elsewhere():
    # a fuzzer found wrong results: the output's columns start at sectors, and the input's at any element
    x = torch.empty(1, 1307, 193, dtype=torch.bfloat16, device="meta")[..., :192]
    plan = spatial.softmax_plan((x, torch.empty_like(x.contiguous())), False, False, False, HOPPER)
    assert plan.vec == 1
    with_gaps = torch.empty(1, 1307, 200, dtype=torch.bfloat16, device="meta")[..., :192]
    problem = spatial.problem_of(with_gaps, torch.empty(1, 1307, 192, dtype=torch.bfloat16, device="meta"))
    assert problem.vec == 8 and overlapping_config(problem, HOPPER), "by whole vectors, whichever sector they are in"
