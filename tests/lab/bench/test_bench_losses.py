"""Losses in the benchmark: loss and gradient are both checked, and no coarseness of torch's own excuses ours."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fused_softmax.lab.bench.cases import MASKED_WIDTHS, Case
from fused_softmax.lab.bench.checking import Judge, WrongShape
from fused_softmax.lab.bench.inputs import IGNORED
from fused_softmax.lab.bench.ops import OPS, family, plan_of, token_statistics
from fused_softmax.lab.bench.session import Session
from fused_softmax.lab.bench.systems import systems_for
from fused_softmax.lab.bench.workload import backward_alone, with_gradient
from fused_softmax.lab.plans import plan_text
from fused_softmax.lab.record import header
from fused_softmax.launch import masked_softmax as masked_rows
from fused_softmax.launch.layout import problem_of
from fused_softmax.planning.softmax import plan
from fused_softmax.planning.types import DEVICES
from fused_softmax.torch_ops import masked_softmax as masked

CPU = torch.device("cpu")
LOSSES = [op for op in OPS if family(op) in ("cross_entropy", "token_logprobs", "masked_softmax")]


def judge(op: str, n_rows: int = 70, n_cols: int = 97, dtype: torch.dtype = torch.bfloat16) -> Judge:
    return Judge(OPS[op], OPS[op].inputs(n_rows, n_cols, dtype, CPU, 0))


def on_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every module that asks for the device get the description of a GPU."""
    for module in ("launch.device", "torch_ops.route"):
        monkeypatch.setattr(f"fused_softmax.{module}.describe", lambda device: DEVICES["sm_90"])


