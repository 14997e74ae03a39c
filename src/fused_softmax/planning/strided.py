"""Plans of rows whose elements or starts are not neighbors in memory: the strided kernel's, or a copy first.

docs/measurements/thresholds.md has the figures behind the thresholds.
"""

from __future__ import annotations

from typing import NamedTuple

from .types import Plan, power_of_two

# elements of a tile, and of a thread in it: addresses cost as much as 10 elements
TILE, SHORT_TILE, WIDE_TILE, THREAD_ELEMENTS = 1024, 512, 4096, 32
LEAST_ROWS = 16  # of a tile, so that 32 bytes or more of each column are read
STEP = 256  # columns of a step
# columns of one row are neighbors, and of another: up to 512 in one step are faster than in two
LONG_STEP = 512
LEAST_TILE = 256  # elements that exist of a tile, or a copy is faster
# columns for each neighbor, at most, of fewer than MANY neighbors and of more
MANY, PER_ROW, PER_ROW_OF_MANY = 1024, 4, 16
# and in all, where x can be copied by tiles: more are faster after such a copy
MOST_COLS = 2400


class StridedRows(NamedTuple):
    """Rows with any strides, as a plan sees them.

    n_rows: neighbors along one dimension. of_batch: it is the first, whose size no plan follows: n_rows is then the
    stride of a column, which rows that are cut from the others keep. along_rows, along_cols, out_along_cols: whether
    rows, or columns, are neighbors in memory.
    """

    n_cols: int
    n_rows: int
    of_batch: bool
    along_rows: bool
    along_cols: bool
    out_along_cols: bool


def strided_plan(of: StridedRows) -> Plan:
    """The plan of rows or columns with any strides: tiles of `rows` rows and `vectors_per_chunk` columns per step."""
    along_cols = of.along_cols and not of.along_rows
    if along_cols and of.out_along_cols:
        cols = min(power_of_two(of.n_cols), 1024)
        rows = WIDE_TILE // cols
    else:
        longest = LONG_STEP if along_cols and of.n_cols <= LONG_STEP else STEP
        cols = min(power_of_two(of.n_cols), longest)
        few = cols <= 8 or (along_cols and cols <= 32)
        rows = max((SHORT_TILE if few else TILE) // cols, LEAST_ROWS if cols <= STEP else LEAST_ROWS // 2)
    if not of.of_batch:
        rows = min(rows, power_of_two(of.n_rows))
    steps = -(-of.n_cols // cols)
    warps = max(1, rows * cols // (32 * THREAD_ELEMENTS))
    why = f"dim's elements or rows are not neighbors: tiles of {rows} rows, {steps} step(s) of {cols} columns"
    # ptxas stops at 168 registers, so that three programs share a multiprocessor, and Triton 3.7 spills 8 bytes
    max_registers = 224 if steps > 1 and warps == 4 else None
    return Plan("strided", rows, 1, 1, cols, 1, steps, 0, False, False, warps, max_registers, why)


def strided_is_faster(of: StridedRows, tiled: bool = False) -> bool:
    """Whether the strided kernel takes less time than a copy and a kernel over its contiguous result.

    It does where it keeps the GPU busy. A program takes whole rows, step by step, so few long rows leave the GPU idle.
    Crops are faster in one step. Every second column is slower than after a copy.

    tiled: whether the copy is one by tiles, which takes a third of the time.
    """
    if not (of.along_rows or of.along_cols):
        return False
    if of.along_cols and of.out_along_cols and not of.along_rows:
        return True
    if not of.of_batch and power_of_two(of.n_rows) * power_of_two(of.n_cols) < LEAST_TILE:
        return False
    if of.n_cols <= STEP:
        return True
    crops = of.along_rows and not of.out_along_cols
    most = (PER_ROW_OF_MANY if of.n_rows >= MANY else PER_ROW) * of.n_rows
    return not crops and of.n_cols <= (min(most, MOST_COLS) if tiled else most)
