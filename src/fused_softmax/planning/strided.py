"""Plans of rows whose elements or starts are not neighbors in memory: the strided kernel's, or a copy first."""

from __future__ import annotations

from .types import Plan, power_of_two

STRIDED_TILE = 4096  # elements of a tile of the strided kernel
THREAD_ELEMENTS = 32  # of a tile: addresses cost as much as 10 elements
MOST_WARPS = 4
LEAST_TILE = 256  # elements
STEP = 64  # columns of a step, where rows are neighbors
# a copy first takes 0.75 of torch's time for transposed rows. With as many neighbors one index of the other dimensions
# keeps the GPU busy, so that the kernel is faster; with half as many, and nothing else, it is as slow as torch
MANY = 4096


def strided_plan(n_rows: int, n_cols: int, along_cols: bool) -> Plan:
    """The plan of rows or columns with any strides: tiles of `rows` rows and `vectors_per_chunk` columns per step.

    n_rows: neighbors of one dimension; along_cols: columns, and not rows, are neighbors in memory.
    """
    cols = min(power_of_two(n_cols), 1024 if along_cols else STEP)
    rows = max(1, min(power_of_two(n_rows), STRIDED_TILE // cols))
    steps = -(-n_cols // cols)
    warps = max(1, min(MOST_WARPS, rows * cols // (32 * THREAD_ELEMENTS)))
    why = f"dim's elements or rows are not neighbors: tiles of {rows} rows, {steps} step(s) of {cols} columns"
    return Plan("strided", rows, 1, 1, cols, 1, steps, 0, False, False, warps, None, why)


def strided_is_faster(
    n_cols: int, n_rows: int, of_batch: bool, along_rows: bool, along_cols: bool, out_along_cols: bool
) -> bool:
    """Whether the strided kernel takes less time than a copy and a kernel over its contiguous result.

    n_rows: neighbors along one dimension; of_batch: it is the first one. along_rows, along_cols: whether rows, or
    columns, are neighbors in memory.

    H200, picoseconds for an element: torch takes 10 for transposed rows, a copy first 8, and the strided kernel 3 to 8
    where it keeps the GPU busy. A program takes whole rows, in 1.3 us for each step and pass, so few rows keep few
    programs busy: 2,296 neighbors of 10,450 columns took 19. Rows of crops take 4 to 7 with a copy first, and 4 in one
    step, 5 to 12 in several. Every second column takes 2.9 times as long as after a copy (bfloat16, 2,048 columns), and
    columns whose result is written transposed 1.4 times (bfloat16, 1,000 columns). Images 8 wide took 2.3 times torch's
    time with 5 columns, and 0.60 of it after a copy; with 12 columns 0.98.
    """
    if not along_rows:
        return along_cols and (out_along_cols or n_cols <= 256)
    if not of_batch and n_rows * power_of_two(n_cols) < LEAST_TILE:
        return False
    if not out_along_cols:
        return n_cols <= STEP
    return n_cols <= 2 * STEP or (n_rows >= MANY and n_cols <= (16 * n_rows if n_rows >= 2 * MANY else 2048))
