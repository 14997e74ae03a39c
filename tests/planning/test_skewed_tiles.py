"""Skewed tiles over few positions: what each config must keep, and which plans they replace."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from planning.test_spatial_plans import check

from fused_softmax.planning.planes import faster_as_planes
from fused_softmax.planning.register_planes import best_way
from fused_softmax.planning.skewed_tiles import faster_as_skewed, skewed_config
from fused_softmax.planning.spatial import plan_spatial, tiles_plan
from fused_softmax.planning.types import DEVICES, ITEMSIZE, SpatialProblem, tiles_of


def planes(n_cols: int, inner: int, dtype: str, backward: bool = False, log: bool = False) -> SpatialProblem:
    """The problem of contiguous planes."""
    vec = 16 // ITEMSIZE[dtype]
    while inner % vec:
        vec //= 2
    whole = inner * ITEMSIZE[dtype] % 32 == 0
    return SpatialProblem(n_cols, inner, dtype, vec, backward, log, False, whole, True, True)


def drawn(rng: random.Random) -> SpatialProblem:
    n_cols, inner = round(60 * 150 ** rng.random()), rng.randint(1, 600)
    return planes(n_cols, inner, rng.choice(("bfloat16", "float16", "float32")), rng.random() < 0.5, rng.random() < 0.5)


def replaced(problem: SpatialProblem, device: str = "sm_90") -> bool:
    """Whether skewed tiles run in place of the plan of tiles or of planes."""
    tiles = plan_spatial(problem, DEVICES[device])
    plan = faster_as_planes(problem, DEVICES[device], tiles) or tiles
    return faster_as_skewed(problem, DEVICES[device], plan, best_way(problem, DEVICES[device])) is not None


@pytest.mark.parametrize("seed", range(2))
def test_random_planes(seed: int):
    rng, found = random.Random(seed), 0
    for _ in range(4000):
        problem, device = drawn(rng), DEVICES[rng.choice(list(DEVICES))]
        config = skewed_config(problem, device)
        if config is None:
            continue
        found += 1
        plan = tiles_plan(problem, device, config)
        check(plan, problem, device)
        assert (plan.rows, plan.ctas, plan.smem_staged) == (config.inner, config.ctas, 0)
        step = plan.rows - plan.overlap
        tiles = tiles_of(problem.inner, plan.rows, plan.overlap, plan.skewed)
        registers = (1 + problem.backward) * plan.chunks * plan.vec * problem.itemsize // 4
        assert registers <= 76
        if plan.rows == 128:
            nearly = plan.ctas <= 4 or 50 <= registers <= 60
        else:
            nearly = plan.rows == 64 and (problem.backward or plan.ctas < device.max_cluster or registers >= 40)
        most = 1.25 if nearly else 1.2
        assert problem.inner <= tiles * step <= most * problem.inner, "little of the last tile is empty"
        # the columns of each chunk start as those of the first one do, and a position's sums fit the threads
        assert plan.vectors_per_chunk * plan.ctas % plan.skewed == 0
        assert plan.ctas == 1 or plan.rows <= plan.num_warps * device.warp_size
    assert found > 400


def test_where_there_are_none():
    of, hopper = planes(1231, 166, "bfloat16"), DEVICES["sm_90"]
    assert skewed_config(of, hopper) is not None
    others = (dict(vec=8), dict(in_phase=False), dict(batch_invariant=True))
    assert not any(skewed_config(replace(of, **other), hopper) for other in others)
    assert not any(skewed_config(of, DEVICES[name]) for name in ("sm_80", "sm_89", "gfx942"))
    assert skewed_config(replace(of, n_cols=40000), hopper) is None, "a cluster does not hold so many"
    assert skewed_config(replace(of, inner=34), hopper) is None, "half of a tile would be empty"


def test_tiles_of_positions():
    assert tiles_of(128, 64, 0) == 2 and tiles_of(129, 64, 0) == 3 and tiles_of(1, 64, 8) == 1
    # the most positions of n tiles: (tile, overlap, unit) -> those of one, two and three
    most = {
        (64, 4, 4): (58, 118, 178), (64, 8, 4): (56, 112, 168), (128, 4, 4): (122, 246, 370),
        (64, 2, 2): (61, 123, 185), (32, 4, 4): (26, 54, 82), (32, 8, 4): (24, 48, 72),
    }  # fmt: skip
    for (rows, overlap, unit), widths in most.items():
        for n, inner in enumerate(widths, 1):
            assert tiles_of(inner, rows, overlap, unit) == n < tiles_of(inner + 1, rows, overlap, unit)


@pytest.mark.parametrize(
    ("problem", "found"),
    [
        # CTAs, warps, positions, bytes of a thread's vector
        (planes(1231, 166, "bfloat16"), (8, 4, 64, 8)),
        (planes(700, 300, "bfloat16"), (4, 4, 64, 8)),
        (planes(213, 350, "bfloat16", True), (4, 4, 128, 8)),
        (planes(74, 471, "bfloat16", True), (2, 4, 128, 8)),
        (planes(900, 350, "bfloat16", True), (16, 4, 64, 8)),  # 128 positions would take 16 CTAs
        (planes(3817, 195, "bfloat16"), (8, 8, 64, 8)),
        (planes(3817, 195, "float32"), (16, 4, 32, 16)),
        (planes(307, 201, "float32", True), (8, 4, 64, 16)),
        (planes(2248, 117, "float32"), (8, 8, 64, 8)),  # vectors of 16 bytes leave more of 64 positions empty
        (planes(2970, 463, "float32", True), (16, 8, 32, 16)),
        # tiles that are nearly filled
        (planes(512, 196, "bfloat16"), (4, 4, 64, 8)),
        (planes(174, 399, "bfloat16"), (2, 4, 128, 8)),
        (planes(411, 506, "bfloat16", True), (8, 4, 128, 8)),  # on 8 CTAs, but with many registers
        (planes(227, 102, "bfloat16", True), (4, 4, 64, 8)),  # 128 positions on 8 CTAs would have few
        (planes(411, 506, "bfloat16"), (4, 4, 64, 8)),
        (planes(1601, 185, "bfloat16"), (8, 4, 32, 8)),  # 64 positions on 16 CTAs would have few
        # registers of a 16-bit softmax
        (planes(708, 145, "bfloat16"), (4, 4, 64, 8)),
        (planes(181, 487, "bfloat16"), (2, 4, 64, 8)),  # one CTA has fewer
        (planes(2009, 129, "bfloat16"), (8, 4, 32, 8)),
        (planes(1372, 173, "bfloat16"), (8, 4, 32, 8)),
        (planes(2975, 489, "bfloat16"), (16, 4, 64, 8)),  # 48 registers, on 8 CTAs of 8 warps, too
        (planes(6700, 300, "bfloat16"), (8, 8, 32, 8)),
        (planes(2765, 138, "bfloat16"), (16, 4, 32, 8)),  # narrow tiles, too
    ],
    ids=str,
)
def test_which_tile(problem: SpatialProblem, found: tuple[int, ...]):
    config = skewed_config(problem, DEVICES["sm_90"])
    assert config is not None and (config.ctas, config.num_warps, config.inner, config.thread_bytes) == found


@pytest.mark.parametrize(
    ("n_cols", "inner", "dtype", "backward", "wanted"),
    [
        (1231, 166, "bfloat16", False, True),  # on a cluster's registers before
        (700, 300, "bfloat16", False, True),  # as pieces of 8 CTAs
        (3817, 195, "float32", False, True),  # read twice
        (213, 350, "bfloat16", True, True),
        (74, 471, "bfloat16", True, True),  # one program holds it
        (246, 327, "bfloat16", False, True),  # one program holds it, alone on its multiprocessor
        (298, 155, "float32", False, True),
        (142, 327, "bfloat16", False, True),  # with one other, and tiles have 128 positions
        (298, 155, "bfloat16", False, False),  # and 64
        (234, 206, "bfloat16", False, False),  # and 128, but they are less full
        (116, 131, "bfloat16", False, False),  # with more
        (126, 330, "bfloat16", True, True),  # a gradient's program of 8 warps, alone
        (71, 311, "bfloat16", True, True),  # with one other, and tiles have 128 positions
        (73, 290, "bfloat16", True, False),  # and 64
        (82, 207, "bfloat16", False, False),
        (1012, 196, "bfloat16", False, True),  # on the registers of 6 CTAs before
        (1012, 196, "bfloat16", True, True),
        (1500, 97, "bfloat16", False, False),  # few positions
        (5500, 601, "bfloat16", False, False),  # many
        (60, 411, "float32", True, True),
        (59, 411, "float32", True, False),  # few columns
        (3, 156, "bfloat16", True, False),
        (96, 110, "float32", True, True),  # registers, which are faster, are compared with them later
        (4560, 276, "bfloat16", True, False),  # tiles of 64 are read by 8 bytes, skewed ones would have 32
        (1656, 115, "float32", True, False),  # by 4 bytes, where registers hold them
        (223, 126, "bfloat16", True, False),  # its tiles would have 32 positions
        (2248, 117, "bfloat16", True, False),
        (2144, 87, "float32", True, False),  # so would these
        (2144, 87, "bfloat16", False, False),
        (700, 304, "bfloat16", False, False),  # runs start at vectors
    ],
)
def test_which_plans_are_replaced(n_cols: int, inner: int, dtype: str, backward: bool, wanted: bool):
    assert replaced(planes(n_cols, inner, dtype, backward)) is wanted
    assert not replaced(planes(n_cols, inner, dtype, backward), "sm_80")
