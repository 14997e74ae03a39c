"""The lessons' pages: every part, the diagram of what the kernel does, marked lines, and what was recorded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fused_softmax.lab import lessons
from fused_softmax.lab.grading import has_puzzle
from fused_softmax.lab.grading.accesses import Diagram, diagram
from fused_softmax.lab.roofline.launches import EXPLAINED
from fused_softmax.lab.traffic import MODELS
from pages import lesson_pictures
from pages.formulas import FORMULAS
from pages.lessons import (
    FLOORS,
    PROFILE,
    core_lines,
    counted,
    kernel_source,
    newest,
    page,
    profile_records,
    profiled,
    recorded,
    stepped,
)

ROOT = Path(__file__).resolve().parents[2]
interpreted = pytest.mark.interpreted


@interpreted
@pytest.mark.parametrize(
    "n", [7, pytest.param(2, marks=pytest.mark.extended), pytest.param(14, marks=pytest.mark.extended)]
)
def test_a_page_holds_everything_and_its_svg_is_well_formed(n: int):
    records, profiles = recorded(ROOT)
    text = page(n, diagram(n), records, profiles)
    for heading in ("Problem", "Mechanism", "The kernel", "Common failure mode", "Write it yourself", "Measurement"):
        assert f"\n## {heading}\n" in text, heading
    drawn = re.findall(r"<svg.*?</svg>|<math.*?</math>", text, re.DOTALL)
    assert len(drawn) >= 3 and all(ElementTree.fromstring(one) is not None for one in drawn)
    assert f"fused-softmax lesson {n} --try" in text and "fused-softmax bench" in text
    assert "(higher is better)" in text and 'class="own"' in text
    assert 'hl_lines="' in text and "| mistake | what to do |" in text


@pytest.mark.parametrize("n", [n for n in lessons.numbers() if has_puzzle(n)])
def test_each_kernel_has_important_lines(n: int):
    source, marked = kernel_source(n)
    lines = source.splitlines()
    assert marked and all(lines[i - 1].split("  #")[0].strip() in core_lines(n) for i in marked)
    assert source.startswith(("@triton.jit", "def "))


@interpreted
@pytest.mark.parametrize("n", [6, 8])
def test_a_diagram_counts_what_the_model_counts(n: int):
    shown = diagram(n)
    model = MODELS[lessons.load(n).SYSTEM](*shown.shape)
    assert (shown.reads, shown.writes) == (model.reads, model.writes)
    reads = [a for a in shown.accesses if a[0] == 0 and a[1] == "read"]
    assert [a[3] for a in reads] == ([0, 2048, 4096] * 3 if n == 6 else [0])
    svg = lesson_pictures.diagram_svg(shown)
    assert svg.count("program 0") == 1 and 'class="write"' in svg


@interpreted
def test_a_lesson_without_a_kernel_and_without_a_puzzle_has_a_page(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pages.lessons.has_puzzle", lambda n: False)
    text = page(1, Diagram(1, (3, 4), [], 0, 0), [], [])
    assert "Write it yourself" not in text and "What is read" not in text and "The whole file" in text


def test_areas_of_rectangles_and_of_runs():
    assert lesson_pictures.areas(0, 4735, 2432, (19, 256)) == [(0.0, 0.0, 0.5, 1.0)]
    assert lesson_pictures.areas(3, 11, 9, (4, 6)) == [(0.5, 0.0, 0.5, 0.25), (0.0, 0.25, 1.0, 0.25)]


def test_long_diagrams_are_cut():
    accesses = [(program, "read", "x_ptr", 0, 5, 6) for program in range(50) for _ in range(20)]
    svg = lesson_pictures.diagram_svg(Diagram(2, (3, 4), accesses, 6000, 0))
    assert svg.count(">program ") == lesson_pictures.MOST_PROGRAMS and "and so on" in svg
    assert "program 49" in svg


def test_counters_stand_next_to_the_model():
    found = profiled(7, [
        {"system": "07_online", "op": "softmax", "failed": "", "n_rows": 8192, "n_cols": 131072,
         "read": 4.295e9, "written": 2.128e9, "predicted_read": 4294967296, "predicted_written": 2147483648,
         "counters": {"peak": 79.0, "l2_hits": 34.0, "load_sectors": 16.0, "stall_barrier": 1.0, "stall_wait": 0.5}}
    ])  # fmt: skip
    assert "| 8,192 x 131,072 | 4,295 (4,295) | 2,128 (2,147) | 0.79 | 34% | 16.0 | waits for the other warps" in found
    assert profiled(7, []) == "" and set(FORMULAS) <= set(lessons.numbers())


def test_what_was_recorded_holds_and_is_shown():
    """Bytes within 3 per cent of the model for every lesson; ops that are one kernel within a tenth of their floor."""
    records, floors = profile_records(ROOT), json.loads((ROOT / FLOORS).read_text())
    for head in (floors["header"], *(head for head, _ in records)):
        assert head["finished"] and head["device"] == "NVIDIA H200"
    profiles = newest([profiles for _, profiles in records])
    assert {lessons.load(n).SYSTEM for n in lessons.numbers()} <= {p["system"] for p in profiles}
    assert {p["op"] for p in profiles if p["system"] == "fused_softmax"} == set(EXPLAINED)
    assert all(p["holds"] and abs(p["over_model"] - 1) <= 0.03 for p in profiles)
    found: dict[str, dict[int, float]] = {}
    for f in floors["floors"]:
        found.setdefault(f["op"] if f["system"] == "fused_softmax" else f["system"], {})[f["n_cols"]] = f["over"]
    for op in ("softmax", "log_softmax", "logsumexp", "softmax_backward", "log_softmax_backward"):
        assert [*found[op]][::10] == [1024, 262144] and all(abs(over - 1) < 0.1 for over in found[op].values()), op
    text = counted(records, floors)
    assert re.search(r"\| `06_three_pass` \| [48],\d+ x 131,072 \|", text) and "fused-softmax profile --floors" in text
    assert "| `14_masks` | 65,536 x 4,096 |" in text and "| cross_entropy |" in text
    for command in text.split("\n    fused-softmax profile")[1:]:
        assert "/" not in command.splitlines()[0]  # no folder of the machine


def test_the_steps_that_lesson_16_speaks_of_are_those_recorded():
    cases = json.loads((ROOT / PROFILE).with_name("steps_16.json").read_text())["cases"]
    found = {c["n_cols"]: {s["step"]: round(s["fraction"], 2) for s in c["steps"]} for c in cases}
    assert (found[8191]["own sums"], found[8191]["head and tail"]) == (0.72, 0.93)
    assert (found[16384]["chunks"], found[16384]["own sums"]) == (0.69, 0.95)
    assert max(found[1000], key=lambda step: found[1000][step]) in ("one block", "chunks")
    assert all(f["eviction hints"] <= f["head and tail"] + 0.011 for f in found.values())
    assert len(stepped(16, ROOT)) == len(cases) and stepped(2, ROOT) == []
