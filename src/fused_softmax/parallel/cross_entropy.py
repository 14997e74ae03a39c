"""cross_entropy of logits whose columns are spread over ranks.

Forward: one read of the local logits, one all_gather of O(rows). Backward: no collective, one read and one write.
Keeps the logits and O(rows).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..launch.cross_entropy import check_targets
from ..launch.layout import rows_of
from ..torch_ops.arguments import (
    LossOptions,
    expect_flag,
    expect_floating,
    expect_local,
    expect_targets,
    expect_tensors,
    loss_options,
    softcap_of,
)
from ..torch_ops.decompositions import OVERWRITTEN
from .agreement import call_of_loss
from .exchange import gather
from .gradients import expect_once, loss_gradient
from .rows import read_loss
from .shards import Shard, shard_of
from .whole_rows import merge_loss


def cross_entropy(
    local_logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    group: Any = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    inplace_backward: bool = False,
    check: bool = False,
) -> Tensor:
    """Return `fused_softmax.cross_entropy` of logits whose columns are spread over the ranks of a group.

    Every rank calls it with its own columns of the same rows, and gets the same loss.

    Args:
        local_logits: (..., width), this rank's columns. The last dimension is the vocabulary. Ranks may hold different
            numbers of columns.
        target: int64 or uint8 class indices of shape (...), in [0, vocab_size) or ignore_index; the same on every rank.
        weight: (width,), this rank's part of the classes' weights, float32 or of the logits' dtype.
        group: A ProcessGroup, a DeviceMesh of one dimension, or None for the default group.
        vocab_start: The first column of this rank. None: the ranks' columns lie in rank order, cut evenly.
        vocab_size: The columns of all ranks. None: this rank's times the number of ranks.
        ignore_index: As in `fused_softmax.cross_entropy`, and so are reduction, label_smoothing, softcap and z_loss.
            Smoothing and the mean's denominator count all columns.
        inplace_backward: Writes the gradient over the logits, in backward.
        check: Also compares the number of rows, by a collective of its own, and waits for the device.

    Returns:
        A scalar, or for "none" a tensor of target's shape. float32, or float64 for float64 logits. The gradient is that
        of this rank's logits, in their dtype, for an upstream gradient that is the same on every rank.

    Raises:
        RuntimeError: The ranks do not make the same call (on every rank; see docs/parallel.md for a GPU). A rank that
            never comes: the group's timeout.
        ValueError: Columns that do not fit, or, within batch_invariant(), a shard that is no union of eighths.
        IndexError: A target is outside the vocabulary, on the CPU. On a GPU that is a device assertion.
        As `fused_softmax.cross_entropy` otherwise.
    """
    name = "parallel.cross_entropy"
    expect_tensors(name, local_logits=local_logits, target=target)
    if weight is not None:
        expect_tensors(name, weight=weight)
    expect_local(name, local_logits=local_logits, target=target, weight=weight)
    expect_floating(name, "local_logits", local_logits)
    if target.is_floating_point():
        raise NotImplementedError(f"{name}(): class probabilities are not supported; target must hold class indices")
    if local_logits.dim() == 0:
        raise ValueError(f"{name}(): local_logits must be (..., width), not a tensor of no dimensions")
    options = loss_options(name, ignore_index, reduction, label_smoothing, softcap, z_loss)
    expect_flag(name, "inplace_backward", inplace_backward)
    expect_flag(name, "check", check)
    width = local_logits.shape[-1]
    flat, weight = expect_targets(name, target, weight, local_logits, width, options)
    options = options._replace(softcap=softcap_of(options.softcap, local_logits.dtype))
    shard = shard_of("cross_entropy", width, group, vocab_start, vocab_size)
    if flat.device.type == "cpu" and not torch.compiler.is_compiling():
        check_targets(flat, options.ignore_index, shard.size)
    x = rows_of(local_logits, width) if width else local_logits.reshape(flat.numel(), 0)
    loss = CrossEntropy.apply(x, flat, weight, shard, options, inplace_backward, check)
    return loss.view(target.shape) if options.reduction == "none" else loss


class CrossEntropy(torch.autograd.Function):
    """The loss of rows (n_rows, width). Keeps the logits and O(rows)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, target: Tensor, weight: Tensor | None, shard: Shard, options: LossOptions, inplace: bool,
        check: bool,
    ) -> Tensor:  # fmt: skip
        call = call_of_loss("cross_entropy", x.dtype, shard.size, shard.segments, weight is not None, options)
        words = call.words(shard.start, shard.width)
        payload = read_loss(x, target, weight, words, shard, options)
        gathered, compares = gather(payload, words, x.shape[0], call, shard, check)
        found = merge_loss(gathered, target, weight is not None, compares, shard, options)
        ctx.save_for_backward(x, target, weight, *found[1:])
        # rows that share memory cannot be overwritten
        ctx.described = shard, options, inplace and (x.shape[0] == 1 or x.stride(0) >= x.shape[1])
        ctx.unread = [True]  # popped by the backward that overwrites the logits
        return found.loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        expect_once("cross_entropy")
        x, target, weight, moments, *of_rows = ctx.saved_tensors
        shard, options, inplace = ctx.described
        inplace = inplace and not torch.compiler.is_compiling()
        if inplace and not (ctx.unread and ctx.unread.pop()):
            raise RuntimeError(OVERWRITTEN)
        dx = loss_gradient(x, g, moments, target, tuple(of_rows), weight, shard, options, inplace)
        if inplace:
            torch.autograd.graph.increment_version(x)
        return dx, None, None, None, None, None, None
