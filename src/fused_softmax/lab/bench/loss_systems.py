"""Losses, token log-probabilities and masked softmax by each system: callables over the ops' inputs.

A gradient's graph is kept where the backward alone is timed, and a system that writes the gradient over the logits gets
logits of its own, made at its first call and so outside of every time.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fused_softmax.lab.bench.loss_ops import heads, token_statistics

Loss = Callable[[Tensor, Tensor], Tensor]  # (logits, targets) -> mean loss


def with_gradient(loss: Loss, *, overwrites: bool = False) -> Callable[..., tuple[Tensor, Tensor]]:
    """(logits, targets, ...) -> (mean loss, the logits' gradient) of a differentiable loss."""
    own: dict[int, Tensor] = {}

    def call(x: Tensor, target: Tensor, count: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if overwrites:
            if x.data_ptr() not in own:
                own[x.data_ptr()] = x.clone()
            x = own[x.data_ptr()]
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            value = loss(leaf, target)
            (dx,) = torch.autograd.grad(value, leaf)
        return value.detach(), dx

    return call


def backward_alone(forward: Callable[[Tensor, Tensor], Any]) -> Callable[..., Tensor]:
    """(logits, ids, upstream gradients) -> gradient, of a graph that is made at the first call and kept."""
    graphs: dict[int, tuple[Tensor, tuple[Tensor, ...]]] = {}

    def call(x: Tensor, ids: Tensor, *upstream: Tensor) -> Tensor:
        if x.data_ptr() not in graphs:
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                graphs[x.data_ptr()] = leaf, tuple(forward(leaf, ids))
        leaf, outputs = graphs[x.data_ptr()]
        gradients = [g.to(out.dtype) for g, out in zip(upstream, outputs, strict=True)]
        return torch.autograd.grad(outputs, leaf, gradients, retain_graph=True)[0]

    return call


def _statistics(x: Tensor, ids: Tensor) -> Any:
    return _package().token_logprobs(x, ids, return_entropy=True, return_logsumexp=True)


def _package() -> Any:
    return importlib.import_module("fused_softmax")


def _overwriting_loss(x: Tensor, target: Tensor) -> Tensor:
    return _package().cross_entropy(x, target, inplace_backward=True)


def _masked_gradient(causal: bool) -> Callable[..., Tensor]:
    """What our masked_softmax's backward runs where the mask needs no gradient."""
    backward = importlib.import_module("fused_softmax.torch_ops.masked_softmax")._backward
    return lambda dy, y, *rest: backward(heads(y), heads(dy), None, 1.0, causal).view_as(y)


# op -> how our callable is built
OURS: dict[str, Callable[[], Callable[..., Any]]] = {
    "cross_entropy": lambda: with_gradient(_package().cross_entropy),
    "cross_entropy_forward": lambda: lambda x, target, count=None: _package().cross_entropy(x, target),
    "token_logprobs": lambda: _statistics,
    "token_logprobs_backward": lambda: backward_alone(_statistics),
    "masked_softmax_causal": lambda: (
        lambda x, query, hidden: _package().masked_softmax(heads(x), causal=True).view_as(x)
    ),
    "masked_softmax_additive": lambda: lambda x, query, mask: _package().masked_softmax(heads(x), mask).view_as(x),
    "masked_softmax_causal_backward": lambda: _masked_gradient(causal=True),
    "masked_softmax_additive_backward": lambda: _masked_gradient(causal=False),
}
IN_PLACE: dict[str, Callable[[], Callable[..., Any]]] = {
    "cross_entropy": lambda: with_gradient(_overwriting_loss, overwrites=True),
}
# where the op's own torch_call would time more than the op
TORCH: dict[str, Callable[[], Callable[..., Any]]] = {
    "token_logprobs_backward": lambda: backward_alone(token_statistics),
}


def _formula(x: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(x, target)


def compiled(op: str, compile: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[..., Any] | None:
    """torch.compile's callable where a gradient is part of the op; None for an op whose formula is enough."""
    if op == "cross_entropy":
        return with_gradient(compile(_formula))
    if op == "token_logprobs_backward":
        return backward_alone(_kept(compile(token_statistics)))
    return None


def _kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled function whose backward may run many times: it must not write over what the forward saved for it."""

    def call(*inputs: Tensor) -> Any:
        with torch._functorch.config.patch(donated_buffer=False):
            return function(*inputs)

    return call


def liger_loss() -> Loss:
    """Liger's cross-entropy, which writes the gradient over the logits."""
    function = importlib.import_module("liger_kernel.ops.cross_entropy").LigerCrossEntropyFunction

    def loss(x: Tensor, target: Tensor) -> Tensor:
        result = function.apply(x, target, None, -100, 0.0, 0.0, "mean", None, False)
        return result[0] if isinstance(result, tuple) else result

    return loss


def quack_loss() -> Loss:
    """QuACK's cross-entropy; its package exports functions under the names of its modules."""
    importlib.import_module("quack.cross_entropy")
    return sys.modules["quack.cross_entropy"].cross_entropy


def loss_alone(loss: Loss) -> Callable[..., Tensor]:
    """(logits, targets, ...) -> mean loss."""
    return lambda x, target, count=None: loss(x, target)
