"""The fuzzer on every op, with a fixed seed and a fresh one; and that its parts do what a run relies on.

A failure prints the case, a program that shows it, and the command that runs it again.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode

from fused_softmax.lab.fuzz import (
    coverage,
    differences,
    exactness,
    huge,
    inputs,
    isolated,
    judge,
    layouts,
    pool,
    record,
    request,
    rules,
    scales,
    session,
    stored,
    values,
    ways,
    worker,
)
from fused_softmax.lab.fuzz.draw import Budget, Case, draw_cases, draw_class
from fused_softmax.lab.fuzz.inputs import Inputs
from fused_softmax.lab.fuzz.judge import evaluate
from fused_softmax.lab.fuzz.program import program
from fused_softmax.lab.fuzz.shrink import shrink
from fused_softmax.lab.lessons import load
from fused_softmax.lab.registry import OPS, WAYS

interpreted = pytest.mark.interpreted
CASES = 40  # of each op with the fixed seed, and of all with the fresh one
BUDGET = dataclasses.replace(Budget.interpreted(), elements=1 << 12, rows=4, columns=1 << 15, strided=1 << 8, widest=0)


def run_all(ops: tuple[str, ...], seed: int, cases: int) -> str:
    """What is wrong, as a run shows it."""
    out = io.StringIO()
    request = session.Request(ops, cases=cases, seed=seed)
    assert all(OPS[op].ways for op in ops)
    for unit in session.units(request, "cpu", BUDGET):
        for way, count in unit.ways:
            for case in draw_cases(unit.of, way, count, BUDGET):
                outcome = evaluate(case, "cpu")
                if found := outcome.found():
                    failure = session.Failure(case.to_json(), found, case.to_json(), outcome.largest_excess())
                    session.show(failure, Console(file=out, width=200))
    return out.getvalue()


@interpreted
@pytest.mark.parametrize("op", OPS)
def test_every_op_with_a_fixed_seed(op):
    assert not (wrong := run_all((op,), 7, CASES)), wrong


@interpreted
def test_all_ops_with_a_fresh_seed():
    seed = int.from_bytes(os.urandom(3), "big")
    print(f"seed {seed}")
    assert not (wrong := run_all(tuple(OPS), seed, CASES)), f"seed {seed}\n{wrong}"


def test_a_seed_draws_the_same_cases_and_json_holds_them():
    first, second = (
        list(draw_cases(draw_class("masked_softmax", "float32", 5, BUDGET), "vmap", 9, BUDGET)) for _ in "ab"
    )
    assert first == second
    assert [Case.from_json(case.to_json()) for case in first] == first
    assert len({case.seed for case in first}) == 9


@pytest.mark.parametrize("op", OPS)
def test_every_way_of_an_op_is_drawn(op):
    assert set(OPS[op].ways) <= set(WAYS)
    for way in OPS[op].ways:
        for case in draw_cases(draw_class(op, "float16", 3, BUDGET), way, 5, BUDGET):
            assert case.cell == (op, way, "float16") or way in ("function", "out")
            assert case.n_cols >= 0 and all(0 <= d < max(1, len(case.shape)) for d in case.dims)


@pytest.mark.parametrize("kind", layouts.KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_a_byte_next_to_a_tensor_is_watched(kind, dtype):
    dense = values.values("normal", (2, 3, 4, 5), 3, dtype, torch.Generator().manual_seed(1))
    placed = layouts.place(dense, (kind, 3), "cpu")
    if kind not in ("expanded", "overlapping"):
        assert torch.equal(placed.tensor, dense)
    assert not placed.changed() and not placed.changed_outside()
    first = placed.tensor.storage_offset()
    placed.buffer[first - 1] += 1
    assert placed.changed() and placed.changed_outside()
    placed.buffer.copy_(placed.before)
    if kind not in ("expanded", "overlapping"):
        placed.tensor.fill_(0)
        placed.buffer[first] += 1
        assert placed.changed() and not placed.changed_outside()


@pytest.mark.parametrize("kind", values.KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_values_are_of_their_kind(kind, dtype):
    x = values.values(kind, (6, 50), 1, dtype, torch.Generator().manual_seed(2))
    assert x.dtype == dtype and x.shape == (6, 50)
    assert bool(x.isfinite().all()) == (kind in (*values.FINITE, "subnormal", "near_max", "far_apart"))
    if kind == "constant":
        assert (x == x[:, :1]).all()
    if kind == "subnormal":
        assert (x.abs() < torch.finfo(dtype).smallest_normal * 5).all() and (x != 0).any()


def changed_function(change):
    """softmax with a fault, as the registry's function."""
    real = OPS["softmax"].function

    def function(x, dim=-1, dtype=None, *, out=None):
        return change(x, real(x, dim, dtype) if out is None else real(x, dim, dtype, out=out))

    return function


def write_to_input(x, y):
    x.detach().view(-1)[0].add_(1.0)
    return y


def write_next_to_input(x, y):
    x.detach().as_strided((1,), (1,), x.storage_offset() + x.numel()).fill_(0.0)
    return y


