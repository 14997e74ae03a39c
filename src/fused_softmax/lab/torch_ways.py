"""A torch user's own expressions for ops without a torch function, in float32 where ours computes in float32."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _upcast(x: Tensor) -> Tensor:
    if not x.is_floating_point():  # as torch.softmax, whatever arithmetic would come first
        raise NotImplementedError(f"softmax of {x.dtype}")
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def masked_softmax(
    x: Tensor, mask: Tensor | None = None, scale: float = 1.0, causal: bool = False, fully_masked: str = "nan"
) -> Tensor:
    """softmax(scale*x + mask), or of scale*x with hidden columns filled with -inf, in x's dtype."""
    z = _upcast(x) if scale == 1.0 else _upcast(x) * scale
    if mask is not None:
        z = z.masked_fill(~mask, -float("inf")) if mask.dtype is torch.bool else z + mask.to(z.dtype)
    if causal:
        hidden = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        z = z.masked_fill(hidden, -float("inf"))
    if fully_masked == "zero":
        unseen = (z == -float("inf")).all(-1, keepdim=True)
        return torch.softmax(z.masked_fill(unseen, 0.0), -1).masked_fill(unseen, 0.0).to(x.dtype)
    return torch.softmax(z, -1).to(x.dtype)


def cross_entropy(
    x: Tensor, target: Tensor, softcap: float | None = None, z_loss: float = 0.0, inplace_backward: bool = False,
    **options: Any,
) -> Tensor:  # fmt: skip
    """F.cross_entropy of softcap*tanh(x/softcap), plus z_loss*logsumexp^2 for each row that counts.

    A logit of -inf is a class that is hidden, and stays so under a softcap.
    """
    z = _upcast(x)
    if softcap is not None:
        hidden = z == -float("inf")
        z = (softcap * torch.tanh(z.masked_fill(hidden, 0.0) / softcap)).masked_fill(hidden, -float("inf"))
    if z.dim() == 1 and target.dim() == 0 and options.get("reduction") != "none":
        # a batch of one: of one dimension, a mean of nothing is 0 on a GPU, where the contract has NaN, as on a CPU
        z, target = z.unsqueeze(0), target.unsqueeze(0)
    weight = options.pop("weight", None)
    if weight is not None:
        weight = weight.to(z.dtype)
        if options.get("label_smoothing") and target.dtype is torch.uint8:  # torch gathers weights by targets
            target = target.long()
    if not z_loss:
        return F.cross_entropy(z, target, weight, **options)
    reduction = options.get("reduction", "mean")
    loss = F.cross_entropy(z, target, weight, **options)
    counts = target != options.get("ignore_index", -100)
    penalty = (z_loss * torch.logsumexp(z, 1 if z.dim() > 1 else 0) ** 2).where(counts, 0.0)
    if reduction == "none":
        return loss + penalty
    if reduction == "sum":
        return loss + penalty.sum()
    of_row = torch.ones_like(penalty) if weight is None else weight[target.long().where(counts, 0)]
    return loss + penalty.sum() / of_row.where(counts, 0.0).sum()


def token_logprobs(
    x: Tensor, token_ids: Tensor, temperature: float | Tensor = 1.0, return_entropy: bool = False,
    return_logsumexp: bool = False,
) -> Any:  # fmt: skip
    """log_softmax(x/temperature) and gather; the entropy and the logsumexp where they are asked for."""
    z = _upcast(x)
    if isinstance(temperature, Tensor):
        z = z / temperature.to(z.device, z.dtype).expand(x.shape[:-1]).unsqueeze(-1)
    elif temperature != 1.0:
        z = z / temperature
    log_p = torch.log_softmax(z, -1)
    one = token_ids.dim() < x.dim()
    picked = log_p.gather(-1, token_ids.unsqueeze(-1) if one else token_ids)
    picked = picked.squeeze(-1) if one else picked
    if not (return_entropy or return_logsumexp):
        return picked
    entropy = None
    if return_entropy:
        # p*log(p) is 0 where p is 0
        entropy = -(log_p.exp() * log_p.masked_fill(log_p == -float("inf"), 0.0)).sum(-1)
    return picked, entropy, torch.logsumexp(z, -1) if return_logsumexp else None
