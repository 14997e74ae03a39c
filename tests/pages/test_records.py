"""tools/records.py: records are made again by the command in their header."""

from __future__ import annotations

import json

import pytest

import records


@pytest.mark.parametrize(
    "path", sorted(records.RESULTS.rglob("*.json")), ids=lambda p: p.relative_to(records.RESULTS).as_posix()
)
def test_each_record_names_its_command(path):
    name, arguments = records.arguments_of(path.relative_to(records.RESULTS).as_posix())
    assert (records.RESULTS / name) == path
    assert arguments and arguments[0].isidentifier()
    assert not {"--record", "--out"} & set(arguments)


@pytest.mark.extended
def test_a_command_writes_its_record_below_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    command = "fuzz --op softmax --way function --dtype fp32 --cases 3 --seed 5"
    assert records.main(["--out", str(tmp_path), f"new/fuzz.json={command}@0"]) == 0
    made = json.loads((tmp_path / "new" / "fuzz.json").read_text())
    assert sum(row["cases"] for row in made["rows"]) == 3 and made["header"]["command"].endswith(command)
    assert "new/fuzz.json on GPU 0: status 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("h200x2/parallel.json", "parallel --ranks 2"),
        ("h200-linear/peers.json", "linear --seconds"),
        ("h200/code_blocks.json", "python -m pages.code_blocks"),
    ],
)
def test_a_record_that_cannot_be_remade_is_refused_before_anything_runs(path, command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(records, "make", lambda *given: pytest.fail("a command ran"))
    assert records.main(["--out", str(tmp_path), "h200/fuzz.json@0", f"{path}@1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert path in line and f"`{command}" in line and "by hand" in line


@pytest.mark.extended
def test_the_limit_ends_a_command_and_leaves_out_the_next(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(records, "GRACE", 2)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    long = "fuzz --op softmax --way function --dtype fp32 --seconds 600"
    assert records.main(["--out", str(tmp_path), "--limit", "3", f"a.json={long}@0", f"b.json={long}@0"]) == 1
    printed = capsys.readouterr().out
    assert "a.json on GPU 0: interrupted" in printed or "a.json on GPU 0: killed" in printed
    assert "b.json: no time left" in printed and not (tmp_path / "b.json").exists()