class Again:
    """Other bits with each call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x, y):
        self.calls += 1
        return y * (1 + 2**-23 * self.calls)


@interpreted
@pytest.mark.parametrize(
    "change, what",
    [
        (lambda x, y: y * (1 + 1e-5), "y"),
        (lambda x, y: y.masked_fill(y == y.amax(), float("nan")), "y"),
        (lambda x, y: y.double(), "y is (3, 8) torch.float64"),
        (lambda x, y: y.t().contiguous().t(), "y has strides"),
        (lambda x, y: 1 / 0, "only ours raises: ZeroDivisionError"),
        (write_to_input, "writes to x"),
        (write_next_to_input, "writes to x"),
        (Again(), "y differs from call to call"),
    ],
)  # fmt: skip
def test_the_judge_sees(monkeypatch, change, what):
    case = Case("softmax", "function", "float32", (3, 8), (1,), options={"dim": 1}, seed=4)
    assert not evaluate(case, "cpu").found()
    spec = dataclasses.replace(OPS["softmax"], function=changed_function(change))
    monkeypatch.setitem(OPS, "softmax", spec)
    assert any(problem.startswith(what) for problem in evaluate(case, "cpu").found())


# what a GPU showed to be right and the judge had called wrong
RIGHT = (
    '{"op": "logsumexp", "way": "function", "dtype": "float16", "shape": [20, 12], "dims": [0],'
    ' "layout": ["expanded", 1], "direction": "gradient", "upstream": "quarter", "options": {"dim": 0},'
    ' "seed": 1483734663}',
    '{"op": "token_logprobs", "way": "function", "dtype": "float32", "shape": [1, 3], "dims": [1],'
    ' "layout": ["contiguous", 1], "values": "offset", "direction": "gradient",'
    ' "options": {"temperature_of_rows": "all"}, "seed": 1643535030}',
    '{"op": "token_logprobs", "way": "function", "dtype": "float32", "shape": [2, 1], "dims": [1],'
    ' "layout": ["contiguous", 1], "values": "plus_infinity",'
    ' "options": {"return_logsumexp": true, "temperature_of_rows": "with_inf"}, "seed": 610419585}',
    '{"op": "token_logprobs", "way": "function", "dtype": "float32", "shape": [3], "dims": [0],'
    ' "layout": ["contiguous", 1], "values": "minus_infinity", "options": {"temperature": "inf"}, "seed": 2}',
    '{"op": "masked_softmax", "way": "function", "dtype": "float16", "shape": [134, 3], "dims": [1],'
    ' "layout": ["contiguous", 1], "direction": "gradient", "options": {"mask": {"dtype": "float32",'
    ' "shape": [1, 3], "hidden": "random", "layout": "contiguous", "gradient": true}}, "seed": 503928887}',
    '{"op": "masked_softmax", "way": "function", "dtype": "float16", "shape": [16, 2], "dims": [1],'
    ' "layout": ["contiguous", 1], "direction": "double", "upstream": "quarter", "options": {"scale": 50.0},'
    ' "seed": 999962025}',
    '{"op": "softmax", "way": "operator", "dtype": "float32", "shape": [1, 5], "dims": [1],'
    ' "layout": ["contiguous", 1], "values": "constant", "direction": "double", "upstream": "quarter",'
    ' "options": {"dim": 1, "dtype": "float16"}, "seed": 1275061310}',
    '{"op": "cross_entropy", "way": "function", "dtype": "bfloat16", "shape": [0, 1, 1], "dims": [1],'
    ' "layout": ["contiguous", 1], "direction": "double", "options": {"z_loss": 0.0001}, "seed": 650026210}',
    '{"op": "cross_entropy", "way": "function", "dtype": "float32", "shape": [1, 2, 1, 1], "dims": [1],'
    ' "layout": ["contiguous", 1], "options": {"reduction": "none",'
    ' "weight": {"kind": "random", "dtype": "float32"}}, "seed": 1458631252}',
    '{"op": "cross_entropy", "way": "function", "dtype": "bfloat16", "shape": [1, 3, 10, 1], "dims": [1],'
    ' "layout": ["contiguous", 1], "values": "far_apart", "options": {"label_smoothing": 1.0}, "seed": 264867315}',
    '{"op": "logsumexp", "way": "vmap", "dtype": "float32", "shape": [2, 7, 3, 333], "dims": [3],'
    ' "layout": ["overlapping", 1], "values": "constant", "direction": "gradient", "upstream": "one",'
    ' "options": {"dim": [-1], "batch": 3, "batch_dim": 2}, "seed": 691382608}',
    '{"op": "cross_entropy", "way": "function", "dtype": "float32", "shape": [1, 2, 5, 1, 163], "dims": [1],'
    ' "layout": ["contiguous", 1], "values": "wide", "direction": "gradient", "upstream": "quarter",'
    ' "options": {"softcap": 1000000.0}, "seed": 2054000657}',
    '{"op": "cross_entropy", "way": "function", "dtype": "float32", "shape": [5, 163], "dims": [1],'
    ' "layout": ["contiguous", 1], "direction": "gradient", "options": {"softcap": 30.0}, "seed": 3}',
    '{"op": "cross_entropy", "way": "autocast", "dtype": "bfloat16", "shape": [12, 2, 16], "dims": [1],'
    ' "layout": ["contiguous", 4], "values": "far_apart", "options": {"label_smoothing": 1.0, "z_loss": 0.0001},'
    ' "seed": 1156805220}',
)  # fmt: skip


@interpreted
@pytest.mark.parametrize(
    "case", [Case.from_json(text) for text in RIGHT], ids=lambda case: f"{case.op} {case.direction}"
)
def test_the_judge_leaves_alone(case):
    outcome = evaluate(case, "cpu")
    assert not outcome.found(), outcome.largest_excess()


@interpreted
@pytest.mark.parametrize(
    "index, factor, what",
    [(0, 1 + 2**-7, "d_x"), (1, 1.01, "d_x"), (4, 1.03, "d_mask"), (12, 1.001, "d_x")],
)
def test_the_judge_still_sees_a_gradient_that_is_off(monkeypatch, index, factor, what):
    """By some times what the roundings cost: they count for more where many rows are summed."""
    case = Case.from_json(RIGHT[index]).changed(upstream="random")
    real = ways.run

    def run(case, call, inputs, upstream, **options):
        results = real(case, call, inputs, upstream, **options)
        ours = getattr(call, "__module__", "").startswith("fused_softmax.") and "lab" not in call.__module__
        ours = ours and call is case.spec.function
        return {n: t.detach() * factor if ours and n == what else t for n, t in results.items()}

    monkeypatch.setattr(ways, "run", run)
    assert what in evaluate(case, "cpu").found()


def test_only_rows_with_an_infinity_at_an_infinite_temperature_differ():
    x = torch.tensor([[1.0, torch.inf], [1.0, torch.inf], [1.0, 2.0]])
    temperature = torch.tensor([torch.inf, 2.0, torch.inf])
    given = inputs.Inputs(x, {"temperature": temperature}, {})
    case = Case("token_logprobs", "function", "float32", (3, 2), (1,))
    nan = torch.full((3,), torch.nan)
    assert differences.excused(case, given, "logsumexp", x[:, 1], nan).tolist() == [True, False, False]


def test_torch_s_errors_are_asked_for():
    case = Case("softmax", "function", "float32", (3, 8), (1,), options={"dim": 1, "odd": {"dim": 5}}, seed=4)
    outcome = evaluate(case, "cpu")
    assert not outcome.found() and outcome.error == "IndexError"


def test_the_rule_allows_rounding_and_no_more():
    ref = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64)
    for dtype, fine, coarse in ((torch.float32, 1e-7, 1e-6), (torch.bfloat16, 2**-10, 2**-7)):
        own = ref.to(dtype)
        for error, expected in ((fine, False), (coarse, True)):
            bad, _ = exactness.wrong((ref + torch.tensor([[error, 0, 0]])).to(dtype), own, ref, exactness.Rule((1,)))
            assert bool(bad.any()) == expected, (dtype, error)


def test_a_failure_is_made_smaller_and_shown_in_ten_lines():
    case = Case(
        "masked_softmax", "function", "float32", (3, 4, 33), (2,), ("padded", 3), "logits", "gradient", "random",
        {"mask": {"dtype": "bool", "shape": [4, 33], "hidden": "random", "layout": "step"}, "scale": 2.0}, 9,
    )  # fmt: skip
    smallest = shrink(case, lambda c: c.shape[-1] >= 5 and "mask" in c.options, 5.0)
    assert smallest.shape == (1, 5) and smallest.layout == ("contiguous", 1) and "scale" not in smallest.options
    assert smallest.options["mask"]["shape"] == [1, 5] and smallest.direction == "forward"
    lines = program(smallest)
    assert len(lines) <= 10
    out: dict[str, object] = {}
    exec("\n".join(lines), out)
    assert out["x"].shape == (1, 5) and out["mask"].dtype == torch.bool


def test_what_was_not_reached_is_named():
    wanted = coverage.everything()
    kernels = {name for name, flag in wanted if not flag}
    assert {"softmax_resident", "softmax_strided", "cross_entropy_resident", "masked_softmax_backward"} <= kernels
    assert ("softmax_resident", "UNALIGNED=True") in wanted and ("softmax", "regime cluster") in wanted
    assert ("row_statistics", "PICKS=many") in wanted and ("masked_softmax_resident", "MASK=2") in wanted
    assert ("masked_softmax_backward", "MASK=2") not in wanted


def test_records_of_one_kernel_hash_add_up_and_others_are_refused(tmp_path):
    file = tmp_path / "fuzz.json"
    findings = session.Findings()
    findings.cases["softmax", "function", "float32"] = 5
    findings.reached = {("softmax_resident", "")}
    for seed in (1, 2):
        record.write(file, session.Request(seed=seed), session.Findings(), known := record.read(file))
        record.write(file, session.Request(seed=seed), findings, known)
    known = json.loads(file.read_text())
    (row,) = known["rows"]
    assert (row["cases"], row["wrong"], row["seeds"]) == (10, 0, [1, 2])
    assert ["softmax_resident", ""] in known["coverage"]["reached"]
    assert len(known["header"]["runs"]) == 2 and known["kernel_hash"] == record.kernel_hash()
    file.write_text(json.dumps({**known, "kernel_hash": "0"}))
    with pytest.raises(record.OtherKernels, match="other kernels"):
        record.read(file)


def test_a_run_for_each_cell_counts_what_the_record_has_and_stops_where_all_are_full(monkeypatch, tmp_path):
    """Cases are counted and not run; a unit in five is lost, as in a process that is killed."""
    given = []

    class Counting:
        device = "cuda"

        def __init__(self, *_):
            pass

        def run(self, tasks, end=None):
            for unit in tasks:
                given.append(unit)
                if len(given) % 5:
                    for way, n in unit.ways:
                        yield worker.Report(cases=Counter({(unit.of.op, way, unit.of.dtype): n}))

        def close(self):
            pass

    monkeypatch.setattr(session, "Pool", Counting)
    monkeypatch.setattr(session.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(session, "Isolated", lambda seed: SimpleNamespace(report=lambda s: worker.Report(), stop=print))
    real = record.header
    monkeypatch.setattr(record, "header", lambda device, interpreted: real(torch.device("cpu"), interpreted))
    monkeypatch.setattr(coverage, "everything", set)
    file, ops = tmp_path / "fuzz.json", ("softmax", "cross_entropy")
    for seed, per_cell, most in ((1, 60, 60), (2, 100, 100), (3, 100, 100)):
        given.clear()
        out = io.StringIO()
        asked = session.Request(ops, dtypes=("float16",), per_cell=per_cell, seed=seed, record=file)
        session.run(asked, Console(file=out))
        assert "short of" not in out.getvalue()
        for row in json.loads(file.read_text())["rows"]:
            assert row["cases"] == (most // 10 if row["way"] in request.SLOW_WAYS else most), row
        assert bool(given) == (seed < 3)  # the last run finds every cell full
        assert len({unit.of for unit in given}) == len(given)
    assert len(json.loads(file.read_text())["rows"]) == 11 + 9
    with pytest.raises(ValueError, match="run of seed 2"):
        record.check(file, 2)
    record.check(file, 4)


def test_rows_beyond_the_widest_columns_get_few_cases():
    asked = session.Request(("softmax",), ("function",), ("float32",), per_cell=20_000, seed=1)
    drawn = list(session.units(asked, "cuda", Budget()))
    wide = [unit for unit in drawn if unit.of.n_cols > Budget().columns]
    assert 0.03 * len(drawn) < len(wide) < 0.1 * len(drawn)
    assert {n for unit in wide for _, n in unit.ways} <= {request.PER_CLASS // 8}
    whole = [unit.of.n_cols % 64 == 0 for unit in wide]
    assert any(whole) and not all(whole)


def test_workers_take_the_visible_gpus_in_turn(monkeypatch):
    """Each starts with one GPU in its environment, and so does the one that comes in its place."""
    started = []

    class Process:
        def __init__(self, **_):
            pass

        def start(self):
            started.append(os.environ.get("CUDA_VISIBLE_DEVICES"))

        def terminate(self):
            pass

        join = is_alive = lambda *_: False

    monkeypatch.setattr(pool._SPAWN, "Process", Process)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    workers = pool.Pool(5, "cuda")
    assert started == ["0", "1", "0", "1", "0"] and "CUDA_VISIBLE_DEVICES" not in os.environ
    workers._replace(workers.workers[3])
    assert started[5:] == ["1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7, GPU-3b")
    pool.Pool(3, "cuda")
    assert started[6:] == ["7", "GPU-3b", "7"] and os.environ["CUDA_VISIBLE_DEVICES"] == "7, GPU-3b"
    pool.Pool(2, "cpu")
    assert started[9:] == ["7, GPU-3b"] * 2  # as it is


@interpreted
def test_a_kind_is_made_smaller_once_after_the_record_is_written(monkeypatch, tmp_path):
    spec = dataclasses.replace(OPS["softmax"], function=changed_function(lambda x, y: y * 1.01))
    monkeypatch.setitem(OPS, "softmax", spec)
    file, made_smaller = tmp_path / "fuzz.json", []

    def counted(case, fails, seconds):
        assert json.loads(file.read_text())["rows"], "the record is not written yet"
        made_smaller.append(seconds)
        return shrink(case, fails, 0.5)

    monkeypatch.setattr(worker, "shrink", counted)
    out = io.StringIO()
    request = session.Request(("softmax",), ("function",), cases=24, seed=2, record=file)
    findings = session.run(request, Console(file=out, width=200))
    assert findings.wrong.total() > len(findings.distinct) == len(made_smaller)
    assert max(made_smaller) <= session.SHRINK_SECONDS
    rows = json.loads(file.read_text())["rows"]
    assert sum(row["cases"] for row in rows) == 24, "the second write adds the run again"
    *counts, last = out.getvalue().splitlines()[-1 - len(findings.counts) :]
    assert last.startswith(f"seed 2: 24 cases, {findings.wrong.total()} wrong")
    assert all(" wrong: softmax, function, " in line for line in counts)


@pytest.mark.extended
@interpreted
def test_a_run_of_seconds_ends_in_time_and_a_terminated_one_says_what_it_had(tmp_path):
    file, text = tmp_path / "fuzz.json", [sys.executable, "-m", "fused_softmax", "fuzz", "--workers", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    running = subprocess.Popen(
        [*text, "--seconds", "300", "--record", str(file)], env=environment, stdout=subprocess.PIPE, text=True
    )
    time.sleep(15)
    running.terminate()
    said, _ = running.communicate(timeout=20)
    assert running.returncode == 130 and said.rstrip().endswith("interrupted"), said
    assert "rows" in json.loads(file.read_text())


def double_the_last_row(x, y):
    return torch.cat([y[:-1], y[-1:] * 2]) if y.shape[0] == 70 else y


@interpreted
def test_rows_of_huge_tensors_are_judged_at_both_ends(monkeypatch):
    report = huge.run_huge(tuple(OPS), 3, n_rows=70, n_cols=40, device="cpu")
    assert not report.failures
    assert report.cases.total() == len(OPS) + 3  # three ops take any dim
    monkeypatch.setitem(
        OPS, "softmax", dataclasses.replace(OPS["softmax"], function=changed_function(double_the_last_row))
    )
    (failure,) = huge.run_huge(("softmax",), 3, n_rows=70, n_cols=40, device="cpu").failures
    assert failure.problems == ["y of rows 38 to 70", "dx of rows 38 to 70"]


# --- what the judge allows, and no more -------------------------------------------------------------------------------


STORED = {
    "gradient": {"shape": (2, 124_587), "values": "offset", "upstream": "quarter", "seed": 1425354846},
    "double": {"shape": (1, 533_072), "values": "constant", "upstream": "expanded", "seed": 962782098},
}


@interpreted
@pytest.mark.parametrize("direction", STORED)
def test_a_gradient_is_made_of_the_output_as_it_is_stored(direction):
    """So many columns of float16 are subnormal; equal ones are all off by the same."""
    case = Case("masked_softmax", "function", "float16", dims=(1,), direction=direction, **STORED[direction])
    case = case.changed(options={"scale": 2.0} if direction == "double" else {})
    assert not evaluate(case, "cpu").found()


@interpreted
def test_a_mask_of_one_column_has_a_gradient_that_cancels():
    mask = {"dtype": "float32", "shape": [2, 1, 1, 1], "hidden": "prefix", "layout": "contiguous", "gradient": True}
    case = Case(
        "masked_softmax", "function", "float32", (2, 1, 1, 6143), (3,), direction="gradient", options={"mask": mask},
        seed=1744813596,
    )  # fmt: skip
    assert not evaluate(case, "cpu").found()


def test_a_logsumexps_gradient_is_judged_by_the_output_as_it_is_stored():
    case = Case("logsumexp", "function", "float32", (2, 3), (1,), direction="gradient", options={"dim": 1})
    lse, d_x = torch.tensor([8.0, 1.0], dtype=torch.float64), torch.full((2, 3), -0.25, dtype=torch.float64)
    drawn = inputs.make(case, "cpu")
    off = stored.of_stored_logsumexp(case, drawn, {"lse": lse, "d_x": d_x}, torch.tensor([8.5, 1.0]))
    exponent = (drawn.x.detach().double() - lse[:, None]).abs()
    by_lse = torch.tensor([[0.5], [0.0]], dtype=torch.float64).expm1()
    torch.testing.assert_close(off, 0.25 * (by_lse + 2**-23 * (exponent + 2)))


def test_what_rounding_a_sum_over_rows_may_cost_follows_its_terms():
    p, dy = torch.full((3, 4), 0.25, dtype=torch.float64), torch.ones(3, 4, dtype=torch.float64)
    given = inputs.Inputs(p, {}, {})
    for shape, n_terms in (((3, 1), 4), ((1, 1), 12), ((4,), 3)):
        allowed = stored.of_summed_rows(given, p, p, dy, torch.empty(shape), 0.0, 0.0)
        assert allowed.shape == shape
        torch.testing.assert_close(allowed, torch.full(shape, 4 * exactness.EPS * 0.25 * n_terms, dtype=torch.float64))


def test_torchs_own_answer_does_not_lie_on_its_input():
    case = Case("log_softmax", "out", "float32", (3, 4), (1,), options={"dim": 1, "out": "partly"}, seed=2)
    given = inputs.make(case, "cpu")
    theirs = ways.function(case, given, "cpu", ours=False)(given.x, **given.arguments)
    assert torch.equal(theirs, torch.log_softmax(given.x, 1)) and not given.placed["x"].changed()


@interpreted
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("out", ["same", "transposed"])
def test_an_output_whose_elements_share_memory_is_refused_as_torch_refuses_it(op, out):
    case = Case(op, "out", "bfloat16", (2, 2), (1,), ("expanded", 1), options={"dim": -1, "out": out}, seed=2)
    outcome = evaluate(case, "cpu")
    assert not outcome.found() and outcome.error == "RuntimeError"


def test_equal_bits_are_asked_where_the_kernels_promise_them():
    """Not of a scale that only the formula takes, and not where PyTorch's scatter_add adds with atomics."""
    case = Case("masked_softmax", "batch_invariant", "float32", (2, 5), (1,), options={"scale": 0.5})
    assert judge._has_rows(case, inputs.make(case, "cpu"))
    case = case.changed(options={"scale": 1e-50})
    assert not judge._has_rows(case, inputs.make(case, "cpu"))
    case = Case("token_logprobs", "function", "float32", (2, 5), (1,), direction="gradient")
    assert judge._promises_bits(case) and not judge._promises_bits(case.changed(direction="double"))


