"""What the machine code of a compiled kernel shows: the order of its loads."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

_LINE = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_.]+)\s*(.*?)\s*;")
_WORDS = {"128": 4, "64": 2}


def instructions(cubin: bytes) -> Iterator[tuple[str, list[int]]]:
    """(operation, numbers of the registers that it names, the result's first) of each instruction."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = subprocess.run(
            [knobs.nvidia.nvdisasm.path, "-c", str(path)], check=True, capture_output=True, text=True
        ).stdout
    for line in text.splitlines():
        if found := _LINE.search(line):
            yield found[1], [int(n) for n in re.findall(r"\bR(\d+)\b", found[2])]


def late_loads(cubin: bytes, n_bytes: int) -> tuple[int, int]:
    """Loads of n_bytes from global memory: (all, those after the first instruction that waits for one)."""
    words = n_bytes // 4
    waiting: set[int] = set()
    loads = late = 0
    waited = False
    for operation, registers in instructions(cubin):
        name, *more = operation.split(".")
        if name == "LDG" and next((_WORDS[m] for m in more if m in _WORDS), 1) == words:
            loads, late = loads + 1, late + waited
            waiting |= set(range(registers[0], registers[0] + words))
        elif registers and name not in ("BRA", "MOV", "CS2R"):
            waited = waited or any(register in waiting for register in registers[1:])
            waiting.discard(registers[0])
    return loads, late
