"""linear_token_logprobs as PyTorch sees it: the routes of a call, the loop over chunks of rows, the operator.

    z = (x @ weight.T + bias)/temperature;  logprob_k = z[id_k] - lse;  H = lse - sum(p*z)

The forward keeps O(rows) numbers and drops each chunk's logits. Backward makes them again, and writes their gradient
over them. Results come in the order of TokenStatistics: log-probabilities, entropy, logsumexp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..launch import row_statistics as rows
from ..launch.availability import KernelUnavailable
from ..launch.context import as_in_forward, is_batch_invariant
from ..launch.linear import Gradients, Needs, Projection, Settings
from ..launch.torch_private import has_storage
from . import decompositions
from .arguments import expect_layout
from .decompositions import result_dtype
from .library import define, differentiable, not_differentiable
from .linear_arguments import all_logits, gradients_by_torch, needed_gradients, planned_linear, without_autocast
from .route import can_bypass_dispatcher, is_supported, operator_takes, planned_by

Statistics = tuple[Tensor, Tensor | None, Tensor]
Watch = Callable[[slice, Tensor], None]


def is_direct(*given: Tensor | None) -> bool:
    """Whether a call of these tensors runs the loop below itself: no tracing, no transform, no subclass of Tensor."""
    return all(can_bypass_dispatcher(t) for t in given if t is not None)


def linear_token_logprobs_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, scale: float | Tensor, entropy: bool, how: Settings,
    watch: Watch | None = None,
) -> Statistics:  # fmt: skip
    """(log-probabilities, entropy, lse) of rows x (n_rows, hidden) at ids (n_rows, n_picks), by checked arguments.

    watch: called in the forward with each chunk's rows and its logits (rows, n_cols), before these are dropped. It
    reads them again, and may not keep or change them. Only calls that `is_direct` allows.
    """
    by_row = scale if isinstance(scale, Tensor) else None
    given = [t for t in (x, weight, bias, ids, by_row) if t is not None]
    # a temperature with a gradient is for torch to differentiate
    ours = by_row is None or not (by_row.requires_grad and torch.is_grad_enabled())
    if ours and all(can_bypass_dispatcher(t) for t in given):
        if torch.is_grad_enabled() and any(t.requires_grad for t in given):
            return LinearTokenLogprobs.apply(x, weight, bias, ids, scale, entropy, how, watch)
        return _forward(x, weight, bias, ids, scale, entropy, how, watch)[:3]
    assert watch is None, "nothing watches the logits of a traced or transformed call"
    if ours and operator_takes(*given):
        needs = needed_gradients(x, weight, bias)
        number = 1.0 if isinstance(scale, Tensor) else scale
        picked, entropies, lse, _ = linear_token_logprobs(
            x, weight, bias, ids, by_row, number, entropy, how.compute, how.chunk_rows, needs
        )
        return picked, entropies if entropy else None, lse
    picked, entropies, lse = decompositions.statistics(all_logits(x, weight, bias, how), ids, scale, entropy)
    assert picked is not None
    return picked, entropies, lse


def _of_chunk(scale: float | Tensor, chunk: slice) -> float | Tensor:
    return scale[chunk] if isinstance(scale, Tensor) else scale


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, scale: float | Tensor, entropy: bool, how: Settings,
    watch: Watch | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """(log-probabilities, entropy, lse, moments) of all rows."""
    n_rows, dtype = x.shape[0], result_dtype(x)
    if ids.device.type == "cpu":
        rows.check_ids(ids, weight.shape[0])
    picked, lse = x.new_empty(ids.shape, dtype=dtype), x.new_empty(n_rows, dtype=dtype)
    entropies = x.new_empty(n_rows, dtype=dtype) if entropy else None
    moments = x.new_empty((n_rows, 2), dtype=dtype)
    with without_autocast(x.device.type):
        for chunk, logits, _ in Projection(x, weight, bias, how).logits():
            found = _statistics(logits, ids[chunk], _of_chunk(scale, chunk), entropy)
            for whole, part in zip((picked, entropies, lse, moments), found, strict=True):
                if whole is not None and part is not None:
                    whole[chunk] = part
            if watch is not None:
                watch(chunk, logits)
            del logits
    return picked, entropies, lse, moments


def _statistics(
    logits: Tensor, ids: Tensor, scale: float | Tensor, entropy: bool
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
    if is_supported(logits) and ids.numel():
        try:
            return rows.statistics(logits, ids, scale, entropy)
        except KernelUnavailable:
            pass
    return decompositions.statistics_and_moments(logits, ids, scale, entropy)


def _backward(
    upstream: tuple[Tensor | None, ...], moments: Tensor, entropies: Tensor | None, x: Tensor, weight: Tensor,
    bias: Tensor | None, ids: Tensor, scale: float | Tensor, how: Settings, needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of x, weight and bias: the logits are made again."""
    with without_autocast(x.device.type):
        projection = Projection(x, weight, bias, how, needs)
        gradients = Gradients(projection, weight)
        for chunk, logits, dlogits in projection.logits():
            of_chunk = tuple(None if t is None else t[chunk] for t in (*upstream, entropies))
            by_chunk = (moments[chunk], _of_chunk(scale, chunk), ids[chunk])
            _statistics_gradient(logits, dlogits, *by_chunk, *of_chunk)
            gradients.add(chunk, dlogits)
            del logits, dlogits
        return gradients.finish()


