"""Times, interleaved: every round runs all systems of a case and the ceiling once, in rotating order.

Medians over rounds with their 10th and 90th percentile, so that clocks and heat fall on all alike. A stopwatch takes
one round; three exist: CUDA events around eager calls, replay of a captured CUDA graph (time per call, launch gaps
included), and the host time until an eager call returns. Any object with `round` and `describe` will do in a test.
`freeze` keeps garbage collection short, which a graph's capture begins with.
"""

from __future__ import annotations

import atexit
import functools
import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, Protocol

import torch
from torch import Tensor

from fused_softmax.lab.bench.inputs import Inputs

Call = Callable[[], Any]
# timed_by of a record that a process of its own times (first_call), without a stopwatch
FIRST_CALL = "first call, empty caches"
# calls of a graph that finds a cold L2, and the bytes that are written before it: several times any GPU's L2
COLD_CALLS, FLUSHED_BYTES = 16, 2**29


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: median, 10th and 90th percentile, over `rounds` rounds."""

    ms: float
    p10: float
    p90: float
    rounds: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Summarize samples in milliseconds."""
        if len(samples) < 2:
            return cls(samples[0], samples[0], samples[0], len(samples))
        cuts = quantiles(samples, n=10, method="inclusive")
        return cls(median(samples), cuts[0], cuts[8], len(samples))


class Stopwatch(Protocol):
    """Takes the milliseconds of one call of each entry, in the order given."""

    describe: str

    def round(self, calls: Mapping[str, Call]) -> dict[str, float]: ...


