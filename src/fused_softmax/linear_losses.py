"""What a user calls of the losses that make their own logits: linear_cross_entropy and linear_token_logprobs.

They take the hidden states and the weight of the last layer, and hold the logits of one chunk of rows at a time.
torch_ops has the routes and the loop over chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from .launch.options import CrossEntropy, weight_facts_of
from .torch_ops.arguments import (
    expect_flag,
    expect_local,
    expect_targets,
    expect_tensors,
    expect_token_ids,
    loss_options,
    scale_of,
    softcap_of,
    stands_in,
)
from .torch_ops.linear_arguments import expect_matrix, gathered, settings_of
from .torch_ops.linear_cross_entropy import linear_cross_entropy_of, probabilities_cross_entropy
from .torch_ops.linear_token_logprobs import linear_token_logprobs_of
from .torch_ops.outputs import TokenStatistics


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    chunk_rows: int | None = None,
    accumulate: str = "float32",
    logits_dtype: torch.dtype | None = None,
) -> Tensor:
    """`cross_entropy(F.linear(input, linear_weight, linear_bias), target, ...)`, without memory for all logits.

    The logits of a chunk of rows are made by one matrix product. The kernel of `cross_entropy` writes their gradient
    over them, and two more products make the gradients of input and weight of it, all in the forward. It takes about
    the time of these three products.

    Args:
        input: hidden states, (..., H); float16, bfloat16, float32 or float64.
        linear_weight: (V, H) of input's dtype; any dtype under autocast, which casts both. A weight that FSDP2 has
            sharded is gathered once. Its gradient is averaged over the ranks, as FSDP2's gradients are.
        target: int64 or uint8 class indices of shape (...), in [0, V) or ignore_index. Probabilities, (..., V) of a
            floating dtype, have the logits' size: for them all logits are made, by torch.
        linear_bias: (V,) of input's dtype.
        weight: (V,), as in `cross_entropy`.
        reduction: "mean", "sum" or "none".
        label_smoothing: as in `cross_entropy`.
        softcap: as in `cross_entropy`.
        z_loss: as in `cross_entropy`.
        ignore_index: rows with this target add nothing; None stands for -100, as in torch 2.13. Where at least 1 in 16
            rows is ignored and the products take long, these rows are left out of the products. To know how many there
            are, the host then waits for the device, except while a CUDA graph is captured.
        chunk_rows: rows of a chunk; None plans it from shapes and dtypes.
        accumulate: where there are several chunks, "float32" adds up the weight's gradient in float32 memory of its
            own and rounds it once. "weight" adds to the gradient itself, which is rounded with every chunk.
        logits_dtype: torch.float32 keeps the logits as the product accumulated them; None rounds them to input's dtype,
            as F.linear does. The logits' gradient is rounded to input's dtype in both cases.

    Returns: float32, or float64 for float64 input: a scalar, or for "none" a tensor of target's shape. A frozen input,
    weight or bias costs no product, and without gradients only the logits are made. Where the loss is a mean or a sum,
    an upstream gradient other than 1 is multiplied onto the gradients as they were rounded. For "none" backward makes
    the logits again. In float16 gradients stay in float32 until backward, so a GradScaler loses nothing.

    Raises: as `cross_entropy` and F.linear: RuntimeError for shapes, dtypes and devices that do not fit the product,
    ValueError for a target of another shape, for chunk_rows below 1, and for another reduction, accumulate or
    logits_dtype; TypeError for a weight that is quantized, wrapped by an adapter, or no tensor. A target outside the
    classes is an IndexError on the CPU and a device assertion on a GPU. RuntimeError where the gradient is
    differentiated again.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.linear_cross_entropy.html

    >>> linear_cross_entropy(torch.zeros(2, 8), torch.zeros(4, 8), torch.tensor([1, 3]))
    tensor(1.3863)
    """
    given = (input, linear_weight, target, linear_bias, weight)
    if stands_in(*(t for t in given if t is not None)):
        return handle_torch_function(
            linear_cross_entropy, given, input, linear_weight, target, linear_bias=linear_bias, weight=weight,
            reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing, softcap=softcap,
            z_loss=z_loss, chunk_rows=chunk_rows, accumulate=accumulate, logits_dtype=logits_dtype,
        )  # fmt: skip
    return linear_cross_entropy_over(
        None, input, linear_weight, target, linear_bias, weight, reduction, ignore_index, label_smoothing, softcap,
        z_loss, chunk_rows, accumulate, logits_dtype,
    )  # fmt: skip


def linear_cross_entropy_over(
    denominator: Tensor | None,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    chunk_rows: int | None = None,
    accumulate: str = "float32",
    logits_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return `linear_cross_entropy`, whose mean divides by `denominator`, a tensor of one element, where one is given.

    A division after the sum would send an upstream gradient other than 1 back, and all gradients would be multiplied.
    """
    name = "linear_cross_entropy"
    expect_matrix(name, linear_weight)
    expect_tensors(name, input=input, target=target)
    expect_tensors(name, **{n: t for n, t in (("linear_bias", linear_bias), ("weight", weight)) if t is not None})
    expect_local(name, input=input, target=target, weight=weight)
    how = settings_of(name, input, linear_weight, linear_bias, chunk_rows, accumulate, logits_dtype)
    options = loss_options(
        name, -100 if ignore_index is None else ignore_index, reduction, label_smoothing, softcap, z_loss
    )
    linear_weight, linear_bias = gathered(linear_weight), None if linear_bias is None else gathered(linear_bias)
    n_cols, rows = linear_weight.shape[0], _rows(input)
    if target.is_floating_point() and target.shape == (*input.shape[:-1], n_cols):
        if options.ignore_index != -100:
            raise RuntimeError(f"{name}(): ignore_index cannot be specified when target contains probabilities")
        return probabilities_cross_entropy(rows, linear_weight, linear_bias, target, weight, options, how)
    flat, weight = expect_targets(name, target, weight, input, n_cols, options)
    smoothing, cap = options.label_smoothing, softcap_of(options.softcap, how.logits)
    weight_facts = weight_facts_of(weight, smoothing)
    denominator = None if denominator is None else denominator.reshape(1)
    op = CrossEntropy(
        flat, weight, weight_facts, options.ignore_index, options.reduction, smoothing, cap, options.z_loss, denominator
    )
    loss = linear_cross_entropy_of(rows, linear_weight, linear_bias, op, how)
    return loss.view(target.shape) if options.reduction == "none" else loss


