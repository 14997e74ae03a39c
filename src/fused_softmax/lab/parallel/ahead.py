"""Compiles what a run of `parallel` launches in many processes, before its ranks start.

A process plays one rank of a group whose collectives exchange nothing. Its results mean nothing, and its kernels stay
on disk for the ranks. Without them each rank would compile every kernel, one after another. Rows are few: no kernel
depends on their number.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from fused_softmax.lab.bench.ahead import in_processes, jobs
from fused_softmax.lab.parallel.equality import CASES, PARALLEL, WHOLE, WITHOUT_BITS, found, invariant, problem
from fused_softmax.lab.parallel.systems import SYSTEMS, Place

ROWS = 16
Job = tuple[Any, ...]


def compile_ahead(ranks: int, ops: tuple[str, ...], columns: tuple[int, ...], equality: bool, workers: int) -> str:
    """Compiles in so many processes; says how many jobs were done, and in which time."""
    began = time.perf_counter()
    todo: list[Job] = [("equality", i, name) for i in range(len(CASES)) for name in PARALLEL] if equality else []
    todo += [("times", op, n_cols) for op in ops for n_cols in columns]
    # each worker's place comes first: it says which GPU
    parts = [[(i, ranks), *part] for i, part in enumerate(jobs(todo, workers))]
    done = len(in_processes(work, parts))
    taken = time.perf_counter() - began
    return f"compiled {done} of {len(todo)} in {taken:.0f} s, {len(parts)} processes"


def work(part: list[Job], done: Any) -> None:
    """One worker; failures are left for the ranks to meet and to record."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from fused_softmax.parallel import exchange

    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(1)
    (worker, ranks), *todo = part
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", worker % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    exchange.expect_agreement = lambda headers: None  # all of them are this rank's
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 4, 8) if size <= ranks}
    for kind, which, of_it in todo:
        try:
            if kind == "equality":
                _equality(which, of_it, ranks, groups, device)
            else:
                _times(which, of_it, ranks, device)
            if device.type == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            print(f"not compiled ahead: {kind} {which} {of_it}: {type(error).__name__}: {error}"[:300], flush=True)
        finally:
            done.put("")


def _equality(case: int, name: str, ranks: int, groups: dict[int, Any], device: torch.device) -> None:
    n_rows, n_cols, dtype = CASES[case]
    p = problem(n_rows, n_cols, dtype, device)
    found(name, WHOLE, p, slice(0, n_cols), {})
    found(name, PARALLEL, p, slice(0, n_cols // ranks), {})
    for size, group in ({} if name in WITHOUT_BITS else groups).items():
        invariant(name, p, 0, size, group)


def _times(op: str, n_cols: int, ranks: int, device: torch.device) -> None:
    from fused_softmax.lab.parallel.bounds import bounds
    from fused_softmax.lab.parallel.measure import caller

    at = Place(0, ranks, n_cols // ranks, None)
    x = torch.zeros(ROWS, at.width, device=device, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(ROWS, dtype=torch.int64, device=device)
    for call in bounds(op, x, target, at, 4 * 8 * ROWS).values():
        call()
    for system in SYSTEMS:
        if "compiled" not in system.name and system.name.startswith(("fused_softmax", "all_gather")):
            caller(op, system, x, target, at)()
