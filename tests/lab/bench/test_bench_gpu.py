"""The benchmark where it times: the three stopwatches, the ceilings, and poison that compiled graphs see too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console

from fused_softmax.lab.bench.cases import Case
from fused_softmax.lab.bench.ops import AUTOGRAD, OPS
from fused_softmax.lab.bench.session import Session
from fused_softmax.lab.bench.systems import System, systems_for
from fused_softmax.lab.first_call import first_calls
from fused_softmax.lab.record import from_json, header
from fused_softmax.lab.timing import EventStopwatch, GraphStopwatch, interleave

pytestmark = pytest.mark.gpu
NAMES = ("fused_softmax", "torch", "torch.compile", "02_one_row", "05_published")


@pytest.fixture
def device() -> torch.device:
    # timing is done without the deterministic mode that conftest turns on
    torch.use_deterministic_algorithms(False)
    return torch.device("cuda", torch.cuda.current_device())


def test_ceilings_are_those_of_a_gpu(device: torch.device):
    from fused_softmax.lab.bench.ceilings import measured

    found = measured(device, 2**27)
    assert set(found) == {"copy", "read", "add", "write"} and all(100 < gbps < 20_000 for gbps in found.values())


@pytest.mark.parametrize("timed_by", ["events", "graph", "graph_cold", "host"])
def test_each_stopwatch_times_what_passed(device: torch.device, timed_by: str):
    case = Case("softmax", "bfloat16", 4096, 4096, timed_by=timed_by)  # type: ignore[arg-type]
    run = Session(header(device, False), systems_for("softmax", NAMES), device, seconds=0.02)
    found = {r.system: r for r in run.run([case])}
    assert run.head.stopped == "" and found["05_published"].status == "wrong" and found["05_published"].ms is None
    for name in NAMES[:-1]:
        record = found[name]
        assert (record.status, record.note) == ("ok", "") and record.ms is not None and 0 < record.ms < 10
        assert record.ms_p10 is not None and record.ms_p90 is not None and record.ms_p10 <= record.ms <= record.ms_p90
        if timed_by != "host":
            assert record.fraction is not None and 0.05 < record.fraction < 1.5


@pytest.mark.parametrize("by_mode", [True, False], ids=["by mode", "through the allocator"])
def test_what_is_not_written_is_nan_either_way(device: torch.device, by_mode: bool):
    unwritten = System("unwritten", "softmax", "peer", lambda: torch.empty_like, poison_by_mode=by_mode)
    run = Session(header(device, False), [unwritten], device, timed=False)
    (record,) = run.run([Case("softmax", "bfloat16", 4096, 4096)])
    assert record.status == "wrong" and "unwritten" in record.note


@pytest.mark.parametrize("op", [op for op in OPS if op != "softmax"])
def test_every_op_is_right_and_timed_with_its_peak_memory(device: torch.device, op: str):
    names = ("fused_softmax", "fused_softmax_in_place", "torch", "torch.compile")
    run = Session(header(device, False), systems_for(op, names), device, seconds=0.02)
    found = {r.system: r for r in run.run([Case(op, "bfloat16", 4096, 4096)])}
    assert run.head.stopped == "" and OPS[op].ceiling in found
    for record in found.values():
        assert (record.status, record.note) == ("ok", "") and record.ms is not None
    peak = found["fused_softmax"].peak_bytes
    # a matrix of results, and one that autograd keeps, or a few numbers for each row
    matrices = 2**26 if op in AUTOGRAD else 2**25
    assert peak is not None and (peak < 2**20 if OPS[op].ceiling == "read" else matrices <= peak < matrices + 2**20)
    if op == "cross_entropy":
        in_place = found["fused_softmax_in_place"].peak_bytes
        assert in_place is not None and in_place < 2**20


@pytest.mark.parametrize("cold", [False, True])
def test_calls_write_to_one_place_where_the_graph_is_warm_and_to_others_where_cold(device: torch.device, cold: bool):
    stopwatch, x, places = GraphStopwatch(device, cold), torch.randn(64, 4096, device=device), []

    def call() -> torch.Tensor:
        y = torch.softmax(x, 1)
        places.append(y.data_ptr())
        return y

    stopwatch.capture("it", call)
    captured = set(places[-stopwatch.per_graph :])
    assert len(captured) == (stopwatch.per_graph if cold else 1)


def test_a_first_call_compiles_every_time(device: torch.device):
    case = Case("softmax", "bfloat16", 64, 4096, timed_by="first_call")
    for _ in range(2):
        ours, torchs = first_calls(case, ("fused_softmax", "torch"))
        assert ours.status == torchs.status == "ok" and ours.ms is not None and torchs.ms is not None
        assert 20 < ours.ms < 20_000 and 0 < torchs.ms < 20_000


def test_host_time_behind_a_call_that_synchronises_is_nobody_elses(device: torch.device):
    x = torch.randn(2**25, device=device)
    y = torch.empty_like(x)

    def synchronises() -> None:
        float(x[0])

    alone = interleave({"copy": lambda: y.copy_(x)}, EventStopwatch(device), 0.02)["copy"].ms
    calls = {"synchronises": synchronises, "copy": lambda: y.copy_(x)}
    assert interleave(calls, EventStopwatch(device), 0.02)["copy"].ms < 1.1 * alone


def test_bench_with_workers_from_the_command(device: torch.device, tmp_path: Path):
    from fused_softmax.lab.bench.run import Request, prepare, run

    request = Request(widths=(1000,), dtypes=("bfloat16",), systems=NAMES, elements=2**26, out=tmp_path, workers=2)
    _, records, files = run(prepare(request), Console(width=150))
    head, read = from_json((tmp_path / "results.json").read_text())
    assert read == records and head.finished and head.ceilings["copy"] > 100
    assert {f.name for f in files} == {"index.html", "results.json", "results.csv", "ladder.png"}
