"""Random softmaxes whose tiles overlap or are staged, and their gradients, with guards around the output."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

import fused_softmax as fs
from fused_softmax.launch import spatial
from fused_softmax.launch.device import device_of
from fused_softmax.planning.lean_tiles import LEAST_POSITIONS, lean_config
from fused_softmax.planning.lean_tiles import RANGES as LEAN_RANGES
from fused_softmax.planning.overlapping_tiles import FEW_RANGES, RANGES
from fused_softmax.planning.register_planes import best_way, faster_as_held
from fused_softmax.planning.short_planes import faster_as_short
from fused_softmax.planning.spatial_tables import PART_VECTORS
from fused_softmax.planning.types import DEVICES, Device, Plan, tiles_of

pytestmark = pytest.mark.gpu

GUARD = 512  # elements before and after the output


def guarded(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of NaN, and the memory around it, which holds 7."""
    n = shape[0] * shape[1] * shape[2]
    memory = torch.full((n + 2 * GUARD,), 7.0, device="cuda", dtype=dtype)
    inside = memory[GUARD : GUARD + n].view(shape)
    inside.fill_(float("nan"))
    return inside, memory


def expect_untouched(memory: torch.Tensor) -> None:
    assert (memory[:GUARD] == 7).all() and (memory[-GUARD:] == 7).all(), "written outside the output"


class Drawn(NamedTuple):
    """A random problem: elements `more` lie behind each column."""

    dtype: torch.dtype
    shape: tuple[int, int, int]
    more: int
    log: bool

    def of(self, make: Callable[..., torch.Tensor], device: str) -> torch.Tensor:
        outer, n_cols, inner = self.shape
        return make(outer, n_cols, inner + self.more, device=device).to(self.dtype)[..., :inner]

    def plan(self, backward: bool, device: Device) -> Plan:
        dense = torch.empty(self.shape, dtype=self.dtype, device="meta")
        tensors = (dense, dense, dense) if backward else (self.of(torch.empty, "meta"), dense)
        return spatial.softmax_plan(tensors, self.log, backward, False, device)


