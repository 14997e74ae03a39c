"""Rows so long that a plan parks chunks in shared memory, keeps part of a slice, or reads y late: against float64."""

from __future__ import annotations

import pytest
import torch
from cases import logits

import fused_softmax
from fused_softmax import plan as planning
from fused_softmax.device import describe
from fused_softmax.launch import problem_of

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


def planned(n_cols: int, dtype: torch.dtype, log: bool, backward: bool) -> planning.Plan:
    rows = torch.empty(2, n_cols, dtype=dtype, device="cuda")
    tensors = (rows, rows, rows) if backward else (rows, rows)
    return planning.plan(problem_of(*tensors, backward=backward, log=log), describe(rows.device))


@pytest.mark.parametrize("n_cols", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_long_rows_and_their_gradients(op, dtype, n_cols):
    torch.manual_seed(n_cols)
    own = getattr(fused_softmax, op)
    x = logits(5, n_cols, dtype=dtype, device="cuda")
    x[1, : n_cols // 2] = -float("inf")
    dy = torch.randn(5, n_cols, device="cuda").to(dtype)
    ours, theirs, exact = (x.detach().to(t).requires_grad_() for t in (dtype, dtype, torch.float64))
    y, of_torch, want = own(ours, -1), OPS[op](theirs, -1), OPS[op](exact, -1)
    (dx,) = torch.autograd.grad(y, ours, dy)
    (dx_torch,) = torch.autograd.grad(of_torch, theirs, dy)
    (dx_want,) = torch.autograd.grad(want, exact, dy.double())
    for got, peer, right in ((y, of_torch, want), (dx, dx_torch, dx_want)):
        assert torch.equal(got.isfinite(), right.isfinite())
        right = right.nan_to_num(0.0, 0.0, 0.0)
        error, of_peer = ((t.double().nan_to_num(0.0, 0.0, 0.0) - right).abs().amax(-1) for t in (got, peer))
        assert (error <= 2 * of_peer + 8 * torch.finfo(torch.float32).eps * right.abs().amax(-1)).all(), (
            error,
            of_peer,
        )


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="Hopper's plans")
def test_the_widths_above_have_every_kind_of_plan():
    plans = [
        planned(n_cols, dtype, log, backward)
        for n_cols in WIDTHS
        for dtype in (torch.bfloat16, torch.float32)
        for log in (False, True)
        for backward in (False, True)
    ]
    assert any(p.parked for p in plans) and any(p.parked and p.edge for p in plans)
    assert any(p.kept for p in plans) and any(p.kept and p.edge for p in plans)
    assert any(p.ahead for p in plans)


@pytest.mark.parametrize("n_cols", [256000, 450001, 524288, 1048576])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_long_gradients_write_nothing_outside_and_repeat_bit_for_bit(dtype, n_cols):
    y = torch.softmax(logits(6, n_cols, dtype=dtype, device="cuda"), -1)
    field = torch.full((6, n_cols + 16), 7.0, dtype=dtype, device="cuda")
    first = torch.ops.fused_softmax.softmax_backward(y, y, -1, dtype)
    for _ in range(20):
        assert torch.equal(torch.ops.fused_softmax.softmax_backward(y, y, -1, dtype), first)
    from fused_softmax.launch import launch_rows

    inside = field[:, 8 : 8 + n_cols]
    launch_rows((y, y, inside), False, backward=True)
    assert (field[:, :8] == 7).all() and (field[:, 8 + n_cols :] == 7).all()
    alone = torch.ops.fused_softmax.softmax_backward(y[2:3], y[2:3], -1, dtype)
    assert torch.equal(alone[0], first[2])
