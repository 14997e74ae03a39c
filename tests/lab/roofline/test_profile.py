"""Nsight Compute's answers, as text: its table, its refusals, and counters that a version does not have."""

from __future__ import annotations

import json
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fused_softmax.lab import lessons
from fused_softmax.lab.cli import app, measure
from fused_softmax.lab.grading.subjects import SUBJECTS, subject_named
from fused_softmax.lab.grading.trials import as_tuple
from fused_softmax.lab.roofline import counters, profile
from fused_softmax.lab.roofline.counters import COUNTERS, METRICS, NoProfiler
from fused_softmax.lab.roofline.launches import EXPLAINED
from fused_softmax.lab.roofline.profile import Item

FIXED = ["ID", "Process ID", "Process Name", "Kernel Name", "Device"]
NAMES = ["read", "written", "nanoseconds", "peak", "l2_hits", "load_sectors", "store_sectors"]


def table(*rows: tuple[str, float, float]) -> str:
    """A table as `ncu --csv --page raw` writes it: names, units, and a line for each launch."""

    def line(values: list[Any]) -> str:
        return ",".join(f'"{value}"' for value in values)

    stall = METRICS["stall_long_scoreboard"], METRICS["stall_barrier"]
    out = ["==PROF== Connected to process 7", line([*FIXED, *(COUNTERS[name] for name in NAMES), *stall])]
    out.append(line(["", "", "", "", "", "byte", "byte", "ns", "%", "%", "", "", "", ""]))
    for i, (name, read, written) in enumerate(rows):
        values = [f"{read:,.0f}", f"{written:,.0f}", "250,000", "91.5", "0.2", "16", "16", "9", "1"]
        out.append(line([i, 7, "python3", name, 0, *values]))
    return "\n".join([*out, "==PROF== Disconnected from process 7"])


def said(*items: Item, plan: str = "", failed: str = "") -> str:
    return "".join(f"{profile.SAID}{json.dumps([*item, plan, failed])}\n" for item in items)


class Answers(list):
    """The commands that were run, and the seconds that each may take; `answers` are given in turn."""

    answers: list[tuple[int, str]]
    seconds: list[int]


@pytest.fixture
def profiler(monkeypatch: pytest.MonkeyPatch) -> Answers:
    commands = Answers()
    commands.answers, commands.seconds = [], []

    def run(command: list[str], **more: Any) -> Any:
        commands.append(command)
        commands.seconds.append(more["timeout"])
        status, out = commands.answers.pop(0) if command[0] == "ncu" else (0, "")
        return SimpleNamespace(returncode=status, stdout=out, stderr="")

    monkeypatch.setattr(counters.shutil, "which", lambda name: "ncu")
    monkeypatch.setattr(profile.subprocess, "run", run)
    return commands


def test_profiles_are_told_apart_by_the_marker_and_compared_with_the_model(profiler: Answers):
    cells = 2**28
    rows, columns = cells // 4096, 4096
    names = ("02_one_row", "01_naive", "04_persistent")
    items = profile.items_of([(name, "softmax", columns) for name in names], "bfloat16", cells)
    assert items == [Item(name, "softmax", "bfloat16", rows, columns) for name in names]
    kernels = [
        ("void spin_kernel(long)", 0, 0), ("one_row_kernel", 2 * cells * 1.01, 2 * cells * 0.98),
        ("spin_kernel", 0, 0), ("reduce", 4 * cells, 0), ("divide", 10 * cells, 6 * cells),
        ("spin_kernel", 0, 0),
    ]  # fmt: skip
    profiler.answers.append((0, said(*items[:2]) + said(items[2], failed="no room") + table(*kernels)))
    one, naive, refused = profile.profile(items, "h200")
    assert one.kernels == ("one_row_kernel",) and one.holds and one.over_model == pytest.approx(1.01583, abs=1e-4)
    assert one.counters["peak"] == 91.5 and one.microseconds == 250.0
    assert len(naive.kernels) == 2 and not naive.holds and naive.read == 14 * cells
    assert refused.failed == "no room" and not refused.holds
    text = "\n".join(profile.lines(one))
    assert "the model's claim held" in text and re.search(r"0\.9[12] of the memory's peak", text)
    assert "waits for data from memory or L2 (long_scoreboard)" in text and "a warp   0.90 of the time" in text
    assert "L2 is emptied" not in text and "L2 is emptied before each kernel" in "\n".join(profile.lines(naive))
    assert "did not hold" in "\n".join(profile.lines(naive)) and profile.lines(refused) == [
        f"04_persistent, softmax of {rows:,} x 4,096 bfloat16: no room"
    ]
    command = profiler[1]
    assert command[:3] == ["ncu", "--clock-control", "none"] and "--profile-from-start" in command


