"""Locates the work of programs that share a softmax over a dimension that is not the last: parts, steps of columns."""

from __future__ import annotations

import triton
import triton.language as tl

from .spatial_tiles import load_tile
from .tiles import READS


@triton.constexpr_function
def reads_of_two_passes(dtype: tl.dtype) -> str:
    """The eviction policy of columns that are read twice: none for 16 bits.

    H200, time with a policy over time without, bfloat16, 5 shapes: 0.99 to 1.01 with 1.3e8 elements, 1.01 to 1.04 with
    4e7. float32 is up to 4% slower without.
    """
    return "" if dtype.primitive_bitwidth == 16 else READS.value


@triton.jit
def load_step(
    at, start, col_stride, column, end, exists, fill, CHUNKS: tl.constexpr, COLS: tl.constexpr, VEC: tl.constexpr,
    POLICY: tl.constexpr = READS,
):  # fmt: skip
    """The CHUNKS tiles from column `start` on; columns from `end` on are filled."""
    tiles = ()
    here = at + start * col_stride * VEC
    for c in tl.static_range(CHUNKS):
        tiles = tiles + (load_tile(here, c, col_stride, column, end - start, exists, fill, 0, COLS, VEC, POLICY),)
    return tiles


@triton.jit
def part_of(n_blocks, n_parts, part_cols, n_cols):
    """(outer, part, block, its first column, the column after its last) of this program."""
    pid = tl.program_id(0)
    part = pid // n_blocks % n_parts
    outer = (pid // n_blocks // n_parts).to(tl.int64)
    start = part * part_cols
    return outer, part, pid % n_blocks, start, start + tl.minimum(n_cols - start, part_cols)


@triton.jit
def vector_at(row, inner, first, INNER: tl.constexpr, VEC: tl.constexpr):
    """Offsets of the program's positions in a float32 tensor of rows of `inner` positions.  # [1, INNER]"""
    return (row * inner + first) * VEC + tl.arange(0, INNER)[None, :]


@triton.jit
def last_first(index, n_programs, n_blocks, n_steps):
    """(outer, step of the columns, block) of program `index`, from the end of the tensor to its start."""
    pid = n_programs - 1 - index
    return (pid // n_blocks // n_steps).to(tl.int64), pid // n_blocks % n_steps, pid % n_blocks
