"""What logsumexp over a dimension that is not the last compiles to: whole vectors, and no spills."""

from __future__ import annotations

import random

import pytest
import torch
from launches import as_called, cross_compiled

from fused_softmax.launch import logsumexp, spatial
from fused_softmax.launch.spatial import recipe_launches
from fused_softmax.planning.types import DEVICES

pytestmark = pytest.mark.compiled
DEVICE = DEVICES["sm_90"]


def launches_of(n_cols: int, inner: int, dtype: torch.dtype):
    """(the launch that reads the columns, the gradient's, their plans)."""
    x, lse = torch.empty(2, n_cols, inner, dtype=dtype), torch.empty(2, inner, dtype=dtype)
    dx, plan = torch.empty_like(x), logsumexp.lse_plan(x, False, DEVICE)
    backward = logsumexp.gradient_plan(x, dx, DEVICE)
    first = recipe_launches(logsumexp.lse_recipe(x, plan, DEVICE), (x, lse))[0]
    gradient = recipe_launches(logsumexp.gradient_recipe(x, dx, backward, DEVICE), (x, dx, lse, lse))[0]
    return (as_called(first), plan), (as_called(gradient), backward)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.extended) for n in range(1, 5))])
def test_registers_hold_a_step(seed, dtype):
    rng = random.Random(seed)
    drawn = [(round(2 ** rng.uniform(1, 11)), round(2 ** rng.uniform(1, 13))) for _ in range(5)]
    odd = [(round(2 ** rng.uniform(1, 7)), 2 * rng.randint(1, 400) + 1) for _ in range(3)]
    for n_cols, inner in (*drawn, *odd, (93, 2), (6, 5), (30, 65)):
        for launch, plan in launches_of(n_cols, inner, dtype):
            used, _ = cross_compiled(launch, "sm_90")
            assert used.spilled_bytes <= 16, (n_cols, inner, plan)


@pytest.mark.parametrize(
    ("n_cols", "inner", "whole"), [(2, 64, True), (5, 4096, True), (17, 64, True), (300, 512, False)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_columns_and_results_are_vectors(n_cols, inner, whole, dtype):
    (launch, _), (gradient, _) = launches_of(n_cols, inner, dtype)
    used = cross_compiled(launch, "sm_90")[0]
    assert used.widest_load_bytes == 16
    if whole:  # a thread has its positions' results; else they are spread over the program
        assert used.widest_store_bytes == 16
    used = cross_compiled(gradient, "sm_90")[0]
    assert used.widest_load_bytes == used.widest_store_bytes >= 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("n_cols", "inner"), [(50257, 1024), (60000, 384)])
def test_the_last_kernel_of_two_reads_takes_vectors_of_maxima_and_sums(n_cols, inner, dtype):
    """No access of them has 4 bytes."""
    tensors = tuple(torch.empty(1, n_cols, inner, dtype=dtype) for _ in range(2))
    plan = spatial.softmax_plan(tensors, False, False, False, DEVICE)
    launch = recipe_launches(spatial.softmax_recipe(tensors, plan, False, False, DEVICE), tensors)[-1]
    assert "finish" in launch.kernel.fn.__name__
    loads = dict(cross_compiled(as_called(launch), "sm_90")[0].loads)
    assert set(loads) <= {16, 8} and loads[16] >= plan.finish.chunks


@pytest.mark.parametrize(("n_cols", "inner"), [(3, 3), (2, 144), (20, 6), (200, 4), (5, 4096)])
def test_there_is_one_program_for_each_group_of_planes(n_cols, inner):
    x, lse = torch.empty(1001, n_cols, inner), torch.empty(1001, inner)
    plan, of_gradient = logsumexp.lse_plan(x, False, DEVICE), logsumexp.gradient_plan(x, x.clone(), DEVICE)
    for recipe, chosen, tensors in (
        (logsumexp.lse_recipe(x, plan, DEVICE), plan, (x, lse)),
        (logsumexp.gradient_recipe(x, x, of_gradient, DEVICE), of_gradient, (x, x, lse, lse)),
    ):
        (launch,) = recipe_launches(recipe, tensors)
        assert launch.grid == (-(-1001 // chosen.outers) * -(-inner // chosen.rows),)
    assert plan.outers > 1 or inner > 1000


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("n_cols", "inner"), [(2, 144), (5, 4096), (300, 512), (3000, 904)])
def test_a_cast_has_the_vectors_of_float32(n_cols, inner, backward):
    """A thread holds as many elements of the 16-bit tensor as of the others."""
    narrow, wide = (torch.empty(2, n_cols, inner, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    tensors = (wide, wide.clone(), narrow) if backward else (narrow, wide)
    plan = spatial.softmax_plan(tensors, False, backward, False, DEVICE)
    (launch,) = recipe_launches(spatial.softmax_recipe(tensors, plan, False, backward, DEVICE), tensors)
    used, _ = cross_compiled(as_called(launch), "sm_90")
    read, written = used.widest_load_bytes, used.widest_store_bytes
    assert 4 <= (written if backward else read) == (read if backward else written) // 2
    assert used.spilled_bytes <= 16
