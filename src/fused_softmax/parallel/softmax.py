"""softmax and log_softmax of logits whose columns are spread over ranks.

    softmax: dx = y*(dy - sum(dy*y));  log_softmax: dx = dy - exp(y)*sum(dy);  the sums are over all columns

Forward: two reads and one write of the local logits, one all_gather of O(rows). Backward: one all_reduce of O(rows),
between a read for the sums and a read and write. Keeps the local result and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..launch import softmax_shards
from ..launch.availability import KernelUnavailable
from ..launch.layout import rows_of
from ..torch_ops.arguments import expect_tensors
from ..torch_ops.decompositions import result_dtype, widened
from ..torch_ops.library import define, not_differentiable
from ..torch_ops.route import is_supported, supports_fused_cast
from .agreement import Call
from .exchange import gather, sum_of_segments, sum_over_ranks
from .gradients import Upstream, expect_once, statistics_gradient
from .rows import read_statistics
from .shards import Shard, canonical, rows_and_shard
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
    """Return this rank's columns of log_softmax over the columns of all ranks; arguments are `parallel.softmax`'s."""
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
        words = call.words(shard.start, shard.width)
        payload = read_statistics(x, None, 1.0, words, shard, False)
        gathered, compares = gather(payload, words, x.shape[0], call, shard, check)
        _, _, lse, moments = merge_statistics(gathered, None, x.shape[0], compares, shard, False, infinite=False)
        if function == "softmax":
            # softmax is the gradient of logsumexp
            y = statistics_gradient(x, moments, 1.0, None, None, Upstream(lse=torch.ones_like(lse)), shard, dtype)
        else:
            y = (_log_softmax_operator if torch.compiler.is_compiling() else _log_softmax)(
                x, moments, dtype, shard.segments, shard.invariant
            )
        ctx.save_for_backward(y)
        ctx.described = x.dtype, function, shard
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        dtype, function, shard = ctx.described
        expect_once(function)
        compiling, log = torch.compiler.is_compiling(), function == "log_softmax"
        sums = (_sums_operator if compiling else _sums)(y, dy, log, shard.segments, shard.invariant)
        total = sum_of_segments(sums, shard) if shard.invariant else sum_over_ranks(sums[0], shard)
        write = _gradient_operator if compiling else _gradient
        return write(y, dy, total, log, dtype, shard.segments, shard.invariant), None, None, None, None


def _rows(t: Tensor) -> Tensor:
    return rows_of(t, t.shape[1])


def _pieces(t: Tensor, segments: int) -> list[Tensor]:
    """The segments' columns, as views."""
    return list(t.split(max(1, t.shape[1] // segments), 1)) if t.shape[1] else []


def _log_softmax(x: Tensor, moments: Tensor, dtype: torch.dtype, segments: int, invariant: bool) -> Tensor:
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    for x_here, y_here in zip(_pieces(x, segments), _pieces(y, segments), strict=True):
        x_here = canonical(x_here, invariant)
        if is_supported(x_here):
            try:
                softmax_shards.log_softmax(_rows(x_here), y_here, moments.contiguous(), invariant)
                continue
            except KernelUnavailable:
                pass
        row_max, log_sum = moments[:, :1], moments[:, 1:].log()
        for part in _parts(x_here):
            y_here[part] = (widened(x_here[part]) - row_max[part]) - log_sum[part]
    return y


def _sums(y: Tensor, dy: Tensor, log: bool, segments: int, invariant: bool) -> Tensor:
    sums = torch.zeros((segments, y.shape[0]), dtype=result_dtype(y), device=y.device)
    for i, (y_here, dy_here) in enumerate(zip(_pieces(y, segments), _pieces(dy, segments), strict=True)):
        y_here, dy_here = canonical(y_here, invariant), canonical(dy_here, invariant)
        if is_supported(y_here):
            try:
                softmax_shards.gradient_sums(_rows(y_here), _rows(dy_here), sums[i], log, invariant)
                continue
            except KernelUnavailable:
                pass
        for part in _parts(y_here):
            g = widened(dy_here[part])
            sums[i, part] = (g if log else g * widened(y_here[part])).contiguous().sum(1)
    return sums


def _gradient(
    y: Tensor, dy: Tensor, total: Tensor, log: bool, dtype: torch.dtype, segments: int, invariant: bool
) -> Tensor:
    dx = torch.empty(y.shape, dtype=dtype, device=y.device)
    for y_here, dy_here, dx_here in zip(*(_pieces(t, segments) for t in (y, dy, dx)), strict=True):
        y_here, dy_here = canonical(y_here, invariant), canonical(dy_here, invariant)
        if is_supported(y_here):
            try:
                softmax_shards.gradient(_rows(y_here), _rows(dy_here), dx_here, total.contiguous(), log, invariant)
                continue
            except KernelUnavailable:
                pass
        for part in _parts(y_here):
            g, of_rows, of_all = widened(dy_here[part]), widened(y_here[part]), total[part].unsqueeze(1)
            dx_here[part] = g - of_rows.exp() * of_all if log else of_rows * (g - of_all)
    return dx


def _parts(t: Tensor) -> Iterator[slice]:
    """Slices of rows that hold about CHUNK elements each."""
    each = max(1, CHUNK // max(1, t.shape[1]))
    for start in range(0, t.shape[0], each):
        yield slice(start, min(start + each, t.shape[0]))


_log_softmax_operator = define(
    "parallel_log_softmax(Tensor x, Tensor moments, ScalarType dtype, int segments, bool invariant) -> Tensor",
    _log_softmax,
    lambda x, moments, dtype, *rest: x.new_empty(x.shape, dtype=dtype),
)
_sums_operator = define(
    "parallel_softmax_sums(Tensor y, Tensor dy, bool log, int segments, bool invariant) -> Tensor",
    _sums,
    lambda y, dy, log, segments, invariant: y.new_empty((segments, y.shape[0]), dtype=result_dtype(y)),
)
_gradient_operator = define(
    "parallel_softmax_gradient(Tensor y, Tensor dy, Tensor total, bool log, ScalarType dtype, int segments, "
    "bool invariant) -> Tensor",
    _gradient,
    lambda y, dy, total, log, dtype, *rest: y.new_empty(y.shape, dtype=dtype),
)
for _name in ("parallel_log_softmax", "parallel_softmax_sums", "parallel_softmax_gradient"):
    not_differentiable(_name)
