"""The check before the time refuses what is wrong, unwritten, or finite where it must be NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fused_softmax.lab.bench import checking
from fused_softmax.lab.bench.checking import Judge, WrongShape, poisoned, run_poisoned
from fused_softmax.lab.bench.inputs import DTYPES, rows_of_logits
from fused_softmax.lab.bench.ops import OPS

SOFTMAX = OPS["softmax"]


def judge(x: Tensor) -> Judge:
    return Judge(SOFTMAX, (x,))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_torch_passes_its_own_check(dtype: torch.dtype):
    x = rows_of_logits(5, 1000, dtype, torch.device("cpu"))
    verdict = judge(x).judge(torch.softmax(x, -1))
    assert verdict.ok and verdict.error == judge(x).torch_error


@pytest.mark.parametrize(("most", "computed"), [(5 * 1000 * 8, 1), (5 * 1000 * 8 - 1, 3)])
def test_references_are_kept_for_all_systems_if_they_are_small(most, computed, monkeypatch):
    calls = []

    def counted(*inputs: Tensor) -> Tensor:
        calls.append(inputs)
        return SOFTMAX.reference(*inputs)

    monkeypatch.setitem(checking.KEPT, "cpu", most)
    x = rows_of_logits(5, 1000, torch.float32, torch.device("cpu"))
    of = Judge(replace(SOFTMAX, exact=counted), (x,))
    y = torch.softmax(x, -1)
    assert of.judge(y).ok and not of.judge(2 * y).ok and len(calls) == computed


def test_memory_that_is_not_written_is_nan_and_fails():
    def half(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        y[:, :32] = torch.softmax(x, -1)[:, :32]
        return y

    x = rows_of_logits(3, 64, torch.float32, torch.device("cpu"))
    verdict = judge(x).judge(run_poisoned(half, (x,)))
    assert not verdict.ok and verdict.error == float("inf") and "unwritten" in verdict.why


def test_poison_is_taken_away_again():
    torch.use_deterministic_algorithms(False)
    with poisoned(torch.zeros(4)):
        assert torch.empty(1000).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
    with poisoned(torch.zeros(4), deterministic=False):
        assert not torch.are_deterministic_algorithms_enabled()


def test_one_wrong_row_among_sharp_ones_fails_by_its_own_scale():
    # a nearly one-hot row has a scale of 1; an error of 1% in a flat row would hide below it
    x = torch.zeros(2, 1000)
    x[0, 0] = 50.0
    y = torch.softmax(x, -1)
    y[1, 0] *= 1.01
    verdict = judge(x).judge(y)
    assert not verdict.ok and verdict.why == "1 of 2 rows"


def test_a_gradient_is_judged_by_the_terms_of_its_difference():
    # a causal row of two columns whose dy are almost equal: y*(dy - d) is a small difference of large products
    op = OPS["masked_softmax_causal_backward"]
    dy, y, query, hidden = op.inputs(64, 16, torch.float32, torch.device("cpu"), 0, (1, 8, 8))
    dy[1::8, 1] = dy[1::8, 0] * (1 + 3e-6)
    judge = Judge(op, (dy, y, query, hidden))
    right = op.torch_call(dy, y, query, hidden)
    unit = torch.finfo(torch.float32).eps * (dy * y).abs().amax(-1, keepdim=True)
    visible = ~hidden[query]
    assert judge.judge(right + 2 * unit * (visible & (query > 0)[:, None])).ok  # what another order of the sum gives
    off = right.clone()
    off[7] += 20 * unit[7] * visible[7]  # in a row without cancellation
    assert judge.judge(off).why == "1 of 64 rows"
    off = right.clone()
    off[8] += 1e-9 * visible[8]  # a row of one column: the gradient is exactly 0
    assert judge.judge(off).why == "1 of 64 rows"
    # 16 bits are rounded to the result's size, however large its terms
    y16, dy16 = y.bfloat16(), dy.bfloat16()
    dy16[1::8, 1] = dy16[1::8, 0] * (1 + 2**-7)
    judge = Judge(op, (dy16, y16, query, hidden))
    off = op.torch_call(dy16, y16, query, hidden)
    off[1] *= 1.1
    assert judge.judge(off).why == "1 of 64 rows"


def test_a_gradient_of_log_softmax_is_judged_by_its_terms():
    """Where one probability is almost 1 and the other dy almost 0, dy - exp(y)*sum(dy) is a small difference."""
    op = OPS["log_softmax_backward"]
    dy, y = op.inputs(64, 2, torch.float32, torch.device("cpu"), 0)
    y[5] = torch.log_softmax(torch.tensor([0.0, -13.0]), 0)
    dy[5] = torch.tensor([1.3, 1e-6])
    judge, right = Judge(op, (dy, y)), op.torch_call(dy, y)
    assert right[5].abs().max() < 1e-5
    unit = torch.finfo(torch.float32).eps * dy.abs().amax(-1, keepdim=True)
    assert judge.judge(right + unit).ok
    off = right.clone()
    off[5] += 20 * unit[5]
    assert judge.judge(off).why == "1 of 64 rows"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_of_log_probabilities_is_judged_by_its_terms(dtype):
    """Where the id's probability is almost 1, its gradient g_lse*p + g_logprob*(1 - p) is a small difference."""
    op = OPS["token_logprobs_backward"]
    x, ids, *upstream = op.inputs(64, 2, dtype, torch.device("cpu"), 0)
    x[5], ids[5] = torch.tensor([0.0, -13.0]), 0
    for g, value in zip(upstream, (1.0, 0.0, -1e-6), strict=True):
        g[5] = value
    judge = Judge(op, (x, ids, *upstream))
    exact = op.reference(x.double(), ids, *(g.double() for g in upstream))
    assert exact[5].abs().max() < 1e-5
    unit = torch.finfo(torch.float32).eps
    near, off, wrong = exact.clone(), exact.clone(), exact.clone()
    near[5] += 2 * unit  # what float32's p, rounded to a neighbor of 1, gives
    off[5] += 20 * unit
    wrong[7] *= 1.02  # a row without cancellation
    assert judge.judge(near.to(dtype), ours=True).ok
    for y in (off, wrong):
        assert judge.judge(y.to(dtype), ours=True).why == "1 of 64 rows"


