"""Tuning picks the fastest plan that is right, and prints a table that is Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fused_softmax.bench.plans import problem_for
from fused_softmax.bench.resources import compile_one, keys_of
from fused_softmax.bench.tuning import as_table, choose
from fused_softmax.plan import DEVICES, plan


class ByIndex:
    """The i-th candidate takes 3 - i milliseconds, the copy half of one."""

    describe = "a fake"

    def round(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        return {name: 0.5 if name == "copy" else 3.0 - int(name) for name in calls}


def test_the_fastest_right_candidate_wins_and_wrong_ones_are_not_timed():
    problem = problem_for(4096, "float32")
    candidates = [plan(problem, DEVICES["sm_90"], regime=r) for r in ("block", "cluster", "stream")]

    def make(candidate: Any) -> Callable[..., Any]:
        return torch.empty_like if candidate.regime == "stream" else lambda x: torch.softmax(x, -1)

    choice = choose(torch.randn(3, 4096), candidates, ByIndex(), 0.001, make)
    assert choice is not None and choice.plan is candidates[1] and choice.tried == 3
    assert choice.fraction == 0.25 and choice.runner_up == 0.5 / 3 and len(choice.failed) == 1
    text = as_table([choice], "a device")
    names: dict[str, Any] = {}
    exec(text, names)
    assert names["TUNED"][0][:2] == ("float32", 4096) and names["TUNED"][0][2]["regime"] == "cluster"


def test_no_candidate_no_choice():
    assert choose(torch.randn(3, 8), [], ByIndex(), 0.001) is None


def test_resources_of_what_has_no_kernel_or_does_not_compile():
    assert "none" in compile_one("01_naive", "float32", 4096, 1000, "sm_90")
    assert "none" in compile_one("torch", "float32", 4096, 1000, "sm_90")
    assert keys_of([], ["02_one_row"]) == []
