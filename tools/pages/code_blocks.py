"""Runs the Python blocks of README and the site, as a reader would: page by page, from the first block to the last.

    python -m pages.code_blocks                    runs what runs without a GPU
    python -m pages.code_blocks --record FILE      on a GPU: runs all and doctor, and writes what each printed
    python -m pages.code_blocks --check FILE       fails where a block that needs a GPU is not recorded as it stands

The blocks of a page share their names. A block after a line `<!-- gpu -->` needs a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"^(<!-- gpu -->\n)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RECORD = Path("benchmarks") / "results" / "h200" / "code_blocks.json"


@dataclass(frozen=True)
class Block:
    """A block of Python: its page, the line of its first statement, its text, and whether it needs a GPU."""

    page: str
    line: int
    code: str
    gpu: bool

    @property
    def digest(self) -> str:
        """Hash of the text: a recorded output belongs to this text alone."""
        return hashlib.sha256(self.code.encode()).hexdigest()[:16]


def pages(root: Path) -> list[Path]:
    """README and the pages that are kept in the repository; generated pages show code that tests run elsewhere."""
    generated = ("performance", "lessons")
    docs = [page for page in sorted((root / "docs").rglob("*.md")) if page.parent.name not in generated]
    return [root / "README.md", *docs]


def blocks(root: Path) -> list[Block]:
    """All blocks of Python, in the order of the pages."""
    return [
        Block(page.relative_to(root).as_posix(), text.count("\n", 0, found.start(2)) + 1, found[2], bool(found[1]))
        for page in pages(root)
        for text in [page.read_text(encoding="utf-8")]
        for found in BLOCK.finditer(text)
    ]


def run_page(found: list[Block]) -> Iterator[dict[str, Any]]:
    """Run the blocks of one page in this process; yields for each its output, and its error where it raised."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in found:
        out, error = io.StringIO(), ""
        with contextlib.redirect_stdout(out):
            try:
                # torch.compile and inspect want the source; blank lines give errors the page's own line numbers
                source = "\n" * (block.line - 1) + block.code
                exec(compile(source, block.page, "exec", dont_inherit=True), names)
            except Exception:
                error = traceback.format_exc(limit=-1)
        yield {"page": block.page, "digest": block.digest, "gpu": block.gpu, "output": out.getvalue(), "error": error}


def run(root: Path, gpu: bool) -> list[dict[str, Any]]:
    """Run the blocks of every page in a process for each page; those that need a GPU where there is one."""
    wanted = [block for block in blocks(root) if gpu or not block.gpu]
    results = []
    for page in dict.fromkeys(block.page for block in wanted):
        mine = [asdict(block) for block in wanted if block.page == page]
        where = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        where["PYTHONPATH"] = os.pathsep.join(sys.path)
        line = [sys.executable, "-m", "pages.code_blocks", "--page"]
        done = subprocess.run(line, input=json.dumps(mine), capture_output=True, text=True, env=where, timeout=300)
        if done.returncode:
            results.append({"page": page, "digest": "", "gpu": gpu, "output": "", "error": done.stderr[-2000:]})
        else:
            results += json.loads(done.stdout.splitlines()[-1])
    return results


def unrecorded(root: Path, file: Path) -> list[str]:
    """The blocks that need a GPU and are not in the record as they stand, or failed there."""
    kept = json.loads(file.read_text(encoding="utf-8"))["blocks"] if file.is_file() else []
    passed = {(block["page"], block["digest"]) for block in kept if not block["error"]}
    return [f"{b.page}:{b.line}" for b in blocks(root) if b.gpu and (b.page, b.digest) not in passed]


def main(arguments: list[str] | None = None) -> int:
    """Run or check the blocks; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="run all blocks on a GPU, and write this JSON file")
    parser.add_argument("--check", type=Path, help="compare the blocks that need a GPU with this record")
    parser.add_argument("--page", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, default=Path("."), help="the repository's root")
    asked = parser.parse_args(arguments)
    if asked.page:
        print(json.dumps(list(run_page([Block(**block) for block in json.load(sys.stdin)]))))
        return 0
    if asked.check is not None:
        missing = unrecorded(asked.root, asked.check)
        print("\n".join(f"{at} needs a GPU and is not recorded as it stands" for at in missing) or "all are recorded")
        return int(bool(missing))
    results = run(asked.root, gpu=asked.record is not None)
    failed = [result for result in results if result["error"]]
    for result in failed:
        print(f"{result['page']}: {result['error']}")
    print(f"{len(results) - len(failed)} blocks run, {len(failed)} failed")
    if asked.record is not None:
        from fused_softmax.lab.record import header, write_atomically
        from fused_softmax.launch.device import device_here

        made_by = f"python -m pages.code_blocks --record {asked.record.name}"
        head = asdict(header(device_here(), interpreted=False)) | {"command": made_by}
        line = [sys.executable, "-m", "fused_softmax", "doctor"]
        where = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        doctor = subprocess.run(line, capture_output=True, text=True, env=where, timeout=300)
        content = {"header": head, "doctor": doctor.stdout, "doctor_status": doctor.returncode, "blocks": results}
        write_atomically(asked.record, json.dumps(content, indent=1) + "\n")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
