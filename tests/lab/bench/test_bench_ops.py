"""Workloads come from the registry of ops; their systems and their plans are those of the op that they name."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fused_softmax as fs
from fused_softmax.lab import reference, registry
from fused_softmax.lab.bench.ceilings import ceiling
from fused_softmax.lab.bench.checking import Judge
from fused_softmax.lab.bench.ops import OPS, default_workload, plan_of
from fused_softmax.lab.bench.systems import SYSTEMS, System
from fused_softmax.lab.bench.workload import Op
from fused_softmax.lab.fuzz.draw import Budget, draw_cases, draw_class
from fused_softmax.lab.fuzz.judge import evaluate
from fused_softmax.lab.plans import plan_text
from fused_softmax.launch import prepared_calls
from fused_softmax.launch.launcher import RowOp
from fused_softmax.planning.types import Plan

CPU = torch.device("cpu")
SOFTMIN = dataclasses.replace(
    registry.OPS["softmax"],
    name="softmin",
    function=lambda x, dim, dtype=None: fs.softmax(-x, dim, dtype),
    torch_way=lambda x, dim, dtype=None: torch.softmax(-x, dim, dtype),
    reference=lambda x, dim=-1, dtype=None: reference.softmax(-x, dim, dtype),
    operator=None,
    ways=("function", "vmap", "checkpoint"),
)


def ours(op: Op, *inputs: Tensor) -> Any:
    with torch.no_grad():
        return op.ours(*inputs)


@pytest.mark.parametrize(("kind", "tensors"), [("copy", 2), ("add", 3)])
def test_a_ceiling_moves_as_many_bytes_as_the_op(kind: str, tensors: int):
    x = torch.randn(6, 10)
    for like in (x, torch.randn(10, 6).t()):
        run, moved = ceiling(kind, like, 100)
        out = run(like, like)
        assert 100 <= moved == out.numel() * tensors * 4 < 100 + tensors * 4
    run, moved = ceiling(kind, x, 10**6)  # a mask's bytes are no reason for a longer pass
    torch.testing.assert_close(run(x, x), x.flatten() * (tensors - 1))
    assert moved == tensors * 240
    # a causal row that sees one column of 64
    causal = OPS["masked_softmax_causal"].bytes_moved(8, 64, 4, (1, 8, 1))
    assert causal == 4 * (8 + 8 * 64)


@pytest.mark.parametrize("like", [torch.randn(6, 10), torch.randn(10, 6).t()], ids=["contiguous", "transposed"])
def test_an_add_reads_two_tensors(like: Tensor, monkeypatch: pytest.MonkeyPatch):
    """One tensor that is read twice comes from a cache the second time."""
    read, add = [], torch.add
    monkeypatch.setattr(torch, "add", lambda a, b, **out: read.append((a.data_ptr(), b.data_ptr())) or add(a, b, **out))
    ceiling("add", like)[0](like, torch.randn(6, 10))
    assert len(read) == 1 and read[0][0] != read[0][1]


def test_every_op_of_the_registry_is_a_workload():
    assert {op.spec.name for op in OPS.values()} == set(registry.OPS)
    assert all(op.parts and op.elements(4, 8) for op in OPS.values())


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_one_entry_makes_an_op_a_workload(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(registry.OPS, "softmin", SOFTMIN)  # type: ignore[arg-type]
    op = default_workload(SOFTMIN)
    inputs = op.inputs(7, 300, dtype, CPU, 0)
    check = Judge(op, inputs)
    assert (op.ceiling, op.parts, op.bytes_moved(7, 300, 2)) == ("copy", ("y",), 2 * 7 * 300 * 2)
    assert check.judge(ours(op, *inputs), ours=True).ok and check.judge(op.torch_call(*inputs)).ok
    assert not check.judge(ours(OPS["softmax"], *inputs), ours=True).ok


@pytest.mark.interpreted
@pytest.mark.parametrize("way", SOFTMIN.ways)
def test_one_entry_makes_the_fuzzer_draw_an_op(way: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(registry.OPS, "softmin", SOFTMIN)  # type: ignore[arg-type]
    budget = dataclasses.replace(Budget.interpreted(), elements=1 << 10, columns=1 << 10, widest=0)
    cases = list(draw_cases(draw_class("softmin", "float32", 3, budget), way, 8, budget))
    assert [case.to_json() for case in cases if evaluate(case, "cpu").found()] == []
    wrong = dataclasses.replace(SOFTMIN, function=fs.softmax)
    monkeypatch.setitem(registry.OPS, "softmin", wrong)  # type: ignore[arg-type]
    assert any(evaluate(case, "cpu").found() for case in cases)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("op", OPS)
def test_a_compiled_workload_is_one_graph_and_right(op: str):
    for dtype in (torch.bfloat16, torch.float32):
        inputs = OPS[op].inputs(24, 12, dtype, CPU, 0)
        torch._dynamo.reset()
        call = OPS[op].compiled(lambda f: torch.compile(f, backend="aot_eager", dynamic=False, fullgraph=True))
        with torch.no_grad():
            check = Judge(OPS[op], inputs)
            # twice: a graph that is kept must stay usable
            assert all(check.judge(call(*inputs)).ok for _ in range(2))


@pytest.mark.interpreted
@pytest.mark.parametrize("op", OPS)
def test_the_plan_that_is_named_is_one_that_runs(op: str, monkeypatch: pytest.MonkeyPatch):
    planned: list[Plan] = []
    plan = RowOp.plan

    def recorded(self: RowOp, *args: Any) -> Plan:
        planned.append(plan(self, *args))
        return planned[-1]

    for n_cols in (64, 5003):
        inputs = OPS[op].inputs(6, n_cols, torch.bfloat16, CPU, 0)
        named = plan_of(OPS[op], inputs)
        prepared_calls._calls.clear()
        with monkeypatch.context() as patched:
            patched.setattr(RowOp, "plan", recorded)
            ours(OPS[op], *inputs)
        assert named in [(found.regime, plan_text(found)) for found in planned]
        planned.clear()


class _LigerLoss(torch.autograd.Function):
    """Liger's way: the forward writes the gradient over the logits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, *options: Any) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().clone().requires_grad_()
            loss = F.cross_entropy(leaf, target)
            x.data.copy_(torch.autograd.grad(loss, leaf)[0])
        ctx.save_for_backward(x.data)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return (ctx.saved_tensors[0] * upstream[0], *(None,) * 8)


