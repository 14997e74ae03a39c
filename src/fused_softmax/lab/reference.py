"""The specification: each op of the softmax family in plain PyTorch, in float64, from its formula.

softmax(x)_i = exp(x_i - m) / s with m = max(x), s = sum_j exp(x_j - m); log-domain ops use lse = m + log(s). Every
input is widened to float64 first, so the results judge float16 to float32 kernels, and their gradients by autograd
judge gradients; none calls torch's own softmax, which is wrong on CPU for rows beyond 2^24 columns. A row that holds
NaN or +inf, or only -inf, is NaN throughout.
naive_softmax is the other kind of reference: five eager passes in the input's own dtype, and traffic() counts them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def softmax(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """float64 softmax over `dim`, of `x` cast to `dtype` first where given. Any shape, 0-dim included.

    >>> softmax(torch.tensor([2.0, 1.0, 0.1])).round(decimals=3).tolist()
    [0.659, 0.242, 0.099]
    """
    z, total = _shifted(_widen(x, dtype), dim)
    return z.exp() / total


def log_softmax(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """float64 log_softmax over `dim`: x - m - log(s). Any shape."""
    z, total = _shifted(_widen(x, dtype), dim)
    return z - total.log()


def logsumexp(x: Tensor, dim: int | tuple[int, ...] = -1, keepdim: bool = False) -> Tensor:
    """float64 log(sum(exp(x))) over `dim`, as torch's: -inf for a row of -inf only, +inf where +inf stands in it."""
    x = _widen(x)
    if not x.numel():
        return x.exp().sum(dim, keepdim=keepdim).log()
    row_max = x.detach().amax(dim, keepdim=True)
    shift = torch.where(row_max.isfinite() | row_max.isnan(), row_max, torch.zeros_like(row_max))
    out = (x - shift).exp().sum(dim, keepdim=True).log() + shift
    return out if keepdim or not x.ndim else out.squeeze(dim)


def softmax_backward(dy: Tensor, y: Tensor, dim: int = -1) -> Tensor:
    """float64 dx = y * (dy - sum(dy * y)), from softmax's output y."""
    dy, y = _widen(dy), _widen(y)
    return y * (dy - (dy * y).sum(dim, keepdim=True))


def log_softmax_backward(dy: Tensor, y: Tensor, dim: int = -1) -> Tensor:
    """float64 dx = dy - exp(y) * sum(dy), from log_softmax's output y."""
    dy, y = _widen(dy), _widen(y)
    return dy - y.exp() * dy.sum(dim, keepdim=True)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
    inplace_backward: bool = False,
) -> Tensor:
    """float64 cross entropy of logits (C,), (n_rows, C) or (n_rows, C, ...) and integer targets: torch's, with two more
    terms.

    softcap c replaces the logits by c * tanh(logits / c) (Gemma 2), -inf excepted; z_loss adds z_loss * lse^2 to every
    row that counts (PaLM). reduction is "none", "sum" or "mean"; the mean divides by the summed weight of the targets
    that count.
    """
    logits = _widen(logits)
    logits, shape = logits.movedim(min(1, logits.ndim - 1), -1), target.shape
    logits, target = logits.reshape(-1, logits.shape[-1]), target.reshape(-1).long()
    if softcap is not None:
        hidden = logits == float("-inf")
        logits = (softcap * torch.tanh(logits.masked_fill(hidden, 0.0) / softcap)).masked_fill(hidden, float("-inf"))
    counts = target != ignore_index
    index = torch.where(counts, target, torch.zeros_like(target)).unsqueeze(1)
    weights = logits.new_ones(logits.shape[1]) if weight is None else _widen(weight)
    logp, row_weight = log_softmax(logits, 1), weights[index[:, 0]]
    parts = [(1 - label_smoothing) * -logp.gather(1, index)[:, 0] * row_weight]
    if label_smoothing:
        parts.append(label_smoothing * -(logp * weights).sum(1) / logits.shape[1])
    if z_loss:
        parts.append(z_loss * logsumexp(logits, 1) ** 2)
    parts = [torch.where(counts, part, torch.zeros_like(part)) for part in parts]
    if reduction == "none":
        return sum(parts[1:], parts[0]).view(shape)
    # each part is divided by itself: where all weights are 0 the first is 0/0
    denominator = torch.where(counts, row_weight, torch.zeros_like(row_weight)).sum() if reduction == "mean" else 1.0
    return sum((part.sum() / denominator for part in parts[1:]), parts[0].sum() / denominator)


