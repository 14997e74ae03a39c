"""The loss that Hugging Face's Trainer takes as compute_loss_func. Nothing is imported from transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from ..losses import cross_entropy_over
from ..torch_ops.arguments import denominator_of, stands_in


def causal_lm_loss(outputs: Any, labels: Tensor, num_items_in_batch: int | Tensor | None = None) -> Tensor:
    """Return the next-token loss of a causal language model, for `Trainer(compute_loss_func=causal_lm_loss)`.

    The labels are shifted, and the logits are not: a shifted view of the logits would have to be copied.

    Args:
        outputs: A mapping or an object with logits of shape (batch, length, V).
        labels: (batch, length) int64, -100 for positions without a label.
        num_items_in_batch: The divisor of the sum, as Trainer counts it over accumulated batches. None: the number of
            labels in this batch.

    Returns:
        A float32 scalar.

    Source: https://huggingface.co/docs/transformers/main_classes/trainer

    >>> causal_lm_loss({"logits": torch.zeros(1, 3, 4)}, torch.tensor([[0, 1, 2]]))
    tensor(1.3863)
    """
    if stands_in(outputs, labels, num_items_in_batch):
        given = (outputs, labels, num_items_in_batch)
        return handle_torch_function(causal_lm_loss, given, *given)
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
    following = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    denominator = denominator_of(num_items_in_batch, logits)
    target = following.reshape(-1).to(logits.device)
    return cross_entropy_over(denominator, logits.reshape(-1, logits.shape[-1]), target)
