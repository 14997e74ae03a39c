"""The notebook is what the lessons give, and runs without a GPU from its first cell to its last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fused_softmax.lab import lessons
from fused_softmax.lab.grading import has_puzzle
from pages import notebook

ROOT = Path(__file__).resolve().parents[2]


def test_the_notebook_is_current_and_valid():
    kept = json.loads((ROOT / notebook.NOTEBOOK).read_text(encoding="utf-8"))
    assert notebook.update(ROOT, check=True)
    assert kept["nbformat"] == 4 and len({cell["id"] for cell in kept["cells"]}) == len(kept["cells"])
    assert len(notebook.code(kept["cells"])) == 1 + sum(1 + 2 * has_puzzle(n) for n in lessons.numbers())
    for text in notebook.code(kept["cells"]):
        compile(text, "cell", "exec")


def test_a_stale_notebook_is_found_and_rewritten(tmp_path: Path):
    assert not notebook.update(tmp_path, check=True) and not (tmp_path / notebook.NOTEBOOK).exists()
    assert notebook.update(tmp_path, check=False) and notebook.update(tmp_path, check=True)


@pytest.mark.extended
def test_the_notebook_runs_without_a_gpu(tmp_path: Path):
    kept = json.loads((ROOT / notebook.NOTEBOOK).read_text(encoding="utf-8"))
    (tmp_path / "notebook.py").write_text("\n\n".join(notebook.code(kept["cells"])))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "notebook.py"], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "No GPU: kernels are interpreted" in done.stdout and "not on this GPU" not in done.stdout
    assert (
        done.stdout.count("the core is still empty") == len(list(tmp_path.glob("lesson_*.py")))
        and "WRONG" in done.stdout
    )
    assert len(list(tmp_path.glob("lesson_*.py"))) == sum(map(has_puzzle, lessons.numbers()))
