"""What is written can be read again, and the page needs nothing from elsewhere."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fused_softmax.lab.bench import plots
from fused_softmax.lab.bench.output import Output, page
from fused_softmax.lab.bench.plots import draw, panels_of
from fused_softmax.lab.bench.report import (
    by_width,
    everything,
    failures,
    matrices,
    matrix,
    print_report,
    recorded_results,
)
from fused_softmax.lab.bench.systems import LESSON_NUMBERS
from fused_softmax.lab.record import Header, Record, from_json, header, to_csv, to_json, write_atomically
from fused_softmax.lab.results import gpu_folder, read_folder, read_results
from fused_softmax.lab.timing import FIRST_CALL

INF = float("inf")


def record(system: str, n_cols: int, fraction: float | None = None, status: str = "ok", **more: object) -> Record:
    timed: dict[str, object] = {}
    if fraction:
        timed = {"ms": 0.25 / fraction, "fraction": fraction, "gbps": 4200 * fraction}
        timed |= {"ceiling": "copy", "timed_by": "CUDA events"}
    return Record("softmax", system, "bfloat16", 2**28 // n_cols, n_cols, status, **{**timed, **more})  # type: ignore[arg-type]


RECORDS = [
    record("fused_softmax", 4096, 0.99, error=1e-4),
    record("torch", 4096, 0.31),
    record("05_published", 4096, status="wrong", error=INF, note="all rows, unwritten or NaN"),
    record("04_persistent", 65536, status="out of resources", note="shared memory <b>"),
    record("copy", 4096, 1.0),
]


@pytest.fixture
def head() -> Header:
    return replace(header(torch.device("cpu"), interpreted=True), device="NVIDIA H200")


@pytest.fixture
def repository(tmp_path: Path, head: Header) -> Path:
    write_atomically(tmp_path / "benchmarks" / "results" / "h200" / "ladder.json", to_json(head, RECORDS))
    return tmp_path


def test_json_round_trip_and_no_infinity_in_it(head: Header):
    text = to_json(head, RECORDS)
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert from_json(text) == (head, RECORDS)
    assert from_json(text.replace('"records": [', '"of another version": 1, "records": ['))[1] == RECORDS


def test_csv_has_a_line_for_every_record():
    rows = list(csv.DictReader(io.StringIO(to_csv(RECORDS))))
    assert [row["system"] for row in rows] == [r.system for r in RECORDS]
    assert rows[0]["fraction"] == "0.99" and rows[2]["status"] == "wrong"


def test_matrix_shows_statuses_where_there_is_no_time():
    rows = matrix("softmax", RECORDS)
    assert rows.columns == ("shape", "fused_softmax", "torch", "05_published", "04_persistent", "copy, GB/s")
    assert rows.rows[0][1:] == ("0.990", "0.310", "wrong", "", "4200")
    assert rows.rows[1][4] == "out of resources"
    assert rows.title == "softmax: fraction of copy (higher is better)"


def test_each_op_has_a_matrix_of_its_own_systems():
    gradient = replace(RECORDS[1], op="softmax_backward", ceiling="add")
    assert [(m.title.split(":")[0], m.columns[1:]) for m in matrices([RECORDS[0], gradient])] == [
        ("softmax", ("fused_softmax",)),
        ("softmax_backward", ("torch",)),
    ]


def test_first_calls_are_shown_in_milliseconds_and_never_against_width():
    first = record("torch", 4096, ms=812.25, timed_by=FIRST_CALL)
    assert matrix("softmax", [first]).rows[0][1:] == ("812.2 ms",)
    assert by_width([first]) == [] and by_width([*RECORDS, first]) == by_width(RECORDS)


def test_every_result_shows_resources_and_recorded_times_in_the_columns_that_are_filled(head: Header):
    used = {"registers": 32, "spilled_bytes": 0, "shared_bytes": 786464, "widest_load_bytes": 16}
    used["failed"] = "out of resources on sm_90"
    here = Record("softmax", "04_persistent", "bfloat16", 3, 4096, "ok", error=1e-3, reads=12288, resources=used)
    recorded = {("softmax", "04_persistent", "bfloat16", 4096): (head, record("04_persistent", 4096, 0.87))}
    found = everything([here], recorded)
    cells = dict(zip(found.columns, found.rows[0], strict=True))
    assert cells == {
        "op": "softmax", "shape": "bf16 3x4096", "system": "04_persistent", "status": "ok", "max error": "1.0e-03",
        "reads/MN": "1.00", "registers": "32", "spilled B": "0", "shared B": "786464", "widest load B": "16",
        "on an H200": "out of resources", "recorded": "0.870",
    }  # fmt: skip


def test_failures_are_counted_and_explained_once():
    twice = [*RECORDS, replace(RECORDS[2], n_cols=8192)]
    assert failures(twice) == [
        "05_published, wrong in 2 cases, first softmax bf16 65536x4096: all rows, unwritten or NaN",
        "04_persistent, out of resources in 1 case, first softmax bf16 4096x65536: shared memory <b>",
    ]


def test_terminal_says_that_times_need_a_gpu_only_without_times(head: Header):
    for records, said in ((RECORDS, False), ([replace(RECORDS[0], ms=None, fraction=None)], True)):
        console = Console(record=True, width=150, file=io.StringIO())
        print_report(console, head, records, {})
        text = console.export_text()
        assert ("times need a GPU" in text) is said and "fused_softmax" in text


def test_page_is_self_contained_and_escaped(head: Header):
    text = page(head, RECORDS, {})
    assert "&lt;b&gt;" in text and "<b>" not in text
    assert not re.search(r"(?<!:)(src|href)=.(?!#)", text) and "@import" not in text
    assert "<h1>softmax: measured on NVIDIA H200</h1>" in text
    # a marker each
    assert text.count("<svg") == 1 and all(f">{r.system}<" in text for r in RECORDS[:2])


def test_plot_depends_on_the_records_alone_and_its_colors_on_the_page():
    assert draw("softmax", "bfloat16", RECORDS) == draw("softmax", "bfloat16", RECORDS)
    text = draw("softmax", "bfloat16", RECORDS)
    assert "var(--plot-" in text and not re.search(r"#f5\d{4}", text) and "<style" in text
    assert 'aria-label="softmax, bf16: fraction of the device&#x27;s own copy' in text
    alone = draw("softmax", "bfloat16", RECORDS, standalone=True)
    assert "prefers-color-scheme:dark" in alone and plots.LINES["torch"].dark in alone
    # every variable that a plot uses has a color in both schemes
    for dark in (False, True):
        assert set(re.findall(r"var\((--plot-\d+)\)", text)) <= set(re.findall(r"--plot-\d+", plots.css(":root", dark)))


def test_panels_are_by_op_and_dtype():
    assert panels_of([r for r in RECORDS if r.fraction is None]) == {}
    gradient = [replace(r, op="softmax_backward", dtype="float32", ceiling=r.ceiling and "add") for r in RECORDS[:2]]
    wide = [record("fused_softmax", 8192, 0.5), replace(record("quack", 1024, 0.25), dtype="float32")]
    found = panels_of([*RECORDS, *gradient, *wide])
    assert {
        (op, dtype): [r.system for r in rows] for op, panels in found.items() for dtype, rows in panels.items()
    } == {
        ("softmax", "bfloat16"): ["fused_softmax", "torch", "05_published", "04_persistent", "fused_softmax"],
        ("softmax", "float32"): ["quack"],
        ("softmax_backward", "float32"): ["fused_softmax", "torch"],
    }


def test_systems_have_the_same_look_in_every_plot_and_lessons_are_muted():
    looks = {(plots.line_of(n).light, plots.line_of(n).dashes) for n in ("fused_softmax", "torch", "liger", "quack")}
    assert len(looks) == 4
    assert {plots.line_of(name) for name in LESSON_NUMBERS} == {plots.LESSONS}
    assert plots.line_of("a system of tomorrow") == plots.OTHERS
    assert plots.line_of("fused_softmax").width == max(line.width for line in plots.LINES.values())


def test_without_times_the_plots_are_the_recorded_ones_of_this_run_and_say_so(head: Header):
    recorded = {
        (op, "torch", "bfloat16", 4096): (head, replace(record("torch", 4096, 0.3), op=op))
        for op in ("softmax", "log_softmax")
    }
    untimed = Record("log_softmax", "torch", "bfloat16", 3, 4096, "ok")
    text = page(replace(head, device="CPU"), [untimed], recorded)
    assert text.count("<svg") == 1 and "<h2>log_softmax, recorded</h2>" in text
    assert "Recorded earlier, not in this run: NVIDIA H200" in text
    assert "<h1>log_softmax: checked on CPU</h1>" in text and "Times need a GPU" in text


def test_output_folder(tmp_path: Path, head: Header):
    output = Output(tmp_path / "out", tmp_path / "kept" / "ladder.json")
    output.save(head, RECORDS[:1])
    assert from_json((tmp_path / "out" / "results.json").read_text())[1] == RECORDS[:1]
    files = output.finish(head, RECORDS)
    assert {f.name for f in files} == {"index.html", "results.json", "results.csv", "ladder.json"}
    assert not [f for f in (tmp_path / "out").iterdir() if f.name.startswith(".")]


def test_records_of_other_commands_are_passed_over(repository: Path, head: Header):
    folder = gpu_folder(repository)
    for name, text in (
        ("fuzz", '{"header": {"seed": 1}, "records": [{"op": "softmax", "cases": 9}]}'),
        ("list", "[1]"),
    ):
        write_atomically(folder / f"{name}.json", text)
    assert {file.stem for file in read_folder(folder)} == {"ladder"}
    assert recorded_results(folder)
    write_atomically(folder / "half.json", '{"header": ')
    with pytest.raises(ValueError, match="half.json is not JSON"):
        recorded_results(folder)


def test_host_times_do_not_replace_recorded_fractions(repository: Path, head: Header):
    host = [replace(r, fraction=None, ceiling="", ms=0.006, timed_by="host time of a call") for r in RECORDS[:2]]
    before = recorded_results(gpu_folder(repository))
    write_atomically(gpu_folder(repository) / "wall.json", to_json(head, host))
    assert recorded_results(gpu_folder(repository)) == before


def test_infinite_errors_can_be_read_again(tmp_path: Path, head: Header):
    wrong = replace(RECORDS[2], torch_error=INF)
    write_atomically(tmp_path / "x.json", to_json(head, [wrong]))
    assert read_results(tmp_path / "x.json") == (head, [wrong])


def test_what_is_drawn_against_width_are_the_large_cases(repository: Path, head: Header):
    few = [replace(r, n_rows=1, fraction=0.1, timed_by="CUDA-graph replay, warm L2") for r in RECORDS[:2]]
    large = [replace(r, timed_by="CUDA events") for r in RECORDS]
    for records in (few + large, large + few):
        assert by_width(records) == large and panels_of(records) == panels_of(large)
    assert by_width(few) == few
    write_atomically(gpu_folder(repository) / "ladder.json", to_json(head, large + few))
    found = recorded_results(gpu_folder(repository))
    assert found["softmax", "fused_softmax", "bfloat16", 4096][1].fraction == 0.99
