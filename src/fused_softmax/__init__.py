"""The softmax family as Triton kernels that run at the speed of a memory copy, with PyTorch's own signatures.

>>> import torch, fused_softmax
>>> fused_softmax.softmax(torch.tensor([[2.0, 1.0, 0.1]])).shape
torch.Size([1, 3])
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from .functional import log_softmax, logsumexp, masked_softmax, softmax
from .launch.context import batch_invariant
from .losses import TokenStatistics, cross_entropy, token_logprobs
from .patch import patch
from .plan_for import Fallback, plan_for
from .planning.types import Plan
from .stats import stats
from .torch_ops import library as _library
from .torch_ops import route as _route
from .warmup import warmup

if TYPE_CHECKING:
    from . import nn, parallel
    from .linear_losses import linear_cross_entropy, linear_token_logprobs

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

# what is imported when it is first asked for, and the module that has it: half of the time that all of it would take
_LATER = {
    "nn": "nn",
    "parallel": "parallel",
    "linear_cross_entropy": "linear_losses",
    "linear_token_logprobs": "linear_losses",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{_LATER[name]}", __name__)
    found = module if name == _LATER[name] else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_library.defined_later("linear_cross_entropy", f"{__name__}.torch_ops.linear_operator")
_library.defined_later("linear_token_logprobs", f"{__name__}.torch_ops.linear_token_logprobs")
_library.defined_later("parallel_", f"{__name__}.parallel")
_route.load_sharded = lambda: importlib.import_module(f"{__name__}.parallel")
if "torch.distributed.tensor" in sys.modules:  # there may be DTensors, which meet the operators without our functions
    from . import parallel
