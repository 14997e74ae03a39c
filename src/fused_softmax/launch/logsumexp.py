"""logsumexp over dimensions of whole tensors, forward and backward: folds them into rows, and launches.

No autograd and no checks. KernelUnavailable, with nothing written, where a kernel does not compile.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..planning.types import Plan
from .layout import rows_of
from .token_logprobs import planned_statistics, statistics, statistics_backward


def logsumexp_forward(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """logsumexp of x over dims (rising, each in [0, x.dim())) in x's dtype. x is not empty."""
    kept, folded = _folded(x, dims)
    _, _, lse, _ = statistics(folded, None, 1.0, False, keeps=False)
    shape = [1 if d in dims else size for d, size in enumerate(x.shape)] if keepdim else [x.shape[d] for d in kept]
    return lse.to(x.dtype).view(shape)


def planned_rows(rows: Tensor, on: Tensor, backward: bool) -> Plan | str:
    """The plan of rows, which may be a meta tensor, on `on`'s device; or why its kernel did not compile."""
    return planned_statistics(rows, on, 0, backward)


def logsumexp_backward(g: Tensor, x: Tensor, lse: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """dx = g*exp(x - lse), contiguous, in x's dtype; NaN where a row is nothing but -inf, as torch has it."""
    kept, folded = _folded(x, dims)
    dx = torch.empty(folded.shape, dtype=x.dtype, device=x.device)
    statistics_backward(folded, dx, lse.reshape(-1).float(), 1.0, g_lse=g.reshape(-1))
    order = (*kept, *dims)
    back = sorted(range(x.dim()), key=lambda i: order[i])
    return dx.view([x.shape[d] for d in order]).permute(back).contiguous()


def _folded(x: Tensor, dims: tuple[int, ...]) -> tuple[list[int], Tensor]:
    """(the other dims, x as rows over dims), copied only where its strides leave no other way."""
    kept = [d for d in range(x.dim()) if d not in dims]
    return kept, rows_of(x.permute(*kept, *dims), math.prod(x.shape[d] for d in dims))
