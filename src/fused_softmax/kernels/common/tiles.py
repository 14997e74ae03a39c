"""Locates a program's slice of its row, and reads and writes it: in vectors, and never outside the row.

A program (or each CTA of a cluster) owns one slice of the row. The slice has CHUNKS chunks. A chunk is a tile
[SEGMENTS, VECTORS, VEC]. VEC columns are one vector access, and each vector belongs to one thread. A segment is the
part of a row that is reduced by itself: the whole row where a program holds whole rows, or the share of one of the
WARPS_PER_ROW warps of each CTA of a cluster. These warps take turns at vectors within their CTA's slice. An unaligned
row is read in vectors too, except its head and tail:

    row          |head|       slice 0        |       slice 1        |tail|      head, tail < VEC columns
    slice                     |chunk 0|chunk 1|chunk 2 (predicated)|

Offsets count from the row's first aligned column and are multiples of VEC, so that Triton can prove the alignment of a
vector access. Widths and strides come in units of VEC for the same reason. Slice 0 reads and writes head and tail, one
element per thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

# L2 evicts written lines first, so it writes back dirty lines earlier and in larger batches. H200: 3% less time for
# softmax, between other kernels too, and no shape gets slower. This is how rows beat a plain copy
READS = tl.constexpr("evict_last")


@triton.constexpr_function
def gradient_reads(unaligned: bool, dtype: tl.dtype) -> str:
    """The eviction policy of a gradient's reads: none for unaligned rows of 16 bits.

    100,277 columns run at 0.99 of an add without a policy, and at 0.88 with it (higher is better).
    """
    return "" if unaligned and dtype.primitive_bitwidth == 16 else "evict_last"


@triton.jit
def segments_of(ROWS: tl.constexpr, CTAS: tl.constexpr, WARPS_PER_ROW: tl.constexpr = 1):
    """(row, rank of the CTA in its cluster) of each segment of this program's tile.  # [SEGMENTS, 1]"""
    segment = tl.arange(0, ROWS * CTAS * WARPS_PER_ROW)[:, None]
    if CTAS > 1:
        return tl.program_id(0).to(tl.int64) + 0 * segment, segment // WARPS_PER_ROW
    else:
        return tl.program_id(0).to(tl.int64) * ROWS + segment, 0 * segment


@triton.jit
def warp_of(SEGMENTS: tl.constexpr, WARPS_PER_ROW: tl.constexpr):
    """The warp of each segment: the warps of a CTA take turns at VECTORS vectors of its slice.  # [SEGMENTS, 1]"""
    return tl.arange(0, SEGMENTS)[:, None] % WARPS_PER_ROW


@triton.constexpr_function
def log2(n: int) -> int:
    """The logarithm of a power of two."""
    return n.bit_length() - 1


@triton.jit
def start_of(row, stride, phase, VEC: tl.constexpr, UNALIGNED: tl.constexpr):
    """The offset of the row's first aligned column, in elements from a pointer that is aligned to VEC.

    stride: in units of VEC, or in elements where UNALIGNED. phase: elements from that pointer to the first row, where
    UNALIGNED.
    """
    if UNALIGNED:
        return (phase + row * stride + (VEC - 1) >> log2(VEC)) * VEC
    else:
        return row * stride * VEC


@triton.jit
def span_of(row, stride, phase, n_cols, VEC: tl.constexpr, UNALIGNED: tl.constexpr):
    """(head, interior): columns before the row's first aligned one, and the columns of whole vectors after them."""
    if UNALIGNED:
        start = phase + row * stride
        head = tl.minimum((start_of(row, stride, phase, VEC, UNALIGNED) - start).to(tl.int32), n_cols)
        return head, (n_cols - head >> log2(VEC)) * VEC
    else:
        return 0, n_cols * VEC


@triton.jit
def unit_of(
    unit, n_rows, n_splits, stride, phase, n_cols, ROWS: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr,
    CHUNKS: tl.constexpr, UNALIGNED: tl.constexpr,
):  # fmt: skip
    """(rows [ROWS, 1], which exist, split, head, interior, first, width) of unit `unit` of rows in n_splits units each.

    A unit has CHUNKS chunks of ROWS rows. head, interior: as of `span_of`. first: its offset in a row from `start_of`;
    width: how many of its columns are there.
    """
    row = unit // n_splits * ROWS + tl.arange(0, ROWS)[:, None]
    split = (unit % n_splits).to(tl.int32)
    exists = row < n_rows
    head, interior = span_of(row, stride, phase, n_cols, VEC, UNALIGNED)
    first = split * (CHUNKS * VECTORS * VEC)
    return row, exists, split, head, interior, first, width_if(exists, interior - first)


