"""How PTX writes an access to one, two or four registers of 32 bits."""

from __future__ import annotations

import triton


@triton.constexpr_function
def access_of(registers: list[str]) -> tuple[str, str]:
    """(the suffix of the instruction, its operand): ("", "a") or (".v2", "{a, b}")."""
    assert len(registers) in (1, 2, 4)
    if len(registers) == 1:
        return "", registers[0]
    return f".v{len(registers)}", "{" + ", ".join(registers) + "}"