def test_another_dimension_is_compared_with_what_it_must_move(profiler: Answers):
    cells = 2 * 600 * 8200
    items = profile.items_of([("fused_softmax", "softmax_backward", 600)], "bfloat16", cells, 8200)
    profiler.answers.append((0, said(*items) + table(("spin_kernel", 0, 0), ("resident", 4.1 * cells, 2 * cells))))
    (one,) = profile.profile(items, "h200")
    assert (one.n_rows, one.n_cols, one.inner) == (2 * 8200, 600, 8200) and one.predicted_read == 4 * cells
    assert one.predicted_written < 2 * cells and one.counters["peak"] == 91.5
    assert "softmax_backward of (2, 600, 8,200) over dimension 1, bfloat16" in profile.lines(one)[0]
    assert json.loads(profiler[0][-1]) == [["fused_softmax", "softmax_backward", "bfloat16", 2 * 8200, 600, 8200]]


def test_shapes_of_several_ops_and_dtypes_are_counted_in_one_process(profiler: Answers):
    ops = "softmax", "softmax_backward"
    items = profile.tensor_items([(2, 112, 17172), (64, 4096, 1)], ("bfloat16", "float32"), ops)
    kernels = [kernel for _ in items for kernel in (("spin_kernel", 0, 0), ("tiles", 1, 1))]
    profiler.answers.append((0, said(*items, plan="spatial: 1 CTA") + table(*kernels)))
    found = profile.profile(items, "h200")
    assert [(p.n_rows, p.n_cols, p.inner) for p in found[::4]] == [(2 * 17172, 112, 17172), (64, 4096, 1)]
    assert [(p.op, p.dtype) for p in found[:4]] == [(op, d) for op in ops for d in ("bfloat16", "float32")]
    cells = 2 * 112 * 17172
    assert [p.predicted_read for p in found[:4]] == [2 * cells, 4 * cells, 4 * cells, 8 * cells]
    assert {p.plan for p in found} == {"spatial: 1 CTA"} and {p.kernels for p in found} == {("tiles",)}
    alone, under_ncu = profiler
    assert under_ncu[-len(alone) :] == alone and json.loads(alone[-1]) == [list(item) for item in items]
    assert set(profiler.seconds) == {profile.SECONDS + 8 * profile.SECONDS_OF_ITEM}


@pytest.mark.parametrize(
    ("line", "items"),
    [
        ("--shapes 2x112x17172", [("softmax", "bfloat16", 2 * 17172, 112, 17172)]),
        (
            "--shapes 3x5x2,9X64x1 --op logsumexp --dtype fp16,fp32 --systems fused_softmax --elements 7",
            [
                ("logsumexp", "float16", 6, 5, 2), ("logsumexp", "float32", 6, 5, 2),
                ("logsumexp", "float16", 9, 64, 1), ("logsumexp", "float32", 9, 64, 1),
            ],
        ),
        ("--inner 64 --widths 100 --elements 20000 --dtype fp32", [("softmax", "float32", 192, 100, 64)]),
        (
            "--widths 100 --op softmax,logsumexp --elements 1000",
            [("softmax", "bfloat16", 10, 100, 1), ("logsumexp", "bfloat16", 10, 100, 1)],
        ),
    ],
)  # fmt: skip
def test_the_command_counts_what_is_named(line: str, items: list[Any], monkeypatch: pytest.MonkeyPatch):
    asked: list[Item] = []
    monkeypatch.setattr(measure, "expect_gpu", lambda: None)
    monkeypatch.setattr(measure, "_gpu_here", lambda: "h200")
    monkeypatch.setattr(profile, "profile", lambda items, gpu: asked.extend(items) or [])
    result = CliRunner().invoke(app, ["profile", *line.split()], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert asked == [("fused_softmax", *item) for item in items]


def test_counters_that_a_version_lacks_are_left_out(profiler: Answers):
    absent = METRICS["stall_imc_miss"]
    profiler.answers.append((1, f"==ERROR== Failed to find metric {absent}\n"))
    item = Item("02_one_row", "softmax", "float32", 1, 8)
    profiler.answers.append((0, said(item) + table(("spin_kernel", 0, 0), ("k", 1, 1))))
    runs, kernels = profile.run_ncu([])
    assert len(kernels) == 2 and runs == [[*item, "", ""]]
    asked = [command[command.index("--metrics") + 1].split(",") for command in profiler if command[0] == "ncu"]
    assert absent in asked[0] and absent not in asked[1] and len(asked[1]) == len(METRICS) - 1
    profiler.answers.append((1, f"==ERROR== Failed to find metric {METRICS['read']}\n"))
    with pytest.raises(NoProfiler, match="no counter dram__bytes_read.sum"):
        profile.run_ncu([])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "run as root"),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded", "a sandbox or a container"),
        ("==WARNING== No kernels were profiled.", "no kernel was profiled"),
        ("==ERROR== Something new", "Something new"),
        ("", "no message"),
    ],
)
def test_a_profiler_that_counts_nothing_says_why(text: str, why: str, profiler: Answers):
    profiler.answers.append((1, text))
    with pytest.raises(NoProfiler, match=why):
        profile.run_ncu([])


