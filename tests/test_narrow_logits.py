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


@pytest.mark.parametrize("n_cols", [130, 345, 417, 601, 770, 1001, 1111, 1408])
@pytest.mark.parametrize("kind", ALL)
def test_rows_of_some_hundred_columns(kind, n_cols):
    """Threads of a warp hold such a row, in vectors or by elements, or a program moves it as one piece."""
    case = drawn(kind, n_cols, DEVICES["interpreter"], n_cols)
    case.launch()
    case.expect_right()
