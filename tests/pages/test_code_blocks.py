"""Every block of Python in README and the site runs; shell blocks name commands, options and targets that exist."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from fused_softmax.lab.cli import app
from pages import code_blocks
from pages.code_blocks import BLOCK, Block

ROOT = Path(__file__).resolve().parents[2]
SHELL = re.compile(r"^```(?:|bash|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^    \S.*\n)+", re.MULTILINE)
KNOWN = ("fused-softmax", "make", "pip", "python")


def shell_lines() -> list[tuple[str, str]]:
    """(page, line) of each command in a shell block or an indented block."""
    found = []
    for page in [*code_blocks.pages(ROOT), ROOT / "CONTRIBUTING.md"]:
        text = BLOCK.sub("", page.read_text(encoding="utf-8"))
        blocks = [*SHELL.findall(text), *INDENTED.findall(text)]
        lines = [line.strip() for block in blocks for line in block.splitlines()]
        found += [(page.name, line) for line in lines if line.split(" ")[0] in KNOWN]
    return found


@pytest.mark.extended
def test_every_block_that_needs_no_gpu_runs():
    results = code_blocks.run(ROOT, gpu=False)
    assert len(results) >= 15
    assert not [(r["page"], r["error"]) for r in results if r["error"]]
    quickstart = next(r for r in results if r["page"] == "README.md")
    assert quickstart["output"] == "a CPU tensor, and TRITON_INTERPRET is not set\n"


def test_a_block_that_raises_is_found_with_its_line():
    page = [Block("a.md", 7, "x = 1\n", False), Block("a.md", 12, "y = x\n1 / 0\n", False)]
    first, second = code_blocks.run_page(page)
    assert not first["error"] and "ZeroDivisionError" in second["error"] and 'File "a.md", line 13' in second["error"]


def test_a_block_inherits_no_future_import():
    page = [Block("a.md", 1, "def f(x: int): ...\n\nprint(f.__annotations__)\n", False)]
    (only,) = code_blocks.run_page(page)
    assert only["output"] == "{'x': <class 'int'>}\n"


def test_blocks_and_their_marks_are_found(tmp_path: Path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# x\n\n```python\nprint(1)\n```\n\n<!-- gpu -->\n```python\nprint(2)\n```\n")
    first, second = code_blocks.blocks(tmp_path)
    assert (first.line, first.code, first.gpu) == (4, "print(1)\n", False)
    assert (second.line, second.code, second.gpu) == (9, "print(2)\n", True)
    record = tmp_path / "record.json"
    assert code_blocks.unrecorded(tmp_path, record) == ["README.md:9"]
    kept = {"page": "README.md", "digest": second.digest, "gpu": True, "output": "2\n", "error": ""}
    record.write_text(json.dumps({"blocks": [kept]}))
    assert code_blocks.unrecorded(tmp_path, record) == []
    record.write_text(json.dumps({"blocks": [kept | {"error": "it failed"}]}))
    assert code_blocks.unrecorded(tmp_path, record) == ["README.md:9"]


def test_blocks_that_need_a_gpu_were_run_on_one_as_they_stand():
    assert code_blocks.unrecorded(ROOT, ROOT / code_blocks.RECORD) == []


@pytest.mark.parametrize(("page", "line"), shell_lines())
def test_a_command_on_a_page_exists(page: str, line: str):
    words = shlex.split(line, comments=True)
    if words[0] == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        named = [word for word in words[1:] if "=" not in word]
        assert named and set(named) <= targets, line
    elif words[0] == "fused-softmax":
        group: Any = typer.main.get_command(app)
        command = group.commands[words[1]] if not words[1].startswith("--") else group
        given = [word.split("=")[0] for word in words[1:] if word.startswith("--")]
        assert set(given) <= {name for p in command.params for name in p.opts} | {"--help"}, line
    elif words[0] == "python" and words[1].endswith(".py"):
        assert (ROOT / words[1]).is_file(), line
    elif words[0] == "pip":
        extras = re.findall(r"\[([a-z,]+)\]", line)
        declared = re.findall(r"^([a-z]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        assert set(extras) <= set(declared), line
