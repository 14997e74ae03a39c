"""Drop-ins for serving: vLLM's token log-probabilities with ranks, and its batch-invariant log_softmax.

vLLM reads the logits twice for the log-probabilities and a third time for the rank. compute_token_logprobs reads them
once for both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..functional import log_softmax
from ..launch.context import batch_invariant
from ..losses import token_logprobs
from ..torch_ops.token_logprobs import token_logprobs_and_rank


def compute_token_logprobs(
    logits: Tensor, token_ids: Tensor, *, return_rank: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Return log softmax(logits) at token_ids, as `vllm.v1.worker.gpu.sample.logprob.compute_token_logprobs`.

    Args:
        logits: (B, V).
        token_ids: Integers, (B, K).
        return_rank: Also return how many logits of the row are at least that of its first token, which is 1 for the
            largest. Ties count. The rank comes from the same read of the logits. Rows of more than 2^24 columns,
            logits that need a gradient, and traced calls take further reads by PyTorch.

    Returns:
        Log-probabilities (B, K) in float32, and with return_rank the ranks (B,) in int64.

    Raises:
        ValueError: Another number of dimensions.
        TypeError, IndexError: As `token_logprobs`.

    Source: https://github.com/vllm-project/vllm/blob/main/vllm/v1/worker/gpu/sample/logprob.py

    >>> compute_token_logprobs(torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[1, 2]]), return_rank=True)[1]
    tensor([2])
    """
    if logits.dim() != 2 or token_ids.dim() != 2:
        raise ValueError(
            f"compute_token_logprobs(): logits {tuple(logits.shape)} must be (B, V), and token_ids "
            f"{tuple(token_ids.shape)} (B, K)"
        )
    if return_rank:
        both = token_logprobs_and_rank(logits, token_ids)
        if both is not None:
            return both
    logprobs = token_logprobs(logits, token_ids)
    logprobs = logprobs if logprobs.dtype is torch.float32 else logprobs.float()
    if not return_rank:
        return logprobs
    return logprobs, (logits >= logits.gather(-1, token_ids[:, :1].long())).sum(-1)


def batch_invariant_log_softmax(input: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    """Return log_softmax with bits that do not depend on the other rows, as vLLM's override of aten::_log_softmax.

    Args:
        input: Any shape and layout.
        dim: The dimension.
        half_to_float: Return float32 for float16 or bfloat16 input, in the same pass.

    Raises:
        RuntimeError: half_to_float for another dtype, as torch.
        IndexError: As `log_softmax`.

    Source: https://github.com/vllm-project/vllm/blob/main/vllm/model_executor/layers/batch_invariant.py

    >>> batch_invariant_log_softmax(torch.zeros(1, 4), -1)
    tensor([[-1.3863, -1.3863, -1.3863, -1.3863]])
    """
    if half_to_float and input.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError(
            f"batch_invariant_log_softmax(): half_to_float needs a float16 or bfloat16 input, not {input.dtype}"
        )
    with batch_invariant():
        return log_softmax(input, dim, dtype=torch.float32 if half_to_float else None)
