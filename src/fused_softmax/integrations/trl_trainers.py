"""patch_trl: our log-probabilities in TRL's trainers (SFT, DPO, GRPO, RLOO, KTO and the experimental ones).

TRL 1.15 and later compute all of them in one function, from hidden states and lm_head's weight. 1.14 has one for SFT,
and takes the others from logits. What ours do not compute is left to TRL's own function: a softcap, log_sum_sq_probs,
traced calls, and DeepSpeed's ZeRO-3.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from ..losses import token_logprobs
from ..torch_ops.arguments import stands_in
from ..torch_ops.linear_arguments import gathered, settings_of
from ..torch_ops.linear_token_logprobs import is_direct, linear_token_logprobs_of
from .replacing import TRL, Name, Replaced

UTILS, SFT = "trl.trainer.utils", "trl.trainer.sft_trainer"
_HEAD = (
    "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale",
    "outputs",
)  # fmt: skip
_SFT = (
    "hidden_states", "lm_head_weight", "chunk_size", "labels", "shift_labels", "num_items_in_batch", "logit_scale",
    "final_logit_softcapping", "lm_head_bias",
)  # fmt: skip
# of the outputs that TRL names, those that one look at a chunk's logits gives
_OURS = {"log_probs", "entropy", "mean_logits", "is_top1"}


def patch_trl() -> Replaced:
    """Replace TRL's log-probability functions with ours, in all of its trainers, until `undo()`.

    Returns:
        `Replaced`: its text says which names were replaced in which modules. It is a context manager.

    Raises:
        RuntimeError: TRL is not installed, or a name is gone or has another signature. The message says which versions
            are known.

    Source: https://huggingface.co/docs/trl
    """
    logits = [
        Name(UTILS, "selective_log_softmax", ("logits", "index", "temperature", "row_mask"), selective_log_softmax),
        Name(
            UTILS, "selective_log_softmax_and_entropy",
            ("logits", "index", "entropy_requires_grad", "temperature", "row_mask"), selective_log_softmax_and_entropy,
        ),
    ]  # fmt: skip
    head = Name(UTILS, "_ChunkedLogProbFunction", ("ctx", *_HEAD), None, method="forward")
    if head.found() is not None and "outputs" in inspect.signature(head.found().forward).parameters:
        head = head._replace(ours=fused_head(head.found()))
    else:
        sft = Name(SFT, "_chunked_cross_entropy_loss", _SFT, None)
        # where neither is there, it is the newer name that is missed
        head = head if sft.found() is None else sft._replace(ours=chunked_loss(sft.found()))
    return Replaced("trl", TRL, [*logits, head])


# --- from logits ------------------------------------------------------------------------------------------------------


def selective_log_softmax(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor:
    """Return log_softmax(logits/temperature, -1) at index, as `trl.trainer.utils.selective_log_softmax`, in one read.

    Args:
        logits: (..., V).
        index: (...,) or (..., K).
        temperature: A positive number.
        row_mask: Of index's shape. Where it is 0 the result is 0; those rows are read all the same.

    Returns:
        A tensor of index's shape: float32 on a GPU, as TRL's kernel returns, else the logits' dtype, as TRL's formula
        does. It is rounded once, from float32.

    Source: https://github.com/huggingface/trl/blob/main/trl/trainer/utils.py

    >>> selective_log_softmax(torch.zeros(1, 2, 4), torch.tensor([[1, 3]]))
    tensor([[-1.3863, -1.3863]])
    """
    if stands_in(logits, index):
        given = (logits, index)
        return handle_torch_function(selective_log_softmax, given, *given, temperature, row_mask)
    picked = token_logprobs(logits, index, temperature=temperature)
    picked = picked if logits.is_cuda else picked.to(logits.dtype)
    return picked if row_mask is None else picked.masked_fill(row_mask == 0, 0.0)


def selective_log_softmax_and_entropy(
    logits: Tensor, index: Tensor, entropy_requires_grad: bool = True, temperature: float = 1.0,
    row_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`trl.trainer.utils.selective_log_softmax_and_entropy` of TRL 1.14 and later."""
    picked, entropy, _ = token_logprobs(logits, index, temperature=temperature, return_entropy=True)
    assert entropy is not None
    if not logits.is_cuda:
        picked, entropy = picked.to(logits.dtype), entropy.to(logits.dtype)
    if row_mask is not None:
        picked, entropy = (t.masked_fill(row_mask == 0, 0.0) for t in (picked, entropy))
    return picked, entropy if entropy_requires_grad else entropy.detach()


# --- from hidden states -----------------------------------------------------------------------------------------------