def _statistics_gradient(
    logits: Tensor, dlogits: Tensor, moments: Tensor, scale: float | Tensor, ids: Tensor,
    g_picked: Tensor | None, g_entropy: Tensor | None, g_lse: Tensor | None, entropy: Tensor | None,
) -> None:  # fmt: skip
    """Into dlogits, which may be logits, the gradient of the statistics for their upstream gradients."""
    if is_supported(logits) and ids.numel():
        given: dict[str, Any] = dict(ids=ids, g_picked=g_picked, entropy=entropy, g_entropy=g_entropy, g_lse=g_lse)
        try:
            return rows.statistics_backward(logits, dlogits, moments, scale, **given)
        except KernelUnavailable:
            pass
    dlogits.copy_(decompositions.statistics_gradient(g_picked, g_entropy, g_lse, logits, ids, scale))


_TWICE = (
    "linear_token_logprobs(): its gradient cannot be differentiated again; token_logprobs(F.linear(input, "
    "linear_weight), token_ids) can"
)


class LinearTokenLogprobs(torch.autograd.Function):
    """Keeps the input, the weight and O(rows) numbers: all of it by save_for_backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, scale: float | Tensor, entropy: bool,
        how: Settings, watch: Watch | None = None,
    ) -> Statistics:  # fmt: skip
        picked, entropies, lse, moments = _forward(x, weight, bias, ids, scale, entropy, how, watch)
        by_row = isinstance(scale, Tensor)
        ctx.save_for_backward(x, weight, bias, ids, scale if by_row else None, entropies, moments)
        ctx.described = None if by_row else scale, how, Needs(*ctx.needs_input_grad[:3]), is_batch_invariant()
        ctx.set_materialize_grads(False)
        return picked, entropies, lse

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [g for g in upstream if g is not None]
        if not given:
            return (None,) * 8
        if torch.is_grad_enabled():
            raise RuntimeError(_TWICE)
        x, weight, bias, ids, by_row, entropies, moments = ctx.saved_tensors
        scale, how, needs, invariant = ctx.described
        scale = by_row if scale is None else scale
        if not all(has_storage(g) for g in given):  # upstream gradients that vmap batched: torch's formula
            with without_autocast(x.device.type):
                logits = all_logits(x, weight, bias, how)
            g_picked, g_entropy, g_lse = upstream
            dlogits = decompositions.statistics_gradient(g_picked, g_entropy, g_lse, logits, ids, scale)
            return *gradients_by_torch(dlogits, x, weight, bias, how, needs), *(None,) * 5
        with as_in_forward(invariant):
            found = _backward(upstream, moments, entropies, x, weight, bias, ids, scale, how, needs)
        return (*found, None, None, None, None, None)


# --- the operator -----------------------------------------------------------------------------------------------------


_FIELDS = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor ids, Tensor? scales, float scale, bool entropy, ScalarType compute, "
    "int? chunk_rows, bool[] needs"
)


def _expect_layouts(x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, scales: Tensor | None) -> None:
    """RuntimeError where a kernel would read outside of a tensor."""
    expect_layout("bias", bias, x, weight.shape[:1])
    expect_layout("ids", ids, x, (x.shape[0], ids.shape[-1]))
    expect_layout("scales", scales, x, x.shape[:1])


def _operator_kernel(
    x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, scales: Tensor | None, scale: float, entropy: bool,
    compute: torch.dtype, chunk_rows: int | None, needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    how = Settings(compute, compute, "float32", chunk_rows)
    _expect_layouts(x, weight, bias, ids, scales)
    of_rows = scale if scales is None else scales.contiguous()
    picked, entropies, lse, moments = _forward(x, weight, bias, ids.contiguous(), of_rows, entropy, how)
    return picked, lse.new_empty(0) if entropies is None else entropies, lse, moments


def _operator_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, scales: Tensor | None, scale: float, entropy: bool,
    *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    n_rows = x.shape[0]
    lse = x.new_empty(n_rows, dtype=result_dtype(x))
    return lse.new_empty(ids.shape), lse.new_empty(n_rows if entropy else 0), lse, lse.new_empty((n_rows, 2))


def _backward_kernel(
    g_picked: Tensor | None, g_entropy: Tensor | None, g_lse: Tensor | None, moments: Tensor, entropies: Tensor,
    x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, scales: Tensor | None, scale: float, entropy: bool,
    compute: torch.dtype, chunk_rows: int | None, needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    how = Settings(compute, compute, "float32", chunk_rows)
    _expect_layouts(x, weight, bias, ids, scales)
    expect_layout("moments", moments, x, (x.shape[0], 2))
    expect_layout("g_picked", g_picked, x, ids.shape)
    for name, t in (("g_entropy", g_entropy), ("g_lse", g_lse), ("entropies", entropies if entropy else None)):
        expect_layout(name, t, x, x.shape[:1])
    upstream = tuple(None if g is None else g.contiguous() for g in (g_picked, g_entropy, g_lse))
    of_rows, of_entropy = scale if scales is None else scales.contiguous(), entropies if entropy else None
    found = _backward(
        upstream, moments, of_entropy, x, weight, bias, ids.contiguous(), of_rows, how, Needs(*needs)
    )  # fmt: skip
    return tuple(moments.new_empty(0) if t is None else t for t in found)


def _backward_fake(
    g_picked: Tensor | None, g_entropy: Tensor | None, g_lse: Tensor | None, moments: Tensor, entropies: Tensor,
    x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    given = zip((x.contiguous(), weight, bias), rest[-1], strict=True)
    return tuple(moments.new_empty(0) if t is None or not needed else torch.empty_like(t) for t, needed in given)


linear_token_logprobs = define(
    f"linear_token_logprobs({_FIELDS}) -> (Tensor picked, Tensor entropies, Tensor lse, Tensor moments)",
    _operator_kernel,
    _operator_fake,
)
linear_token_logprobs_backward = define(
    "linear_token_logprobs_backward(Tensor? g_picked, Tensor? g_entropy, Tensor? g_lse, Tensor moments, "
    f"Tensor entropies, {_FIELDS}) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    _backward_kernel,
    _backward_fake,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.options = *inputs[:5], inputs[5:]
    _, entropies, _, moments = output
    ctx.mark_non_differentiable(*((moments,) if ctx.options[1] else (entropies, moments)))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, entropies, moments)


def _gradients(
    ctx: Any, g_picked: Tensor | None, g_entropy: Tensor | None, g_lse: Tensor | None, _: None
) -> tuple[Tensor | None, ...]:
    nothing, upstream = (None,) * 7, (g_picked, g_entropy, g_lse)
    if all(g is None for g in upstream):
        return None, None, None, *nothing
    if torch.is_grad_enabled():
        raise RuntimeError(_TWICE)
    *tensors, entropies, moments = ctx.saved_tensors
    found = linear_token_logprobs_backward(*upstream, moments, entropies, *tensors, *ctx.options)
    return *(t if needed else None for t, needed in zip(found, ctx.options[-1], strict=True)), *nothing


def _formula(
    x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, scales: Tensor | None, scale: float, entropy: bool,
    compute: torch.dtype, *rest: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The operator on all logits, for forward-mode AD."""
    with without_autocast(x.device.type):
        logits = all_logits(x, weight, bias, Settings(compute, compute, "float32", None))
    by = scale if scales is None else scales
    picked, entropies, lse, moments = decompositions.statistics_and_moments(logits, ids, by, entropy)
    return picked, lse.new_empty(0) if entropies is None else entropies, lse, moments


differentiable("linear_token_logprobs", _gradients, _save, _formula)
not_differentiable("linear_token_logprobs_backward")
planned_by(
    "linear_token_logprobs",
    lambda asked: planned_linear(
        asked, "linear_token_logprobs", lambda logits, on: rows.planned_statistics(logits, on, 1, asked.backward)
    ),
)
