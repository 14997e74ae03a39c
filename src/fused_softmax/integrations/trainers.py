"""torchtitan's cross-entropy and verl's log-probabilities, in their signatures, and what puts them in place."""

from __future__ import annotations

from torch import Tensor

from ..losses import cross_entropy, token_logprobs
from ..torch_ops.arguments import expect_local
from .replacing import TORCHTITAN, VERL, Name, Replaced


def torchtitan_cross_entropy_loss(pred: Tensor, labels: Tensor, *, global_vocab_size: int | None = None) -> Tensor:
    """Return the sum of the cross-entropies, as `torchtitan.components.loss.cross_entropy_loss` without loss parallel.

    The logits are not cast to float32 first, which saves memory of twice their size; the loss is float32.

    Args:
        pred: Logits, (batch, length, V).
        labels: (batch, length) int64, -100 for positions without a label.
        global_vocab_size: The V of all ranks, where pred is a part of the columns. Only V itself, or None.

    Raises:
        TypeError: pred is a DTensor.
        NotImplementedError: global_vocab_size is another number than V.

    Source: https://github.com/pytorch/torchtitan/blob/main/torchtitan/components/loss.py
    """
    expect_local("torchtitan_cross_entropy_loss", pred=pred, labels=labels)
    if global_vocab_size not in (None, pred.shape[-1]):
        raise NotImplementedError(
            f"torchtitan_cross_entropy_loss(): pred has {pred.shape[-1]} of {global_vocab_size} columns; this function "
            "needs all of them: turn loss parallel off"
        )
    return cross_entropy(pred.flatten(0, 1), labels.flatten(0, 1), reduction="sum")


def verl_logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Return log softmax(logits) at labels in float32, as `verl.utils.torch_functional.logprobs_from_logits`.

    Args:
        logits: (..., V).
        labels: (...,) integers.
        inplace_backward: Accepted and ignored: backward never writes over the logits.

    Source: https://github.com/volcengine/verl/blob/main/verl/utils/torch_functional.py
    """
    return token_logprobs(logits, labels)


def patch_torchtitan() -> Replaced:
    """Replace torchtitan's cross_entropy_loss with ours, until `undo()`; losses that exist already keep theirs.

    Raises:
        RuntimeError: The name is gone or has another signature. The message says which versions are known.
    """
    place = ("torchtitan.components.loss", "cross_entropy_loss", ("pred", "labels", "global_vocab_size"))
    return Replaced("torchtitan", TORCHTITAN, [Name(*place, torchtitan_cross_entropy_loss)])


def patch_verl() -> Replaced:
    """Replace verl's logprobs_from_logits with ours, until `undo()`.

    Raises:
        RuntimeError: The name is gone or has another signature. The message says which versions are known.
    """
    place = ("verl.utils.torch_functional", "logprobs_from_logits", ("logits", "labels", "inplace_backward"))
    return Replaced("verl", VERL, [Name(*place, verl_logprobs_from_logits)])
