"""Times of losses of rows that are spread over the GPUs of one host, next to the least that one exchange can take.

Every system is checked against float64 on each rank before it is timed. A time is that of the slowest rank: CUDA events
around a call that all ranks begin together. The bound is the row statistics, the gradient kernel and a bare all_gather
of the payload's bytes, one after another.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fused_softmax.lab.parallel.ahead import compile_ahead
from fused_softmax.lab.parallel.bounds import BOUND, bounds
from fused_softmax.lab.parallel.equality import check
from fused_softmax.lab.parallel.systems import LOGPROBS, LOSS, SYSTEMS, Place, System
from fused_softmax.lab.record import Record, Results, header, in_words
from fused_softmax.lab.timing import Timing, interleave
from fused_softmax.launch.availability import failures_raised

COLUMNS = (131072, 262144, 1048576)
ROWS = 8192
NO_EXCHANGE = ("wait_tensor", "wrap_tensor")  # functional operators that exchange nothing
CHECKED = 64  # rows whose gradients are compared
ROUNDS = 7
# of the largest value: a bfloat16 gradient, and a loss in float32; others' losses may be rounded to bfloat16
TOLERANCE = {"gradient": 1e-2, "loss": 1e-5, "bfloat16 loss": 1e-2}


class Collectives(TorchDispatchMode):
    """Counts the collectives of a call, and the bytes that this rank gives to them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t is DTensor for t in types):
            return NotImplemented  # its collectives are those of its local tensors
        library, _, rest = str(func).partition(".")
        name = rest.partition(".")[0].strip("_")
        if library in ("c10d", "_c10d_functional", "_dtensor") and not name.startswith(NO_EXCHANGE):
            self.names.append(name)
            tensors = [a for arg in args for a in (arg if isinstance(arg, (list, tuple)) else [arg])]
            given = [t for t in tensors if isinstance(t, Tensor)]
            self.sent += min((t.numel() * t.element_size() for t in given), default=0)
        return func(*args, **(kwargs or {}))


