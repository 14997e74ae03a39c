"""The loop of linear_cross_entropy over chunks of rows: logits, losses, gradients.

    for each chunk: logits = x @ weight.T + bias;  losses, dlogits;  dx = dlogits @ weight;  dweight += dlogits.T @ x

On a GPU a kernel computes the losses and writes dlogits over the logits. Where there are no kernels, or one does not
compile, the same loop runs torch's formulas. It runs below autograd, and knows nothing of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..launch import linear_cross_entropy as chunks
from ..launch.availability import KernelUnavailable
from ..launch.cross_entropy import check_targets
from ..launch.linear import FLOAT16_SCALE, NONE, Gradients, Needs, Projection, Settings, put_back, rows_that_count
from ..launch.options import CrossEntropy
from . import decompositions
from .decompositions import result_dtype
from .route import is_supported


class Result(NamedTuple):
    """The loss; for "none", each row's moments; the gradients, and what they are still to be divided by."""

    loss: Tensor
    moments: Tensor | None
    input: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    divisor: Tensor | None  # [2], of the weight's gradient and of the others; None: nothing


def forward_of_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, op: CrossEntropy, how: Settings, needs: Needs
) -> Result:
    """The loss of all rows, and the gradients that are needed; for "none" they are backward's."""
    n_rows, n_cols = x.shape[0], weight.shape[0]
    with torch.autocast(x.device.type, enabled=False):
        counts = op.target != op.ignore_index
        kept = rows_that_count(counts, x.shape[1], n_cols)
        x_kept, op_kept = (x, op) if kept is None else (x[kept], op._replace(target=op.target[kept]))
        by_row = op.reduction == "none"
        needs, scaled = NONE if by_row else needs, how.compute is torch.float16 and any(needs) and not by_row
        projection = Projection(x_kept, weight, bias, how, needs, scaled=scaled)
        of_rows = result_dtype(x_kept.new_empty(0, dtype=how.logits))
        losses = x.new_empty(x_kept.shape[0], dtype=of_rows)
        moments = x.new_empty((x_kept.shape[0], 2), dtype=of_rows) if by_row else None
        if x.device.type == "cpu":
            check_targets(op.target, op.ignore_index, n_cols)
        total = _denominator(op, counts, of_rows) if op.reduction == "mean" else None
        gradients = Gradients(projection, weight) if any(projection.needs) else None
        # the kernel divides by this: float16 keeps its digits by a factor, and is divided later
        divides = total
        if scaled:
            divides = losses.new_full((1,), 1.0 / FLOAT16_SCALE)
        for chunk, logits, dlogits in projection.logits():
            op_chunk = op_kept._replace(target=op_kept.target[chunk], denominator=None)
            if gradients is None:
                losses[chunk], of_chunk = _losses(logits, op_chunk)
                if moments is not None:
                    moments[chunk] = of_chunk
            else:
                losses[chunk] = _losses_and_gradient(logits, dlogits, op_chunk, divides)
                gradients.add(chunk, dlogits)
            del logits, dlogits
        if by_row:
            assert moments is not None
            return Result(put_back(losses, kept, (n_rows,)), put_back(moments, kept, (n_rows, 2)), *[None] * 4)
        loss = losses.sum() if total is None else losses.sum() / total[0]
        if gradients is None:
            return Result(loss, *[None] * 5)
        dx, dweight, dbias = gradients.finish()
        dx = None if dx is None else put_back(dx, kept, x.shape)
        divisor = _divisor(total, counts, gradients.weight_alpha, losses) if scaled else None
        return Result(loss, None, dx, dweight, dbias, divisor)


def _divisor(total: Tensor | None, counts: Tensor, alpha: float, like: Tensor) -> Tensor:
    """What float16's gradients are to be divided by: (the weight's, the others').  # [2] float32"""
    # where no row counts the gradient is 0, not 0/0
    by = like.new_ones(1) if total is None else total.masked_fill(~counts.any(), 1.0)
    return by * FLOAT16_SCALE * torch.stack((by.new_tensor(alpha), by.new_ones(())))


def _denominator(op: CrossEntropy, counts: Tensor, dtype: torch.dtype) -> Tensor:
    """What a mean divides by: how many targets count, or their weights' sum.  # [1]"""
    if op.denominator is not None:
        return op.denominator.to(dtype)
    if op.weight is None:
        return counts.sum(dtype=dtype).view(1)
    inside = counts & (op.target >= 0) & (op.target < op.weight.shape[0])
    return op.weight.to(dtype)[op.target.where(inside, 0)].where(inside, 0.0).sum().view(1)


def _losses(logits: Tensor, op: CrossEntropy) -> tuple[Tensor, Tensor]:
    """(each row's loss, its moments)."""
    if is_supported(logits):
        try:
            return chunks.losses_of_chunk(logits, op)
        except KernelUnavailable:
            pass
    return decompositions.losses_of_rows(logits, op)


def _losses_and_gradient(logits: Tensor, dlogits: Tensor, op: CrossEntropy, divides: Tensor | None) -> Tensor:
    """Each row's loss, and into dlogits, which may be logits, the gradient of their sum over `divides`."""
    if is_supported(logits):
        try:
            return chunks.losses_and_gradient_of_chunk(logits, dlogits, op, divides)
        except KernelUnavailable:
            pass
    losses = decompositions.cross_entropy_of_rows(logits, op._replace(reduction="none"))
    op = op._replace(reduction="sum" if divides is None else "mean", denominator=divides)
    dlogits.copy_(decompositions.cross_entropy_gradient(losses.new_ones(1), logits, op))
    return losses


def _gradient(logits: Tensor, dlogits: Tensor, op: CrossEntropy, moments: Tensor, g: Tensor) -> None:
    """Into dlogits, which may be logits, the gradient of the rows' losses for their upstream gradients g."""
    if is_supported(logits):
        try:
            return chunks.gradient_of_chunk(logits, dlogits, op, None, moments, g)
        except KernelUnavailable:
            pass
    dlogits.copy_(decompositions.cross_entropy_gradient(g, logits, op))


def backward_of_chunks(
    g: Tensor, moments: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, op: CrossEntropy, how: Settings,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients for reduction "none" and the rows' upstream gradients g: the logits are made again."""
    shape = x.shape
    with torch.autocast(x.device.type, enabled=False):
        kept = rows_that_count(op.target != op.ignore_index, shape[1], weight.shape[0])
        if kept is not None:
            x, g, moments, op = x[kept], g[kept], moments[kept], op._replace(target=op.target[kept])
        projection = Projection(x, weight, bias, how, needs)
        gradients = Gradients(projection, weight)
        for chunk, logits, dlogits in projection.logits():
            op_chunk = op._replace(target=op.target[chunk])
            _gradient(logits, dlogits, op_chunk, moments[chunk], g[chunk])
            gradients.add(chunk, dlogits)
            del logits, dlogits
        dx, dweight, dbias = gradients.finish()
        return None if dx is None else put_back(dx, kept, shape), dweight, dbias
