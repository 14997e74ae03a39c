"""When planes are in registers: what was measured, where each other kind of plan was faster or slower than them."""

from __future__ import annotations

import doctest
from dataclasses import replace

import pytest
import torch

from fused_softmax.launch import spatial
from fused_softmax.planning import register_planes
from fused_softmax.planning.register_planes import best_way, faster_as_held
from fused_softmax.planning.short_planes import is_fastest
from fused_softmax.planning.types import DEVICES, Plan, SpatialProblem

HOPPER = DEVICES["sm_90"]
# columns, positions, dtype, backward, what they are, and (CTAs, warps) in registers. One H200, Triton 3.6, 2.5e7 or 6e7
# elements: the speed over that of the other kind of plan, which was timed in the same process
MEASURED = (
    (68, 30, "bfloat16", False, "piece", None),  # 1.05, registers
    (78, 66, "bfloat16", False, "piece", None),  # 1.24, registers
    (34, 228, "bfloat16", False, "piece", None),  # 2.56, tiles
    (82, 92, "bfloat16", False, "piece", None),  # 1.13, registers
    (99, 55, "bfloat16", False, "piece", None),  # 1.06, registers
    (161, 116, "bfloat16", False, "registers", (1, 4)),  # 1.12, piece
    (502, 31, "bfloat16", False, "registers", (1, 4)),  # 1.11, piece
    (7565, 8, "bfloat16", False, "registers", (3, 4)),  # 1.3, tiles
    (93780, 5, "bfloat16", False, "registers", (16, 8)),  # 1.25, bundles
    (7866, 8, "bfloat16", False, "registers", (3, 4)),  # 1.03, 4 CTAs
    (554, 28, "bfloat16", False, "registers", (1, 4)),  # 1.06, tiles
    (930, 35, "bfloat16", False, "registers", (2, 4)),  # 1.19, piece
    (308, 212, "bfloat16", False, "tiles", None),  # 1.09, registers
    (446, 149, "bfloat16", False, "tiles", None),  # 1.12, registers
    (396, 151, "bfloat16", False, "tiles", None),  # 1.27, registers
    (202, 224, "bfloat16", False, "tiles", None),  # 1.18, registers
    (647, 168, "bfloat16", False, "tiles", None),  # 1.07, registers
    (444, 212, "bfloat16", False, "tiles", None),  # 1.14, registers
    (75743, 5, "float32", False, "bundles", None),  # 1.06, registers
    (14511, 29, "float32", False, "bundles", None),  # 1.05, registers
    (78949, 5, "float32", False, "bundles", None),  # 1.05, registers
    (39261, 9, "float32", False, "registers", (8, 16)),  # 1.28, bundles
    (1664, 12, "float32", False, "registers", (2, 4)),  # 1.18, tiles
    (88938, 3, "float32", False, "registers", (16, 8)),  # 1.37, bundles
    (2537, 55, "float32", False, "registers", (8, 8)),  # 1.13, tiles
    (324, 100, "float32", False, "registers", (2, 8)),  # 1.48, tiles
    (254, 50, "float32", False, "registers", (2, 4)),  # 1.06, piece
    (4815, 4, "float32", False, "registers", (2, 4)),  # 1.21, tiles
    (4908, 79, "float32", False, "tiles", None),  # 1.11, bundles
    (2579, 79, "float32", False, "tiles", None),  # 1.21, registers
    (567, 247, "float32", False, "tiles", None),  # 1.2, registers
    (3449, 160, "float32", False, "tiles", None),  # 2.05, registers
    (2859, 86, "float32", False, "tiles", None),  # 1.17, registers
    (615, 190, "float32", False, "tiles", None),  # 1.21, registers
    (59, 134, "bfloat16", True, "piece", None),  # 1.16, registers
    (365, 4, "bfloat16", True, "registers", (1, 1)),  # 1.05, tiles
    (102, 144, "bfloat16", True, "registers", (1, 8)),  # 1.17, tiles
    (35, 140, "bfloat16", True, "registers", (1, 4)),  # 1.13, piece
    (162, 140, "bfloat16", True, "registers", (1, 8)),  # 1.08, 2 CTAs
    (435, 107, "bfloat16", True, "registers", (3, 8)),  # 1.22, tiles
    (320, 36, "bfloat16", True, "registers", (2, 4)),  # 1.11, tiles
    (300, 216, "bfloat16", True, "tiles", None),  # 1.47, registers
    (1541, 238, "bfloat16", True, "tiles", None),  # 2.62, registers
    (4155, 109, "bfloat16", True, "tiles", None),  # 1.12, registers
    (410, 218, "bfloat16", True, "tiles", None),  # 1.18, registers
    (578, 216, "bfloat16", True, "tiles", None),  # 1.11, registers
    (5731, 116, "bfloat16", True, "tiles", None),  # 1.32, registers
    (1378, 67, "float32", True, "registers", (5, 16)),  # 1.14, tiles
    (57, 41, "float32", True, "registers", (1, 4)),  # 1.13, tiles
    (22, 94, "float32", True, "registers", (1, 4)),  # 1.07, piece
    (219, 26, "float32", True, "registers", (2, 4)),  # 1.05, tiles
    (28909, 7, "float32", True, "registers", (16, 16)),  # 1.21, bundles
    (14600, 14, "float32", True, "registers", (16, 16)),  # 1.22, tiles
    (1477, 84, "float32", True, "tiles", None),  # 1.06, registers
    (218, 173, "float32", True, "tiles", None),  # 1.05, registers
    (4852, 32, "float32", True, "tiles", None),  # 1.12, registers
    (1981, 167, "float32", True, "tiles", None),  # 1.38, registers
    (793, 178, "float32", True, "tiles", None),  # 1.14, registers
    (1528, 86, "float32", True, "tiles", None),  # 1.05, registers
)


