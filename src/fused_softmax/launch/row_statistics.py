"""Statistics of rows (n_rows, n_cols), forward and backward: what token_logprobs and logsumexp launch.

Log-probabilities of ids, entropy and logsumexp come from one kernel, kernels/row_statistics.py. Allocates what is
O(rows), and launches. No mathematics and no autograd; nothing here waits for the device. KernelUnavailable, with
nothing written, where a kernel does not compile.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..planning.losses import plan_elementwise, plan_statistics
from ..planning.types import Plan, power_of_two
from .cache import Cache
from .compile import kernel_loader
from .context import is_batch_invariant
from .launcher import RowOp, always, planned, prepare_rows
from .layout import allocator, allocator_here, expect_rows, layout_key, pointer, rows_of
from .options import Flags
from .torch_private import current_device


@kernel_loader
def _statistics() -> Any:
    from ..kernels.row_statistics import row_statistics

    return row_statistics


@kernel_loader
def _statistics_backward() -> Any:
    from ..kernels.row_statistics import row_statistics_backward

    return row_statistics_backward


FORWARD = RowOp(plan_statistics, always(_statistics))
BACKWARD = RowOp(plan_elementwise, always(_statistics_backward))


def check_ids(ids: Tensor, n_cols: int) -> None:
    """IndexError for an id outside the columns; for the CPU, as on a GPU to know would be to wait."""
    if ids.numel() and (ids.min() < 0 or ids.max() >= n_cols):
        raise IndexError(f"token_ids are out of bounds for {n_cols} columns")


def _scale_flag(scale: float | Tensor) -> int:
    """How the kernels of statistics scale logits: not at all (0), by one number (1), each row by its own (2)."""
    return 2 if isinstance(scale, Tensor) else int(scale != 1.0)


_REAL = torch.float32
_forwards = Cache()


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
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
    """(log-probabilities of ids, entropy, lse, moments) of rows x*scale, float32.

    ids: (n_rows,) or (n_rows, n_picks) int64, contiguous, and the log-probabilities have its shape. moments, where
    `keeps`: (n_rows, 2), each row's maximum and its sum of exponentials, which `statistics_backward` takes. rounded:
    lse has x's dtype; nothing else is asked for. layout: where it is given, a key of how x lies.
    """
    n_rows, n_picks, scaled = x.shape[0], _picks(ids), _scale_flag(scale)
    invariant = invariant or is_batch_invariant()
    key = (layout or layout_key(x), n_picks, entropy, scaled, keeps, rounded, invariant)
    on_another = x.is_cuda and current_device() != x.get_device()
    new, at = allocator(x) if on_another else allocator_here(x), pointer(x)
    lse = new((n_rows,), (1,), x.dtype if rounded else _REAL)
    rows_at = at(lse)
    picked = None if ids is None else new((n_rows,) if ids.dim() == 1 else (n_rows, n_picks), ids.stride(), _REAL)
    entropies = new((n_rows,), (1,), _REAL) if entropy else None
    moments = new((n_rows, 2), (2, 1), _REAL) if keeps else None
    vectors = (
        rows_at,
        rows_at if moments is None else at(moments),
        rows_at if entropies is None else at(entropies),
        rows_at if ids is None else at(ids),
        rows_at if picked is None else at(picked),
        at(scale) if scaled == 2 else rows_at,  # type: ignore[arg-type]
    )
    launch = _forwards.get(key)
    if launch is None:
        flags: Flags = (("PICKS", power_of_two(n_picks) if n_picks else 0), ("ENTROPY", entropy))
        flags = (*flags, ("SCALE", scaled), ("KEEP_MOMENTS", keeps))
        as_tensors = (lse, lse, lse, lse if ids is None else ids, lse, lse)
        launch = prepare_rows(FORWARD, (x,), as_tensors, flags, invariant).at
        if x.is_cuda:
            _forwards.remember(key, launch)
    numbers = (n_picks, 1.0 if scaled == 2 else scale)
    if on_another:
        with torch.cuda.device(x.get_device()):
            launch(n_rows, (at(x),), vectors, numbers)
    else:
        launch(n_rows, (at(x),), vectors, numbers)
    return picked, entropies, lse, moments


def _picks(ids: Tensor | None) -> int:
    return 0 if ids is None else 1 if ids.dim() == 1 else ids.shape[1]


def planned_statistics(x: Tensor, on: Tensor, n_picks: int, backward: bool) -> Plan | str:
    """The plan of rows x, which may be a meta tensor, on `on`'s device; or why its kernel did not compile."""
    real = _REAL if n_picks else x.dtype
    ids = torch.int64 if n_picks else real
    if backward:
        flags: Flags = (("PICKS", n_picks), ("ENTROPY", False), ("LSE", not n_picks), ("SCALE", 0))
        dx = torch.empty(x.shape, dtype=x.dtype, device="meta")
        flags = (*flags, ("HAS_MOMENTS", n_picks > 0))
        return planned(BACKWARD, (x, dx), (real, real, real, ids, real, real, real), flags, on)
    flags = (("PICKS", n_picks), ("ENTROPY", False), ("SCALE", 0), ("KEEP_MOMENTS", n_picks > 0))
    return planned(FORWARD, (x,), (real, real, real, ids, real, real), flags, on)


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
) -> None:
    """Into dx the gradient of what `statistics` returns; an upstream gradient that is None counts for nothing.

    moments: (n_rows, 2), as `statistics` returns them, or (n_rows,), the logsumexp, which may have x's dtype, as g_lse
    then may.
    """
    n_picks = 0 if g_picked is None else _picks(ids)
    by_moments, scaled = moments.dim() == 2, _scale_flag(scale)
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
    key = (
        layout_key(x), layout_key(dx), n_picks, g_entropy is None, g_lse is None, scaled, by_moments, ids is None,
        of_lse,
    )  # fmt: skip
    run = _backwards.get(key)
    if run is None:
        expect_rows(x)
        flags: Flags = (("PICKS", power_of_two(n_picks) if n_picks else 0), ("ENTROPY", g_entropy is not None))
        flags = (*flags, ("LSE", g_lse is not None), ("SCALE", scaled), ("HAS_MOMENTS", by_moments))
        run = prepare_rows(BACKWARD, (x, dx), vectors, flags, False)
        if x.is_cuda:
            _backwards.remember(key, run)
    run((x, dx), vectors, (n_picks, 1.0 if scaled == 2 else scale))


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
    lse = logsumexp_of_rows(folded)
    shape = [1 if d in dims else size for d, size in enumerate(x.shape)] if keepdim else [x.shape[d] for d in kept]
    return lse.view(shape)


def logsumexp_backward(g: Tensor, x: Tensor, lse: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
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
