"""fused_softmax: row-wise softmax at the speed of a memory copy, behind PyTorch's own signatures.

>>> import torch, fused_softmax
>>> fused_softmax.softmax(torch.tensor([[2.0, 1.0, 0.1]])).shape
torch.Size([1, 3])
"""

from . import nn
from .functional import Fallback, log_softmax, logsumexp, plan_for, softmax
from .logprobs import TokenStatistics, token_logprobs
from .losses import cross_entropy
from .masked import masked_softmax
from .patch import patch
from .problem import Plan
from .rows import batch_invariant

__version__ = "0.1.0"
__all__ = [
    "Fallback",
    "Plan",
    "TokenStatistics",
    "batch_invariant",
    "cross_entropy",
    "log_softmax",
    "logsumexp",
    "masked_softmax",
    "nn",
    "patch",
    "plan_for",
    "softmax",
    "token_logprobs",
]
