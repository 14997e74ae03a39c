"""The row scheduler: the order in which programs take the rows of masked scores, and the columns of causal rows.

Programs take rows in groups that lie together in memory. Groups that share a mask follow each other soon, and the
longest causal rows come first.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fast_divmod(n, d, multiplier, power):
    """(n // d, n % d) of n < 2^31 by a multiplication (Granlund and Montgomery 1994).

    multiplier is ceil(2^power/d), and power is at least 31 + log2(d). A row's loads wait for the result, and the GPU's
    own division takes 150 cycles.
    """
    quotient = (n * multiplier) >> power
    return quotient, n - quotient * d


@triton.jit
def scheduled_row(
    place, n_queries, n_group, group_multiplier, group_shift, n_batch, batch_multiplier, batch_shift,
    GROUPED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """(row, batch, query) of the row at `place` in the order.

    Where GROUPED, n_group neighbors of one batch come first, then the same queries of the next batch, so that they find
    their mask in L2. Elsewhere all n_group queries of a batch come first. Neighbors lie together in memory: an order
    that takes rows a power of two apart, one after the other, loses a tenth of the bandwidth. The longest causal rows
    come first.
    """
    turn, query = fast_divmod(place, n_group, group_multiplier, group_shift)
    batch = turn
    if GROUPED:
        group, batch = fast_divmod(turn, n_batch, batch_multiplier, batch_shift)
        query += group * n_group
    if CAUSAL:
        query = n_queries - 1 - query
    return batch * n_queries + query, batch, query.to(tl.int32)


@triton.jit
def seen_of(query, columns, CAUSAL: tl.constexpr):
    """The number of columns that a row sees.  # query: [SEGMENTS, 1]"""
    if CAUSAL:
        return tl.minimum(query + 1, columns)
    else:
        return columns + 0 * query
