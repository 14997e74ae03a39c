"""token_logprobs: log-probabilities of given tokens, entropy and logsumexp, in one read of the logits.

    z = logits/temperature;  lse = log(sum(exp(z)));  logprob_k = z[id_k] - lse;  H = lse - sum(p*z)

What GRPO and PPO, distillation and scoring take from logits as wide as a vocabulary. log_softmax and gather allocate a
tensor of the logits' size; here a forward writes a few numbers a row, and a backward the gradient alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from . import loss_formulas, loss_operators, row_losses
from .arguments import expect_flag, expect_floating, expect_tensors, real, stands_in
from .launch import DTYPE_NAMES
from .operators import is_compiled, is_plain, least_positive, other_device_error, refusal
from .rows import is_batch_invariant


class TokenStatistics(NamedTuple):
    """What token_logprobs returns where more than log-probabilities is asked for; None for what was not."""

    logprobs: Tensor
    entropy: Tensor | None
    logsumexp: Tensor | None


def token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    return_entropy: bool = False,
    return_logsumexp: bool = False,
) -> Tensor | TokenStatistics:
    """log softmax(logits/temperature) at token_ids, and of the same distribution the entropy and the logsumexp.

    Args:
        logits: (..., V); float16, bfloat16 and float32 are ours on a GPU, all else is torch's. Rows that do not share
            one stride are copied first.
        token_ids: integers of shape (...,), one a row, or (..., K).
        temperature: a positive number, or a tensor of such that broadcasts to (...,): one a row. It is on the logits'
            device; one of no dimensions may be on the CPU, and is copied. At inf all columns are equally likely, except
            those whose logit is -inf: as at any temperature, they stay hidden.
        return_entropy: also -sum(p*log p), in nats.
        return_logsumexp: also log(sum(exp(logits/temperature))).

    Returns: the log-probabilities, of token_ids' shape; or, where more is asked for, `TokenStatistics` with entropy and
    logsumexp of shape (...,). float32, or float64 for float64 logits. All are differentiable in the logits. The forward
    allocates O(rows), and a row's bits do not depend on how many rows there are.

    An id outside [0, V) is an IndexError on the CPU; on a GPU, where to know would be to wait, its log-probability is
    NaN, it adds nothing to the gradient and nothing outside the row is read.

    Raises: ValueError for token_ids that do not fit, or a number as temperature that is not positive; TypeError for
    token_ids that are no integers and for arguments of other types; NotImplementedError, as softmax, for logits that
    are not floating; RuntimeError for a temperature that does not broadcast, and for token_ids or a temperature on
    another device than the logits.

    >>> token_logprobs(torch.zeros(2, 4), torch.tensor([1, 3]))
    tensor([-1.3863, -1.3863])
    """
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
    one = token_ids.shape == logits.shape[:-1]
    if logits.dim() == 0 or not (one or token_ids.shape[:-1] == logits.shape[:-1] and token_ids.dim() == logits.dim()):
        raise ValueError(
            f"token_ids {tuple(token_ids.shape)} must be {tuple(logits.shape[:-1])} or have one dimension more, "
            f"for logits {tuple(logits.shape)}"
        )
    if token_ids.is_floating_point() or token_ids.is_complex() or token_ids.dtype is torch.bool:
        raise TypeError(f"token_ids must be integers, not {token_ids.dtype}")
    if token_ids.device != logits.device:
        raise other_device_error("token_ids", token_ids, "logits", logits)
    n_cols, batch = logits.shape[-1], logits.shape[:-1]
    ids = (token_ids.unsqueeze(-1) if one else token_ids).long()
    plain = is_plain(token_ids)
    if plain and ids.device.type == "cpu":  # what is traced or batched has no values to ask for
        row_losses.check_ids(ids, n_cols)
    scale = _scale(temperature, batch, logits)
    differentiable = isinstance(temperature, Tensor) and temperature.requires_grad
    plain = plain and (not isinstance(temperature, Tensor) or is_plain(temperature))
    plain = plain and not differentiable and is_plain(logits) and logits.numel() > 0 and ids.numel() > 0
    plain = plain and refusal(logits, logits.dtype) is None
    compiled = not (plain or differentiable) and is_compiled(
        logits, token_ids, temperature if isinstance(temperature, Tensor) else None
    )
    if plain or (compiled and n_cols > 0 and ids.shape[-1] > 0):
        rows = row_losses.rows_of(logits, n_cols)
        of_rows = scale.reshape(-1).contiguous() if isinstance(scale, Tensor) else scale
        ids = ids.reshape(-1, ids.shape[-1]).contiguous()
        statistics: Callable[..., Any] = RowStatistics.apply if plain else loss_operators.statistics
        picked, lse, entropy = statistics(rows, ids, of_rows, return_entropy)
        lse, entropy = lse.view(batch), entropy.view(batch) if return_entropy else None
    else:
        lse, entropy, picked = loss_formulas.statistics(logits, ids, scale, return_entropy)
    assert picked is not None
    logprobs = picked.view(token_ids.shape)
    if not (return_entropy or return_logsumexp):
        return logprobs
    return TokenStatistics(logprobs, entropy, lse if return_logsumexp else None)


def _scale(temperature: float | Tensor, batch: torch.Size, logits: Tensor) -> float | Tensor:
    """1/temperature: a number, or a tensor of shape `batch` in float32, or float64 for float64 logits."""
    if not isinstance(temperature, Tensor):
        if type(temperature) is not float:
            temperature = real("token_logprobs", "temperature", temperature)
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, not {temperature}")
        return max(1.0 / temperature, least_positive(logits.dtype))
    if temperature.dtype is torch.bool or temperature.is_complex():
        raise TypeError(f"temperature must hold real numbers, not {temperature.dtype}; temperature.float() makes them")
    if temperature.device != logits.device and not (temperature.dim() == 0 and temperature.is_cpu):
        raise other_device_error("temperature", temperature, "logits", logits)
    dtype = logits.dtype if logits.dtype is torch.float64 else torch.float32
    return temperature.to(logits.device, dtype).expand(batch).reciprocal()


class RowStatistics(torch.autograd.Function):
    """(log-probabilities, lse, entropy) of rows. Keeps the logits and O(rows) beside."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ids: Tensor, scale: float | Tensor, entropy: bool
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:
        lse, entropies, picked, moments = row_losses.statistics(x, ids, scale, entropy, invariant=is_batch_invariant())
        by_row = isinstance(scale, Tensor)
        ctx.save_for_backward(x, ids, moments, entropies, scale if by_row else None)
        ctx.scale = None if by_row else scale
        ctx.set_materialize_grads(False)
        return picked, lse, entropies

    @staticmethod
    def backward(
        ctx: Any, g_picked: Tensor | None, g_lse: Tensor | None, g_entropy: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        x, ids, moments, entropy, by_row = ctx.saved_tensors
        scale = ctx.scale if by_row is None else by_row
        upstream = [g for g in (g_picked, g_lse, g_entropy) if g is not None]
        if not upstream:
            return None, None, None, None
        if torch.is_grad_enabled() or not all(is_plain(g) for g in upstream):
            dx = loss_formulas.statistics_gradient(g_picked, g_lse, g_entropy, x, ids, scale)
            return dx, None, None, None
        dx = row_losses.gradient_buffer(x)
        row_losses.statistics_backward(
            x,
            dx,
            moments,
            scale,
            ids=ids,
            g_picked=g_picked,
            entropy=entropy,
            g_entropy=g_entropy,
            g_lse=g_lse,
        )
        return dx, None, None, None
