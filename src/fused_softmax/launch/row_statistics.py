"""Statistics of rows (n_rows, n_cols), forward and backward: what token_logprobs and logsumexp launch.

Log-probabilities of ids, entropy and logsumexp come from one kernel, kernels/row_statistics.py, or from
kernels/row_statistics_gathered.py, where rows are narrow, or from the two of kernels/row_statistics_parts.py, where
they are wide. Allocates what is O(rows), and launches. No mathematics and no autograd; nothing here waits for the
device. KernelUnavailable, with nothing written, where a kernel does not compile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..planning.losses import (
    plan_elementwise,
    plan_row_statistics,
    plan_statistics,
    plan_statistics_gradient,
    plan_statistics_of_one_id,
)
from ..planning.types import Plan, power_of_two
from .cache import Cache
from .context import is_batch_invariant
from .device import device_of
from .kernel_loading import kernel_loader
from .launcher import RowOp, always, on_its_device, planned, prepare_flat, prepare_rows, programs_of_row
from .layout import allocator, allocator_here, described_gradient, expect_rows, layout_key, pointer, restored, rows_of
from .options import Flags, scale_flag


@kernel_loader
def _statistics() -> Any:
    from ..kernels.row_statistics import row_statistics

    return row_statistics


@kernel_loader
def _statistics_backward() -> Any:
    from ..kernels.row_statistics import row_statistics_backward

    return row_statistics_backward


@kernel_loader
def _statistics_parts() -> Any:
    from ..kernels.row_statistics_parts import row_statistics_parts

    return row_statistics_parts


@kernel_loader
def _gathered() -> Any:
    from ..kernels.row_statistics_gathered import row_statistics_gathered

    return row_statistics_gathered


@kernel_loader
def _backward_gathered() -> Any:
    from ..kernels.row_statistics_gathered import row_statistics_backward_gathered

    return row_statistics_backward_gathered


@kernel_loader
def _merge_statistics() -> Any:
    from ..kernels.row_statistics_parts import merge_row_statistics

    return merge_row_statistics


def _forward(plan: Plan) -> Any:
    if plan.gathered:
        return _gathered()
    return _statistics_parts() if plan.part_cols else _statistics()


# of one id for each row, or none; of several ids; with the rank of the first one
FORWARD = RowOp(plan_statistics_of_one_id, _forward)
OF_SEVERAL_IDS = RowOp(plan_row_statistics, _forward)
RANKED = RowOp(plan_statistics, always(_statistics))
# of one id for each row, or none; of several ids, and of a part of the columns
BACKWARD = RowOp(
    plan_statistics_gradient, lambda plan: _backward_gathered() if plan.gathered else _statistics_backward()
)
BACKWARD_OF_SEVERAL_IDS = RowOp(plan_elementwise, always(_statistics_backward))


def forward_op(n_picks: int, rank: bool = False) -> RowOp:
    """The op of so many ids for each row, with the rank of the first one or without."""
    if rank:
        return RANKED
    return FORWARD if n_picks <= 1 else OF_SEVERAL_IDS


def backward_op(n_picks: int, sharded: bool = False) -> RowOp:
    """The op of the gradient of so many ids for each row; sharded: of a part of the columns."""
    return BACKWARD if n_picks <= 1 and not sharded else BACKWARD_OF_SEVERAL_IDS


def check_ids(ids: Tensor, n_cols: int) -> None:
    """IndexError for an id outside the columns; for the CPU, as on a GPU to know would be to wait."""
    if ids.numel() and (ids.min() < 0 or ids.max() >= n_cols):
        raise IndexError(f"token_ids are out of bounds for {n_cols} columns")


_REAL = torch.float32
_forwards = Cache()
MOST_RANKED = 2**24  # columns: a rank is a float32, which holds no more exactly


def statistics(
    x: Tensor,
    ids: Tensor | None,
    scale: float | Tensor,
    entropy: bool,
    *,
    invariant: bool = False,
    keeps: bool = True,
    rounded: bool = False,
    layout: object = None,
    rank: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
    """(log-probabilities of ids, entropy, lse, moments) of rows x*scale, float32.

    rank: in place of the entropy, the rank of each row's first id: how many logits of the row are at least its own.

    ids: (n_rows,) or (n_rows, n_picks) int64, contiguous, and the log-probabilities have its shape. moments, where
    `keeps`: (n_rows, 2), each row's maximum and its sum of exponentials, which `statistics_backward` takes. rounded:
    lse has x's dtype; nothing else is asked for. layout: where it is given, a key of how x lies.
    """
    n_rows = x.shape[0]
    new, at = allocator(x), pointer(x)
    lse = new((n_rows,), (1,), x.dtype if rounded else _REAL)
    picked = entropies = moments = of_ids = None
    if ids is not None:
        picked = new((n_rows,) if ids.dim() == 1 else (n_rows, _picks(ids)), ids.stride(), _REAL)
        of_ids = ids, at(picked)
    if entropy or rank:
        entropies = new((n_rows,), (1,), _REAL)
    if keeps:
        moments = new((n_rows, 2), (2, 1), _REAL)
    into = at(lse), None if moments is None else at(moments), None if entropies is None else at(entropies)
    write_statistics(x, into, of_ids, scale, invariant, layout, rank, rounded)
    return picked, entropies, lse, moments


def write_statistics(
    x: Tensor, into: tuple[Any, Any, Any], of_ids: tuple[Tensor, Any] | None, scale: float | Tensor, invariant: bool,
    layout: object = None, rank: bool = False, rounded: bool = False,
) -> None:  # fmt: skip
    """`statistics` into memory: (lse, moments or None, entropies or None), and (ids, log-probabilities) or None.

    Memory is contiguous and float32, except for an lse that is `rounded`; it comes as `layout.pointer` makes pointers.
    """
    lse, moments, entropies = into
    ids = None if of_ids is None else of_ids[0]
    n_picks, scaled, at = _picks(ids), scale_flag(scale), pointer(x)
    invariant = invariant or is_batch_invariant()
    entropy, keeps = entropies is not None and not rank, moments is not None
    key = (layout or layout_key(x), n_picks, entropy, scaled, keeps, rounded, invariant, rank)
    vectors = (
        lse,
        lse if moments is None else moments,
        lse if entropies is None else entropies,
        lse if of_ids is None else at(of_ids[0]),
        lse if of_ids is None else of_ids[1],
        at(scale) if isinstance(scale, Tensor) else lse,
    )
    launch = _forwards.get(key)
    if launch is None:
        flags: Flags = (("PICKS", power_of_two(n_picks) if n_picks else 0), ("ENTROPY", entropy))
        flags = (*flags, ("RANK", rank), ("SCALE", scaled), ("KEEP_MOMENTS", keeps))
        launch = prepare_statistics(forward_op(n_picks, rank), x, x.dtype if rounded else _REAL, flags, invariant)
        if x.is_cuda:
            _forwards.store(key, launch)
    on_its_device(x, launch, x.shape[0], (at(x),), vectors, (n_picks, 1.0 if scaled == 2 else scale))


PARTS_OF_PROGRAM = 512  # that a program merges, of all its rows
MOST_PARTS = 2048  # of a row that are read at a time: with 65,536 the kernel spills, and takes seconds to compile


def prepare_statistics(op: RowOp, x: Tensor, dtype: torch.dtype, flags: Flags, invariant: bool) -> Callable[..., None]:
    """launch(n_rows, rows, vectors, numbers) of `op`, from `forward_op`, over rows that lie as x does, by pointers.

    vectors: lse of `dtype`, moments, entropies, ids, log-probabilities and scales. numbers: n_picks, scale.
    """
    device, picks = device_of(x), dict(flags)["PICKS"]
    plan = op.plan((x,), device, invariant)
    real, ids = torch.empty(1, dtype=dtype), torch.empty(1, dtype=torch.int64 if picks else dtype)
    if not plan.part_cols:
        return prepare_rows(op, (x,), (real, real, real, ids, real, real), flags, invariant).at
    n_cols, stride, splits = x.shape[1], x.stride()[0], programs_of_row(plan, x.shape[1])
    width = min(power_of_two(splits), MOST_PARTS)
    rows_each = max(1, PARTS_OF_PROGRAM // width)
    reduce = prepare_rows(op, (x,), (torch.empty(1), real), flags, invariant).at
    kinds = (x.dtype, _REAL, dtype, dtype, dtype, ids.dtype, dtype, dtype)
    of_merge = tuple(flag for flag in flags if flag[0] != "RANK")
    of_merge = (*of_merge, ("BLOCK", rows_each), ("SPLITS", width), ("LOOPS", splits > width))
    of_merge = (*of_merge, ("WAITS", device.supports_pdl))
    merge = prepare_flat(_merge_statistics, kinds, of_merge, 4, x)
    new, at = allocator_here(x), pointer(x)

    def launch(n_rows: int, rows: tuple[Any, ...], vectors: tuple[Any, ...], numbers: tuple[Any, ...]) -> None:
        lse, moments, entropies, ids, picked, scale = vectors
        parts = new((n_rows * splits * 3,), (1,), _REAL)
        reduce(n_rows, rows, (at(parts), scale), numbers[1:])
        read = (rows[0], at(parts), lse, moments, entropies, ids, picked, scale)
        merge(read, (n_rows, stride, n_cols, splits, *numbers), -(-n_rows // rows_each))

    return launch


def _picks(ids: Tensor | None) -> int:
    return 0 if ids is None else 1 if ids.dim() == 1 else ids.shape[1]


def planned_statistics(x: Tensor, on: Tensor, n_picks: int, backward: bool) -> Plan | str:
    """The plan of rows x, which may be a meta tensor, on `on`'s device; or why its kernel did not compile."""
    real = _REAL if n_picks else x.dtype
    ids = torch.int64 if n_picks else real
    if backward:
        flags: Flags = (("PICKS", n_picks), ("ENTROPY", False), ("LSE", not n_picks), ("SCALE", 0))
        dx = described_gradient(x) if n_picks else torch.empty(x.shape, dtype=x.dtype, device="meta")
        flags = (*flags, ("HAS_MOMENTS", n_picks > 0), ("SHARDED", False))
        # each element of logsumexp's gradient is one product of an exponential, so batch_invariant() changes nothing
        invariant = is_batch_invariant() and n_picks > 0
        return planned(
            backward_op(n_picks), (x, dx), (real, real, real, ids, real, real, real), flags, on, invariant=invariant
        )
    keeps = n_picks > 0 and on.requires_grad and torch.is_grad_enabled()
    flags = (("PICKS", n_picks), ("ENTROPY", False), ("RANK", False), ("SCALE", 0), ("KEEP_MOMENTS", keeps))
    op = forward_op(n_picks)
    shared = op.plan((x,), device_of(on), is_batch_invariant()).part_cols > 0
    return planned(op, (x,), (_REAL, real) if shared else (real, real, real, ids, real, real), flags, on)


