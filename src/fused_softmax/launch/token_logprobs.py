"""token_logprobs of rows (n_rows, n_cols), forward and backward: log-probabilities of ids, entropy and logsumexp.

Allocates what is O(rows), and launches. No mathematics and no autograd; nothing here waits for the device.
KernelUnavailable, with nothing written, where a kernel does not compile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..planning.losses import plan_elementwise, plan_statistics
from ..planning.types import Plan, power_of_two
from .compile import kernel_loader
from .context import is_batch_invariant
from .launcher import Flags, RowOp, always, launch_rows, planned
from .layout import empty


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


def statistics(
    x: Tensor, ids: Tensor | None, scale: float | Tensor, entropy: bool, *, invariant: bool = False, keeps: bool = True
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
    """(log-probabilities of ids, entropy, lse, moments) of rows x*scale, float32.

    ids: (n_rows, n_picks) int64, contiguous; moments, where `keeps`: (n_rows, 2), each row's maximum and its sum of
    exponentials, which `statistics_backward` takes.
    """
    n_rows, real = x.shape[0], torch.float32
    n_picks = 0 if ids is None else ids.shape[1]
    lse = empty((n_rows,), (1,), real, x)
    entropies = empty((n_rows,), (1,), real, x) if entropy else None
    picked = None if ids is None else empty((n_rows, n_picks), (n_picks, 1), real, x)
    scales = scale if isinstance(scale, Tensor) else None
    moments = empty((n_rows, 2), (2, 1), real, x) if keeps else None
    vectors = tuple(lse if v is None else v for v in (lse, moments, entropies, ids, picked, scales))
    flags: Flags = (("PICKS", power_of_two(n_picks) if n_picks else 0), ("ENTROPY", entropy))
    flags = (*flags, ("SCALE", _scale_flag(scale)), ("KEEP_MOMENTS", keeps))
    numbers = (n_picks, 1.0 if isinstance(scale, Tensor) else float(scale))
    invariant = invariant or is_batch_invariant()
    launch_rows(FORWARD, (x,), vectors, numbers, flags, invariant=invariant)
    return picked, entropies, lse, moments


def planned_statistics(x: Tensor, on: Tensor, n_picks: int, backward: bool) -> Plan | str:
    """The plan of rows x, which may be a meta tensor, on `on`'s device; or why its kernel did not compile."""
    real = torch.float32
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

    moments: (n_rows, 2), as `statistics` returns them, or (n_rows,), the logsumexp.
    """
    g_picked, g_entropy, g_lse = (None if g is None else g.float().contiguous() for g in (g_picked, g_entropy, g_lse))
    n_picks = 0 if ids is None or g_picked is None else ids.shape[1]
    given = (moments, entropy, g_entropy, ids, g_picked, g_lse, scale if isinstance(scale, Tensor) else None)
    flags: Flags = (("PICKS", power_of_two(n_picks) if n_picks else 0), ("ENTROPY", g_entropy is not None))
    flags = (*flags, ("LSE", g_lse is not None), ("SCALE", _scale_flag(scale)), ("HAS_MOMENTS", moments.dim() == 2))
    numbers = (n_picks, 1.0 if isinstance(scale, Tensor) else float(scale))
    vectors = tuple(moments if v is None else v for v in given)
    launch_rows(BACKWARD, (x, dx), vectors, numbers, flags)
