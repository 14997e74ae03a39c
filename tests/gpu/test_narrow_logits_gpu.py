"""Random losses and statistics of rows of few columns, with guards around what is written."""

from __future__ import annotations

from random import Random

import pytest
import torch
from narrow_logits import ALL, drawn

from fused_softmax.launch.device import device_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", range(1000, 1020))
@pytest.mark.parametrize("kind", ALL)
def test_random_rows(kind, seed):
    case = drawn(kind, seed, device_of(torch.empty(1, device="cuda")))
    case.run_on("cuda")
    case.expect_right()


@pytest.mark.parametrize("seed", range(2000, 2024))
@pytest.mark.parametrize("kind", ALL)
def test_random_rows_of_some_hundred_columns(kind, seed):
    """Threads of a warp hold such a row, in vectors or by elements, or a program moves it as one piece."""
    case = drawn(kind, seed, device_of(torch.empty(1, device="cuda")), Random(f"{kind} {seed}").randint(97, 1800))
    case.run_on("cuda")
    case.expect_right()
