"""softmax and log_softmax of views that fold neither to rows nor to planes, as they lie; and a copy of transpositions.

`softmax.py` imports this where it meets one, and takes most crops itself. Where columns are neighbors in memory on one
side and rows on the other, transposing kernels take them (`softmax_transposed`, `softmax_channels_last`). Others go to
the strided kernel, which reads up to three row dimensions in place, or are copied first: by tiles where they are
transpositions, and by a kernel of its own where all elements are one step apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..planning import strided
from ..planning.transposed import SECTOR, TransposedRows, reading, transposed_plan
from ..planning.types import Device, Plan, power_of_two
from .availability import KernelUnavailable
from .cache import Cache
from .compile import Launch, Shaped, early_start, launch_options, prepare_launch
from .device import device_of
from .folding import MOST_POSITIONS, alignment_of, merge_dims, stride_of_one
from .kernel_loading import kernel_loader
from .layout import DTYPE_NAMES, divisor

# neighbors of either side that a copy by tiles takes, by the bytes of an element. H200, of a copy, ours and torch's:
# bfloat16 (21, 16383) 0.48 and 0.60, float32 0.98 and 0.65
LEAST_SIDE = {2: 32, 4: 8}
MOST_SIDE, TILE, THREAD_ELEMENTS = 64, 4096, 32  # of a tile, and of a thread in it
STEPPED_CHUNKS, STEPPED_WARPS = 8, 4  # elements of a thread, and warps, of a copy of elements one step apart

Dims = list[tuple[int, ...]]  # of rows: (size, x's stride, y's stride)


@kernel_loader
def _transposed() -> Any:
    from ..kernels.softmax_transposed import softmax_transposed

    return softmax_transposed


@kernel_loader
def _channels_last() -> Any:
    from ..kernels.softmax_channels_last import softmax_channels_last

    return softmax_channels_last


@kernel_loader
def _copy() -> Any:
    from ..kernels.strided_copies import transposed_copy

    return transposed_copy


@kernel_loader
def _stepped_copy() -> Any:
    from ..kernels.strided_copies import stepped_copy

    return stepped_copy


@kernel_loader
def _strided() -> Any:
    from ..kernels.softmax_strided import softmax_strided

    return softmax_strided


class InPlace(NamedTuple):
    """The plan of a kernel that takes x to y as they lie, and what makes its launch over such tensors."""

    plan: Plan
    launch: Callable[[Tensor, Tensor], Launch]


def in_place(x: Tensor, y: Tensor, dim: int, log: bool) -> InPlace | None:
    """How a kernel takes x to y as they lie; None where x is copied first. y may be on meta."""
    device, of = device_of(x), strided_rows(x, y, dim)
    if of.along_cols != of.out_along_cols and (of.along_rows or of.along_cols):
        found = transposition(x, y, dim, row_dims(x, y, dim), of.n_rows, device)
        if found is not None:
            return InPlace(found.plan, lambda x, y: transposed_launch(x, y, log, found, device))
    if not _takes_strided(x, y, dim, of):
        return None
    return InPlace(strided.strided_plan(of), lambda x, y: strided_launch(x, y, dim, log, device))


# --- rows of a view ---------------------------------------------------------------------------------------------------


def row_dims(x: Tensor, y: Tensor, dim: int, first: int = 0) -> Dims:
    """(size, x's stride, y's stride) of the fewest dimensions that hold the rows of both, from dimension `first` on.

    A batch of one stays where it was cut from rows that are neighbors in memory, as its stride tells.
    """
    sizes, x_strides, y_strides = x.shape, x.stride(), y.stride()
    kept = [d for d in range(first, x.dim()) if d != dim and (sizes[d] != 1 or (d == 0 and x_strides[d] == 1))]
    return merge_dims([(sizes[d], x_strides[d], y_strides[d]) for d in kept])


def _dims_of_rows(x: Tensor, y: Tensor, dim: int) -> Dims:
    """The three dimensions of rows, (size, x's stride, y's stride), that the strided kernel takes."""
    merged = row_dims(x, y, dim)
    # the rows of a tile are the dimension whose neighbors in memory they are, or the innermost
    order = sorted(range(len(merged)), key=lambda i: (merged[i][1] == 1) + (merged[i][2] == 1))
    return ([(1, 0, 0)] * 3 + [merged[i] for i in order])[-3:]


def strided_rows(x: Tensor, y: Tensor, dim: int) -> strided.StridedRows:
    """The rows as their plan sees them."""
    n_cols = x.shape[dim]
    x_col, y_col = (x.stride(dim), y.stride(dim)) if n_cols > 1 else (1, 1)
    _, *strides = _dims_of_rows(x, y, dim)[-1]
    # neighbors along one dimension that is not the batch's, also where both merge
    within = next((size for size, *others in row_dims(x, y, dim, min(dim, 1)) if others == strides), None)
    along_rows = strides[0] == 1
    of_batch = within is None and dim != 0
    n_rows = (x_col if along_rows else y_col) if of_batch else within or 1
    return strided.StridedRows(n_cols, n_rows, of_batch, along_rows, x_col == 1, y_col == 1)


# --- strided ----------------------------------------------------------------------------------------------------------


def _takes_strided(x: Tensor, y: Tensor, dim: int, of: strided.StridedRows) -> bool:
    """Whether the strided kernel, which takes three dimensions of rows, is faster than to copy x first."""
    if len(row_dims(x, y, dim)) > 3:
        return False
    return strided.strided_is_faster(of, of.n_cols > strided.MOST_COLS and _copied_by_tiles(x))


def _copied_by_tiles(x: Tensor) -> bool:
    return device_of(x).kind != "hip" and tiles_of(x) is not None


def strided_launch(x: Tensor, y: Tensor, dim: int, log: bool, device: Device | None = None) -> Launch:
    """The launch that takes x to y over a dim whose elements, or rows, lie anywhere; `device` stands in for x's own.

    x and y have three dimensions of rows at most, as `row_dims` counts them.
    """
    outer, middle, (n_rows, x_row, y_row) = _dims_of_rows(x, y, dim)
    n_cols, x_col, y_col = x.shape[dim], x.stride(dim), y.stride(dim)
    if n_cols == 1:
        x_col = y_col = 1
    plan = strided.strided_plan(strided_rows(x, y, dim))
    grid = outer[0] * middle[0] * -(-n_rows // plan.rows)
    args = (x, y, n_rows, n_cols, middle[0], outer[1], middle[1], x_row, x_col, outer[2], middle[2], y_row, y_col)
    device = device or device_of(x)
    meta: dict[str, object] = dict(LOG=log, ROWS=plan.rows, COLS=plan.vectors_per_chunk, ONE_STEP=plan.chunks == 1)
    meta["EARLY"] = device.supports_pdl
    return Launch(_strided(), (grid,), args, meta | launch_options(_strided(), plan, device) | early_start(meta))


# --- transposing ------------------------------------------------------------------------------------------------------


class Transposition(NamedTuple):
    """(outer, n_cols, inner) and packed (outer, inner, n_cols), without their memory, and how they are run."""

    outer: int
    n_cols: int
    inner: int
    outer_stride: int  # of the side that is not packed, in elements
    col_stride: int
    of: TransposedRows
    plan: Plan


def transposition(x: Tensor, y: Tensor, dim: int, dims: Dims, neighbors: int, device: Device) -> Transposition | None:
    """How a transposing kernel takes x to y; None where it cannot, or another way is faster.

    dims: of rows. neighbors: rows that are neighbors in memory on one side, as `TransposedRows` counts them.
    """
    into_rows = y.stride(dim) == 1
    apart, packed = (x, y) if into_rows else (y, x)
    if not into_rows:
        dims = [(size, of_y, of_x) for size, of_x, of_y in dims]
    n_cols, col_stride = apart.shape[dim], apart.stride(dim)
    inner, *strides = dims[-1] if dims else (1, 1, n_cols)
    (outer, outer_stride, packed_outer), *others = [*dims[:-1], (1, 0, inner * n_cols)]
    # a batch of one keeps the strides of the batch that it was taken from, and is planned as that batch is
    alone = [d for d in range(dim if dim else x.dim()) if x.shape[d] == 1 and d != dim]
    if any(not 0 < packed.stride(d) <= outer * inner * n_cols for d in alone):
        return None
    if outer > 1 and any(not 0 < apart.stride(d) <= outer * outer_stride for d in alone):
        return None
    if outer == 1:
        outer_stride = stride_of_one([apart.stride(d) for d in alone], inner)
    follow = strides == [1, n_cols] and packed_outer == inner * n_cols and packed.stride(dim) == 1
    if len(others) > 1 or not follow or x.dtype != y.dtype or col_stride < 2 or inner > MOST_POSITIONS:
        return None
    size = x.element_size()
    of_outer, of_inner, of_col, of_start = (
        alignment_of(n, SECTOR // size) for n in (outer_stride, inner, col_stride, apart.data_ptr() // size)
    )
    columns = min(of_col, of_start)  # a batch, which may be part of `inner`, changes neither
    vec, phase = min(columns, of_outer, of_inner, 16 // size), packed.data_ptr() % 16 // size
    of = TransposedRows(n_cols, neighbors, DTYPE_NAMES[x.dtype], vec, columns * size, phase, into_rows)
    plan = transposed_plan(of, device)
    return None if plan is None else Transposition(outer, n_cols, inner, outer_stride, col_stride, of, plan)


def transposed_launch(x: Tensor, y: Tensor, log: bool, found: Transposition, device: Device) -> Launch:
    """The launch that takes x to y, which lie as those that it was found for."""
    outer, n_cols, inner, outer_stride, col_stride, of, plan = found
    n_rows, inner = outer * inner, max(inner, 2)  # a row alone is the first of two: 2^64/1 has 65 bits
    read, kernel = reading(of, plan.rows, plan.num_warps), _transposed() if of.into_rows else _channels_last()
    reciprocal = -(-(1 << 64) // inner)
    reciprocal -= (reciprocal >> 63) << 64
    args = (x, y, n_rows, n_cols, n_cols, *divisor(inner), reciprocal, outer_stride, col_stride)
    known = dict(
        LOG=log, ROWS=plan.rows, VEC=plan.vec, SPAN=read.span, ACROSS=read.across, PAIR=read.pair, GROUPS=read.groups,
        LANES=plan.vectors_per_chunk, WIDTH=of.width, CHUNKS=plan.chunks, UNPREDICATED=plan.unpredicated_chunks,
        ODD=of.odd, LONG=plan.recompute, PIECE=plan.piece, THREADS=32 * plan.num_warps, BULK=device.copies_in_bulk,
        PTX=device.ptx, EARLY=device.supports_pdl, DYNAMIC=plan.dynamic_bytes,
    )  # fmt: skip
    meta = {name: known[name] for name in kernel.declaration.constexprs}
    meta |= launch_options(kernel, plan, device) | early_start(meta)
    return Launch(kernel, (-(-n_rows // plan.rows),), args, meta)


# --- a copy -----------------------------------------------------------------------------------------------------------


class Tiles(NamedTuple):
    """A copy of (outer, middle, columns, rows) by tiles: sizes, strides of x and y in elements, and a tile's sides."""

    sizes: tuple[int, int, int, int]
    x_strides: tuple[int, int, int]  # of rows: 1
    y_strides: tuple[int, int, int]  # outer, middle, rows; of columns: 1
    rows: int
    cols: int


