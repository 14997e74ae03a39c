"""Every lesson is right where it says so and wrong where it says so, and moves the elements that its model counts."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch

from fused_softmax.lab import lessons, reference
from fused_softmax.lab.lessons import sources
from fused_softmax.lab.traffic import MODELS, traffic

ALL = lessons.numbers()
LADDER = range(1, 11)  # with a driver and mistakes of their own
KERNELS = range(2, 11)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
interpreted = pytest.mark.interpreted


def rows(n_rows: int, n_cols: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(n_rows, n_cols) * 3
    x[:, n_cols // 2] += 20  # an outlier, or a forgotten maximum would not show
    return x.to(dtype)


def assert_softmax(y: torch.Tensor, x: torch.Tensor) -> None:
    eps = torch.finfo(x.dtype).eps
    assert y.dtype == x.dtype and y.shape == x.shape
    # half an ulp of rounding in PyTorch and on a GPU; a whole one where the interpreter truncates bfloat16
    tolerance = {"rtol": max(1.01 * eps, 2e-6), "atol": 1e-7}
    torch.testing.assert_close(y.double(), reference.softmax(x, 1), equal_nan=True, **tolerance)


@pytest.mark.parametrize("n", ALL)
def test_five_parts_each_with_text_and_a_command(n):
    parts = lessons.parts(n)
    assert tuple(parts) == lessons.PARTS
    assert all(len(text.split()) >= 8 for text in parts.values())
    commands = [line for line in parts["Measurement"].splitlines() if line.startswith("$ ")]
    assert len(commands) == 1
    assert lessons.title(n).startswith(f"{n:02}. ")


@pytest.mark.parametrize("n", ALL)
def test_the_measurement_names_systems_and_widths_that_bench_knows(n):
    from fused_softmax.lab.bench import systems

    (command,) = [line for line in lessons.parts(n)["Measurement"].splitlines() if line.startswith("$ ")]
    words = command.split()
    assert words[1:3] == ["fused-softmax", "bench"]
    assert set(words[words.index("--systems") + 1].split(",")) <= {system.name for system in systems.SYSTEMS}
    assert all(int(width) > 0 for width in words[words.index("--widths") + 1].split(","))


@pytest.mark.parametrize("n", ALL)
def test_every_lesson_cites_its_sources(n):
    cited = sources.SOURCES[n]
    assert cited and len({source.url for source, _ in cited}) == len(cited)
    for (source, what), line in zip(cited, sources.lines(n), strict=True):
        assert source.url.startswith("https://") and source.url in line and len(what.split()) >= 2


@pytest.mark.parametrize("n", [0, 99])
def test_no_such_lesson(n):
    with pytest.raises(ValueError, match="is not one of 1, 2, "):
        lessons.load(n)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("n_rows", [1, 3])
@pytest.mark.parametrize("n_cols", [1, 3, 127, 1000, 1024, 1025])
@pytest.mark.parametrize("n", LADDER)
def test_right(n, n_cols, n_rows, dtype):
    x = rows(n_rows, n_cols, dtype)
    y = lessons.load(n).softmax(x)
    if n == 1 and dtype != torch.float32:
        # five passes round to the input's dtype five times
        torch.testing.assert_close(y.double(), reference.softmax(x, 1), rtol=0.05, atol=0.02)
    else:
        assert_softmax(y, x)


@interpreted
@pytest.mark.parametrize("n", LADDER)
def test_infinities_and_nan_stay_in_their_rows(n):
    x = rows(6, 5000, torch.float32)
    x[0] = -math.inf
    x[1, 7] = math.inf
    x[2, 4999] = math.nan
    x[3, :2048] = -math.inf  # a whole tile of lessons 06 and 07: first, middle, last
    x[4, 2048:4096] = -math.inf
    x[5, 4096:] = -math.inf
    y = lessons.load(n).softmax(x)
    assert y[:3].isnan().all() and not y[3:].isnan().any()
    assert_softmax(y, x)


@interpreted
@pytest.mark.parametrize("n", LADDER)
def test_worked_examples(n):
    from fused_softmax.lab.lessons.shown import WORKED, WORKED_RESULT

    y = lessons.load(n).softmax(WORKED)
    assert torch.equal(y.double().round(decimals=3), WORKED_RESULT.double().round(decimals=3))


@interpreted
@pytest.mark.parametrize("n", LADDER)
def test_every_mistake_is_wrong_and_the_lesson_is_not(n):
    from fused_softmax.lab.lessons.shown import error, shown_inputs

    lesson, inputs = lessons.load(n), shown_inputs()
    assert lesson.MISTAKES
    assert max(error(lesson.softmax(x), x) for x in inputs.values()) < 1e-6
    for label, mistake in lesson.MISTAKES.items():
        assert max(error(mistake(x), x) for x in inputs.values()) > 5e-3, label


@interpreted
def test_what_wrong_fills_do():
    mistakes = lessons.load(2).MISTAKES
    x = rows(2, 1000, torch.float32) - 30
    assert mistakes["masked lanes filled with +inf"](x).isnan().all()
    assert (mistakes["masked lanes not filled"](x).sum(1) < 0.99).all()
    x = rows(2, 1024, torch.float32)
    for mistake in mistakes.values():  # no lane is masked at a power of two
        assert_softmax(mistake(x), x)


@interpreted
def test_published_kernel_leaves_what_is_beyond_512_columns():
    published = lessons.load(5).published
    assert_softmax(published(x := rows(2, 512, torch.float32)), x)
    y = published(rows(2, 4096, torch.float32))
    assert not y[:, :512].isnan().any() and y[:, 512:].isnan().all()


@interpreted
@pytest.mark.parametrize("n_cols", [3, 127])
def test_many_rows_in_tiles_that_do_not_divide_them(n_cols):
    assert_softmax(lessons.load(8).softmax(x := rows(77, n_cols, torch.float32)), x)


@interpreted
def test_persistent_programs_walk_over_all_rows():
    lesson = lessons.load(4)
    x = rows(11, 33, torch.float32)
    y = torch.empty_like(x)
    for launch in lesson.launches(x, y, programs=3):
        assert launch.grid == (3,)
        launch()
    assert_softmax(y, x)


@interpreted
def test_strides_are_read_where_they_lie():
    lesson = lessons.load(3)
    for x in (rows(3, 200, torch.float32)[:, 20:90], rows(90, 3, torch.float32).T):
        assert_softmax(lesson.softmax(x), x)


@interpreted
@pytest.mark.parametrize("n", KERNELS)
@pytest.mark.parametrize("shape", [(0, 5), (3, 0)], ids=str)
def test_empty(n, shape):
    assert lessons.load(n).softmax(torch.zeros(shape)).shape == shape


@interpreted
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_wider_than_a_block_is_refused(n):
    with pytest.raises(ValueError, match="1048577 columns"):
        lessons.load(n).softmax(torch.empty(1, 2**20 + 1, dtype=torch.float16))


def test_pass_table_is_what_the_passes_move():
    lesson = lessons.load(1)
    m, n = 7, 100
    counted = reference.traffic(lesson.softmax, torch.randn(m, n))
    said = [tuple(mn * m * n + rows * m for mn, rows in (p.reads, p.writes)) for p in lesson.PASSES]
    assert said == [(p.reads, p.writes) for p in counted]
    assert [sum(p.reads[i] for p in lesson.PASSES) for i in (0, 1)] == [5, 2]
    assert [sum(p.writes[i] for p in lesson.PASSES) for i in (0, 1)] == [3, 2]
    model = MODELS[lesson.SYSTEM](m, n)
    assert (model.reads, model.writes) == (sum(r for r, _ in said), sum(w for _, w in said))
    from inspect import getsource

    body = getsource(reference.naive_softmax).splitlines()[-len(lesson.PASSES) :]
    assert [line.strip() for line in body] == [p.line for p in lesson.PASSES]


@interpreted
@pytest.mark.parametrize("n", KERNELS)
def test_kernels_move_what_their_model_counts(n, monkeypatch):
    from triton.runtime.interpreter import InterpreterBuilder

    moved = {"reads": 0, "writes": 0}
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counting_load(self, ptrs, mask, *rest):
        moved["reads"] += int(mask.data.sum())
        return load(self, ptrs, mask, *rest)

    def counting_store(self, ptrs, value, mask, *rest):
        moved["writes"] += int(mask.data.sum())
        return store(self, ptrs, value, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counting_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", counting_store)
    lesson, m, n_cols = lessons.load(n), 3, 3001
    lesson.softmax(torch.randn(m, n_cols))
    model = traffic(lesson.SYSTEM, m, n_cols, regime="cluster")  # of the shipped kernel; a lesson has but one
    assert moved == {"reads": model.reads, "writes": model.writes}


@interpreted
@pytest.mark.parametrize("n", [n for n in ALL if n > 11])
def test_lessons_on_other_ops_are_right_and_their_mistakes_wrong(n):
    from fused_softmax.lab.lessons.shown import other_error, shown_inputs

    lesson = lessons.load(n)
    function, subject = getattr(lesson, lesson.SUBJECT.function), lesson.SUBJECT
    inputs = [subject.arguments(x) for x in shown_inputs().values()]
    assert max(other_error(function(*a), subject.exact(*a)) for a in inputs) < 1e-5
    for label, mistake in lesson.MISTAKES.items():
        assert max(other_error(mistake(*a), subject.exact(*a)) for a in inputs) > 5e-3, label
    with pytest.raises(ValueError, match="at most"):
        lesson.launches_for(torch.empty(1, 2**20 + 1, device="meta"))


@interpreted
@pytest.mark.parametrize("n_cols", [1, 1025, 5000])
def test_each_step_of_lesson_16_is_right(n_cols):
    lesson = lessons.load(16)
    for step in lesson.STEPS:
        for dtype in (torch.float32, torch.bfloat16):
            x = rows(3, n_cols, dtype)
            assert_softmax(lesson.softmax(x, step), x)
    (launch,) = lesson.launches(x, torch.empty_like(x))
    covered = launch.meta["CHUNKS"] * launch.meta["VECTORS"] * launch.meta["VEC"]
    assert launch.meta["UNPREDICATED"] < launch.meta["CHUNKS"] and n_cols <= covered < n_cols + 4096


@pytest.mark.compiled
def test_lesson_16_reads_an_odd_width_in_vectors_from_the_step_that_says_so():
    from fused_softmax.lab.cross_compile import cross_compile

    lesson, x = lessons.load(16), torch.empty(3, 1025, dtype=torch.bfloat16, device="meta")
    widest = {}
    for step in lesson.STEPS:
        used = cross_compile(lesson.launches(x, torch.empty_like(x), step)[0], "sm_90")
        widest[step] = used.widest_load_bytes
        assert used.spilled_bytes == 0
    assert widest == {"one block": 2, "chunks": 2, "own sums": 2, "head and tail": 16, "eviction hints": 16}


@interpreted
@pytest.mark.extended
@pytest.mark.parametrize("n", [14])
def test_a_lesson_on_another_op_prints_itself(n, capsys):
    from fused_softmax.lab.lessons import shown

    shown.show(n)
    said = capsys.readouterr().out
    assert all(f"\n{heading}\n" in said for heading in lessons.PARTS)
    assert "Results of causal_softmax" in said and said.count("WRONG") == 2 and "Compiled for sm_90" in said


@interpreted
def test_a_lesson_prints_itself(capsys):
    from fused_softmax.lab.lessons import shown

    shown.show(1)
    said = capsys.readouterr().out
    assert all(f"\n{heading}\n" in said for heading in lessons.PARTS)
    assert "[0.665, 0.245, 0.090]" in said and "WRONG" in said and "reads 20,973,568" in said


@pytest.mark.compiled
@pytest.mark.extended
def test_a_lesson_runs_without_a_gpu_from_a_process_that_does_not_interpret():
    command = [sys.executable, "-m", "fused_softmax.lab.lessons.l04_persistent"]
    no_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, env=no_gpu).stdout
    assert "through the interpreter" in said and "[0.659, 0.242, 0.099]" in said
    (wide,) = [text for text in said.split("columns: ")[1:] if "out of resources" in text]
    assert "393,248 bytes" in wide
