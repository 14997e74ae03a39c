"""Which columns of a row a rank holds, and in which pieces its bits are made.

A rank's shard is `width` columns from `start` of the `size` columns of every row. Within batch_invariant() it is cut
into segments of size/8 columns. Every segment is read as a row of its own, and the results of all 8 are merged in the
vocabulary's order. So the bits do not depend on how many ranks share them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..launch.context import is_batch_invariant
from ..launch.layout import rows_of
from ..torch_ops.arguments import expect_flag, expect_floating, expect_local, expect_tensors, integer
from .merge import SEGMENTS


class Shard(NamedTuple):
    """This rank's columns: [start, start + width) of `size`, in `segments` equal pieces."""

    group: str  # the process group's name, which functional collectives take
    rank: int
    ranks: int
    start: int
    width: int
    size: int
    segments: int = 1
    invariant: bool = False  # within batch_invariant(), and not in a trace

    def pieces(self) -> Iterator[tuple[slice, int]]:
        """(a piece's columns of the local tensor, its first column in the vocabulary)."""
        each = self.width // self.segments
        for i in range(self.segments):
            yield slice(i * each, (i + 1) * each), self.start + i * each


def canonical(x: Tensor, invariant: bool) -> Tensor:
    """x, as a copy where equal bits need it: the kernels read vectors as wide as the address and the stride allow."""
    if not invariant:
        if is_batch_invariant():
            raise RuntimeError("fused_softmax.parallel: within batch_invariant() call it outside of torch.compile")
        return x
    if not x.numel():
        return x
    item = x.element_size()
    row = x.shape[1] * item
    vector = min(16, row & -row)
    return x.clone(memory_format=torch.contiguous_format) if (x.data_ptr() | x.stride(0) * item) % vector else x


def process_group(function: str, group: Any) -> Any:
    """The process group that `group` stands for: itself, the only one of a DeviceMesh, or the default one for None."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise RuntimeError(
            f"parallel.{function}(): torch.distributed is not initialized; call torch.distributed.init_process_group()"
        )
    if group is None:
        return torch.distributed.group.WORLD
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ValueError(
                f"parallel.{function}(): group is a DeviceMesh of {group.ndim} dimensions; give one of them, as in "
                'mesh["tp"]'
            )
        return group.get_group()
    if group is torch.distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"parallel.{function}(): this process is not in the group")
    if not isinstance(group, torch.distributed.ProcessGroup):
        raise TypeError(
            f"parallel.{function}(): group must be a ProcessGroup, a DeviceMesh of one dimension or None, "
            f"not {type(group).__name__}"
        )
    return group


def shard_of(
    function: str, width: int, group: Any, vocab_start: Any, vocab_size: Any, *, segmented: bool = True
) -> Shard:
    """The shard of this rank, whose local tensor has `width` columns.

    Without vocab_start the shards lie in rank order: all of `width` columns where vocab_size is not given either, else
    as torch.chunk and DTensor cut vocab_size columns. segmented: whether the op has equal bits within
    batch_invariant(). ValueError for columns that do not fit.
    """
    group = process_group(function, group)
    rank, ranks = group.rank(), group.size()
    size = None if vocab_size is None else integer(f"parallel.{function}", "vocab_size", vocab_size)
    if vocab_start is not None:
        start = integer(f"parallel.{function}", "vocab_start", vocab_start)
        if size is None:
            raise ValueError(f"parallel.{function}(): vocab_start needs vocab_size, the number of columns of all ranks")
    elif size is None:
        start, size = rank * width, ranks * width
    else:
        each = -(-size // ranks)
        start = min(rank * each, size)
        if width != min(each, size - start):
            raise ValueError(
                f"parallel.{function}(): rank {rank} of {ranks} holds {width} of {size} columns, where an even cut has "
                f"{min(each, size - start)}; give vocab_start for an uneven one"
            )
    if start < 0 or start + width > size:
        raise ValueError(
            f"parallel.{function}(): columns [{start}, {start + width}) of rank {rank} are outside [0, {size})"
        )
    # torch.compile cannot trace a look-up in the context: a compiled call within it is an error of its operators
    invariant = not torch.compiler.is_compiling() and is_batch_invariant()
    segments = _segments(function, start, width, size) if invariant and segmented else 1
    return Shard(group.group_name, rank, ranks, start, width, size, segments, invariant)


def rows_and_shard(
    function: str, x: Any, group: Any, vocab_start: Any, vocab_size: Any, check: Any
) -> tuple[Tensor, Shard]:
    """(rows (n_rows, width) of this rank's checked logits, their shard)."""
    name = f"parallel.{function}"
    expect_tensors(name, local_logits=x)
    expect_local(name, local_logits=x)
    expect_floating(name, "local_logits", x)
    expect_flag(name, "check", check)
    if x.dim() == 0:
        raise ValueError(f"{name}(): local_logits must be (..., width), not a tensor of no dimensions")
    width = x.shape[-1]
    shard = shard_of(function, width, group, vocab_start, vocab_size)
    return rows_of(x, width) if x.numel() else x.reshape(x.shape[:-1].numel(), width), shard


def _segments(function: str, start: int, width: int, size: int) -> int:
    """How many of the 8 segments the shard holds; ValueError where it holds a part of one."""
    each = size // SEGMENTS
    if size % SEGMENTS:
        raise ValueError(
            f"parallel.{function}(): within batch_invariant() the number of columns must be a multiple of {SEGMENTS}, "
            f"not {size}; pad it to {(each + 1) * SEGMENTS} with columns of -inf"
        )
    if not width or start % each or width % each:
        raise ValueError(
            f"parallel.{function}(): within batch_invariant() each rank holds whole segments of {each} columns, an "
            f"eighth of {size}: give each of 1, 2, 4 or 8 ranks as many, not columns [{start}, {start + width})"
        )
    return width // each
