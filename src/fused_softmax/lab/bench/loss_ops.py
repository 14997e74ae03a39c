"""Losses, token log-probabilities and masked softmax as the benchmark knows them, with their gradients.

Loss and gradient are both results, both checked. torch's calls are what its users write: in bfloat16 they round
log-probabilities to 8 bits on the way, so its error is no measure for the others' (`coarse`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_softmax.lab import reference
from fused_softmax.lab.bench.operation import Inputs, Op, calm, one_in_one_out, rows_of_logits, two_in_one_out

IGNORED = -100


def _targets(n_rows: int, n_cols: int, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator(device=device).manual_seed(seed + 7)
    return torch.randint(0, n_cols, (n_rows,), device=device, generator=generator)


def _loss_inputs(n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """(logits, targets of which one in 64 is ignored, how many count)."""
    target = _targets(n_rows, n_cols, device, seed)
    target[5::64] = IGNORED
    return rows_of_logits(n_rows, n_cols, dtype, device, seed), target, (target != IGNORED).sum().double()


def loss_alone(x: Tensor, target: Tensor, count: Tensor | None = None) -> Tensor:
    """torch's mean loss."""
    return F.cross_entropy(x, target)


def loss_and_gradient(x: Tensor, target: Tensor, count: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """torch's mean loss and the logits' gradient."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        loss = F.cross_entropy(leaf, target)
        (dx,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), dx


def _loss_reference(x: Tensor, target: Tensor, count: Tensor) -> Tensor:
    return reference.cross_entropy(x, target, reduction="none") / count


def _loss_gradient_reference(x: Tensor, target: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """dx = (softmax(x) - onehot)/count where the target counts."""
    counts = (target != IGNORED).double() / count
    dx = reference.softmax(x)
    dx[torch.arange(len(x), device=x.device), target.clamp(min=0)] -= 1.0
    return _loss_reference(x, target, count), dx.mul_(counts[:, None])


def _token_inputs(n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    return rows_of_logits(n_rows, n_cols, dtype, device, seed), _targets(n_rows, n_cols, device, seed)


def token_statistics(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of ids, entropy and logsumexp, as log_softmax and gather give them."""
    log_p = torch.log_softmax(x, -1)
    picked = log_p.gather(-1, ids[:, None])
    lse = x.gather(-1, ids[:, None]) - picked
    return picked[:, 0], -(log_p.exp() * log_p).sum(-1), lse[:, 0]


def _token_reference(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    log_p = reference.log_softmax(x)
    picked = log_p.gather(-1, ids[:, None])[:, 0]
    return picked, -(log_p.exp() * log_p).sum(-1), reference.logsumexp(x)


def _token_gradient_inputs(n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """(logits, ids, upstream gradients of log-probabilities, entropies and logsumexps)."""
    generator = torch.Generator(device=device).manual_seed(seed + 9)
    upstream = torch.randn(3, n_rows, device=device, generator=generator)
    return (*_token_inputs(n_rows, n_cols, dtype, device, seed), *upstream.unbind())


def token_gradient(
    x: Tensor, ids: Tensor, g_picked: Tensor, g_entropy: Tensor, g_lse: Tensor
) -> Tensor:  # the forward is part of it: only the registry's systems keep their graphs
    """The logits' gradient by torch's autograd, forward included."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        outputs = token_statistics(leaf, ids)
        upstream = [g.to(out.dtype) for g, out in zip((g_picked, g_entropy, g_lse), outputs, strict=True)]
        return torch.autograd.grad(outputs, leaf, upstream)[0]


def _token_gradient_reference(x: Tensor, ids: Tensor, g_picked: Tensor, g_entropy: Tensor, g_lse: Tensor) -> Tensor:
    """dx = g_picked*(onehot - p) + g_lse*p - g_entropy*p*(log p + H)."""
    log_p = reference.log_softmax(x)
    p = log_p.exp()
    entropy = -(p * log_p).sum(-1, keepdim=True)
    dx = p * (g_lse - g_picked)[:, None] - g_entropy[:, None] * p * (log_p + entropy)
    dx[torch.arange(len(x), device=x.device), ids] += g_picked
    return dx


def queries(n_rows: int, n_cols: int) -> int:
    """Queries of one head: as many as columns where the rows are whole heads of that, else all rows are one head's."""
    return n_cols if n_cols and n_rows % n_cols == 0 else n_rows


def heads(x: Tensor) -> Tensor:
    """Rows as (1, heads, queries, columns)."""
    return x.view(1, -1, queries(*x.shape), x.shape[1])


def _causal_inputs(n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """(scores, each row's query, what is hidden of a head)."""
    n_queries = queries(n_rows, n_cols)
    query = torch.arange(n_rows, device=device) % max(n_queries, 1)
    hidden = torch.ones(n_queries, n_cols, dtype=torch.bool, device=device).triu_(1)
    return rows_of_logits(n_rows, n_cols, dtype, device, seed), query, hidden


def _additive_inputs(n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """(scores, each row's query, a bias for every query and column, one in eight -inf)."""
    x, query, hidden = _causal_inputs(n_rows, n_cols, dtype, device, seed)
    mask = rows_of_logits(len(hidden), n_cols, dtype, device, seed + 3)
    mask[:, 3::8] = -float("inf")
    return x, query, mask


def _causal(x: Tensor, query: Tensor, hidden: Tensor) -> Tensor:
    return torch.softmax(heads(x).masked_fill(hidden, -float("inf")), -1).view_as(x)


def _causal_formula(x: Tensor, query: Tensor, hidden: Tensor) -> Tensor:
    """Without a mask tensor: the columns are compared where the scores are read."""
    after = torch.arange(x.shape[1], device=x.device) > query[:, None]
    return torch.softmax(x.masked_fill(after, -float("inf")), -1)


def _additive(x: Tensor, query: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(heads(x) + mask, -1).view_as(x)


def _causal_gradient_inputs(n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """(the result's gradient, the result, each row's query, what is hidden of a head)."""
    x, query, hidden = _causal_inputs(n_rows, n_cols, dtype, device, seed)
    return rows_of_logits(n_rows, n_cols, dtype, device, seed + 1), _causal(calm(x), query, hidden), query, hidden


def _additive_gradient_inputs(n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """(the result's gradient, the result)."""
    x, query, mask = _additive_inputs(n_rows, n_cols, dtype, device, seed)
    return rows_of_logits(n_rows, n_cols, dtype, device, seed + 1), _additive(calm(x), query, calm(mask))


def _gradient(dy: Tensor, y: Tensor) -> Tensor:
    """What autograd runs of a softmax; a sum's gradient goes to the scores as it is."""
    return torch._softmax_backward_data(dy, y, -1, y.dtype)


def _causal_gradient(dy: Tensor, y: Tensor, query: Tensor, hidden: Tensor) -> Tensor:
    return heads(_gradient(dy, y)).masked_fill(hidden, 0.0).view_as(y)


def _causal_gradient_formula(dy: Tensor, y: Tensor, query: Tensor, hidden: Tensor) -> Tensor:
    after = torch.arange(y.shape[1], device=y.device) > query[:, None]
    return _gradient(dy, y).masked_fill(after, 0.0)


def _seen(n_rows: int, n_cols: int) -> int:
    """Elements that causality leaves: of each row the columns up to its query."""
    n_queries = queries(n_rows, n_cols)
    return n_rows // max(n_queries, 1) * sum(min(q + 1, n_cols) for q in range(n_queries))


def _causal_elements(n_rows: int, n_cols: int) -> tuple[int, int]:
    """What is seen is read; all is written, zeros too."""
    return _seen(n_rows, n_cols), n_rows * n_cols


def _causal_gradient_elements(n_rows: int, n_cols: int) -> tuple[int, int]:
    """What is seen of the result and of its gradient is read; all is written, zeros too."""
    return 2 * _seen(n_rows, n_cols), n_rows * n_cols


def _additive_elements(n_rows: int, n_cols: int) -> tuple[int, int]:
    """The scores, and one head's mask once."""
    return (n_rows + queries(n_rows, n_cols)) * n_cols, n_rows * n_cols


def _read_alone(n_rows: int, n_cols: int) -> tuple[int, int]:
    return n_rows * n_cols, 0


LOSS_OPS = (
    Op(
        "cross_entropy",
        _loss_inputs,
        loss_and_gradient,
        _loss_gradient_reference,
        one_in_one_out,
        "copy",
        parts=("loss", "gradient"),
        by_row=2,
        coarse=True,
    ),
    Op(
        "cross_entropy_forward",
        _loss_inputs,
        loss_alone,
        _loss_reference,
        _read_alone,
        "read",
        parts=("loss",),
        by_row=2,
        coarse=True,
        family="cross_entropy",
    ),
    Op(
        "token_logprobs",
        _token_inputs,
        token_statistics,
        _token_reference,
        _read_alone,
        "read",
        parts=("logprobs", "entropy", "logsumexp"),
        coarse=True,
    ),
    Op(
        "token_logprobs_backward",
        _token_gradient_inputs,
        token_gradient,
        _token_gradient_reference,
        one_in_one_out,
        "copy",
        parts=("gradient",),
        coarse=True,
        family="token_logprobs",
    ),
    Op(
        "masked_softmax_causal",
        _causal_inputs,
        _causal,
        lambda x, query, hidden: reference.softmax(x.masked_fill(hidden[query], -float("inf"))),
        _causal_elements,
        "copy",
        by_row=2,
        family="masked_softmax",
        formula=_causal_formula,
    ),
    Op(
        "masked_softmax_additive",
        _additive_inputs,
        _additive,
        lambda x, query, mask: reference.softmax(x + mask[query].double()),
        _additive_elements,
        "copy",
        by_row=2,
        coarse=True,  # the sum is rounded to the scores' dtype
        family="masked_softmax",
    ),
    Op(
        "masked_softmax_causal_backward",
        _causal_gradient_inputs,
        _causal_gradient,
        lambda dy, y, query, hidden: reference.softmax_backward(dy, y),
        _causal_gradient_elements,
        "add",
        by_row=3,
        family="masked_softmax",
        formula=_causal_gradient_formula,
    ),
    Op(
        "masked_softmax_additive_backward",
        _additive_gradient_inputs,
        _gradient,
        reference.softmax_backward,
        two_in_one_out,
        "add",
        family="masked_softmax",
    ),
)
