"""The steps whose host and wall time is measured: each is right, and a wrong one gets no time."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from fused_softmax.lab import steps
from fused_softmax.lab.record import Record, from_json

CPU = torch.device("cpu")
WAYS = {"forward", "dim 0", "dtype=", "out=", "transposed", "forward and backward"}


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_step_is_right(dtype):
    found = steps.steps(3, 7, dtype, CPU)
    assert {step.way for step in found} == WAYS
    assert {step.op for step in found} == {
        "softmax", "log_softmax", "logsumexp", "token_logprobs", "masked_softmax", "cross_entropy",
    }  # fmt: skip
    for step in found:
        record = Record(step.op, "fused_softmax", "float32", 3, 7, "ok", case=step.way)
        assert steps.check(step, dtype, record), record
        assert step.ours() is not None
        torch.testing.assert_close(step.torch().double(), step.exact(), rtol=0.05, atol=0.05)


def test_a_wrong_step_and_one_that_raises_are_not_timed():
    step = steps.steps(3, 7, torch.float32, CPU)[0]

    def broken() -> torch.Tensor:
        raise ValueError("no such row")

    for wrong, status in (
        (lambda: step.ours() * 1.0001, "wrong"),
        (lambda: step.ours() * float("nan"), "wrong"),
        (broken, "error"),
    ):
        record = Record("softmax", "fused_softmax", "float32", 3, 7, "ok")
        assert not steps.check(replace(step, ours=wrong), torch.float32, record)
        assert record.status == status and record.note


@pytest.mark.interpreted
@pytest.mark.extended
def test_host_writes_a_record_of_every_step(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "NEW_ROWS", 8)
    monkeypatch.setattr(steps, "HostStopwatch", Counting)
    file, shown = tmp_path / "host.json", []
    assert steps.run(steps.host([torch.float32], CPU, 0.0), file, CPU, shown.append) == 0
    head, records = from_json(file.read_text())
    assert head.finished and len(records) == len(shown)
    assert all(record.ms for record in records)
    ways = {(r.op, r.case) for r in records if r.system == "fused_softmax"}
    assert {("softmax", "patch()"), ("softmax", "out= a new number of rows each call")} <= ways
    assert {(r.op, r.case) for r in records if r.system == "torch"} == {
        (op, way) for op, way in ways if "number of rows" not in way
    }


class Counting:
    describe = "a stopwatch of a test"

    def __init__(self, device):
        self.ticks = itertools.count(1)

    def round(self, calls):
        for call in calls.values():
            call()
        return {name: float(next(self.ticks)) for name in calls}
