"""Which of the kernels' entry points a test reached; and equality but for rounding."""

from __future__ import annotations

import pytest
import torch

import fused_softmax as fs
from fused_softmax.launch import softmax as launch_softmax
from fused_softmax.torch_ops import logsumexp, softmax

PAIRS = [(fs.softmax, torch.softmax), (fs.log_softmax, torch.log_softmax)]
both = pytest.mark.parametrize(("ours", "torchs"), PAIRS, ids=["softmax", "log_softmax"])


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal but for rounding; in bfloat16 the interpreter truncates where it stores, and two stores may follow."""
    eps = torch.finfo(want.dtype).eps
    torch.testing.assert_close(got, want, rtol=4 * eps, atol=4 * eps, equal_nan=True)


def watch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels' entry points, as they are called from now on."""
    seen: list[str] = []

    def watch_one(module, name: str) -> None:
        entry = getattr(module, name)

        def watched(*args, **kwargs):
            seen.append(entry.__name__)
            return entry(*args, **kwargs)

        monkeypatch.setattr(module, name, watched)

    watch_one(softmax, "forward_by_kernel")
    watch_one(softmax, "backward_by_kernel")
    watch_one(logsumexp, "forward_by_kernel")
    watch_one(logsumexp, "backward_by_kernel")
    # patch() finds them here, and so do they each other
    watch_one(launch_softmax, "softmax_forward")
    watch_one(launch_softmax, "softmax_backward")
    return seen
