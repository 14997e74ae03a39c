"""What the classic mistakes of lessons 01 to 10 compute, from x (n_rows, n_cols), in float32."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

NAN = math.nan
TILE = 2048  # columns of a tile of lessons 06 and 07


def power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def padded(x: Tensor, lanes: int, value: float) -> Tensor:
    """x as float32 with `lanes` columns, the new ones filled."""
    return torch.nn.functional.pad(x.float(), (0, lanes - x.shape[1]), value=value)


def plain(x: Tensor, axis: int | tuple[int, ...] = 1) -> Tensor:
    """softmax over `axis`, as the kernels compute it."""
    numerator = torch.exp(x - x.amax(axis, keepdim=True))
    return numerator / numerator.sum(axis, keepdim=True)


def filled(value: float, lanes: Callable[[int], int] = power_of_two) -> Callable[[Tensor], Tensor]:
    """softmax of rows whose masked lanes hold `value`."""
    return lambda x: plain(padded(x, lanes(x.shape[1]), value))[:, : x.shape[1]]


def tiles(n_cols: int) -> int:
    return -(-n_cols // TILE) * TILE


# --- formulas that several lessons share ------------------------------------------------------------------------------


def no_maximum(x: Tensor) -> Tensor:
    numerator = torch.exp(x.float())
    return numerator / numerator.sum(1, keepdim=True)


def no_maximum_rounded(x: Tensor) -> Tensor:
    numerator = torch.exp(x)
    return numerator / numerator.sum(1, keepdim=True)


def not_divided(x: Tensor) -> Tensor:
    return torch.exp(x.float() - x.float().amax(1, keepdim=True))


def logarithm(x: Tensor) -> Tensor:
    return torch.log_softmax(x.float(), 1)


def maximum_of_all(x: Tensor) -> Tensor:
    numerator = torch.exp(x.float() - x.float().max())
    return numerator / numerator.sum(1, keepdim=True)


def over_rows(x: Tensor) -> Tensor:
    """The maximum of each row, and the sum over the wrong dimension."""
    numerator = torch.exp(x.float() - x.float().amax(1, keepdim=True))
    return numerator / numerator.sum(0, keepdim=True)


def first_columns(covered: Callable[[int], int]) -> Callable[[Tensor], Tensor]:
    """softmax of the columns that are covered; the others are not written."""

    def gives(x: Tensor) -> Tensor:
        y, n = torch.full(x.shape, NAN), covered(x.shape[1])
        if n:
            y[:, :n] = plain(x[:, :n].float())
        return y

    return gives


def first_rows(kept: Callable[[int], int]) -> Callable[[Tensor], Tensor]:
    """softmax of the first rows; the others are not written."""

    def gives(x: Tensor) -> Tensor:
        y = plain(x.float())
        y[kept(x.shape[0]) :] = NAN
        return y

    return gives


# --- of one lesson ----------------------------------------------------------------------------------------------------


def one_axis(axis: int) -> Callable[[Tensor], Tensor]:
    """Lesson 05's block [128, VEC], reduced over one of its axes."""

    def gives(x: Tensor) -> Tensor:
        vec = power_of_two(-(-x.shape[1] // 128))
        block = padded(x, 128 * vec, -math.inf).view(-1, 128, vec)
        return plain(block, axis).flatten(1)[:, : x.shape[1]]

    return gives


def below_tile_maximum(x: Tensor) -> Tensor:
    x = x.float()
    parts = [padded(part, TILE, -math.inf) for part in x.split(TILE, 1)]
    total = sum(torch.exp(part - part.amax(1, keepdim=True)).sum(1, keepdim=True) for part in parts)
    return torch.exp(x - x.amax(1, keepdim=True)) / total


def last_maximum(x: Tensor) -> Tensor:
    """The maximum is overwritten by each tile's."""
    x = x.float()
    shift = x.split(TILE, 1)[-1].amax(1, keepdim=True)
    numerator = torch.exp(x - shift)
    return numerator / numerator.sum(1, keepdim=True)


def online(x: Tensor, rescale: bool = True, guard: bool = True, first: float = -math.inf) -> Tensor:
    x = x.float()
    row_max, total = torch.full((x.shape[0], 1), first), torch.zeros(x.shape[0], 1)
    shift = row_max
    for part in x.split(TILE, 1):
        new = torch.maximum(row_max, part.amax(1, keepdim=True))
        shift = torch.where(new == -math.inf, 0.0, new) if guard else new
        if rescale:
            total = total * torch.exp(row_max - shift)
        # a partial tile without a guard has -inf - -inf in its masked lanes, too
        total = total + torch.exp(padded(part, TILE, -math.inf) - shift).sum(1, keepdim=True)
        row_max = new
    return torch.exp(x - shift) / total


def tile_of_rows(axis: int | tuple[int, int]) -> Callable[[Tensor], Tensor]:
    """Lesson 08's tile [ROWS, BLOCK_N], reduced over `axis` of (tile, row, column)."""

    def gives(x: Tensor) -> Tensor:
        n_rows, n_cols = x.shape
        block = power_of_two(n_cols)
        rows = max(1, 4096 // block)
        count = -(-n_rows // rows) * rows
        whole = torch.full((count, block), -math.inf)
        whole[:n_rows, :n_cols] = x.float()
        return plain(whole.view(-1, rows, block), axis).flatten(0, 1)[:n_rows, :n_cols]

    return gives


def lines(x: Tensor, how: str) -> Tensor:
    """Lesson 09's lines [rows, CTAS, BLOCK] with a part of the merge left out."""
    n_cols = x.shape[1]
    ctas = min(max(2, power_of_two(-(-n_cols // 8192))), 16)
    block = max(128, power_of_two(-(-n_cols // ctas)))
    line = padded(x, ctas * block, -math.inf).view(-1, ctas, block)
    top = line.amax(2, keepdim=True)
    top = top if how == "not floored" else top.clamp(min=torch.finfo(torch.float32).min)
    numerator = torch.exp(line - top)
    sums, row_max = numerator.sum(2, keepdim=True), top.amax(1, keepdim=True)
    total = (sums * torch.exp(top - row_max)).sum(1, keepdim=True)
    y = {
        "unmerged": lambda: numerator / sums,
        "numerators": lambda: numerator / total,
        "sums": lambda: numerator * torch.exp(top - row_max) / sums.sum(1, keepdim=True),
        "neither": lambda: numerator / sums.sum(1, keepdim=True),
        "not floored": lambda: torch.where(total.isnan(), NAN, numerator * torch.exp(top - row_max) / total),
    }[how]()
    return y.flatten(1)[:, :n_cols]


def unaligned(x: Tensor, how: str) -> Tensor:
    """Lesson 10's rows in head, body and tail, with a part left out or lanes that hold 0."""
    n_rows, n_cols = x.shape
    vec = 16 // x.element_size()
    lanes = vec * power_of_two(-(-n_cols // vec))
    y = torch.full(x.shape, NAN)
    for i, row in enumerate(x.float()):
        head = min((vec - i * n_cols % vec) % vec, n_cols)
        body = (n_cols - head) // vec * vec
        inside = slice(head, head + body)
        zeros = {"zeros": lanes - body + 2 * vec - (n_cols - body), "zeros in body": lanes - body}
        zeros["zeros in ends"] = 2 * vec - (n_cols - body)
        if how in zeros:
            y[i] = plain(torch.cat([row, row.new_zeros(zeros[how])]), 0)[:n_cols]
        elif body:
            numerator = torch.exp(row - row[inside].max())
            total = numerator[inside].sum()
            y[i, inside] = numerator[inside] / total
            if how == "ends not summed":
                y[i] = numerator / total
    return y