def head_statistics(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: float, outputs: tuple[str, ...]
) -> dict[str, Tensor | None]:
    """Each row's statistics of the logits (hidden @ weight.T + bias)*scale, by their names in TRL; float32.

    hidden: (N, H); weight: (V, H); targets: (N,). log_probs and entropy are differentiable.
    """
    n_rows, weight = hidden.shape[0], gathered(weight)
    bias = None if bias is None else gathered(bias)
    mean = hidden.new_empty(n_rows, dtype=torch.float32) if "mean_logits" in outputs else None
    top1 = hidden.new_empty(n_rows, dtype=torch.bool) if "is_top1" in outputs else None

    def watch(chunk: slice, logits: Tensor) -> None:
        if mean is not None:
            mean[chunk] = logits.mean(-1, dtype=torch.float32) * scale
        if top1 is not None:
            top1[chunk] = logits.argmax(-1) == targets[chunk]

    how = settings_of("linear_token_logprobs", hidden, weight, bias)
    watched = watch if mean is not None or top1 is not None else None
    ids = targets[:, None].contiguous()
    picked, entropy, _ = linear_token_logprobs_of(hidden, weight, bias, ids, scale, "entropy" in outputs, how, watched)
    return {"log_probs": picked[:, 0], "entropy": entropy, "mean_logits": mean, "is_top1": top1}


def fused_head(theirs: Any) -> Any:
    """A class with the `apply` of `trl.kernels.ChunkedLogProbFunction`, whose own one takes what we do not."""

    class FusedHead:
        forward = theirs.forward

        @staticmethod
        def apply(
            hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk_size: int,
            final_logit_softcapping: float | None = None, logit_scale: float = 1.0,
            outputs: tuple[str, ...] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
        ) -> tuple[Tensor | None, ...]:  # fmt: skip
            ours = final_logit_softcapping is None and logit_scale > 0 and {*outputs} <= _OURS and len(targets) > 0
            # DeepSpeed's ZeRO-3 takes the weight away after the forward, and TRL's backward gathers it again
            ours = ours and not hasattr(weight, "ds_id")
            if not (ours and is_direct(hidden, weight, bias, targets)):
                return theirs.apply(
                    hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale,
                    outputs,
                )  # fmt: skip
            found = head_statistics(hidden, weight, bias, targets, logit_scale / temperature, outputs)
            return found["log_probs"], found["entropy"], None, found["mean_logits"], found["is_top1"]

    return FusedHead


def chunked_loss(theirs: Any) -> Any:
    """A function with the signature of `trl.trainer.sft_trainer._chunked_cross_entropy_loss` of TRL 1.14."""

    def chunked_cross_entropy_loss(
        hidden_states: Tensor, lm_head_weight: Tensor, chunk_size: int, labels: Tensor | None = None,
        shift_labels: Tensor | None = None, num_items_in_batch: Tensor | int | None = None, logit_scale: float = 1.0,
        final_logit_softcapping: float | None = None, lm_head_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        tensors = (hidden_states, lm_head_weight, lm_head_bias, labels, shift_labels)
        ours = final_logit_softcapping is None and logit_scale > 0 and not hasattr(lm_head_weight, "ds_id")
        if not (ours and is_direct(*tensors)):
            return theirs(
                hidden_states, lm_head_weight, chunk_size, labels, shift_labels, num_items_in_batch, logit_scale,
                final_logit_softcapping, lm_head_bias,
            )  # fmt: skip
        if shift_labels is None:
            if labels is None:
                raise ValueError("At least one of `labels` or `shift_labels` must be provided.")
            hidden_states, shift_labels = hidden_states[..., :-1, :], labels[..., 1:]
        targets = shift_labels.reshape(-1)
        counts = targets != -100
        # the rows that count, and one at least, so that every parameter gets a gradient
        rows = counts.nonzero()[:, 0] if bool(counts.any()) else counts.new_zeros(1, dtype=torch.int64)
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])[rows]
        found = head_statistics(
            hidden, lm_head_weight, lm_head_bias, targets[rows].clamp(min=0), logit_scale, ("entropy", "is_top1")
        )
        picked, entropy, top1 = found["log_probs"], found["entropy"], found["is_top1"]
        assert picked is not None and entropy is not None and top1 is not None
        kept, n_valid = counts[rows], counts.sum()
        n_items = n_valid.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        n_items = n_items.to(hidden.device) if isinstance(n_items, Tensor) else n_items
        loss = -(picked * kept).sum() / n_items
        return loss, (top1 & kept).sum().float(), (entropy.detach() * kept).sum(), n_valid

    return chunked_cross_entropy_loss