def test_rows_of_losses_are_compared_where_equal_bits_are_promised():
    case = Case("cross_entropy", "function", "float32", (2, 5, 3), (1,), options={"reduction": "none"})
    assert judge._has_rows(case, inputs.make(case, "cpu"))
    assert not judge._has_rows(case.changed(options={"reduction": "mean"}), inputs.make(case, "cpu"))
    case = case.changed(shape=(2, 5))
    assert judge._has_rows(case, inputs.make(case, "cpu"))
    assert not judge._has_rows(case.changed(layout=("transposed", 1)), inputs.make(case, "cpu"))


def test_views_cut_from_more_columns_are_compared_where_they_fold():
    x = torch.arange(30.0).view(2, 5, 3)
    placed = layouts.place(x, ("cut", 2), "cpu")
    assert placed.tensor.stride() == (21, 3, 1) and torch.equal(placed.tensor, x) and not placed.changed()
    case = Case("softmax", "function", "float32", (2, 5, 3), (1,), ("cut", 2))
    assert judge._has_rows(case, inputs.make(case, "cpu"))
    assert not judge._has_rows(case.changed(dims=(2,)), inputs.make(case, "cpu"))


def test_an_ignored_row_is_excused_for_what_is_in_it_alone():
    case = Case(
        "cross_entropy", "function", "float32", (4, 3), (1,), direction="gradient",
        options={"ignored": "all", "ignore_index": -100},
    )  # fmt: skip
    given = inputs.make(case, "cpu")
    given.x = given.x.detach()
    given.x[1, 2], given.x[2, 0] = torch.inf, torch.nan
    zero, nan = torch.zeros(4, 3), torch.full((4, 3), torch.nan)
    assert differences.excused(case, given, "d_x", zero, nan)[:, 0].tolist() == [False, True, True, False]


