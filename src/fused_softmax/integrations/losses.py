"""Losses with the names and signatures that trainers call: TRL's selective_log_softmax, Hugging Face's loss function.

Nothing is imported from TRL or transformers. docs/recipes.md shows where the functions go.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from ..losses import cross_entropy_over, token_logprobs
from ..torch_ops.arguments import denominator_of, stands_in


def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    """Return log_softmax(logits, -1) gathered at index, as `trl.trainer.utils.selective_log_softmax`, in one read.

    Args:
        logits: (..., V).
        index: (...,) or (..., K).

    Returns:
        A tensor of index's shape in the logits' dtype, as TRL's own function returns. It is rounded once, from float32.

    Source: https://github.com/huggingface/trl/blob/main/trl/trainer/utils.py

    >>> selective_log_softmax(torch.zeros(1, 2, 4), torch.tensor([[1, 3]]))
    tensor([[-1.3863, -1.3863]])
    """
    if stands_in(logits, index):
        return handle_torch_function(selective_log_softmax, (logits, index), logits, index)
    return token_logprobs(logits, index).to(logits.dtype)


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
    return cross_entropy_over(denominator, logits.view(-1, logits.shape[-1]), target)
