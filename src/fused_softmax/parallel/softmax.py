"""softmax and log_softmax of logits whose columns are spread over ranks.

    softmax: dx = y*(dy - sum(dy*y));  log_softmax: dx = dy - exp(y)*sum(dy);  the sums are over all columns

Forward: two reads and one write of the local logits, one all_gather of O(rows). Backward: one all_reduce of O(rows).
Keeps the local result and nothing else. log_softmax's write and both gradients are PyTorch's, some rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..torch_ops.arguments import expect_tensors
from ..torch_ops.decompositions import widened
from ..torch_ops.route import supports_fused_cast
from .agreement import Call
from .exchange import gather, sum_of_segments, sum_over_ranks
from .gradients import Upstream, expect_once, statistics_gradient
from .rows import read_statistics
from .shards import Shard, rows_and_shard
from .whole_rows import merge_statistics

CHUNK = 2**24  # elements that PyTorch's formulas widen at a time


def softmax(
    local_logits: Tensor,
    *,
    group: Any = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    dtype: torch.dtype | None = None,
    check: bool = False,
) -> Tensor:
    """Return this rank's columns of softmax over the columns of all ranks, from its own logits, (..., width).

    group, vocab_start, vocab_size and check are as in `parallel.cross_entropy`; dtype as in `torch.softmax`.

    Returns: (..., width) in `dtype`, or in the logits' dtype.

    Raises: as `parallel.cross_entropy`.
    """
    return _softmax("softmax", local_logits, group, vocab_start, vocab_size, dtype, check)


def log_softmax(
    local_logits: Tensor,
    *,
    group: Any = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    dtype: torch.dtype | None = None,
    check: bool = False,
) -> Tensor:
    """Return this rank's columns of log_softmax over the columns of all ranks; the arguments are `parallel.softmax`'s.

    Its write of the result is PyTorch's, in two operations for some rows at a time.
    """
    return _softmax("log_softmax", local_logits, group, vocab_start, vocab_size, dtype, check)


def _softmax(
    function: str, x: Any, group: Any, vocab_start: Any, vocab_size: Any, dtype: torch.dtype | None, check: Any
) -> Tensor:
    expect_tensors(f"parallel.{function}", local_logits=x)
    if dtype is not None and not supports_fused_cast(x.dtype, dtype):
        x = x.to(dtype)
    of_rows, shard = rows_and_shard(function, x, group, vocab_start, vocab_size, check)
    return Softmax.apply(of_rows, x.dtype if dtype is None else dtype, function, shard, check).view(x.shape)


class Softmax(torch.autograd.Function):
    """softmax or log_softmax of rows (n_rows, width). Keeps its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, function: str, shard: Shard, check: bool) -> Tensor:
        call = Call(function, x.dtype, shard.size, shard.segments)
        payload = read_statistics(x, None, 1.0, call.words(shard.start, shard.width), shard, False)
        gathered, compares = gather(payload, x.shape[0], call, shard, check)
        _, _, lse, moments = merge_statistics(gathered, None, x.shape[0], compares, shard, False, infinite=False)
        if function == "softmax":
            # softmax is the gradient of logsumexp
            upstream = Upstream(lse=torch.ones_like(lse))
            y = statistics_gradient(x, moments, 1.0, None, None, upstream, shard, dtype)
        else:
            y = torch.empty(x.shape, dtype=dtype, device=x.device)
            row_max, log_sum = moments[:, :1], moments[:, 1:].log()
            for part in _parts(x):
                y[part] = (widened(x[part]) - row_max[part]) - log_sum[part]
        ctx.save_for_backward(y)
        ctx.described = x.dtype, function, shard
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        dtype, function, shard = ctx.described
        expect_once(function)
        log, sums = function == "log_softmax", []
        for columns, _ in shard.pieces():
            dy_here, y_here = dy[:, columns], y[:, columns]
            found = [_product(dy_here[part], None if log else y_here[part]) for part in _parts(y_here)]
            sums.append(torch.cat([f.sum(1) for f in found]) if found else widened(y).new_zeros(0))
        each = torch.stack(sums)
        total = sum_of_segments(each, shard) if shard.invariant else sum_over_ranks(each[0], shard)
        dx, total = torch.empty(y.shape, dtype=dtype, device=y.device), total.unsqueeze(1)
        for part in _parts(y):
            g, of_rows = widened(dy[part]), widened(y[part])
            dx[part] = g - of_rows.exp() * total[part] if log else of_rows * (g - total[part])
        return dx, None, None, None, None


def _product(dy: Tensor, y: Tensor | None) -> Tensor:
    """dy, or dy*y, in float32 at least, contiguous: the order of its sum does not depend on how the tensors lie."""
    dy = widened(dy)
    return (dy.clone(memory_format=torch.contiguous_format) if y is None else dy * widened(y)).contiguous()


def _parts(t: Tensor) -> Iterator[slice]:
    """Slices of rows that hold about CHUNK elements each."""
    each = max(1, CHUNK // max(1, t.shape[1]))
    for start in range(0, t.shape[0], each):
        yield slice(start, min(start + each, t.shape[0]))
