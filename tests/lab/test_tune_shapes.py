"""Tuning over other dimensions: candidates are right, different, and the planner's choice stands next to them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from params import few
from typer.testing import CliRunner

from fused_softmax.lab.bench import ceilings
from fused_softmax.lab.bench import session as bench
from fused_softmax.lab.bench.session import Session
from fused_softmax.lab.cli import app
from fused_softmax.lab.plans import planes_problem
from fused_softmax.lab.record import Record, from_json, header, to_json
from fused_softmax.lab.results import read_results
from fused_softmax.lab.shape_candidates import candidates
from fused_softmax.lab.tune_shapes import OPS, Columns, Request, compile_ahead, drawn, jobs_of, lines, outcomes, run
from fused_softmax.planning.lean_tiles import lean_config
from fused_softmax.planning.types import DEVICES, SpatialProblem

cli = importlib.import_module("fused_softmax.lab.cli.tune")  # the package has the command by that name
CPU, SM_90 = torch.device("cpu"), DEVICES["sm_90"]


class ByName:
    """The planner's choice takes 4 ms, the i-th candidate i + 1, the ceiling one. All have run."""

    describe = "a fake"

    def round(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        own = {"ceiling": 1.0, "fused_softmax": 4.0}
        for name, call in calls.items():
            if name != "ceiling":  # a sum of words, which overflows in the interpreter
                call()
        return {name: own.get(name) or 1.0 + int(name.removeprefix("plan ")) for name in calls}


def problem_of(columns: Columns) -> SpatialProblem:
    return planes_problem(columns.n_cols, columns.inner, columns.dtype, backward=columns.backward, log=columns.log)


def session(**options: Any) -> Session:
    return Session(header(CPU, interpreted=True), (), CPU, 0.001, **options)


@pytest.mark.parametrize("op", OPS)
def test_candidates_are_different_and_of_all_families(op: str):
    problem = problem_of(Columns(op, "bfloat16", 103, 42))
    plans = candidates(problem, SM_90)
    assert len(plans) == len(set(plans)) > 40
    assert {bool(p.gathered) + 2 * bool(p.periodic) + 4 * bool(p.skewed) for p in plans} == {0, 1, 2, 4}
    assert {p.ctas > 1 for p in plans} == {True, False}
    some = candidates(problem, SM_90, 7, seed=3)
    assert len(some) == 7 and set(some) < set(plans)
    assert some == candidates(problem, SM_90, 7, seed=3) != candidates(problem, SM_90, 7, seed=4)


@pytest.mark.parametrize("op", OPS)
def test_lean_tiles_are_candidates(op: str):
    """The rule came from such a search, which finds its plans again."""
    for columns in (Columns(op, "bfloat16", 1000, 4096), Columns(op, "float32", 700, 2048)):
        config = lean_config(problem_of(columns), SM_90)
        assert config is not None
        plans = candidates(problem_of(columns), SM_90)
        assert (config.ctas, config.num_warps, config.inner) in {(p.ctas, p.num_warps, p.rows) for p in plans}


@pytest.mark.interpreted
@pytest.mark.parametrize("op", few(("softmax", "log_softmax_backward"), OPS))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_candidates_give_right_results(op: str, dtype: str):
    """Of random shapes; the session compares each with float64, in memory of NaN."""
    columns = drawn(4, 12, (2, 90), (2, 90), (op,), (dtype,))
    request = Request(tuple(columns), (1, 9000), 4, 2)
    done: list[Columns] = []
    records = run(request, session(timed=False), DEVICES["interpreter"], done.append)
    assert done == columns
    assert [(r.system, r.note) for r in records if r.status != "ok"] == []
    assert len(records) == 2 * 4 * 5
    for c in columns:
        mine = [r for r in records if (r.n_cols, r.inner) == (c.n_cols, c.inner)]
        assert [r.outer for r in mine[::5]] == [1, max(1, round(9000 / (c.n_cols * c.inner)))]
        assert all(r.plan and (r.system == "fused_softmax" or r.system.startswith("plan ")) for r in mine)


@pytest.mark.interpreted
def test_all_plans_are_timed_next_to_the_planners_and_ranked():
    columns = Columns("softmax", "bfloat16", 5, 24)
    saved: list[list[Record]] = []
    timed = session(stopwatch=lambda by, device: ByName(), save=lambda head, records: saved.append(list(records)))
    records = run(Request((columns,), (120, 1200), 6), timed, DEVICES["interpreter"], lambda columns: None)
    assert saved[-1] == records and {r.timed_by for r in records} == {"a fake"}
    assert from_json(to_json(timed.head, records))[1] == records
    ((today, *others),) = outcomes(records)
    assert today.columns == columns and (today.gain, today.worst) == (1.0, 1.0)
    assert [o.gain for o in others] == pytest.approx([4, 2, 4 / 3, 1, 4 / 5, 2 / 3])
    assert today.fractions == {120: 0.25, 1200: 0.25} and others[1].fractions == {120: 0.5, 1200: 0.5}
    text = lines([[today, *others]], shown=1)
    assert len(text) == 3 and text[0].startswith("softmax bf16 5x24, 6 other plans") and today.plan in text[1]
    assert text[2].split()[:4] == ["4.00", "(4.00)", "1.00", "1.00"] and text[2].endswith(others[0].plan)


def test_a_plan_that_failed_with_one_size_is_not_ranked():
    def record(system: str, outer: int, ms: float | None) -> Record:
        return Record("softmax", system, "float32", 7 * outer, 3, "ok", ms=ms, plan=system, outer=outer, inner=7)

    times = {"fused_softmax": (2.0, 8.0), "plan 0": (1.0, None), "plan 1": (4.0, 2.0)}
    records = [record(name, outer, ms) for name, of in times.items() for outer, ms in zip((1, 9), of, strict=True)]
    ((today, only),) = outcomes(records)
    assert (today.plan, only.plan) == ("fused_softmax", "plan 1")
    assert (only.gain, only.worst) == (pytest.approx(2**0.5), 0.5)
    assert outcomes(records[2:]) == []


def test_columns_of_a_seed():
    ops, dtypes = ("softmax", "softmax_backward"), ("bfloat16", "float32")
    found = drawn(300, 1, (3, 90), (7, 900), ops, dtypes)
    assert found == drawn(300, 1, (3, 90), (7, 900), ops, dtypes) != drawn(300, 2, (3, 90), (7, 900), ops, dtypes)
    assert len(set(found)) == 300 and {(c.op, c.dtype) for c in found} == {(o, d) for o in ops for d in dtypes}
    assert all(3 <= c.n_cols <= 90 and 7 <= c.inner <= 900 for c in found)
    assert sum(c.inner % 16 == 0 for c in found) > 75 and sum(c.inner % 2 for c in found) > 30
    with pytest.raises(ValueError, match="more than half"):
        drawn(6, 1, (3, 3), (7, 16), ("softmax",), ("bfloat16",))


@pytest.mark.interpreted
def test_workers_compile_each_candidate_once():
    request = Request((Columns("softmax", "bfloat16", 5, 24), Columns("softmax_backward", "float32", 3, 7)), most=3)
    assert len(jobs_of(request, DEVICES["interpreter"])) == 6
    ticks: list[None] = []
    assert (
        compile_ahead(request, DEVICES["interpreter"], 2, lambda: ticks.append(None)) == [""] * 6 == [""] * len(ticks)
    )


@pytest.mark.interpreted
def test_the_command_prints_and_writes_what_it_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """With the clock and the GPU's ceilings replaced: the rest is what runs on a GPU."""
    monkeypatch.setattr(cli, "_expect_gpu", lambda: None)
    monkeypatch.setattr(ceilings, "measured", lambda device: {"copy": 9.0})
    monkeypatch.setattr(bench, "stopwatch_for", lambda timed_by, device: ByName())
    line = (
        "tune --shapes 5x24,3x7 --plans 3 --elements 120,1200 --dtype bf16 --op softmax_backward --workers 0 --seed 4"
    )
    result = CliRunner().invoke(app, [*line.split(), "--record", str(tmp_path / "a" / "tune.json")])
    assert result.exit_code == 0, result.output
    head, records = read_results(tmp_path / "a" / "tune.json")
    assert head.finished and head.seed == 4 and head.ceilings == {"copy": 9.0}
    assert {(r.n_cols, r.inner, r.op) for r in records} == {(5, 24, "softmax_backward"), (3, 7, "softmax_backward")}
    assert [r.system for r in records if r.plan] == ["fused_softmax", "plan 0", "plan 1", "plan 2"] * 4
    assert result.stdout.splitlines() == lines(outcomes(records)) and len(result.stdout.splitlines()) == 2 * 5
