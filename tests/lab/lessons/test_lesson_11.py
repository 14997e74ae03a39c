"""Lesson 11 is right on simulated GPUs and on processes, and its mistakes are wrong."""

from __future__ import annotations

import math

import pytest
import torch
from test_lessons import DTYPES, assert_softmax, rows

from fused_softmax.lab import lessons

lesson = lessons.load(11)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("n_cols", [1, 3, 127, 1000])
def test_right(n_cols, dtype):
    assert_softmax(lesson.softmax(x := rows(3, n_cols, dtype)), x)


def test_infinities_and_nan_stay_in_their_rows():
    x = rows(5, 400, torch.float32)
    x[0] = -math.inf
    x[1, 7] = math.inf
    x[2, 399] = math.nan
    x[3, :100] = -math.inf  # the first shard
    x[4, 200:300] = -math.inf
    y = lesson.softmax(x)
    assert y[:3].isnan().all() and not y[3:].isnan().any()
    assert_softmax(y, x)


def test_every_mistake_is_wrong_and_the_lesson_is_not():
    from fused_softmax.lab.lessons.shown import WORKED, WORKED_RESULT, error, shown_inputs

    inputs = shown_inputs()
    assert max(error(lesson.softmax(x), x) for x in inputs.values()) < 1e-6
    for label, mistake in lesson.MISTAKES.items():
        assert max(error(mistake(x), x) for x in inputs.values()) > 5e-3, label
    y = lesson.softmax(WORKED)
    assert torch.equal(y.double().round(decimals=3), WORKED_RESULT.double().round(decimals=3))


def test_two_numbers_of_each_row_are_sent():
    pairs = lesson.pair_of(rows(5, 4096, torch.bfloat16))
    assert pairs.shape == (5, 2) and pairs.dtype is torch.float32


@pytest.mark.extended
def test_processes_have_the_simulated_bits():
    x = rows(4, 1000, torch.float32)
    assert torch.equal(lesson.over_processes(x, lesson.RANKS), lesson.softmax(x))
