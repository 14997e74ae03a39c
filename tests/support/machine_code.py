"""What the machine code of a compiled kernel shows: the order of its loads."""

from __future__ import annotations

import re

_LINE = re.compile(r"^(?:[\w-]+:){4}[0-9a-f]+\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*(.*);", re.MULTILINE)
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


def around_the_wait(sass: str) -> tuple[list[str], list[str], int] | None:
    """(Loads before the wait for the previous kernel, other accesses and exits before it, how many loads follow it).

    Of global memory. Letting the next kernel start (PREEXIT) counts as an access. None for a kernel that never waits.
    """
    loads: list[str] = []
    others: list[str] = []
    before: tuple[list[str], list[str]] | None = None
    for operation, _ in _LINE.findall(sass):
        name = operation.split(".")[0]
        if name == "ACQBULK":
            before, loads, others = (loads, others), [], []
        elif name in ("LDG", "LD", "LDGSTS", "UBLKCP"):
            loads.append(operation)
        elif name in ("STG", "ST", "ATOMG", "ATOM", "RED", "REDG", "PREEXIT", "EXIT"):
            others.append(operation)
    return None if before is None else (*before, len(loads))


def starts_of_the_next(sass: str) -> list[tuple[bool, int, int, int]]:
    """Where the next kernel may start: (only where a condition holds, waits before it, loads and stores after it)."""
    lines = [(line, _LINE.match(line)) for line in sass.splitlines()]
    names = [found[1].split(".")[0] for _, found in lines if found]
    texts = [line for line, found in lines if found]
    return [
        (bool(re.search(r"@!?U?P\w+\s+PREEXIT", texts[i])), names[:i].count("ACQBULK"), names[i:].count("LDG"),
         names[i:].count("STG"))
        for i, name in enumerate(names) if name == "PREEXIT"
    ]  # fmt: skip
