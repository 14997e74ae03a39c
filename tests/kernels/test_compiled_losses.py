"""What the kernels of losses, statistics and masks compile to on sm_90: next to no spills, and targets that are safe.

The target's gradient is written over what its own CTA wrote before, so the store of it must lie in the CTAs of the
cluster as the row's own stores do: by line, the first dimension of both tiles.
"""

from __future__ import annotations

import ast
import re
from itertools import product

import pytest
import torch
from launches import masked_gradient_launch, masked_launch
from params import few

from fused_softmax.lab import cross_compile as compiled
from fused_softmax.launch import (
    cross_entropy,
    cross_entropy_gradient,
    loss_kernels,
    row_statistics,
)
from fused_softmax.launch.compile import MOST_SPILLED
from fused_softmax.launch.launcher import row_launch
from fused_softmax.launch.layout import problem_of
from fused_softmax.planning.losses import plan_statistics
from fused_softmax.planning.types import DEVICES

pytestmark = pytest.mark.compiled

SM_90 = DEVICES["sm_90"]
# columns of rows whose kernel also counts a rank
RANKED = (1000, 5003, 50257, 128256)


def rows_like(
    n_cols: int, dtype: torch.dtype, warps_reduce_separately: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and dx; apart: their rows start at different distances from a vector's boundary."""
    x = torch.empty(3, n_cols, dtype=dtype)
    return x, torch.empty(3, n_cols + 1, dtype=dtype)[:, :n_cols] if warps_reduce_separately else torch.empty_like(x)


def cross_entropy_launch(x, dx, smoothing: float, softcap: float | None):
    target, number = torch.zeros(3, dtype=torch.int64), torch.zeros(3)
    op = cross_entropy.CrossEntropy(target, None, None, -100, "mean", smoothing, softcap, 0.0)
    flags = loss_kernels.with_gradient_flags(op.kind)
    row_op = cross_entropy.WITH_GRADIENT[op.kind.arithmetic]
    plan = row_op.planner(problem_of(x, dx), SM_90)
    vectors = (target, number, number, number, number, number)
    numbers = loss_kernels.with_gradient_numbers(op)
    return row_launch(row_op, (x, dx), vectors, numbers, flags, plan, SM_90), plan


@pytest.fixture
def layouts(monkeypatch) -> list[tuple[str, bool]]:
    """Of each store of the kernel compiled last, its shape and whether its lines alone are spread over the CTAs."""
    found: list[tuple[str, bool]] = []
    read = compiled.resources

    def remember(kernel):
        # after `else` there are the zeros of a row that does not count, over which nothing is written
        text = kernel.asm["ttgir"].split("} else {")[0]
        spread = dict(re.findall(r"^(#\w+) = #ttg\.blocked<.*?CGALayout = (\[\[.*?\]\])", text, re.M))
        by_line = {name: not any(any(bit[1:]) for bit in ast.literal_eval(bits)) for name, bits in spread.items()}
        stores = re.findall(r"tt\.store .*?tensor<(\d+x\d+)x!.*?(#\w+)>", text)
        found[:] = [(shape, by_line[name]) for shape, name in stores]
        return read(kernel)

    monkeypatch.setattr(compiled, "resources", remember)
    return found


@pytest.mark.parametrize(
    "of",
    few(
        [(26000, torch.bfloat16, False), (50257, torch.bfloat16, True), (250001, torch.float32, False)],
        [
            *((n, torch.bfloat16, False) for n in (26000, 32000, 50257, 128256, 262144)),
            (50257, torch.bfloat16, True),
            *((n, torch.float32, False) for n in (50257, 128256, 250001)),
        ],
    ),
    ids=str,
)
def test_the_target_lies_in_its_lines_cta(of, layouts):
    n_cols, dtype, apart = of
    launch, plan = cross_entropy_launch(*rows_like(n_cols, dtype, apart), 0.0, None)
    assert plan.ctas > 1
    used = compiled.cross_compile(launch, "sm_90")
    assert used.spilled_bytes <= MOST_SPILLED
    lines, lanes = plan.ctas * plan.warps_per_row, plan.vectors_per_chunk // plan.warps_per_row
    of_target = [by_line for shape, by_line in layouts if shape == f"{lines}x{lanes}"]
    of_row = [by_line for shape, by_line in layouts if shape == f"{lines}x{lanes * plan.vec}"]
    assert of_target and all(of_target)
    assert len(of_row) >= plan.chunks and all(of_row)


@pytest.mark.parametrize("n_cols", few([22000], [22000, 40001, 83343, 173599]))
def test_a_slice_of_padded_logits_compiles(n_cols):
    """Rows of logits and of their gradient, which is contiguous, lie differently: they are read element by element."""
    x, dx = torch.empty(3, n_cols + 47, dtype=torch.bfloat16)[:, :n_cols], torch.empty(3, n_cols, dtype=torch.bfloat16)
    launch, plan = cross_entropy_launch(x, dx, 0.0, None)
    assert plan.vec == 1 and plan.regime != "two_pass"
    assert compiled.cross_compile(launch, "sm_90").spilled_bytes == 0


@pytest.mark.parametrize("n_cols", few([50257], [32000, 50257, 128256, 262144]))
@pytest.mark.parametrize(("smoothing", "softcap"), [pytest.param(0.1, None, marks=pytest.mark.extended), (0.1, 30.0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_smoothed_losses_compile(n_cols, smoothing, softcap, dtype):
    launch, plan = cross_entropy_launch(*rows_like(n_cols, dtype), smoothing, softcap)
    assert plan.chunks <= 8
    used = compiled.cross_compile(launch, "sm_90")
    assert used.spilled_bytes <= MOST_SPILLED and used.products_exchanged == 0


@pytest.mark.parametrize(
    "of",
    few(
        [(1000, 1, False), (4096, 2, False), (50257, 0, False)],
        [*product((1000, 4096, 50257, 128256), (0, 1, 2), (False,)), *product(RANKED, (0,), (True,))],
    ),
    ids=str,
)
def test_statistics_do_not_spill(of):
    n_cols, scale, rank = of
    x, number, ids = torch.empty(3, n_cols, dtype=torch.bfloat16), torch.zeros(3), torch.zeros(3, 1, dtype=torch.int64)
    flags = (("PICKS", 1), ("ENTROPY", not rank), ("SCALE", scale), ("KEEP_MOMENTS", not rank), ("RANK", rank))
    one, shared = plan_statistics(problem_of(x), SM_90), row_statistics.FORWARD.planner(problem_of(x), SM_90)
    for plan in (one, shared) if shared.part_cols and not rank else (one,):
        vectors, numbers = (number, number, number, ids, number, number), (1, 1.0)
        if plan.part_cols:
            vectors, numbers = (number, number), (1.0,)
        launch = row_launch(row_statistics.FORWARD, (x,), vectors, numbers, flags, plan, SM_90)
        used = compiled.cross_compile(launch, "sm_90")
        assert used.spilled_bytes == 0 and used.products_exchanged == 0


@pytest.mark.parametrize("n_cols", few([2047, 32768], [100, 1024, 2047, 4096, 8192, 32768, 262144, 524288, 2097152]))
@pytest.mark.parametrize(("mask", "causal"), [(0, True), (1, False), (2, False), (2, True)])
def test_masked_softmax_does_not_spill(n_cols, mask, causal):
    x = torch.empty(4, n_cols, dtype=torch.bfloat16)
    given = None if mask == 0 else torch.empty(2, n_cols, dtype=torch.bfloat16 if mask == 2 else torch.bool)
    launch, _ = masked_launch(x, given, causal, SM_90)
    assert compiled.cross_compile(launch, "sm_90").spilled_bytes == 0


@pytest.mark.parametrize(
    "of",
    few(
        [(2040, "apart", True), (12264, "out of phase", True)],
        [*product((448, 512, 2040, 4072, 8168, 12264, 16384), ("apart", "out of phase"), (False, True))],
    ),
    ids=str,
)
def test_masks_in_any_place_loosen_caps(of):
    """Columns that are apart, or vectors that are not the row's, take more registers than caps leave."""
    n_cols, lies, causal = of
    memory = torch.empty(4 * n_cols + 64, dtype=torch.bfloat16)
    mask = (
        memory.as_strided((2, n_cols), (1, 2)) if lies == "apart" else memory[1:].as_strided((2, n_cols), (n_cols, 1))
    )
    launch, _ = masked_launch(torch.empty(4, n_cols, dtype=torch.bfloat16), mask, causal, SM_90)
    used = compiled.cross_compile(launch, "sm_90")
    assert used.spilled_bytes <= MOST_SPILLED and launch.meta["MASK_COLS"] == (2 if lies == "apart" else 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("n_cols", few([2047], [100, 1024, 2047, 4096, 8192, 32768]))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask_cols", [None, 0, 1])
def test_masked_gradients_do_not_spill(n_cols, mask_cols, causal, dtype):
    x = torch.empty(4, n_cols, dtype=dtype)
    mask = None if mask_cols is None else torch.ones(2, n_cols if mask_cols else 1, dtype=torch.bool)
    launch, _ = masked_gradient_launch(x, mask, causal, SM_90)
    assert compiled.cross_compile(launch, "sm_90").spilled_bytes == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("n_cols", few([1000, 128256], [1000, 50257, 128256]))
@pytest.mark.parametrize(("smoothing", "softcap"), [(0.0, None), (0.1, 30.0)])
def test_gradients_of_losses_do_not_spill(n_cols, smoothing, softcap, dtype):
    x, number = torch.empty(3, n_cols, dtype=dtype), torch.zeros(6)
    target = torch.zeros(3, dtype=torch.int64)
    op = cross_entropy.CrossEntropy(target, None, None, -100, "mean", smoothing, softcap, 0.0)
    inplace = softcap is None  # as linear_cross_entropy's, which also has every other option
    sharded = n_cols == 50257  # as vocab-parallel losses have it
    unless = not (inplace or sharded)
    flags = cross_entropy_gradient.gradient_flags(op.kind, not sharded, inplace, sharded, unless, unless)
    vectors = (target, number, number, number, number, number, number, number)
    plan = cross_entropy_gradient.BACKWARD.planner(problem_of(x, x), SM_90)
    numbers = (op.ignore_index, 0, 0, *op.numbers)
    launch = row_launch(cross_entropy_gradient.BACKWARD, (x, x), vectors, numbers, flags, plan, SM_90)
    assert compiled.cross_compile(launch, "sm_90").spilled_bytes == 0


@pytest.mark.parametrize(
    "of",
    few([(50257, 50304)], [(50257, 50304), (128256, 128256), (151936, 151936), (262144, 262144)]),
    ids=str,
)
def test_float32_logits_with_a_gradient_of_16_bits_compile(of):
    n_cols, stride = of
    x, dx = (torch.empty(3, stride, dtype=dtype)[:, :n_cols] for dtype in (torch.float32, torch.bfloat16))
    number, target = torch.zeros(6), torch.zeros(3, dtype=torch.int64)
    op = cross_entropy.CrossEntropy(target, None, None, -100, "mean", 0.0, None, 0.0)
    row_op = cross_entropy.WIDE_WITH_GRADIENT[op.kind.arithmetic]
    plan = row_op.plan((x, dx), SM_90, False)
    assert plan.regime == "cluster"
    flags = loss_kernels.with_gradient_flags(op.kind)
    vectors = (target, number, number, number, number, number)
    launch = row_launch(row_op, (x, dx), vectors, loss_kernels.with_gradient_numbers(op), flags, plan, SM_90)
    assert compiled.cross_compile(launch, "sm_90").spilled_bytes == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("n_cols", few([50257], [1000, 50257]))
@pytest.mark.parametrize("kept", [False, True], ids=["logsumexp", "moments"])
def test_gradients_of_statistics_do_not_spill(n_cols, kept, dtype):
    x, number, ids = torch.empty(3, n_cols, dtype=dtype), torch.zeros(6), torch.zeros(3, 1, dtype=torch.int64)
    flags = (("PICKS", int(kept)), ("ENTROPY", kept), ("LSE", True), ("SCALE", 2 * kept), ("HAS_MOMENTS", kept))
    flags = (*flags, ("SHARDED", kept))
    number = number if kept else number.to(dtype)  # logsumexp's result and its upstream gradient have x's dtype
    vectors = (number, number, number, ids if kept else number, number, number, number)
    plan = row_statistics.BACKWARD.planner(problem_of(x, x), SM_90)
    launch = row_launch(row_statistics.BACKWARD, (x, x), vectors, (1, 0, 0, 1.0), flags, plan, SM_90)
    assert compiled.cross_compile(launch, "sm_90").spilled_bytes == 0
