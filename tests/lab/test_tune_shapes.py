"""Tuning over other dimensions: candidates are right, different, and the planner's choice stands next to them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from params import few
from typer.testing import CliRunner

from fused_softmax.kernels.common import skewed_merge, spatial_cluster
from fused_softmax.lab import tune_shapes
from fused_softmax.lab.bench import ceilings
from fused_softmax.lab.bench import session as bench
from fused_softmax.lab.bench.cases import Case
from fused_softmax.lab.bench.session import Session
from fused_softmax.lab.cli import app
from fused_softmax.lab.plans import plan_text, planes_problem
from fused_softmax.lab.record import Record, from_json, header, to_json
from fused_softmax.lab.results import read_results
from fused_softmax.lab.shape_candidates import candidates, shared_bytes
from fused_softmax.lab.tune_shapes import (
    OPS,
    Request,
    Workload,
    compile_ahead,
    drawn,
    failures,
    jobs_of,
    lines,
    outcomes,
    run,
)
from fused_softmax.launch import spatial
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


def problem_of(workload: Workload) -> SpatialProblem:
    return planes_problem(workload.n_cols, workload.inner, workload.dtype, backward=workload.backward, log=workload.log)


def session(**options: Any) -> Session:
    return Session(header(CPU, interpreted=True), (), CPU, 0.001, **options)


@pytest.mark.parametrize("op", OPS)
def test_candidates_are_different_and_of_all_families(op: str):
    problem = problem_of(Workload(op, "bfloat16", 103, 42))
    plans = candidates(problem, SM_90)
    assert len(plans) == len(set(plans)) > 40
    assert {bool(p.gathered) + 2 * bool(p.periodic) + 4 * bool(p.skewed) for p in plans} == {0, 1, 2, 4}
    assert {p.ctas > 1 for p in plans} == {True, False}
    some = candidates(problem, SM_90, 7, seed=3)
    assert len(some) == 7 and set(some) < set(plans)
    assert some == candidates(problem, SM_90, 7, seed=3) != candidates(problem, SM_90, 7, seed=4)


def test_small_planes_have_candidates_of_few_warps():
    plans = candidates(planes_problem(453, 9, "bfloat16", backward=True), SM_90)
    assert {2, 4, 8} <= {plan.num_warps for plan in plans if plan.periodic and plan.ctas == 1}
    plans = candidates(planes_problem(245, 5, "bfloat16", backward=True), SM_90)
    assert 1 in {plan.num_warps for plan in plans if plan.periodic}


@pytest.mark.parametrize("op", OPS)
def test_lean_tiles_are_candidates(op: str):
    """The rule came from such a search, which finds its plans again."""
    for workload in (Workload(op, "bfloat16", 1000, 4096), Workload(op, "float32", 700, 2048)):
        config = lean_config(problem_of(workload), SM_90)
        assert config is not None
        plans = candidates(problem_of(workload), SM_90)
        assert (config.ctas, config.num_warps, config.inner) in {(p.ctas, p.num_warps, p.rows) for p in plans}


@pytest.mark.interpreted
@pytest.mark.parametrize("op", few(("softmax", "log_softmax_backward"), OPS))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_candidates_give_right_results(op: str, dtype: str):
    """Of random shapes; the session compares each with float64, in memory of NaN."""
    workloads = drawn(4, 12, (2, 90), (2, 90), (op,), (dtype,))
    request, device = Request(tuple(workloads), (1, 9000), 4, 2), DEVICES["interpreter"]
    done: list[Workload] = []
    records = run(request, session(timed=False), device, done.append)
    assert done == workloads
    assert [(r.system, r.note) for r in records if r.status != "ok"] == []
    of_each = 5 * 2  # systems, and sizes
    for i, w in enumerate(workloads):
        mine = records[i * of_each : (i + 1) * of_each]
        assert [r.outer for r in mine] == [1] * 5 + [max(1, round(9000 / (w.n_cols * w.inner)))] * 5
        assert {(r.op, r.dtype, r.n_cols, r.inner) for r in mine} == {(op, dtype, w.n_cols, w.inner)}
        plans = [plan_text(plan) for plan in request.plans(w, device)]
        assert [r.plan for r in mine[1:5]] == [r.plan for r in mine[6:]] == plans
    assert len(records) == 4 * of_each


@pytest.mark.interpreted
def test_each_plan_runs_itself(monkeypatch: pytest.MonkeyPatch):
    ran: list[Any] = []
    recipe = spatial.softmax_recipe
    monkeypatch.setattr(
        spatial, "softmax_recipe", lambda tensors, plan, *rest: ran.append(plan) or recipe(tensors, plan, *rest)
    )
    workload, device = Workload("softmax", "float32", 9, 20), DEVICES["interpreter"]
    request = Request((workload,), (180,), 5)
    run(request, session(timed=False), device)
    assert ran[-5:] == request.plans(workload, device)  # after the planner's


SMALL = [
    Workload("softmax", "bfloat16", 85, 3),
    Workload("softmax", "float32", 900, 8),
    Workload("softmax_backward", "float32", 95, 10352),
    Workload("softmax", "bfloat16", 1800, 6002),
]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("ctas", "positions", "unit"), [(1, 64, 4), (16, 256, 8), (4, 128, 0), (1, 32, 0)])
def test_shared_memory_is_what_kernels_declare(backward: bool, ctas: int, positions: int, unit: int):
    values, cols = 1 if backward else 2, 8
    declared = spatial_cluster._declare_ptx(ctas, values, positions) if ctas > 1 else ""
    declared += skewed_merge._declare_ptx(values, cols, positions, unit) if unit else ""
    n_bytes = sum(map(int, re.findall(r"\.b8 \w+\[(\d+)\]", declared))) + 8 * declared.count(".shared .align 8 .b64")
    assert shared_bytes(backward, ctas, cols, positions, unit) == n_bytes and (n_bytes > 0) == (ctas > 1 or unit > 0)


@pytest.mark.parametrize("device", ["sm_90", "sm_80"])
def test_what_kernels_ask_of_tiles(device: str):
    """Columns for each CTA; aligned accesses in skewed and overlapping tiles, and positions of their own."""
    for workload in drawn(60, 3, (2, 1500), (2, 5000), OPS, ("bfloat16", "float32")) + SMALL:
        problem = problem_of(workload)
        itemsize, starts = problem.itemsize, problem.starts
        for plan in candidates(problem, DEVICES[device]):
            where = f"{workload.label}: {plan}"
            if plan.periodic or plan.gathered:
                vectors, threads = problem.n_cols * problem.inner // plan.vec, 32 * plan.num_warps
                assert plan.gathered or vectors > (plan.ctas - 1) * threads and 2 * vectors > plan.ctas * threads, where
                assert plan.periodic or plan.vectors_per_chunk < 2 * problem.n_cols, where
                continue
            assert (
                plan.ctas <= DEVICES[device].max_cluster and problem.n_cols > (plan.ctas - 1) * plan.vectors_per_chunk
            ), where
            tiles = "overlapping" in plan.why, plan.skewed > 0
            declared = shared_bytes(problem.backward, plan.ctas, plan.vectors_per_chunk, plan.rows, plan.skewed)
            assert declared <= 48 << 10, where
            if any(tiles):
                assert plan.rows > plan.overlap and problem.in_phase, where
                assert (plan.skewed or starts) % plan.vec == 0, where
            elif plan.ctas > 1:
                assert starts * itemsize == 32, where
            if plan.ctas > 1 or plan.skewed:
                assert plan.rows <= 32 * plan.num_warps, where
            if any(tiles) or (plan.ctas > 1 and plan.rows < 16):
                # 3 positions in skewed tiles of 4 on 2 CTAs, whose threads had less: a misaligned address on a GPU
                assert plan.rows * plan.vectors_per_chunk >= 32 * plan.num_warps * plan.vec, where
            assert (plan.max_registers or 0) * 32 * plan.num_warps <= DEVICES[device].registers, where
            thread_bytes = plan.num_warps * 32 and plan.rows * plan.vectors_per_chunk * itemsize // (
                32 * plan.num_warps
            )
            words = (1 + problem.backward) * plan.chunks * thread_bytes // 4
            assert words <= 96, where
            assert words <= 28 or plan.max_registers is not None, where


@pytest.mark.interpreted
def test_all_plans_are_timed_next_to_the_planners_and_ranked():
    workload, other = Workload("softmax", "bfloat16", 5, 24), Workload("softmax", "bfloat16", 3, 8)
    saved: list[tuple[bool, int]] = []
    timed = session(
        stopwatch=lambda by, device: ByName(), save=lambda head, records: saved.append((head.finished, len(records)))
    )
    request = Request((workload, other), (120, 1200), 6)
    records = run(request, timed, DEVICES["interpreter"])
    # six plans, the planner's and the ceiling, of each workload and size
    assert saved == [(False, 8), (False, 16), (False, 24), (False, 32), (True, 32)]
    assert {r.timed_by for r in records} == {"a fake"}
    assert from_json(to_json(timed.head, records))[1] == records
    ((today, *others), (of_other, *_)) = outcomes(records)
    assert (today.workload, of_other.workload) == (workload, other) and (today.gain, today.worst) == (1.0, 1.0)
    assert failures(request, records, outcomes(records)) == []
    assert [o.gain for o in others] == pytest.approx([4, 2, 4 / 3, 1, 4 / 5, 2 / 3])
    assert today.fractions == {120: 0.25, 1200: 0.25} and others[1].fractions == {120: 0.5, 1200: 0.5}
    text = lines([[today, *others]], shown=1)
    assert len(text) == 3 and text[0].startswith("softmax bf16 5x24, 6 other plans; ") and today.plan in text[1]
    assert text[2].split()[:4] == ["4.00", "(4.00)", "1.00", "1.00"] and text[2].endswith(others[0].plan)


def test_a_plan_that_failed_with_one_size_is_not_ranked():
    def record(system: str, outer: int, ms: float | None) -> Record:
        return Record("softmax", system, "float32", 7 * outer, 3, "ok", ms=ms, plan=system, outer=outer, inner=7)

    times = {"fused_softmax": (2.0, 8.0), "plan 0": (1.0, None), "plan 1": (4.0, 2.0)}
    records = [record(name, outer, ms) for name, of in times.items() for outer, ms in zip((1, 9), of, strict=True)]
    records.append(record("plan 2", 9, 1.0))
    ((today, only),) = outcomes(records)
    assert (today.plan, only.plan) == ("fused_softmax", "plan 1")
    assert (only.gain, only.worst) == (pytest.approx(2**0.5), 0.5)
    assert outcomes(records[2:]) == []
    workloads = Workload("softmax", "float32", 3, 7), Workload("softmax", "float32", 4, 7)
    untimed, missing = failures(Request(workloads), records, [[today, only]])
    assert untimed.startswith("softmax fp32 9x3x7, plan 0: ok") and missing == "softmax fp32 4x7: no times"


@pytest.mark.interpreted
def test_a_stopped_session_tunes_no_more(monkeypatch: pytest.MonkeyPatch):
    def interrupt(case: Case, doing: str) -> None:
        if case.n_cols == 3:
            raise KeyboardInterrupt

    done: list[Workload] = []
    workloads = tuple(Workload("softmax", "float32", n, 7) for n in (2, 3, 4))
    stopped = session(timed=False, progress=interrupt)
    records = run(Request(workloads, (20,), 2), stopped, DEVICES["interpreter"], done.append)
    assert stopped.head.stopped == "interrupted" and not stopped.head.finished
    assert done == [workloads[0]] and {r.n_cols for r in records} == {2}


def test_a_size_below_one_plane_is_timed_once():
    cases = Workload("softmax", "float32", 100, 50).cases((1, 4000, 11_000, 24_000), "why")
    assert [(c.outer, c.n_cols, c.inner, c.n_rows, c.reason) for c in cases] == [
        (outer, 100, 50, 50 * outer, "why") for outer in (1, 2, 5)
    ]


def test_workloads_of_a_seed():
    ops, dtypes = ("softmax", "softmax_backward"), ("bfloat16", "float32")
    found = drawn(300, 1, (3, 90), (7, 900), ops, dtypes)
    assert found == drawn(300, 1, (3, 90), (7, 900), ops, dtypes) != drawn(300, 2, (3, 90), (7, 900), ops, dtypes)
    assert len(set(found)) == 300 and {(c.op, c.dtype) for c in found} == {(o, d) for o in ops for d in dtypes}
    assert all(3 <= c.n_cols <= 90 and 7 <= c.inner <= 900 for c in found)
    assert sum(c.inner % 16 == 0 for c in found) > 75 and sum(c.inner % 2 for c in found) > 30
    with pytest.raises(ValueError, match="more than half"):
        drawn(6, 1, (3, 3), (7, 16), ("softmax",) * 3, ("bfloat16",))
    with pytest.raises(ValueError, match="elements or more"):
        drawn(6, 1, (3, 2**16), (7, 2**15), ("softmax",), ("bfloat16",))


@pytest.mark.interpreted
def test_workers_run_each_candidate_once():
    request = Request((Workload("softmax", "bfloat16", 5, 24), Workload("softmax_backward", "float32", 3, 7)), most=3)
    wanted = jobs_of(request, DEVICES["interpreter"])
    assert wanted == [(w, plan) for w in request.workloads for plan in request.plans(w, DEVICES["interpreter"])]
    assert len(wanted) == 6
    ticks: list[None] = []
    assert compile_ahead(wanted, 2, lambda: ticks.append(None)) == [""] * 6 == [""] * len(ticks)
    # one that no kernel can run fails, and the others run
    impossible = replace(wanted[0][1], regime="spatial_two_pass", part_cols=0)
    done = compile_ahead([(wanted[0][0], impossible), wanted[1]], 1)
    assert done[0].startswith("ZeroDivisionError") and done[1:] == [""]


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The clock and the GPU's ceilings replaced: the rest is what runs on a GPU. Returns the sessions' seconds."""
    seconds: list[Any] = []
    monkeypatch.setattr(cli, "expect_gpu", lambda: None)
    monkeypatch.setattr(ceilings, "measured", lambda device: {"copy": 9.0})
    monkeypatch.setattr(bench, "stopwatch_for", lambda timed_by, device: ByName())
    interleave = bench.interleave
    monkeypatch.setattr(bench, "interleave", lambda *of: seconds.append(of[2]) or interleave(*of))
    return seconds


