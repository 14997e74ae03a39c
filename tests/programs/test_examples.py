"""Every file in examples/ runs, and is short; the training benchmark fails where a loss is wrong."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.extended, pytest.mark.interpreted]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NEEDS = {"patch_transformers": ("transformers",), "trainer": ("transformers", "accelerate")}


def test_examples_are_short():
    assert len(EXAMPLES) >= 7
    assert not [file.name for file in EXAMPLES if len(file.read_text().splitlines()) >= 80]


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_runs(file: Path, capsys):
    for package in NEEDS.get(file.stem, ()):
        pytest.importorskip(package)
    # examples are programs of their own: the tests' checks of memory would slow down what they train
    torch.use_deterministic_algorithms(False)
    runpy.run_path(str(file), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.fixture
def benchmark(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("train_transformers", ROOT / "benchmarks" / "train_transformers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(benchmark, monkeypatch, out: Path) -> dict:
    options = (
        "--tiny --tokens 32 --length 16 --steps 3 --shapes gemma2 --device cpu --systems transformers fused_softmax"
    )
    monkeypatch.setattr(sys, "argv", ["train_transformers.py", *options.split(), "--out", str(out)])
    benchmark.main()
    return json.loads((out / "train_transformers.json").read_text())["cases"][0]


def test_the_training_benchmark_compares_curves(benchmark, monkeypatch, tmp_path):
    case = run(benchmark, monkeypatch, tmp_path)
    assert case["worst_relative_difference"]["fused_softmax"]["loss"] < 5e-3
    assert len(case["systems"]["fused_softmax"]["gradient_norm"]) == 3


def test_the_training_benchmark_fails_where_a_gradient_is_wrong(benchmark, monkeypatch, tmp_path):
    apply = benchmark.apply_to

    def wrong(model):
        applied = apply(model)
        model.lm_head.weight.register_hook(lambda gradient: gradient * 1.2)
        return applied

    monkeypatch.setattr(benchmark, "apply_to", wrong)
    with pytest.raises(SystemExit, match="gradient_norm differs"):
        run(benchmark, monkeypatch, tmp_path)


def test_the_page_shows_the_records(benchmark):
    records = sorted((ROOT / "benchmarks" / "training").glob("h200_transformers*.json"))
    page = (ROOT / "docs" / "programs.md").read_text(encoding="utf-8")
    shown = page.split("<!-- table of the records -->")[1].split("<!-- end of the table -->")[0]
    assert records and shown.strip() == benchmark.table(benchmark.cases_of(records))