def plan_of(n_cols: int, inner: int, dtype: str, backward: bool, log: bool = False, outer: int = 2, **more) -> Plan:
    x = torch.empty(outer, n_cols, inner, dtype=getattr(torch, dtype), device="meta")
    known = dict(invariant=False, device=HOPPER) | more
    return spatial.softmax_plan((x,) * (2 + backward), log, backward, **known)


def kind_of(plan: Plan) -> str:
    if plan.regime == "spatial_two_pass":
        return "bundles" if plan.bundle else "parts"
    return "registers" if plan.periodic else "piece" if plan.gathered else "tiles"


@pytest.mark.parametrize(("n_cols", "inner", "dtype", "backward", "wanted", "of"), MEASURED)
def test_what_was_measured(n_cols, inner, dtype, backward, wanted, of):
    known = (n_cols, inner, dtype, backward)
    chosen = plan_of(*known)
    assert kind_of(chosen) == wanted
    assert of is None or (chosen.ctas, chosen.num_warps) == of
    assert chosen == plan_of(*known, outer=900), "a plan sees no outer"
    assert not plan_of(*known, invariant=True).periodic
    assert not any(plan_of(*known, device=DEVICES[name]).periodic for name in ("sm_80", "sm_100", "gfx942"))


def problem_of(n_cols: int, inner: int, dtype: str = "bfloat16", backward: bool = False) -> SpatialProblem:
    x = torch.empty(2, n_cols, inner, dtype=getattr(torch, dtype), device="meta")
    return spatial.problem_of(*(x,) * (2 + backward), backward=backward, log=False)


def test_only_planes_without_gaps_of_one_dtype_are_held():
    problem = problem_of(1926, 16)
    way = best_way(problem, HOPPER)
    assert way is not None and way.speed > 0.9
    for other in (replace(problem, packed=False), replace(problem, batch_invariant=True)):
        assert best_way(other, HOPPER) is None
    plan = spatial.tiles_or_pieces(problem, HOPPER, way)
    assert faster_as_held(problem, None, plan) is None
    assert faster_as_held(problem, way, plan) is not None
    assert faster_as_held(problem, way._replace(speed=0.5), plan) is None, "slower ways are not taken"