def _to_contiguous(x: Tensor) -> Dims:
    """(size, x's stride, stride in contiguous memory) of the fewest dimensions that hold x."""
    strides = [1] * x.dim()
    for d in range(x.dim() - 2, -1, -1):
        strides[d] = strides[d + 1] * x.shape[d + 1]
    return merge_dims([(x.shape[d], x.stride(d), strides[d]) for d in range(x.dim()) if x.shape[d] != 1])


def tiles_of(x: Tensor) -> Tiles | None:
    """How tiles copy x to contiguous memory; None where they cannot, or would be narrow.

    Some dimension's neighbors must be neighbors in memory, and at most two others are left besides it and the last one.
    """
    merged = _to_contiguous(x)
    along = next((i for i, dim in enumerate(merged[:-1]) if dim[1] == 1), None)
    if along is None or len(merged) > 4 or x.dtype not in DTYPE_NAMES:
        return None
    n_rows, _, y_row = merged.pop(along)
    n_cols, x_col, _ = merged.pop()
    if min(n_rows, n_cols) < LEAST_SIDE[x.element_size()] or max(n_rows, n_cols) > MOST_POSITIONS:
        return None
    (outer, x_outer, y_outer), (middle, x_middle, y_middle) = [(1, 0, 0)] * (2 - len(merged)) + merged
    rows, cols = (min(power_of_two(n), MOST_SIDE) for n in (n_rows, n_cols))
    if rows < cols:
        cols = min(TILE // rows, power_of_two(n_cols))
    else:
        rows = min(TILE // cols, power_of_two(n_rows))
    sizes = outer, middle, n_cols, n_rows
    return Tiles(sizes, (x_outer, x_middle, x_col), (y_outer, y_middle, y_row), rows, cols)


def copy_launch(x: Tensor, y: Tensor, tiles: Tiles, device: Device) -> Launch:
    """The launch that copies x to y, contiguous."""
    (outer, middle, n_cols, n_rows), rows, cols = tiles.sizes, tiles.rows, tiles.cols
    of_x, of_y = (n_rows, *tiles.x_strides), (n_cols, *tiles.y_strides)
    x_vec, y_vec = _vector_of(x, of_x), _vector_of(y, of_y)
    (n_rows, *x_strides), (n_cols, *y_strides) = [n // x_vec for n in of_x], [n // y_vec for n in of_y]
    grid = outer * middle * -(-tiles.sizes[3] // rows) * -(-tiles.sizes[2] // cols)
    elements = THREAD_ELEMENTS if min(x_vec, y_vec) > 1 else THREAD_ELEMENTS // 2  # each has an address of its own
    meta: dict[str, Any] = dict(ROWS=rows, COLS=cols, X_VEC=x_vec, Y_VEC=y_vec, EARLY=device.supports_pdl)
    meta |= dict(num_warps=max(1, rows * cols // (32 * elements))) | device.options() | early_start(meta)
    return Launch(_copy(), (grid,), (x, y, n_rows, n_cols, middle, *x_strides, *y_strides), meta)


def step_of(x: Tensor) -> int | None:
    """The one stride between all elements of x, in their order, where there is one and it is above 1; else None."""
    merged = _to_contiguous(x)
    return merged[0][1] if len(merged) == 1 and merged[0][1] > 1 and x.dtype in DTYPE_NAMES else None


def stepped_copy_launch(x: Tensor, y: Tensor, step: int, device: Device) -> Launch:
    """The launch that copies x, whose elements are `step` apart, to y, contiguous."""
    threads = STEPPED_WARPS * device.warp_size
    meta: dict[str, Any] = dict(THREADS=threads, CHUNKS=STEPPED_CHUNKS, EARLY=device.supports_pdl)
    meta |= dict(num_warps=STEPPED_WARPS) | device.options() | early_start(meta)
    return Launch(_stepped_copy(), (-(-x.numel() // (threads * STEPPED_CHUNKS)),), (x, y, x.numel(), step), meta)


def _vector_of(t: Tensor, numbers: tuple[int, ...]) -> int:
    """Elements of a vector at whose multiples runs of so many elements, so far apart, start and end."""
    full = 16 // t.element_size()
    return 1 if t.data_ptr() % 16 else min(alignment_of(n, full) for n in numbers)


_copies = Cache()


def contiguous(x: Tensor) -> Tensor:
    """x.contiguous(), by a kernel of ours where x is a transposition or its elements are one step apart."""
    key = (x.shape, x.stride(), x.dtype, x.data_ptr() & 15, x.get_device())
    run = _copies.get(key)
    if run is None:
        run = _copies.store(key, _prepare_copy(x) or False)
    if run is False:
        return x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    run(x, y)
    return y


def _prepare_copy(x: Tensor) -> Shaped | None:
    device = device_of(x)
    if device.kind == "hip":
        return None
    launch: Callable[[Tensor, Tensor], Launch]
    if (tiles := tiles_of(x)) is not None:
        launch = lambda x, y: copy_launch(x, y, tiles, device)  # noqa: E731
    elif (step := step_of(x)) is not None:
        launch = lambda x, y: stepped_copy_launch(x, y, step, device)  # noqa: E731
    else:
        return None
    try:  # of y only the dtype and an address at 16 bytes count
        return prepare_launch(launch, x, torch.empty_like(x[:0]))
    except KernelUnavailable:
        return None
