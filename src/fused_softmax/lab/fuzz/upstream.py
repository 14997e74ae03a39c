"""Upstream gradients: the same for ours, for torch's own way and, in float64, for the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .draw import Case
from .layouts import onto

_CONSTANT = {"one": 1.0, "quarter": 0.25, "zeros": 0.0}  # exact in every dtype


def upstream_of(case: Case, device: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Upstream gradients for outputs, the same for ours, torch's and the reference's."""

    # kept, since a CUDA graph's capture can make no tensor from the CPU
    known: dict[tuple[Any, ...], Tensor] = {}

    def draw(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        made = {}
        for position, (name, t) in enumerate(outputs.items()):
            key = (name, t.shape, t.dtype)
            if key in known:
                made[name] = known[key]
                continue
            g = torch.Generator().manual_seed(case.seed + 7 * position + len(name))
            kind = case.upstream if name != "probe" else "random"
            low = t.dtype if t.dtype != torch.float64 or case.dtype == "float64" else _low(case, name)
            if kind in _CONSTANT:
                value = torch.full(t.shape, _CONSTANT[kind], dtype=t.dtype, device=device)
            elif kind == "random":
                value = onto(torch.randn(t.shape, generator=g).to(low), device).to(t.dtype)
            else:
                value = torch.randn((), generator=g).to(low).to(device).expand(t.shape).to(t.dtype)
            made[name] = known[key] = value
        return made

    return draw


def _low(case: Case, name: str) -> torch.dtype:
    """The dtype that ours and torch's have where the reference has float64."""
    if case.spec.full_outputs or case.spec.rows == "dims" or name == "probe":
        if case.way == "autocast" and case.spec.autocasts:
            return torch.float32 if name != "probe" else getattr(torch, case.dtype)
        return getattr(torch, case.options.get("dtype", case.dtype) if name != "probe" else case.dtype)
    return torch.float32
