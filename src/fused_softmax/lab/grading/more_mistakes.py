"""The classic mistakes of the lessons from 11 on: several GPUs, gradients, cross-entropy, masks, another dimension."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from fused_softmax.lab.grading.formulas import padded, plain, power_of_two
from fused_softmax.lab.grading.mistakes import Mistake, Trials, raised
from fused_softmax.lab.grading.subjects import IGNORED


def over_gpus(x: Tensor, how: str, ranks: int = 4, tile: int = 512) -> Tensor:
    """Lesson 11's shards of a row, with a part of what they keep or of the merge left out."""
    maxima, sums = [], []
    for shard in x.float().tensor_split(ranks, 1):
        top, total = torch.full((len(x), 1), -math.inf), torch.zeros(len(x), 1)
        for part in shard.split(tile, 1) if shard.shape[1] else ():
            new = torch.maximum(top, part.amax(1, keepdim=True))
            shift = new if how == "tiles unguarded" else torch.where(new == -math.inf, 0.0, new)
            kept = total if how == "tiles not rescaled" else total * torch.exp(top - shift)
            total = kept + torch.exp(padded(part, tile, -math.inf) - shift).sum(1, keepdim=True)
            top = new
        maxima.append(top)
        sums.append(total)
    top, total = torch.stack(maxima), torch.stack(sums)
    shift = top[0] if how == "first" else top.amax(0)
    shift = torch.where(shift == -math.inf, 0.0, shift)
    row_sum = (total if how == "as they are" else total * torch.exp(top - shift)).sum(0)
    if how == "alone":
        parts = [torch.exp(s.float() - m) / t for s, m, t in zip(x.tensor_split(ranks, 1), maxima, sums, strict=True)]
        return torch.cat(parts, 1)
    return torch.exp(x.float() - shift) / row_sum


def gradient(dy: Tensor, y: Tensor, how: str) -> Tensor:
    """softmax's gradient with one of its parts wrong."""
    dy, y = dy.float(), y.float()
    product = (dy * y).sum(1, keepdim=True)
    return {
        "no sum": lambda: y * dy,
        "sum of dy": lambda: y * (dy - dy.sum(1, keepdim=True)),
        "of log_softmax": lambda: dy - y * dy.sum(1, keepdim=True),
        "outside": lambda: y * dy - product,
        "mean": lambda: y * (dy - product / y.shape[1]),
        "all rows": lambda: y * (dy - (dy * y).sum()),
    }[how]()


def loss(
    x: Tensor, target: Tensor, one: bool = True, skip: bool = True, divided: bool = True, of_rows: bool = False
) -> tuple[Tensor, Tensor]:
    """The mean loss and its gradient with parts left out."""
    x = x.float()
    counts, index = target != IGNORED, target.clamp(min=0)[:, None]
    z = x - x.amax(1, keepdim=True)
    total = z.exp().sum(1, keepdim=True)
    rows = (total.log() - z.gather(1, index))[:, 0]
    dx = z.exp() / total
    if one:
        dx.scatter_add_(1, index, torch.where(counts, -1.0, 0.0)[:, None])
    count = len(target) if of_rows else counts.sum()
    dx = dx / count if divided else dx
    return rows[counts].sum() / count, torch.where(counts[:, None], dx, 0.0) if skip else dx


def causal(x: Tensor, n_queries: int, shift: int = 0, how: str = "") -> Tensor:
    """The causal softmax with another rule, or with the mask in another place."""
    n_rows, n_cols = x.shape
    row = torch.arange(n_rows)
    visible = n_cols - n_queries + (row if how == "row" else row % n_queries) + 1 - shift
    if how == "upper left":
        visible = row % n_queries + 1
    hidden = torch.arange(n_cols) >= visible[:, None]
    if how in ("after", "nothing"):
        y = plain(x.float())
        return y if how == "nothing" else y.masked_fill(hidden, 0.0)
    if how == "zeros":  # hidden lanes, and those outside the row, are 0, not -inf
        return plain(padded(x.float().masked_fill(hidden, 0.0), power_of_two(n_cols), 0.0))[:, :n_cols]
    y = plain(x.float().masked_fill(hidden, -math.inf))
    return y.masked_fill(hidden, math.nan) if how == "unwritten" else y


