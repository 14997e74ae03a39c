"""First calls: in a process that finds nothing compiled, after a tiny call, timed once and checked."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from fused_softmax.lab import first_call
from fused_softmax.lab.bench.cases import TINY, Case
from fused_softmax.lab.bench.systems import System
from fused_softmax.lab.first_call import first_calls, measure
from fused_softmax.lab.record import Record
from fused_softmax.lab.timing import FIRST_CALL

CPU = torch.device("cpu")
CASE = Case("softmax", "float32", 3, 100, "a new shape", "first_call")


def refuses(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("no such shape")


def test_what_is_right_is_timed_after_a_tiny_call():
    now, met = 0.0, []

    def right(x: torch.Tensor) -> torch.Tensor:
        nonlocal now
        # the second tiny call is free, as every call of a known shape
        now += 0.25 if tuple(x.shape) not in met else 0.0
        met.append(tuple(x.shape))
        return torch.softmax(x, -1)

    calls: dict[str, Callable[..., Any]] = {
        "right": right,
        "unwritten": torch.empty_like,
        "narrow": lambda x: torch.softmax(x, -1)[:, 1:],
        "refuses": refuses,
    }
    systems = [System(name, "softmax", "lesson", lambda call=call: call) for name, call in calls.items()]  # type: ignore[misc]
    found = {r.system: r for r in measure(CASE, systems, CPU, clock=lambda: now)}
    assert met == [TINY[1:], (3, 100)]
    assert {name: r.status for name, r in found.items()} == {
        "right": "ok",
        "unwritten": "wrong",
        "narrow": "wrong",
        "refuses": "refused",
    }
    assert found["refuses"].note == "no such shape" and "unwritten" in found["unwritten"].note
    timed = [(r.system, r.ms, r.timed_by, r.case) for r in found.values() if r.ms is not None]
    assert timed == [("right", 250.0, FIRST_CALL, "a new shape")]

    # the tiny call is a process's very first: nothing goes before it
    met.clear()
    (record,) = measure(Case("softmax", *TINY, timed_by="first_call"), systems[:1], CPU, clock=lambda: now)
    assert met == [TINY[1:]] and record.ms == 250.0


def test_a_first_call_is_over_when_the_device_has_finished(monkeypatch: pytest.MonkeyPatch):
    now, queued = 0.0, 0.0

    def call(x: torch.Tensor) -> torch.Tensor:
        nonlocal now, queued
        now, queued = now + 0.125, queued + 1.0
        return torch.softmax(x, -1)

    def synchronize(device: torch.device) -> None:
        nonlocal now, queued
        now, queued = now + queued, 0.0

    monkeypatch.setattr(first_call, "_synchronize", synchronize)
    # what the tiny call has queued is not this call's, and what this call has queued is
    (record,) = measure(CASE, [System("a", "softmax", "lesson", lambda: call)], CPU, clock=lambda: now)
    assert record.ms == 1125.0


def test_every_process_has_empty_caches_of_its_own(monkeypatch: pytest.MonkeyPatch):
    folders: list[str] = []

    def run(line: list[str], *, env: dict[str, str], **options: Any) -> subprocess.CompletedProcess[str]:
        for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
            folder = Path(env[name])
            assert not folder.exists() and folder.parent.is_dir()
            folder.mkdir()
            folders.append(env[name])
        assert Case(**json.loads(line[3])) == CASE
        found = [asdict(Record("softmax", name, "float32", 3, 100, "ok", error=float("inf"))) for name in line[4:]]
        return subprocess.CompletedProcess(line, 0, "a line of somebody else's\n" + json.dumps(found) + "\n", "")

    monkeypatch.setattr(first_call.subprocess, "run", run)
    for _ in range(2):
        found = first_calls(CASE, ("a", "b"))
        assert [(r.system, r.error) for r in found] == [(name, float("inf")) for name in "ab"]
    assert len(set(folders)) == 4 and not any(Path(folder).exists() for folder in folders)


@pytest.mark.extended
def test_a_process_that_fails_or_hangs_is_an_error_of_each_system(monkeypatch: pytest.MonkeyPatch):
    found = first_calls(CASE, ("torch", "no such system"))
    assert [(r.system, r.status, r.ms) for r in found] == [("torch", "error", None), ("no such system", "error", None)]
    assert all("exit status 1: " in r.note and "no such system" in r.note for r in found)
    monkeypatch.setattr(first_call, "LIMIT", 0.01)
    assert [r.note for r in first_calls(CASE, ("torch",))] == ["no answer in 0 s"]


@pytest.mark.extended
@pytest.mark.interpreted
def test_a_real_process_answers_for_ours_and_torch():
    case = Case("softmax_backward", "bfloat16", 3, 1000, "a new shape", "first_call")
    found = first_calls(case, ("fused_softmax", "torch"))
    assert [(r.system, r.status, r.note) for r in found] == [("fused_softmax", "ok", ""), ("torch", "ok", "")]
    assert all(r.ms is not None and r.ms > 0 and r.timed_by == FIRST_CALL and r.rounds == 1 for r in found)
    assert " warp" in found[0].plan and not found[1].plan
