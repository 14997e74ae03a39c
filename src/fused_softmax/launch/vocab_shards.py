"""Launches of rows whose columns are spread over ranks: a payload's parts, their merge, and the factors of a gradient.

No mathematics, no collective, and nothing here waits for the device. KernelUnavailable where a kernel does not compile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..planning.types import power_of_two
from .kernel_loading import kernel_loader
from .launcher import Vector, on_its_device, prepare_flat
from .layout import places, pointer, restored
from .options import Flags, scale_flag
from .payload import Layout

BLOCK = 128  # rows of a program, as the kernels have it
WARPS = 4


@kernel_loader
def _pack() -> Any:
    from ..kernels.vocab_shards import pack_shard

    return pack_shard


@kernel_loader
def _merge_loss() -> Any:
    from ..kernels.vocab_shards import merge_loss

    return merge_loss


@kernel_loader
def _merge_statistics() -> Any:
    from ..kernels.vocab_shards import merge_statistics

    return merge_statistics


@kernel_loader
def _factors() -> Any:
    from ..kernels.vocab_shards import loss_factors

    return loss_factors


_F, _I = torch.float32, torch.int64


def pack_shard(
    x: Tensor, payload: Tensor, layout: Layout, first_row: int, header: Tensor, ids: Tensor, weight: Tensor | None,
    scale: float | Tensor, start: int, size: int, ignore_index: int | None, smooth: bool, softcap: float | None,
) -> None:  # fmt: skip
    """Into the payload its header, and from its row `first_row` on the logits and weights of ids; `smooth`: ends
    smoothed sums.

    ids: (n_rows, picks) or (n_rows,) int64, contiguous, of all ranks' columns; x holds those from `start` of `size`.
    ignore_index: of targets, which are asserted to be inside; None for ids, which may be anything. weight: float32, of
    these columns, where it is to be written. The moments and the kernel's smoothed sums are there already.
    """
    n_rows, n_cols = x.shape
    loss, scaled = ignore_index is not None, scale_flag(scale)
    flags: Flags = (("LOSS", loss), ("SCALE", scaled), ("WEIGHTED", weight is not None))
    flags = (*flags, ("SMOOTH", smooth), ("SOFTCAP", softcap is not None), ("HEAD", layout.head))
    flags = (*flags, ("PADDED", power_of_two(layout.head)))
    run = prepare_flat(_pack, (x.dtype, _I, *(_F,) * 8), flags, WARPS, x)
    at = pointer(x)
    moments, picked, spreads, weights = places(
        payload, layout.head + 2 * first_row, layout.picked + first_row * layout.picks, layout.spreads + first_row,
        layout.weights + first_row,
    )  # fmt: skip
    scales = at(scale) if isinstance(scale, Tensor) else picked
    numbers = (
        n_rows, layout.n_rows, x.stride(0), n_cols, start, size, ignore_index or 0, layout.picks, layout.segments,
        1.0 if scaled == 2 else scale, 1.0 if softcap is None else softcap,
    )  # fmt: skip
    programs = -(-n_rows * layout.picks // BLOCK)
    vectors: tuple[Vector, ...] = (at(x), at(ids), picked if weight is None else at(weight), scales)
    vectors = (*vectors, moments, picked, spreads, weights, at(payload), at(header))
    on_its_device(x, run, vectors, numbers, programs)


def _of_header(layout: Layout, common: int) -> tuple[tuple[str, int], ...]:
    return (("COMMON", common), ("PADDED", power_of_two(max(common, 1))), ("HEAD", layout.head))


def merge_loss(
    gathered: Tensor, layout: Layout, target: Tensor, losses: Tensor, moments: Tensor, weights: Tensor | None,
    common: int, size: int, ignore_index: int, smoothing: float, z_loss: float,
) -> None:  # fmt: skip
    """Into losses, moments and weights: each row's, of gathered payloads (ranks, layout.length).

    common: numbers of the header that must be equal on all ranks; 0: they are not compared.
    """
    flags = (("WEIGHTED", weights is not None), ("SMOOTH", smoothing > 0.0), *_of_header(layout, common))
    run = prepare_flat(_merge_loss, (_F, _I, _F, _F, _F), flags, WARPS, gathered)
    at = pointer(gathered)
    vectors = (at(gathered), at(target), at(losses), at(moments), at(losses if weights is None else weights))
    numbers = (
        layout.n_rows, layout.length, size, ignore_index, gathered.shape[0], layout.segments, smoothing, z_loss
    )  # fmt: skip
    on_its_device(gathered, run, vectors, numbers, -(-layout.n_rows // BLOCK))


def merge_statistics(
    gathered: Tensor, layout: Layout, ids: Tensor | None, picked: Tensor | None, entropy: Tensor | None, lse: Tensor,
    moments: Tensor, infinite: bool, common: int, size: int,
) -> None:  # fmt: skip
    """Into picked, entropy, lse and moments, as `merge_loss`. infinite: a row with +inf keeps its infinite sum."""
    flags: Flags = (("PICKS", ids is not None), ("ENTROPY", entropy is not None), ("INFINITE", infinite))
    flags = (*flags, *_of_header(layout, common))
    run = prepare_flat(_merge_statistics, (_F, _I, _F, _F, _F, _F), flags, WARPS, gathered)
    at = pointer(gathered)
    vectors = tuple(at(lse if t is None else t) for t in (gathered, ids, picked, entropy, lse, moments))
    numbers = (layout.n_rows, layout.length, size, gathered.shape[0], layout.segments, layout.picks)
    on_its_device(gathered, run, vectors, numbers, -(-layout.n_rows // BLOCK))


def loss_factors(
    g: Tensor, target: Tensor, moments: Tensor, weights: Tensor | None, count: Tensor | None,
    weight_sum: Tensor | None, ignore_index: int, size: int, smoothing: float, z_loss: float,
) -> Tensor:  # fmt: skip
    """(n_rows, 3) float32: the factors of a loss's gradient for upstream g, of no dimensions or (n_rows,)."""
    n_rows, target, moments = target.shape[0], restored(target, _I), restored(moments, _F)
    factors = torch.empty((n_rows, 3), dtype=_F, device=target.device)
    g = g.to(_F)
    stride = 0 if g.dim() == 0 else g.stride(0)
    if stride > 1:
        g, stride = g.contiguous(), 1
    flags = (("MEAN", count is not None), ("WEIGHTED", weights is not None), ("SMOOTH", smoothing > 0.0))
    run = prepare_flat(_factors, (_F, _I, _F, _F, _F, _F, _F), flags, WARPS, target)
    at = pointer(target)
    of_rows = tuple(None if t is None else restored(t, _F) for t in (weights, count, weight_sum))
    given = (g, target, moments, *of_rows, factors)
    vectors = tuple(at(factors if t is None else t) for t in given)
    numbers = (n_rows, ignore_index, size, stride, smoothing, z_loss)
    on_its_device(target, run, vectors, numbers, -(-n_rows // BLOCK))
    return factors
