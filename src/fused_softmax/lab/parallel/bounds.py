"""The least that an exchange lets a call take: the kernels on a rank's shard, and a bare all_gather of the payload.

The same in chunks of rows shows what is won where one chunk's exchange overlaps the next one's read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fused_softmax.lab.parallel.systems import LOSS, Place
from fused_softmax.launch.layout import pointer
from fused_softmax.launch.row_statistics import statistics_backward, write_statistics
from fused_softmax.launch.torch_private import all_gather_into_tensor, wait_tensor

BOUND = "row statistics + gradient + all_gather"
EXCHANGE = "all_gather alone"
CHUNKS = (2, 4)


def bounds(op: str, x: Tensor, target: Tensor, at: Place, payload: int) -> dict[str, Callable[[], Any]]:
    """Calls by name: the bound, the bound in 2 and 4 chunks of rows, and the all_gather alone. payload: bytes."""
    n_rows, sent = x.shape[0], torch.zeros(payload // 4, device=x.device)
    x, ids = x.detach(), (target - at.start).unsqueeze(1)
    g = torch.full(ids.shape, -1.0 / n_rows, device=x.device)
    group = dist.group.WORLD
    assert group is not None
    name = group.group_name

    def bound(chunks: int) -> Callable[[], Any]:
        rows = list(x.tensor_split(chunks))

        def call() -> Any:
            lse, moments = torch.empty(n_rows, device=x.device), torch.empty((n_rows, 2), device=x.device)
            address, given = pointer(x), []
            parts = zip(
                rows, lse.tensor_split(chunks), moments.tensor_split(chunks), sent.tensor_split(chunks), strict=True
            )
            for part, of_lse, of_moments, mine in parts:
                write_statistics(part, (address(of_lse), address(of_moments), None), None, 1.0, False)
                # runs on the collectives' stream, and the next part's read does not wait for it
                given.append(all_gather_into_tensor(mine, at.ranks, name))
            for t in given:
                wait_tensor(t)
            if op == LOSS:
                statistics_backward(x, torch.empty_like(x), moments, 1.0, ids=ids, g_picked=g)
            return moments

        return call

    return {
        BOUND: bound(1),
        **{f"{BOUND}, in {n} chunks": bound(n) for n in CHUNKS},
        EXCHANGE: lambda: wait_tensor(all_gather_into_tensor(sent, at.ranks, name)),
    }
