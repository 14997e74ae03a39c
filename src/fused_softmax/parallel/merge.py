"""Merge the shards' numbers into those of whole rows, in O(rows). Nothing here reads logits or talks to other ranks.

    M = max(m_r);  S = sum(s_r*exp(m_r - M));  lse = M + log(S);  log p_t = (z_t - M) - log(S)

m_r and s_r are a shard's maximum and its sum of exp(z - m_r). All ranks merge the same numbers in the same order, so
they have the same bits. Within batch_invariant() the shards are the row's 8 segments, however many ranks hold them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

SEGMENTS = 8  # of a row, within batch_invariant()


class Rows(NamedTuple):
    """The rows of all columns: (n_rows,), and of their shards: (shards, n_rows)."""

    row_max: Tensor
    row_sum: Tensor  # NaN where a rank made another call
    log_sum: Tensor
    difference: Tensor  # m_r - M
    shard_sum: Tensor  # s_r

    @property
    def lse(self) -> Tensor:
        return self.row_max + self.log_sum

    @property
    def moments(self) -> Tensor:
        """(row_max, row_sum), as the gradients' kernels take them.  # (n_rows, 2)"""
        return torch.stack((self.row_max, self.row_sum), 1)


def merge(moments: Tensor, disagrees: Tensor | None, *, infinite: bool = False) -> Rows:
    """moments: (ranks, segments, n_rows, 2), each segment's (m_r, s_r).

    infinite: a row with +inf keeps its infinite sum; otherwise it is NaN, as its probabilities are.
    """
    moments = in_order(moments)
    m, s = moments[..., 0], moments[..., 1]
    row_max = m.amax(0)
    difference = m - row_max
    row_sum = added(s * difference.exp())
    if disagrees is not None:
        row_sum = torch.where(disagrees, float("nan"), row_sum)
    if not infinite:
        row_sum = row_sum.nan_to_num(nan=float("nan"), posinf=float("nan"))
    return Rows(row_max, row_sum, row_sum.log(), difference, s)


def in_order(t: Tensor) -> Tensor:
    """(ranks, segments, ...) as (shards, ...).

    8 shards are the segments of batch_invariant(), which lie in one way, so that sums over them have one order.
    """
    t = t.flatten(0, 1)
    return t.contiguous() if t.shape[0] == SEGMENTS else t


def added(t: Tensor) -> Tensor:
    """The sum over the shards, (shards, ...). The 8 segments are added one by one, whatever the number of rows."""
    return functools.reduce(torch.add, t.unbind(0)) if t.shape[0] == SEGMENTS else t.sum(0)


def log_probability(rows: Rows, z: Tensor) -> Tensor:
    """log p of logits z, (n_rows, n_picks); NaN in a row with +inf, as torch.log_softmax has it."""
    log_sum = rows.log_sum.nan_to_num(nan=float("nan"), posinf=float("nan"), neginf=-float("inf"))
    return (z - rows.row_max.unsqueeze(1)) - log_sum.unsqueeze(1)


def surprise(rows: Rows, z: Tensor) -> Tensor:
    """-log p of logits z, (n_rows,), of rows whose sums are not infinite."""
    return rows.log_sum - (z - rows.row_max)


def entropy(rows: Rows, entropies: Tensor) -> Tensor:
    """-sum(p*log p) from the shards' own entropies, (ranks, segments, n_rows): sum(q_r*(H_r - log q_r)).

    q_r is a shard's share of the row. A shard of -inf only has none of it.
    """
    log_q = rows.difference + (rows.shard_sum.log() - rows.log_sum)
    log_q = log_q.clamp(min=torch.finfo(log_q.dtype).min)  # a share of 0 times -inf is NaN
    terms = log_q.exp() * (in_order(entropies) - log_q)
    # 0/0: a row of -inf only has none, and a row with +inf neither
    return added(torch.where(rows.shard_sum == 0.0, 0.0, terms)) + (0.0 * rows.row_sum) / rows.row_sum


def spread(rows: Rows, spreads: Tensor, weights: Tensor) -> Tensor:
    """sum(w*(lse - z)) over all columns, which label smoothing takes.

    spreads: (ranks, segments, n_rows), each shard's sum of w*(lse_r - z), infinite where all its logits are -inf and 0
    where it has no columns; weights: (ranks, segments), its sum of w.
    """
    above = rows.log_sum - (rows.difference + rows.shard_sum.log())  # lse - lse_r
    own = in_order(spreads)
    return added(torch.where(rows.shard_sum == 0.0, own, own + in_order(weights).unsqueeze(1) * above))
