"""The check of style finds what it is for, and leaves alone what it should."""

from __future__ import annotations

from pathlib import Path

import pytest

import style

ROOT = Path(__file__).resolve().parents[2]


def found(tmp_path: Path, name: str, text: str) -> list[str]:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
    return list(style.problems(tmp_path, tmp_path / name))


@pytest.mark.parametrize(
    "line",
    [
        "It is right but for one case.",
        "The mended kernel covers the row.",
        "It reaches .93 of a copy.",
        "Its neighbour is a column.",
        "It has two parts, both of which are read.",
        "Nobody reads it.",
        "Nothing synchronises here.",
        "Chunks are parked on chip.",
        "It stands beside a copy.",
    ],
)
@pytest.mark.parametrize("name", ["docs/page.md", "module.py"])
def test_a_planted_fault_is_found(name: str, line: str, tmp_path: Path):
    text = f'"""Return a number.\n\n{line}\n"""\n' if name.endswith(".py") else f"# Page\n\n{line}\n"
    (problem,) = found(tmp_path, name, text)
    assert problem.startswith(f"{name}:3: ")


def test_a_comment_is_read_and_code_is_not(tmp_path: Path):
    assert len(found(tmp_path, "a.py", "x = '.93 but for'  # right but for one\n")) == 1
    page = "# Page\n\n```\nright but for one, .93\n```\n\n`but for`, 0.93 and 1.5 (a.93)\n\n    but for\n"
    assert found(tmp_path, "docs/a.md", page) == []


def test_a_long_sentence_is_found_in_readme_and_a_cell_counts_alone(tmp_path: Path):
    words = " ".join(["word"] * 29)
    assert found(tmp_path, "README.md", f"A {words}. A {words}.\n") == []
    (problem,) = found(tmp_path, "README.md", f"A {words} more. Short.\n")
    assert "31 words, 30 are allowed" in problem
    assert found(tmp_path, "README.md", f"| a | b |\n|---|---|\n| {words} | {words} |\n") == []
    assert found(tmp_path, "docs/other.md", f"A {words} more.\n") == []


def test_the_command_fails_where_something_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(style, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text("# Page\n\nIt is right.\n")
    assert style.main([]) == 0
    (tmp_path / "README.md").write_text("# Page\n\nIt is right but for one.\n")
    assert style.main([]) == 1
    assert "README.md:3: 'but for': write `except`\n1 files, 1 problems" in capsys.readouterr().out
