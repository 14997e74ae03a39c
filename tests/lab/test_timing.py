"""Interleaved timing with a clock that is not one."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fused_softmax.lab import timing
from fused_softmax.lab.timing import Call, GraphStopwatch, HostStopwatch, Timing, interleave, rotating


class FakeStopwatch:
    """Milliseconds by name; the n-th round is n% slower, as a device that heats up; `now` is its clock."""

    describe = "a fake"

    def __init__(self, ms: Mapping[str, float]) -> None:
        self.ms, self.orders, self.now = dict(ms), [], 0.0

    def round(self, calls: Mapping[str, Call]) -> dict[str, float]:
        self.orders.append(tuple(calls))
        for call in calls.values():
            call()
        taken = {name: self.ms[name] * (1 + 0.01 * len(self.orders)) for name in calls}
        self.now += sum(taken.values()) / 1000
        return taken


def test_rounds_rotate_and_ratios_survive_a_drifting_clock():
    called: list[str] = []
    calls = {name: (lambda name=name: called.append(name)) for name in ("copy", "a", "b")}
    stopwatch = FakeStopwatch({"copy": 1.0, "a": 2.0, "b": 3.0})
    times = interleave(calls, stopwatch, seconds=0.020, clock=lambda: stopwatch.now)
    assert stopwatch.orders[2:5] == [("copy", "a", "b"), ("a", "b", "copy"), ("b", "copy", "a")]
    assert times["a"].ms / times["copy"].ms == pytest.approx(2.0)
    assert times["b"].p10 < times["b"].ms < times["b"].p90
    # 20 ms for each of three that take 6 ms together: about ten rounds, and two to warm up
    assert times["a"].rounds == 9 and called.count("a") == 11


def test_slow_systems_still_get_seven_rounds_and_fast_ones_at_most_200():
    for ms, rounds in ((1e4, 7), (1e-4, 200)):
        stopwatch = FakeStopwatch({"a": ms})
        times = interleave({"a": lambda: None}, stopwatch, 0.1, clock=lambda of=stopwatch: of.now)  # type: ignore[misc]
        assert times["a"].rounds == rounds
    assert interleave({}, FakeStopwatch({}), 0.1) == {}


def test_summary_is_median_and_spread():
    timing = Timing.of([float(n) for n in range(1, 102)])
    assert (timing.p10, timing.ms, timing.p90, timing.rounds) == (11.0, 51.0, 91.0, 101)
    assert Timing.of([2.0]) == Timing(2.0, 2.0, 2.0, 1)


def test_rotating_takes_another_input_set_each_time():
    seen: list[int] = []
    call = rotating(seen.append, [(0,), (1,), (2,)])
    for _ in range(6):
        call()
    assert sorted(seen) == [0, 0, 1, 1, 2, 2] and seen[:3] == seen[3:] and len(set(seen[:3])) == 3


def test_host_stopwatch_measures_the_call():
    x = torch.zeros(8, 128)
    ms = HostStopwatch(torch.device("cpu"), batch=5).round({"nothing": lambda: None, "add": lambda: x + 1})
    assert 0 < ms["nothing"] < ms["add"] < 100


def test_host_rounds_keep_the_fastest_batch_and_begin_it_untimed(monkeypatch: pytest.MonkeyPatch):
    now, made = 0.0, [""]

    def call(name: str, ms: float) -> None:
        nonlocal now
        # the first after another's finds its caches cold; the first batch of all is disturbed
        now += (100 if made[-1] != name else ms if len(made) > 50 else 10 * ms) / 1000
        made.append(name)

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now))
    calls: dict[str, Call] = {"a": lambda: call("a", 1.0), "b": lambda: call("b", 2.0)}
    taken = HostStopwatch(torch.device("cpu"), batch=20).round(calls)
    assert taken == pytest.approx({"a": 1.0, "b": 2.0}) and len(made) == 1 + 2 * 3 * 22


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("cold", [False, True])
def test_no_result_of_a_warm_graph_lives_when_the_next_call_begins(
    monkeypatch: pytest.MonkeyPatch, cold: bool, several: bool
):
    """So all calls of a graph write to one place, as the plain pass next to them does. Cold ones write elsewhere."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, fake in {
        "Stream": lambda device: stream, "current_stream": lambda device: stream, "synchronize": lambda device: None,
        "stream": lambda of: nullcontext(), "graph": lambda of: nullcontext(), "CUDAGraph": object,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    stopwatch, results, alive = GraphStopwatch(torch.device("cpu"), cold), [], []

    def call() -> Any:
        alive.append(sum(result() is not None for result in results))
        made = [torch.zeros(1 << 20) for _ in range(1 + several)]
        results.extend(weakref.ref(t) for t in made)
        return tuple(made) if several else made[0]

    stopwatch.capture("it", call)
    captured = alive[-stopwatch.per_graph :]
    assert captured == ([i * (1 + several) for i in range(stopwatch.per_graph)] if cold else [0] * stopwatch.per_graph)
