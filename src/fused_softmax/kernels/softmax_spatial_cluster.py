"""softmax and log_softmax over a dimension that is not the last, and their gradients, with the columns on a cluster.

The formulas are those of `softmax_spatial`. The CTAS programs of a thread-block cluster share the columns of INNER
positions, and each reads and writes its share once. A chunk is COLS columns for each CTA. A tile holds TILE chunks, the
last ones fewer, because Triton's cluster planner fails on a kernel with many operations. Its axes are CTAs, chunks, and
COLS x INNER elements, so that a thread holds the same place of each chunk, and reduces its own columns first:

    columns      |chunk 0: CTA 0|CTA 1| ... |chunk 1: CTA 0|CTA 1| ...      7 chunks where TILE is 4: tiles of 4, 2, 1

The last block of positions starts earlier where it would reach past `inner`, so some positions are computed twice, with
the same bits. So the output must not be the input, unless INNER divides inner.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common.arguments import Int32, Int64, Rows, kernel
from .common.numerics import LOWEST, exp, upcast
from .common.softmax_terms import gradient, gradient_term, normalize
from .common.spatial_cluster import declare_exchange, exchange_max_sum, exchange_sum, leave_exchange
from .common.tiles import READS


@triton.constexpr_function
def _tiles(chunks: int, most: int) -> tuple[int, ...]:
    """The chunks of each tile: as often as possible `most`, and then the powers of two in the rest."""
    rest = chunks % most
    return (most,) * (chunks // most) + tuple(bit for bit in (16, 8, 4, 2, 1) if rest & bit)


@triton.constexpr_function
def _chunks_before(chunks: int, most: int, tile: int) -> int:
    """The chunks of the tiles before one."""
    rest = [bit for bit in (16, 8, 4, 2, 1) if chunks % most & bit]
    return min(tile, chunks // most) * most + sum(rest[: max(0, tile - chunks // most)])


@triton.jit
def block_of(n_blocks, inner, INNER: tl.constexpr, VEC: tl.constexpr):
    """(outer, first position in units of VEC) of this program."""
    pid = tl.program_id(0)
    first = tl.minimum((pid % n_blocks).to(tl.int64) * (INNER // VEC), inner - INNER // VEC)
    return (pid // n_blocks).to(tl.int64), first


@triton.jit
def tile_in(
    ptr, T: tl.constexpr, outer, col_stride, outer_stride, first, CTAS: tl.constexpr, COLS: tl.constexpr,
    INNER: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """(pointers to tile T, its columns), [CTAS, chunks, COLS*INNER]."""
    TILES: tl.constexpr = _tiles(CHUNKS, TILE)
    BEFORE: tl.constexpr = _chunks_before(CHUNKS, TILE, T)
    place = tl.arange(0, COLS * INNER)[None, None, :]
    chunk = BEFORE + tl.arange(0, TILES[T])[None, :, None]
    column = (chunk * CTAS + tl.arange(0, CTAS)[:, None, None]) * COLS + place // INNER
    start = ptr + (outer * outer_stride + first) * VEC
    return start + column.to(tl.int64) * col_stride * VEC + place % INNER, column


@triton.jit
def load_tile(
    ptr, T: tl.constexpr, outer, col_stride, outer_stride, first, n_cols, fill, CTAS: tl.constexpr, COLS: tl.constexpr,
    INNER: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Tile T as loaded. All columns exist, except in the last tile."""
    at, column = tile_in(ptr, T, outer, col_stride, outer_stride, first, CTAS, COLS, INNER, VEC, CHUNKS, TILE)
    if T + 1 < len(_tiles(CHUNKS, TILE)):
        return tl.load(at, eviction_policy=READS)
    else:
        return tl.load(at, mask=column < n_cols, other=fill, eviction_policy=READS)


