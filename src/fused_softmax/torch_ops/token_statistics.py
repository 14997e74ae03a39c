"""What token_logprobs and linear_token_logprobs return where more than log-probabilities is asked for."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class TokenStatistics(NamedTuple):
    """The result of token_logprobs where more than log-probabilities is asked for. Parts not asked for are None."""

    logprobs: Tensor
    entropy: Tensor | None
    logsumexp: Tensor | None
