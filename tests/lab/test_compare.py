"""Two runs of the same cases are compared by what both of them timed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fused_softmax.lab.cli import app
from fused_softmax.lab.compare import compare, read_run, unmatched
from fused_softmax.lab.record import Header, Record, header, to_json, write_atomically

CLI = CliRunner()
EVENTS = "CUDA events"


def record(op: str, n_cols: int, ms: float | None, fraction: float | None, **more: object) -> Record:
    known: dict[str, object] = {"ms": ms, "fraction": fraction, "timed_by": EVENTS if ms else "", "ceiling": "copy"}
    return Record(
        op,
        **{
            "system": "fused_softmax",
            "dtype": "bfloat16",
            "n_rows": 64,
            "n_cols": n_cols,
            "status": "ok",
            **known,
            **more,
        },
    )  # type: ignore[arg-type]


OLD = [
    record("softmax", 256, 1.0, 1.00),
    record("softmax", 512, 2.0, 0.81),
    record("softmax", 512, 0.1, None, timed_by="host time of a call"),
    record("log_softmax", 256, 1.0, 0.9),
    record("softmax", 256, 9.0, 0.1, system="torch"),
]
NEW = [
    record("softmax", 256, 1.1, 0.90),
    record("softmax", 512, 1.0, 1.60),
    record("softmax", 512, 0.3, None, timed_by="host time of a call"),
    record("log_softmax", 256, None, None, status="wrong", note="3 of 64 rows"),
    record("softmax", 256, 1.0, 0.9, system="torch"),
    record("softmax", 999, 1.0, 0.9),
]


@pytest.fixture
def head() -> Header:
    return replace(header(torch.device("cpu"), interpreted=False), device="NVIDIA H200", ceilings={"copy": 4200.0})


def written(path: Path, head: Header, records: list[Record]) -> Path:
    write_atomically(path, to_json(head, records))
    return path


def test_worst_and_mean_of_each_op_and_way_of_timing(tmp_path: Path, head: Header):
    old, new = (read_run(written(tmp_path / f"{i}.json", head, r)) for i, r in enumerate((OLD, NEW)))
    events, host = compare(old, new)
    assert (events.op, events.timed_by, events.cases) == ("softmax", EVENTS, 2)
    assert events.old is not None and events.new is not None
    assert (events.old.worst, events.old.at, events.old.mean) == (0.81, "bf16 64x512", pytest.approx(0.9))
    assert (events.new.worst, events.new.at, events.new.mean) == (0.90, "bf16 64x256", pytest.approx(1.2))
    assert (events.ratio.worst, events.ratio.at) == (1.1, "bf16 64x256")
    assert events.ratio.mean == pytest.approx((1.1 * 0.5) ** 0.5)
    assert host.timed_by.startswith("host") and host.old is None and host.ratio.worst == pytest.approx(3.0)
    assert unmatched(old, new) == [
        "timed in OLD only: log_softmax 1",
        "timed in NEW only: softmax 1",
        "wrong in NEW: log_softmax bf16 64x256: 3 of 64 rows",
    ]


def test_command_compares_files_and_folders_file_by_file(tmp_path: Path, head: Header):
    newer = replace(head, versions={"torch": "2.11.0", "triton": "3.9.0"}, seed=77)
    files = [written(tmp_path / "a" / "softmax.json", head, OLD), written(tmp_path / "b" / "softmax.json", newer, NEW)]
    # the same case in another file is another measurement
    written(tmp_path / "b" / "ladder.json", newer, [record("softmax", 256, 50.0, 0.02)])
    for pair in (files, [file.parent for file in files]):
        result = CLI.invoke(app, ["report", "--compare", *map(str, pair)])
        assert result.exit_code == 0, result.output
        rows = [" ".join(line.split()) for line in result.output.splitlines()]
        assert any(row.startswith(f"softmax {EVENTS} 2 0.810") and row.endswith(" 0.742") for row in rows), rows
        assert "triton 3.9.0" in result.output and "seed 77" in result.output and "4200 GB/s" in result.output
        assert "wrong in NEW: log_softmax" in result.output


def test_command_says_what_it_cannot_compare(tmp_path: Path, head: Header):
    file = written(tmp_path / "a" / "softmax.json", head, OLD)
    (tmp_path / "empty").mkdir()
    (tmp_path / "list.json").write_text("[]")
    for other, said in (
        (tmp_path / "a", "a folder and a file"),
        (tmp_path / "none.json", "none.json"),
        (tmp_path / "list.json", "no header and records"),
    ):
        result = CLI.invoke(app, ["report", "--compare", str(file), str(other)])
        assert result.exit_code == 2 and said in result.output, (said, result.output)
    result = CLI.invoke(app, ["report", "--compare", str(file.parent), str(tmp_path / "empty")])
    assert result.exit_code == 2 and "holds no results" in result.output
    result = CLI.invoke(app, ["report", "--compare", str(file), str(written(tmp_path / "c.json", head, []))])
    assert result.exit_code == 0 and "no timed case in common" in result.output