@triton.jit
def load_share(
    ptr, outer, col_stride, outer_stride, first, n_cols, fill, CTAS: tl.constexpr, COLS: tl.constexpr,
    INNER: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """This CTA's share as loaded, in tiles."""
    tiles = ()
    for t in tl.static_range(len(_tiles(CHUNKS, TILE))):
        tiles = tiles + (
            load_tile(
                ptr, t, outer, col_stride, outer_stride, first, n_cols, fill, CTAS, COLS, INNER, VEC, CHUNKS, TILE
            ),
        )
    return tiles


@triton.jit
def store_tile(
    ptr, value, T: tl.constexpr, outer, col_stride, outer_stride, first, n_cols, CTAS: tl.constexpr,
    COLS: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Writes tile T in the output's dtype."""
    at, column = tile_in(ptr, T, outer, col_stride, outer_stride, first, CTAS, COLS, INNER, VEC, CHUNKS, TILE)
    if T + 1 < len(_tiles(CHUNKS, TILE)):
        tl.store(at, value.to(ptr.dtype.element_ty))
    else:
        tl.store(at, value.to(ptr.dtype.element_ty), mask=column < n_cols)


@kernel(on_cluster=True)
def softmax_spatial_cluster(
    x_ptr: Rows, y_ptr: Rows,
    n_cols: Int32,
    inner: Int64,  # inner and strides: in units of VEC
    n_blocks: Int32,  # of positions
    x_outer: Int64, x_col: Int64, y_outer: Int64, y_col: Int64,
    LOG: tl.constexpr, CTAS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr,
    CHUNKS: tl.constexpr, TILE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    declare_exchange(CTAS, 2, INNER, PTX)
    outer, first = block_of(n_blocks, inner, INNER, VEC)
    x = load_share(x_ptr, outer, x_col, x_outer, first, n_cols, -float("inf"), CTAS, COLS, INNER, VEC, CHUNKS, TILE)
    TILES: tl.constexpr = len(x)
    # each thread's own columns, one of each chunk
    m = tl.max(x[0], 1).to(tl.float32)
    for t in tl.static_range(1, TILES):
        m = tl.maximum(m, tl.max(x[t], 1).to(tl.float32))
    m = tl.maximum(m, LOWEST)  # [CTAS, COLS*INNER]
    s = tl.zeros_like(m)
    for t in tl.static_range(TILES):
        s += tl.sum(exp(upcast(x[t], PTX, True) - m[:, None, :]), 1)
    # the CTA's, then the cluster's
    m, s = tl.reshape(m, (CTAS, COLS, INNER)), tl.reshape(s, (CTAS, COLS, INNER))
    top = tl.max(m, 1)
    total = tl.sum(s * exp(m - top[:, None, :]), 1)
    top, total = exchange_max_sum(top, total, CTAS, COLS, PTX)
    top, total = top[:, None, :], total[:, None, :]

    by = tl.div_rn(1.0, total)
    for t in tl.static_range(TILES):
        x_t = upcast(x[t], PTX, True, True)
        if LOG:
            y = normalize(x_t, top, total, LOG)
        else:
            y = exp(x_t - top) * by
        store_tile(y_ptr, y, t, outer, y_col, y_outer, first, n_cols, CTAS, COLS, INNER, VEC, CHUNKS, TILE)
    leave_exchange(PTX)


@kernel(on_cluster=True)
def softmax_spatial_cluster_backward(
    y_ptr: Rows,  # the forward's output
    dy_ptr: Rows, dx_ptr: Rows,
    n_cols: Int32,
    inner: Int64,  # inner and strides: in units of VEC
    n_blocks: Int32,
    y_outer: Int64, y_col: Int64, dy_outer: Int64, dy_col: Int64, dx_outer: Int64, dx_col: Int64,
    LOG: tl.constexpr, CTAS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr,
    CHUNKS: tl.constexpr, TILE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    declare_exchange(CTAS, 1, INNER, PTX)
    outer, first = block_of(n_blocks, inner, INNER, VEC)
    dy = load_share(dy_ptr, outer, dy_col, dy_outer, first, n_cols, 0.0, CTAS, COLS, INNER, VEC, CHUNKS, TILE)
    y = load_share(y_ptr, outer, y_col, y_outer, first, n_cols, 0.0, CTAS, COLS, INNER, VEC, CHUNKS, TILE)
    TILES: tl.constexpr = len(y)
    d = tl.zeros([CTAS, COLS * INNER], tl.float32)
    for t in tl.static_range(TILES):
        dy_t = upcast(dy[t], PTX, True)
        y_t = dy_t  # unused where LOG
        if not LOG:
            y_t = upcast(y[t], PTX, True)
        d += tl.sum(gradient_term(y_t, dy_t, LOG), 1)
    d = tl.sum(tl.reshape(d, (CTAS, COLS, INNER)), 1)
    d = exchange_sum(d, CTAS, COLS, PTX)[:, None, :]
    for t in tl.static_range(TILES):
        dx = gradient(upcast(y[t], PTX, True, True), upcast(dy[t], PTX, True, True), d, LOG)
        store_tile(dx_ptr, dx, t, outer, dx_col, dx_outer, first, n_cols, CTAS, COLS, INNER, VEC, CHUNKS, TILE)
    leave_exchange(PTX)
