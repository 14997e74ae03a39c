"""token_logprobs as PyTorch sees it: the routes of a call, the operator and its autograd.

    z = logits/temperature;  lse = log(sum(exp(z)));  logprob_k = z[id_k] - lse;  H = lse - sum(p*z)

A forward reads the logits once and writes a few numbers a row; a backward is one read and one write. RowStatistics is
the operator's autograd for plain tensors, with no dispatcher in between. Results come in the order of TokenStatistics:
log-probabilities, entropy, logsumexp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..launch import row_statistics as rows
from ..launch.availability import KernelUnavailable
from ..launch.context import is_batch_invariant
from ..launch.layout import gradient_buffer, rows_of, rows_or_copy
from ..launch.torch_private import function_apply, profiling
from . import decompositions
from .arguments import expect_floating, expect_layout, least_positive, scale_of
from .decompositions import no_moments, result_dtype
from .library import define, differentiable, not_differentiable
from .route import (
    EMPTY,
    Answer,
    can_bypass_dispatcher,
    is_compiled,
    is_supported,
    layout_of_rows,
    planned_by,
    recorded,
    unsupported_reason,
)


def token_logprobs_of(
    logits: Tensor, token_ids: Tensor, one: bool, temperature: float | Tensor, entropy: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(log-probabilities, entropy, logsumexp) of checked arguments; one: token_ids has one id a row.

    The log-probabilities have one element for each id, in any shape; the other two the shape of the rows.
    """
    n_cols, batch = logits.shape[-1], logits.shape[:-1]
    ids = (token_ids.unsqueeze(-1) if one else token_ids).long()
    plain = can_bypass_dispatcher(token_ids)
    if plain and ids.device.type == "cpu":  # a traced or batched tensor has no values to check
        rows.check_ids(ids, n_cols)
    scale = scale_of("token_logprobs", temperature, batch, logits)
    needs_gradient = isinstance(temperature, Tensor) and temperature.requires_grad
    plain = plain and (not isinstance(temperature, Tensor) or can_bypass_dispatcher(temperature))
    plain = plain and not needs_gradient and can_bypass_dispatcher(logits) and is_supported(logits) and ids.numel() > 0
    compiled = not (plain or needs_gradient) and is_compiled(
        logits, token_ids, temperature if isinstance(temperature, Tensor) else None
    )
    if plain or (compiled and n_cols > 0 and ids.shape[-1] > 0):
        x = rows_of(logits, n_cols)
        of_rows = scale.reshape(-1).contiguous() if isinstance(scale, Tensor) else scale
        ids = ids.reshape(-1, ids.shape[-1]).contiguous()
        picked, entropies, lse = (_by_kernels if plain else _by_operator)(x, ids, of_rows, entropy)
        if batch != lse.shape:  # a view cannot be detached in place
            lse, entropies = lse.view(batch), None if entropies is None else entropies.view(batch)
        entropies = entropies if entropy else None
    else:
        picked, entropies, lse = decompositions.statistics(logits, ids, scale, entropy)
    assert picked is not None
    return picked, entropies, lse


def token_logprobs_and_rank(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor] | None:
    """(log-probabilities (n_rows, n_picks), the rank of each row's first id, int64) from one read of logits
    (n_rows, n_cols); None where the kernel does not take them, or they do not fit each other."""
    n_cols = logits.shape[1]
    plain = can_bypass_dispatcher(logits) and can_bypass_dispatcher(token_ids) and is_supported(logits)
    if not plain or profiling() or not token_ids.numel() or not 0 < n_cols <= rows.MOST_RANKED:
        return None
    if token_ids.dtype not in (torch.int64, torch.int32) or token_ids.device != logits.device:
        return None
    if token_ids.shape[0] != logits.shape[0] or (logits.requires_grad and torch.is_grad_enabled()):
        return None
    ids = token_ids.long()
    if ids.device.type == "cpu":
        rows.check_ids(ids, n_cols)
    try:
        x = rows_of(logits, n_cols)
        picked, rank, _, _ = rows.statistics(x, ids.contiguous(), 1.0, False, keeps=False, rank=True)
    except KernelUnavailable:
        return None
    assert picked is not None and rank is not None
    return picked, rank.long()


