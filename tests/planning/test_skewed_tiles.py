"""Skewed tiles over few positions: what each config must keep, and which plans they replace."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from planning.test_spatial_plans import check

from fused_softmax.planning.planes import faster_as_planes
from fused_softmax.planning.skewed_tiles import MOST_EMPTY, MOST_REGISTERS, faster_as_skewed, skewed_config
from fused_softmax.planning.spatial import plan_spatial, tiles_plan
from fused_softmax.planning.types import DEVICES, ITEMSIZE, SpatialProblem, tiles_of


def planes(n_cols: int, inner: int, dtype: str, backward: bool = False, log: bool = False) -> SpatialProblem:
    """The problem of contiguous planes."""
    vec = 16 // ITEMSIZE[dtype]
    while inner % vec:
        vec //= 2
    whole = inner * ITEMSIZE[dtype] % 32 == 0
    return SpatialProblem(n_cols, inner, dtype, dtype, vec, backward, log, False, whole, True, True)


def drawn(rng: random.Random) -> SpatialProblem:
    n_cols, inner = round(60 * 150 ** rng.random()), rng.randint(1, 600)
    return planes(n_cols, inner, rng.choice(("bfloat16", "float16", "float32")), rng.random() < 0.5, rng.random() < 0.5)


def replaced(problem: SpatialProblem, device: str = "sm_90") -> bool:
    """Whether skewed tiles run in place of the plan of tiles or of planes."""
    tiles = plan_spatial(problem, DEVICES[device])
    plan = faster_as_planes(problem, DEVICES[device], tiles) or tiles
    return faster_as_skewed(problem, DEVICES[device], plan) is not None


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
        assert problem.inner <= tiles * step <= MOST_EMPTY * problem.inner
        registers = (1 + problem.backward) * plan.chunks * plan.vec * problem.itemsize // 4
        assert registers <= MOST_REGISTERS
        # the columns of each chunk start as those of the first one do, and a position's sums fit the threads
        assert plan.vectors_per_chunk * plan.ctas % plan.skewed == 0
        assert plan.ctas == 1 or plan.rows <= plan.num_warps * device.warp_size
    assert found > 400


def test_where_there_are_none():
    of, hopper = planes(1231, 166, "bfloat16"), DEVICES["sm_90"]
    assert skewed_config(of, hopper) is not None
    others = (dict(vec=8), dict(in_phase=False), dict(out_dtype="float32"), dict(batch_invariant=True))
    assert not any(skewed_config(replace(of, **other), hopper) for other in others)
    assert not any(skewed_config(of, DEVICES[name]) for name in ("sm_80", "sm_89", "gfx942"))
    assert skewed_config(replace(of, n_cols=40000), hopper) is None, "a cluster does not hold so many"
    assert skewed_config(replace(of, inner=34), hopper) is None, "half of a tile would be empty"


def test_tiles_of_positions():
    assert tiles_of(128, 64, 0) == 2 and tiles_of(129, 64, 0) == 3 and tiles_of(1, 64, 8) == 1
    # by hand: a column may start 3 positions into the first tile, and tiles share 4
    for inner in range(1, 400):
        reach = max((inner + shift - 4 + 59) // 60 for shift in range(4))
        assert max(1, reach) <= tiles_of(inner, 64, 4, 4) <= max(1, reach) + 1


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
        (116, 131, "bfloat16", False, False),  # with more
        (59, 350, "bfloat16", False, False),  # few columns
        (3, 156, "bfloat16", True, False),
        (4560, 276, "bfloat16", True, False),  # tiles of 64 are read by 8 bytes, skewed ones would have 32
        (1656, 115, "float32", True, True),  # by 4 bytes
        (223, 126, "bfloat16", True, False),  # its tiles would have 32 positions
        (2248, 117, "bfloat16", True, False),
        (2144, 87, "float32", True, True),  # so would these, but columns would be read twice
        (2144, 87, "bfloat16", False, False),
        (700, 304, "bfloat16", False, False),  # runs start at vectors
    ],
)
def test_which_plans_are_replaced(n_cols: int, inner: int, dtype: str, backward: bool, wanted: bool):
    assert replaced(planes(n_cols, inner, dtype, backward)) is wanted
    assert not replaced(planes(n_cols, inner, dtype, backward), "sm_80")
