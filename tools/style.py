"""Checks pages, docstrings and comments for a finite list of words and for long sentences; exits 1 if it finds one.

    python tools/style.py            all files
    python tools/style.py FILE...    these files

A pattern has the advice that is printed with it. What is right all the same stands in EXCEPTIONS, with its text. The
rules behind the list: subject, verb, object; one idea a sentence; the field's nouns; American spelling.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# the most words of a sentence, by page; other pages may have OTHER_PAGES
LONGEST = {"README.md": 30, "docs/index.md": 30}
OTHER_PAGES = 40
# records in words, and what is generated
LEFT_OUT = ("docs/performance/", "docs/lessons/l", "docs/api/command.md", "LICENSE")
PATTERNS = {
    r"\bbut for\b": "write `except`",
    r"\bbeside\b": "write `next to`, or `in addition to`",
    r"\b(that|those) which\b|\b(one|some|all|both|none|each|many|most) of which\b": "begin a new sentence",
    r"\bmend(s|ed|ing)?\b": "write `fix`",
    r"(?<![\w.,)])\.\d+\b": "write 0.93, not .93",
    r"\b(neighbour|colour|behaviour|favour|honour|centre|catalogue|grey)": "American spelling",
    r"\b(synchron|normal|optim|initial|recogn|special|organ|vector|summar|minim|maxim|real|util)is(e|es|ed|ing|ation)\b":
        "American spelling",
    r"\b(what|which) (it|they|this|that) (is|are) not\b": "say what it is",
    r"\b(nobody|no one)\b": "name the subject",
    r"\bthe way of\b|\bas is\b(?! )|\bfor want of\b|\bwhence\b|\bthereof\b|\bought to\b|\bshall\b": "plain words",
    r"(?<![\w>(,.] )(?<![\w>(,.])\.\.\. [A-Za-z]": "no ellipsis of words",
    r"\b(walks?|walked|walking) (over|through|along|the row)\b|\b(twice|once)[- ]walked\b": "write `pass` or `read`",
    r"\b(parked|parking|rungs?)\b": "write `staged in shared memory`, `table entry`",
    r"\b(ladders? of its own|lane's number more|number more for)\b": "the field's nouns",
    r"—": "use a comma, a colon or a new sentence",
    r"\b(very very|in order to|utilize|leverage|seamless|blazing)": "plain words",
}  # fmt: skip
# (path, text of the line): right as it is
EXCEPTIONS: tuple[tuple[str, str], ...] = (
    ("tools/style.py", ""),
    # doctests
    ("src/fused_softmax/launch/context.py", "..."),
    ("src/fused_softmax/patch.py", "..."),
    ("src/fused_softmax/stats.py", "..."),
)


def pages(root: Path) -> list[Path]:
    """The pages that a person wrote."""
    found = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / ".github").rglob("*.md")]
    return [page for page in sorted(found) if not page.relative_to(root).as_posix().startswith(LEFT_OUT)]


def sources(root: Path) -> list[Path]:
    """The Python files whose docstrings and comments are read."""
    return [file for folder in ("src", "tools") for file in sorted((root / folder).rglob("*.py"))]


def prose(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each paragraph, list item, heading and table cell of a page, without code and addresses."""
    text = re.sub(r"<!--.*?-->", _blank, text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```$", _blank, text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    block: list[str] = []
    start = 1
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        bare = line.strip()
        begins = bool(re.match(r"([-*+]|\d+\.) |[#>|]", bare))
        if block and (not bare or begins):
            yield start, " ".join(block)
            block = []
        if bare.startswith("|"):
            yield from ((number, cell.strip()) for cell in bare.strip("|").split("|"))
        elif bare and not line.startswith("    ") or (block and bare):
            start = start if block else number
            block.append(re.sub(r"^([-*+]|\d+\.|#+) ", "", bare))


def _blank(found: re.Match[str]) -> str:
    return "\n" * found[0].count("\n")


def comments(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each line of each docstring and comment of a Python file."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            text_of = first.value.value if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) else ""
            if isinstance(text_of, str):
                for offset, line in enumerate(text_of.splitlines()):
                    yield first.lineno + offset, line.strip()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def words(sentence: str) -> int:
    """The number of words; code in backticks is one."""
    return len(re.sub(r"`[^`]*`", "code", sentence).split())


def sentences(text: str) -> list[str]:
    """The sentences of a paragraph; a colon and a semicolon end one, too."""
    return re.split(r"(?<=[.!?:;])[*\"')]*\s+(?=[A-Z`\"'(\[*]|[a-z])", text)


def problems(root: Path, file: Path) -> Iterator[str]:
    """What is wrong in a file, a line each."""
    name, text = file.relative_to(root).as_posix(), file.read_text(encoding="utf-8")
    parts = list(prose(text) if file.suffix == ".md" else comments(text))
    for line, part in parts:
        said = re.sub(r"`[^`]*`", "", part)
        for pattern, advice in PATTERNS.items():
            found = re.search(pattern, said, re.IGNORECASE)
            if found and not any(name == path and excused in part for path, excused in EXCEPTIONS):
                yield f"{name}:{line}: {found[0].strip()!r}: {advice}"
        if file.suffix == ".md":
            most = LONGEST.get(name, OTHER_PAGES)
            for sentence in sentences(part):
                if words(sentence) > most:
                    yield f"{name}:{line}: {words(sentence)} words, {most} are allowed: {sentence[:60]}..."


def main(arguments: list[str]) -> int:
    """Print the problems; the exit status."""
    files = [Path(name).resolve() for name in arguments] or [*pages(ROOT), *sources(ROOT)]
    found = [problem for file in files for problem in problems(ROOT, file)]
    for problem in found:
        print(problem)
    print(f"{len(files)} files, {len(found)} problems")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