def drawn(rng: random.Random) -> Drawn:
    dtype = rng.choice((torch.bfloat16, torch.float16, torch.float32))
    n_cols = round(2 ** rng.uniform(2.8, 12.3))
    inner = rng.choice((rng.randint(512, 1200), rng.randint(1024, 9000), 8 * rng.randint(128, 1100)))
    outer = max(1, min(rng.randint(1, 5), (1 << 24) // (n_cols * inner)))
    more = rng.choice((0, 0, 0, 1, 8, 16))
    return Drawn(dtype, (outer, n_cols, inner), more, rng.random() < 0.4)


def drawn_few(rng: random.Random) -> Drawn:
    """Few positions and many columns."""
    dtype = rng.choice((torch.bfloat16, torch.float16, torch.float32))
    vec, n_cols = 16 // dtype.itemsize, round(2 ** rng.uniform(9.1, 13.5))
    inner = vec * rng.randint(1, 255 // vec)
    outer = max(1, min(rng.randint(1, 60), (1 << 23) // (n_cols * inner)))
    return Drawn(dtype, (outer, n_cols, inner), 0, rng.random() < 0.4)


def drawn_planes(rng: random.Random) -> Drawn:
    """Fewer positions than four tiles, and runs that start anywhere."""
    dtype = rng.choice((torch.bfloat16, torch.float16, torch.float32))
    n_cols, inner = round(2 ** rng.uniform(6, 12.3)), rng.choice((rng.randint(48, 511), 2 * rng.randint(50, 255)))
    outer = max(1, min(rng.randint(1, 60), (1 << 23) // (n_cols * inner)))
    return Drawn(dtype, (outer, n_cols, inner), 0, rng.random() < 0.4)


def drawn_parts(rng: random.Random) -> Drawn:
    """Runs that start at multiples of a part of a vector, of columns that a table of their own has."""
    (_, itemsize, vec), table = rng.choice(list(PART_VECTORS.items()))
    config = rng.choice(table)
    n_cols = rng.randint(max(2, config.least_cols), config.max_cols)
    inner = 2 * vec * rng.randint(4 * config.inner // (2 * vec) + 1, 5 * config.inner // (2 * vec)) + vec
    outer = max(1, min(rng.randint(1, 20), (1 << 23) // (n_cols * inner)))
    dtype = torch.float32 if itemsize == 4 else rng.choice((torch.bfloat16, torch.float16))
    return Drawn(dtype, (outer, n_cols, inner), 0, rng.random() < 0.4)


def drawn_overlapping(rng: random.Random) -> Drawn:
    """Columns that the rule of overlapping tiles has, in a few tiles of positions."""
    (_, itemsize, starts), ranges = rng.choice([*RANGES.items(), *FEW_RANGES.items()])
    of = rng.choice(ranges)
    n_cols, least = rng.randint(of.least, of.most), of.tiles[0].least_inner  # positions that the first tile takes
    inner = rng.randint(*rng.choice(((240, 500), (512, 2000), (max(240, least), max(2000, least + 900)))))
    inner = 2 * starts // itemsize * (inner * itemsize // (2 * starts)) + (starts // itemsize if starts < 32 else 0)
    outer = max(1, min(rng.randint(1, 20), (1 << 23) // (n_cols * inner)))
    dtype = torch.float32 if itemsize == 4 else rng.choice((torch.bfloat16, torch.float16))
    more = rng.choice((0, 0, 0, 1, 8, 16))  # behind each column of the input
    return Drawn(dtype, (outer, n_cols, inner), more, rng.random() < 0.4)


def drawn_lean(rng: random.Random) -> tuple[Drawn, bool]:
    """Columns that the rule of lean tiles has, of a softmax, or (True) of its gradient."""
    (op, itemsize, starts), ranges = rng.choice(list(LEAN_RANGES.items()))
    of = rng.choice(ranges)
    n_cols, inner = rng.randint(of.least, of.most), round(max(LEAST_POSITIONS, 4 * of.positions) * 12 ** rng.random())
    inner = 2 * starts // itemsize * (1 + inner * itemsize // (2 * starts)) + (starts // itemsize if starts < 32 else 0)
    outer = max(1, min(rng.randint(1, 20), (1 << 23) // (n_cols * inner)))
    dtype = torch.float32 if itemsize == 4 else rng.choice((torch.bfloat16, torch.float16))
    log = rng.random() < 0.4 if of.log is None else of.log
    more = rng.choice((0, 0, 0, 16))  # behind each column of the input
    return Drawn(dtype, (outer, n_cols, inner), more, log), op == "gradient"


def drawn_short(rng: random.Random) -> tuple[Drawn, bool]:
    """Planes for which `short_planes` has tiles, of a softmax, or (True) of its gradient."""
    device = DEVICES["sm_90"]
    while True:
        n_cols = round(150 * 20 ** rng.random())
        few, longer = 2 * rng.randint(6, 16), (2 * rng.randint(20, 150), 8 * rng.randint(8, 55))
        inner = rng.choice((few, rng.randint(40, 255), *longer))
        outer = max(1, min(rng.randint(1, 20), (1 << 23) // (n_cols * inner)))
        dtype, log = rng.choice((torch.bfloat16, torch.float16, torch.float32)), rng.random() < 0.4
        backward, x = rng.random() < 0.5, torch.empty((outer, n_cols, inner), dtype=dtype, device="meta")
        of = spatial.problem_of(*(x,) * (2 + backward), backward=backward, log=log)
        way = best_way(of, device)
        plan = spatial.tiles_or_pieces(of, device, way)
        if faster_as_short(of, device, plan, way, faster_as_held(of, way, plan)):
            return Drawn(dtype, (outer, n_cols, inner), 0, log), backward


# what a problem's plan is, and whether it is that of its gradient
KINDS: dict[str, tuple[Callable[[Plan], bool], bool]] = {
    "skewed": (lambda plan: plan.skewed > 0 and plan.smem_staged == 0, False),
    "skewed and staged": (lambda plan: plan.skewed > 0 and plan.smem_staged > 0, False),
    "skewed gradient": (lambda plan: plan.skewed > 0, True),
    "halves of sectors": (lambda plan: plan.overlap > 0 and plan.skewed == 0, False),
    "staged": (lambda plan: plan.smem_staged > 0 and plan.overlap == 0, False),
    "staged gradient": (lambda plan: plan.smem_staged > 0 and plan.overlap == 0, True),
    "gradient of halves": (lambda plan: plan.overlap > 0 and plan.skewed == 0, True),
}


def first_drawn(seed: int, kind: str, device: Device) -> Drawn:
    """The first problem of a seed that is of that kind."""
    (wanted, backward), rng = KINDS[kind], random.Random(seed)
    return next(problem for problem in iter(lambda: drawn(rng), None) if wanted(problem.plan(backward, device)))


def check(problem: Drawn, seed: int) -> Plan | fs.Fallback:
    """Checks a problem's softmax and its gradient; the plan of the softmax, or log_softmax."""
    dtype, shape, _, log = problem
    torch.manual_seed(seed)
    x = problem.of(torch.randn, "cuda").mul_(3)
    x[0, 1, 0] = -float("inf")
    # the maximum comes last, and whole groups of chunks are hidden
    x[0, :, 1] = torch.linspace(-60, 60, shape[1], device="cuda").to(dtype)
    x[0, :-1, 2] = -float("inf")
    x[0, 1:, 3] = -float("inf")
    ours, torchs = (fs.log_softmax, torch.log_softmax) if log else (fs.softmax, torch.softmax)
    eps = torch.finfo(dtype).eps

    y, memory = guarded(shape, dtype)
    ours(x, 1, out=y)
    expect_untouched(memory)
    exact = torchs(x.double(), 1)
    assert torch.allclose(y.double(), exact, rtol=2 * eps + 2e-6, atol=3e-6 * (1 + log)), (seed, shape, dtype, log)
    assert torch.equal(ours(x[:1], 1), y[:1]), f"bits depend on outer: {(seed, shape, dtype, log)}"

    x[0] = x[0].clamp(min=-60)
    leaf = x.detach().requires_grad_()
    dy = torch.randn(shape, device="cuda").to(dtype)
    result = ours(leaf, 1)
    result.backward(dy)
    g, p = dy.double(), result.detach().double()
    want = g - p.exp() * g.sum(1, keepdim=True) if log else p * (g - (g * p).sum(1, keepdim=True))
    if log:  # what a sum of n numbers is rounded by grows as their norm; torch's own error is as large
        scale = g.abs() + p.exp() * (1 + (g * g).sum(1, keepdim=True).sqrt())
    else:
        scale = p * (1 + g.abs() + (g * p).abs().sum(1, keepdim=True))
    within = (leaf.grad.double() - want).abs() <= (3e-6 + 2 * eps) * scale + 1e-7
    assert within.all(), ("gradient", seed, shape, dtype, log)
    return fs.plan_for(x.detach(), dim=1, op="log_softmax" if log else "softmax")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_random_columns(kind: str, seed: int):
    device = device_of(torch.empty(0, device="cuda"))
    problem = first_drawn(seed, kind, device)
    ran = check(problem, seed)
    assert KINDS[kind][1] or KINDS[kind][0](ran), "the call that was checked had another plan"


@pytest.mark.parametrize("seed", range(24))
def test_few_positions(seed: int):
    device, rng = device_of(torch.empty(0, device="cuda")), random.Random(seed)
    if not device.supports_smem_staging:
        pytest.skip("such plans are of Hopper")

    def few(problem: Drawn) -> bool:  # on a cluster, or staged; of every third seed, the gradient is
        plan = problem.plan(seed % 3 == 0, device)
        return plan.ctas > 1 or plan.smem_staged > 0

    problem = next(filter(few, iter(lambda: drawn_few(rng), None)))
    ran = check(problem, seed)
    assert isinstance(ran, Plan) and ran == problem.plan(False, device), "torch answered, or another plan"


@pytest.mark.parametrize("seed", range(24))
def test_skewed_tiles_of_few_positions(seed: int):
    device, rng = device_of(torch.empty(0, device="cuda")), random.Random(seed)
    if device.max_cluster == 1:
        pytest.skip("such plans are on clusters")
    backward = seed % 2 == 0
    problem = next(p for p in iter(lambda: drawn_planes(rng), None) if p.plan(backward, device).skewed)
    ran = check(problem, seed)
    assert isinstance(ran, Plan) and ran == problem.plan(False, device), "torch answered, or another plan"


@pytest.mark.parametrize("seed", range(30))
def test_parts_of_vectors(seed: int):
    device, problem = device_of(torch.empty(0, device="cuda")), drawn_parts(random.Random(seed))
    ran = check(problem, seed)
    assert isinstance(ran, Plan) and ran == problem.plan(False, device), "torch answered, or another plan"


@pytest.mark.parametrize("seed", range(40))
def test_overlapping_tiles(seed: int):
    device, problem = device_of(torch.empty(0, device="cuda")), drawn_overlapping(random.Random(seed))
    ran = check(problem, seed)
    assert isinstance(ran, Plan) and ran == problem.plan(False, device), "torch answered, or another plan"


@pytest.mark.parametrize("seed", range(60))
def test_lean_tiles(seed: int):
    device, (problem, backward) = device_of(torch.empty(0, device="cuda")), drawn_lean(random.Random(seed))
    dense = torch.empty(problem.shape, dtype=problem.dtype, device="meta")
    tensors = (dense,) * 3 if backward else (problem.of(torch.empty, "meta"), dense)
    of = spatial.problem_of(*tensors, backward=backward, log=problem.log)
    assert not device.supports_smem_staging or lean_config(of, device)
    ran = check(problem, seed)
    assert isinstance(ran, Plan) and ran == problem.plan(False, device), "torch answered, or another plan"


@pytest.mark.parametrize("seed", range(60))
def test_tiles_of_short_planes(seed: int):
    device, (problem, backward) = device_of(torch.empty(0, device="cuda")), drawn_short(random.Random(seed))
    chosen = problem.plan(backward, device)
    short = chosen.rows in (16, 32, 64) and not (chosen.periodic or chosen.gathered)
    assert short or not device.supports_smem_staging
    ran = check(problem, seed)
    assert isinstance(ran, Plan) and ran == problem.plan(False, device), "torch answered, or another plan"


@pytest.mark.parametrize("outer", [1, 3])
@pytest.mark.parametrize(("n_cols", "inner"), [(600, 80), (513, 96), (640, 144), (560, 160), (600, 64)])
def test_staged_tiles_of_one_program(n_cols: int, inner: int, outer: int):
    # a narrower tile would hold two indices of `outer`, and stage the chunks of one
    x = torch.empty(outer, n_cols, inner, device="cuda", dtype=torch.bfloat16)
    spatial.prepare_softmax((x, torch.empty_like(x)), False, False, False)  # raises where torch would answer
    check(Drawn(torch.bfloat16, (outer, n_cols, inner), 0, False), outer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("blocks", [4, 128])  # of 64 positions: fewer programs than fit, and several rounds of them
def test_programs_that_start_one_after_the_other(dtype: torch.dtype, blocks: int):
    # that they wait shows in the machine code only (tests/kernels/test_compiled_other_dims.py)
    problem = Drawn(dtype, (2, 2566, 64 * blocks), 0, False)
    device = device_of(torch.empty(0, device="cuda"))
    if not device.staggers:
        pytest.skip("programs start together on this GPU")
    assert problem.plan(False, device).stagger and problem.plan(True, device).stagger
    check(problem, blocks)


@pytest.mark.parametrize("planes", [(1800, 189, 12), (1600, 189, 16), (2481, 1147, 3), (3988, 111, 24)])
@pytest.mark.parametrize("waits", [False, True])
def test_skewed_programs_that_start_one_after_the_other(planes: tuple[int, int, int], waits: bool):
    n_cols, inner, outer = planes
    backward, outer = n_cols < 3000, outer if waits else 1
    problem = Drawn(torch.bfloat16, (outer, n_cols, inner), 0, False)
    device = device_of(torch.empty(0, device="cuda"))
    if not device.staggers:
        pytest.skip("programs start together on this GPU")
    plan = problem.plan(backward, device)
    assert plan.skewed and plan.stagger
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    programs = outer * plan.ctas * tiles_of(inner, plan.rows, plan.overlap, plan.skewed)
    assert (programs >= 5 * plan.fitting * multiprocessors // 4) == waits, "another number of planes"
    check(problem, outer)
