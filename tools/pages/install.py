"""What `fused-softmax doctor` printed on a GPU, for docs/install.md, from the recorded run of the code blocks."""

from __future__ import annotations

import json
from pathlib import Path

from pages.code_blocks import RECORD

PAGE = Path("docs") / "install.md"


def tables(root: Path) -> dict[str, str]:
    """The text between the page's markers."""
    file = root / RECORD
    if not file.is_file():
        return {"doctor": "No run on a GPU is recorded yet."}
    found = json.loads(file.read_text(encoding="utf-8"))
    head = found["header"]
    where = f"{head['device']}, commit {head['commit'][:7]}, {head['date'][:10]}"
    return {"doctor": f"Recorded on {where}:\n\n```text\n{found['doctor'].strip()}\n```"}