def interleave(
    calls: Mapping[str, Call],
    stopwatch: Stopwatch,
    seconds: float,
    fewest: int = 7,
    most: int = 200,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time all calls in interleaved rounds for about `seconds` each; the first two rounds warm up and are dropped.

    How many rounds fit is judged by `clock`, in seconds: a round can take far longer than the calls that it reports.
    """
    names = list(calls)
    if not names:
        return {}
    stopwatch.round(calls)
    began = clock()
    stopwatch.round(calls)
    rounds = int(seconds * len(names) / max(clock() - began, 1e-6))
    samples: dict[str, list[float]] = {name: [] for name in names}
    for i in range(min(most, max(fewest, rounds))):
        turn = names[i % len(names) :] + names[: i % len(names)]
        for name, ms in stopwatch.round({name: calls[name] for name in turn}).items():
            samples[name].append(ms)
    return {name: Timing.of(taken) for name, taken in samples.items()}


class EventStopwatch:
    """CUDA events around each eager call.

    Before each call the device waits as long as the host needs to queue it, so that host time never counts as device
    time, not even behind a call that synchronizes. A call's own synchronization counts as its own.
    """

    describe = "CUDA events"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.host_ms: dict[str, float] = {}
        self.ticks_per_ms = _sleep_ticks_per_ms(device)

    def round(self, calls: Mapping[str, Call]) -> dict[str, float]:
        """One round; returns milliseconds by name."""
        events = {name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in calls}
        torch.cuda.synchronize(self.device)
        for name, call in calls.items():
            began = time.perf_counter()
            torch.cuda._sleep(int(min(1.5 * self.host_ms.get(name, 1.0) + 0.02, 3.0) * self.ticks_per_ms))
            events[name][0].record()
            call()
            events[name][1].record()
            taken = min(1000 * (time.perf_counter() - began), 3.0)
            self.host_ms[name] = 0.5 * self.host_ms.get(name, taken) + 0.5 * taken
        torch.cuda.synchronize(self.device)
        return {name: start.elapsed_time(end) for name, (start, end) in events.items()}


def _sleep_ticks_per_ms(device: torch.device) -> float:
    """How many of torch.cuda._sleep's cycles are a millisecond now, measured."""
    ticks = 2_000_000
    for _ in range(2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(ticks)
        end.record()
        torch.cuda.synchronize(device)
    return ticks / max(start.elapsed_time(end), 1e-3)


class GraphStopwatch:
    """Replay of CUDA graphs that hold `per_graph` calls each: device time per call, on data that stays in the L2.

    Calls of one graph run one after another with no host in between; the gaps between kernels are counted. All write to
    one place, as a plain pass does. Where cold, each call reads other inputs (`input_sets`) and writes to other memory,
    and the L2 is overwritten before a replay.
    """

    describe = "CUDA-graph replay, warm L2"

    def __init__(self, device: torch.device, cold: bool = False) -> None:
        self.device, self.per_graph = device, COLD_CALLS if cold else 40
        self.flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device) if cold else None
        if cold:
            self.describe = "CUDA-graph replay, cold L2"
        self.graphs: dict[str, tuple[torch.cuda.CUDAGraph, Any]] = {}

    def capture(self, name: str, call: Call) -> None:
        """Capture a call; raises what the call raises when it cannot be captured."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(2):
                result = call()
        torch.cuda.current_stream(self.device).wait_stream(side)
        torch.cuda.synchronize(self.device)
        parts = result if isinstance(result, tuple) else (result,)
        size = sum(t.numel() * t.element_size() for t in parts)
        kept: deque[Any] = deque(maxlen=1 + FLUSHED_BYTES // max(size, 1))
        del result, parts
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(self.per_graph):
                if self.flushed is None:  # the next result has the memory of this one
                    kept.clear()
                kept.append(call())
        self.graphs[name] = graph, kept

    def round(self, calls: Mapping[str, Call]) -> dict[str, float]:
        """One round of replays; every entry must have been captured."""
        events = {name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in calls}
        torch.cuda.synchronize(self.device)
        for name in calls:
            graph = self.graphs[name][0]
            if self.flushed is None:
                graph.replay()  # fills the caches, and keeps the device busy while the host queues the timed one
            else:
                self.flushed.fill_(1)
            events[name][0].record()
            graph.replay()
            events[name][1].record()
        torch.cuda.synchronize(self.device)
        return {name: start.elapsed_time(end) / self.per_graph for name, (start, end) in events.items()}


class HostStopwatch:
    """Host time until an eager call returns: the fastest of a few batches in each round, none synchronized inside.

    The device is idle before a batch, and its queue holds more than a batch: it never holds the host back. A tenth of
    a batch goes before untimed, so that the processor's caches hold this call's data, not the previous call's.
    """

    describe = "host time of a call"

    def __init__(self, device: torch.device, batch: int = 100, batches: int = 3) -> None:
        self.device, self.batch, self.batches = device, batch, batches

    def round(self, calls: Mapping[str, Call]) -> dict[str, float]:
        """One round; returns milliseconds of one call by name."""
        best = dict.fromkeys(calls, float("inf"))
        for _ in range(self.batches):
            for name, call in calls.items():
                for _ in range(self.batch // 10):
                    call()
                began = time.perf_counter()
                for _ in range(self.batch):
                    call()
                best[name] = min(best[name], 1000 * (time.perf_counter() - began) / self.batch)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
        return best


def rotating(call: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> Call:
    """A call that takes the next of several input sets each time, so that no input is found in the L2."""
    if len(sets) == 1:
        inputs = sets[0]
        return lambda: call(*inputs)
    turn = 0

    def next_call() -> Any:
        nonlocal turn
        turn = (turn + 1) % len(sets)
        return call(*sets[turn])

    return next_call


def stopwatch_for(timed_by: str, device: torch.device) -> Stopwatch:
    """The stopwatch of a case's way of timing."""
    if timed_by == "host":
        return HostStopwatch(device)
    if timed_by in ("graph", "graph_cold"):
        return GraphStopwatch(device, cold=timed_by == "graph_cold")
    return EventStopwatch(device)


def input_sets(inputs: Inputs, timed_by: str, device: torch.device) -> Iterator[Inputs]:
    """The inputs, and as many copies as make the set larger than three times the L2 where no call may find them there.

    A graph of a cold L2 has a copy for each of its calls, or several calls for each of fewer, larger copies.
    """
    yield inputs
    if device.type != "cuda" or timed_by not in ("events", "graph_cold"):
        return
    one = sum(t.numel() * t.element_size() for t in inputs)
    l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 2**26)
    for _ in range(min((COLD_CALLS if timed_by == "graph_cold" else 16) - 1, 3 * l2 // max(one, 1))):
        yield tuple(_copy_of(t).requires_grad_(t.requires_grad) for t in inputs)


def _copy_of(t: Tensor) -> Tensor:
    """t in other memory, in which it lies as it does now: a clone would close the gaps of a layout."""
    return t.new_empty(0).set_(t.untyped_storage().clone(), t.storage_offset(), t.size(), t.stride())


def peak_bytes(call: Callable[..., Any], inputs: Inputs) -> int:
    """Device memory that a call takes beyond what is allocated before it, its results included."""
    device = inputs[0].device
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    kept = call(*inputs)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del kept
    return peak


def freeze() -> None:
    """Leave out of each garbage collection what is there now: torch.compile's modules, most of all.

    At the end of the process it is collected again, because Triton's bindings report what is left as leaks.
    """
    gc.collect()
    gc.freeze()
    _unfreeze_at_exit()


@functools.cache
def _unfreeze_at_exit() -> None:
    atexit.register(gc.unfreeze)
