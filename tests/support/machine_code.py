"""What the machine code of a compiled kernel shows: the order of its loads."""

from __future__ import annotations

import re

_LINE = re.compile(r"^(?:[\w-]+:){4}\d+\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*(.*);", re.MULTILINE)
_WORDS = {"128": 4, "64": 2}


def late_loads(sass: str, n_bytes: int) -> tuple[int, int]:
    """Loads of n_bytes from global memory: (all, those after the first instruction that waits for one)."""
    words = n_bytes // 4
    waiting: set[int] = set()  # registers whose data are on their way
    loads = late = 0
    waited = False
    for operation, operands in _LINE.findall(sass):
        name, *more = operation.split(".")
        registers = [int(n) for n in re.findall(r"\bR(\d+)\b", operands)]  # the result's first
        if name == "LDG" and next((_WORDS[m] for m in more if m in _WORDS), 1) == words:
            loads, late = loads + 1, late + waited
            waiting |= set(range(registers[0], registers[0] + words))
        elif registers:
            waited = waited or any(register in waiting for register in registers[1:])
            waiting.discard(registers[0])
    return loads, late
