"""cross_entropy and token_logprobs as PyTorch operators of rows, for torch.compile: fused_softmax::cross_entropy, ...

Here belong schema, kernel, fake kernel and autograd; `losses` and `logprobs` fold tensors into rows and call these
while torch.compile traces. A forward reads the logits once and writes O(rows); a backward is one read, and one write
into a new gradient. In eager mode cross_entropy's forward writes the gradient too; here it does not: what upstream
sends would be multiplied onto it in place, and in a graph of operators without side effects that takes a copy.

What only real tensors tell is asked in the kernels: targets outside the classes, on the CPU; empty rows, and devices
without kernels, which take the formulas. Results are contiguous, float32, or float64 for float64 logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import loss_formulas, row_losses
from .operators import define, library, not_differentiable, other_device_error, refusal
from .row_losses import CrossEntropy


def _takes(x: Tensor) -> bool:
    return x.numel() > 0 and refusal(x, x.dtype) is None


def _result_dtype(x: Tensor) -> torch.dtype:
    return x.dtype if x.dtype is torch.float64 else torch.float32


def _no_moments(x: Tensor) -> Tensor:
    """Each row's (maximum, sum of exponentials), which only the kernels know; the formulas need none."""
    return x.new_zeros((x.shape[0], 2), dtype=_result_dtype(x))


def _expect(name: str, t: Tensor | None, x: Tensor, shape: tuple[int, ...]) -> None:
    """RuntimeError where t's device or shape would have x's kernel read outside of t; None is as it should be.

    The functions that fold tensors see to both; an exported graph may be called with tensors on any device.
    """
    if t is None:
        return
    if t.device != x.device:
        raise other_device_error(name, t, "x", x)
    if t.shape != shape:
        raise RuntimeError(f"{name} must have shape {shape}, not {tuple(t.shape)}")


# --- cross_entropy of rows (n_rows, n_cols), described by the fields of CrossEntropy ----------------------------------

_FIELDS = (
    "Tensor target, Tensor? weight, Tensor? weight_sum, int ignore_index, str reduction, float smoothing, "
    "float? softcap, float z_loss, Tensor? denominator"
)


def _described(target: Tensor, weight: Tensor | None, *rest: Any) -> CrossEntropy:
    return CrossEntropy(target.contiguous(), None if weight is None else weight.contiguous(), *rest)


def _cross_entropy_kernel(x: Tensor, *fields: Any) -> tuple[Tensor, Tensor]:
    op, n_cols = _described(*fields), x.shape[1]
    if not _takes(x):
        return loss_formulas.cross_entropy_of_rows(x, op), _no_moments(x)
    _expect("target", op.target, x, (x.shape[0],))
    _expect("weight", op.weight, x, (n_cols,))
    _expect("weight_sum", op.weight_sum, x, (1,))
    _expect("denominator", op.denominator, x, (1,))
    if x.device.type == "cpu":
        row_losses.check_targets(op.target, op.ignore_index, n_cols)
    losses, moments = row_losses.cross_entropy_forward(row_losses.rows_of(x, n_cols), op)
    return row_losses.reduce_losses(losses, op, n_cols), moments


def _cross_entropy_fake(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    weight_sum: Tensor | None,
    ignore_index: int,
    reduction: str,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    moments = _no_moments(x)
    return moments.new_empty(x.shape[:1] if reduction == "none" else ()), moments


def _cross_entropy_backward_kernel(g: Tensor, moments: Tensor, x: Tensor, *fields: Any) -> Tensor:
    op, n_cols = _described(*fields), x.shape[1]
    if not _takes(x):
        return loss_formulas.cross_entropy_gradient(g, x, op).contiguous() if x.numel() else x.new_empty(x.shape)
    _expect("moments", moments, x, (x.shape[0], 2))
    count = row_losses.count_targets(op, n_cols) if op.reduction == "mean" else None
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    g, moments = g.reshape(-1).float().contiguous(), moments.contiguous()
    row_losses.cross_entropy_gradient(row_losses.rows_of(x, n_cols), dx, op, count, moments, g, unless_one=False)
    return dx


def _cross_entropy_backward_fake(g: Tensor, moments: Tensor, x: Tensor, *fields: Any) -> Tensor:
    return x.new_empty(x.shape)


cross_entropy = define(
    f"cross_entropy(Tensor x, {_FIELDS}) -> (Tensor loss, Tensor moments)", _cross_entropy_kernel, _cross_entropy_fake
)
cross_entropy_backward = define(
    f"cross_entropy_backward(Tensor g, Tensor moments, Tensor x, {_FIELDS}) -> Tensor",
    _cross_entropy_backward_kernel,
    _cross_entropy_backward_fake,
)


def _save_cross_entropy(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, target, weight, weight_sum, *ctx.options, denominator = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], x, target, weight, weight_sum, denominator)


