"""Cross-entropy and token log-probabilities in plain PyTorch, differentiable any number of times.

What runs where the kernels do not (float64, probability targets, a CPU tensor, torch.func, torch.compile, whose
compiler fuses it), and what is differentiated where a gradient of the gradient is asked for. 16-bit logits are widened
to float32, so that the results' dtype is the kernels'; memory of the logits' size is taken.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """The logits, in float32 at least, as cap*tanh(logits/cap) where there is a cap; -inf stays."""
    z = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    if softcap is None:
        return z
    hidden = z == -float("inf")
    return (softcap * torch.tanh(z.masked_fill(hidden, 0.0) / softcap)).masked_fill(hidden, -float("inf"))


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` of capped logits, plus z_loss*lse^2 of every row that counts."""
    z = capped(logits, softcap)
    if weight is not None and weight.is_floating_point():
        weight = weight.to(z.dtype)
    options = dict(ignore_index=ignore_index, label_smoothing=label_smoothing)
    if not z_loss:
        return F.cross_entropy(z, target, weight, reduction=reduction, **options)  # type: ignore[arg-type]
    penalty = z_loss * torch.logsumexp(z, dim=0 if z.dim() == 1 else 1) ** 2
    loss = F.cross_entropy(z, target, weight, reduction="none", **options)  # type: ignore[arg-type]
    if target.is_floating_point():
        loss = loss + penalty
        return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss
    counts = target != ignore_index
    loss = loss + penalty.where(counts, 0.0)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    of_row = torch.ones_like(loss) if weight is None else weight[target.where(counts, 0)]
    return loss.sum() / of_row.where(counts, 0.0).sum()


def statistics(
    logits: Tensor, token_ids: Tensor | None, scale: float | Tensor, entropy: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(lse, entropy, log-probabilities of token_ids (..., n_picks)) of logits*scale over the last dim."""
    z = capped(logits, None) * (scale.unsqueeze(-1) if isinstance(scale, Tensor) else scale)
    lse = torch.logsumexp(z, -1)
    log_p = torch.log_softmax(z, -1)
    picked = None if token_ids is None else log_p.gather(-1, token_ids)
    # p*log(p) is 0 where p is
    entropies = -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1) if entropy else None
    return lse, entropies, picked
