"""The public losses, on logits as wide as a vocabulary: cross_entropy and token_logprobs.

Neither allocates memory of the logits' size, except for the gradient. The routes are in torch_ops, the launches in
launch.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from .launch.layout import DTYPE_NAMES
from .launch.torch_private import legacy_reduction
from .torch_ops.arguments import (
    expect_flag,
    expect_floating,
    expect_tensors,
    expect_token_ids,
    loss_options,
    stands_in,
)
from .torch_ops.cross_entropy import cross_entropy_of, direct_cross_entropy
from .torch_ops.cross_entropy_spatial import as_it_lies
from .torch_ops.outputs import TokenStatistics
from .torch_ops.route import of_dtensor
from .torch_ops.token_logprobs import direct_token_logprobs, token_logprobs_of


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
    inplace_backward: bool = False,
) -> Tensor:
    """Return the cross-entropy of logits against class indices, as `torch.nn.functional.cross_entropy`, in one read.

    Args:
        input: The logits: (C,), (N, C) or (N, C, d1, ...). float16, bfloat16 and float32 run our kernels on a GPU; the
            rest runs torch's. (N, C, d1, ...) is read as it lies, and copied first only where it folds neither to rows
            nor to planes.
        target: int64 or uint8 class indices of shape (), (N,) or (N, d1, ...), in [0, C) or ignore_index. Probabilities
            of the logits' shape and a floating dtype run torch's.
        weight: (C,) of the logits' dtype or float32. The mean divides by the weights of the targets that count.
        size_average: Deprecated, as in torch: it warns, and replaces `reduction`.
        ignore_index: Rows with this target add nothing to the loss and nothing to the mean's denominator.
        reduce: Deprecated, as in torch: it warns, and replaces `reduction`.
        reduction: "mean", "sum" or "none". If no target counts, the mean is NaN and the sum is 0.
        label_smoothing: In [0, 1], the share of every target that is spread over all classes.
        softcap: c replaces the logits with c*tanh(logits/c) (Gemma 2, arXiv:2408.00118).
        z_loss: Adds z_loss*logsumexp(logits)^2 to every row that counts (PaLM, arXiv:2204.02311).
        inplace_backward: Writes the gradient over the logits, which saves memory of their size. The logits hold nothing
            of use afterwards, and there is one backward. An upstream gradient other than 1 multiplies the rounded
            gradient. It has no effect for reduction "none", for weights together with smoothing, for logits that are
            copied first, for rows that do not fit on chip, and under torch.compile.

    Returns:
        A scalar, or for "none" a tensor of target's shape. It is float32, or float64 for float64 logits; torch returns
        the logits' dtype. The gradient has the logits' dtype, for any upstream gradient. Where autograd saves the
        gradient that the forward wrote, it saves the logits, too.

    Raises:
        ValueError: Another reduction, shapes that do not fit, a softcap that is not positive and finite, or a z_loss
            that is infinite or NaN.
        RuntimeError: Targets of other integers, or a target or weight on another device.
        TypeError: An argument has another type.
        NotImplementedError: The logits are not floating.
        IndexError: A target is outside the classes, on the CPU. On a GPU that is a device assertion. Nothing outside
            the tensors is read or written.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.cross_entropy.html

    >>> cross_entropy(torch.zeros(2, 4), torch.tensor([1, 3]))
    tensor(1.3863)
    """
    if weight is None and size_average is None and reduce is None:
        loss = direct_cross_entropy(
            input, target, ignore_index, reduction, label_smoothing, softcap, z_loss, inplace_backward
        )
        if loss is not None:
            return loss
    if not (
        isinstance(input, Tensor) and isinstance(target, Tensor) and (weight is None or isinstance(weight, Tensor))
    ):
        if stands_in(input, target, weight):
            return handle_torch_function(
                cross_entropy,
                (input, target, weight),
                input,
                target,
                weight,
                size_average=size_average,
                ignore_index=ignore_index,
                reduce=reduce,
                reduction=reduction,
                label_smoothing=label_smoothing,
                softcap=softcap,
                z_loss=z_loss,
                inplace_backward=inplace_backward,
            )
        expect_tensors("cross_entropy", input=input, target=target)
        expect_tensors("cross_entropy", weight=weight)
    if size_average is not None or reduce is not None:
        reduction = legacy_reduction(size_average, reduce)
    options = dict(
        ignore_index=ignore_index, label_smoothing=label_smoothing, softcap=softcap, z_loss=z_loss,
        inplace_backward=inplace_backward,
    )  # fmt: skip
    found = of_dtensor("cross_entropy", cross_entropy, input, target, weight, reduction, options)
    if found is not None:
        return found
    return cross_entropy_over(
        None, input, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss, inplace_backward
    )


def cross_entropy_over(
    denominator: Tensor | None,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    inplace_backward: bool = False,
) -> Tensor:
    """Return `cross_entropy`, whose mean divides by `denominator`, a tensor of one element, where one is given.

    A division after the sum would send an upstream gradient other than 1 back, and the gradient would be written twice.
    """
    if logits.dtype not in DTYPE_NAMES:
        expect_floating("cross_entropy", "input", logits)
    options = loss_options("cross_entropy", ignore_index, reduction, label_smoothing, softcap, z_loss)
    if type(inplace_backward) is not bool:
        expect_flag("cross_entropy", "inplace_backward", inplace_backward)
    if weight is not None and weight.dtype is not torch.float32 and weight.dtype is not logits.dtype:
        raise RuntimeError(
            f"cross_entropy(): weight must be {logits.dtype}, as the logits, or torch.float32, not {weight.dtype}; "
            "cast it with weight.to(input.dtype)"
        )
    return cross_entropy_of(denominator, logits, target, weight, *options, inplace_backward, as_it_lies)


@overload
def token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    return_entropy: Literal[False] = False,
    return_logsumexp: Literal[False] = False,
) -> Tensor: ...
@overload
def token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    return_entropy: Literal[True],
    return_logsumexp: bool = False,
) -> TokenStatistics: ...
@overload
def token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    return_entropy: bool = False,
    return_logsumexp: Literal[True],
) -> TokenStatistics: ...
@overload
def token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    return_entropy: bool = False,
    return_logsumexp: bool = False,
) -> Tensor | TokenStatistics: ...
def token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    return_entropy: bool = False,
    return_logsumexp: bool = False,
) -> Tensor | TokenStatistics:
    """Return log softmax(logits/temperature) at token_ids, and on request the entropy and logsumexp of each row.

    Args:
        logits: (..., V). float16, bfloat16 and float32 run our kernels on a GPU; the rest runs torch's formulas. Rows
            that do not share one stride are copied first.
        token_ids: Integers of shape (...,), one for each row, or (..., K).
        temperature: A positive number, or a tensor of positive numbers that broadcasts to (...,). A tensor is on the
            logits' device; one without dimensions may be on the CPU, and is copied. At inf all columns are equally
            likely. Columns whose logit is -inf stay hidden at every temperature.
        return_entropy: Also return -sum(p*log p), in nats.
        return_logsumexp: Also return log(sum(exp(logits/temperature))).

    Returns:
        The log-probabilities, of token_ids' shape. Where more is asked for, `TokenStatistics` with entropy and
        logsumexp of shape (...,). All are float32, or float64 for float64 logits, and differentiable in the logits. The
        forward allocates O(rows). A row's bits do not depend on the number of rows. On a GPU an id outside [0, V) gives
        NaN and adds nothing to the gradient, and nothing outside the row is read.

    Raises:
        ValueError: token_ids do not fit the logits, or a number as temperature is not positive.
        TypeError: token_ids are no integers, or an argument has another type.
        NotImplementedError: The logits are not floating.
        RuntimeError: The temperature does not broadcast, or an argument is on another device than the logits.
        IndexError: An id is outside [0, V), on the CPU.

    >>> token_logprobs(torch.zeros(2, 4), torch.tensor([1, 3]))
    tensor([-1.3863, -1.3863])
    """
    found = direct_token_logprobs(logits, token_ids, temperature, return_entropy)
    if found is not None and type(return_logsumexp) is bool:
        if not (return_entropy or return_logsumexp):
            return found[0]
        logprobs, entropy, lse = found
        return TokenStatistics(logprobs, entropy, lse if return_logsumexp else None)
    if not (isinstance(logits, Tensor) and isinstance(token_ids, Tensor)) or (
        type(temperature) is not float and stands_in(temperature)
    ):
        if stands_in(logits, token_ids, temperature):
            return handle_torch_function(
                token_logprobs,
                (logits, token_ids, temperature),
                logits,
                token_ids,
                temperature=temperature,
                return_entropy=return_entropy,
                return_logsumexp=return_logsumexp,
            )
        expect_tensors("token_logprobs", logits=logits, token_ids=token_ids)
    if logits.dtype not in DTYPE_NAMES:
        expect_floating("token_logprobs", "logits", logits)
    if type(return_entropy) is not bool or type(return_logsumexp) is not bool:
        expect_flag("token_logprobs", "return_entropy", return_entropy)
        expect_flag("token_logprobs", "return_logsumexp", return_logsumexp)
    one = expect_token_ids("token_logprobs", token_ids, "logits", logits)
    spread = of_dtensor(
        "token_logprobs", token_logprobs, logits, token_ids, temperature, return_entropy, return_logsumexp
    )
    if spread is not None:
        return spread
    picked, entropy, lse = token_logprobs_of(logits, token_ids, one, temperature, return_entropy)
    logprobs = picked.view(token_ids.shape)
    if not (return_entropy or return_logsumexp):
        return logprobs
    return TokenStatistics(logprobs, entropy, lse if return_logsumexp else None)
