"""`fused-softmax fuzz --sanitize`, with a script in compute-sanitizer's place that runs a program and writes a log."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys

import pytest

from fused_softmax.lab.fuzz import command, sanitize
from fused_softmax.lab.fuzz.record import add_sanitizer
from fused_softmax.lab.fuzz.session import Request
from fused_softmax.lab.terminal import Refused

pytestmark = pytest.mark.interpreted

FAKE = """#!{python}
import os, subprocess, sys
arguments = sys.argv[1:]
if arguments == ["--help"]:
    print("  --kernel-name arg  which kernels are checked")
    sys.exit()
at = arguments.index("-m") - 1
with open(os.environ["FAKE_CALLS"], "a") as calls:
    print(" ".join(arguments[:at]), os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"), file=calls)
status = subprocess.run(arguments[at:]).returncode
said = os.environ["FAKE_LOG"]
with open(arguments[arguments.index("--log-file") + 1], "w") as log:
    print(said, file=log)
sys.exit(status or (3 if "1 error" in said else 0))
"""
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors"
FOUND = (
    "========= Invalid __global__ read of size 2 bytes\n=========     at softmax_resident+0x10 in resident.py:9\n"
    "========= ERROR SUMMARY: 1 error"
)


def fuzz(tmp_path, said: str, *arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(FAKE.format(python=sys.executable))
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    environment = {**os.environ, "FAKE_CALLS": str(tmp_path / "calls"), "FAKE_LOG": said}
    environment["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}" if path is None else path
    command = [sys.executable, "-m", "fused_softmax", "fuzz", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.extended
def test_a_clean_run_is_counted_and_recorded(tmp_path):
    record = tmp_path / "fuzz.json"
    given = ("--sanitize", "memcheck", "--op", "softmax", "--cases", "5", "--workers", "2", "--seed", "3")
    ended = fuzz(tmp_path, CLEAN, *given, "--record", str(record))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "memcheck: 5 cases, 0 errors, 0 warnings, 0 wrong results" in ended.stdout
    (row,) = json.loads(record.read_text())["sanitizers"]
    assert (row["tool"], row["cases"], row["errors"], row["lost"], row["seed"]) == ("memcheck", 5, 0, 0, 3)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 2 and all("--tool memcheck" in call and call.endswith(" 1") for call in calls)
    assert all("--kernel-name kns=softmax_" in call for call in calls)
    add_sanitizer(record, Request(seed=3), {**row, "cases": 6})  # the same seed again
    add_sanitizer(record, Request(seed=4), row)
    assert [row["cases"] for row in json.loads(record.read_text())["sanitizers"]] == [6, 5]


@pytest.mark.extended
def test_an_error_is_counted_with_its_kernel(tmp_path):
    ended = fuzz(tmp_path, FOUND, "--sanitize", "initcheck", "--op", "softmax", "--cases", "1")
    assert ended.returncode == 1
    assert "1 in softmax_resident" in ended.stdout and "initcheck: 1 cases, 1 errors" in ended.stdout
    # torch's kernels write what ours read
    assert "--kernel-name" not in (tmp_path / "calls").read_text()


TORCH = (
    "========= Uninitialized __global__ memory read of size 8 bytes\n"
    "=========     at void at::native::reduce_kernel<(int)512, (int)1, at::native::ReduceOp<double>>(T3)+0xf0c0\n"
    "=========     by thread (1,16,0) in block (1,6,0)\n=========     Address 0x7fbcdf9d0838\n=========\n"
)
INLINED = (
    "========= Uninitialized __global__ memory read of size 4 bytes\n=========     at load_chunk+0x10 in tiles.py:9\n"
    "=========     by thread (1,0,0) in block (0,0,0)\n=========         Device Frame: softmax_resident+0x90\n"
)


@pytest.mark.parametrize(
    ("log", "ours", "elsewhere"),
    [
        (TORCH * 3 + "========= ERROR SUMMARY: 3 errors\n", {}, {"at::native::reduce_kernel": 3}),
        (
            TORCH + INLINED + "========= ERROR SUMMARY: 2 errors\n",
            {"softmax_resident": 1},
            {"at::native::reduce_kernel": 1},
        ),
        # what the log counts and does not print has no name: it counts as ours
        (
            TORCH + "========= ERROR SUMMARY: 5 errors\n========= ERROR SUMMARY: 4 errors were not printed. Use ...\n",
            {"no kernel": 4},
            {"at::native::reduce_kernel": 1},
        ),
        ("========= ERROR SUMMARY: 0 errors\n", {}, {}),
        (
            "========= Program hit cudaErrorInvalidValue on CUDA API call to cudaLaunchKernel.\n"
            "========= ERROR SUMMARY: 1 error\n",
            {"no kernel": 1},
            {},
        ),
        (
            "========= Error: Race reported between Write access at masked_softmax_resident+0x70 in masks.py:9\n"
            "=========     and Read access at masked_softmax_resident+0x90 in masks.py:10 [64 hazards]\n"
            "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n",
            {"masked_softmax_resident": 1},
            {},
        ),
    ],
)
def test_each_error_is_of_a_kernel_of_ours_or_of_another(tmp_path, log, ours, elsewhere):
    (tmp_path / "0.log").write_text("========= COMPUTE-SANITIZER\n" + log)
    (tmp_path / "0.json").write_text('{"cases": 4, "wrong": 0, "problems": []}\n')
    summary = sanitize.Summary("initcheck")
    sanitize._add(summary, tmp_path / "0.log", tmp_path / "0.json", 3)
    assert (summary.kernels, summary.kernels_elsewhere) == (ours, elsewhere)
    row = summary.row()
    assert (row["errors"], row["errors_elsewhere"]) == (sum(ours.values()), sum(elsewhere.values()))
    assert summary.clean == (not ours)


@pytest.mark.extended
def test_a_process_without_a_summary_is_no_clean_run(tmp_path):
    ended = fuzz(tmp_path, "killed", "--sanitize", "racecheck", "--op", "softmax", "--cases", "1")
    assert ended.returncode == 1 and "1 processes lost" in ended.stdout


@pytest.mark.parametrize(
    ("tool", "ways", "per_cell", "told"),
    [
        ("memcheck", ("compile",), None, "runs no compile"),
        ("memcheck", (), 9, "--per-cell"),
        ("no", (), None, "none of"),
    ],
)
def test_what_makes_no_sense_is_refused(tool, ways, per_cell, told):
    with pytest.raises(Refused, match=told):
        command.fuzz((), ways, (), None, 1, per_cell, "", 0, 1, None, tool, "", False, False)


def test_a_missing_tool_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: None)
    monkeypatch.setattr(sanitize.Path, "exists", lambda path: False)
    with pytest.raises(ValueError, match="install the CUDA toolkit"):
        sanitize.find()


def test_hazards_of_racecheck_are_counted(tmp_path):
    log = tmp_path / "0.log"
    log.write_text("========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)\n")
    (tmp_path / "0.json").write_text('{"cases": 4, "wrong": 0, "problems": []}\n')
    summary = sanitize.Summary("racecheck")
    sanitize._add(summary, log, tmp_path / "0.json", 3)
    assert (summary.cases, summary.errors, summary.warnings, summary.lost) == (4, 2, 1, 0) and not summary.clean


def test_a_share_draws_every_eager_way():
    sanitize.check(Request())
    with pytest.raises(ValueError, match="cuda_graph"):
        sanitize.check(Request(ways=("function", "cuda_graph")))