# columns, positions, dtype, backward, and the speed of registers from which they are faster; None where no speed is
FLIPS = (
    (2000, 46, "bfloat16", False, 0.6), (500, 190, "bfloat16", False, 0.75), (1000, 80, "bfloat16", False, 0.78),
    (1000, 8, "bfloat16", False, 0.85), (700, 120, "bfloat16", False, 0.93), (300, 77, "bfloat16", False, None),
    (2000, 46, "bfloat16", True, 0.5), (700, 120, "bfloat16", True, 0.807), (300, 77, "bfloat16", True, 0.85),
    (60, 30, "bfloat16", True, 0.807), (1000, 8, "bfloat16", True, 0.955),
    (5000, 30, "float32", False, 0.66), (300, 77, "float32", False, 0.94), (1000, 8, "float32", False, None),
    (20000, 12, "float32", True, 0.62), (300, 77, "float32", True, 0.9), (1000, 80, "float32", True, 0.93),
    (2000, 46, "float32", True, 0.955), (700, 120, "float32", True, 0.93), (652, 128, "float32", True, None),
    # pieces: alone on a multiprocessor, and of 16 warps
    (235, 140, "float32", False, 0.85), (325, 131, "float32", False, 0.85), (161, 166, "float32", False, 0.94),
    # tiles of 16 positions; skewed ones of 64 and 128 positions, by where runs start; of float32; that overlap
    (4531, 62, "float32", False, 0.7), (1831, 3, "bfloat16", False, 0.7),
    (641, 148, "bfloat16", False, 0.75), (391, 236, "bfloat16", False, 0.93),
    (476, 193, "bfloat16", False, 0.74), (250, 225, "bfloat16", False, 0.82),
    (315, 102, "float32", False, 0.95), (83, 255, "float32", False, 0.9), (1484, 68, "float32", False, 0.9),
    # gradients: of 8 warps, by where runs start
    (224, 200, "bfloat16", True, 0.88), (628, 140, "bfloat16", True, 0.807),
)  # fmt: skip


@pytest.mark.parametrize(("n_cols", "inner", "dtype", "backward", "flips"), FLIPS)
def test_the_speed_from_which_registers_are_faster(n_cols, inner, dtype, backward, flips):
    """Registers are faster from the speed of the plan that they are compared with on."""
    problem = problem_of(n_cols, inner, dtype, backward)
    way = best_way(problem, HOPPER)
    assert way is not None
    plan = spatial.tiles_or_pieces(problem, HOPPER, way)
    found = [faster_as_held(problem, way._replace(speed=n / 1000), plan) is not None for n in range(1001)]
    assert found == [flips is not None and n / 1000 >= flips for n in range(1001)]


@pytest.mark.parametrize(("backward", "dtype", "least"), [
    (False, "bfloat16", 0.75), (False, "float32", 0.86), (True, "bfloat16", 0.7), (True, "float32", 0.86),
])  # fmt: skip
def test_the_speed_from_which_no_short_tile_is_faster(backward, dtype, least):
    problem = problem_of(1000, 30, dtype, backward)
    way = best_way(problem, HOPPER)
    assert way is not None
    found = [is_fastest(problem, way._replace(speed=n / 100)) for n in range(101)]
    assert found == [n / 100 >= least for n in range(101)]
    whole = replace(problem, whole_sectors=True)  # whose short tiles are faster
    higher = 0.86 if (backward, dtype) == (False, "bfloat16") else least
    found = [is_fastest(whole, way._replace(speed=n / 100)) for n in range(101)]
    assert found == [n / 100 >= higher for n in range(101)]


def test_examples():
    assert doctest.testmod(register_planes) == (0, 3)
