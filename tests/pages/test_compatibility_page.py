"""The compatibility page is what the records and the plans give, and its records are written by runs alone."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fused_softmax.launch import availability
from pages import compatibility, markers, version_runs
from pages.targets import GPUS, WIDTHS, measured_targets, moved, targets_table
from pages.version_runs import Run

ROOT = Path(__file__).resolve().parents[2]
RUN = Run("compiled", "2.13.0", "3.9.0", "3.12.1", 10, 0, 2, ("tests",), "abc", "2026-11-21T00:00:00+00:00")


def test_a_stale_page_is_found_and_rewritten(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks").mkdir()
    page = tmp_path / compatibility.PAGE
    page.write_text((ROOT / compatibility.PAGE).read_text())
    version_runs.record(tmp_path / version_runs.RECORDS, RUN)
    arguments = tmp_path, compatibility.PAGE, compatibility.tables
    assert not markers.update(*arguments, check=True)
    assert markers.update(*arguments, check=False)
    assert markers.update(*arguments, check=True)
    assert (
        "| 2.13.0 | 3.9.0 | 3.12.1 | compiled: tests | all 10 tests pass, 2 skipped | abc, 2026-11-21 |"
        in page.read_text()
    )
    page.write_text("no markers")
    with pytest.raises(ValueError, match="markers"):
        markers.update(*arguments, check=False)


def test_a_run_replaces_an_older_one_of_its_kind(tmp_path):
    file = tmp_path / "runs.json"
    version_runs.record(file, RUN)
    version_runs.record(file, dataclasses.replace(RUN, triton="3.10.0"))
    version_runs.record(file, dataclasses.replace(RUN, failed=3, passed=7))
    first, second = version_runs.load(file)
    assert (first.triton, second.triton) == ("3.9.0", "3.10.0"), "3.10 comes after 3.9"
    assert version_runs.outcome(first) == "**3 of 10 tests fail**, 2 skipped"


def test_measured_runs_come_from_the_benchmarks():
    found = version_runs.measured(ROOT / "benchmarks" / "results")
    head = json.loads((ROOT / "benchmarks" / "results" / "h200" / "softmax.json").read_text())["header"]
    assert any(r.torch == head["versions"]["torch"] and r.triton == head["versions"]["triton"] for r in found)
    assert "sm_90" in measured_targets(ROOT / "benchmarks" / "results")


@pytest.mark.parametrize("target", GPUS)
def test_what_a_target_moves(target):
    for n_cols in WIDTHS:
        n_bytes, over, regime = moved(target, n_cols, "bfloat16")
        assert n_bytes == round(over * 4 * n_cols)
        assert over == (1.5 if regime.startswith("two_pass") else 1.0)
    assert re.search(rf"\| {target} \| .* \| only compiled \|", targets_table())


def test_floors_are_the_same_everywhere():
    torch, triton = (".".join(map(str, pair)) for pair in (availability.MIN_TORCH, availability.MIN_TRITON))
    project = (ROOT / "pyproject.toml").read_text()
    assert f'"torch>={torch}"' in project
    assert f'"triton>={triton};' in project


def test_an_unknown_torch_is_refused():
    script = ROOT / "tests" / "extended" / "versions.py"
    done = subprocess.run([sys.executable, script, "below-floor", "1.0.0"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "1.0.0" in done.stderr
