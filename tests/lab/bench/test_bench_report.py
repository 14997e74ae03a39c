"""What is written can be read again, pages need nothing from elsewhere, and a stale README is noticed."""

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

from fused_softmax.lab.bench import readme
from fused_softmax.lab.bench.output import Output, page
from fused_softmax.lab.bench.plots import draw
from fused_softmax.lab.bench.record import (
    Header,
    Record,
    from_json,
    header,
    read_results,
    to_csv,
    to_json,
    write_atomically,
)
from fused_softmax.lab.bench.report import by_width, details, matrix, print_report
from fused_softmax.lab.bench.timing import FIRST_CALL

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
    (tmp_path / "README.md").write_text("# top\n<!-- results:begin -->\n<!-- results:end -->\nend\n")
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
    rows = matrix(RECORDS)
    assert rows.columns == ("op", "shape", "fused_softmax", "torch", "05_published", "04_persistent", "copy")
    assert rows.rows[0][2:] == ("0.990", "0.310", "wrong", "", "4200")
    assert rows.rows[1][5] == "out of resources"


def test_first_calls_are_shown_in_milliseconds_and_never_against_width():
    first = record("torch", 4096, ms=812.25, timed_by=FIRST_CALL)
    assert matrix([first]).rows[0][2:] == ("812.2 ms",)
    assert by_width([first]) == [] and by_width([*RECORDS, first]) == by_width(RECORDS)


def test_details_show_resources_and_recorded_times_beside():
    used = {"registers": 32, "spilled_bytes": 0, "shared_bytes": 786464, "widest_load_bytes": 16}
    used["failed"] = "out of resources on sm_90"
    here = Record("softmax", "04_persistent", "bfloat16", 3, 4096, "ok", error=1e-3, reads=12288, resources=used)
    recorded = {("softmax", "04_persistent", "bfloat16", 4096): record("04_persistent", 4096, 0.87)}
    (row,) = details([here], recorded).rows
    assert row[1:] == (
        "04_persistent",
        "ok",
        "1.0e-03",
        "1.00",
        "",
        "32",
        "0",
        "786464",
        "16",
        "out of resources",
        "0.870",
    )


def test_terminal_says_that_times_need_a_gpu_only_without_times(head: Header):
    for records, said in ((RECORDS, False), ([replace(RECORDS[0], ms=None, fraction=None)], True)):
        console = Console(record=True, width=150, file=io.StringIO())
        print_report(console, head, records, {})
        text = console.export_text()
        assert ("times need a GPU" in text) is said and "fused_softmax" in text


def test_page_is_self_contained_and_escaped(head: Header):
    plot = draw(head, RECORDS)
    assert plot is not None and plot.startswith(b"\x89PNG")
    text = page(head, RECORDS, {}, plot)
    assert "data:image/png;base64," in text and "&lt;b&gt;" in text and "<b>" not in text
    assert not re.search(r"(src|href)=.(?!data:)", text)


def test_plot_depends_on_the_records_alone(head: Header):
    assert draw(head, RECORDS) == draw(head, RECORDS)
    assert draw(head, [r for r in RECORDS if r.fraction is None]) is None


