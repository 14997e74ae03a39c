"""06. Three-pass tiles: any width, at three reads of the row.

Problem
    From some width on a row no longer fits one block. It spills (lesson 02), the launch fails (lesson 04), or the
    width exceeds Triton's largest block. Vocabularies are 32,000 to 262,144 columns wide.

Mechanism
    One program reads its row in tiles, three times: for the maximum, for the sum of exponentials below that maximum,
    and for the quotient, which it stores. Each lane keeps its own maximum or sum, which are reduced once at the end
    of a pass. In effect only the last tile is masked, and its idle lanes hold -inf. A tile of -inf alone is harmless,
    because the maximum is the whole row's when an exponential is computed. A row of -inf alone is NaN.

Resource trade-off
    Traffic replaces registers: one tile and one accumulator are held for every width, and the row is read three
    times. The second and third read may come from L2 if the row is still there. For that all programs' rows together
    must fit L2. 132 multiprocessors with several rows of 131,072 columns each exceed its 60 MB.

Common failure mode
    The use of a tile's own maximum instead of the row's. The tiles' sums then have different units, and the row does
    not sum to 1. This stays hidden if the row fits one tile, or if its maximum is in every tile.

Measurement
    Three reads and lesson 07's two, as fractions of the measured copy, from the width at which a row exceeds one
    block:
    $ fused-softmax bench --systems 06_three_pass,07_online --widths 4096,50257,131072,262144
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_softmax.launch.compile import Launch

SYSTEM = "06_three_pass"
BLOCK = 2048  # 8 columns (16 bytes of bfloat16) for each of 256 threads


@triton.jit
def three_pass_kernel(y_ptr, x_ptr, n_cols, BLOCK: tl.constexpr, WHOLE_ROW_MAX: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * n_cols
    y_ptr += row * n_cols
    lanes = tl.arange(0, BLOCK)

    lane_max = tl.full((BLOCK,), -float("inf"), tl.float32)
    for start in range(0, n_cols, BLOCK):
        x = tl.load(x_ptr + start + lanes, mask=start + lanes < n_cols, other=-float("inf")).to(tl.float32)
        lane_max = tl.maximum(lane_max, x)
    row_max = tl.max(lane_max, axis=0)

    lane_sum = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n_cols, BLOCK):
        x = tl.load(x_ptr + start + lanes, mask=start + lanes < n_cols, other=-float("inf")).to(tl.float32)
        # the mistake, as code: a tile's sum taken below the tile's own maximum
        shift = row_max if WHOLE_ROW_MAX else tl.max(x, axis=0)
        lane_sum += tl.exp(x - shift)
    row_sum = tl.sum(lane_sum, axis=0)

    for start in range(0, n_cols, BLOCK):
        mask = start + lanes < n_cols
        x = tl.load(x_ptr + start + lanes, mask=mask, other=-float("inf")).to(tl.float32)
        tl.store(y_ptr + start + lanes, tl.exp(x - row_max) / row_sum, mask=mask)


def launches(x: Tensor, y: Tensor, whole_row_max: bool = True) -> list[Launch]:
    """One launch for contiguous x, y (n_rows, n_cols) of any width."""
    n_rows, n_cols = x.shape
    if not x.numel():
        return []
    meta = {"BLOCK": BLOCK, "WHOLE_ROW_MAX": whole_row_max, "num_warps": 8}
    return [Launch(three_pass_kernel, (n_rows,), (y, x, n_cols), meta)]


def softmax(x: Tensor) -> Tensor:
    """Softmax of the rows of x (n_rows, n_cols), float16, bfloat16 or float32, of any width."""
    x = x.contiguous()
    y = torch.empty_like(x)
    for launch in launches(x, y):
        launch()
    return y


def tile_max(x: Tensor) -> Tensor:
    """The sum of exponentials with each tile below its own maximum."""
    y = torch.full_like(x, math.nan)
    for launch in launches(x, y, whole_row_max=False):
        launch()
    return y


MISTAKES: dict[str, Callable[[Tensor], Tensor]] = {"each tile's sum is below its own maximum": tile_max}

if __name__ == "__main__":
    from fused_softmax.lab.lessons import run

    run(6)
