"""The header of a payload: what every rank of a group must have said alike, and the error where they did not.

A header is int64 words. The first ones must be equal on all ranks; the last two are the rank's own columns. It travels
in front of the numbers that a call gathers, as its bits.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..launch.cache import Cache
from ..torch_ops.arguments import LossOptions

VERSION = 1  # of the payload
OPS = ("softmax", "log_softmax", "logsumexp", "cross_entropy", "token_logprobs", "linear_cross_entropy")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
REDUCTIONS = ("", "none", "mean", "sum")


class Call(NamedTuple):
    """What the ranks of a group must agree on, besides the columns of a row. Numbers that an op lacks are 0."""

    op: str
    dtype: torch.dtype
    size: int  # columns of all ranks
    segments: int = 1  # that each rank's shard is read in; 1, or more within batch_invariant()
    n_rows: int = 0  # 0, except where they are compared
    picks: int = 0  # token ids of a row
    reduction: str = ""
    ignore_index: int = 0
    label_smoothing: float = 0.0
    softcap: float = 0.0
    z_loss: float = 0.0
    scale: float = 0.0  # 1/temperature; NaN for a tensor
    weighted: bool = False
    entropy: bool = False

    def words(self, start: int, width: int) -> list[int]:
        """The header of a rank that holds columns [start, start + width)."""
        return [
            VERSION, OPS.index(self.op), DTYPES.index(self.dtype), self.size, self.segments, self.n_rows, self.picks,
            REDUCTIONS.index(self.reduction), self.ignore_index, _bits(self.label_smoothing), _bits(self.softcap),
            _bits(self.z_loss), _bits(self.scale), int(self.weighted), int(self.entropy), start, width,
        ]  # fmt: skip


def call_of_loss(op: str, dtype: torch.dtype, size: int, segments: int, weighted: bool, options: LossOptions) -> Call:
    """The call of a cross-entropy."""
    return Call(
        op, dtype, size, segments, reduction=options.reduction, ignore_index=options.ignore_index,
        label_smoothing=options.label_smoothing, softcap=options.softcap or 0.0, z_loss=options.z_loss,
        weighted=weighted,
    )  # fmt: skip


WORDS = 2 + 1 + len(Call._fields)
COMMON = WORDS - 2  # words that must be equal on all ranks


def _bits(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number + 0.0))[0])  # -0.0 as 0.0


def _number(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


def _shown(place: int, word: int) -> str:
    """A word of a header as users know it."""
    if place == 0:
        return f"version {word}"
    name = Call._fields[place - 1]
    if name == "op":
        return f"{name} parallel.{OPS[word]}" if 0 <= word < len(OPS) else f"{name} {word}"
    if name == "dtype":
        return f"{name} {DTYPES[word]}" if 0 <= word < len(DTYPES) else f"{name} {word}"
    if name == "reduction":
        return f"{name} {REDUCTIONS[word]!r}" if 0 <= word < len(REDUCTIONS) else f"{name} {word}"
    if name in ("label_smoothing", "softcap", "z_loss", "scale"):
        number = _number(word)
        if name == "scale":
            return "temperature a tensor" if number != number else f"temperature {1.0 / number if number else 'none'}"
        return f"{name} {number if number or name != 'softcap' else None}"
    if name in ("weighted", "entropy"):
        return ("with " if word else "without ") + ("weight" if name == "weighted" else "entropy")
    if name == "segments":
        return "within batch_invariant()" if word > 1 else "outside of batch_invariant()"
    shown = {"size": "vocab_size", "picks": "token_ids for each row"}
    return f"{shown.get(name, name)} {word}"


def expect_agreement(headers: Sequence[Sequence[int]]) -> None:
    """RuntimeError, the same on every rank, where the ranks' headers differ or their columns do not make up a row."""
    for place in range(WORDS - 2):
        ranks: dict[int, list[int]] = {}
        for rank, header in enumerate(headers):
            ranks.setdefault(header[place], []).append(rank)
        if len(ranks) > 1:
            said = "; ".join(f"{_shown(place, word)} on {_named(who)}" for word, who in ranks.items())
            raise RuntimeError(
                f"fused_softmax.parallel: the ranks of the group do not make the same call: {said}. Every rank has to "
                "call the same function with the same options, for the same rows, in the same order"
            )
    size, expected = headers[0][1 + Call._fields.index("size")], 0
    held = [(header[-2], header[-2] + header[-1]) for header in headers]
    for start, stop in held:
        if start != expected:
            break
        expected = stop
    else:
        if expected == size:
            return
    shown = ", ".join(f"[{start}, {stop}) on rank {rank}" for rank, (start, stop) in enumerate(held))
    raise RuntimeError(
        f"fused_softmax.parallel: the ranks' columns do not make up {size} columns in rank order: {shown}. Check "
        "vocab_start and vocab_size"
    )


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


_made = Cache()


def header_size(dtype: torch.dtype) -> int:
    """How many numbers of dtype (float32 or float64) a header takes."""
    return WORDS * 8 // dtype.itemsize


def header_tensor(words: Sequence[int], segments: int, like: Tensor) -> Tensor:
    """The words' bits as numbers of like's dtype (float32 or float64) on its device, and for each segment its number of
    columns; made once for equal words."""
    key = (tuple(words), segments, like.dtype, like.device)
    found = _made.get(key) if type(like) is Tensor else None
    if found is None:
        bits = torch.tensor(words, dtype=torch.int64).view(like.dtype)
        found = torch.cat((bits, bits.new_full((segments,), words[-1] / segments))).to(like.device)
        if type(found) is Tensor:  # not a mode's stand-in
            _made.store(key, found)
    return found


def words_of(payloads: Tensor) -> list[list[int]]:
    """The words that gathered payloads (ranks, n) begin with; the host waits for the device."""
    return payloads[:, : header_size(payloads.dtype)].detach().cpu().contiguous().view(torch.int64).tolist()
