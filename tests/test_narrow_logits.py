"""Losses and statistics of rows of few columns, which a program moves as one piece: random cases by the interpreter."""

from __future__ import annotations

import pytest
from narrow_logits import ALL, drawn

from fused_softmax.planning.types import DEVICES

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ALL)
def test_random_rows(kind, seed):
    case = drawn(kind, seed, DEVICES["interpreter"])
    case.launch()
    case.expect_right()
