"""What a run draws, in which order, and how records of several runs add up."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from random import Random

import pytest
from typer.testing import CliRunner

from fused_softmax.lab.cli import app
from fused_softmax.lab.fuzz import draw, record, request, session
from fused_softmax.lab.fuzz.draw import Budget, draw_cases, draw_class
from fused_softmax.lab.registry import OPS


def test_two_records_of_other_seeds_have_one_sum(tmp_path, capsys):
    """Each run wrote a file of its own; the sum holds both, and no run twice."""
    files = [tmp_path / f"{seed}.json" for seed in (1, 2)]
    for seed, file in zip((1, 2), files, strict=True):
        findings = session.Findings()
        findings.cases["softmax", "function", "float32"] = 4 + seed
        findings.cases["softmax", ("vmap", "module")[seed - 1], "float32"] = 7
        findings.wrong["softmax", "function", "float32"] = seed - 1
        findings.reached = {("softmax_resident", ("ROWS=1", "ROWS=many")[seed - 1])}
        record.write(file, session.Request(seed=seed), findings, None)
    total = tmp_path / "sum.json"
    command = app, ["fuzz", "--record", str(total), "--add", ",".join(map(str, files))]
    ended = CliRunner().invoke(*command)
    assert ended.exit_code == 0 and "25 cases in 3 cells, at least 7 in each" in " ".join(ended.output.split())
    known = json.loads(total.read_text())
    rows = {row["way"]: (row["cases"], row["wrong"], row["seeds"]) for row in known["rows"]}
    assert rows == {"function": (11, 1, [1, 2]), "module": (7, 0, [2]), "vmap": (7, 0, [1])}
    assert {("softmax_resident", "ROWS=1"), ("softmax_resident", "ROWS=many")} == set(
        map(tuple, known["coverage"]["reached"])
    )
    assert ["softmax_resident", "ROWS=1"] not in known["coverage"]["not_reached"]
    assert len(known["header"]["runs"]) == 2
    again = CliRunner().invoke(*command)
    assert again.exit_code == 2 and "run of seed 1" in again.output
    assert json.loads(total.read_text()) == known
    files[0].write_text(json.dumps({**json.loads(files[0].read_text()), "kernel_hash": "0"}))
    total.unlink()
    other = CliRunner().invoke(*command)
    assert other.exit_code == 2 and "other kernels" in " ".join(other.output.split()) and not total.exists()
    assert CliRunner().invoke(app, ["fuzz", "--add", str(files[0])]).exit_code == 2


def test_the_emptiest_op_and_dtype_is_drawn_first():
    asked = session.Request(("softmax", "cross_entropy"), dtypes=("float16", "float32"), per_cell=2000, seed=1)
    had = Counter(
        {(op, way, "float16"): 1500 for op in asked.ops for way in request.ways_of(op, asked, "cuda")}
        | {("softmax", way, "float32"): 400 for way in request.ways_of("softmax", asked, "cuda")}
    )
    drawn, least = Counter(had), 0.0
    for unit in session.units(asked, "cuda", Budget(), had=had):
        cells = [(unit.of.op, way, unit.of.dtype) for way in request.ways_of(unit.of.op, asked, "cuda")]
        filled = min(drawn[cell] / request.share(asked, cell[1]) for cell in cells)
        assert filled >= least
        least = filled
        drawn.update({(unit.of.op, way, unit.of.dtype): n for way, n in unit.ways})
    assert request.lacking(asked, "cuda", drawn) == 0
    assert {n for (_, way, _), n in drawn.items() if way == "vmap"} == {2000}


def test_rows_that_lie_apart_have_few_shapes_in_a_class():
    """Their kernels are compiled for what lies between two columns of a row; other rows may be of any number."""
    outer, of_all = set(), set()
    for of in (c for c in (draw_class("softmax", "float32", i, Budget()) for i in range(80)) if not c.last):
        of, inner = dataclasses.replace(of, layouts=(("contiguous", 1), ("offset", 3)), n_cols=60), set()
        for case in draw_cases(of, "function", 40, Budget()):
            if case.dims[0] < len(case.shape) - 1 and case.numel:
                inner.add(math.prod(case.shape[case.dims[0] + 1 :]))
                outer.add(math.prod(case.shape[: case.dims[0]]))
        assert len(inner) <= Budget().shapes
        of_all |= inner
    assert len(of_all) > 8 and len(outer) > 12
    row = dataclasses.replace(of, last=True)
    assert len({case.numel for case in draw_cases(row, "function", 100, Budget())}) > 30


@pytest.mark.parametrize("budget", [Budget(), Budget.interpreted()], ids=["gpu", "interpreted"])
def test_every_class_has_a_case(budget):
    """Wide rows are drawn where their columns lie next to each other; a class without such a case would never end."""
    for seed in range(250):
        for op in OPS:
            of, rng = draw_class(op, "float16", seed, budget), Random(seed)
            assert any(draw._draw(of, "function", rng, budget) for _ in range(300)), of


def test_no_case_is_larger_than_the_budget_says():
    budget, planes = Budget(), 0
    for seed in range(120):
        for op in OPS:
            of = draw_class(op, "float16", seed, budget)
            for case in draw_cases(of, "function", 6, budget):
                over_another = not of.last and len(case.shape) > 1
                elements = budget.planes if over_another else budget.elements
                assert case.numel <= max(elements, case.n_cols, of.n_cols), case
                planes += case.numel > budget.elements and over_another
    assert planes > 20
