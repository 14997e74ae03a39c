"""Compiled kernels of planes in registers on a machine of numpy: results, each element written once, and no races.

The interpreter has no barriers, and a GPU shows few of the orders in which threads may run.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from ptx_machine import Machine, parse
from spatial_problems import periodic_plan

from fused_softmax.lab.cross_compile import compile_for
from fused_softmax.launch import spatial
from fused_softmax.launch.compile import Launch
from fused_softmax.planning.types import DEVICES, Plan

pytestmark = pytest.mark.compiled

HOPPER = DEVICES["sm_90"]
NAMES = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def compiled(tensors: tuple[torch.Tensor, ...], log: bool, backward: bool) -> tuple[Plan, Launch, str]:
    """The plan in registers, its launch, and its PTX."""
    plan = periodic_plan(spatial.problem_of(*tensors, backward=backward, log=log), HOPPER)
    assert plan is not None
    (launch,) = spatial.recipe_launches(spatial.softmax_recipe(tensors, plan, log, backward, HOPPER), tensors)
    return plan, launch, compile_for(launch, "sm_90").asm["ptx"]


def machine(plan: Plan, launch: Launch, ptx: str, tensors: tuple[torch.Tensor, ...], cluster: int) -> Machine:
    """The machine for a plane. The tensors are far from each other in its memory."""
    memories = [(1 + i << 32, t.view(NAMES[t.dtype]).numpy().reshape(-1).view(np.uint8)) for i, t in enumerate(tensors)]
    program, addresses = parse(ptx), iter(start for start, _ in memories)
    numbers = [next(addresses) if isinstance(arg, torch.Tensor) else arg for arg in launch.args]
    unused = len(program.parameters) - len(numbers)  # Triton's own
    assert unused == 2, "an argument became a constant"
    return Machine(program, plan.ctas, cluster, [*numbers, 0, 0], memories)


def tensors_of(shape: tuple[int, int, int], dtype: torch.dtype, log: bool, backward: bool) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    x, result = torch.randn(shape).mul(3).to(dtype), torch.full(shape, float("nan"), dtype=dtype)
    if not backward:
        return x, result
    return (torch.log_softmax if log else torch.softmax)(x.float(), 1).to(dtype), torch.randn(shape).to(dtype), result


def expect_right(tensors: tuple[torch.Tensor, ...], log: bool, plane: int) -> None:
    got, of = tensors[-1][plane].double(), torch.finfo(tensors[0].dtype)
    rtol, least = 2 * of.eps + 4e-6, of.smallest_normal * of.eps
    if len(tensors) == 2:
        want = (torch.log_softmax if log else torch.softmax)(tensors[0][plane].double(), 0)
        assert torch.allclose(got, want, rtol=rtol, atol=least + 3e-6 * log)
    else:
        y, dy = (t[plane].double() for t in tensors[:2])
        want = dy - y.exp() * dy.sum(0) if log else y * (dy - (dy * y).sum(0))
        assert torch.allclose(got, want, rtol=rtol, atol=3e-6 * dy.abs().sum(0).max().item())


# of one CTA: positions of one warp, of several, and more of them than threads; of 2 to 8 CTAs, and of 16
PLANES = (
    (453, 9, torch.bfloat16, True), (1831, 3, torch.bfloat16, False), (643, 7, torch.float32, False),
    (102, 144, torch.bfloat16, True), (31, 106, torch.float16, False), (324, 100, torch.float32, False),
    (1611, 35, torch.bfloat16, False), (1378, 67, torch.float32, True),
    pytest.param(5269, 40, torch.bfloat16, True, marks=pytest.mark.extended),
    pytest.param(34592, 8, torch.float32, False, marks=pytest.mark.extended),
    pytest.param(73207, 8, torch.bfloat16, True, marks=pytest.mark.extended),
)  # fmt: skip


@pytest.mark.parametrize("log", [False, pytest.param(True, marks=pytest.mark.extended)])
@pytest.mark.parametrize(("n_cols", "inner", "dtype", "backward"), PLANES)
def test_no_races(n_cols, inner, dtype, backward, log):
    tensors = tensors_of((2, n_cols, inner), dtype, log, backward)
    plan, launch, ptx = compiled(tensors, log, backward)
    for plane in (0, 1):
        ran = machine(plan, launch, ptx, tensors, plane).run()
        assert not ran.races
        expect_right(tensors, log, plane)
        of_plane = ran.n_written[-1].reshape(2, -1)
        assert (of_plane[plane] == 1).all() and not of_plane[1 - plane].any(), "an element is written once"
        assert not any(n.any() for n in ran.n_written[:-1])


@pytest.mark.parametrize("shape", [(1, 453, 9), (1, 930, 35)], ids=["one CTA", "two CTAs"])
def test_each_barrier_is_needed(shape):
    """Without any one of them there is a race: the machine sees all."""
    tensors = tensors_of(shape, torch.bfloat16, False, False)
    plan, launch, ptx = compiled(tensors, False, False)
    assert plan.ctas == (1 if shape[1] == 453 else 2)
    syncs = [found.span() for found in re.finditer(r"bar\.sync 0;", ptx)]
    waits = [found.span() for found in re.finditer(r"mbarrier\.try_wait.*;", ptx)]
    assert len(syncs) == 3 and len(waits) == (plan.ctas > 1)
    for start, end in syncs + waits:
        instead = "setp.eq.u32 done, 0, 0;" if (start, end) in waits else ""
        assert machine(plan, launch, ptx[:start] + instead + ptx[end:], tensors, 0).run().races, ptx[start:end]
