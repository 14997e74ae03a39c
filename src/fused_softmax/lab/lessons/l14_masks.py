"""14. Masks: hidden columns are not read.

Problem
    In attention a query may see only the keys up to its own place. PyTorch adds a tensor of 0 and -inf to the scores,
    or fills them, and then calls softmax. That is one more tensor to read, or one more pass. Half of the scores that
    are read do not count.

Mechanism
    The causal mask is a rule, not data: column j of query q is visible if j <= q. A program knows q from its row, so it
    makes the mask itself. It loads up to the last visible column, where visible = offset + q + 1, and hidden lanes
    hold -inf, as the lanes outside the row do. The load ends at a multiple of 8 columns, so the columns between are
    loaded, and hidden in registers. The store is wider than the load: hidden columns of the result are 0,
    and must be written. The offset lets the last query see all keys: with fewer queries than keys, as in decoding, the
    queries are the last ones. A mask that is data, such as padding, is loaded as bytes next to the scores.

Resource trade-off
    Of square scores only half is read: 0.5MN + MN elements move instead of 2MN. Rows have different lengths, so
    programs end at different times. The GPU starts another one in the place of each, and nothing waits. Every row
    still pays for the whole block's lanes: half of the exponentials are of hidden columns. `visible` is no multiple of
    8. With it as the load's limit the compiler loads element by element, 2 bytes at a time: 31 instructions for each
    element, so that arithmetic binds (`fused-softmax explain --system 14_masks` counts them). Whole groups of 8 columns
    are one load of 16 bytes. They cost no more memory, because memory moves whole sectors of 32 bytes. On an H200 and
    4,096 columns this took the kernel from 0.55 of the speed of its floor to 0.87 (higher is better). The rest are the
    hidden lanes' arithmetic and the barriers of the reductions. The shipped kernel's row has chunks, and it reaches
    0.97.

Common failure mode
    An error of one: with j < q a query does not see itself, and the first row is empty, which is NaN. The other failure
    is a mask after the softmax: the hidden probabilities become 0, but the visible ones sum to less than 1. It looks
    right in a plot. The third is a result whose hidden columns were never written.

Measurement
    The shipped kernel next to PyTorch's masked_fill and softmax, as fractions of the copy (higher is better):
    $ fused-softmax bench --op masked_softmax_causal --systems fused_softmax,torch --widths 1024,4096
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_softmax.lab.grading.subjects import Subject, exact_causal, scores, seen
from fused_softmax.lab.traffic import Traffic
from fused_softmax.launch.compile import Launch

SYSTEM = "14_masks"
MAX_BLOCK = 2**20  # triton's limit on the elements of a block


@triton.jit
def causal_kernel(y_ptr, x_ptr, n_cols, n_queries, BLOCK: tl.constexpr, SHIFT: tl.constexpr, AFTER: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    # query q sees the columns up to its own; SHIFT is the mistake of one
    visible = (n_cols - n_queries + row % n_queries + 1 - SHIFT).to(tl.int32)
    hidden = cols >= visible
    # whole groups of 8 are loaded, up to the last visible column's: the compiler sees that the limit is a multiple of 8
    needed = (visible + 7) // 8 * 8
    # the mistake AFTER, as code: the softmax of the whole row, masked at its end
    loaded = cols < n_cols if AFTER else (cols < needed) & (cols < n_cols)
    x = tl.load(x_ptr + row * n_cols + cols, mask=loaded, other=-float("inf")).to(tl.float32)  # [BLOCK]
    if not AFTER:
        x = tl.where(hidden, -float("inf"), x)  # the group's other columns are hidden in registers
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator * (1.0 / tl.sum(numerator, axis=0))
    if AFTER:
        y = tl.where(hidden, 0.0, y)
    tl.store(y_ptr + row * n_cols + cols, y, mask=cols < n_cols)


def launches(x: Tensor, n_queries: int, y: Tensor, shift: int = 0, after: bool = False) -> list[Launch]:
    """One launch for contiguous x, y (n_rows, n_cols); row r is query r % n_queries of at most n_cols queries."""
    n_rows, n_cols = x.shape
    if n_cols > MAX_BLOCK:
        raise ValueError(f"a row of {n_cols} columns does not fit one block: at most {MAX_BLOCK}")
    if not x.numel():
        return []
    block = triton.next_power_of_2(n_cols)
    meta: dict[str, Any] = {"BLOCK": block, "SHIFT": shift, "AFTER": after}
    meta["num_warps"] = 32 if block > 16384 else 8 if block > 4096 else 4
    return [Launch(causal_kernel, (n_rows,), (y, x, n_cols, n_queries), meta)]


def launches_for(x: Tensor) -> list[Launch]:
    """The launch for rows like x: to be compiled, not to be run."""
    return launches(x, 64, torch.empty_like(x))


def causal_softmax(x: Tensor, n_queries: int) -> Tensor:
    """Softmax of scores x (n_rows, n_cols), row r of which is query r % n_queries; hidden columns are 0."""
    x = x.contiguous()
    y = torch.empty_like(x)
    for launch in launches(x, n_queries, y):
        launch()
    return y


def wrongly(x: Tensor, n_queries: int, **how: Any) -> Tensor:
    """The same kernel with one of its mistakes."""
    y = torch.full_like(x, math.nan)
    for launch in launches(x.contiguous(), n_queries, y, **how):
        launch()
    return y


def moves(n_rows: int, n_cols: int) -> Traffic:
    """Visible columns are read, in whole groups of 8; all are written."""
    return Traffic(sum(min(n_cols, -(-n // 8) * 8) for n in seen(n_rows, n_cols)), n_rows * n_cols)


SUBJECT = Subject("causal_softmax", moves, scores, exact_causal, timed=(65536, 4096))
MISTAKES: dict[str, Callable[..., Tensor]] = {
    "a query does not see itself": functools.partial(wrongly, shift=1),
    "the mask comes after the softmax": functools.partial(wrongly, after=True),
}

if __name__ == "__main__":
    from fused_softmax.lab.lessons import run

    run(14)
