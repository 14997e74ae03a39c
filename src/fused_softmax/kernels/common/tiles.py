"""Where a program's part of its row lies, and how it is read and written: in vectors, and never outside the row.

A program (or each CTA of a cluster) owns one slice of the row. The slice is CHUNKS chunks of VECTORS x VEC columns, held
as tiles [SEGMENTS, VECTORS, VEC]: a lane is what one thread holds, VEC columns are one vector access, and the lines are the
rows of the program, or those who share a row: the WARPS_PER_ROW (warps) of each CTA of a cluster, which take turns at vectors
within their CTA's slice. A row that starts unaligned is read in vectors too, apart from its ends:

    row          |head|       slice 0        |       slice 1        |tail|      head, tail < VEC columns
    slice                     |chunk 0|chunk 1|chunk 2 (masked)|

Offsets count from the row's first aligned column and are multiples of VEC, so that Triton can prove what a vector
access needs; widths and strides come in units of VEC for the same reason. Head and tail are one element a lane, and
are read and written by slice 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

# L2 keeps what was read longer than what was written, and so writes back sooner and more at a time. H200: 3% of a
# softmax's time, between other kernels too, and nothing lost anywhere; it is how rows beat a plain copy
READS = tl.constexpr("evict_last")


@triton.constexpr_function
def gradient_reads(edge: bool, dtype: tl.dtype) -> str:
    """The policy of a gradient's reads: rows of 16 bits that start unaligned are faster without one (100,277 columns:
    .99 of an add against .88 with it)."""
    return "" if edge and dtype.primitive_bitwidth == 16 else "evict_last"


@triton.jit
def segments_of(ROWS: tl.constexpr, CTAS: tl.constexpr, WARPS_PER_ROW: tl.constexpr = 1):
    """(row, rank) of each line of this program's tile.  # [SEGMENTS, 1]

    A line is a row, or one of the WARPS_PER_ROW (warps) of CTA `rank` of a cluster that shares a row.
    """
    line = tl.arange(0, ROWS * CTAS * WARPS_PER_ROW)[:, None]
    if CTAS > 1:
        return tl.program_id(0).to(tl.int64) + 0 * line, line // WARPS_PER_ROW
    else:
        return tl.program_id(0).to(tl.int64) * ROWS + line, 0 * line


@triton.jit
def warp_of(SEGMENTS: tl.constexpr, WARPS_PER_ROW: tl.constexpr):
    """Which part of its CTA's slice each line is: the parts take turns at vectors of VECTORS lanes.  # [SEGMENTS, 1]"""
    return tl.arange(0, SEGMENTS)[:, None] % WARPS_PER_ROW


@triton.jit
def start_of(row, stride, phase, VEC: tl.constexpr, UNALIGNED: tl.constexpr):
    """Where the row's first aligned column lies, in elements from a pointer that is aligned to VEC.

    stride: in units of VEC, or in elements where UNALIGNED; phase: elements from that pointer to the first row, where UNALIGNED.
    """
    if UNALIGNED:
        return (phase + row * stride + (VEC - 1)) // VEC * VEC
    else:
        return row * stride * VEC


@triton.jit
def span_of(row, stride, phase, n_cols, VEC: tl.constexpr, UNALIGNED: tl.constexpr):
    """(head, interior): columns before the row's first aligned one, and columns from there on in whole vectors."""
    if UNALIGNED:
        start = phase + row * stride
        head = tl.minimum((start_of(row, stride, phase, VEC, UNALIGNED) - start).to(tl.int32), n_cols)
        return head, (n_cols - head) // VEC * VEC
    else:
        return 0, n_cols * VEC


