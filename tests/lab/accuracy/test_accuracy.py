"""Errors in ULP are as by hand, a wrong result ends the command with 1, and a stale page is found."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fused_softmax as fs
from fused_softmax.lab import reference
from fused_softmax.lab.accuracy import measure, session
from fused_softmax.lab.accuracy.measure import (
    GRADIENT,
    KINDS,
    OPS,
    WIDTH_CLASSES,
    Case,
    Cell,
    Row,
    cases,
    cells,
    errors,
    flushed,
    ulp,
)  # fmt: skip
from fused_softmax.lab.accuracy.table import by_kind, by_width, number
from fused_softmax.lab.cli import app
from pages import markers, numerics, version_runs

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
CLI = CliRunner()
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INF, NAN = math.inf, math.nan
CELL = Cell("softmax", "float32", 1, 64, 0, 2048)


def neighbor(x: torch.Tensor, steps: int) -> torch.Tensor:
    """The number `steps` representable numbers away from zero."""
    bits = torch.int32 if x.dtype == torch.float32 else torch.int16
    return (x.view(bits) + steps).view(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("steps", [0, 1, 3, 90])
def test_neighbors_are_as_many_ulp_apart(dtype: torch.dtype, steps: int):
    # 1.0 and 2.0 are where the distance doubles; the last two are the largest power of two and a subnormal number
    info = torch.finfo(dtype)
    ref = torch.tensor([1.0, 1.25, -2.0, 1e-3, 2.0 ** math.floor(math.log2(info.max)), info.smallest_normal / 2])
    got = neighbor(ref.to(dtype), steps)
    # 90 steps from these cross no power of two
    assert errors(got, ref.to(dtype).double()).tolist() == [steps] * 6


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_at_most_half_an_ulp(dtype: torch.dtype):
    g = torch.Generator().manual_seed(0)
    ref = torch.randn(100_000, generator=g, dtype=torch.float64) * 2.0 ** torch.randint(
        -20, 14, (100_000,), generator=g
    )
    found = errors(ref.to(dtype), ref)
    # torch rounds to float32 on the way to 16 bits
    assert 0.49 < found.max() <= 0.5 + (2**-12 if dtype != torch.float32 else 0.0)


def test_units_are_no_smaller_than_asked():
    ref = torch.tensor([[1e-6, 2.0]], dtype=torch.float64)
    got = torch.tensor([[1.5e-6, 2.0]], dtype=torch.float32)
    of_row = errors(got, ref, ref.amax(1, keepdim=True))
    assert of_row[0, 0].item() == pytest.approx(0.5e-6 / 2**-22, rel=1e-6)
    assert errors(got, ref, 0.0, 2.0**-23)[0, 0].item() == pytest.approx(0.5e-6 * 2**23, rel=1e-6)
    assert ulp(ref, torch.bfloat16)[0, 1] == 2.0**-6


@pytest.mark.parametrize(
    ("got", "ref", "error"),
    [
        (NAN, 1.0, INF), (1.0, NAN, INF), (NAN, NAN, 0.0), (NAN, INF, INF), (INF, NAN, INF),
        (INF, 1.0, INF), (1.0, INF, INF), (INF, INF, 0.0), (-INF, INF, INF), (-INF, -INF, 0.0),
        (65504.0, INF, INF),
        # past 65504, the largest float16, comes 65536
        (INF, 70000.0, 0.0), (65504.0, 70000.0, 1.0), (-INF, -65536.0, 0.0), (INF, -70000.0, INF), (INF, 60000.0, INF),
        (INF, 65520.0, 0.5),
    ],
)  # fmt: skip
def test_nan_and_infinities_out_of_place_are_infinite_errors(got: float, ref: float, error: float):
    found = errors(torch.tensor([got], dtype=torch.float16), torch.tensor([ref], dtype=torch.float64))
    assert found.tolist() == [error]


def test_only_lost_subnormal_numbers_are_flushed():
    ref = torch.tensor([1e-39, 1e-46, 1e-37, 0.0, 1e-39], dtype=torch.float64)
    got = torch.tensor([0.0, 0.0, 0.0, 0.0, 1e-39])
    # 1e-46 rounds to 0; 1e-37 is a normal number
    assert flushed(got, ref).tolist() == [True, False, False, False, False]
    assert measure.compare(got[:2], ref[:2], "value") == (pytest.approx(1e-46 / 2.0**-149), 1)
    assert measure.compare(got[2:3], ref[2:3], "value")[0] > 2**20


def test_cells_draw_the_same_cases_again_half_of_them_odd():
    for cell in cells((), (), 3, None, interpreted=False):
        found = list(cases(cell))
        assert found == list(cases(cell)) and found != list(cases(replace(cell, seed=4)))
        widths = [case.width for case in found[:: len(KINDS)]]
        assert sorted(width % 2 for width in widths) == [0, 0, 1, 1] and [c.kind for c in found[:4]] == list(KINDS)
        assert all(cell.low <= width <= cell.high for width in widths)
        assert all(case.rows * case.width <= max(cell.elements // 16, case.width) for case in found)
    assert {(c.op, c.dtype) for c in cells((), (), 0, 1, True)} == {(op, d) for op in OPS for d in measure.DTYPES}
    assert all(case.rows == 7 for cell in cells(("softmax",), (), 0, 7, False) for case in cases(cell))


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        *((op, ("float16", "bfloat16")[i % 2]) for i, op in enumerate(OPS)),
        *(pytest.param(op, "float32", marks=pytest.mark.extended) for op in OPS),
    ],
)
def test_each_op_is_measured(op: str, dtype: str):
    found = measure.measure(replace(CELL, op=op, dtype=dtype, elements=512), CPU)
    names = {"cross_entropy": ["loss"], "logsumexp": ["lse"], "token_logprobs": ["logprobs", "entropy", "logsumexp"]}
    assert {row.output for row in found} == {*names.get(op, ["y"]), GRADIENT}
    for row in found:
        assert (row.op, row.dtype, row.low, row.high, row.infinite) == (op, dtype, 1, 64, ())
        assert row.cases == 16 or row.output in ("entropy", "logsumexp")
        assert math.isfinite(row.ours) and row.ours == max(ours for ours, _ in row.by_kind.values())
        assert row.torch == max(own for _, own in row.by_kind.values()) and set(row.by_kind) == set(KINDS)
        assert 0.1 < row.ours or row.output == GRADIENT, "nothing is exact"


@pytest.mark.interpreted
@pytest.mark.extended
def test_processes_measure_the_same():
    wanted = [replace(CELL, elements=64), replace(CELL, op="logsumexp", dtype="float16", elements=64)]
    assert dict(session._measured(wanted, 2)) == {cell: measure.measure(cell, CPU) for cell in wanted}


def perturbed(monkeypatch: pytest.MonkeyPatch, change) -> None:
    """Replace softmax by float64's, rounded and then changed."""
    spec = measure.OPS["softmax"]

    def function(x: torch.Tensor, dim: int) -> torch.Tensor:
        exact = torch.softmax(x.double(), dim)
        y = exact.to(x.dtype)
        return y + (change(y.detach()) - y.detach())

    monkeypatch.setattr(measure, "OPS", {**measure.OPS, "softmax": replace(spec, function=function)})


