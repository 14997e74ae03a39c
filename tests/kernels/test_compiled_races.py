"""Compiled softmax over another dimension on a machine of numpy: results, each element written once, and no races.

The interpreter has no barriers, and a GPU shows few of the orders in which threads may run.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import pytest
import torch
from ptx_arithmetic import bits_of, evaluate, floats
from ptx_launches import run_launch
from ptx_machine import Race
from spatial_problems import periodic_plan

from fused_softmax.lab.cross_compile import compile_for
from fused_softmax.launch import spatial
from fused_softmax.launch.compile import Launch
from fused_softmax.planning.types import DEVICES, Plan

pytestmark = pytest.mark.compiled

HOPPER = DEVICES["sm_90"]
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32


class Compiled(NamedTuple):
    """A call that is one kernel. tensors: (x, y), or (y, dy, dx) of a gradient, on the CPU."""

    tensors: tuple[torch.Tensor, ...]
    log: bool
    plan: Plan
    launch: Launch
    ptx: str
    dynamic_bytes: int

    def run(self) -> tuple[list[Race], np.ndarray]:
        """The races of all clusters, and how often each byte of the output was written."""
        races, written = run_launch(self.launch, self.ptx, self.dynamic_bytes, self.plan.ctas)
        *inputs, (output, n_written) = written
        assert output is self.tensors[-1] and not any(n.any() for _, n in inputs)
        return races, n_written


def compiled(
    shape: tuple[int, int, int], dtype: torch.dtype, backward: bool, log: bool, in_registers: bool
) -> Compiled:
    """The kernel of random tensors, of the plan in registers or of the one that a call has."""
    torch.manual_seed(0)
    first, result = torch.randn(shape).mul(3).to(dtype), torch.full(shape, float("nan"), dtype=dtype)
    tensors: tuple[torch.Tensor, ...] = (first, result)
    if backward:
        y = (torch.log_softmax if log else torch.softmax)(first.float(), 1).to(dtype)
        tensors = (y, torch.randn(shape).to(dtype), result)
    if in_registers:
        plan = periodic_plan(spatial.problem_of(*tensors, backward=backward, log=log), HOPPER)
        assert plan is not None
    else:
        plan = spatial.softmax_plan(tensors, log, backward, False, HOPPER)
    (launch,) = spatial.recipe_launches(spatial.softmax_recipe(tensors, plan, log, backward, HOPPER), tensors)
    kernel = compile_for(launch, "sm_90")
    return Compiled(tensors, log, plan, launch, kernel.asm["ptx"], kernel.metadata.shared)


def expect_right(of: Compiled) -> None:
    *inputs, got = (t.double() for t in of.tensors)
    limits = torch.finfo(of.tensors[0].dtype)
    rtol, least = 2 * limits.eps + 4e-6, limits.smallest_normal * limits.eps
    if len(inputs) == 1:
        want = (torch.log_softmax if of.log else torch.softmax)(inputs[0], 1)
        assert torch.allclose(got, want, rtol=rtol, atol=least + 3e-6 * of.log)
    else:
        y, dy = inputs
        want = dy - y.exp() * dy.sum(1, keepdim=True) if of.log else y * (dy - (dy * y).sum(1, keepdim=True))
        terms = y.exp() * dy.abs().sum(1, keepdim=True) if of.log else y * (dy * y).abs().sum(1, keepdim=True)
        assert ((got - want).abs() <= rtol * want.abs() + 3e-6 * terms + least).all()


extended = pytest.mark.extended
# one CTA: positions of one warp, of several warps, more positions than threads; then 2, 4 and 5 CTAs; then 16
IN_REGISTERS = (
    (453, 9, BFLOAT16, True), (1831, 3, BFLOAT16, False), (643, 7, FLOAT32, False), (102, 144, BFLOAT16, True),
    (31, 106, FLOAT16, False), (324, 100, FLOAT32, False), (1611, 35, BFLOAT16, False), (1378, 67, FLOAT32, True),
    pytest.param(5269, 40, BFLOAT16, True, marks=extended), pytest.param(34592, 8, FLOAT32, False, marks=extended),
    pytest.param(73207, 8, BFLOAT16, True, marks=extended),
)  # fmt: skip


def check(of: Compiled) -> None:
    races, written = of.run()
    assert not races
    expect_right(of)
    assert (written == 1).all(), "an element is written once"


@pytest.mark.parametrize("log", [False, pytest.param(True, marks=extended)])
@pytest.mark.parametrize(("n_cols", "inner", "dtype", "backward"), IN_REGISTERS)
def test_planes_in_registers(n_cols, inner, dtype, backward, log):
    of = compiled((2, n_cols, inner), dtype, backward, log, True)
    assert of.plan.periodic
    check(of)


OTHERS = (
    ("overlapping", (2, 700, 136), BFLOAT16, False), ("overlapping", (1, 1300, 166), FLOAT32, True),
    ("plain", (1, 300, 256), FLOAT32, False), ("skewed", (1, 1300, 166), BFLOAT16, False),
    ("piece", (3, 120, 30), BFLOAT16, False), ("piece", (3, 20, 300), BFLOAT16, True),
    ("piece", (1, 156, 129), BFLOAT16, True),  # of more shared memory than a kernel declares
    pytest.param("staggered", (1, 3000, 264), BFLOAT16, False, marks=extended),
)  # fmt: skip


def kind_of(plan: Plan) -> str:
    if plan.gathered:
        return "piece"
    if plan.stagger:
        return "staggered"
    return "skewed" if plan.skewed else "overlapping" if plan.overlap else "plain"


@pytest.mark.parametrize("log", [False, pytest.param(True, marks=extended)])
@pytest.mark.parametrize(("kind", "shape", "dtype", "backward"), OTHERS)
def test_tiles_and_pieces(kind, shape, dtype, backward, log):
    of = compiled(shape, dtype, backward, log, False)
    assert kind_of(of.plan) == kind and not of.plan.periodic
    check(of)


@extended
def test_skewed_tiles_that_would_wait_in_a_larger_grid():
    of = compiled((1, 1600, 189), BFLOAT16, True, False, False)
    assert of.plan.skewed and of.plan.stagger
    check(of)


@pytest.mark.parametrize("shape", [(1, 453, 9), (1, 930, 35)], ids=["one CTA", "two CTAs"])
def test_each_barrier_is_needed(shape):
    """Without any one barrier of the CTA or of the cluster, or wait for the mbarrier, the machine names a race."""
    of = compiled(shape, BFLOAT16, False, False, True)
    assert of.plan.ctas == (1 if shape[1] == 453 else 2)
    syncs = [found.span() for found in re.finditer(r"bar\.sync\s+0;", of.ptx)]
    waits = [found.span() for found in re.finditer(r"mbarrier\.try_wait.*;", of.ptx)]
    clusters = [found.span() for found in re.finditer(r"barrier\.cluster\.wait.*;", of.ptx)]
    assert len(syncs) == 3 and len(waits) == len(clusters) == (of.plan.ctas > 1)
    for start, end in syncs + waits + clusters:
        instead = "setp.eq.u32 done, 0, 0;" if (start, end) in waits else ""
        races, _ = of._replace(ptx=of.ptx[:start] + instead + of.ptx[end:]).run()
        assert races, of.ptx[start:end]


def test_the_machine_knows_the_largest_and_the_smallest_of_three():
    numbers = [np.array(of) for of in ([1.0, -2.0, np.nan], [3.0, -5.0, 0.5], [2.0, -1.0, 0.25])]
    for name, want in (("max", [3.0, -1.0, 0.5]), ("min", [1.0, -5.0, 0.25])):
        bits = [bits_of(of, "f32") for of in numbers]
        assert floats(evaluate(f"{name}.f32", bits), "f32").tolist() == want
        assert all((found == bits_of(of, "f32")).all() for found, of in zip(bits, numbers, strict=True)), "unchanged"
