"""The notebook of all lessons: `python -m pages` writes it, from the lessons themselves.

Its code runs in plain Python, too: it has no magic commands. A machine without a GPU interprets the kernels.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fused_softmax.lab import lessons
from fused_softmax.lab.grading import has_puzzle

NOTEBOOK = Path("notebooks") / "lessons.ipynb"
INTRODUCTION = """# Softmax kernels, lesson by lesson

Each lesson has a problem, a mechanism, what it costs, and how it usually fails. Its kernel runs here, next to float64,
and its mistakes run, too. Then comes a puzzle: the kernel with its core left out, and a grader.

Run the cells in order. Without a GPU the kernels run in Triton's interpreter, which is slow, and gives the same
results. Times need a GPU. Installation: `pip install 'fused-softmax[bench]'`."""
START = """import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is imported

from pathlib import Path

from fused_softmax.lab import grading
from fused_softmax.lab.lessons import shown

if torch.cuda.is_available():
    capability = torch.cuda.get_device_capability()
    print(torch.cuda.get_device_name(), "compute capability", ".".join(map(str, capability)))
    if capability < (8, 0):
        print("Kernels need 8.0: set TRITON_INTERPRET=1 before this notebook starts, and all lessons are interpreted.")
    elif capability < (9, 0):
        print("Lesson 09 needs thread-block clusters, from 9.0 on: its kernel is refused here. All others run.")
else:
    print("No GPU: kernels are interpreted, and nothing is timed.")"""
RUN = """try:
    shown.show_results({n})
except RuntimeError as error:  # a GPU that lacks what this lesson needs
    print("not on this GPU:", error)"""
PUZZLE = """file = Path("lesson_{n:02}.py")
if not file.exists():
    file.write_text(grading.puzzle({n}))
print(file.read_text())"""
GRADE = """print("\\n".join(grading.grade({n}, file, gpu=torch.cuda.is_available()).lines))"""


def _cell(kind: str, name: str, text: str) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "id": name, "metadata": {}, "source": text.splitlines(keepends=True)}
    return cell | {"execution_count": None, "outputs": []} if kind == "code" else cell


def cells() -> list[dict[str, Any]]:
    """All cells, in order."""
    found = [_cell("markdown", "introduction", INTRODUCTION), _cell("code", "start", START)]
    for n in lessons.numbers():
        parts = lessons.parts(n)
        text = "\n\n".join(f"### {heading}\n\n{part}" for heading, part in parts.items() if heading != "Measurement")
        found.append(_cell("markdown", f"lesson-{n:02}", f"## {lessons.title(n)}\n\n{text}"))
        found.append(_cell("code", f"run-{n:02}", RUN.format(n=n)))
        if not has_puzzle(n):
            continue
        puzzle = "### The puzzle\n\nThe file has the kernel with its core left out. Fill it in, and grade it."
        found.append(_cell("markdown", f"puzzle-{n:02}", puzzle))
        found.append(_cell("code", f"write-{n:02}", PUZZLE.format(n=n)))
        found.append(_cell("code", f"grade-{n:02}", GRADE.format(n=n)))
    return found


def notebook() -> str:
    """The notebook as JSON, without outputs."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells(), "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def update(root: Path, check: bool) -> bool:
    """Write the notebook; with `check` write nothing. Returns whether it is current now."""
    file, wanted = root / NOTEBOOK, notebook()
    if file.exists() and file.read_text(encoding="utf-8") == wanted:
        print(f"{NOTEBOOK} is what the lessons give")
        return True
    if check:
        print(f"{NOTEBOOK} is not what the lessons give: `make pages` rewrites it")
        return False
    file.parent.mkdir(exist_ok=True)
    file.write_text(wanted, encoding="utf-8")
    print(f"wrote {NOTEBOOK}")
    return True


def code(found: Sequence[dict[str, Any]]) -> list[str]:
    """The text of the code cells."""
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]