def _by_kernels(
    x: Tensor, ids: Tensor, scale: float | Tensor, entropy: bool, layout: object = None
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    if profiling():
        return recorded("token_logprobs", _apply, x, ids, scale, entropy, layout)
    return _apply(x, ids, scale, entropy, layout)


def _apply(
    x: Tensor, ids: Tensor, scale: float | Tensor, entropy: bool, layout: object
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    if x.requires_grad and torch.is_grad_enabled():
        return _row_statistics(x, (ids, scale, entropy, layout))
    return _statistics(x, ids, scale, entropy, layout, keeps=False)[:3]


def direct_token_logprobs(
    logits: Any, token_ids: Any, temperature: Any, entropy: Any
) -> tuple[Tensor, Tensor | None, Tensor] | None:
    """(log-probabilities, entropy, logsumexp) of rows as they lie, on a GPU, at one id a row; None where the call takes
    the longer way, which also judges wrong arguments."""
    layout = layout_of_rows(logits, token_ids)
    if layout is None or not (type(temperature) is float and temperature > 0.0 and type(entropy) is bool):
        return None
    scale = 1.0 if temperature == 1.0 else max(1.0 / temperature, least_positive(logits.dtype))
    picked, entropies, lse = _by_kernels(logits, token_ids, scale, entropy, layout)
    assert picked is not None
    return picked, entropies, lse


def planned_token_logprobs(logits: Tensor, backward: bool) -> Answer:
    """What token_logprobs of these logits, one id a row, would run, or its gradient."""
    expect_floating("token_logprobs", "logits", logits)
    reason = unsupported_reason(logits, logits.dtype)
    if reason is not None:
        return reason
    if logits.dim() == 0 or logits.numel() == 0:
        return EMPTY
    return rows.planned_statistics(rows_or_copy(logits), logits, 1, backward)


class RowStatistics(torch.autograd.Function):
    """(log-probabilities, entropy, lse) of rows. Keeps the logits and O(rows) numbers."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, described: tuple[Tensor, float | Tensor, bool, object]
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        ids, scale, entropy, layout = described
        picked, entropies, lse, moments = _statistics(x, ids, scale, entropy, layout)
        by_row = isinstance(scale, Tensor)
        ctx.save_for_backward(x, ids, moments, entropies, scale if by_row else None)
        # batch invariance too: backward runs in a thread that does not know
        ctx.scale, ctx.invariant = None if by_row else scale, is_batch_invariant()
        ctx.set_materialize_grads(False)
        # what is returned may be changed in place, and what is saved may not
        return picked, None if entropies is None else entropies.clone(), lse

    @staticmethod
    def backward(
        ctx: Any, g_picked: Tensor | None, g_entropy: Tensor | None, g_lse: Tensor | None
    ) -> tuple[Tensor | None, None]:
        x, ids, moments, entropy, by_row = ctx.saved_tensors
        scale = ctx.scale if by_row is None else by_row
        upstream = [g for g in (g_picked, g_entropy, g_lse) if g is not None]
        if not upstream:
            return None, None
        if torch.is_grad_enabled() or not all(can_bypass_dispatcher(g) for g in upstream):
            dx = decompositions.statistics_gradient(g_picked, g_entropy, g_lse, x, ids, scale)
            return dx, None
        dx = gradient_buffer(x)
        _gradient(x, dx, moments, scale, ids, entropy, (g_picked, g_entropy, g_lse), ctx.invariant)
        return dx, None


_row_statistics = function_apply(RowStatistics)


def _statistics(
    x: Tensor, ids: Tensor, scale: float | Tensor, entropy: bool, layout: object = None, *, keeps: bool = True
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
    try:
        return rows.statistics(x, ids, scale, entropy, keeps=keeps, layout=layout)
    except KernelUnavailable:
        return decompositions.statistics_and_moments(x, ids, scale, entropy)


def _gradient(
    x: Tensor,
    dx: Tensor,
    moments: Tensor,
    scale: float | Tensor,
    ids: Tensor,
    entropy: Tensor | None,
    upstream: tuple[Tensor | None, Tensor | None, Tensor | None],
    invariant: bool,
) -> None:
    g_picked, g_entropy, g_lse = upstream
    given: dict[str, Any] = dict(ids=ids, g_picked=g_picked, entropy=entropy, g_entropy=g_entropy, g_lse=g_lse)
    try:
        rows.statistics_backward(x, dx, moments, scale, **given, invariant=invariant)
    except KernelUnavailable:
        dx.copy_(decompositions.statistics_gradient(g_picked, g_entropy, g_lse, x, ids, scale))


# --- the operator: of rows (n_rows, n_cols) at ids (n_rows, n_picks), times a scale, or one for each row --------------


def _by_operator(x: Tensor, ids: Tensor, scale: float | Tensor, entropy: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """(log-probabilities, entropy, lse) of rows, as RowStatistics has them."""
    by_row = isinstance(scale, Tensor)
    picked, entropies, lse, _ = token_logprobs(x, ids, scale if by_row else None, 1.0 if by_row else scale, entropy)
    return picked, entropies if entropy else None, lse


def _token_logprobs_kernel(
    x: Tensor, ids: Tensor, scales: Tensor | None, scale: float, entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_rows = scale if scales is None else scales.contiguous()
    if is_supported(x) and ids.numel():
        expect_layout("ids", ids, x, (x.shape[0], ids.shape[-1]))
        expect_layout("scales", scales, x, (x.shape[0],))
        if x.device.type == "cpu":
            rows.check_ids(ids, x.shape[1])
        x = rows_of(x, x.shape[1])
        picked, entropies, lse, moments = _statistics(x, ids.contiguous(), of_rows, entropy)
    else:
        picked, entropies, lse = decompositions.statistics(x, ids, of_rows, entropy)
        moments = no_moments(x)
    assert picked is not None and moments is not None
    return picked, lse.new_empty(0) if entropies is None else entropies, lse, moments


def _token_logprobs_fake(
    x: Tensor, ids: Tensor, scales: Tensor | None, scale: float, entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lse = x.new_empty(x.shape[:1], dtype=result_dtype(x))
    return lse.new_empty(ids.shape), lse.new_empty(x.shape[:1] if entropy else (0,)), lse, no_moments(x)


def _formula_of_gradient(
    g_picked: Tensor | None,
    g_entropy: Tensor | None,
    g_lse: Tensor | None,
    moments: Tensor,
    entropies: Tensor,
    x: Tensor,
    ids: Tensor,
    scales: Tensor | None,
    scale: float,
) -> Tensor:
    of_rows = scale if scales is None else scales
    return decompositions.statistics_gradient(g_picked, g_entropy, g_lse, x, ids, of_rows)


def _token_logprobs_backward_kernel(
    g_picked: Tensor | None,
    g_entropy: Tensor | None,
    g_lse: Tensor | None,
    moments: Tensor,
    entropies: Tensor,
    x: Tensor,
    ids: Tensor,
    scales: Tensor | None,
    scale: float,
) -> Tensor:
    if not (is_supported(x) and ids.numel()):
        dx = _formula_of_gradient(g_picked, g_entropy, g_lse, moments, entropies, x, ids, scales, scale)
        return dx.contiguous()
    expect_layout("moments", moments, x, (x.shape[0], 2))
    expect_layout("ids", ids, x, (x.shape[0], ids.shape[-1]))
    expect_layout("scales", scales, x, x.shape[:1])
    expect_layout("g_picked", g_picked, x, ids.shape)
    for name, g in (("g_entropy", g_entropy), ("g_lse", g_lse)):
        expect_layout(name, g, x, x.shape[:1])
    if g_entropy is not None:
        expect_layout("entropies", entropies, x, (x.shape[0],))
    of_rows = scale if scales is None else scales.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x = rows_of(x, x.shape[1])
    upstream = (g_picked, g_entropy, g_lse)
    given = moments.contiguous(), of_rows, ids.contiguous(), entropies.contiguous()
    _gradient(x, dx, *given, upstream, is_batch_invariant())
    return dx


def _token_logprobs_backward_fake(
    g_picked: Tensor | None,
    g_entropy: Tensor | None,
    g_lse: Tensor | None,
    moments: Tensor,
    entropies: Tensor,
    x: Tensor,
    *rest: Any,
) -> Tensor:
    return x.new_empty(x.shape)


_UPSTREAM = "Tensor? g_picked, Tensor? g_entropy, Tensor? g_lse, Tensor moments, Tensor entropies"
_OF_ROWS = "Tensor x, Tensor ids, Tensor? scales, float scale"
token_logprobs = define(
    f"token_logprobs({_OF_ROWS}, bool entropy) -> (Tensor picked, Tensor entropies, Tensor lse, Tensor moments)",
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
    _, entropies, _, moments = output
    ctx.mark_non_differentiable(*((moments,) if entropy else (entropies, moments)))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(entropies, moments, x, ids, scales)


def _token_logprobs_gradients(
    ctx: Any, g_picked: Tensor | None, g_entropy: Tensor | None, g_lse: Tensor | None, _: None
) -> tuple[Tensor | None, ...]:
    nothing, upstream = (None,) * 4, (g_picked, g_entropy, g_lse)
    if all(g is None for g in upstream):
        return None, *nothing
    entropies, moments, x, ids, scales = ctx.saved_tensors
    gradient = _formula_of_gradient if torch.is_grad_enabled() else token_logprobs_backward
    return gradient(*upstream, moments, entropies, x, ids, scales, ctx.scale), *nothing


def _formula(
    x: Tensor, ids: Tensor, scales: Tensor | None, scale: float, entropy: bool
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    picked, entropies, lse, moments = decompositions.statistics_and_moments(
        x, ids, scale if scales is None else scales, entropy
    )
    return picked, lse.new_empty(0) if entropies is None else entropies, lse, moments


differentiable("token_logprobs", _token_logprobs_gradients, _save_token_logprobs, _formula)
not_differentiable("token_logprobs_backward", _formula_of_gradient)
planned_by("token_logprobs", lambda asked: planned_token_logprobs(asked.x, asked.backward))