def test_a_smoothed_loss_may_be_infinite_only_where_log_p_overflows():
    case = Case("cross_entropy", "function", "float32", (1, 3), (1,), options={"label_smoothing": 0.1})
    given, inf, nan = inputs.make(case, "cpu"), torch.tensor(torch.inf), torch.tensor(torch.nan)
    assert not bool(differences.excused(case, given, "loss", inf, nan))
    given.x[0, 0], given.x[0, 1] = 3e38, -3e38
    assert bool(differences.excused(case, given, "loss", inf, nan))
    given.x[0] = torch.tensor([1.0, -3e38, -3e38])  # finite each, but not their sum
    assert bool(differences.excused(case, given, "loss", inf, nan))


def test_a_gradient_in_place_may_overflow_only_where_that_for_1_does():
    options = {"z_loss": 1.0, "inplace_backward": True}
    case = Case("cross_entropy", "function", "float16", (2, 3), (1,), direction="gradient", options=options)
    given, inf = inputs.make(case, "cpu"), torch.full((2, 3), torch.inf)
    given.x = given.x.detach()
    given.x[0], given.x[1] = 1000.0, 60000.0
    assert rules.overflows_in_place(case, given, "d_x", inf).tolist() == [[False] * 3, [True] * 3]
    assert not rules.overflows_in_place(case, given, "d_x", torch.ones(2, 3)).any()
    assert rules.overflows_in_place(case.changed(options={"z_loss": 1.0}), given, "d_x", inf) is None


