"""What a typed program writes: `make types` checks this file with mypy --strict; nothing runs it."""

from __future__ import annotations

import torch
from torch import Tensor

import fused_softmax as fs


def losses(logits: Tensor, ids: Tensor) -> Tensor:
    mean = fs.token_logprobs(logits, ids).mean()
    statistics = fs.token_logprobs(logits, ids, return_entropy=True)
    entropy: Tensor | None = statistics.entropy
    lse = fs.token_logprobs(logits, ids, return_logsumexp=True).logsumexp
    assert entropy is not None and lse is not None
    return fs.cross_entropy(logits, ids, label_smoothing=0.1) + mean + entropy.sum() + lse.sum()


def softmaxes(x: Tensor, mask: Tensor) -> Tensor:
    with fs.patch(ops=("softmax",)), fs.batch_invariant(), fs.stats() as counted:
        y = fs.softmax(x, -1, torch.float32) + fs.log_softmax(x) + fs.masked_softmax(x, mask, causal=True)
    calls: int = counted.calls["softmax", "torch"]
    plan = fs.plan_for(x, op="softmax")
    why: str = plan.why if isinstance(plan, fs.Fallback) else plan.regime
    return y + fs.logsumexp(x, (0, 1), keepdim=True) + calls + len(why)


def modules(x: Tensor, target: Tensor) -> Tensor:
    y: Tensor = fs.nn.CrossEntropyLoss(softcap=30.0)(fs.nn.LogSoftmax(-1)(x), target)
    return y


@fs.patch()
def decorated(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def keeps_its_type(x: Tensor) -> Tensor:
    return decorated(x)
