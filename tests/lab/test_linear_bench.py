"""The benchmark of linear losses: what it judges by, and what it writes; its times need a GPU."""

from __future__ import annotations

import pytest
import torch

from fused_softmax.lab.linear import measure, systems
from fused_softmax.lab.linear.systems import LOGPROBS, MEAN, NONE, System
from fused_softmax.lab.record import Record, from_json, header


@pytest.mark.parametrize("op", [MEAN, NONE, LOGPROBS])
def test_results_are_judged_by_float64(op: str):
    p = measure.problem(op, 12, 16, 40, torch.device("cpu"))
    p.exact = measure.reference_of(p)
    own = systems.log_softmax if op == LOGPROBS else systems.plain("mean" if op == MEAN else "none")
    assert max(p.errors(p.call(own)())) < 0.02
    ours = next(s for s in systems.SYSTEMS if s.op == op and s.kind == "ours")
    assert max(p.errors(p.call(ours.build())())) < 0.02
    wrong = p.errors(p.call(lambda x, weight, target: own(x, weight, (target + 1) % 40))())
    assert min(wrong) > 0.02
    torch.testing.assert_close(measure._error(p.exact[1] + float("nan"), p.exact[1]), float("inf"))


def test_a_run_names_what_is_missing_and_writes_after_every_shape(monkeypatch, tmp_path):
    there = System("fused_softmax", NONE, "ours", lambda: systems.ours(reduction="none"))
    gone = System("peer", NONE, "peer", lambda: systems.plain("none"), "no_such_package")
    shown, file = [], tmp_path / "linear.json"

    def one(op, shape, chosen, seconds, device):
        assert [s.name for s in chosen] == ["fused_softmax"]
        if shown:
            assert len(from_json(file.read_text())[1]) == len(shown)
        yield Record(op, "fused_softmax", "bfloat16", shape[0], shape[2], "ok", case=f"hidden size {shape[1]}")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(measure, "header", lambda device, interpreted: header(torch.device("cpu"), interpreted))
    monkeypatch.setattr(measure, "SYSTEMS", (there, gone))
    monkeypatch.setattr(measure, "measure", one)
    records = measure.run((NONE,), None, (), 0.1, file, False, shown.append)
    head, written = from_json(file.read_text())
    assert head.finished and "no_such_package" in head.unavailable["peer"]
    assert [(r.n_rows, r.n_cols) for r in written] == [(rows, cols) for rows, _, cols in measure.ROW_SHAPES]
    assert shown == records and len(records) == 3
