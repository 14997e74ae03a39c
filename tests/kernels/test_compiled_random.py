"""Kernels of random problems compile for every GPU, fit, and spill next to nothing."""

from __future__ import annotations

import pytest
from launches import cross_compiled
from random_launches import random_launches

from fused_softmax.launch.compile import MOST_SPILLED

pytestmark = pytest.mark.compiled

SEED = 1
EXTENDED = [("sm_80", 24), ("sm_89", 16), ("sm_90", 48), ("sm_100", 24), ("sm_120", 32), ("gfx942", 16)]


@pytest.mark.parametrize(
    ("target", "cases"), [("sm_90", 4), *(pytest.param(*of, marks=pytest.mark.extended) for of in EXTENDED)]
)
def test_random_problems(target, cases):
    looked = 0
    for name, launch, _ in random_launches(target, SEED, cases):
        used, _ = cross_compiled(launch, target)
        assert used.fits(), f"{used.shared_bytes} bytes of shared memory: {name}"
        if target.startswith("sm_"):
            assert used.spilled_bytes <= MOST_SPILLED, f"{used.spilled_bytes} bytes spilled: {name}"
        looked += 1
    assert looked >= cases
