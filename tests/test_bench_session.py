"""A session checks before it times; failures are records, and an interrupted run keeps what it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from fused_softmax.bench.cases import Case
from fused_softmax.bench.prebuild import jobs, prebuild
from fused_softmax.bench.record import Header, Record, header
from fused_softmax.bench.session import CEILING, Session
from fused_softmax.bench.systems import DeviceFault, System, outcome
from fused_softmax.bench.timing import Call

CPU = torch.device("cpu")
CASES = (Case("softmax", "float32", 4, 100), Case("softmax", "bfloat16", 3, 33))


class OutOfResources(Exception):
    """By Triton's name for it."""


class SerialStopwatch:
    """Every call takes a millisecond, the ceiling half of one."""

    describe = "a fake"

    def __init__(self) -> None:
        self.timed: set[str] = set()

    def round(self, calls: Mapping[str, Call]) -> dict[str, float]:
        self.timed |= set(calls)
        return {name: 0.5 if name == CEILING else 1.0 for name in calls}


def raising(error: BaseException) -> Callable[..., Any]:
    def call(x: torch.Tensor) -> torch.Tensor:
        raise error

    return call


def system(name: str, call: Callable[..., Any], kind: str = "lesson") -> System:
    return System(name, "softmax", kind, lambda: call)  # type: ignore[arg-type]


def session(*systems: System, **options: Any) -> Session:
    return Session(header(CPU, interpreted=True), systems, CPU, **options)


RIGHT = system("right", lambda x: torch.softmax(x, -1))


def test_only_what_passed_is_timed_and_failures_are_results():
    stopwatch = SerialStopwatch()
    systems = (
        RIGHT,
        system("unwritten", torch.empty_like),
        system("shifted", lambda x: torch.softmax(x, -1) + 1e-3),
        system("narrow", lambda x: torch.softmax(x, -1)[:, :-1]),
        system("refuses", raising(NotImplementedError("columns must be a multiple of 8"))),
        system("too big", raising(OutOfResources("out of resource: shared memory, Required: 262144"))),
        system("broken", raising(TypeError("no such thing"))),
    )
    run = session(*systems, stopwatch=lambda by, device: stopwatch)
    by_name = {r.system: r for r in run.run(CASES[:1])}
    assert {n: r.status for n, r in by_name.items()} == {
        "right": "ok",
        "unwritten": "wrong",
        "shifted": "wrong",
        "narrow": "wrong",
        "refuses": "refused",
        "too big": "out of resources",
        "broken": "error",
        "copy": "ok",
    }
    assert by_name["refuses"].note == "columns must be a multiple of 8"
    assert stopwatch.timed == {"right", CEILING}
    assert [r.system for r in run.records if r.ms is not None] == ["right", "copy"]
    right = by_name["right"]
    assert right.fraction == pytest.approx(0.5) and right.bytes == 2 * 4 * 100 * 4
    assert right.gbps == pytest.approx(right.bytes / 1e6) and right.ceiling == "copy"
    assert run.head.finished and not run.head.stopped


def test_without_a_gpu_nothing_is_timed():
    run = session(RIGHT, timed=False, stopwatch=lambda by, device: pytest.fail("timed"))
    assert [(r.status, r.ms) for r in run.run(CASES)] == [("ok", None)] * 2


def test_saved_after_every_case():
    saved: list[int] = []
    session(RIGHT, timed=False, save=lambda head, records: saved.append(len(records))).run(CASES)
    assert saved == [1, 2, 2]


@pytest.mark.parametrize(
    ("error", "stopped"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "device fault"),
    ],
    ids=["ctrl-c", "illegal access"],
)
def test_interrupted_runs_keep_their_results(error: BaseException, stopped: str):
    second = {"bfloat16": raising(error), "float32": torch.softmax}
    heads: list[tuple[Header, list[Record]]] = []

    def call(x: torch.Tensor) -> torch.Tensor:
        return second[str(x.dtype).removeprefix("torch.")](x, -1) if x.dtype == torch.float32 else raising(error)(x)

    run = session(RIGHT, system("fails", call), timed=False, save=lambda h, r: heads.append((h, list(r))))
    records = run.run((*CASES, CASES[0]))
    assert run.head.stopped.startswith(stopped) and not run.head.finished
    assert [r.system for r in records][:2] == ["right", "fails"] and all(r.dtype == "float32" for r in records[:2])
    assert heads[-1][1] == records
    if stopped == "device fault":
        assert records[-1].status == "error" and records[-1].note.startswith("device fault")


def test_outcomes_look_through_what_wraps_the_cause():
    try:
        try:
            raise OutOfResources("shared memory")
        except OutOfResources as cause:
            raise RuntimeError("backend failed") from cause
    except RuntimeError as error:
        assert outcome(error, "peer")[0] == "out of resources"
    assert outcome(KeyError("x"), "ours") == ("error", "KeyError: 'x'")
    assert outcome(KeyError("x"), "peer")[0] == "refused"
    assert outcome(ValueError("a\nb"), "ours") == ("refused", "a")
    with pytest.raises(DeviceFault):
        outcome(RuntimeError("CUDA error: misaligned address"), "ours")


def test_prebuild_deals_every_pair_to_one_worker():
    pairs = [(case, name) for name in "abc" for case in CASES]
    parts = jobs(pairs, 4)
    assert sorted((pair for part in parts for pair in part), key=repr) == sorted(pairs, key=repr) and len(parts) == 4
    assert len(jobs(pairs[:2], 16)) == 2 and jobs([], 4) == []


def test_prebuild_runs_its_list_and_outlives_failures():
    # the first case cannot be made at all: its worker leaves it behind and goes on
    ticks: list[int] = []
    pairs = ((Case("softmax", "no such dtype", 2, 8), "01_naive"), (CASES[0], "01_naive"))
    assert prebuild(pairs, 1, lambda: ticks.append(1)) == 2 == len(ticks)


def test_a_system_runs_in_its_own_ops_cases_alone():
    other = System("other", "log_softmax", "lesson", lambda: lambda x: torch.log_softmax(x, -1))
    cases = (CASES[0], Case("log_softmax", "float32", 3, 9))
    found = session(RIGHT, other, timed=False).run(cases)
    assert [(r.op, r.system, r.status) for r in found] == [("softmax", "right", "ok"), ("log_softmax", "other", "ok")]