def test_plot_has_a_panel_for_each_op_and_dtype(head: Header, monkeypatch: pytest.MonkeyPatch):
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k))[1])
    gradient = [replace(r, op="softmax_backward", dtype="float32", ceiling=r.ceiling and "add") for r in RECORDS[:2]]
    wide = [record("fused_softmax", 8192, 0.5), replace(record("quack", 1024, 0.25), dtype="float32")]
    assert draw(head, [*RECORDS, *gradient, *wide]) is not None
    panels = {axes.get_title(): axes for axes in drawn[0].axes if axes.get_visible()}
    lines = {
        title: {
            str(line.get_label()): list(zip(line.get_xdata(), line.get_ydata(), strict=True))
            for line in axes.get_lines()
            if not str(line.get_label()).startswith("_")
        }
        for title, axes in panels.items()
    }
    assert lines == {
        "softmax, bf16, NVIDIA H200": {"fused_softmax": [(4096, 0.99), (8192, 0.5)], "torch": [(4096, 0.31)]},
        "softmax, fp32, NVIDIA H200": {"quack": [(1024, 0.25)]},
        "softmax_backward, fp32, NVIDIA H200": {"fused_softmax": [(4096, 0.99)], "torch": [(4096, 0.31)]},
    }
    labels = [axes.get_ylabel() for axes in panels.values()]
    assert labels == ["fraction of the device's own copy", "", "fraction of the device's own add"]
    legends = [axes.get_legend() for axes in panels.values()]
    named = [[text.get_text() for text in legend.get_texts()] for legend in legends if legend is not None]
    assert named == [["fused_softmax", "torch", "quack"], ["fused_softmax", "torch"]]
    # of a second row without that dtype nothing is left to see
    assert len(drawn[0].axes) == 4


def test_without_times_the_plot_is_of_the_recorded_ops_of_this_run(
    tmp_path: Path, head: Header, monkeypatch: pytest.MonkeyPatch
):
    from fused_softmax.lab.bench import output

    recorded = {
        (op, "torch", "bfloat16", 4096): replace(record("torch", 4096, 0.3), op=op) for op in ("softmax", "log_softmax")
    }
    drawn: list[list[str]] = []
    monkeypatch.setattr(output, "draw", lambda head, records: drawn.append([r.op for r in records]))
    untimed = Record("log_softmax", "torch", "bfloat16", 3, 4096, "ok")
    Output(tmp_path, recorded=recorded).finish(head, [untimed])
    assert drawn == [["log_softmax"], ["log_softmax"]]


def test_output_folder(tmp_path: Path, head: Header):
    output = Output(tmp_path / "out", tmp_path / "kept" / "ladder.json")
    output.save(head, RECORDS[:1])
    assert from_json((tmp_path / "out" / "results.json").read_text())[1] == RECORDS[:1]
    files = output.finish(head, RECORDS)
    assert {f.name for f in files} == {"index.html", "results.json", "results.csv", "ladder.png", "ladder.json"}
    assert not [f for f in (tmp_path / "out").iterdir() if f.name.startswith(".")]


def test_records_of_other_commands_are_passed_over(repository: Path, head: Header):
    folder = readme.gpu_folder(repository)
    for name, text in (
        ("fuzz", '{"header": {"seed": 1}, "records": [{"op": "softmax", "cases": 9}]}'),
        ("list", "[1]"),
    ):
        write_atomically(folder / f"{name}.json", text)
    assert {file.stem for file in readme.read_folder(folder)} == {"ladder"}
    assert readme.recorded_results(folder)
    write_atomically(folder / "half.json", '{"header": ')
    with pytest.raises(ValueError, match="half.json is not JSON"):
        readme.recorded_results(folder)


def test_infinite_errors_can_be_read_again(tmp_path: Path, head: Header):
    wrong = replace(RECORDS[2], torch_error=INF)
    write_atomically(tmp_path / "x.json", to_json(head, [wrong]))
    assert read_results(tmp_path / "x.json") == (head, [wrong])


def test_readme_is_written_checked_and_found_stale(repository: Path, head: Header):
    assert "run `fused-softmax report --readme`" in readme.stale(repository)
    readme.write(repository)
    assert readme.stale(repository) == ""
    text = (repository / "README.md").read_text()
    assert text.startswith("# top\n") and text.endswith("\nend\n")
    assert "| **`fused_softmax`** | **0.99** |" in text and "| `05_published` | wrong |" in text
    before = (repository / "docs" / "images" / "softmax.png").read_bytes()
    readme.write(repository)
    assert (repository / "README.md").read_text() == text
    assert (repository / "docs" / "images" / "softmax.png").read_bytes() == before

    changed = [replace(RECORDS[0], fraction=0.5), *RECORDS[1:]]
    write_atomically(readme.gpu_folder(repository) / "ladder.json", to_json(head, changed))
    assert "not what the results give" in readme.stale(repository)