def statistics_backward(
    x: Tensor,
    dx: Tensor,
    moments: Tensor,
    scale: float | Tensor,
    *,
    ids: Tensor | None = None,
    g_picked: Tensor | None = None,
    entropy: Tensor | None = None,
    g_entropy: Tensor | None = None,
    g_lse: Tensor | None = None,
    shard: tuple[int, int] | None = None,
    invariant: bool = False,
) -> None:
    """Into dx the gradient of what `statistics` returns; an upstream gradient that is None counts for nothing.

    moments: (n_rows, 2), as `statistics` returns them, or (n_rows,), the logsumexp, which may have x's dtype, as g_lse
    then may. shard: (start, size) where x has columns from `start` on of `size`, which all else is of. invariant: the
    plan does not depend on where rows start.
    """
    n_picks = 0 if g_picked is None else _picks(ids)
    by_moments, scaled = moments.dim() == 2, scale_flag(scale)
    moments = restored(moments, _REAL if by_moments else moments.dtype)
    ids = None if ids is None else restored(ids, torch.int64)
    entropy = None if entropy is None else restored(entropy, _REAL)
    scale = restored(scale, _REAL) if isinstance(scale, Tensor) else scale
    vectors = tuple(
        moments if v is None else v
        for v in (
            moments,
            entropy,
            _real(g_entropy),
            ids,
            _real(g_picked),
            _real(g_lse) if by_moments else g_lse,
            scale if scaled == 2 else None,
        )
    )
    of_lse = None if by_moments or g_lse is None else (moments.dtype, g_lse.dtype)
    given = (g_entropy is None, g_lse is None, ids is None, shard is None, invariant, of_lse)
    key = (layout_key(x), layout_key(dx), n_picks, scaled, by_moments, given)
    run = _backwards.get(key)
    if run is None:
        expect_rows(x)
        flags: Flags = (("PICKS", power_of_two(n_picks) if n_picks else 0), ("ENTROPY", g_entropy is not None))
        flags = (*flags, ("LSE", g_lse is not None), ("SCALE", scaled), ("HAS_MOMENTS", by_moments))
        flags = (*flags, ("SHARDED", shard is not None))
        run = prepare_rows(backward_op(n_picks, shard is not None), (x, dx), vectors, flags, invariant)
        if x.is_cuda:
            _backwards.store(key, run)
    run((x, dx), vectors, (n_picks, *(shard or (0, 0)), 1.0 if scaled == 2 else scale))


