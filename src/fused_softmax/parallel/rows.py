"""What a rank reads of its own columns: each row's numbers, in one read, as the payload of a collective.

The kernels are those of the one-GPU ops, which write into the payload, and one that packs what belongs to targets. A
target in another rank's columns adds nothing here. Where there are no kernels, or one does not compile, `formulas` has
the same in PyTorch. The operators stand for both in a graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..launch import cross_entropy as losses
from ..launch import row_statistics, vocab_shards
from ..launch.availability import KernelUnavailable
from ..launch.context import as_in_forward
from ..launch.layout import places, rows_of
from ..launch.options import CrossEntropy, weight_facts_of
from ..launch.payload import Layout
from ..torch_ops.arguments import LossOptions
from ..torch_ops.decompositions import result_dtype
from ..torch_ops.library import define, not_differentiable
from ..torch_ops.route import is_supported
from . import formulas
from .agreement import header_tensor
from .payload import layout_of, parts_of
from .shards import Shard, canonical

COUNTS, IGNORED = 0, -1  # targets of a smoothed loss's kernel: the first column, or none


class Columns(NamedTuple):
    """Which columns of `size` x has: those from `start` on, in `segments` equal pieces, each read as a row."""

    start: int
    size: int
    segments: int
    invariant: bool

    def pieces(self, width: int) -> Iterator[slice]:
        each = width // self.segments
        return (slice(i * each, (i + 1) * each) for i in range(self.segments))


# --- losses -----------------------------------------------------------------------------------------------------------


def write_loss(
    payload: Tensor, layout: Layout, first_row: int, header: Tensor, x: Tensor, target: Tensor, weight: Tensor | None,
    at: Columns, options: LossOptions,
) -> None:  # fmt: skip
    """Into a payload, from its row `first_row` on, what a rank adds to a loss of rows x. target: of all columns.

    Moments; the logits of targets; the sums of w*(lse - z) over each segment, where smoothing takes them; the weights
    of targets, where there are weights. Every op's payload is as long, so that ranks that call different ones meet in
    one collective. A target outside is an IndexError, and on a GPU a device assertion.
    """
    if is_supported(x):
        try:
            _write_loss(payload, layout, first_row, header, x, target, weight, at, options)
            return
        except KernelUnavailable:
            pass
    payload[: layout.head].copy_(header)
    part, rows, width = parts_of(payload, layout), slice(first_row, first_row + x.shape[0]), x.shape[1]
    for i, columns in enumerate(at.pieces(width)):
        of_piece = None if weight is None else weight[columns]
        found, extra = formulas.smoothed(
            canonical(x[:, columns], at.invariant), of_piece, options.softcap, options.label_smoothing > 0.0
        )
        part.moments[i, rows] = found
        if options.label_smoothing:  # -inf only: each term is infinite. No columns: there are no terms
            part.spreads[i, rows] = torch.where(found[:, 1] == 0.0, float("inf") if width else 0.0, extra)
    counts = target != options.ignore_index
    if at.size:  # torch.gather knows whether a target is inside
        payload.new_zeros(1).expand(at.size).gather(0, torch.where(counts, target, 0))
    local = formulas.local_ids(target, at.start, width).masked_fill(~counts, -1)
    part.picked[rows] = formulas.picked(x, local.unsqueeze(1), 1.0, options.softcap)
    if weight is not None:
        part.weights[rows] = torch.where(local >= 0, weight[local.clamp(min=0)], 0.0) if width else 0.0


def _write_loss(
    payload: Tensor, layout: Layout, first_row: int, header: Tensor, x: Tensor, target: Tensor, weight: Tensor | None,
    at: Columns, options: LossOptions,
) -> None:  # fmt: skip
    n_rows, smooth = x.shape[0], options.label_smoothing > 0.0
    for i, columns in enumerate(at.pieces(x.shape[1])):
        piece, row = canonical(x[:, columns], at.invariant), i * layout.n_rows + first_row
        moments, spreads, unused = places(
            payload, layout.head + 2 * row, layout.spreads + row, layout.picked + first_row
        )
        rows = rows_of(piece, piece.shape[1])
        if not smooth and options.softcap is None:
            row_statistics.write_statistics(rows, (unused, moments, None), None, 1.0, at.invariant)
            continue
        of_piece = weight[columns] if smooth and weight is not None else None
        facts = weight_facts_of(of_piece, options.label_smoothing)
        targets = torch.full((n_rows,), COUNTS if smooth else IGNORED, dtype=torch.int64, device=x.device)
        loss = CrossEntropy(targets, of_piece, facts, IGNORED, "none", float(smooth), options.softcap, 0.0)
        with as_in_forward(at.invariant):
            losses.write_losses(rows, loss, spreads, moments)
    vocab_shards.pack_shard(
        x, payload, layout, first_row, header, target, weight, 1.0, at.start, at.size, options.ignore_index, smooth,
        options.softcap,
    )  # fmt: skip


def write_sums(payload: Tensor, layout: Layout, weight: Tensor | None, width: int) -> None:
    """Into a payload each segment's sum of weights; without weights the header has their numbers of columns."""
    if weight is not None and width:
        # one sum for each segment: the order of a sum over several rows depends on their number
        parts = weight.to(payload.dtype).split(width // layout.segments)
        payload[layout.header : layout.head] = torch.stack([part.sum() for part in parts])


def _read_loss(
    x: Tensor, target: Tensor, weight: Tensor | None, words: Sequence[int], start: int, size: int, segments: int,
    invariant: bool, ignore_index: int, label_smoothing: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    dtype = result_dtype(x)
    layout = layout_of(dtype, x.shape[0], segments)
    payload = torch.empty(layout.length, dtype=dtype, device=x.device)
    options = LossOptions(ignore_index, "none", label_smoothing, softcap, 0.0)
    at = Columns(start, size, segments, invariant)
    x = rows_of(x, x.shape[1]) if x.numel() else x
    write_loss(payload, layout, 0, header_tensor(words, segments, payload), x, target, weight, at, options)
    if label_smoothing:
        write_sums(payload, layout, weight, x.shape[1])
    return payload


_read_loss_operator = define(
    "parallel_read_loss(Tensor x, Tensor target, Tensor? weight, SymInt[] words, SymInt start, SymInt size, "
    "int segments, bool invariant, int ignore_index, float label_smoothing, float? softcap) -> Tensor",
    _read_loss,
    lambda x, target, weight, words, start, size, segments, *rest: x.new_empty(
        layout_of(result_dtype(x), x.shape[0], segments).length, dtype=result_dtype(x)
    ),
)
not_differentiable("parallel_read_loss")


def read_loss(
    x: Tensor, target: Tensor, weight: Tensor | None, words: Sequence[int], shard: Shard, options: LossOptions
) -> Tensor:
    """The payload of a loss of rows x, (n_rows, width), as `write_loss` says."""
    read = _read_loss_operator if torch.compiler.is_compiling() else _read_loss
    return read(
        x, target, weight, words, shard.start, shard.size, shard.segments, shard.invariant, options.ignore_index,
        options.label_smoothing, options.softcap,
    )  # fmt: skip


# --- statistics -------------------------------------------------------------------------------------------------------


def _read_statistics(
    x: Tensor, ids: Tensor | None, scales: Tensor | None, scale: float, words: Sequence[int], start: int, size: int,
    segments: int, invariant: bool, entropy: bool,
) -> Tensor:  # fmt: skip
    dtype, by = result_dtype(x), scale if scales is None else scales.contiguous()
    layout = layout_of(dtype, x.shape[0], segments, 1 if ids is None else ids.shape[1])
    payload = torch.empty(layout.length, dtype=dtype, device=x.device)
    header, at = header_tensor(words, segments, payload), Columns(start, size, segments, invariant)
    x = rows_of(x, x.shape[1]) if x.numel() else x
    if is_supported(x):
        try:
            _write_statistics(payload, layout, header, x, ids, by, at, entropy)
            return payload
        except KernelUnavailable:
            pass
    payload[: layout.head].copy_(header)
    part = parts_of(payload, layout)
    for i, columns in enumerate(at.pieces(x.shape[1])):
        found, entropies = formulas.statistics(canonical(x[:, columns], invariant), by, entropy)
        part.moments[i] = found
        if entropy:
            part.spreads[i] = entropies
    if ids is not None and ids.numel():
        part.picked.copy_(formulas.picked(x, formulas.local_ids(ids, start, x.shape[1]), by, None))
    return payload


def _write_statistics(
    payload: Tensor, layout: Layout, header: Tensor, x: Tensor, ids: Tensor | None, by: float | Tensor, at: Columns,
    entropy: bool,
) -> None:  # fmt: skip
    for i, columns in enumerate(at.pieces(x.shape[1])):
        piece, row = canonical(x[:, columns], at.invariant), i * layout.n_rows
        moments, entropies, unused = places(payload, layout.head + 2 * row, layout.spreads + row, layout.picked)
        into = unused, moments, entropies if entropy else None
        row_statistics.write_statistics(rows_of(piece, piece.shape[1]), into, None, by, at.invariant)
    if ids is None or not ids.numel():
        payload[: layout.head].copy_(header)
    else:
        vocab_shards.pack_shard(
            x, payload, layout, 0, header, ids.contiguous(), None, by, at.start, at.size, None, False, None
        )


_read_statistics_operator = define(
    "parallel_read_statistics(Tensor x, Tensor? ids, Tensor? scales, float scale, SymInt[] words, SymInt start, "
    "SymInt size, int segments, bool invariant, bool entropy) -> Tensor",
    _read_statistics,
    lambda x, ids, scales, scale, words, start, size, segments, *rest: x.new_empty(
        layout_of(result_dtype(x), x.shape[0], segments, 1 if ids is None else ids.shape[1]).length,
        dtype=result_dtype(x),
    ),
)
not_differentiable("parallel_read_statistics")


def read_statistics(
    x: Tensor, ids: Tensor | None, scale: float | Tensor, words: Sequence[int], shard: Shard, entropy: bool
) -> Tensor:
    """The payload of statistics of rows x*scale: moments, the logits of ids (n_rows, picks), and each segment's own
    entropy where there is `entropy`."""
    read = _read_statistics_operator if torch.compiler.is_compiling() else _read_statistics
    scales, number = (scale, 1.0) if isinstance(scale, Tensor) else (None, scale)
    return read(
        x, ids, scales, number, words, shard.start, shard.size, shard.segments, shard.invariant, entropy
    )  # fmt: skip
