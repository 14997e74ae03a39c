"""The softmax family as Triton kernels that run at the speed of a memory copy, with PyTorch's own signatures.

>>> import torch, fused_softmax
>>> fused_softmax.softmax(torch.tensor([[2.0, 1.0, 0.1]])).shape
torch.Size([1, 3])
"""

from . import nn, parallel
from .functional import log_softmax, logsumexp, masked_softmax, softmax
from .launch.context import batch_invariant
from .linear_losses import linear_cross_entropy, linear_token_logprobs
from .losses import TokenStatistics, cross_entropy, token_logprobs
from .patch import patch
from .plan_for import Fallback, plan_for
from .planning.types import Plan
from .stats import stats
from .torch_ops import linear_operator as _linear_operator  # noqa: F401, defines it
from .warmup import warmup

__version__ = "0.1.0"
__all__ = [
    "Fallback",
    "Plan",
    "TokenStatistics",
    "batch_invariant",
    "cross_entropy",
    "linear_cross_entropy",
    "linear_token_logprobs",
    "log_softmax",
    "logsumexp",
    "masked_softmax",
    "nn",
    "parallel",
    "patch",
    "plan_for",
    "softmax",
    "stats",
    "token_logprobs",
    "warmup",
]
