"""The parts of a payload, which a rank gives to a collective, as tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..launch.payload import Layout
from .agreement import header_size


class Parts(NamedTuple):
    """A payload's parts, as views of it: of formulas, and of tests."""

    sums: Tensor  # (segments,)
    moments: Tensor  # (segments, n_rows, 2)
    picked: Tensor  # (n_rows, picks)
    spreads: Tensor  # (segments, n_rows)
    weights: Tensor  # (n_rows,)


def parts_of(payload: Tensor, layout: Layout) -> Parts:
    """The parts of payloads (..., layout.length); a leading dimension stays."""
    lead, n, s = payload.shape[:-1], layout.n_rows, layout.segments
    sizes = [layout.header, s, 2 * s * n, n * layout.picks, s * n, n]
    _, sums, moments, picked, spreads, weights = payload.split(sizes, -1)
    shaped = moments.reshape(*lead, s, n, 2), picked.reshape(*lead, n, layout.picks), spreads.reshape(*lead, s, n)
    return Parts(sums, *shaped, weights)


def layout_of(dtype: torch.dtype, n_rows: int, segments: int, picks: int = 1) -> Layout:
    """The layout of the payload of logits of this dtype."""
    return Layout(header_size(dtype), n_rows, segments, max(picks, 1))