class Waits(TorchDispatchMode):
    """Which operators ask for a tensor's value."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", OPS)
def test_judging_waits_for_no_value(monkeypatch, op):
    """A value that the host asks for waits for the GPU; a batch of cases waits once."""
    real, n_judged, waits = judge._compare, 0, Waits()

    def compare(*arguments):
        nonlocal n_judged
        n_judged += 1
        with waits:
            real(*arguments)

    spec = OPS[op]
    monkeypatch.setitem(OPS, op, dataclasses.replace(spec, function=spec.torch_way))
    monkeypatch.setattr(judge, "_compare", compare)
    for seed in range(24):
        of = dataclasses.replace(draw_class(op, "float32", seed, BUDGET), n_cols=9)
        for case in draw_cases(of, "function", 4, BUDGET):
            if "odd" not in case.options and case.dtype == "float32" and "inplace_backward" not in case.options:
                evaluate(case.changed(seed=case.seed // 4 * 4 + 2), "cpu")
    assert n_judged > 50 and not waits.seen


def test_whatever_ends_an_isolated_process_after_it_is_ready_is_read():
    compiled = compile(isolated._PROGRAM.format(n=3, rows=9, bad=7, dtype="float32", gradient=True), "", "exec")
    said: list[str] = []

    def cross_entropy(x, target):
        if bool((target == 7).any()):
            raise RuntimeError("Triton Error [CUDA]: device-side assert triggered")

    given = {"print": lambda text, flush: said.append(str(text))}
    real = {name: getattr(torch, name) for name in ("randn", "zeros")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn", lambda *shape, device, **options: real["randn"](*shape, **options))
        patch.setattr(torch, "zeros", lambda *shape, device, **options: real["zeros"](*shape, **options))
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr("fused_softmax.cross_entropy", cross_entropy)
        exec(compiled, given)
    assert said == ["ready", "asserted"]


# --- results as a GPU has them, which the interpreter rounds otherwise, or adds up in another order -------------------


class MaskedSoftmaxOfAGPU(torch.autograd.Function):
    """Scores by one multiply-add; the output and its gradient are rounded to nearest as they are stored."""

    @staticmethod
    def forward(ctx, x, mask, scale):
        z = x.detach().double() * scale
        z = z if mask is None else z + mask.detach().double()
        y = torch.softmax(z.float(), -1).to(x.dtype)
        ctx.save_for_backward(y)
        ctx.scale, ctx.mask = scale, None if mask is None else (mask.shape, mask.dtype)
        return y

    @staticmethod
    def backward(ctx, dy):
        y, dy = ctx.saved_tensors[0].float(), dy.float()
        dz = (y * (dy - (dy * y).sum(-1, keepdim=True))).to(ctx.saved_tensors[0].dtype)
        shape, dtype = ctx.mask
        return dz * ctx.scale, dz.float().sum_to_size(shape).to(dtype), None


class SoftmaxOfAGPU(torch.autograd.Function):
    """The output is rounded to nearest as it is stored, and so is its gradient; torch's also stores dy*y."""

    @staticmethod
    def forward(ctx, x, dim, of_torch):
        y = torch.softmax(x.detach().double(), dim).to(x.dtype)
        ctx.save_for_backward(y)
        ctx.described = dim, of_torch
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,), (dim, of_torch) = ctx.saved_tensors, ctx.described
        part = (dy * y).double() if of_torch else dy.double() * y.double()
        d_x = part - y.double() * part.sum(dim, keepdim=True)
        return d_x.to(y.dtype), None, None