def test_a_result_that_is_changed_by_n_ulp_has_that_error(monkeypatch: pytest.MonkeyPatch):
    case = Case("softmax", "float32", 4, 50, "normal", {"dim": -1}, 0)
    # rounded, then n steps: within half an ULP of n; a number just above a power of two may count half as much
    for n in (0, 1, 16):
        perturbed(monkeypatch, lambda y, n=n: neighbor(y, n))
        y, gradient = measure.evaluate(case, CPU)
        assert n - 0.5 <= y.ours <= n + 0.5 and (y.output, y.unit, y.infinite) == ("y", "value", ())
        assert gradient.unit == "row" and gradient.ours < 3


def test_one_nan_is_an_infinite_error_and_status_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def spoil(y: torch.Tensor) -> torch.Tensor:
        return y.index_fill(1, torch.tensor([y.shape[1] - 1]), NAN)

    monkeypatch.setattr("fused_softmax.lab.cli.options.interpret_without_gpu", lambda: None)
    monkeypatch.setattr(measure, "WIDTH_CLASSES", ((1, 64),))
    arguments = ["accuracy", "--op", "softmax", "--dtype", "fp32", "--rows", "2", "--workers", "1"]
    perturbed(monkeypatch, lambda y: y)
    right = CLI.invoke(app, [*arguments, "--record", str(tmp_path / "right.json")])
    assert right.exit_code == 0, right.output
    perturbed(monkeypatch, spoil)
    wrong = CLI.invoke(app, [*arguments, "--record", str(tmp_path / "wrong.json")])
    assert wrong.exit_code == 1 and "infinite / 0." in wrong.stdout, wrong.output
    assert "WRONG 2 x" in wrong.stdout and "y has a NaN or an infinity out of place" in wrong.stdout
    head, (y, gradient) = session.load(tmp_path / "wrong.json")
    assert y.ours == INF and len(y.infinite) == 16 and y.torch < 100 and head["rows"] == 2
    assert session.load(tmp_path / "right.json")[1][0].infinite == ()


