"""Plans of rows whose elements or starts are not neighbors in memory: the strided kernel's, or a copy first."""

from __future__ import annotations

from .types import Plan, power_of_two

STRIDED_TILE = 4096  # elements of a tile of the strided kernel
LEAST_TILE = 256  # two elements for each thread of a program


def strided_plan(n_rows: int, n_cols: int, along_cols: bool) -> Plan:
    """The plan of rows or columns with any strides: tiles of `rows` rows and `vectors_per_chunk` columns per step.

    n_rows: neighbors of one dimension; along_cols: columns, and not rows, are neighbors in memory.
    """
    cols = min(power_of_two(n_cols), 1024 if along_cols else 64)
    rows = max(1, min(power_of_two(n_rows), STRIDED_TILE // cols))
    steps = -(-n_cols // cols)
    why = f"dim's elements or rows are not neighbors: tiles of {rows} rows, {steps} step(s) of {cols} columns"
    return Plan("strided", rows, 1, 1, cols, 1, steps, 0, False, False, 4, None, why)


def strided_is_faster(
    n_cols: int, n_rows: int, of_batch: bool, along_rows: bool, along_cols: bool, out_along_cols: bool
) -> bool:
    """Whether the strided kernel takes less time than a copy and a kernel over its contiguous result.

    n_rows: neighbors along one dimension; of_batch: it is the first one. along_rows, along_cols: whether rows, or
    columns, are neighbors in memory. H200, 2^26 elements: for a transposed matrix it takes
    0.46 of that time (float32, 1,024 columns), for every second column 2.9 of it (bfloat16, 2,048 columns), and for
    columns whose result is written transposed 1.4 of it (bfloat16, 1,000 columns). A program takes whole rows, so few
    long ones keep few programs busy: 14 times 32 neighbors of 296,854 columns took 9 times torch's time, 2,296
    neighbors of 10,450 columns (36 programs) 1.9 times, and 8,192 neighbors of 16,384 columns 0.95 of that of a copy
    first. A tile with fewer than two elements for each thread wastes most of them: images 8 wide took 2.3 times torch's
    time with 5 columns, and 0.60 of it after a copy; with 12 columns 0.98.
    """
    many = n_cols <= (16 * n_rows if n_rows >= 8192 else 2048)
    many = many and (of_batch or n_rows * power_of_two(n_cols) >= LEAST_TILE)
    return (along_rows and many) or (along_cols and (out_along_cols or n_cols <= 256))
