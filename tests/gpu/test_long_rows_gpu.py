"""Rows so long that a plan stages chunks in shared memory, keeps part of a slice, or reads y late: against float64."""

from __future__ import annotations

import pytest
import torch
from cases import logits

import fused_softmax
from fused_softmax.launch.device import describe
from fused_softmax.launch.launcher import launch_rows
from fused_softmax.launch.layout import problem_of
from fused_softmax.launch.softmax import softmax_op
from fused_softmax.planning import softmax as planning
from fused_softmax.planning import types as problem

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

WIDTHS = (
    200019,
    202048,
    250001,
    256000,
    262144,
    262145,
    300000,
    450001,
    524288,
    524289,
    600001,
    1000000,
    1048576,
    1300007,
)
OPS = {"softmax": torch.softmax, "log_softmax": torch.log_softmax}


def planned(n_cols: int, dtype: torch.dtype, log: bool, backward: bool) -> problem.Plan:
    rows = torch.empty(2, n_cols, dtype=dtype, device="cuda")
    tensors = (rows, rows, rows) if backward else (rows, rows)
    return planning.plan(problem_of(*tensors, backward=backward, log=log), describe(rows.device))


@pytest.mark.parametrize("n_cols", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_long_rows(op, dtype, n_cols):
    x = logits(5, n_cols, dtype=dtype, device="cuda")
    x[1, : n_cols // 2] = -float("inf")
    y, own, want = getattr(fused_softmax, op)(x, -1), OPS[op](x, -1), OPS[op](x.double(), -1)
    assert torch.equal(y.isfinite(), want.isfinite())
    assert_no_worse(y, own, want, 0.0)


@pytest.mark.parametrize("n_cols", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_long_gradients(op, dtype, n_cols):
    """Of one and the same output y: what rounding it costs is the forward's."""
    torch.manual_seed(n_cols)
    y = OPS[op](logits(5, n_cols, dtype=dtype, device="cuda"), -1)
    dy = torch.randn(5, n_cols, device="cuda").to(dtype)
    p, sums = y.double(), dy.double().sum(-1, keepdim=True)
    if op == "softmax":
        want = p * (dy.double() - (p * dy.double()).sum(-1, keepdim=True))
        own, scale = torch._softmax_backward_data(dy, y, -1, dtype), p.amax(-1) * dy.abs().amax(-1)
    else:
        want = dy.double() - p.exp() * sums
        own, scale = torch._log_softmax_backward_data(dy, y, -1, dtype), n_cols**0.5 * p.exp().amax(-1)
    got = getattr(torch.ops.fused_softmax, f"{op}_backward")(dy, y, -1, dtype)
    assert_no_worse(got, own, want, scale)


def assert_no_worse(got: torch.Tensor, own: torch.Tensor, want: torch.Tensor, scale: torch.Tensor | float) -> None:
    """At most twice torch's own worst error of the row, and some roundings of float32 of what was added up."""
    want = want.nan_to_num(0.0, 0.0, 0.0)
    error, of_torch = ((t.double().nan_to_num(0.0, 0.0, 0.0) - want).abs().amax(-1) for t in (got, own))
    allowed = 2 * of_torch + 8 * torch.finfo(torch.float32).eps * (want.abs().amax(-1) + scale)
    assert (error <= allowed).all(), (error, allowed)


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="Hopper's plans")
def test_the_widths_above_have_every_kind_of_plan():
    plans = [
        planned(n_cols, dtype, log, backward)
        for n_cols in WIDTHS
        for dtype in (torch.bfloat16, torch.float32)
        for log in (False, True)
        for backward in (False, True)
    ]
    assert any(p.smem_staged for p in plans) and any(p.smem_staged and p.unaligned for p in plans)
    assert any(p.resident_chunks for p in plans) and any(p.resident_chunks and p.unaligned for p in plans)
    assert any(p.prefetched_chunks for p in plans)


@pytest.mark.parametrize("n_cols", [250001, 256000, 450001, 524288, 1048576])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_long_gradients_write_nothing_outside_and_repeat_bit_for_bit(dtype, n_cols):
    y = torch.softmax(logits(6, n_cols, dtype=dtype, device="cuda"), -1)
    field = torch.full((6, n_cols + 16), 7.0, dtype=dtype, device="cuda")
    first = torch.ops.fused_softmax.softmax_backward(y, y, -1, dtype)
    for _ in range(20):
        assert torch.equal(torch.ops.fused_softmax.softmax_backward(y, y, -1, dtype), first)
    inside = field[:, 8 : 8 + n_cols]
    op, flags = softmax_op(False, backward=True)
    launch_rows(op, (y, y, inside), (), (), flags)
    assert (field[:, :8] == 7).all() and (field[:, 8 + n_cols :] == 7).all()
    if n_cols % 8 == 0:  # elsewhere a row starts as far from a vector as its place in the batch says
        alone = torch.ops.fused_softmax.softmax_backward(y[2:3], y[2:3], -1, dtype)
        assert torch.equal(alone[0], first[2])