def softmax_of_a_gpu(x, dim):
    return SoftmaxOfAGPU.apply(x, dim, False)


def softmax_of_torch_on_a_gpu(x, dim):
    return SoftmaxOfAGPU.apply(x, dim, True)


class InPlaceOfAGPU(torch.autograd.Function):
    """A loss whose forward stores its gradient for an upstream of 1, which the backward multiplies."""

    @staticmethod
    def forward(ctx, x, options):
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            loss = OPS["cross_entropy"].torch_way(z, **options)
            (d_x,) = torch.autograd.grad(loss, z)
        ctx.save_for_backward(d_x)
        return loss.detach()

    @staticmethod
    def backward(ctx, g):
        (d_x,) = ctx.saved_tensors
        return (d_x.float() * g).to(d_x.dtype), None


def exp2_of_a_gpu(x):
    """ex2.approx is within two units in the last place; this one is below the nearest number."""
    return x.exp2().nextafter(torch.zeros(())).where(x != 0, 1.0)


def losses_of_16_bits(x, target):
    """Each element by a multiply-add and exp2, in float32; what the row's product lost is undone once, by a factor."""
    x = x.float()
    top = x.amax(1, keepdim=True)
    base = torch.tensor(math.log2(math.e))
    shift = top * base
    row_sum = exp2_of_a_gpu((x.double() * base.double() - shift.double()).float()).sum(1, keepdim=True)
    row_sum = row_sum * exp2_of_a_gpu((shift.double() - top.double() * base.double()).float())
    return ((top - x.gather(1, target.unsqueeze(1))) + row_sum.log2() * math.log(2)).view(-1)


