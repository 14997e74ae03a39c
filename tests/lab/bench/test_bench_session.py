"""A session checks before it times; failures are records, and an interrupted run keeps what it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from fused_softmax.lab.bench import session as sessions
from fused_softmax.lab.bench.ahead import jobs
from fused_softmax.lab.bench.cases import Case, table
from fused_softmax.lab.bench.ops import AUTOGRAD
from fused_softmax.lab.bench.run import prebuilt
from fused_softmax.lab.bench.session import CEILING, Session, prebuild
from fused_softmax.lab.bench.systems import DeviceFault, System, outcome, systems_for
from fused_softmax.lab.bench.workload import through_autograd
from fused_softmax.lab.record import Header, Record, header
from fused_softmax.lab.timing import Call

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
    failed, built = prebuild(pairs, 1, lambda: ticks.append(1))
    assert "no such dtype" in failed and built == "" and len(ticks) == 2


def test_a_system_runs_in_its_own_ops_cases_alone():
    other = System("other", "log_softmax", "lesson", lambda: lambda x: torch.log_softmax(x, -1))
    cases = (CASES[0], Case("log_softmax", "float32", 3, 9))
    found = session(RIGHT, other, timed=False).run(cases)
    assert [(r.op, r.system, r.status) for r in found] == [("softmax", "right", "ok"), ("log_softmax", "other", "ok")]


def test_a_gradient_through_autograd_is_checked_and_timed_on_the_host():
    def through(name: str, forward: Callable[[torch.Tensor], torch.Tensor]) -> System:
        return System(name, "softmax_autograd", "lesson", lambda: through_autograd(forward))

    systems = (
        through("right", lambda x: torch.softmax(x, -1)),
        through("steep", lambda x: torch.softmax(1.01 * x, -1)),
        through("severed", lambda x: torch.softmax(x, -1).detach()),
    )
    run = session(*systems, stopwatch=lambda by, device: SerialStopwatch())
    found = {r.system: r for r in run.run([Case("softmax_autograd", "float32", 8, 128, timed_by="host")])}
    assert {name: r.status for name, r in found.items()} == {"right": "ok", "steep": "wrong", "severed": "refused"}
    right = found["right"]
    assert (right.ms, right.timed_by, right.bytes, right.ceiling) == (1.0, "a fake", None, "")
    assert right.rounds is not None and right.rounds >= 7 and found["steep"].ms is None


@pytest.mark.parametrize("before", [True, False])
def test_autograd_runs_whatever_the_mode_and_leaves_it(before: bool):
    x = torch.randn(2, 5, requires_grad=True)
    with torch.set_grad_enabled(before):
        dx = through_autograd(lambda t: 3 * t)(x, torch.ones(2, 5))
        assert torch.is_grad_enabled() is before
        with pytest.raises(ZeroDivisionError):
            through_autograd(lambda t: t / (1 // 0))(x, dx)
        assert torch.is_grad_enabled() is before
    assert torch.equal(dx, torch.full((2, 5), 3.0)) and x.grad is None


@pytest.mark.interpreted
@pytest.mark.parametrize("op", AUTOGRAD)
def test_ours_passes_through_autograd(op: str):
    run = session(*systems_for(op, ("fused_softmax", "torch")), timed=False)
    found = run.run(Case(op, dtype, 8, 128) for dtype in ("bfloat16", "float16", "float32"))
    assert len(found) == 6 and {(r.status, r.note) for r in found} == {("ok", "")}
    assert all(r.plan.startswith("warp") for r in found if r.system == "fused_softmax")


def test_first_calls_are_left_to_other_processes_and_never_prebuilt(monkeypatch: pytest.MonkeyPatch):
    given: list[tuple[Case, list[str]]] = []

    def first_calls(case: Case, names: list[str]) -> list[Record]:
        given.append((case, names))
        return [Record(case.op, name, case.dtype, case.n_rows, case.n_cols, "ok") for name in names]

    monkeypatch.setattr(sessions, "first_calls", first_calls)
    first = Case("softmax", "float32", 3, 9, timed_by="first_call")
    other = System("other", "log_softmax", "lesson", lambda: lambda x: x)
    assert [r.system for r in session(RIGHT, other).run([first])] == ["right"] and given == [(first, ["right"])]
    # without a GPU it is a case as any other
    assert [r.status for r in session(RIGHT, other, timed=False).run([first])] == ["ok"] and len(given) == 1
    tables = [table("first_call"), table("host")]
    ahead = prebuilt(tables, systems_for("softmax", ("fused_softmax", "torch")))
    assert ahead == [(case, "fused_softmax") for case in tables[1].cases if case.op == "softmax"]


@pytest.mark.interpreted
def test_ours_alone_is_checked_and_stands_beside_a_measured_ceiling():
    stopwatch = SerialStopwatch()
    (ours,) = systems_for("log_softmax", ("fused_softmax",))
    run = session(ours, stopwatch=lambda by, device: stopwatch)
    records = run.run([Case("log_softmax", "bfloat16", 3, 333)])
    assert [(r.system, r.status, r.fraction) for r in records] == [("fused_softmax", "ok", 0.5), ("copy", "ok", 1.0)]
    assert records[0].error is not None and 0 < records[0].error < 0.1
    wrong = System("fused_softmax", "log_softmax", "ours", lambda: lambda x: torch.log_softmax(x, -1) + 1)
    (alone,) = session(wrong, stopwatch=lambda by, device: stopwatch).run([Case("log_softmax", "float32", 3, 333)])
    assert (alone.status, alone.ms) == ("wrong", None)


def test_header_names_what_runs_and_what_changed(monkeypatch: pytest.MonkeyPatch):
    import triton

    # metadata describes another copy where one lies in front of it
    monkeypatch.setattr(triton, "__version__", "3.99.0")
    for named, commit, dirty in (("abc1234", "abc1234", False), ("abc1234-dirty", "abc1234", True)):
        monkeypatch.setenv("FUSED_SOFTMAX_COMMIT", named)
        found = header(CPU, interpreted=False)
        assert (found.commit, found.dirty) == (commit, dirty)
        assert found.versions["triton"] == "3.99.0" and found.versions["torch"] == torch.__version__