def exact(check: Judge, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, target, _ = check.inputs
    loss, dx = OPS["cross_entropy"].torch_call(x.double(), target)
    return loss.float(), dx.to(dtype)


def test_loss_and_gradient_that_are_right_pass_strictly():
    for dtype in (torch.bfloat16, torch.float32):
        check = judge("cross_entropy", dtype=dtype)
        assert (check.inputs[1] == IGNORED).sum() == 2
        assert check.judge(exact(check, dtype), ours=True).ok


def test_a_gradient_is_judged_in_units_of_the_terms_it_is_a_difference_of():
    check = judge("cross_entropy", dtype=torch.float32)
    x, target, count = check.inputs
    x[0], target[0] = 0.0, 7
    x[0, 7] = 14.0  # p is 0.9999, and the largest value of the row's gradient 8e-5 of its terms
    check = Judge(OPS["cross_entropy"], check.inputs)
    loss, dx = exact(check, torch.float32)
    one_eps = torch.finfo(torch.float32).eps / float(count)
    for errors, ok in ((3, True), (30, False)):
        wrong = dx.clone()
        wrong[0, 7] += errors * one_eps
        assert check.judge((loss, wrong)).ok == ok
    wrong = dx.clone()
    wrong[5] = one_eps  # an ignored row
    assert (target[5] == IGNORED) and not check.judge((loss, wrong)).ok


@pytest.mark.parametrize("part", [0, 1])
def test_a_wrong_part_is_named(part: int):
    check = judge("cross_entropy")
    result = list(exact(check, torch.bfloat16))
    result[part] = result[part] * 1.05
    verdict = check.judge(tuple(result), ours=True)
    assert not verdict.ok and f"of {check.op.parts[part]}" in verdict.why


def test_a_gradient_of_the_outliers_alone_is_wrong():
    # the target's and the outliers' entries are a thousand times the others: by the row's largest all else could be 0
    check = judge("cross_entropy", 8, 4096)
    loss, dx = exact(check, torch.bfloat16)
    dx[dx.abs() < 1e-2 * dx.abs().amax(-1, keepdim=True)] = 0
    verdict = check.judge((loss, dx), ours=True)
    assert not verdict.ok and "of gradient" in verdict.why


def test_torchs_rounding_excuses_peers_and_not_ours():
    check = judge("cross_entropy", 8, 4096)
    loss, dx = exact(check, torch.bfloat16)
    assert check.judge((loss, dx * 1.02)).ok
    verdict = check.judge((loss, dx * 1.02), ours=True)
    assert not verdict.ok and verdict.why.endswith("of gradient")


def test_statistics_of_a_row_may_be_more_exact_than_torchs():
    check = judge("token_logprobs")
    better = tuple(t.float() for t in token_statistics(check.inputs[0].double(), check.inputs[1]))
    assert check.judge(better, ours=True).ok
    worse = (better[0], better[1] + 1e-3, better[2])
    assert check.judge(worse).why.endswith("of entropy")


def test_missing_parts_and_unwritten_losses():
    check = judge("cross_entropy")
    loss, dx = exact(check, torch.bfloat16)
    with pytest.raises(WrongShape, match="1 results for 2"):
        check.judge(loss)
    with pytest.raises(WrongShape, match="float32"):
        check.judge((loss, dx.float()))
    verdict = check.judge((loss * float("nan"), dx))
    assert not verdict.ok and verdict.error == float("inf")


def test_a_masked_gradient_without_its_sum_or_its_zeros_is_wrong():
    for op in (name for name in OPS if name.startswith("masked_softmax") and name.endswith("_backward")):
        check = judge(op, 194)
        assert check.parts[0].relative < 0.01  # or torch's own rounding would excuse anything
        dy, y, *_ = check.inputs
        dx = OPS[op].torch_call(*check.inputs)
        assert (y == 0).any() and (dx[y == 0] == 0).all() and check.judge(dx, ours=True).ok
        assert not check.judge(dy * y, ours=True).ok
        verdict = check.judge(dx.masked_fill(y == 0, float("nan")), ours=True)
        assert not verdict.ok and "unwritten" in verdict.why


def test_our_masked_gradient_is_causal_where_the_op_is(monkeypatch: pytest.MonkeyPatch):
    # its result alone does not say: what causality hides has y = 0, and so no gradient either way
    asked: list[tuple[torch.Size, Tensor | None, float, bool]] = []

    def backward(y: Tensor, dy: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
        asked.append((y.shape, mask, scale, causal))
        return dy

    monkeypatch.setattr(masked, "_backward", backward)
    for kind in ("causal", "additive"):
        op = f"masked_softmax_{kind}_backward"
        (ours,) = (s for s in systems_for(op) if s.kind == "ours")
        ours.build()(*OPS[op].inputs(12, 4, torch.float32, CPU, 0))
    assert asked == [((1, 3, 4, 4), None, 1.0, True), ((1, 3, 4, 4), None, 1.0, False)]


@pytest.mark.parametrize("op", [op for op in LOSSES if op.startswith("masked_softmax") and op.endswith("_backward")])
def test_a_masked_gradient_names_the_plan_that_runs_it(op: str, monkeypatch: pytest.MonkeyPatch):
    on_h100(monkeypatch)
    regimes = set()
    for n_cols in (*MASKED_WIDTHS, 131072, 524288, 1048576):
        dy, y = (torch.empty(n_cols, n_cols, dtype=torch.bfloat16, device="meta") for _ in range(2))
        runs = masked_rows.BACKWARD[False].plan((y, dy, y), DEVICES["sm_90"], False)
        if runs.regime == "two_pass":  # softmax's own gradient takes such rows
            runs = plan(problem_of(y, dy, y, backward=True), DEVICES["sm_90"])
        assert plan_of(OPS[op], (dy, y)) == (runs.regime, plan_text(runs))
        regimes.add(runs.regime)
    assert regimes == {"warp", "block", "cluster", "two_pass"}


def test_log_softmax_names_its_own_plan(monkeypatch: pytest.MonkeyPatch):
    on_h100(monkeypatch)
    # where the plans of both and of both gradients differ
    dy, y = (torch.empty(2, 262144, dtype=torch.bfloat16, device="meta") for _ in range(2))
    said = {op: plan_of(OPS[op], (y,) if "backward" not in op else (dy, y)) for op in OPS if "softmax" in op[:11]}
    for op, backward in (("log_softmax", False), ("log_softmax_backward", True)):
        runs = plan(problem_of(*(y,) * (2 + backward), backward=backward, log=True), DEVICES["sm_90"])
        assert said[op] == (runs.regime, plan_text(runs))
        assert said[op] != said[op.removeprefix("log_")]


def test_chunks_of_rows_give_the_same_verdict(monkeypatch: pytest.MonkeyPatch):
    for op in LOSSES:
        whole = judge(op, 194)
        monkeypatch.setattr("fused_softmax.lab.bench.checking.CHUNK", {"cpu": 1000})
        parts = judge(op, 194)
        result = OPS[op].torch_call(*parts.inputs)
        assert parts.torch_error == pytest.approx(whole.torch_error, rel=1e-9) and parts.judge(result).ok
        monkeypatch.undo()


def test_a_loss_that_writes_over_its_logits_gets_its_own():
    x, target, count = OPS["cross_entropy"].inputs(4, 33, torch.float32, CPU, 0)

    def overwriting(leaf: Tensor, target: Tensor) -> Tensor:
        loss = torch.nn.functional.cross_entropy(leaf.clone(), target)
        leaf.data.zero_()
        return loss

    before, call = x.clone(), with_gradient(overwriting, overwrites=True)
    torch.testing.assert_close(call(x, target, count), OPS["cross_entropy"].torch_call(x, target))
    assert torch.equal(x, before)


def test_backward_alone_keeps_its_graph():
    made: list[int] = []

    def forward(x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        made.append(1)
        return token_statistics(x, ids)

    entry = OPS["token_logprobs_backward"]
    inputs = entry.inputs(3, 17, torch.float64, CPU, 0)
    call = backward_alone(forward)
    for _ in range(2):
        torch.testing.assert_close(call(*inputs), entry.reference(*inputs))
    assert len(made) == 1


@pytest.mark.interpreted
@pytest.mark.parametrize("op", LOSSES)
def test_ours_passes_interpreted_and_names_its_plan(op: str):
    ours = [s for s in systems_for(op) if s.kind == "ours"]
    run = Session(header(CPU, interpreted=True), ours, CPU, timed=False)
    for record in run.run([Case(op, "bfloat16", 6, 300), Case(op, "float32", 3, 1025)]):
        assert (record.status, record.note) == ("ok", "") and " warp" in record.plan