_backwards = Cache()


def _real(g: Tensor | None) -> Tensor | None:
    return g if g is None or g.dtype is torch.float32 and g.is_contiguous() else g.float().contiguous()


# --- logsumexp over dimensions of whole tensors ----------------------------------------------------------------------


def logsumexp_of_rows(x: Tensor, layout: object = None) -> Tensor:
    """logsumexp of rows x in x's dtype.  # [n_rows]"""
    return statistics(x, None, 1.0, False, keeps=False, rounded=True, layout=layout)[2]


def gradient_of_rows(g: Tensor, x: Tensor, lse: Tensor) -> Tensor:
    """dx = g*exp(x - lse) of rows x, contiguous; g, lse: (n_rows,) in x's dtype."""
    n_rows, n_cols = x.shape
    dx = allocator(x)((n_rows, n_cols), (n_cols, 1), x.dtype)
    statistics_backward(x, dx, lse.contiguous(), 1.0, g_lse=g.contiguous())
    return dx


def logsumexp_forward(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """logsumexp of x over dims (rising, each in [0, x.dim())) in x's dtype. x is not empty."""
    kept, folded = _folded(x, dims)
    shape = [1 if d in dims else size for d, size in enumerate(x.shape)] if keepdim else [x.shape[d] for d in kept]
    lse = torch.empty(shape, dtype=x.dtype, device=x.device)  # no view, which could not be changed in place
    write_statistics(folded, (pointer(x)(lse), None, None), None, 1.0, False, rounded=True)
    return lse


def logsumexp_backward(g: Tensor, x: Tensor, lse: Tensor, dims: tuple[int, ...]) -> Tensor:
    """dx = g*exp(x - lse), contiguous, in x's dtype; NaN where a row is nothing but -inf, as torch has it."""
    kept, folded = _folded(x, dims)
    dx = torch.empty(folded.shape, dtype=x.dtype, device=x.device)
    statistics_backward(folded, dx, lse.reshape(-1).contiguous(), 1.0, g_lse=g.reshape(-1).contiguous())
    order = (*kept, *dims)
    back = sorted(range(x.dim()), key=lambda i: order[i])
    return dx.view([x.shape[d] for d in order]).permute(back).contiguous()


def _folded(x: Tensor, dims: tuple[int, ...]) -> tuple[list[int], Tensor]:
    """(the other dims, x as rows over dims), copied only where its strides leave no other way."""
    kept = [d for d in range(x.dim()) if d not in dims]
    return kept, rows_of(x.permute(*kept, *dims), math.prod(x.shape[d] for d in dims))