@triton.jit
def slice_of(interior, rank, CTAS: tl.constexpr, VEC: tl.constexpr):
    """(first offset, width) of the even slice that belongs to CTA `rank` of CTAS."""
    even = (interior // VEC + CTAS - 1) // CTAS * VEC
    first = rank * even
    return first, tl.minimum(even, interior - first)


@triton.jit
def width_if(exists, width):
    """`width`, and 0 where not `exists`: a product. Triton 3.8 and later do not know what a select is divisible by, and
    a mask made of one has no vectors.  # both [SEGMENTS, 1]"""
    return width * exists.to(tl.int32)


@triton.jit
def slice_zero(ptr, stride, phase, n_cols, CTAS: tl.constexpr, VEC: tl.constexpr, UNALIGNED: tl.constexpr):
    """(pointer to the first aligned column, elements of a slice), as scalars, of a program that has but one row."""
    row = tl.program_id(0).to(tl.int64)
    _, interior = span_of(row, stride, phase, n_cols, VEC, UNALIGNED)
    return ptr + start_of(row, stride, phase, VEC, UNALIGNED), (interior // VEC + CTAS - 1) // CTAS * VEC


@triton.jit
def chunk_offsets(C: tl.constexpr, VECTORS: tl.constexpr, VEC: tl.constexpr, WARPS_PER_ROW: tl.constexpr = 1):
    """Offsets of chunk C from its line's first column.  # [1, VECTORS*VEC]"""
    return C * (WARPS_PER_ROW * VECTORS * VEC) + tl.arange(0, VECTORS * VEC)[None, :]


@triton.jit
def load_chunk(
    at,
    width,
    C: tl.constexpr,
    SEGMENTS: tl.constexpr,
    UNPREDICATED: tl.constexpr,
    VECTORS: tl.constexpr,
    VEC: tl.constexpr,
    fill,
    WARPS_PER_ROW: tl.constexpr = 1,
    POLICY: tl.constexpr = READS,
):
    """Chunk C of the slice as loaded, [SEGMENTS, VECTORS, VEC]; the first UNPREDICATED are known to lie in it.

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
    at,
    width,
    SEGMENTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    UNPREDICATED: tl.constexpr,
    VECTORS: tl.constexpr,
    VEC: tl.constexpr,
    fill,
    WARPS_PER_ROW: tl.constexpr = 1,
    POLICY: tl.constexpr = READS,
    FIRST: tl.constexpr = 0,
):
    """Chunks FIRST .. CHUNKS-1 of the slice, a tile for each, as `load_chunk` gives them.

    All loads are issued before any value is used: the bytes in flight are the speed.  # at, width: [SEGMENTS, 1]
    """
    tiles = ()
    for c in tl.static_range(FIRST, CHUNKS):
        tiles = tiles + (load_chunk(at, width, c, SEGMENTS, UNPREDICATED, VECTORS, VEC, fill, WARPS_PER_ROW, POLICY),)
    return tiles


@triton.jit
def store_chunk(
    at,
    width,
    value,
    C: tl.constexpr,
    SEGMENTS: tl.constexpr,
    UNPREDICATED: tl.constexpr,
    VECTORS: tl.constexpr,
    VEC: tl.constexpr,
    WARPS_PER_ROW: tl.constexpr = 1,
):
    """Writes chunk C of the slice in the output's dtype.  # at, width: [SEGMENTS, 1]; value: [SEGMENTS, VECTORS, VEC]"""
    offsets = chunk_offsets(C, VECTORS, VEC, WARPS_PER_ROW)
    value = tl.reshape(value.to(at.dtype.element_ty), (SEGMENTS, VECTORS * VEC))
    if C < UNPREDICATED:
        tl.store(at + offsets, value)
    else:
        tl.store(at + offsets, value, mask=offsets < width)


@triton.jit
def head_and_tail(head, interior, n_cols, owner, VECTORS: tl.constexpr, VEC: tl.constexpr):
    """(offsets from the first aligned column, mask) of the head in lanes [0, VEC) and the tail in [VEC, 2*VEC).

    # head, interior, owner: scalar or [SEGMENTS, 1]; result [SEGMENTS, VECTORS], VECTORS >= 2*VEC
    """
    lane = tl.arange(0, VECTORS)[None, :]
    offsets = tl.where(lane < VEC, lane - head, interior + lane - VEC)
    exists = tl.where(lane < VEC, lane < head, lane - VEC < n_cols - head - interior)
    # a comparison again: Triton 3.9's interpreter makes int32 of `scalar == 0` and a tile
    return offsets, exists & (owner != 0)
