"""The command from the outside: arguments, exit statuses, files; a tiny interpreted benchmark end to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fused_softmax.bench.cases import random_cases
from fused_softmax.bench.record import from_json
from fused_softmax.cli import app
from fused_softmax.lessons import LESSONS

ROOT = Path(__file__).resolve().parent.parent
CLI = CliRunner()


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    where = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", **environment}
    line = [sys.executable, "-m", "fused_softmax", *arguments]
    return subprocess.run(line, capture_output=True, text=True, env=where, timeout=300)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench", "--dtype", "int8"], "int8"),
        (["bench", "--widths", "12,x"], "integers"),
        (["bench", "--widths", "0"], "positive"),
        (["bench", "--op", "sofmax"], "masked_softmax"),
        (["bench", "--seed", "3"], "--random-widths"),
        (["bench", "--random-widths", "-1"], "random-widths"),
        (["lesson", "99"], f"1 to {len(LESSONS)}"),
        (["explain", "4096"], "rows x columns"),
        (["tune", "--widths", "x"], "needs a GPU"),
    ],
)
def test_bad_arguments_are_refused_with_a_reason(arguments: list[str], said: str):
    if arguments[0] == "tune" and torch.cuda.is_available():
        pytest.skip("there is a GPU to tune on")
    result = CLI.invoke(app, arguments, env={"TERM": "dumb", "COLUMNS": "200"})
    assert result.exit_code == 2 and said in result.output


def test_lessons_are_listed():
    result = CLI.invoke(app, ["lesson"])
    assert (
        result.exit_code == 0 and len(result.output.splitlines()) == len(LESSONS) and "naive" in result.output.lower()
    )


def test_without_its_extra_the_command_names_it(tmp_path: Path):
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError('No module named typer', name='typer')\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    done = command("bench", PYTHONPATH=path)
    assert done.returncode == 1 and "fused-softmax[bench]" in done.stderr and "Traceback" not in done.stderr


def test_importing_the_package_needs_no_extra():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['typer', 'rich', 'matplotlib', 'safetensors'])); "
        "import fused_softmax"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=120).returncode == 0


def test_report_check_fails_on_a_stale_readme(tmp_path: Path):
    (tmp_path / "README.md").write_text("<!-- results:begin -->\n<!-- results:end -->\n")
    assert CLI.invoke(app, ["report", "--check", "--root", str(tmp_path)]).exit_code == 1
    assert CLI.invoke(app, ["report", "--readme", "--root", str(tmp_path)]).exit_code == 0
    assert CLI.invoke(app, ["report", "--check", "--root", str(tmp_path)]).exit_code == 0
    assert CLI.invoke(app, ["report", "--check", "--root", str(tmp_path / "none")]).exit_code == 2


@pytest.mark.interpreted
def test_tiny_bench_shows_wrong_as_wrong_and_leaves_its_files(tmp_path: Path):
    out = tmp_path / "out"
    systems = "torch,01_naive,02_one_row,05_published"
    done = command(
        "bench", "--widths", "640", "--rows", "2", "--dtype", "fp32", "--systems", systems, "--out", str(out)
    )
    assert done.returncode == 0, done.stderr
    head, records = from_json((out / "results.json").read_text())
    assert {r.system: r.status for r in records} == {
        "torch": "ok",
        "01_naive": "ok",
        "02_one_row": "ok",
        "05_published": "wrong",
    }
    assert all(r.ms is None for r in records) and head.interpreted and head.finished
    by_name = {r.system: r for r in records}
    assert by_name["02_one_row"].reads == by_name["02_one_row"].writes == 1280
    resources = by_name["02_one_row"].resources
    assert resources is not None and resources["registers"] > 0 and resources["widest_load_bytes"] == 16
    assert "times need a GPU" in done.stdout and "wrong" in done.stdout
    assert {"index.html", "results.csv"} <= {f.name for f in out.iterdir()}


@pytest.mark.interpreted
def test_several_ops_are_recorded_in_a_file_each(tmp_path: Path):
    ops = "log_softmax_backward,cross_entropy,cross_entropy_forward,masked_softmax"
    shape = ["--widths", "33", "--rows", "3", "--dtype", "bf16"]
    done = command("bench", "--op", ops, *shape, "--out", str(tmp_path / "out"), "--record", str(tmp_path / "kept"))
    assert done.returncode == 0, done.stderr + done.stdout
    found = {file.stem: from_json(file.read_text())[1] for file in (tmp_path / "kept").iterdir()}
    assert set(found) == {"log_softmax_backward", "cross_entropy", "masked_softmax"}
    assert {r.op for r in found["cross_entropy"]} == {"cross_entropy", "cross_entropy_forward"}
    assert {r.system for r in found["cross_entropy"]} == {"fused_softmax", "fused_softmax_in_place", "torch"}
    assert {r.status for records in found.values() for r in records} == {"ok"}
    assert all(r.plan.startswith("tile: 1 CTA") for r in found["masked_softmax"] if r.system == "fused_softmax")


@pytest.mark.interpreted
def test_random_widths_are_recorded_with_their_seed(tmp_path: Path):
    shape = ["--random-widths", "2", "--rows", "2", "--systems", "fused_softmax", "--out", str(tmp_path / "out")]
    done = command("bench", "--op", "log_softmax_backward,masked_softmax_causal", *shape, "--seed", "5")
    assert done.returncode == 0, done.stderr + done.stdout
    head, records = from_json((tmp_path / "out" / "results.json").read_text())
    drawn = {op: sorted({r.n_cols for r in records if r.op == op}) for op in dict.fromkeys(r.op for r in records)}
    assert {op: [w % 2 for w in sorted(widths)].count(1) for op, widths in drawn.items()} == dict.fromkeys(drawn, 1)
    assert drawn == {
        op: sorted({c.n_cols for c in random_cases(op, 2, 5)})
        for op in ("log_softmax_backward", "masked_softmax_causal")
    }
    assert head.seed == 5 and "--seed 5" in head.command and "seed 5" in done.stdout
    assert {(r.system, r.status) for r in records} == {("fused_softmax", "ok")} and all(
        r.error is not None for r in records
    )
    done = command("bench", "--op", "cross_entropy_forward", *shape)
    assert done.returncode == 0, done.stderr + done.stdout
    head, records = from_json((tmp_path / "out" / "results.json").read_text())
    assert head.seed is not None and f"seed {head.seed}" in done.stdout
    assert {r.n_cols for r in records} == {c.n_cols for c in random_cases("cross_entropy_forward", 2, head.seed)}


@pytest.mark.interpreted
def test_bench_reads_a_file_and_refuses_one_it_cannot_use(tmp_path: Path):
    torch.save({"scores": torch.randn(2, 3, 17)}, tmp_path / "x.pt")
    options = ["--systems", "torch,01_naive", "--out", str(tmp_path / "out")]
    assert command("bench", "--input", str(tmp_path / "x.pt"), *options).returncode == 0
    _, records = from_json((tmp_path / "out" / "results.json").read_text())
    assert {(r.n_rows, r.n_cols, r.case) for r in records} == {(6, 17, "real: scores")}
    done = command("bench", "--input", str(tmp_path / "none.txt"), *options)
    assert done.returncode == 2 and "none.txt" in done.stdout
    done = command("bench", "--systems", "toch", "--out", str(tmp_path / "out"))
    assert done.returncode == 2 and "torch" in done.stdout


@pytest.mark.interpreted
def test_ctrl_c_leaves_the_results_so_far(tmp_path: Path):
    where = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TRITON_INTERPRET": "1"}
    widths = ",".join(["64", *["200000"] * 400])
    line = [sys.executable, "-m", "fused_softmax", "bench", "--widths", widths, "--systems", "torch,06_three_pass"]
    # a shell starts what it runs in the background with SIGINT ignored, and children inherit that
    process = subprocess.Popen(
        [*line, "--out", str(tmp_path)],
        env=where,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        until = time.monotonic() + 120
        while not (tmp_path / "results.json").exists() and time.monotonic() < until:
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        process.kill()
    head, records = from_json((tmp_path / "results.json").read_text())
    assert head.stopped == "interrupted" and len(records) >= 2 and (tmp_path / "index.html").exists()
