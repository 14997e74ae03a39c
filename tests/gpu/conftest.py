"""On a GPU a kernel that does not compile fails its tests: PyTorch's own kernel would pass them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fused_softmax.launch.availability import failures_raised


@pytest.fixture(autouse=True)
def no_fallback() -> Iterator[None]:
    with failures_raised():
        yield