def linear_token_logprobs(
    input: Tensor,
    linear_weight: Tensor,
    token_ids: Tensor,
    *,
    linear_bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    return_entropy: bool = False,
    return_logsumexp: bool = False,
    chunk_rows: int | None = None,
) -> Tensor | TokenStatistics:
    """`token_logprobs(F.linear(input, linear_weight, linear_bias), token_ids, ...)`, without memory for all logits.

    Args:
        input: hidden states, (..., H); float16, bfloat16, float32 or float64.
        linear_weight: (V, H), as in `linear_cross_entropy`.
        linear_bias: (V,), as in `linear_cross_entropy`.
        token_ids: integers of shape (...,), one a row, or (..., K).
        temperature: of the logits, as in `token_logprobs`: a positive number, or a tensor that broadcasts to (...,).
        return_entropy: as in `token_logprobs`.
        return_logsumexp: as in `token_logprobs`.
        chunk_rows: rows of a chunk; None plans it from shapes and dtypes.

    Returns: the log-probabilities, of token_ids' shape, or `TokenStatistics`; float32, or float64 for float64 input.
    All are differentiable in input, linear_weight and linear_bias. The forward keeps O(rows) numbers. Backward makes
    the logits again, chunk by chunk, and adds up the weight's gradient in float32. Where the temperature needs a
    gradient, torch computes all of it on all logits.

    Raises: as `token_logprobs` and `linear_cross_entropy`.

    >>> linear_token_logprobs(torch.zeros(2, 8), torch.zeros(4, 8), torch.tensor([1, 3]))
    tensor([-1.3863, -1.3863])
    """
    name, given = "linear_token_logprobs", (input, linear_weight, token_ids, linear_bias, temperature)
    if stands_in(*(t for t in given if t is not None)):
        return handle_torch_function(
            linear_token_logprobs, given, input, linear_weight, token_ids, linear_bias=linear_bias,
            temperature=temperature, return_entropy=return_entropy, return_logsumexp=return_logsumexp,
            chunk_rows=chunk_rows,
        )  # fmt: skip
    expect_matrix(name, linear_weight)
    expect_tensors(name, input=input, token_ids=token_ids)
    if linear_bias is not None:
        expect_tensors(name, linear_bias=linear_bias)
    expect_local(name, input=input, token_ids=token_ids)
    how = settings_of(name, input, linear_weight, linear_bias, chunk_rows)
    expect_flag(name, "return_entropy", return_entropy)
    expect_flag(name, "return_logsumexp", return_logsumexp)
    batch = input.shape[:-1]
    one = expect_token_ids(name, token_ids, "input", input)
    scale = scale_of(name, temperature, batch, input)
    if isinstance(scale, Tensor):
        scale = scale.reshape(-1).contiguous()
    n_picks = 1 if one else token_ids.shape[-1]
    ids = token_ids.reshape(-1, n_picks).long().contiguous()
    linear_weight, linear_bias = gathered(linear_weight), None if linear_bias is None else gathered(linear_bias)
    rows = _rows(input)
    picked, entropy, lse = linear_token_logprobs_of(rows, linear_weight, linear_bias, ids, scale, return_entropy, how)
    logprobs = picked.view(token_ids.shape)
    if not (return_entropy or return_logsumexp):
        return logprobs
    entropy = None if entropy is None else entropy.view(batch)
    return TokenStatistics(logprobs, entropy, lse.view(batch) if return_logsumexp else None)


def _rows(hidden: Tensor) -> Tensor:
    """(..., H) as (n_rows, H); of a size of 0 reshape cannot tell the other."""
    n_hidden = hidden.shape[-1]
    return hidden.reshape(-1 if n_hidden else hidden.shape[:-1].numel(), n_hidden)
