"""Calls on CPU tensors as on an H200, whose launches are kept and not run.

`calls(monkeypatch)` returns the list to which each launch is added, as (kernel, pointers, meta-parameters, arguments).
`pretended_gpu` runs them in the interpreter instead.
"""

from __future__ import annotations

import math
import random
import sys
from typing import Any

import torch
from pretended_gpu import pretend

from fused_softmax.launch import compile as compiling
from fused_softmax.launch.device import device_of
from fused_softmax.planning.types import DEVICES

Launched = tuple[Any, compiling.Pointers, dict[str, Any], tuple[Any, ...]]


def calls(monkeypatch) -> list[Launched]:
    """Until the test ends, as `pretended_gpu.pretend`."""
    pretend(monkeypatch)
    found: list[Launched] = []

    def launch(grid, _y, _z, _stream, kernel, pointers, meta, *args):
        found.append((kernel, pointers, dict(meta), args))

    monkeypatch.setattr(compiling, "bind", lambda kept: compiling.Binding(launch, kept, ()))
    for module in [m for name, m in sys.modules.items() if name.startswith("fused_softmax.")]:
        if getattr(module, "device_of", None) is device_of:
            monkeypatch.setattr(module, "device_of", lambda tensor: DEVICES["sm_90"])
    return found


def memory(dtype: torch.dtype, n: int, start: int) -> torch.Tensor:
    """n zeros that begin `start` elements after a multiple of 64 bytes."""
    held = torch.zeros(n + start + 64, dtype=dtype)
    first = -held.data_ptr() % 64 // held.element_size()
    return held[first + start : first + start + n]


def field(draw: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that start up to 8 elements after an aligned address, their rows up to 8 elements apart."""
    pad = draw.choice((0, 0, 0, 1, 2, 4, 8))
    *outer, n_cols = shape
    whole = memory(dtype, math.prod(outer) * (n_cols + pad), draw.choice((0, 0, 1, 2, 4, 8)))
    return whole.view(*outer, n_cols + pad)[..., :n_cols]
