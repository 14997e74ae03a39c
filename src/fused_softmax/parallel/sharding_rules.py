"""Sharding rules of the operators, for DTensors: rows may be sharded, and then nothing is exchanged.

The public functions unwrap DTensors by themselves (`dtensor`). These rules are for the operators as such, which traced
programs and callers of torch.ops hold. DTensor replicates what no rule takes, such as the dimension that is reduced,
and the rows of a mean, as the mean of the ranks' means is another number.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..launch.torch_private import results_of
from ..torch_ops.arguments import NAMESPACE

Rule = tuple[list[Any], list[Any]]  # placements of the outputs; of each argument, None for what is no tensor
_registered: list[bool] = []


def register_if_loaded() -> None:
    """`register`, where torch.distributed.tensor is imported: to import it takes seconds, and without it there are no
    DTensors."""
    if "torch.distributed.tensor" in sys.modules:
        register()


def register() -> None:
    """Registers the rules with DTensor, once; not where this torch has no such rules."""
    if _registered:
        return
    _registered.append(True)
    try:
        from torch.distributed.tensor.experimental import register_sharding
    except ImportError:
        return
    for name, rows in _RULES.items():
        operator = getattr(getattr(torch.ops, NAMESPACE), name).default
        register_sharding(operator)(_with_replicated(rows, results_of(operator)))


def _with_replicated(rows: Callable[..., Iterator[Rule]], n_outputs: int) -> Callable[..., list[Rule]]:
    from torch.distributed.tensor import Replicate

    def rules(*arguments: Any) -> list[Rule]:
        return [([Replicate()] * n_outputs, _placed(arguments, lambda i: Replicate())), *rows(*arguments)]

    return rules


def _placed(arguments: tuple[Any, ...], placement: Callable[[int], Any]) -> list[Any]:
    """A placement for each argument that is a tensor, by its position."""
    return [placement(i) if hasattr(a, "tensor_meta") else None for i, a in enumerate(arguments)]


def _over_dim(*arguments: Any) -> Iterator[Rule]:
    """softmax's and its gradient's: each dimension of the tensors, except `dim`, the argument after them."""
    from torch.distributed.tensor import Shard

    n_tensors = sum(hasattr(a, "tensor_meta") for a in arguments)
    n_dims, dim = arguments[0].ndim, arguments[n_tensors]
    for d in range(n_dims):
        if d != dim % n_dims:
            yield [Shard(d)], _placed(arguments, lambda i, d=d: Shard(d))  # type: ignore[misc]


def _statistics(n_outputs: int) -> Callable[..., Iterator[Rule]]:
    """Every tensor has a first dimension of rows."""

    def rows(*arguments: Any) -> Iterator[Rule]:
        from torch.distributed.tensor import Shard

        yield [Shard(0)] * n_outputs, _placed(arguments, lambda i: Shard(0))

    return rows


def _loss(x_at: int) -> Callable[..., Iterator[Rule]]:
    """cross_entropy's, or its gradient's, whose x is argument x_at. After the target come numbers of the classes."""

    def rows(*arguments: Any) -> Iterator[Rule]:
        from torch.distributed.tensor import Partial, Replicate, Shard

        reduction = next(a for a in arguments if isinstance(a, str))
        if reduction == "mean":
            return
        by_row = reduction == "none"

        def placement(i: int) -> Any:
            upstream = x_at > 0 and i == 0  # of a sum it is one number
            return Shard(0) if i <= x_at + 1 and (by_row or not upstream) else Replicate()

        outputs = [Shard(0)] if x_at else [Shard(0) if by_row else Partial(), Shard(0)]
        yield outputs, _placed(arguments, placement)

    return rows


_RULES: dict[str, Callable[..., Iterator[Rule]]] = {
    "softmax": _over_dim,
    "log_softmax": _over_dim,
    "softmax_backward": _over_dim,
    "log_softmax_backward": _over_dim,
    "token_logprobs": _statistics(4),
    "token_logprobs_backward": _statistics(1),
    "cross_entropy": _loss(0),
    "cross_entropy_backward": _loss(2),
}