def _cross_entropy_gradients(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 9
    if g is None:
        return None, *nothing
    moments, x, target, weight, weight_sum, denominator = ctx.saved_tensors
    fields = (target, weight, weight_sum, *ctx.options, denominator)
    if torch.is_grad_enabled():
        return loss_formulas.cross_entropy_gradient(g, x, CrossEntropy(*fields)), *nothing
    return cross_entropy_backward(g, moments, x, *fields), *nothing


torch.library.register_autograd(
    "fused_softmax::cross_entropy", _cross_entropy_gradients, setup_context=_save_cross_entropy, lib=library
)
not_differentiable("cross_entropy_backward")

# --- token_logprobs of rows (n_rows, n_cols) at ids (n_rows, n_picks), times a scale, or one for each row -------------


def statistics(x: Tensor, ids: Tensor, scale: float | Tensor, entropy: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """(log-probabilities, lse, entropy) of rows, as logprobs.RowStatistics has them."""
    by_row = isinstance(scale, Tensor)
    picked, lse, entropies, _ = token_logprobs(x, ids, scale if by_row else None, 1.0 if by_row else scale, entropy)
    return picked, lse, entropies if entropy else None


def _token_logprobs_kernel(
    x: Tensor, ids: Tensor, scales: Tensor | None, scale: float, entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_rows = scale if scales is None else scales.contiguous()
    if _takes(x) and ids.numel():
        _expect("ids", ids, x, (x.shape[0], ids.shape[-1]))
        _expect("scales", scales, x, (x.shape[0],))
        if x.device.type == "cpu":
            row_losses.check_ids(ids, x.shape[1])
        x = row_losses.rows_of(x, x.shape[1])
        lse, entropies, picked, moments = row_losses.statistics(x, ids.contiguous(), of_rows, entropy)
    else:
        lse, entropies, picked = loss_formulas.statistics(x, ids, of_rows, entropy)
        moments = _no_moments(x)
    assert picked is not None and moments is not None
    return picked, lse, lse.new_empty(0) if entropies is None else entropies, moments


def _token_logprobs_fake(
    x: Tensor, ids: Tensor, scales: Tensor | None, scale: float, entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lse = x.new_empty(x.shape[:1], dtype=_result_dtype(x))
    return lse.new_empty(ids.shape), lse, lse.new_empty(x.shape[:1] if entropy else (0,)), _no_moments(x)


def _token_logprobs_backward_kernel(
    g_picked: Tensor | None,
    g_lse: Tensor | None,
    g_entropy: Tensor | None,
    moments: Tensor,
    entropies: Tensor,
    x: Tensor,
    ids: Tensor,
    scales: Tensor | None,
    scale: float,
) -> Tensor:
    of_rows = scale if scales is None else scales.contiguous()
    if not (_takes(x) and ids.numel()):
        return loss_formulas.statistics_gradient(g_picked, g_lse, g_entropy, x, ids, of_rows).contiguous()
    _expect("moments", moments, x, (x.shape[0], 2))
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    row_losses.statistics_backward(
        row_losses.rows_of(x, x.shape[1]),
        dx,
        moments.contiguous(),
        of_rows,
        ids=ids.contiguous(),
        g_picked=g_picked,
        entropy=entropies.contiguous(),
        g_entropy=g_entropy,
        g_lse=g_lse,
    )
    return dx


def _token_logprobs_backward_fake(
    g_picked: Tensor | None,
    g_lse: Tensor | None,
    g_entropy: Tensor | None,
    moments: Tensor,
    entropies: Tensor,
    x: Tensor,
    *rest: Any,
) -> Tensor:
    return x.new_empty(x.shape)


_UPSTREAM = "Tensor? g_picked, Tensor? g_lse, Tensor? g_entropy, Tensor moments, Tensor entropies"
_OF_ROWS = "Tensor x, Tensor ids, Tensor? scales, float scale"
token_logprobs = define(
    f"token_logprobs({_OF_ROWS}, bool entropy) -> (Tensor picked, Tensor lse, Tensor entropies, Tensor moments)",
    _token_logprobs_kernel,
    _token_logprobs_fake,
)
token_logprobs_backward = define(
    f"token_logprobs_backward({_UPSTREAM}, {_OF_ROWS}) -> Tensor",
    _token_logprobs_backward_kernel,
    _token_logprobs_backward_fake,
)


def _save_token_logprobs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, ids, scales, ctx.scale, entropy = inputs
    ctx.mark_non_differentiable(*output[3 if entropy else 2 :])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[2:], x, ids, scales)


def _token_logprobs_gradients(
    ctx: Any, g_picked: Tensor | None, g_lse: Tensor | None, g_entropy: Tensor | None, _: None
) -> tuple[Tensor | None, ...]:
    nothing, upstream = (None,) * 4, (g_picked, g_lse, g_entropy)
    if all(g is None for g in upstream):
        return None, *nothing
    entropies, moments, x, ids, scales = ctx.saved_tensors
    if torch.is_grad_enabled():
        of_rows = ctx.scale if scales is None else scales
        return loss_formulas.statistics_gradient(*upstream, x, ids, of_rows), *nothing
    return token_logprobs_backward(*upstream, moments, entropies, x, ids, scales, ctx.scale), *nothing


torch.library.register_autograd(
    "fused_softmax::token_logprobs", _token_logprobs_gradients, setup_context=_save_token_logprobs, lib=library
)
not_differentiable("token_logprobs_backward")