def test_nan_belongs_where_torch_has_it_and_nowhere_else():
    x = torch.zeros(4, 8)
    x[1, 3] = float("nan")
    x[2] = -float("inf")
    x[3, 0] = float("inf")
    y = torch.softmax(x, -1)
    assert judge(x).judge(y).ok
    for row in range(4):
        bad = y.clone()
        bad[row, 0] = 0.125 if row else float("nan")
        assert not judge(x).judge(bad).ok, row


def test_negative_infinity_of_log_softmax_must_be_there():
    x = torch.zeros(2, 8)
    x[0, 3] = -float("inf")
    check = Judge(OPS["log_softmax"], (x,))
    y = torch.log_softmax(x, -1)
    assert check.judge(y).ok
    y[0, 3] = -1e30
    assert not check.judge(y).ok


def test_wrong_shape_or_dtype_is_named():
    x = torch.zeros(2, 8)
    with pytest.raises(WrongShape, match="float16"):
        judge(x).judge(torch.zeros(2, 8, dtype=torch.float16))
    with pytest.raises(WrongShape, match=r"\(2, 7\)"):
        judge(x).judge(torch.zeros(2, 7))


def test_rows_in_many_chunks_give_the_same_verdict(monkeypatch: pytest.MonkeyPatch):
    x = rows_of_logits(64, 100, torch.bfloat16, torch.device("cpu"))
    y = torch.softmax(x, -1)
    whole = judge(x).judge(y)
    monkeypatch.setattr("fused_softmax.lab.bench.checking.CHUNK", {"cpu": 300})
    assert judge(x).judge(y) == whole


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_empty_inputs_are_judged_by_shape(shape: tuple[int, int]):
    x = torch.zeros(shape)
    assert judge(x).judge(torch.zeros(shape)).ok
