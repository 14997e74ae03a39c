"""Compiled losses of shared factors on a machine of numpy: losses, gradients, each element written once, and no races.

As `test_compiled_races`, which has softmax.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from ptx_launches import run_launch
from ptx_machine import Race

from fused_softmax.lab.cross_compile import compile_for
from fused_softmax.launch import cross_entropy_spatial, spatial
from fused_softmax.launch.compile import Launch
from fused_softmax.launch.options import CrossEntropy
from fused_softmax.planning.types import DEVICES, Plan

pytestmark = pytest.mark.compiled

HOPPER = DEVICES["sm_90"]
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32


class Compiled(NamedTuple):
    """A call that is one kernel, on the CPU. g: the upstream gradient of each loss where they are not reduced."""

    x: torch.Tensor
    dx: torch.Tensor
    op: CrossEntropy
    target: torch.Tensor  # [outer, inner] int64
    g: torch.Tensor
    losses: torch.Tensor
    plan: Plan
    launch: Launch
    ptx: str
    dynamic_bytes: int

    def run(self) -> list[Race]:
        """The races of all clusters. Each gradient and each loss must be written once, and nothing else."""
        races, written = run_launch(self.launch, self.ptx, self.dynamic_bytes, self.plan.ctas)
        for t, n in written:
            assert (n == (t is self.dx or t is self.losses)).all()
        return races


def compiled(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    reduction: str,
    weighted: bool = False,
    softcap: float | None = None,
) -> Compiled:
    """The kernel of random logits, and of targets in few bits where the loss is a mean."""
    torch.manual_seed(0)
    outer, n_cols, inner = shape
    x, dx = torch.randn(shape).mul(3).to(dtype), torch.full(shape, float("nan"), dtype=dtype)
    target = torch.randint(0, n_cols, (outer, inner))
    target[0, 3] = -100
    x[0, :, 3] = float("nan")
    weight, counts = torch.rand(n_cols) + 0.5 if weighted else None, target >= 0
    count = (counts * (1.0 if weight is None else weight[target.clamp(min=0)])).sum().float().view(1)
    few_bits = torch.where(counts, target, -1).to(torch.int8 if n_cols <= 1 << 7 else torch.int16)
    given = (few_bits if reduction == "mean" else target).view(-1)
    op = CrossEntropy(given, weight, None, -100, reduction, 0.0, softcap, 0.0)
    plan = cross_entropy_spatial.loss_plan(x, dx, False, HOPPER)
    assert plan.skewed
    each = reduction == "none"
    losses = torch.full((outer * inner if each else cross_entropy_spatial._partials(plan, x),), float("nan"))
    unused, g = torch.zeros(1), torch.rand(outer * inner) if each else torch.ones(1)
    tensors = (x, dx, *op.vectors(unused), count, g if each else unused, losses, unused, unused)
    what = cross_entropy_spatial.EACH_LOSS if each else cross_entropy_spatial.SUM_OF_LOSSES
    recipe = cross_entropy_spatial.loss_recipe(x, dx, op, plan, HOPPER, what, True, 2 * each, False, False)
    (launch,) = spatial.recipe_launches(recipe, tensors, (op.ignore_index, *op.numbers))
    kernel = compile_for(launch, "sm_90")
    return Compiled(x, dx, op, target, g, losses, plan, launch, kernel.asm["ptx"], kernel.metadata.shared)


def expect_right(of: Compiled) -> None:
    exact = of.x.double().nan_to_num(0.0).requires_grad_()
    z = exact if of.op.softcap is None else of.op.softcap * torch.tanh(exact / of.op.softcap)
    weight = None if of.op.weight is None else of.op.weight.double()
    want = F.cross_entropy(z, of.target, weight=weight, reduction=of.op.reduction)
    each = of.op.reduction == "none"
    want.backward(of.g.double().view_as(want) if each else None)
    got = of.losses.double()
    torch.testing.assert_close(got.view_as(want) if each else got.sum(), want, rtol=3e-6, atol=3e-6)
    near = 4 * torch.finfo(of.x.dtype).eps + 3e-6
    torch.testing.assert_close(of.dx.double(), exact.grad, rtol=near, atol=near * 0.1 * exact.grad.abs().max().item())
    assert not of.dx[0, :, 3].any(), "a position that does not count"


extended = pytest.mark.extended
# one CTA, of one tile and of several; 256 positions; 2, 4, 8 and 16 CTAs. Runs start at single elements, or at two.
# Then tiles whose columns start together, at multiples of 8, 16 and 32 bytes
CASES = (
    ((1, 45, 119), BFLOAT16, "mean"), ((2, 60, 478), BFLOAT16, "sum"), ((1, 150, 167), FLOAT16, "mean"),
    ((1, 120, 1003), BFLOAT16, "mean"), ((1, 25, 357), FLOAT32, "none"), ((1, 90, 117), FLOAT32, "mean", True),
    ((1, 180, 239), FLOAT32, "none"), ((1, 250, 991), BFLOAT16, "mean"), ((1, 300, 111), BFLOAT16, "none", True),
    ((1, 500, 119), BFLOAT16, "mean", False, 5.0), ((1, 400, 111), FLOAT32, "mean", True),
    ((1, 1200, 55), BFLOAT16, "mean"), ((1, 1500, 55), FLOAT32, "mean"), ((1, 1500, 119), BFLOAT16, "sum"),
    ((2, 45, 244), BFLOAT16, "mean"), ((1, 90, 120), FLOAT16, "sum", True), ((1, 40, 384), BFLOAT16, "none"),
    ((1, 66, 108), FLOAT32, "mean"), ((1, 180, 116), BFLOAT16, "mean", False, 5.0), ((1, 70, 184), FLOAT32, "none"),
    ((1, 300, 120), BFLOAT16, "mean"), ((1, 120, 118), FLOAT32, "mean"), ((1, 450, 64), FLOAT32, "sum"),
    ((1, 1100, 64), BFLOAT16, "mean", True),
    pytest.param(((1, 900, 116), BFLOAT16, "mean"), marks=extended),
    pytest.param(((2, 2000, 124), BFLOAT16, "sum"), marks=extended),
    pytest.param(((1, 2600, 128), FLOAT16, "mean"), marks=extended),
    pytest.param(((1, 2900, 124), BFLOAT16, "mean"), marks=extended),
    pytest.param(((1, 1500, 32), FLOAT32, "mean"), marks=extended),
    pytest.param(((1, 1900, 60), FLOAT32, "none"), marks=extended),
    pytest.param(((1, 2300, 2051), BFLOAT16, "mean"), marks=extended),
    pytest.param(((3, 700, 331), FLOAT16, "sum", True, 5.0), marks=extended),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses(case):
    of = compiled(*case)
    assert not of.run()
    expect_right(of)


@pytest.mark.parametrize("ctas", [1, 4])
def test_which_barriers_are_needed(ctas):
    """Without those around what is exchanged, or the wait for the mbarrier, the machine names a race.

    Those after a merge order nothing here: Triton's layout gives each thread the position that it has merged. Nothing
    promises that, so the kernel has them.
    """
    of = compiled((1, 45, 119) if ctas == 1 else (1, 300, 111), BFLOAT16, "mean")
    assert of.plan.ctas == ctas
    syncs = [found.span() for found in re.finditer(r"bar\.sync\s+0;", of.ptx)]
    waits = [found.span() for found in re.finditer(r"mbarrier\.try_wait.*;", of.ptx)]
    needed = []
    for start, end in syncs + waits:
        instead = "setp.eq.u32 done, 0, 0;" if (start, end) in waits else ""
        needed.append(bool(of._replace(ptx=of.ptx[:start] + instead + of.ptx[end:]).run()))
    merges = [True, False] if ctas == 1 else [True, False, False, False]
    assert needed == [*merges, True, True, True, *[True] * (ctas > 1)]