def loss_of_a_gpu(x, target, weight=None, reduction="mean", **options):
    """Rows' losses added up by 256 lanes in turn, and the lanes by a tree."""
    if options.get("inplace_backward"):
        return InPlaceOfAGPU.apply(x, {"target": target, "weight": weight, "reduction": reduction, **options})
    if weight is None:
        each = losses_of_16_bits(x, target)
    else:
        each = torch.nn.functional.cross_entropy(x.float(), target, weight.float(), reduction="none").view(-1)
    lanes = torch.nn.functional.pad(each, (0, -len(each) % 256)).view(-1, 256)
    total = torch.zeros(256)
    for line in lanes:
        total = total + line
    return total.sum()


def masked_softmax_of_a_gpu(x, mask=None, scale=1.0):
    return MaskedSoftmaxOfAGPU.apply(x, mask, scale)


def of_mask(dtype, shape, hidden="none"):
    return {"dtype": dtype, "shape": shape, "hidden": hidden, "layout": "contiguous", "gradient": True}


ON_A_GPU = {
    "a gradient that cancels, of an output that is rounded": Case(
        "masked_softmax", "function", "bfloat16", (1, 3), (1,), direction="gradient", upstream="expanded",
        options={"mask": of_mask("bfloat16", [1, 3], "rows")}, seed=957215853,
    ),
    "such a gradient, summed over rows": Case(
        "masked_softmax", "function", "bfloat16", (2, 2, 64), (2,), values="logits", direction="gradient",
        upstream="expanded", options={"mask": of_mask("bfloat16", [2, 1, 64], "rows")}, seed=612661519,
    ),
    "large scores are rounded": Case(
        "masked_softmax", "function", "float32", (2, 212318), (1,), values="logits",
        options={"scale": 50.0, "mask": of_mask("float16", [])}, seed=1375942531,
    ),
    "equal losses, added up one after the other": Case(
        "cross_entropy", "function", "float16", (433, 2, 76), (1,), values="constant",
        options={"reduction": "sum", "weight": {"kind": "random", "dtype": "float16"}}, seed=443821123,
    ),
    "a row's sum is not exactly 1, as each row's is not": Case(
        "cross_entropy", "function", "bfloat16", (55, 1, 23), (1,), values="offset", options={"reduction": "sum"},
        seed=676735553,
    ),
    "a gradient of subnormal outputs": Case(
        "softmax", "function", "float16", (1, 115914), (1,), values="logits", direction="gradient", upstream="quarter",
        options={"dim": -1}, seed=219646866,
    ),
    "a gradient of equal outputs in two dimensions": Case(
        "softmax", "function", "float16", (1, 151936, 2), (1,), values="offset", direction="gradient",
        upstream="expanded", options={"dim": 1}, seed=224092074,
    ),
    "a mask of more range than the scores": Case(
        "masked_softmax", "function", "float16", (6, 20), (1,), values="constant", direction="gradient",
        upstream="quarter", options={"mask": of_mask("bfloat16", [20], "prefix")}, seed=1827735390,
    ),
    "such a mask of many columns": Case(
        "masked_softmax", "function", "float16", (1, 106481), (1,), direction="gradient", upstream="expanded",
        options={"mask": of_mask("bfloat16", [1, 106481])}, seed=961316408,
    ),
    "a gradient of subnormal numbers that is stored before it is scaled": Case(
        "masked_softmax", "function", "float16", (2, 20_000), (1,), values="constant", direction="gradient",
        upstream="quarter", options={"scale": 5000.0, "mask": of_mask("bfloat16", [20_000])}, seed=858292750,
    ),
    "a gradient that is stored twice": Case(
        "cross_entropy", "function", "bfloat16", (3, 8193), (1,), values="offset", direction="gradient",
        upstream="expanded", seed=622987559,
        options={"reduction": "sum", "weight": {"kind": "random", "dtype": "bfloat16"}, "z_loss": 0.0001,
                 "inplace_backward": True, "ignored": "some", "ignore_index": 8192},
    ),
}  # fmt: skip


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Three ops as a GPU computes them, and the judge's rules for one."""
    monkeypatch.setattr(rules, "interpreting", lambda: False)
    for name, functions in (
        ("softmax", {"function": softmax_of_a_gpu, "torch_way": softmax_of_torch_on_a_gpu}),
        ("masked_softmax", {"function": masked_softmax_of_a_gpu}),
        ("cross_entropy", {"function": loss_of_a_gpu}),
    ):
        monkeypatch.setitem(OPS, name, dataclasses.replace(OPS[name], **functions))


