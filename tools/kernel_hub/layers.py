"""Layers that the `kernels` package puts in the place of a model's own."""

from __future__ import annotations

import torch
from torch import Tensor

from .losses import cross_entropy_over
from .torch_ops.arguments import denominator_of


class ForCausalLMLoss(torch.nn.Module):
    """transformers' ForCausalLMLoss of logits (batch, length, V) and labels (batch, length), in one read."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: object,
    ) -> Tensor:
        if shift_labels is None:
            shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        target = shift_labels.reshape(-1).to(logits.device)
        denominator = denominator_of(num_items_in_batch, logits)
        return cross_entropy_over(denominator, logits.view(-1, vocab_size), target, ignore_index=ignore_index)