def test_no_ncu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    with pytest.raises(NoProfiler, match="install NVIDIA Nsight Compute"):
        profile.run_ncu([])


def test_every_lesson_is_profiled():
    runs = profile.default_runs()
    numbered = {int(name[:2]) for name, _, _ in runs if name != "fused_softmax"}
    assert numbered == set(lessons.numbers()) - {10}  # lesson 10's kernel is the shipped one
    assert {op for name, op, n in runs if name == "fused_softmax" and n == 4096} == set(EXPLAINED)
    assert ("06_three_pass", "softmax", 131072) in runs and len(runs) == len(set(runs))


def test_the_systems_of_other_ops_are_their_lessons():
    for system, n in SUBJECTS.items():
        assert lessons.load(n).SYSTEM == system and subject_named(system) is lessons.load(n).SUBJECT


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("system", "op"), [("11_over_gpus", "softmax"), ("13_cross_entropy", "softmax"), ("07_online", "softmax")]
)
def test_what_is_run_runs(system: str, op: str):
    call, arguments = profile.runnable(Item(system, op, "float32", 4, 96), torch.device("cpu"))
    result = call(*arguments)
    assert as_tuple(result)[-1].shape == (4, 96)


@pytest.mark.interpreted
@pytest.mark.parametrize("op", ["softmax", "softmax_backward"])
def test_another_dimension_runs(op: str):
    call, arguments = profile.runnable(Item("fused_softmax", op, "float32", 6, 20, 3), torch.device("cpu"))
    assert all(t.shape == (2, 20, 3) for t in arguments)
    assert call(*arguments).shape == (2, 20, 3)


@pytest.mark.interpreted
def test_the_process_says_the_plan_or_the_failure_of_each_item(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    items = [
        Item("fused_softmax", "softmax", "float32", 6, 20, 3),
        Item("07_online", "softmax", "float32", 4, 96),
        Item("fused_softmax", "logsumexp", "bfloat16", 4, 96),
        Item("fused_softmax", "nosuch", "float32", 4, 96),
    ]
    run_here = profile.runnable
    monkeypatch.setattr(profile, "runnable", lambda item, device: run_here(item, torch.device("cpu")))
    for name in ("empty_cache", "synchronize", "_sleep", "profiler.start", "profiler.stop"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *cycles: None)
    monkeypatch.setattr(sys, "argv", ["profile.py", json.dumps(items)])
    profile.main()
    lines = capsys.readouterr().out.splitlines()
    ran = [json.loads(line.removeprefix(profile.SAID)) for line in lines]
    assert [Item(*item) for *item, _, _ in ran] == items
    planes, lesson, rows, unknown = [(plan, failed) for *_, plan, failed in ran]
    assert planes[0].startswith("spatial") and rows[0] and not lesson[0]
    assert not (planes[1] or lesson[1] or rows[1]) and unknown[0] == "" and unknown[1]
