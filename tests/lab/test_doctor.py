"""doctor names what is missing and fails for what is broken; --version needs no extra."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fused_softmax
from fused_softmax.lab import doctor
from fused_softmax.lab.cli import app

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.interpreted
def test_the_kernel_is_run_and_compared_with_float64(monkeypatch: pytest.MonkeyPatch):
    state, text = doctor._checked()
    assert state == "ok" and re.search(r"interpreter \(block\): largest error \d\.\de-\d\d against float64", text)
    monkeypatch.setattr(fused_softmax, "softmax", lambda x: x.softmax(-1) + 1e-5)
    assert doctor._checked()[0] == "broken"


@pytest.mark.interpreted
def test_regimes_cover_all_widths():
    state, text = doctor._regimes()
    assert state == "ok" and "warp 16 to" in text and "cluster" in text and text.endswith("1,048,576")


def test_a_cache_folder_that_cannot_be_written_is_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def no_space(**options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(doctor.availability, "cache_folder", lambda: str(tmp_path / "new" / "cache"))
    assert doctor._cache() == ("ok", f"{tmp_path / 'new' / 'cache'} can be written")
    monkeypatch.setattr(tempfile, "TemporaryFile", no_space)
    state, text = doctor._cache()
    assert state == "broken" and "no space left" in text and "TRITON_CACHE_DIR" in text


def test_a_missing_extra_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "rich" else object())
    found = doctor._extra("cli", doctor.EXTRAS["cli"])
    assert (found.state, found.text) == ("missing", "rich: pip install 'fused-softmax[cli]'")


def test_extras_are_those_of_the_project():
    text = (ROOT / "pyproject.toml").read_text()
    declared = {extra: set(re.findall(r'"([a-z0-9]+)', re.search(rf"^{extra} = \[(.*)\]$", text, re.M)[1]))
                for extra in doctor.EXTRAS}  # fmt: skip
    declared["bench"] = declared["bench"] - {"fused"} | declared["cli"]
    assert declared == {extra: set(packages) for extra, packages in doctor.EXTRAS.items()}


def test_the_status_is_1_where_something_is_broken_and_an_error_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def raises() -> tuple[doctor.State, str]:
        raise RuntimeError("driver too old\nmore")

    monkeypatch.setattr(doctor, "_kernel", lambda: ("missing", "none"))
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0
    monkeypatch.setattr(doctor, "_gpu", raises)
    assert doctor.main() == 1
    assert "GPU            broken   RuntimeError: driver too old\n" in capsys.readouterr().out


@pytest.mark.extended
def test_doctor_and_version_need_no_extra(tmp_path: Path):
    names = ["typer", "rich", "numpy", "matplotlib", "safetensors", "jinja2"]
    hide = f"""
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, path=None, target=None: (
    None if name.split(".")[0] in {names!r} else find(name, path, target)
)
"""
    (tmp_path / "sitecustomize.py").write_text(hide)
    where = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src")])}
    where.pop("TRITON_INTERPRET", None)
    run = [sys.executable, "-m", "fused_softmax"]
    done = subprocess.run([*run, "--version"], capture_output=True, text=True, env=where, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"fused-softmax {fused_softmax.__version__}\n"), done.stderr
    done = subprocess.run([*run, "doctor"], capture_output=True, text=True, env=where, timeout=300)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert "extra cli      missing  typer, rich: pip install 'fused-softmax[cli]'" in done.stdout
    assert CliRunner().invoke(app, ["--version"]).stdout == f"fused-softmax {fused_softmax.__version__}\n"
