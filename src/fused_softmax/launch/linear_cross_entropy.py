"""cross_entropy of a chunk of rows whose loss is reduced over all chunks: each row's loss, and the logits' gradient.

The kernels are those of `launch.cross_entropy`, which reduces the loss of all rows in the same call. KernelUnavailable,
with nothing but losses written, where a kernel does not compile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .context import is_batch_invariant
from .cross_entropy import BACKWARD, FORWARD, WITH_GRADIENT, fits_on_chip
from .launcher import launch_rows
from .layout import empty
from .options import CrossEntropy


def losses_of_chunk(x: Tensor, op: CrossEntropy) -> tuple[Tensor, Tensor]:
    """(each row's loss, its (row_max, row_sum)), float32; one read."""
    losses, moments = _memory(x)
    vectors, numbers = (*op.vectors(losses), losses, moments), (op.ignore_index, *op.numbers)
    kind = op.kind
    launch_rows(FORWARD[kind.arithmetic], (x,), vectors, numbers, kind.flags, invariant=is_batch_invariant())
    return losses, moments


def losses_and_gradient_of_chunk(x: Tensor, dx: Tensor, op: CrossEntropy, divides: Tensor | None) -> Tensor:
    """Each row's loss, and into dx, which may be x, the gradient of their sum over `divides`, [1] float32.

    One read and one write where a row fits on chip.
    """
    kind = op.kind
    # weights and smoothing together read a weight for each logit, twice: then the gradient has a kernel of its own
    if op.weight_sum is None and fits_on_chip(x, dx, op):
        losses, moments = _memory(x)
        vectors = (*op.vectors(losses), losses if divides is None else divides, losses, moments)
        flags = (("MEAN", divides is not None), ("INPLACE", dx.data_ptr() == x.data_ptr()), *kind.flags)
        numbers = (op.ignore_index, *op.numbers)
        launch_rows(WITH_GRADIENT[kind.arithmetic], (x, dx), vectors, numbers, flags, invariant=is_batch_invariant())
        return losses
    losses, moments = losses_of_chunk(x, op)
    one = torch.ones(1, dtype=torch.float32, device=x.device)
    gradient_of_chunk(x, dx, op, divides, moments, one)
    return losses


def gradient_of_chunk(
    x: Tensor, dx: Tensor, op: CrossEntropy, divides: Tensor | None, moments: Tensor, g: Tensor
) -> None:
    """Into dx, which may be x, the gradient over `divides` for the upstream gradient g, [1] or [n_rows] float32."""
    vectors = (*op.vectors(g), g if divides is None else divides, moments, g)
    flags = (("UNLESS_ONE", False), ("MEAN", divides is not None), ("INPLACE", dx.data_ptr() == x.data_ptr()))
    numbers = (op.ignore_index, int(g.numel() > 1), *op.numbers)
    launch_rows(BACKWARD, (x, dx), vectors, numbers, (*flags, *op.kind.flags))


def _memory(x: Tensor) -> tuple[Tensor, Tensor]:
    n_rows = x.shape[0]
    return empty((n_rows,), (1,), torch.float32, x), empty((n_rows, 2), (2, 1), torch.float32, x)
