"""linear_cross_entropy whose weight's rows, the vocabulary, are spread over ranks.

    local logits = input @ local weight.T;  the loss is cross_entropy's over all ranks' columns

The logits of one chunk of rows exist at a time. Forward: a product for each chunk, and one all_gather of O(rows).
Backward makes each chunk's logits again, writes their gradient over them, and multiplies twice. The input's
gradient is a sum over ranks: one all_reduce of the input's size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..launch.cross_entropy import check_targets
from ..launch.linear import FLOAT16_SCALE, Gradients, Needs, Projection, Settings
from ..torch_ops.arguments import (
    LossOptions,
    expect_flag,
    expect_local,
    expect_targets,
    expect_tensors,
    loss_options,
    softcap_of,
)
from ..torch_ops.decompositions import result_dtype
from ..torch_ops.library import untraced
from ..torch_ops.linear_arguments import expect_matrix, settings_of
from .agreement import call_of_loss, header_tensor
from .exchange import gather, sum_over_ranks
from .gradients import expect_once, loss_factors, write_loss_gradient
from .payload import layout_of
from .rows import Columns, write_loss, write_sums
from .shards import Shard, shard_of
from .whole_rows import merge_loss


def linear_cross_entropy(
    input: Tensor,
    local_weight: Tensor,
    target: Tensor,
    *,
    local_bias: Tensor | None = None,
    weight: Tensor | None = None,
    group: Any = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    chunk_rows: int | None = None,
    accumulate: str = "float32",
    logits_dtype: torch.dtype | None = None,
    check: bool = False,
) -> Tensor:
    """`parallel.cross_entropy(F.linear(input, local_weight, local_bias), target, ...)`, without memory for all logits.

    Args:
        input: Hidden states, (..., H), the same on every rank.
        local_weight: (width, H), this rank's rows of the last layer's weight.
        target: As in `parallel.cross_entropy`.
        local_bias: (width,), this rank's part of the bias.
        weight: (width,), this rank's part of the classes' weights.
        group: As in `parallel.cross_entropy`, and so are vocab_start, vocab_size, reduction, ignore_index,
            label_smoothing, softcap, z_loss and check.
        chunk_rows: As in `fused_softmax.linear_cross_entropy`, and so are accumulate and logits_dtype. Every rank
            plans its own.

    Returns: as `parallel.cross_entropy`. The gradient of input is summed over the ranks; those of local_weight and
    local_bias are this rank's own. Bits depend on the number of ranks, within batch_invariant() too, as products do.

    Raises: as `parallel.cross_entropy` and `fused_softmax.linear_cross_entropy`.
    """
    name = "parallel.linear_cross_entropy"
    expect_matrix(name, local_weight)
    expect_tensors(name, input=input, target=target)
    expect_tensors(name, **{n: t for n, t in (("local_bias", local_bias), ("weight", weight)) if t is not None})
    expect_local(name, input=input, local_weight=local_weight, local_bias=local_bias, target=target, weight=weight)
    expect_flag(name, "check", check)
    how = settings_of(name, input, local_weight, local_bias, chunk_rows, accumulate, logits_dtype)
    options = loss_options(name, ignore_index, reduction, label_smoothing, softcap, z_loss)
    width = local_weight.shape[0]
    flat, weight = expect_targets(name, target, weight, input, width, options)
    options = options._replace(softcap=softcap_of(options.softcap, how.logits))
    # a product's bits depend on its shape
    shard = shard_of("linear_cross_entropy", width, group, vocab_start, vocab_size, segmented=False)
    if not width:
        raise ValueError(f"{name}(): rank {shard.rank} has no rows of the weight; give every rank at least one")
    if flat.device.type == "cpu":
        check_targets(flat, options.ignore_index, shard.size)
    rows = input.reshape(-1, input.shape[-1])
    loss = _eagerly(rows, local_weight, local_bias, flat, weight, shard, options, how, check)
    return loss.view(target.shape) if options.reduction == "none" else loss


def _eagerly(*arguments: Any) -> Tensor:
    """torch.compile breaks its graph here: the chunks' products are not traced."""
    return LinearCrossEntropy.apply(*arguments)


untraced(_eagerly)


class LinearCrossEntropy(torch.autograd.Function):
    """The loss of rows (n_rows, hidden). Keeps the input, the weight and O(rows)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
        shard: Shard, options: LossOptions, how: Settings, check: bool,
    ) -> Tensor:  # fmt: skip
        call = call_of_loss(
            "linear_cross_entropy", how.logits, shard.size, shard.segments, class_weight is not None, options
        )
        dtype = result_dtype(x.new_empty(0, dtype=how.logits))
        layout = layout_of(dtype, x.shape[0], shard.segments)
        payload = torch.empty(layout.length, dtype=dtype, device=x.device)
        words = call.words(shard.start, shard.width)
        header = header_tensor(words, shard.segments, payload)
        payload[: layout.head].copy_(header)  # here, too, as there may be no rows
        at = Columns(shard.start, shard.size, shard.segments, shard.invariant)
        with torch.autocast(x.device.type, enabled=False):
            for chunk, logits, _ in Projection(x, weight, bias, how).logits():
                of_chunk = header, logits, target[chunk], class_weight
                write_loss(payload, layout, chunk.start, *of_chunk, at, options)
        if options.label_smoothing:
            write_sums(payload, layout, class_weight, shard.width)
        gathered, compares = gather(payload, words, x.shape[0], call, shard, check)
        loss, *of_rows = merge_loss(gathered, target, class_weight is not None, compares, shard, options)
        ctx.save_for_backward(x, weight, bias, target, class_weight, *of_rows)
        ctx.described = shard, options, how
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        expect_once("linear_cross_entropy")
        x, weight, bias, target, class_weight, moments, *of_rows = ctx.saved_tensors
        shard, options, how = ctx.described
        needs = Needs(*ctx.needs_input_grad[:3])
        # float16 has too few digits below 1 for gradients that are divided by the number of targets
        scaled = how.compute is torch.float16
        factors = loss_factors(g * FLOAT16_SCALE if scaled else g, moments, target, tuple(of_rows), options, shard.size)
        with torch.autocast(x.device.type, enabled=False):
            projection = Projection(x, weight, bias, how, needs, scaled=scaled)
            gradients = Gradients(projection, weight)
            for chunk, logits, dlogits in projection.logits():
                of_chunk = moments[chunk], target[chunk], factors[chunk]
                write_loss_gradient(dlogits, logits, *of_chunk, class_weight, shard.start, options)
                gradients.add(chunk, dlogits)
            alpha = gradients.weight_alpha
            dx, dweight, dbias = gradients.finish()
            if scaled:
                dx = None if dx is None else dx / FLOAT16_SCALE
                dweight = None if dweight is None else (dweight.float() / (FLOAT16_SCALE * alpha)).to(weight.dtype)
                dbias = (
                    None if dbias is None else (dbias / FLOAT16_SCALE).to(dbias.dtype if bias is None else bias.dtype)
                )
        if dx is not None:
            dx = sum_over_ranks(dx, shard).to(x.dtype)
        return dx, dweight, dbias, None, None, None, None, None, None