def over_first(x: Tensor, how: str) -> Tensor:
    """Softmax over the first dimension, done wrongly."""
    if how == "pixels":
        n_classes, n_pixels = x.shape
        block = power_of_two(n_classes)
        inner = min(64, max(1, 16384 // block), power_of_two(n_pixels))
        parts = [plain(padded(part, inner, -math.inf))[:, : part.shape[1]] for part in x.float().split(inner, 1)]
        return torch.cat(parts, 1)
    if how == "tile":
        n_classes, n_pixels = x.shape
        inner = min(64, max(1, 16384 // power_of_two(n_classes)), power_of_two(n_pixels))
        return torch.cat([plain(part, (0, 1)) for part in x.float().split(inner, 1)], 1)
    zeros = power_of_two(x.shape[0]) - x.shape[0]
    return plain(torch.cat([x.float(), torch.zeros(zeros, x.shape[1])]), 0)[: x.shape[0]]


def chunk_of(x: Tensor) -> int:
    """The columns of a chunk of lesson 16's puzzle."""
    vec = 16 // x.element_size()
    warps = 4 if x.shape[1] <= 4096 else 16
    return vec * min(32 * warps, power_of_two(-(-x.shape[1] // vec)))


def chunked(x: Tensor, how: str) -> Tensor:
    """A row in chunks, with a part done wrongly."""
    n_cols, chunk = x.shape[1], chunk_of(x)
    if how == "rounded down":
        kept, y = min(n_cols, max(1, n_cols // chunk) * chunk), torch.full(x.shape, math.nan)
        y[:, :kept] = plain(x[:, :kept].float())
        return y
    if how == "zeros":
        return plain(padded(x, -(-n_cols // chunk) * chunk, 0.0))[:, :n_cols]
    x = x.float()
    parts = [padded(part, chunk, -math.inf) for part in x.split(chunk, 1)]
    if how == "first maximum":
        shift = parts[0].amax(1, keepdim=True)
        return torch.exp(x - shift) / sum(torch.exp(part - shift).sum(1, keepdim=True) for part in parts)
    total = sum(torch.exp(part - part.amax(1, keepdim=True)).sum(1, keepdim=True) for part in parts)
    return torch.exp(x - x.amax(1, keepdim=True)) / total


def _wasted_sectors(trials: Trials) -> bool:
    return any(t.uncoalesced for t in trials)


def _hidden_read(trials: Trials) -> bool:
    return not any(t.wrong or t.error for t in trials) and any(t.watched.reads > t.moves[0] for t in trials)


def _reads_twice(trials: Trials) -> bool:
    return _hidden_read(trials)


OF_NEW_LESSON: dict[int, tuple[Mistake, ...]] = {
    11: (
        Mistake(
            "the GPUs' sums are added as they are",
            "Each sum is below its own GPU's maximum. Multiply it by exp(m_r - m) first.",
            (functools.partial(over_gpus, how="as they are"),),
        ),
        Mistake(
            "each GPU normalizes by its own sum",
            "The row then sums to the number of GPUs. Divide by the merged sum.",
            (functools.partial(over_gpus, how="alone"),),
        ),
        Mistake(
            "the maximum is the first GPU's",
            "The merged maximum is that of all GPUs: maxima.amax(0).",
            (functools.partial(over_gpus, how="first"),),
        ),
        Mistake(
            "a tile does not rescale the running sum",
            "Within a GPU's columns, a tile that raises the maximum rescales the sum, as in lesson 07.",
            (functools.partial(over_gpus, how="tiles not rescaled"),),
        ),
        Mistake(
            "no guard for tiles of -inf",
            "As long as a GPU saw only -inf, -inf - -inf is NaN. Subtract 0 instead of a maximum of -inf.",
            (functools.partial(over_gpus, how="tiles unguarded"),),
        ),
    ),
    16: (
        Mistake(
            "the number of chunks is rounded down",
            "The columns after the last whole chunk are never read or written: use triton.cdiv.",
            (functools.partial(chunked, how="rounded down"),),
        ),
        Mistake(
            "there is no chunk",
            "A row shorter than a chunk is one chunk, and not none: use triton.cdiv.",
            shows=raised("index out of range"),
        ),
        Mistake(
            "each chunk's sum is below its own maximum",
            "The sums then have different units: take the maximum of all chunks first.",
            (functools.partial(chunked, how="own maximum"),),
        ),
        Mistake(
            "the maximum is the first chunk's",
            "Merge the chunks' maxima by tl.maximum, lane by lane.",
            (functools.partial(chunked, how="first maximum"),),
        ),
        Mistake(
            "masked lanes hold 0",
            "A masked load without `other` is undefined. Lanes outside the row must hold -inf.",
            (functools.partial(chunked, how="zeros"),),
        ),
    ),
    12: (
        Mistake(
            "the row's sum is left out",
            "dx = y * (dy - s): each y depends on all x of its row, and s = sum(dy * y) is their part.",
            (functools.partial(gradient, how="no sum"),),
        ),
        Mistake(
            "the sum of dy, not of dy * y",
            "s is the sum of dy * y. The sum of dy belongs to log_softmax's gradient.",
            (functools.partial(gradient, how="sum of dy"), functools.partial(gradient, how="of log_softmax")),
        ),
        Mistake(
            "the sum is subtracted outside of the product",
            "It is y * (dy - s), and not y * dy - s.",
            (functools.partial(gradient, how="outside"),),
        ),
        Mistake(
            "the mean in place of the sum",
            "s is a sum: do not divide it by n_cols.",
            (functools.partial(gradient, how="mean"),),
        ),
        Mistake("one sum for all rows", "Each row has its own sum.", (functools.partial(gradient, how="all rows"),)),
    ),
    13: (
        Mistake(
            "1 is not subtracted at the target",
            "The gradient is softmax(x) - onehot(target): subtract 1 where the column is the target.",
            (functools.partial(loss, one=False),),
        ),
        Mistake(
            "the gradient is not divided by the count",
            "The loss is a mean, so each row's gradient is divided by the number of rows that count.",
            (functools.partial(loss, divided=False),),
        ),
        Mistake(
            "rows that do not count have a gradient",
            "A row whose target is -100 has no loss. Its gradient is 0 in every column, and is written.",
            (functools.partial(loss, skip=False),),
        ),
        Mistake(
            "the mean is over all rows",
            "Divide by the number of rows whose target is not -100.",
            (functools.partial(loss, of_rows=True),),
        ),
        Mistake(
            "the row is read again",
            "The row is on chip when its sum is known: take the gradient and the target's logit from there.",
            shows=_reads_twice,
        ),
    ),
    14: (
        Mistake(
            "a query does not see itself",
            "Query q sees q + 1 columns: the rule is j <= q. With j < q the first row is empty, and NaN.",
            (functools.partial(causal, shift=1),),
        ),
        Mistake(
            "a query sees one column too many",
            "Query q sees no column after its own: the rule is j <= q.",
            (functools.partial(causal, shift=-1),),
        ),
        Mistake(
            "the mask comes after the softmax",
            "The visible columns must sum to 1: hide the others before the maximum and the sum.",
            (functools.partial(causal, how="after"),),
        ),
        Mistake("no column is hidden", "Columns from `visible` on are 0.", (functools.partial(causal, how="nothing"),)),
        Mistake(
            "hidden scores are 0, not -inf",
            "exp(0 - max) counts in the sum. Hidden lanes hold -inf: their exponential is 0.",
            (functools.partial(causal, how="zeros"),),
        ),
        Mistake(
            "hidden columns are not written",
            "The load is masked by what is visible, and the store by n_cols: hidden columns of the result are 0.",
            (functools.partial(causal, how="unwritten"),),
        ),
        Mistake(
            "the row is taken for the query",
            "Several heads share the rows: the query is row % n_queries.",
            (functools.partial(causal, how="row"),),
        ),
        Mistake(
            "hidden columns are read",
            "The results are right. Mask the load by what is visible: half of the bytes need not be read.",
            shows=_hidden_read,
        ),
    ),
    15: (
        Mistake(
            "the loads are not coalesced",
            "Every result is right, and most of each 32-byte sector is wasted. Let a program take neighboring pixels.",
            shows=_wasted_sectors,
        ),
        Mistake(
            "the tile is reduced along its pixels",
            "Classes lie along axis 0 of the tile: each pixel has its own maximum and its own sum.",
            (functools.partial(over_first, how="pixels"),),
        ),
        Mistake(
            "the whole tile is reduced",
            "Without an axis all pixels of the tile share one sum. Reduce along axis 0.",
            (functools.partial(over_first, how="tile"),),
        ),
        Mistake(
            "masked lanes hold 0",
            "A masked load without `other` is undefined. Lanes outside must hold -inf.",
            (functools.partial(over_first, how="zeros"),),
        ),
    ),
}
