"""Softmax ops whose rows are spread over GPUs by columns, such as a vocabulary: torch.distributed and DTensor.

Each rank holds some columns of every row, reads them once, and exchanges a few float32 numbers for each row.
"""

from .cross_entropy import cross_entropy
from .dtensor import register as _register
from .linear_cross_entropy import linear_cross_entropy
from .row_statistics import logsumexp, token_logprobs
from .softmax import log_softmax, softmax

_register(softmax, log_softmax, logsumexp, cross_entropy, token_logprobs)

__all__ = ["cross_entropy", "linear_cross_entropy", "log_softmax", "logsumexp", "softmax", "token_logprobs"]