@pytest.mark.parametrize("case", ON_A_GPU.values(), ids=ON_A_GPU)
def test_what_a_gpu_computes_is_right(on_a_gpu, case):
    outcome = evaluate(case, "cpu")
    assert not outcome.found(), outcome.largest_excess()


# what is wrong, by a factor and by a number that is added: some times what the roundings cost
OFF = (
    ("d_mask", 1.03, 0.0),
    ("d_mask", 1.03, 0.0),
    ("y", 1.001, 0.0),
    ("loss", 1 + 3e-5, 0.0),
    ("loss", 1.0, 55 * 23 * 8 * exactness.EPS),
    ("d_x", 1.0, 8 * 2.0**-24),
    ("d_x", 1.0, 8 * 2.0**-24),
    ("d_mask", 1.0, 6 * 8 * 2.0**-24),
    ("d_mask", 1.0, 8 * 2.0**-24),
    ("d_x", 1.0, 5000 * 4 * 2.0**-24),
    ("d_x", 1.03, 0.0),
)


@pytest.mark.parametrize("case, off", list(zip(ON_A_GPU.values(), OFF, strict=True)), ids=ON_A_GPU)
def test_what_a_gpu_computes_is_judged_still(on_a_gpu, monkeypatch, case, off):
    real, (what, factor, added) = ways.run, off
    if what == "d_mask" and not added:
        case = case.changed(upstream="random")

    def run(case, call, given, upstream, **options):
        results = real(case, call, given, upstream, **options)
        if call is case.spec.function:
            results[what] = results[what].detach() * factor + added
        return results

    monkeypatch.setattr(ways, "run", run)
    assert what in evaluate(case, "cpu").found()


@interpreted
def test_what_overflows_on_the_way_may_be_nan_or_infinite_alone(monkeypatch):
    """A gradient beyond float16's largest number makes torch's next one NaN throughout, ours infinite."""
    case = Case(
        "log_softmax", "operator", "float16", (1, 1, 125233), (2,), values="logits", direction="double",
        upstream="expanded", options={"dim": -1}, seed=1351624899,
    )  # fmt: skip
    assert not evaluate(case, "cpu").found()
    nan, large = torch.full((1, 3), torch.nan), torch.tensor([[1.0, 1e5, 2.0]], dtype=torch.float64)
    case = case.changed(shape=(1, 3), dims=(1,))
    for ref in ({"d_x": large, "dd_x": large / 2}, {"d_x": large / 2, "dd_x": large}):
        assert rules.overflows(case, "dd_x", nan, nan, ref).all()
    assert not rules.overflows(case, "dd_x", torch.zeros(1, 3), nan, ref).any()
    assert not rules.overflows(case, "dd_x", nan, torch.zeros(1, 3), ref).any()
    assert not rules.overflows(case, "dd_x", nan, nan, {"d_x": large / 2, "dd_x": large / 2}).any()
    wide, ref = case.changed(dtype="bfloat16"), {"d_x": large, "dd_x": large}
    assert not rules.overflows(wide, "dd_x", nan, nan, ref).any()
    through = wide.changed(options={"dim": -1, "dtype": "float16"})
    assert rules.overflows(through, "dd_x", nan, nan, ref).all()


def test_scores_that_are_rounded_by_whole_numbers_bound_no_output_but_those_of_hidden_columns():
    """Scores of 3e8 are rounded to multiples of 32, so that either of two neighbours may take the row."""
    x = torch.tensor([[3e38, 2.9999999e38, -3e38, 3e38]])
    mask = torch.tensor([[0.0, 0.0, 0.0, -torch.inf]])
    case = Case(
        "masked_softmax", "function", "float32", (1, 4), (1,), values="near_max", direction="forward",
        options={"scale": 1e-30, "mask": {"dtype": "float32", "shape": [1, 4], "hidden": "random"}},
    )  # fmt: skip
    inputs = Inputs(x, {"mask": mask}, {})
    y = torch.softmax(x.double() * 1e-30 + mask, 1)
    allowed = scales.of_scores(case, inputs, y)
    assert allowed[0, :2].min() > 0.99 and allowed[0, 2:].tolist() == [0.0, 0.0]
    # where scores are small, the bound is that of first order
    inputs = Inputs(x * 1e-38, {"mask": mask}, {})
    small = case.changed(options={**case.options, "scale": 0.5})
    y = torch.softmax(x.double() * 0.5e-38 + mask, 1)
    assert scales.of_scores(small, inputs, y).max() < 1e-6
    # a mask breaks ties in float64 only, next to a score that is far from all
    mask = torch.tensor([[0.0, 200.0, 0.0, -torch.inf]])
    inputs = Inputs(torch.tensor([[3e9, 3e9, -3e38, 3e9]]), {"mask": mask}, {})
    tied = case.changed(options={"mask": case.options["mask"]})
    y = torch.softmax(inputs.x.double() + mask, 1)
    allowed = scales.of_scores(tied, inputs, y)
    assert allowed[0, :2].min() > 0.99 and allowed[0, 2:].tolist() == [0.0, 0.0]
    # what a boolean mask or causality hides is 0, whatever the scores
    inputs = Inputs(torch.full((2, 3), 3e38), {"mask": torch.tensor([[True, True, False]])}, {})
    hides = case.changed(shape=(2, 3), options={"scale": 0.5, "causal": True})
    allowed = scales.of_scores(hides, inputs, torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]))
    assert (allowed > 0).tolist() == [[False] * 3, [True, True, False]]


@interpreted
def test_a_lessons_kernel_is_no_coverage():
    before = set(coverage.reached)
    coverage.note(load(2).one_row_kernel, {"BLOCK": 8})
    assert coverage.reached == before
