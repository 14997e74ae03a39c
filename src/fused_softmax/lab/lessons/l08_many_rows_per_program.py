"""08. Many rows per program: a tile of rows for narrow widths.

Problem
    A row of 256 bfloat16 columns is 512 bytes. A program for each row (lesson 03) has 128 threads for 256 columns and
    two reductions over all of them. It ends before its loads have filled the memory pipeline. On an H200 such a
    kernel reaches 0.40 of the copy, and 0.94 at 1,024 columns (higher is better).

Mechanism
    A program takes a tile of ROWS x BLOCK_N elements and reduces along axis 1, row by row. All loads of the tile are
    in flight together. If a row lies within one warp its reductions are shuffles: no shared memory, no barrier. Rows
    past the last row are masked like columns past the last column. They hold -inf, give NaN, and are not stored.

Resource trade-off
    ROWS costs registers and programs. A tile of 4,096 elements is 32 values for each thread with 4 warps. A batch
    with fewer rows than ROWS * 132 leaves multiprocessors of an H200 idle. Above 4,096 columns ROWS is 1, and this is
    lesson 03 again. ROWS follows from the width alone, so a row's result does not depend on its batch.

Common failure mode
    A reduction of the tile instead of the row (a missing axis). Every row is then divided by the sum over all ROWS. A
    test with one row hides this.

Measurement
    Narrow rows, next to one row per program:
    $ fused-softmax bench --systems 03_driver,08_many_rows --widths 128,256,1000,4096
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_softmax.launch.compile import Launch

SYSTEM = "08_many_rows"
TILE = 4096  # elements of a program: 32 a thread at 4 warps
MAX_BLOCK = 2**20  # triton's limit on the elements of a block


@triton.jit
def many_rows_kernel(y_ptr, x_ptr, n_rows, n_cols, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, ROW_BY_ROW: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    cols = tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    mask = (rows < n_rows) & (cols < n_cols)
    x = tl.load(x_ptr + rows * n_cols + cols, mask=mask, other=-float("inf")).to(tl.float32)  # [ROWS, BLOCK_N]
    if ROW_BY_ROW:
        numerator = tl.exp(x - tl.max(x, axis=1)[:, None])
        denominator = tl.sum(numerator, axis=1)[:, None]  # [ROWS, 1]
    else:
        # the mistake, as code: no axis reduces the whole tile
        numerator = tl.exp(x - tl.max(x))
        denominator = tl.sum(numerator)
    tl.store(y_ptr + rows * n_cols + cols, numerator / denominator, mask=mask)


def launches(x: Tensor, y: Tensor, row_by_row: bool = True) -> list[Launch]:
    """One launch for contiguous x, y (n_rows, n_cols); ValueError above 2^20 columns."""
    n_rows, n_cols = x.shape
    if n_cols > MAX_BLOCK:
        raise ValueError(f"a row of {n_cols} columns does not fit one block: at most {MAX_BLOCK}")
    if not x.numel():
        return []
    block_n = triton.next_power_of_2(n_cols)
    rows = max(1, TILE // block_n)
    num_warps = 4 if block_n <= TILE else 16
    meta = {"ROWS": rows, "BLOCK_N": block_n, "ROW_BY_ROW": row_by_row, "num_warps": num_warps}
    return [Launch(many_rows_kernel, (triton.cdiv(n_rows, rows),), (y, x, n_rows, n_cols), meta)]


def softmax(x: Tensor) -> Tensor:
    """Softmax of the rows of x (n_rows, n_cols), float16, bfloat16 or float32; ValueError above 2^20 columns."""
    x = x.contiguous()
    y = torch.empty_like(x)
    for launch in launches(x, y):
        launch()
    return y


def whole_tile(x: Tensor) -> Tensor:
    """Maximum and sum over the whole tile, all its rows together."""
    y = torch.full_like(x, math.nan)
    for launch in launches(x, y, row_by_row=False):
        launch()
    return y


MISTAKES: dict[str, Callable[[Tensor], Tensor]] = {"the whole tile is reduced": whole_tile}

if __name__ == "__main__":
    from fused_softmax.lab.lessons import run

    run(8)