def token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    return_entropy: bool = False,
    return_logsumexp: bool = False,
) -> Any:
    """float64 log-probability of token_ids (...,) or (..., K) under softmax(logits (..., n_cols) / temperature); with
    the distribution's entropy and logsumexp, as a tuple, where they are asked for."""
    if isinstance(temperature, Tensor):
        temperature = _widen(temperature).expand(logits.shape[:-1]).unsqueeze(-1)
    z = _widen(logits) / temperature
    logp = log_softmax(z)
    one = token_ids.ndim < logits.ndim
    picked = logp.gather(-1, token_ids.unsqueeze(-1) if one else token_ids)
    picked = picked.squeeze(-1) if one else picked
    if not (return_entropy or return_logsumexp):
        return picked
    # p * log(p) is 0 where p is 0
    entropy = -(logp.exp() * logp.masked_fill(logp == float("-inf"), 0.0)).sum(-1) if return_entropy else None
    return picked, entropy, logsumexp(z) if return_logsumexp else None


def masked_softmax(
    x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, causal: bool = False, fully_masked: str = "nan"
) -> Tensor:
    """float64 softmax of scale * x over the last dim where `mask` (bool, broadcast) is true, 0 elsewhere; a floating
    mask is added to scale * x.

    causal hides column j of row i where j > i. A row with no column left is NaN, or 0 with fully_masked="zero".
    """
    z = _widen(x) * scale
    if mask is not None:
        z = z.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else z + _widen(mask)
    if causal:
        kept = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril()
        z = z.masked_fill(~kept, float("-inf"))
    if fully_masked != "zero":
        return softmax(z)
    unseen = (z == float("-inf")).all(-1, keepdim=True)
    return softmax(z.masked_fill(unseen, 0.0)).masked_fill(unseen, 0.0)


def naive_softmax(x: Tensor) -> Tensor:
    """Softmax of the rows of x (n_rows, n_cols) in five eager passes, in x's own dtype: lesson 01's subject."""
    row_max = x.amax(dim=1)
    z = x - row_max[:, None]
    numerator = torch.exp(z)
    denominator = numerator.sum(dim=1)
    return numerator / denominator[:, None]


@dataclass(frozen=True)
class PassTraffic:
    """What one pass moved: elements of its input tensors and of its output tensors."""

    op: str
    reads: int
    writes: int


def traffic(fn: Callable[..., Any], *args: Any) -> list[PassTraffic]:
    """Run fn(*args) and list the passes that PyTorch made, with the elements each read and wrote.

    Counted from the tensors of each aten call: a broadcast operand counts stored elements, a view none.

    >>> sum(p.reads for p in traffic(naive_softmax, torch.zeros(3, 100))) == 5 * 3 * 100 + 2 * 3
    True
    """
    with _Counting() as counting:
        fn(*args)
    return counting.passes


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.passes: list[PassTraffic] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            outputs = out if isinstance(out, (tuple, list)) else (out,)
            reads, writes = (sum(t.numel() for t in ts if isinstance(t, Tensor)) for ts in (args, outputs))
            self.passes.append(PassTraffic(func.overloadpacket.__name__, reads, writes))
        return out


def _widen(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return x.to(dtype or x.dtype).to(torch.float64)


def _shifted(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """x - max over `dim`, a fresh tensor, and the sum of its exponentials; a row with no column has neither."""
    if not x.numel():
        return x.clone(), x.sum(dim, keepdim=True)
    z = x - x.detach().amax(dim, keepdim=True)
    return z, z.exp().sum(dim, keepdim=True)