def test_an_exception_of_ours_is_status_1(monkeypatch: pytest.MonkeyPatch):
    def fails(x: torch.Tensor, dim: int) -> torch.Tensor:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(measure, "OPS", {"softmax": replace(measure.OPS["softmax"], function=fails)})
    (row,) = measure.evaluate(Case("softmax", "float32", 4, 50, "normal", {"dim": -1}, 0), CPU)
    assert row.ours == INF and row.infinite[0].endswith("raises ZeroDivisionError: a defect")


ROWS = [
    Row("softmax", "y", dtype, *WIDTH_CLASSES[at], "value", ours, 0.5, "1 x 7, wide", "1 x 7, normal", 3, 0, 16, 112,
        {"normal": (ours, 0.5), "wide": (0.25, 0.25)})
    for dtype in ("float32", "bfloat16") for at, ours in enumerate((1.04, 12345.0))
]  # fmt: skip


def test_a_record_is_read_as_it_was_written():
    head = {"device": "a GPU", "seed": 5}
    infinite = replace(ROWS[0], ours=INF, by_kind={"normal": (INF, 0.5)}, infinite=("why",))
    text = session.to_json(head, [*ROWS, infinite])
    assert json.loads(text)["rows"][-1]["ours"] == "inf" and text.count("\n    {") == 5
    found, rows = session.from_json(text)
    assert rows == [*ROWS[:1], replace(ROWS[1], ours=12340.0, by_kind=rows[1].by_kind), *rows[2:4], infinite]
    assert found["seed"] == 5 and len(found["kernel_hash"]) == 64


def test_tables_have_a_line_for_each_result_and_dtype():
    widths, kinds = by_width(ROWS), by_kind(ROWS)
    assert widths.columns == ("op", "result", "dtype", "unit", "1 to 64", "65 to 1,024")
    assert widths.rows[0] == ("softmax", "y", "bf16", "value", "1.0 / 0.50", "1.2e+04 / 0.50")
    assert kinds.rows[1] == ("softmax", "y", "fp32", "value", "1.2e+04 / 0.50", "0.25 / 0.25")
    assert [number(e) for e in (0.0, 0.996, 9.96, 1234.4, INF)] == ["0.00", "1.0", "10", "1,234", "infinite"]


def test_a_stale_page_is_found_and_rewritten(tmp_path: Path):
    (tmp_path / "docs").mkdir()
    file, recorded = tmp_path / numerics.PAGE, tmp_path / numerics.RECORD
    file.write_text((ROOT / numerics.PAGE).read_text())
    arguments = tmp_path, numerics.PAGE, numerics.tables
    markers.update(*arguments, check=False)
    assert "No run is recorded yet" in file.read_text()
    head = session.header(CPU, False)
    fields = {"seed": 5, "rows": None, "elements_of_a_cell": 2048, "widths_of_a_cell": 4, "values": list(KINDS)}
    session.write_atomically(recorded, session.to_json(session.asdict(head) | fields, ROWS))
    assert not markers.update(*arguments, check=True)
    assert markers.update(*arguments, check=False)
    assert markers.update(*arguments, check=True)
    text = file.read_text()
    assert "| softmax | y | bf16 | value | 1.0 / 0.50 | 1.2e+04 / 0.50 |" in text and "seed 5" in text
    assert "No run is recorded yet" not in text and "ours softmax 12; torch's none" in text
    recorded.write_text(recorded.read_text().replace('"ours": 1.04', '"ours": 2.04'))
    assert not markers.update(*arguments, check=True)
    # such a record is none of the benchmark's
    assert version_runs.measured(tmp_path / "benchmarks" / "results") == []


@pytest.mark.interpreted
def test_an_op_that_only_the_registry_knows_is_measured(monkeypatch: pytest.MonkeyPatch):
    negated = replace(
        measure.OPS["softmax"],
        name="softmin",
        function=lambda x, dim: fs.softmax(-x, dim),
        torch_way=torch.nn.functional.softmin,
        reference=lambda x, dim: reference.softmax(-x, dim),
    )
    monkeypatch.setattr(measure, "OPS", {**measure.OPS, "softmin": negated})
    assert "softmin" in {cell.op for cell in cells((), (), 0, 1, True)}
    found = measure.measure(replace(CELL, op="softmin", elements=64), CPU)
    assert [row.output for row in found] == ["y", GRADIENT] and all(0.0 < row.ours < math.inf for row in found)
