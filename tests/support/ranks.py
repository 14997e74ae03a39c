"""Processes that form a group, and simulated ranks that take turns in one process."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.multiprocessing as mp


def spawn(function: Callable[..., Any], ranks: int, folder: Any, *args: Any, backend: str = "gloo") -> None:
    """function(rank, ranks, device, *args) in processes of their own; their first error is raised here."""
    mp.spawn(_started, (ranks, f"file://{folder}/{os.urandom(8).hex()}", backend, function, args), nprocs=ranks)


def _started(rank: int, ranks: int, where: str, backend: str, function: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        backend, init_method=where, rank=rank, world_size=ranks, timeout=timedelta(seconds=60),
        device_id=device if backend == "nccl" else None,
    )  # fmt: skip
    try:
        function(rank, ranks, device, *args)
    except RuntimeError as error:
        if "closed by peer" in str(error):
            time.sleep(5)  # the peer's own error is to be seen
        raise
    finally:
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # all went well. With gloo about one process in 50 aborts when it ends ("terminate called without an active
    # exception", torch 2.13), so it ends without C++'s destructors
    os._exit(0)


class FakeGroup:
    """A rank of a group that lives in one process."""

    group_name = "simulated"

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def simulated(function: Callable[[FakeGroup], Any], ranks: int, monkeypatch: Any) -> list[Any]:
    """function(group) of each rank, on threads that take turns: only a thread that waits for a collective lets go."""
    from fused_softmax.parallel import exchange, shards

    turn, barrier = threading.Lock(), threading.Barrier(ranks, timeout=60)
    sent: dict[int, torch.Tensor] = {}
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def all_ranks(t: torch.Tensor, rank: int) -> list[torch.Tensor]:
        turn.release()
        try:
            sent[rank] = t
            barrier.wait()
            found = [sent[r] for r in range(ranks)]
            barrier.wait()
        finally:
            turn.acquire()
        return found

    monkeypatch.setattr(shards, "process_group", lambda function, group: group)
    monkeypatch.setattr(exchange, "_all_gather", lambda t, shard: torch.stack(all_ranks(t, shard.rank)))

    def run(rank: int) -> None:
        with turn:
            try:
                results[rank] = function(FakeGroup(rank, ranks))
            except BaseException as error:
                errors.append(error)
                barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results
