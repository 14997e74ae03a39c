"""The order in which programs take rows of masked scores and columns of causal rows, and where transposed rows lie.

Programs take rows in groups that lie together in memory. Groups that share a mask follow each other soon, and the
longest causal rows come first. Transposed rows are neighbors in memory, and their columns are not: (outer, n_cols,
inner).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fast_divmod(n, d, multiplier, power):
    """(n // d, n % d) of n < 2^31 by a multiplication (Granlund and Montgomery 1994), int32.

    power is log2(d), rounded up, and multiplier is ceil(2^(31 + power)/d). A row's loads wait for the result, and the
    GPU's own division takes 150 cycles.
    """
    twice = n.to(tl.uint32) * 2
    quotient = (tl.umulhi(twice, multiplier.to(tl.uint32)) >> power.to(tl.uint32)).to(tl.int32)
    return quotient, n.to(tl.int32) - quotient * d.to(tl.int32)


@triton.jit
def row_in_order(place, n_queries, multiplier, power, CAUSAL: tl.constexpr):
    """(row, batch, query) of the row at `place`: the batches in order, and the longest causal rows of each one first.

    multiplier, power: the numbers of `fast_divmod` for n_queries.
    """
    batch, query = fast_divmod(place, n_queries, multiplier, power)
    if CAUSAL:
        first = place - query
        query = n_queries.to(tl.int32) - 1 - query
        place = first + query
    return place, batch, query


@triton.jit
def rows_of_piece(ROWS: tl.constexpr, n_queries, multiplier, power):
    """(row, query, first row) of the causal rows of a program that writes them as one piece: neighbors in memory.

    The programs take the rows from the last one on, so that the longest rows of each batch come first.
    """
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * ROWS
    row = first_row + tl.arange(0, ROWS)[:, None]
    _, query = fast_divmod(row, n_queries, multiplier, power)
    return row, query, first_row


@triton.jit
def place_in_blocks(
    place, n, n_block, block_multiplier, block_power, n_group, group_multiplier, group_power, n_last, last_multiplier,
    last_power,
):  # fmt: skip
    """(part, which of its n) of what is at `place`, where several parts of n are taken in blocks.

    A block has n_group neighbors of one part, then the same of the next part, n_block in all; the last block has n_last
    of each part. Neighbors lie together in memory: an order that takes rows a power of two apart, one after the other,
    loses a tenth of the bandwidth.
    """
    block, rest = fast_divmod(place, n_block, block_multiplier, block_power)
    first = block * n_group.to(tl.int32)
    is_last = n.to(tl.int32) - first <= n_last.to(tl.int32)
    part, at = fast_divmod(
        rest,
        tl.where(is_last, n_last, n_group),
        tl.where(is_last, last_multiplier, group_multiplier),
        tl.where(is_last, last_power, group_power),
    )
    return part, at + first


@triton.jit
def row_of_shared_mask(
    place, n_queries, n_span, span_multiplier, span_power, span_stride, n_block, block_multiplier, block_power,
    shared_stride, n_group, group_multiplier, group_power, n_last, last_multiplier, last_power, CAUSAL: tl.constexpr,
):  # fmt: skip
    """(row, span, batch, query) of the row at `place`, where several batches share a mask and find it in L2.

    A span has the n_span rows of all batches that share a mask, their queries in blocks. The strides are in batches.
    """
    span, rest = fast_divmod(place, n_span, span_multiplier, span_power)
    shared, query = place_in_blocks(
        rest, n_queries, n_block, block_multiplier, block_power, n_group, group_multiplier, group_power, n_last,
        last_multiplier, last_power,
    )  # fmt: skip
    batch = span * span_stride.to(tl.int32) + shared * shared_stride.to(tl.int32)
    if CAUSAL:
        query = n_queries.to(tl.int32) - 1 - query
    return batch.to(tl.int64) * n_queries + query, span, batch, query


@triton.jit
def piece_of_shared_mask(
    n_part, n_block, block_multiplier, block_power, n_group, group_multiplier, group_power, n_last, last_multiplier,
    last_power, n_shared,
):  # fmt: skip
    """The piece of rows that this program takes, where n_shared parts of n_part pieces share a mask and find it in L2.

    The parts are taken in blocks. Pieces after all parts come last.
    """
    place, n_part = tl.program_id(0), n_part.to(tl.int32)
    part, at = place_in_blocks(
        place, n_part, n_block, block_multiplier, block_power, n_group, group_multiplier, group_power, n_last,
        last_multiplier, last_power,
    )  # fmt: skip
    return tl.where(place < n_part * n_shared.to(tl.int32), part * n_part + at, place)


@triton.jit
def row_at(
    place, n_queries, n_span, span_multiplier, span_power, span_stride, n_block, block_multiplier, block_power,
    shared_stride, n_group, group_multiplier, group_power, n_last, last_multiplier, last_power,
    SHARES: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """(row, span, batch, query) of the row at `place`.

    SHARES: whether batches may share a mask. Otherwise no span is asked for, and without causality no query: they are
    `place`, and n_span is n_queries.
    """
    if SHARES:
        return row_of_shared_mask(
            place, n_queries, n_span, span_multiplier, span_power, span_stride, n_block, block_multiplier, block_power,
            shared_stride, n_group, group_multiplier, group_power, n_last, last_multiplier, last_power, CAUSAL,
        )  # fmt: skip
    elif CAUSAL:
        row, batch, query = row_in_order(place, n_queries, span_multiplier, span_power, CAUSAL)
        return row, place, batch, query
    else:
        return place, place, place, place


@triton.jit
def seen_of(query, columns, CAUSAL: tl.constexpr):
    """The number of columns that a row sees.  # query: [SEGMENTS, 1]"""
    if CAUSAL:
        return tl.minimum(query + 1, columns)
    else:
        return columns + 0 * query


@triton.jit
def first_of_piece(first_row, inner, reciprocal):
    """(outer, position) of a row. reciprocal: 2^64/inner, rounded up, of which the quotient is at most 1 too large."""
    outer = tl.umulhi(first_row.to(tl.uint64), reciprocal.to(tl.uint64)).to(tl.int64)
    position = first_row - outer * inner
    over = position < 0
    return tl.where(over, outer - 1, outer), tl.where(over, position + inner, position).to(tl.int32)


@triton.jit
def place_of_row(row, first_outer, first_position, inner, multiplier, power, outer_stride):
    """Where a row of the piece starts on this side, in elements.  # row: [THREADS], result int64"""
    outer, position = fast_divmod(first_position + row, inner, multiplier, power)
    return (first_outer + outer) * outer_stride + position
