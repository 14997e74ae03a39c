"""Plans in words say what a plan is: columns are columns, over whichever dimension."""

from __future__ import annotations

import pytest
from spatial_problems import periodic_plan

from fused_softmax.lab.plans import plan_text, planes_problem, problem_for
from fused_softmax.planning import softmax
from fused_softmax.planning.planes import planes_plan
from fused_softmax.planning.spatial import bundled_plan, parts_plan, plan_spatial
from fused_softmax.planning.types import DEVICES, Plan

SM_90 = DEVICES["sm_90"]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (softmax.plan(problem_for(4096, "bfloat16"), SM_90), "block: 1 CTA of 4 warps, 4 chunks of 1024 columns; "),
        (
            softmax.plan(problem_for(50257, "bfloat16"), SM_90),
            "cluster: 8 CTAs of 4 warps, 7 chunks of 1024 columns, unaligned head and tail, exp twice; ",
        ),
        (planes_plan(planes_problem(35, 31, "bfloat16"), SM_90), "4 planes a program, up to 19 columns a thread; "),
        (
            periodic_plan(planes_problem(300, 251, "bfloat16"), SM_90),
            "up to 19 vectors of 8 elements a thread, exp twice, ",
        ),
        (
            parts_plan(planes_problem(50257, 1024, "bfloat16"), SM_90),
            "tiles of 128 positions in accesses of 8 elements, 4 chunks of 8 columns a CTA; ",
        ),
        (
            bundled_plan(planes_problem(400000, 5, "bfloat16"), SM_90, 48),
            "tiles of 64 elements in accesses of 8 elements, 12 chunks of 16 bundles a CTA, "
            "written by 12 chunks of 256 elements; ",
        ),
    ],
)
def test_what_a_program_holds(plan: Plan, said: str):
    assert said in plan_text(plan)


@pytest.mark.parametrize("device", ["sm_90", "sm_80"])
@pytest.mark.parametrize("n_cols", [5, 150, 1000])
def test_a_tile_on_chip_has_all_columns(n_cols: int, device: str):
    plan = plan_spatial(planes_problem(n_cols, 4096, "float32"), DEVICES[device])
    chunks = f"{plan.chunks} chunk{'s' * (plan.chunks > 1)} of {plan.vectors_per_chunk} column"
    assert f"tiles of {plan.rows} positions in accesses of {plan.vec} elements, {chunks}" in plan_text(plan)
    assert plan.chunks * plan.vectors_per_chunk * plan.ctas >= n_cols
