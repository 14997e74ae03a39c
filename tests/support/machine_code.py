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


def before_the_wait(sass: str) -> tuple[list[str], list[str]] | None:
    """What a kernel does before it waits for the previous kernel: (its loads, its stores and its starts of others).

    Of global memory; None for a kernel that never waits.
    """
    loads, others = [], []
    for operation, _ in _LINE.findall(sass):
        name = operation.split(".")[0]
        if name == "ACQBULK":
            return loads, others
        if name in ("LDG", "LD", "LDGSTS", "UBLKCP", "CCTL"):
            loads.append(operation)
        elif name in ("STG", "ST", "ATOMG", "ATOM", "RED", "REDG", "PREEXIT"):
            others.append(operation)
    return None
