"""How many rows of logits a linear loss holds at a time: from shapes and dtypes alone, so that results reproduce.

Three matrix products make the logits and the gradients of input and weight; the loss reads and writes the logits in
between. A chunk of rows is one round of these. With c rows a chunk, hidden size H and vocabulary V, a round's products
take 6*c*H*V operations. Adding to a float32 sum of the weight's gradient moves 8*H*V bytes, whatever c is, so few rows
are slow: on an H200 that is about 216/c of the products' time, less what overlaps. Pure Python, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

# bytes of a chunk's logits where a round also adds to the weight's gradient in float32; without such a sum
SUMMED_BYTES, PLAIN_BYTES = 2**30, 2**29
# of logits of 16 bits; with fewer rows the sum takes longer than a twentieth of the products
FEWEST_SUMMED_ROWS, FEWEST_ROWS = 4096, 1024
# rows come in whole tiles of the products
TILE_ROWS = 128
# a row of logits starts on so many bytes: cuBLAS has its fastest kernels there
ROW_BYTES = 128
# operations of the three products from which on it pays to wait for the number of rows that count
LEAVE_OUT_OPERATIONS = 2e12
LEAVE_OUT_SHARE = 16  # at least 1/16 of the rows
EARLY_OPERATIONS = 7e11


@dataclass(frozen=True)
class Chunks:
    """rows: of a chunk, the last of which may have fewer. count: of chunks. stride: elements of a row of logits."""

    rows: int
    count: int
    stride: int


def even_columns(n_cols: int, itemsize: int) -> int:
    """The columns that fill whole vectors of 16 bytes, where there are any.

    With 50,257 columns of bfloat16 the products take up to 8 times as long as with 50,256, so the last ones go by
    themselves.

    >>> even_columns(50257, 2), even_columns(128256, 2)
    (50256, 128256)
    """
    return n_cols // (16 // itemsize) * (16 // itemsize) or n_cols


def row_stride(n_cols: int, itemsize: int) -> int:
    """Elements from one row of logits to the next: the columns, padded to a multiple of 128 bytes.

    >>> row_stride(50257, 2), row_stride(128256, 2)
    (50304, 128256)
    """
    return _up(n_cols, ROW_BYTES // itemsize)


def plan_chunks(
    n_rows: int, n_cols: int, row_bytes: int, itemsize: int, sums: bool, spare: int = 0, chunk_rows: int | None = None
) -> Chunks:
    """The chunks of n_rows rows.

    row_bytes: of all that a chunk holds for one row; itemsize: of a logit. sums: whether chunks add to a float32 sum of
    the weight's gradient. spare: bytes of that sum, where one chunk alone would need no such memory. All rows are one
    chunk where their logits take no more memory than the sum and a chunk. chunk_rows: what the caller asks for.

    >>> plan_chunks(8192, 128256, 2 * 128256, 2, True, 4 * 4096 * 128256).rows
    8192
    >>> plan_chunks(131072, 128256, 2 * 128256, 2, True, 4 * 4096 * 128256)
    Chunks(rows=4096, count=32, stride=128256)
    """
    stride = row_stride(n_cols, itemsize)
    if chunk_rows is None:
        budget, fewest = (SUMMED_BYTES, FEWEST_SUMMED_ROWS * 2) if sums else (PLAIN_BYTES, FEWEST_ROWS * 2)
        most = max(fewest // max(itemsize, 2), budget // max(row_bytes, 1) // TILE_ROWS * TILE_ROWS)
        at_once = most + spare // max(row_bytes, 1)
        # chunks of equal size, in whole tiles
        chunk_rows = n_rows if n_rows <= at_once else _up(-(-n_rows // -(-n_rows // most)), TILE_ROWS)
    rows = max(1, min(chunk_rows, n_rows))
    return Chunks(rows, -(-n_rows // rows), stride)


def may_leave_out(n_rows: int, hidden: int, n_cols: int) -> bool:
    """Whether the products are long enough to ask the device how many rows count."""
    return 6.0 * n_rows * hidden * n_cols >= LEAVE_OUT_OPERATIONS


def early_rows(hidden: int, n_cols: int) -> int:
    """Rows whose product keeps the device busy for about a millisecond, while the host asks it something.

    >>> early_rows(4096, 128256)
    640
    """
    return max(TILE_ROWS, int(EARLY_OPERATIONS / max(2.0 * hidden * n_cols, 1.0)) // TILE_ROWS * TILE_ROWS)


def leaves_out(n_rows: int, n_counting: int) -> bool:
    """Whether the products should take only the rows that count.

    >>> leaves_out(4096, 4000), leaves_out(4096, 3000)
    (False, True)
    """
    return n_rows - n_counting >= max(TILE_ROWS, n_rows // LEAVE_OUT_SHARE)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