def _module(name: str, **content: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(content)
    return module


PEERS = (
    _module("quack"),
    _module("quack.cross_entropy", cross_entropy=F.cross_entropy),
    _module(
        "quack.softmax",
        softmax_fwd=lambda x: torch.softmax(x, -1),
        softmax_backward=lambda dy, y: torch._softmax_backward_data(dy, y, -1, y.dtype),
    ),
    *map(_module, ("liger_kernel", "liger_kernel.ops")),
    _module("liger_kernel.ops.cross_entropy", LigerCrossEntropyFunction=_LigerLoss),
    _module("liger_kernel.ops.softmax", LigerSoftmaxFunction=_module("", apply=lambda x: torch.softmax(x, -1))),
)


@pytest.mark.parametrize(
    "system", [s for s in SYSTEMS if s.name in ("liger", "quack")], ids=lambda system: f"{system.name} {system.op}"
)
def test_a_peer_is_called_as_its_workload_needs(system: System, monkeypatch: pytest.MonkeyPatch):
    # stand-ins with the packages' signatures: the packages need a GPU
    for module in PEERS:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    inputs = OPS[system.op].inputs(70, 33, torch.float32, CPU, 0)
    with torch.no_grad():
        check, call = Judge(OPS[system.op], inputs), system.build()
        assert check.judge(call(*inputs)).ok
