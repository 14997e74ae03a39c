"""Caps on registers give way where ptxas spills with them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fused_softmax.launch.compile import MOST_SPILLED, built_without_spills
from fused_softmax.planning.types import looser_cap

SHIPPED = SimpleNamespace(declaration=object())


def build_that_needs(registers: int, tried: list[int | None]):
    """A stand-in for ptxas: its kernel spills what does not fit."""

    def build(meta):
        tried.append(meta.get("maxnreg"))
        return 4 * max(0, registers - meta.get("maxnreg", 255))

    return build


@pytest.mark.parametrize(
    ("kernel", "registers", "cap", "kept"),
    [
        (SHIPPED, 96, 96, [96]),
        (SHIPPED, 96 + MOST_SPILLED // 4, 96, [96]),  # a few words at a measured cap are faster than a looser cap
        (SHIPPED, 97 + MOST_SPILLED // 4, 96, [96, 128]),
        (SHIPPED, 160, 96, [96, 128, 168]),
        (SHIPPED, 400, 128, [128, 168, 255]),  # there is no more
        (SHIPPED, 400, None, [None]),
        (SimpleNamespace(), 400, 96, [96]),  # a lesson's kernel keeps its cap
    ],
)
def test_a_cap_that_spills_is_loosened(kernel, registers, cap, kept):
    tried: list[int | None] = []
    meta = {"num_warps": 4} | ({} if cap is None else {"maxnreg": cap})
    _, used = built_without_spills(build_that_needs(registers, tried), kernel, meta, lambda spilled: spilled)
    assert tried == kept and used.get("maxnreg") == kept[-1]


@pytest.mark.parametrize("num_warps", [1, 2, 4, 8, 16, 32])
def test_looser_caps_are_those_of_a_multiprocessor(num_warps):
    cap, seen = 24, []
    while cap is not None:
        seen.append(cap)
        cap = looser_cap(cap, num_warps)
    assert seen == sorted(set(seen)) and len(seen) < 16
    assert all(n % 8 == 0 or n == 255 for n in seen)
    assert seen[-1] == min(255, 65536 // (32 * num_warps))