@triton.jit
def slice_of(interior, rank, CTAS: tl.constexpr, VEC: tl.constexpr):
    """(first offset, width) of the even slice that belongs to CTA `rank` of CTAS."""
    even = (interior // VEC + CTAS - 1) // CTAS * VEC
    first = rank * even
    return first, tl.minimum(even, interior - first)


@triton.jit
def width_if(exists, width):
    """`width`, or 0 where not `exists`.  # both [SEGMENTS, 1]

    It is a product, because Triton 3.8 and later lose the divisibility of a select, and then access no vectors.
    """
    return width * exists.to(tl.int32)


@triton.jit
def slice_zero(ptr, stride, phase, n_cols, CTAS: tl.constexpr, VEC: tl.constexpr, UNALIGNED: tl.constexpr):
    """(pointer to the first aligned column, elements of a slice), as scalars, of a program that has one row."""
    row = tl.program_id(0).to(tl.int64)
    _, interior = span_of(row, stride, phase, n_cols, VEC, UNALIGNED)
    return ptr + start_of(row, stride, phase, VEC, UNALIGNED), (interior // VEC + CTAS - 1) // CTAS * VEC


@triton.jit
def chunk_offsets(C: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr, WARPS_PER_ROW: tl.constexpr = 1):
    """Offsets of chunk C from its segment's first column.  # [1, VECTORS*VEC]"""
    return C * (WARPS_PER_ROW * VECTORS * VEC) + tl.arange(0, VECTORS * VEC)[None, :]


@triton.jit
def load_chunk(
    at, width, C: tl.constexpr, SEGMENTS: tl.constexpr, UNPREDICATED: tl.constexpr, VECTORS: tl.constexpr,
    VEC: tl.constexpr, fill, WARPS_PER_ROW: tl.constexpr = 1, POLICY: tl.constexpr = READS,
):  # fmt: skip
    """Chunk C of the slice as loaded, [SEGMENTS, VECTORS, VEC]. The first UNPREDICATED chunks lie inside every slice.

    # at, width: [SEGMENTS, 1]
    """
    offsets = chunk_offsets(C, VECTORS, VEC, WARPS_PER_ROW)
    if C < UNPREDICATED:
        tile = tl.load(at + offsets, eviction_policy=POLICY)
    else:
        tile = tl.load(at + offsets, mask=offsets < width, other=fill, eviction_policy=POLICY)
    return tl.reshape(tile, (SEGMENTS, VECTORS, VEC))


@triton.jit
def load_chunks(
    at, width, SEGMENTS: tl.constexpr, CHUNKS: tl.constexpr, UNPREDICATED: tl.constexpr, VECTORS: tl.constexpr,
    VEC: tl.constexpr, fill, WARPS_PER_ROW: tl.constexpr = 1, POLICY: tl.constexpr = READS, FIRST: tl.constexpr = 0,
):  # fmt: skip
    """Chunks FIRST .. CHUNKS-1 of the slice, one tile each, as `load_chunk` returns them.  # at, width: [SEGMENTS, 1]

    All loads are issued before any value is used, because the bytes in flight limit the speed.
    """
    tiles = ()
    for c in tl.static_range(FIRST, CHUNKS):
        tiles = tiles + (load_chunk(at, width, c, SEGMENTS, UNPREDICATED, VECTORS, VEC, fill, WARPS_PER_ROW, POLICY),)
    return tiles


@triton.jit
def issue_loads():
    """Keeps the loads before it before what follows: the compiler moves no load over a barrier of a warp."""
    tl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def store_chunk(
    at, width, value, C: tl.constexpr, SEGMENTS: tl.constexpr, UNPREDICATED: tl.constexpr, VECTORS: tl.constexpr,
    VEC: tl.constexpr, WARPS_PER_ROW: tl.constexpr = 1,
):  # fmt: skip
    """Writes chunk C of the slice in the output's dtype.

    # at, width: [SEGMENTS, 1]; value: [SEGMENTS, VECTORS, VEC]
    """
    offsets = chunk_offsets(C, VECTORS, VEC, WARPS_PER_ROW)
    value = tl.reshape(value.to(at.dtype.element_ty), (SEGMENTS, VECTORS * VEC))
    if C < UNPREDICATED:
        tl.store(at + offsets, value)
    else:
        tl.store(at + offsets, value, mask=offsets < width)


@triton.jit
def head_and_tail(head, interior, n_cols, owner, VECTORS: tl.constexpr, VEC: tl.constexpr):
    """(offsets from the first aligned column, mask) of the head at places [0, VEC) and the tail at [VEC, 2*VEC).

    # head, interior, owner: scalar or [SEGMENTS, 1]; result [SEGMENTS, VECTORS], VECTORS >= 2*VEC
    """
    place = tl.arange(0, VECTORS)[None, :]
    offsets = tl.where(place < VEC, place - head, interior + place - VEC)
    exists = tl.where(place < VEC, place < head, place - VEC < n_cols - head - interior)
    # compared again, because Triton 3.9's interpreter makes int32 of `scalar == 0` and a tile
    return offsets, exists & (owner != 0)
