"""What a version of Triton must not add to, or take from, any kernel: vectors, registers, and barriers.

`make compiled` runs these with the pinned Triton, and again with the oldest and the newest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
from launches import cross_compiled, launches

from fused_softmax.compiled import Resources
from fused_softmax.launch import Launch
from fused_softmax.problem import Plan

pytestmark = pytest.mark.compiled

Built = tuple[str, Launch, Plan | None, Resources, Mapping[str, Any]]


@pytest.fixture(scope="module")
def built() -> list[Built]:
    """Every kernel for an H200, bfloat16 and float32."""
    return [(name, launch, plan, *cross_compiled(launch, "sm_90")) for name, launch, plan in launches("sm_90")]


def test_a_cluster_meets_once(built):
    """Beside the exchange's own barrier there is none: what ends a kernel waits neither for stores nor for other CTAs."""
    on_clusters = [(name, asm) for name, launch, _, used, asm in built if used.num_ctas > 1]
    assert len(on_clusters) > 20
    for name, asm in on_clusters:
        last_store = max(found.start() for found in re.finditer(r"\bSTG", asm["sass"]))
        assert len(re.findall(r"\bUCGABAR_ARV", asm["sass"])) == 1, name
        assert not re.search(r"MEMBAR|UCGABAR|BAR\.SYNC", asm["sass"][last_store:]), name


def test_nothing_is_stored_after_the_exit(built):
    """`leave_cluster` ends a thread where it stands: every store of the program text comes before it."""
    for name, _, _, used, asm in built:
        text = asm["ptx"]
        exits = [found.start() for found in re.finditer(r"^\s*exit;", text, re.M)]
        if exits:
            assert used.num_ctas > 1 and len(exits) == 1, name
            assert not re.search(r"\bst\.global|\bst\.async|\bred\.|\batom\.", text[exits[0] :]), name
