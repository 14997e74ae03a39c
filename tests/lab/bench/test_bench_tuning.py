"""Tuning picks the fastest plan that is right, and prints config_tables that are Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from params import few

from fused_softmax.lab.bench.ops import OPS
from fused_softmax.lab.bench.run import add_resources
from fused_softmax.lab.plans import problem_for
from fused_softmax.lab.record import Record
from fused_softmax.lab.resources import ROWS, fields_of, keys_of
from fused_softmax.lab.roofline.compiled import Compiled, compile_kernel
from fused_softmax.lab.tune import TUNABLE, Choice, as_config_table, choose
from fused_softmax.planning.config_tables import KernelConfig
from fused_softmax.planning.softmax import plan
from fused_softmax.planning.types import DEVICES


class ByIndex:
    """The i-th candidate takes 3 - i milliseconds, the ceiling half of one."""

    describe = "a fake"

    def round(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        return {name: 0.5 if name == "ceiling" else 3.0 - int(name) for name in calls}


class Even:
    """All take as long; the ceiling is not run, as its sum of words overflows in the interpreter."""

    describe = "a fake"

    def round(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        for name, call in calls.items():
            if name != "ceiling":
                call()
        return dict.fromkeys(calls, 1.0)


def test_the_fastest_right_candidate_wins_and_wrong_ones_are_not_timed():
    problem = problem_for(4096, "float32")
    candidates = [plan(problem, DEVICES["sm_90"], regime=r) for r in ("block", "cluster", "two_pass")]

    def make(candidate: Any) -> Callable[..., Any]:
        return torch.empty_like if candidate.regime == "two_pass" else lambda x: torch.softmax(x, -1)

    choice = choose("softmax", (torch.randn(3, 4096),), candidates, ByIndex(), 0.001, make)
    assert choice is not None and choice.plan is candidates[1] and choice.tried == 3
    assert choice.fraction == 0.25 and choice.runner_up == 0.5 / 3 and len(choice.failed) == 1


def test_no_candidate_no_choice():
    assert choose("softmax", (torch.randn(3, 8),), [], ByIndex(), 0.001) is None


def test_config_tables_are_python_as_the_planner_has_it():
    def choice(dtype: str, n_cols: int, regime: str) -> Choice:
        return Choice(dtype, n_cols, plan(problem_for(n_cols, dtype), DEVICES["sm_90"], regime), 0.9, 0.8, 0.7, 5, ())

    found = [choice("bfloat16", 32768, "cluster"), choice("bfloat16", 30000, "cluster")]
    found += [choice("bfloat16", 256, "warp"), choice("float32", 4096, "block")]
    names: dict[str, Any] = {"KernelConfig": KernelConfig}
    exec(as_config_table(found, "a device"), names)
    table = names["CONFIG_TABLE"]
    wide, narrow = found[0].plan, found[3].plan
    assert table[2] == (KernelConfig(32768, wide.ctas, wide.num_warps, wide.recompute),)
    assert table[4] == (KernelConfig(4096, 1, narrow.num_warps),)


@pytest.mark.interpreted
@pytest.mark.parametrize("op", few(("softmax", "cross_entropy"), TUNABLE))
def test_candidates_run_and_todays_plan_is_among_them(op: str):
    inputs = OPS[op].inputs(2, 6000, torch.bfloat16, torch.device("cpu"), 0)
    tried = TUNABLE[op].tried(TUNABLE[op].problem(6000, "bfloat16"), DEVICES["interpreter"])
    assert len(tried) > 4 and len(set(tried)) == len(tried)
    found = choose(op, inputs, tried[:2] + tried[-1:], Even(), 0.001)
    assert found is not None and found.tried == 3 and found.failed == () and found.today > 0


def test_resources_of_what_has_no_kernel_or_does_not_compile():
    for system in ("01_naive", "torch"):
        found = compile_kernel(dict(system=system, dtype="float32", n_rows=4096, n_cols=1000, target="sm_90"))
        assert list(fields_of(found, "sm_90")) == ["none"]
    assert fields_of(Compiled(failed="no such target"), "sm_90") == {"failed": "sm_90: no such target"}
    used = dict(registers=9, spilled_bytes=0, shared_bytes=300_000, num_warps=4, num_ctas=1, loads=[[16, 2]])
    found = fields_of(Compiled(used), "sm_90")
    assert found["widest_load_bytes"] == 16 and found["failed"].startswith("out of resources on sm_90")
    assert keys_of([], ["02_one_row"]) == []


def test_resources_are_put_beside_the_op_that_they_are_of():
    records = [Record(op, "02_one_row", "float32", 8, 128, "ok") for op in ("softmax", "softmax_backward")]
    compiler: Any = SimpleNamespace(found={("02_one_row", "float32", ROWS, 128): {"registers": 16}})
    add_resources(records, compiler)
    assert [r.resources for r in records] == [{"registers": 16}, None]
