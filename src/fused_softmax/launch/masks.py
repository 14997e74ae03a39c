"""How a mask lies for the kernels of masked softmax: its flags and strides, and the order of the rows under it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..planning.types import VECTOR_BYTES, Plan
from .folding import merge_dims
from .layout import divisor
from .options import Flags

# of scores that follow each other in memory before the same of the next batch; H200: 64 KB are 2% slower
GROUP_BYTES = 2 << 20
# bytes of 8 elements of float32, the widest vector of a mask
MASK_ALIGNMENT = 32
# chunks of a row whose float32 mask is read in vectors and shifted
MOST_SHIFTED = 8
# MASK_COLS of a mask that is read in its own vectors, from the aligned address before it (common/mask_layouts.py)
SHIFTED = 3
Numbers = tuple[int, ...]


def queries_of(x: Tensor) -> int:
    """The queries of scores x: rows that a batch has."""
    return x.shape[-2] if x.dim() > 1 else 1


def kind_of(mask: Tensor | None) -> int:
    """0 for no mask, 1 for a boolean one, 2 for an additive one, as the kernels have them."""
    return 0 if mask is None else 1 if mask.dtype is torch.bool else 2


def describe_mask(
    mask: Tensor | None, x: Tensor, plan: Plan, unused: Tensor, *, forward: bool = False
) -> tuple[Tensor, Flags, Numbers]:
    """(what a kernel of this plan reads, its flags, sizes and strides) of the mask of scores x; `unused` for none.

    forward: for the forward kernel, which has an order of rows for shared masks, and takes masks whose vectors are not
    its rows'. The numbers then begin with those of `row_schedule` and end with the elements from the aligned address,
    which that kernel takes, to the mask.
    """
    n_queries = queries_of(x)
    if mask is None:
        flags: Flags = (("MASK", 0), ("MASK_COLS", 0), ("MASK_VEC", 1))
        numbers: Numbers = (1, 1, 0, 0, 0, 0, 0)
        return unused, _with_rows(flags, 0, forward), (*row_schedule(n_queries), *numbers, 0) if forward else numbers
    read, batch, m_query, m_col, cols, vec = _folded(mask, x, plan)
    kind = kind_of(mask)
    outer, middle, inner = ([(1, 0)] * 3 + batch)[-3:]
    strides = (outer[1], middle[1], inner[1], m_query)
    if not forward:
        flags = (("MASK", kind), ("MASK_COLS", cols), ("MASK_VEC", vec))
        return read, flags, (middle[0], inner[0], *(s // vec for s in strides), m_col)
    phase = 0
    if cols == 1 and plan.vec * x.element_size() == VECTOR_BYTES:
        # of the row's vector: its elements and its bytes in the mask, of which a thread reads at most 16 at once
        in_vector = plan.vec * read.element_size()
        in_phase = not plan.unaligned and vec * read.element_size() >= min(in_vector, VECTOR_BYTES)
        # a long row of float32 under such a mask: twice the loads, but half the registers for it. H200: 0.94 of a copy
        # instead of 0.80 (13,135 columns), 1.02 instead of 0.77 (9,381)
        by_elements = plan.vec == 4 and read.element_size() == 4 and plan.chunks > MOST_SHIFTED
        # H200, 20,001 columns of float32 on a cluster: additive 0.84 of a copy by elements, 0.73 in vectors
        if plan.ctas > 1:
            by_elements = read.element_size() == 4 or (plan.vec == 4 and kind == 2)
        if not in_phase and not by_elements and read.untyped_storage().data_ptr() % MASK_ALIGNMENT == 0:
            cols, vec, phase = SHIFTED, 1, read.data_ptr() % MASK_ALIGNMENT // read.element_size()
    order, rows, strides = _order(x, batch, strides)
    flags = (("MASK", kind), ("MASK_COLS", cols), ("MASK_VEC", vec))
    numbers = (middle[0], inner[0], *(s // vec for s in strides), m_col, phase)
    return read, _with_rows(flags, rows, forward), (*order, *numbers)


class _Folded(NamedTuple):
    """A mask as a kernel reads it."""

    read: Tensor
    batch: list[tuple[int, ...]]  # (size, stride) of at most three dimensions
    m_query: int
    m_col: int
    cols: int  # MASK_COLS, where its vectors are its rows'
    vec: int


def _folded(mask: Tensor, x: Tensor, plan: Plan) -> _Folded:
    read = readable(mask.detach().view(torch.uint8) if kind_of(mask) == 1 else mask.detach(), plan)
    expanded = read.expand(x.shape if x.dim() > 1 else (1, *x.shape))
    batch = merge_dims([(n, s) for n, s in zip(expanded.shape[:-2], expanded.stride()[:-2], strict=True) if n != 1])
    if len(batch) > 3:  # no three strides describe it
        read = expanded = expanded.contiguous()
        batch = merge_dims(list(zip(expanded.shape[:-2], expanded.stride()[:-2], strict=True)))
    m_query, m_col = expanded.stride()[-2:]
    m_col = 0 if expanded.shape[-1] == 1 else m_col
    cols = m_col if m_col in (0, 1) else 2
    # of rows that are read one by one, a mask's vectors would decide which thread adds which columns
    vec = _mask_vector(read) if cols == 1 and plan.vec > 1 else 1
    return _Folded(read, batch, m_query, m_col, cols, vec)


def describe_mask_of_pieces(
    mask: Tensor | None, x: Tensor, plan: Plan, unused: Tensor, causal: bool
) -> tuple[Tensor, Flags, Numbers, Numbers, Numbers]:
    """(what a kernel reads, its flags, `row_order`, sizes and strides, `piece_order`) of a mask of pieces of scores x.

    Queries and batches that are one stride apart are one dimension, except under causality, which asks for queries.
    Batches that share a mask and are neighbors, as the heads of (batch, 1, queries, columns), have no order of pieces:
    narrow rows of one batch lie in L2 until the next batch.
    """
    n_queries = queries_of(x)
    if mask is None:
        flags: Flags = (("MASK", 0), ("MASK_COLS", 0), ("MASK_ROWS", 0), ("MASK_VEC", 1))
        return unused, flags, row_order(n_queries), (*divisor(1), *divisor(1), 0, 0, 0, 0, 0), piece_order()
    read, batch, m_query, m_col, cols, vec = _folded(mask, x, plan)
    vec = min(vec, plan.vec)  # no wider access
    queries = [(n_queries, m_query)] if n_queries > 1 else []
    merged = merge_dims([*batch, *queries]) or [(1, 0)]
    *dims, row = [*batch, *(queries or [(1, 0)])] if causal else merged
    order = piece_order()
    if len(merged) == 1:
        rows, strides, sizes = 0, (0, 0, 0, merged[0][1]), (1, 1)
    else:
        outer, middle, inner = ([(1, 0)] * 3 + dims)[-3:]
        rows = 1 if len(dims) == 1 else 2
        strides, sizes = (inner[1] if rows == 1 else outer[1], middle[1], inner[1], row[1]), (inner[0], middle[0])
        n_queries = row[0]
        if dims[0][1] == 0:
            n_pieces = -(-math.prod(n for n, *_ in merged) // plan.rows)
            order = piece_order(n_pieces, dims[0][0], GROUP_BYTES // (plan.rows * x.shape[-1] * x.element_size()))
    flags = (("MASK", kind_of(mask)), ("MASK_COLS", cols), ("MASK_ROWS", rows), ("MASK_VEC", vec))
    numbers = (*divisor(sizes[0]), *divisor(sizes[1]), *(s // vec for s in strides), m_col)
    return read, flags, row_order(n_queries), numbers, order


def piece_order(n_pieces: int = 0, n_shared: int = 1, n_group: int = 1) -> Numbers:
    """The arguments of `piece_of_shared_mask` for n_pieces pieces, whose n_shared equal parts share a mask."""
    n_part = n_pieces // n_shared if n_shared > 1 else 0
    block, group, last = _blocks(n_part, n_shared, n_group)
    return n_part, *block, *group, *last, n_shared


def mask_alignment(flags: Flags, dtype: torch.dtype) -> int:
    """The bytes that divide the address of a mask with such flags, at most those of a vector."""
    flag = dict(flags)
    return VECTOR_BYTES if flag["MASK_COLS"] == SHIFTED else flag["MASK_VEC"] * dtype.itemsize


def _with_rows(flags: Flags, rows: int, forward: bool) -> Flags:
    return (*flags, ("MASK_ROWS", rows)) if forward else flags


def _order(
    x: Tensor, batch: list[tuple[int, ...]], strides: tuple[int, int, int, int]
) -> tuple[Numbers, int, tuple[int, int, int, int]]:
    """(the order of scores x, how their mask's rows lie, its strides for that); batch: (size, the mask's stride)."""
    n_queries, row_bytes, m_query = queries_of(x), x.shape[-1] * x.element_size(), strides[-1]
    queries = [(n_queries, m_query)] if n_queries > 1 else []
    if len(merge_dims([*batch, *queries])) <= 1:  # one stride for all rows
        return row_schedule(n_queries), 0, (0, 0, 0, m_query if queries else batch[-1][1] if batch else 0)
    n_batch = math.prod(n for n, *_ in batch)
    n_shared, inner = _shared_batches([(n, s) for n, s in batch])
    # one row of a mask for all queries: every order finds it in L2
    order = row_schedule(n_queries, n_batch, n_shared, GROUP_BYTES // row_bytes if m_query else None, inner=inner)
    kept = merge_dims([(n, s) for n, s in batch if s])
    if len(kept) > 1 or math.prod(n for n, *_ in kept) * n_shared != n_batch:
        return order, 2, strides
    return order, 1, (kept[0][1] if kept else 0, 0, 0, m_query)


def readable(mask: Tensor, plan: Plan) -> Tensor:
    """The mask as a kernel of this plan may read it: on a cluster its columns are neighbors, or one value.

    Other strides are copied first. Triton 3.6 gives their tile a layout that spreads a segment over warps, but a
    reduction over a cluster needs each segment in one warp.
    """
    if mask.dim() == 0 or mask.shape[-1] == 1 or mask.stride(-1) in (0, 1):
        return mask
    return mask if plan.ctas == 1 else mask.contiguous()


def row_order(n_queries: int) -> Numbers:
    """(n_queries, multiplier, power): the arguments of `row_in_order`."""
    return divisor(n_queries)


def row_schedule(
    n_queries: int, n_batch: int = 1, n_shared: int = 1, n_group: int | None = None, *, inner: bool = True
) -> Numbers:
    """The arguments of `row_of_shared_mask`, which begin with those of `row_in_order` where nothing is shared.

    n_shared: batches that share a mask. inner: whether they are neighbors, or n_batch/n_shared batches apart. n_group:
    queries of a batch that follow each other; None: all.
    """
    block, group, last = _blocks(n_queries, n_shared, n_queries if n_group is None else n_group)
    strides = (n_shared, 1) if inner else (1, n_batch // n_shared)
    return n_queries, *divisor(n_queries * n_shared), strides[0], *block, strides[1], *group, *last


def _blocks(n: int, n_shared: int, n_group: int) -> tuple[Numbers, Numbers, Numbers]:
    """The block, the group and the last group of `place_in_blocks`, for n_shared parts of n."""
    n_group = max(1, min(n_group, n))
    return divisor(n_group * n_shared), divisor(n_group), divisor((n - 1) % n_group + 1)


ORDER = len(row_schedule(1))  # how many numbers they are


def _shared_batches(batch: Sequence[tuple[int, int]]) -> tuple[int, bool]:
    """How many batches, of dimensions (size, the mask's stride), share a mask, and whether they are neighbors."""
    ends = []
    for dims in (batch, batch[::-1]):
        kept = next((i for i, (_, stride) in enumerate(dims) if stride), len(dims))
        ends.append(math.prod(n for n, _ in dims[:kept]))
    outer, inner = ends
    return (inner, True) if inner >= outer else (outer, False)


def _mask_vector(mask: Tensor) -> int:
    """Elements of a vector access to the mask: at most 16 bytes, a power of two.

    The mask's address, its width and its strides are multiples of it. The width and the strides of dimensions of size 1
    count too: the vector is then the same for a batch and for one of its rows, and so are a row's bits.
    """
    lengths = (mask.shape[-1], *mask.stride()[:-1])
    vec = VECTOR_BYTES // mask.element_size()
    while vec > 1 and (mask.data_ptr() % (vec * mask.element_size()) or any(n % vec for n in lengths)):
        vec //= 2
    return vec
