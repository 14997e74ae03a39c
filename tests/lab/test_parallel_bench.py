"""The benchmark of parallel losses: the others' ways are right, on gloo, and a wrong one is seen."""

from __future__ import annotations

import types

import pytest
import torch
from support.ranks import spawn

from fused_softmax.parallel import exchange

pytestmark = pytest.mark.extended


def of_rank(rank, ranks, device):
    from fused_softmax.lab.parallel import measure
    from fused_softmax.lab.parallel.systems import LOGPROBS, OPS, SYSTEMS, Place, System

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (ranks,))
    n_rows, n_cols = 24, 64
    at = Place(rank, ranks, n_cols // ranks, mesh)
    x = (3 * torch.randn(n_rows, at.width, generator=torch.Generator().manual_seed(rank))).bfloat16()
    target = torch.randint(0, n_cols, (n_rows,), generator=torch.Generator().manual_seed(9))
    names, counts = set(), {}
    for op in OPS:
        want = measure.exact(x, target, at)
        for system in SYSTEMS:
            if op not in system.ways or "compiled" in system.name:
                continue
            names.add(system.name)
            local = x.clone().requires_grad_(op != LOGPROBS)
            found = measure.caller(op, system, local, target, at)()
            each = measure.errors(op, found, local, target, at, want)
            ours = system.name.startswith(("fused_softmax", "all_gather"))
            assert each[0] <= measure.TOLERANCE["loss" if ours else "bfloat16 loss"], (op, system.name, each)
            assert all(e <= measure.TOLERANCE["gradient"] for e in each[1:]), (op, system.name, each)
            with measure.Collectives() as seen:
                measure.caller(op, system, local, target, at)()
            counts[system.name] = (len(seen.names), seen.sent)
    assert len(names) == 5
    each_row = 4 * n_rows
    assert counts["fused_softmax"][0] == 1 and counts["fused_softmax"][1] <= 7 * each_row + 200
    assert counts["megatron"] == (2, 3 * each_row)
    assert counts["torch loss_parallel"][0] >= 3 and counts["all_gather, one-GPU op"] == (1, 2 * x.numel())
    # a mean of this rank's columns alone is no result
    wrong = System("wrong", {OPS[0]: lambda x, target, at: torch.logsumexp(x.float(), 1).mean()})
    local = x.clone().requires_grad_()
    each = measure.errors(OPS[0], measure.caller(OPS[0], wrong, local, target, at)(), local, target, at, want)
    assert each[0] > measure.TOLERANCE["bfloat16 loss"]


def equality_of_rank(rank, ranks, device):
    from fused_softmax.lab.parallel import equality

    cases = ((5, 64, torch.float32), (4, 72, torch.bfloat16))
    records = list(equality.check(rank, ranks, device, cases))
    assert len(records) == len(cases) * len(equality.PARALLEL) and {r.status for r in records} == {"ok"}, records
    assert sum("bits equal on 1, 2 ranks" in r.note for r in records) == len(cases) * (len(equality.PARALLEL) - 1)
    # a result that is off is seen, and so are bits that depend on the number of ranks
    through = equality.parallel.logsumexp
    equality.PARALLEL = {"logsumexp": lambda p, x, at, w: through(x, **w) * (1.0 + 1e-6 * w["group"].size())}
    equality.PARALLEL |= {"cross_entropy": lambda p, x, at, w: 1.01 * equality.parallel.cross_entropy(x, p.target, **w)}
    where = equality.found
    equality.found = lambda name, ways, p, at, w: where(name, ways, p, at, {"group": torch.distributed.group.WORLD} | w)
    records = list(equality.check(rank, ranks, device, cases[:1]))
    assert [r.status for r in records] == ["wrong", "wrong"], records
    assert "DIFFER" in records[0].note and records[1].error > 1.0
    # a call that raises is a record, and the others follow
    equality.PARALLEL = {"softmax": lambda p, x, at, w: x[:, 10**6], "logsumexp": equality.PARALLEL["logsumexp"]}
    records = list(equality.check(rank, ranks, device, cases[:1]))
    assert [r.status for r in records] == ["error", "wrong"] and "IndexError" in records[0].note, records


def test_equality_with_one_gpu(monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    spawn(equality_of_rank, 2, tmp_path)


def test_every_way_is_right(monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    spawn(of_rank, 2, tmp_path)


def test_compiling_ahead_makes_every_call(monkeypatch, capsys):
    """On a group whose collectives exchange nothing; a call that fails says so and counts."""
    from fused_softmax.lab.parallel import ahead, equality

    done: list[str] = []
    monkeypatch.setattr(ahead, "CASES", ((9, 128, torch.bfloat16),))
    monkeypatch.setattr(exchange, "expect_agreement", exchange.expect_agreement)
    calls = [("equality", 0, name) for name in (*equality.PARALLEL, "none such")]
    try:
        ahead.work([(0, 4), *calls], types.SimpleNamespace(put=done.append))
    finally:
        torch.distributed.destroy_process_group()
    assert len(done) == len(calls)
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not compiled ahead")]
    assert len(failed) == 1 and "none such" in failed[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_is_written_and_shown_by_rank_0_alone(rank, monkeypatch, tmp_path, capsys):
    from fused_softmax.lab.parallel import measure
    from fused_softmax.lab.record import Record, from_json, header

    def recorded(op, n_cols):
        times = dict(ms=2.0, ceiling="a", fraction=0.5)
        return Record(op, "fused_softmax", "bfloat16", 8, n_cols, "ok", case="2 GPUs", **times)

    monkeypatch.setattr(measure.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(measure.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(measure.dist, "device_mesh", types.SimpleNamespace(init_device_mesh=lambda kind, shape: None))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(measure, "header", lambda device, interpreted: header(torch.device("cpu"), interpreted))
    monkeypatch.setattr(measure, "free", lambda: None)
    monkeypatch.setattr(measure, "check", lambda *of: iter([recorded("softmax", 64)]))
    monkeypatch.setattr(measure, "measure", lambda op, rows, n_cols, *more: [recorded(op, n_cols)])
    out, equality = tmp_path / "times.json", tmp_path / "equality.json"
    measure.run(("cross_entropy", "token_logprobs"), (128,), 8, (128,), 7, out, equality)
    assert out.exists() == equality.exists() == (rank == 0)
    if rank == 0:
        head, records = from_json(out.read_text())
        assert head.finished and head.device.startswith("2 x ") and len(records) == 4
        assert len(from_json(equality.read_text())[1]) == 1
        assert "softmax 8x64 2 GPUs fused_softmax: ok, 2.000 ms, 2.000 of a" in capsys.readouterr().out
