"""A lesson's puzzle: its answer file with the core replaced by a hint."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from fused_softmax.lab import lessons

EMPTY = "pass  # replace this line"
_CORE = re.compile(r"^( *)# write: (.*?)\n(.*?)^\1# end\n", re.MULTILINE | re.DOTALL)


def answer_file(n: int) -> Path:
    """The file of lesson n's answer; ValueError where the lesson has no puzzle."""
    name = lessons.module_name(n).rpartition(".")[2]
    spec = find_spec(f"{lessons.__name__}.puzzles.{name}")
    if spec is None or spec.origin is None:
        raise ValueError(f"lesson {n} has no puzzle yet")
    return Path(spec.origin)


def has_puzzle(n: int) -> bool:
    """Whether lesson n has a puzzle."""
    try:
        return answer_file(n).exists()
    except ValueError:
        return False


def answer(n: int) -> str:
    """A right answer to lesson n's puzzle: the text of a Python file."""
    return answer_file(n).read_text(encoding="utf-8")


def puzzle(n: int) -> str:
    """The answer with each core left out; the hint of the core stays."""
    left_out = _CORE.sub(lambda core: f"{core[1]}# write: {core[2]}\n{core[1]}{EMPTY}\n{core[1]}# end\n", answer(n))
    return f"# fused-softmax lesson {n} --try THIS_FILE  grades it.\n{left_out}"


def core_lines(n: int) -> set[str]:
    """The lines, without indentation, that the puzzle leaves out: the important lines of the lesson's kernel."""
    cores = (core[3] for core in _CORE.finditer(answer(n)))
    return {line.strip() for core in cores for line in core.splitlines() if line.strip()}
