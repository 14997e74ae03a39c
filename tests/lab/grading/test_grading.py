"""The grader tells right files from wrong ones, and names each lesson's most common mistakes."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from mutants import MUTANTS, Mutant

from fused_softmax.lab import lessons
from fused_softmax.lab.grading import answer, grade, puzzle
from fused_softmax.lab.grading.puzzle import EMPTY, core_lines
from fused_softmax.lab.grading.subjects import subject_of
from fused_softmax.lab.grading.worker import Finding, judge, load_function

interpreted, extended = pytest.mark.interpreted, pytest.mark.extended
PUZZLES = sorted({mutant.lesson for mutant in MUTANTS})
# a right file and a wrong one of these lessons in each run; the others where there is time
CHEAP = (2,)


def judged(n: int, text: str, folder: Path) -> Finding:
    file = folder / f"answer_{n:02}.py"
    file.write_text(text)
    subject = subject_of(n)
    return judge(n, load_function(file, subject.function), subject, text)


def test_three_mistakes_of_each_lesson_are_planted():
    assert set(PUZZLES) == set(lessons.numbers())
    for n in PUZZLES:
        assert len({m.mistake for m in MUTANTS if m.lesson == n}) >= 3, n


@pytest.mark.parametrize("n", PUZZLES)
def test_a_puzzle_keeps_the_hint_and_loses_the_core(n: int):
    text = puzzle(n)
    compile(text, "puzzle", "exec")
    assert EMPTY in text and "# write: " in text and EMPTY not in answer(n)
    assert core_lines(n) - {line.strip() for line in text.splitlines()}


@interpreted
@pytest.mark.parametrize("n", [n if n in CHEAP else pytest.param(n, marks=extended) for n in PUZZLES])
def test_a_right_file_is_right_and_an_empty_one_is_not(n: int, tmp_path: Path):
    found = judged(n, answer(n), tmp_path)
    assert found.right and not found.lines and not found.mistake, found
    assert (found.reads, found.writes) == (found.model_reads, found.model_writes) and found.inputs >= 10
    empty = judged(n, puzzle(n), tmp_path)
    assert not empty.right and empty.mistake == "the core is still empty" and EMPTY in empty.hint


@interpreted
@pytest.mark.parametrize(
    "mutant", [m if m.lesson in CHEAP else pytest.param(m, marks=extended) for m in MUTANTS], ids=lambda m: m.name
)
def test_a_wrong_file_is_told_by_its_mistake(mutant: Mutant, tmp_path: Path):
    found = judged(mutant.lesson, mutant.text(), tmp_path)
    assert not found.right
    assert found.mistake == mutant.mistake, found
    assert len(found.hint.split()) > 5


@interpreted
@extended
@pytest.mark.parametrize("n", PUZZLES)
def test_the_answer_gives_what_the_lesson_gives(n: int, tmp_path: Path):
    import torch

    from fused_softmax.lab.grading.subjects import inputs
    from fused_softmax.lab.grading.trials import as_tuple, close

    (tmp_path / "a.py").write_text(answer(n))
    subject, lesson = subject_of(n), lessons.load(n)
    assert isinstance(lesson, ModuleType)
    mine = load_function(tmp_path / "a.py", subject.function)
    for x in (inputs()["an odd width"], inputs()["rising and falling rows"]):
        arguments = subject.arguments(x)
        ours = as_tuple(getattr(lesson, subject.function)(*arguments))
        for a, b in zip(as_tuple(mine(*arguments)), ours, strict=True):
            assert bool(close(a, b.double(), 1e-5).all()) and torch.equal(a.isnan(), b.isnan())


# --- the process around it ------------------------------------------------------------------------------------------

ENDS = [
    ("while True:\n    pass\n", "no end within 3 seconds of the processor: does each loop advance?"),
    ("import time\ntime.sleep(600)\n", "or does it wait for something?"),
    ("def softmax(x):\n    return x +\n", "line 2 is no Python"),
    ("import nosuch\n", "line 1: ModuleNotFoundError"),
    ("y = 1\n", "defines no function softmax"),
    ("def softmax(x):\n    import os\n    os._exit(3)\n", "status 3"),
    ("def softmax(x):\n    import os\n    os.abort()\n", "SIGABRT"),
    ("import sys\nsys.exit('tired')\n", "SystemExit: tired"),
    ("def softmax(x):\n    print('{\"right\": true}')\n    raise KeyError('x')\n", "KeyError"),
    ("def softmax(x):\n    return x.double()\n", "float32 is expected"),
    ("def softmax(x):\n    return x[:1]\n", "has the shape"),
    ("def softmax(x):\n    x.fill_(1)\n    return x\n", "an input was changed"),
]


@interpreted
@pytest.mark.parametrize(
    ("text", "said"), [case if "nosuch" in case[0] else pytest.param(*case, marks=extended) for case in ENDS]
)
def test_a_file_that_hangs_raises_or_ends_gets_a_message(text: str, said: str, tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(text)
    found = grade(2, file, seconds=3 if "while" in text or "sleep" in text else 60)
    assert not found.right and any(said in line for line in found.lines), found
    assert not any("Traceback" in line for line in found.lines)


@interpreted
@extended
def test_a_file_that_writes_outside_gets_a_message(tmp_path: Path):
    (mutant,) = (m for m in MUTANTS if m.lesson == 2 and "store" in m.mistake)
    (tmp_path / "mine.py").write_text(mutant.text())
    found = grade(2, tmp_path / "mine.py")
    assert not found.right and any("elements past the end of y_ptr" in line for line in found.lines), found
