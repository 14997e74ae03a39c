"""The traffic model agrees with what is counted, and no system goes uncounted without a reason."""

from __future__ import annotations

import pytest
import torch

from fused_softmax.lab import reference
from fused_softmax.lab.bench.systems import LESSON_SYSTEMS, SYSTEMS, systems_for
from fused_softmax.lab.lessons import load
from fused_softmax.lab.traffic import MODELS, Traffic, naive, regime_traffic, traffic


@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (64, 33)])
def test_naive_model_is_what_pytorch_moves(shape: tuple[int, int]):
    passes = reference.traffic(reference.naive_softmax, torch.zeros(shape))
    assert naive(*shape) == Traffic(sum(p.reads for p in passes), sum(p.writes for p in passes))


@pytest.mark.interpreted
def test_every_lesson_is_a_system_and_is_counted():
    # the tenth lesson's kernel is the shipped one
    assert {int(s.name[:2]) for s in LESSON_SYSTEMS} == set(range(1, 10))
    assert load(10).SYSTEM == "fused_softmax" and load(9).SYSTEM == "09_cluster"
    assert all(s.name in MODELS for s in LESSON_SYSTEMS)


def test_regimes_that_keep_the_row_read_it_once():
    assert {regime_traffic(r, 3, 100) for r in ("warp", "block", "cluster")} == {Traffic(300, 300)}
    assert traffic("fused_softmax", 3, 100, "two_pass") == Traffic(600, 300)
    assert traffic("fused_softmax", 3, 100, "torch") is None and traffic("torch", 3, 100) is None
    assert traffic("06_three_pass", 3, 100) == Traffic(900, 300)
    assert traffic("05_published", 3, 4096) == Traffic(3 * 512, 3 * 512)


def test_names_are_unique_for_each_op_and_unknown_ones_are_named():
    keys = [(s.op, s.name) for s in SYSTEMS]
    assert len(keys) == len(set(keys))
    assert [s.name for s in systems_for("softmax", ("torch", "01_naive"))] == ["torch", "01_naive"]
    with pytest.raises(KeyError, match="07_online"):
        systems_for("softmax", ("7",))