def test_readme_shows_whatever_files_there_are(repository: Path, head: Header):
    folder = readme.gpu_folder(repository)
    backward = [replace(r, op="softmax_backward", ceiling=r.ceiling and "add") for r in RECORDS[:3]]
    write_atomically(folder / "softmax_backward.json", to_json(head, backward))

    def loss(op: str, system: str, ceiling: str, **more: object) -> Record:
        known: dict[str, object] = {"ms": 0.5, "bytes": 2 * 10**9, "ceiling": ceiling, "ceiling_gbps": 4500.0, **more}
        return Record(op, system, "bfloat16", 4096, 128256, "ok", **known)  # type: ignore[arg-type]

    losses = [
        loss("cross_entropy", "fused_softmax", "copy", peak_bytes=1_050_000_000, fraction=0.89),
        loss("cross_entropy_forward", "fused_softmax", "read", peak_bytes=16_400, fraction=0.96),
        replace(loss("cross_entropy", "liger", "copy"), status="refused", ms=None),
    ]
    write_atomically(folder / "cross_entropy.json", to_json(head, losses))
    write_atomically(folder / "unknown.json", "not JSON")
    readme.write(repository)
    text = (repository / "README.md").read_text()
    assert readme.stale(repository) == ""
    assert "| **`fused_softmax`** | **1.12x (1,050)** |" in text and "| `liger` | refused |" in text
    assert "| **`fused_softmax`** | **0.96 (0.02)** |" in text and "fraction of add" in text
    # a peak is part of what is shown
    changed = [replace(losses[0], peak_bytes=1), *losses[1:]]
    write_atomically(folder / "cross_entropy.json", to_json(head, changed))
    assert "not what the results give" in readme.stale(repository)


def test_plot_of_the_readme_is_ours_and_the_peers(repository: Path, head: Header):
    drawn = readme.plotted(readme.results(readme.gpu_folder(repository)))
    assert drawn is not None and {r.system for r in drawn[1]} == {"fused_softmax", "torch", "copy"}
    forward = [record("quack", 4096, 0.98), replace(record("torch", 4096, 0.5), dtype="float32")]
    write_atomically(readme.gpu_folder(repository) / "softmax.json", to_json(head, forward))
    drawn = readme.plotted(readme.results(readme.gpu_folder(repository)))
    assert drawn is not None and [r.system for r in drawn[1]] == ["quack"]


def test_readme_without_results_or_without_markers(tmp_path: Path):
    (tmp_path / "README.md").write_text("<!-- results:begin -->\n<!-- results:end -->\n")
    readme.write(tmp_path)
    assert readme.stale(tmp_path) == "" and "No results" in (tmp_path / "README.md").read_text()
    (tmp_path / "README.md").write_text("nothing here\n")
    assert "no markers" in readme.stale(tmp_path)
    with pytest.raises(ValueError, match="results:begin"):
        readme.write(tmp_path)


def test_what_is_drawn_against_width_are_the_large_cases(repository: Path, head: Header):
    few = [replace(r, n_rows=1, fraction=0.1, timed_by="CUDA-graph replay, warm L2") for r in RECORDS[:2]]
    large = [replace(r, timed_by="CUDA events") for r in RECORDS]
    for records in (few + large, large + few):
        assert by_width(records) == large and draw(head, records) == draw(head, large)
    assert by_width(few) == few
    write_atomically(readme.gpu_folder(repository) / "ladder.json", to_json(head, large + few))
    found = readme.recorded_results(readme.gpu_folder(repository))
    assert found["softmax", "fused_softmax", "bfloat16", 4096].fraction == 0.99