class AlignedStopwatch:
    """CUDA events around a call that every rank begins after the same exchange, and after its host has queued it."""

    describe = "CUDA events, slowest rank, all ranks aligned"

    def __init__(self, device: torch.device) -> None:
        self.device, self.tick = device, torch.zeros(1, device=device)

    def round(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        taken = {}
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(self.device)
            dist.all_reduce(self.tick)
            torch.cuda._sleep(4_000_000)  # about 2 ms, so that the host is ahead
            start.record()
            call()
            end.record()
            torch.cuda.synchronize(self.device)
            taken[name] = start.elapsed_time(end)
        return taken


def exact(x: Tensor, target: Tensor, at: Place) -> tuple[Tensor, Tensor]:
    """(each row's logsumexp, its log-probability of the target) in float64."""
    limits, sums = [], []
    for part in x.split(max(1, 2**25 // x.shape[1])):
        wide = part.double()
        limits.append(wide.amax(1))
        sums.append((wide - limits[-1].unsqueeze(1)).exp().sum(1))
    largest = torch.cat(limits)
    all_largest = largest.clone()
    dist.all_reduce(all_largest, dist.ReduceOp.MAX)
    total = torch.cat(sums) * (largest - all_largest).exp()
    dist.all_reduce(total)
    ids = target - at.start
    inside = (ids >= 0) & (ids < at.width)
    z = x.gather(1, ids.clamp(0, at.width - 1).unsqueeze(1)).squeeze(1).double().where(inside, 0.0)
    dist.all_reduce(z)
    lse = all_largest + total.log()
    return lse, z - lse


def errors(
    op: str, found: tuple[Tensor, Tensor | None], x: Tensor, target: Tensor, at: Place, want: Any
) -> list[float]:
    """How far a result and its gradient are from float64, over the largest value."""
    lse, logprobs = want
    result, dx = found
    if op == LOGPROBS:
        return [((result.double() - logprobs).abs().max() / logprobs.abs().max()).item()]
    loss = -logprobs.mean()
    rows = slice(0, CHECKED)
    p = (x[rows].detach().double() - lse[rows].unsqueeze(1)).exp()
    ids = target[rows] - at.start
    inside = (ids >= 0) & (ids < at.width)
    p.scatter_add_(1, ids.clamp(0, at.width - 1).unsqueeze(1), -inside.double().unsqueeze(1))
    assert dx is not None
    gradient = (dx[rows].double() * x.shape[0] - p).abs().max()
    return [((result.double() - loss).abs() / loss).item(), gradient.item()]


def caller(op: str, system: System, x: Tensor, target: Tensor, at: Place) -> Callable[[], tuple[Tensor, Tensor | None]]:
    """One call, as a training step or as an evaluation makes it."""
    way = system.ways[op]
    if system.compiled:
        # a graph of its own for each shape
        way = torch.compile(way, dynamic=False)

    def call() -> tuple[Tensor, Tensor | None]:
        with system.around():
            if op == LOGPROBS:
                with torch.no_grad():
                    return way(x, target, at), None
            x.grad = None
            loss = way(x, target, at)
            loss.backward()
            return loss.detach(), x.grad

    return call


@failures_raised()
def measure(
    op: str, n_rows: int, n_cols: int, systems: tuple[System, ...], place: Place, device: torch.device, rounds: int
) -> list[Record]:
    """One shape: checks every system on every rank, then times those that passed everywhere."""
    at = Place(place.rank, place.ranks, n_cols // place.ranks, place.mesh)
    made = torch.Generator(device).manual_seed(1 + place.rank)
    x = torch.randn(n_rows, at.width, generator=made, device=device, dtype=torch.bfloat16).mul_(3.0)
    target = torch.randint(0, n_cols, (n_rows,), generator=torch.Generator().manual_seed(0)).to(device)
    want = exact(x, target, at)
    if op == LOSS:
        x.requires_grad_()
    records: dict[str, Record] = {}
    passed: dict[str, Any] = {}
    payload = 4 * (5 * n_rows + 64)  # what ours sends; counted where it is among the systems
    for system in systems:
        if op not in system.ways:
            continue
        free()
        record = Record(op, system.name, "bfloat16", n_rows, n_cols, "ok", case=f"{place.ranks} GPUs")
        records[system.name] = record
        call = caller(op, system, x, target, at)
        found_errors, status, note = [float("inf")], "ok", ""
        try:
            began = time.perf_counter()
            call()
            torch.cuda.synchronize(device)
            record.first_ms = 1000 * (time.perf_counter() - began)
            if "compiled" not in system.name:
                with Collectives() as seen:
                    call()
                record.collectives = {"names": seen.names, "bytes_given": seen.sent}
                payload = seen.sent if system.name == "fused_softmax" else payload
            x.grad = None
            free()
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            found = call()
            record.peak_bytes = torch.cuda.max_memory_allocated(device) - before
            found_errors = errors(op, found, x, target, at, want)
            del found
        except Exception as error:
            status, note = "error", f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:160]
        of_ranks: list[Any] = [None] * place.ranks
        dist.all_gather_object(of_ranks, (status, note, found_errors, record.peak_bytes))
        worst = next((r for r in of_ranks if r[0] != "ok"), None)
        if worst is not None:
            record.status, record.note = worst[:2]
            continue
        record.peak_bytes = max(r[3] for r in of_ranks)
        each = [max(r[2][i] for r in of_ranks) for i in range(len(found_errors))]
        record.error = max(each)
        record.note = f"errors of {'log-probabilities' if op == LOGPROBS else 'loss, gradient'}: " + ", ".join(
            f"{e:.1e}" for e in each
        )
        ours = system.name.startswith("fused_softmax") or system.name.startswith("all_gather")
        limits = [TOLERANCE["loss" if ours else "bfloat16 loss"], TOLERANCE["gradient"]]
        if not all(e <= limit for e, limit in zip(each, limits, strict=False)):
            record.status = "wrong"
            continue
        passed[system.name] = call
    free()
    least = bounds(op, x, target, at, payload)
    calls = {**least, **passed}
    for name in least:
        records[name] = Record(op, name, "bfloat16", n_rows, n_cols, "ok", case=f"{place.ranks} GPUs")
    stopwatch = AlignedStopwatch(device)
    # as many rounds on every rank
    mine = interleave(calls, stopwatch, 0.0, fewest=rounds, most=rounds)
    of_all: list[Any] = [None] * place.ranks
    dist.all_gather_object(of_all, mine)
    slowest: dict[str, Timing] = {name: max((o[name] for o in of_all), key=lambda t: t.ms) for name in mine}
    for name, taken in slowest.items():
        record = records[name].take(taken, stopwatch.describe)
        record.ceiling, record.fraction = BOUND, slowest[BOUND].ms / taken.ms
    return list(records.values())


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def run(
    ops: tuple[str, ...], columns: tuple[int, ...], n_rows: int, compiled: tuple[int, ...], rounds: int, out: Path,
    equality: Path | None = None,
) -> None:  # fmt: skip
    """On every rank of the default group: all ops and widths; rank 0 shows and writes. compiled: the widths at which
    compiled systems run, too. equality: where the record of `equality.check` goes, which runs first."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device())
    mesh = dist.device_mesh.init_device_mesh("cuda", (ranks,))
    place = Place(rank, ranks, 0, mesh)
    head = header(device, False)
    head.device = f"{ranks} x {head.device}"

    def results(file: Path) -> Results:
        """Of rank 0, which alone shows and writes."""
        return Results(replace(head), file if rank == 0 else None, show if rank == 0 else lambda record: None)

    if equality is not None:
        found = results(equality)
        for record in check(rank, ranks, device):
            found.add(record)
        found.finish()
    eager = tuple(s for s in SYSTEMS if "compiled" not in s.name)
    cases = [(n_cols, op, eager) for n_cols in columns for op in ops]
    traced = tuple(s for s in SYSTEMS if "compiled" in s.name)
    cases += [(n_cols, op, traced) for n_cols in compiled for op in ops]
    if not cases:
        return
    found = results(out)
    for n_cols, op, systems in cases:
        found.add(*measure(op, n_rows, n_cols, systems, place, device, rounds))
        free()
    found.finish()


def show(record: Record) -> None:
    """One result as a line of text."""
    print(in_words(record), flush=True)


def start(rank: int, ranks: int, where: str, arguments: tuple[Any, ...]) -> None:
    """One rank of a run that this machine's processes make up."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=where, rank=rank, world_size=ranks, timeout=timedelta(minutes=3),
        device_id=torch.device("cuda", rank),
    )  # fmt: skip
    try:
        run(*arguments)
    finally:
        dist.destroy_process_group()


def launch(ranks: int, arguments: tuple[Any, ...], workers: int) -> None:
    """`run` on so many GPUs of this machine: in this process under torchrun, else in processes of their own, after
    `workers` processes compiled the kernels."""
    if "RANK" in os.environ:
        start(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://", arguments)
        return
    import tempfile

    if workers:
        ops, columns, *_, equality = arguments
        print(compile_ahead(ranks, ops, columns, equality is not None, workers), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(start, (ranks, f"file://{folder}/store", arguments), nprocs=ranks)
