"""softmax, log_softmax and their gradients over many columns, whose runs of positions start anywhere.

    reduce:  a part's  m = max(x), s = sum(exp(x - m))          gradient:  d = sum(y*dy)   or   sum(dy)
    finish:  y = exp(x - m) / s   or   (x - m) - log(s)         gradient:  dx = y*(dy - d)   or   dy - exp(y)*d

As `softmax_spatial_parts`, over bundles in place of columns. A plane (n_cols, inner) is one piece of memory. Some
columns of it that follow one another are a bundle, a row of `width` elements. The bundles of a plane start at multiples
of a sector from the first element of the tensor, so that a kernel reads whole vectors, whatever `inner` is. Position p
of a bundle is position p % inner of the plane. The columns in front of the first bundle and behind the last one are the
plane's ends. They are fewer than two bundles, and are read and written element by element, by the program of a block's
first part or step.

Between the two kernels the parts of all columns of a bundle are merged for each position of the plane; many parts are
merged for each position of a bundle first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common.arguments import Int32, Int64, Rows, Vector, kernel
from .common.numerics import LOWEST, exp, upcast
from .common.row_scheduler import fast_divmod
from .common.softmax_terms import gradient, gradient_term, normalize
from .common.spatial_parts import (
    gradient_sum_of_part,
    last_first,
    load_step,
    moments_of_part,
    numbers_at,
    part_of,
    reads_of_two_passes,
)
from .common.spatial_tiles import columns_of_chunk, positions_of, store_tile, tile_at
from .common.tiles import READS


@triton.jit
def start_of_bundles(outer, plane, inner, period, UNIT: tl.constexpr):
    """(first element of plane `outer`, elements in front of its first bundle): int64, int32.

    plane: elements of a plane. period: the columns after which runs start at multiples of UNIT elements again, a power
    of two. So many columns c lie in front that past + c*step is a multiple of it, both in UNIT/period elements.
    """
    start = outer * plane
    past = (start % UNIT).to(tl.int32) * period // UNIT
    step = inner % UNIT * period // UNIT  # odd, so that its third power is its inverse modulo a period of up to 16
    return start, (-past * step * step * step & (period - 1)) * inner


@triton.jit
def block_of_bundles(
    outer, block, plane, width, inner, period, INNER: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr
):
    """A program's block of positions of the bundles of plane `outer`, as it reads them.

    (first element of the plane; elements in front of its first bundle; then in units of VEC: the first bundle, the step
    to the next one, and the block's first position; mask of the positions that exist, [1, 1, INNER]).
    """
    row = (width // VEC).to(tl.int64)
    first, exists = positions_of(block, row, INNER, VEC)
    start, head = start_of_bundles(outer, plane, inner, period, UNIT)
    return start, head, (start + head) // VEC, row, first, exists


@triton.jit
def ends_at(ptr, start, head, first, n_bundles, width, ends, exists, COLS: tl.constexpr, INNER: tl.constexpr):
    """(pointers, mask) to the ends, as two rows of a block's positions: [COLS, 1, INNER].

    start, head: of `start_of_bundles`. first: the block's first position. ends: elements of a plane's ends.
    """
    tl.static_assert(COLS > 1, "a tile has both rows")
    row = tl.arange(0, COLS)[:, None, None]
    element = row * width + first + tl.arange(0, INNER)[None, None, :]
    at = ptr + start + element + tl.where(element < head, 0, n_bundles.to(tl.int64) * width)
    return at, exists & (row < 2) & (element < ends)


@triton.jit
def load_ends(ptr, start, head, first, n_bundles, width, ends, exists, fill, COLS: tl.constexpr, INNER: tl.constexpr):
    """The ends as loaded, `fill` where there are none."""
    at, there = ends_at(ptr, start, head, first, n_bundles, width, ends, exists, COLS, INNER)
    return tl.load(at, mask=there, other=fill, eviction_policy=READS)


@kernel()
def softmax_spatial_bundled_reduce(
    x_ptr: Rows,
    max_ptr: Vector, sum_ptr: Vector,  # [outer, n_parts, width] float32
    n_bundles: Int32,  # of each plane
    width: Int32,  # elements of a bundle
    n_blocks: Int32, n_parts: Int32,
    plane: Int64,  # elements of a plane
    inner: Int32,
    period: Int32,  # columns, as in `start_of_bundles`
    ends: Int32,  # elements of a plane's ends
    COLS: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr,
    UNIT: tl.constexpr,  # bundles start at multiples of so many elements
    TRIGGER: tl.constexpr,  # whether the next kernel may start now and wait for this one
    PTX: tl.constexpr,
):  # fmt: skip
    if TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    outer, part, block = part_of(n_blocks, n_parts)
    begin, head, origin, row, first, exists = block_of_bundles(
        outer, block, plane, width, inner, period, INNER, VEC, UNIT
    )
    column = columns_of_chunk(1, COLS)
    x_at = tile_at(x_ptr, origin, row, 1, first, column, INNER, VEC)
    m = tl.zeros([COLS, 1, INNER], tl.float32) + LOWEST
    s = tl.zeros([COLS, 1, INNER], tl.float32)
    if part == 0:
        x = load_ends(x_ptr, begin, head, block * INNER, n_bundles, width, ends, exists, -float("inf"), COLS, INNER)
        x = x.to(tl.float32)
        m = tl.maximum(m, x)
        s = exp(x - m)
    POLICY: tl.constexpr = reads_of_two_passes(x_ptr.dtype.element_ty)
    top, total = moments_of_part(
        m, s, x_at, part, n_parts, n_bundles, row, column, exists, CHUNKS, COLS, VEC, False, False, POLICY, PTX
    )
    to, here = numbers_at(outer * n_parts + part, row, first, INNER, VEC)
    tl.store(max_ptr + to, top, mask=here)
    tl.store(sum_ptr + to, total, mask=here)


@kernel()
def softmax_spatial_bundled_backward_reduce(
    y_ptr: Rows, dy_ptr: Rows,
    d_ptr: Vector,  # [outer, n_parts, width] float32
    n_bundles: Int32, width: Int32, n_blocks: Int32, n_parts: Int32, plane: Int64, inner: Int32,
    period: Int32, ends: Int32,
    LOG: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr,
    UNIT: tl.constexpr, TRIGGER: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    if TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    outer, part, block = part_of(n_blocks, n_parts)
    begin, head, origin, row, first, exists = block_of_bundles(
        outer, block, plane, width, inner, period, INNER, VEC, UNIT
    )
    column = columns_of_chunk(1, COLS)
    y_at = tile_at(y_ptr, origin, row, 1, first, column, INNER, VEC)
    dy_at = tile_at(dy_ptr, origin, row, 1, first, column, INNER, VEC)
    d = tl.zeros([COLS, 1, INNER], tl.float32)
    if part == 0:
        dy = load_ends(dy_ptr, begin, head, block * INNER, n_bundles, width, ends, exists, 0.0, COLS, INNER)
        y = dy  # unused where LOG
        if not LOG:
            y = load_ends(y_ptr, begin, head, block * INNER, n_bundles, width, ends, exists, 0.0, COLS, INNER)
        d = gradient_term(y, dy, LOG)
    POLICY: tl.constexpr = reads_of_two_passes(dy_ptr.dtype.element_ty)
    d = gradient_sum_of_part(
        d, y_at, dy_at, part, n_parts, n_bundles, row, row, column, exists, LOG, CHUNKS, COLS, VEC, False, POLICY, PTX
    )
    to, here = numbers_at(outer * n_parts + part, row, first, INNER, VEC)
    tl.store(d_ptr + to, d, mask=here)


@kernel()
def softmax_spatial_bundled_finish(
    x_ptr: Rows, y_ptr: Rows,
    max_ptr: Vector, sum_ptr: Vector,  # [outer, inner] float32
    n_bundles: Int32, width: Int32, n_blocks: Int32,
    n_steps: Int32,  # programs of a block
    plane: Int64, period: Int32, ends: Int32,
    inner: Int32, multiplier: Int64, power: Int32,  # of `fast_divmod`
    LOG: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr,
    UNIT: tl.constexpr,
    WAITS: tl.constexpr,  # the kernel that writes the maxima and sums may still run
    PTX: tl.constexpr,
):  # fmt: skip
    outer, step, block = last_first(tl.program_id(0), tl.num_programs(0), n_blocks, n_steps)
    begin, head, origin, row, first, exists = block_of_bundles(
        outer, block, plane, width, inner, period, INNER, VEC, UNIT
    )
    column = columns_of_chunk(1, COLS)
    start = step.to(tl.int64) * (CHUNKS * COLS)
    left = (n_bundles - start).to(tl.int32)
    x_at = tile_at(x_ptr, origin, row, 1, first, column, INNER, VEC)
    y_at = tile_at(y_ptr, origin, row, 1, first, column, INNER, VEC)
    POLICY: tl.constexpr = reads_of_two_passes(x_ptr.dtype.element_ty)
    x = load_step(x_at, start, row, column, n_bundles, exists, -float("inf"), CHUNKS, COLS, VEC, POLICY)
    here = tl.reshape(exists, (1, INNER))
    _, position = fast_divmod(block * INNER + tl.arange(0, INNER)[None, :], inner, multiplier, power)
    at = outer * inner + position
    if WAITS:  # the tile is on its way
        tl.extra.cuda.gdc_wait()
    top = tl.load(max_ptr + at, mask=here, other=0.0)[None, :, :]
    total = tl.load(sum_ptr + at, mask=here, other=1.0)[None, :, :]
    for c in tl.static_range(CHUNKS):
        y = normalize(upcast(x[c], PTX), top, total, LOG)
        store_tile(y_at + start * row * VEC, y, c, row, column, left, exists, 0, COLS, VEC)
    if step == 0:
        x_end = load_ends(x_ptr, begin, head, block * INNER, n_bundles, width, ends, exists, 0.0, COLS, INNER)
        to, there = ends_at(y_ptr, begin, head, block * INNER, n_bundles, width, ends, exists, COLS, INNER)
        tl.store(to, normalize(x_end.to(tl.float32), top, total, LOG).to(y_ptr.dtype.element_ty), mask=there)


@kernel()
def softmax_spatial_bundled_backward_finish(
    y_ptr: Rows, dy_ptr: Rows, dx_ptr: Rows,
    d_ptr: Vector,  # [outer, inner] float32
    n_bundles: Int32, width: Int32, n_blocks: Int32, n_steps: Int32, plane: Int64, period: Int32, ends: Int32,
    inner: Int32, multiplier: Int64, power: Int32,
    LOG: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr,
    UNIT: tl.constexpr, WAITS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    outer, step, block = last_first(tl.program_id(0), tl.num_programs(0), n_blocks, n_steps)
    begin, head, origin, row, first, exists = block_of_bundles(
        outer, block, plane, width, inner, period, INNER, VEC, UNIT
    )
    column = columns_of_chunk(1, COLS)
    start = step.to(tl.int64) * (CHUNKS * COLS)
    left = (n_bundles - start).to(tl.int32)
    y_at = tile_at(y_ptr, origin, row, 1, first, column, INNER, VEC)
    dy_at = tile_at(dy_ptr, origin, row, 1, first, column, INNER, VEC)
    dx_at = tile_at(dx_ptr, origin, row, 1, first, column, INNER, VEC)
    POLICY: tl.constexpr = reads_of_two_passes(dy_ptr.dtype.element_ty)
    dy = load_step(dy_at, start, row, column, n_bundles, exists, 0.0, CHUNKS, COLS, VEC, POLICY)
    y = load_step(y_at, start, row, column, n_bundles, exists, 0.0, CHUNKS, COLS, VEC, POLICY)
    _, position = fast_divmod(block * INNER + tl.arange(0, INNER)[None, :], inner, multiplier, power)
    if WAITS:  # the tiles are on their way
        tl.extra.cuda.gdc_wait()
    at = outer * inner + position
    d = tl.load(d_ptr + at, mask=tl.reshape(exists, (1, INNER)), other=0.0)[None, :, :]
    for c in tl.static_range(CHUNKS):
        dx = gradient(upcast(y[c], PTX), upcast(dy[c], PTX), d, LOG)
        store_tile(dx_at + start * row * VEC, dx, c, row, column, left, exists, 0, COLS, VEC)
    if step == 0:
        dy_end = load_ends(dy_ptr, begin, head, block * INNER, n_bundles, width, ends, exists, 0.0, COLS, INNER)
        y_end = load_ends(y_ptr, begin, head, block * INNER, n_bundles, width, ends, exists, 0.0, COLS, INNER)
        to, there = ends_at(dx_ptr, begin, head, block * INNER, n_bundles, width, ends, exists, COLS, INNER)
        tl.store(to, gradient(y_end, dy_end, d, LOG).to(dx_ptr.dtype.element_ty), mask=there)