@pytest.mark.interpreted
def test_the_command_prints_and_writes_what_it_timed(on_a_gpu: list[Any], tmp_path: Path):
    line = "tune --shapes 5x24,3x7,5x24 --plans 3 --elements 120,1200 --dtype bf16 --op softmax_backward --workers 0"
    result = CliRunner().invoke(app, [*line.split(), "--seed=4", "--record", str(tmp_path / "a" / "tune.json")])
    assert result.exit_code == 0, result.output
    head, records = read_results(tmp_path / "a" / "tune.json")
    assert head.finished and head.seed == 4 and head.ceilings == {"copy": 9.0}
    found = list(dict.fromkeys((r.n_cols, r.inner, r.op, r.dtype) for r in records))
    assert found == [(5, 24, "softmax_backward", "bfloat16"), (3, 7, "softmax_backward", "bfloat16")]
    assert [r.system for r in records if r.plan] == ["fused_softmax", "plan 0", "plan 1", "plan 2"] * 4
    assert result.stdout.splitlines() == lines(outcomes(records)) and len(result.stdout.splitlines()) == 2 * 5
    assert on_a_gpu == [0.003] * 4


@pytest.mark.interpreted
def test_the_command_draws_shapes_and_compiles_first(on_a_gpu: list[Any], monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    monkeypatch.setattr(
        tune_shapes, "compile_ahead", lambda wanted, workers, tick: asked.append((wanted, workers)) or [""]
    )
    limits = "--columns 2:9 --inner 3:20 --elements 100 --plans 2 --seconds 0.001 --workers 3 --seed 5"
    result = CliRunner().invoke(app, ["tune", "--random-shapes=2", *limits.split()])
    assert result.exit_code == 0, result.output
    drawn_here = drawn(2, 5, (2, 9), (3, 20), ("softmax",), ("bfloat16", "float32"))
    assert [line.split(",")[0] for line in result.stdout.splitlines()[::4]] == [w.label for w in drawn_here]
    ((wanted, workers),) = asked
    assert workers == 3 and wanted == jobs_of(Request(tuple(drawn_here), (100,), 2, 5), DEVICES["interpreter"])
    assert "compiled 1 of 4, 3 processes" in result.stderr and on_a_gpu == [0.001] * 2


@pytest.mark.interpreted
def test_a_command_without_times_says_so_and_fails(on_a_gpu: list[Any], monkeypatch: pytest.MonkeyPatch):
    def broken(*of: Any) -> Any:
        raise RuntimeError("no clock")

    monkeypatch.setattr(bench, "interleave", broken)
    result = CliRunner().invoke(app, "tune --shapes 5x24 --plans 1 --elements 120 --dtype bf16 --workers 0".split())
    assert result.exit_code == 1 and result.stdout == ""
    own, other, missing = filter(str.strip, result.stderr.splitlines())
    assert "fused_softmax: ok not timed" in own and "plan 0: ok not timed" in other
    assert missing == "softmax bf16 5x24: no times"
