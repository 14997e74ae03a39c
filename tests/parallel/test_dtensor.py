"""DTensors in the public functions: sharded over rows and over columns, on gloo."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.ranks import spawn

import fused_softmax as fs

pytestmark = pytest.mark.extended
ROWS, COLUMNS, HIDDEN = 8, 22, 8  # 22 columns are uneven over 4 ranks


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def close(got, want):
    torch.testing.assert_close(got.full_tensor(), want, rtol=1e-5, atol=1e-5)


def inputs():
    made = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, COLUMNS, generator=made)
    ids = torch.randint(0, COLUMNS, (ROWS,), generator=made)
    return x, ids, 0.1 + torch.rand(COLUMNS, generator=made)


def pairs(weight, ids):
    """(public function's way, torch's own) of logits; the second argument makes ids as the logits are sharded."""
    return {
        "softmax": (lambda x, i: fs.softmax(x, -1), lambda x: torch.softmax(x, -1)),
        "log_softmax": (lambda x, i: fs.log_softmax(x, 1), lambda x: torch.log_softmax(x, 1)),
        "logsumexp": (lambda x, i: fs.logsumexp(x, -1), lambda x: torch.logsumexp(x, -1)),
        "none": (
            lambda x, i: fs.cross_entropy(x, i, reduction="none"),
            lambda x: F.cross_entropy(x, ids, reduction="none"),
        ),
        "sum": (
            lambda x, i: fs.cross_entropy(x, i, reduction="sum", label_smoothing=0.1),
            lambda x: F.cross_entropy(x, ids, reduction="sum", label_smoothing=0.1),
        ),
        "weighted": (
            lambda x, i: fs.cross_entropy(x, i, weight, reduction="sum"),
            lambda x: F.cross_entropy(x, ids, weight, reduction="sum"),
        ),
        "logprobs": (
            lambda x, i: fs.token_logprobs(x, i),
            lambda x: torch.log_softmax(x, -1).gather(1, ids.unsqueeze(1)).squeeze(1),
        ),
    }


def check(rank, ranks, device):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    x, ids, weight = inputs()
    meshes = [(init_device_mesh("cpu", (ranks,)), [[Shard(0)], [Shard(1)], [Replicate()]])]
    if ranks == 4:
        meshes.append((init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), [[Shard(0), Shard(1)]]))
    for mesh, layouts in meshes:
        for placements in layouts:
            rows = [p if p == Shard(0) else Replicate() for p in placements]
            spread_ids = distribute_tensor(ids, mesh, rows)
            for name, (ours, torchs) in pairs(weight, ids).items():
                spread = distribute_tensor(x, mesh, placements).requires_grad_()
                whole = x.clone().requires_grad_()
                with CommDebugMode() as seen:
                    got = ours(spread, spread_ids)
                assert seen.get_total_counts() == int(Shard(1) in placements), (name, placements)
                want = torchs(whole)
                close(got, want)
                assert got.shape == want.shape
                g = torch.linspace(1.0, 2.0, want.numel()).view(want.shape)
                (got * distribute_tensor(g, mesh, [Replicate()] * mesh.ndim)).sum().backward()
                (want * g).sum().backward()
                close(spread.grad, whole.grad)
    mesh = meshes[0][0]
    spread, whole = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_(), x.clone().requires_grad_()
    loss, want = fs.cross_entropy(spread, ids), F.cross_entropy(whole, ids)
    loss.backward()
    want.backward()
    close(loss, want)
    close(spread.grad, whole.grad)
    with pytest.raises(ValueError, match="target must be a DTensor"):
        fs.cross_entropy(distribute_tensor(x, mesh, [Shard(0)]), ids, reduction="none")
    check_colwise(mesh)


def check_colwise(mesh):
    """The documented replacement of loss_parallel, under parallelize_module: one collective forward."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

    def made():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Linear(HIDDEN, COLUMNS))

    h, ids = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1)), inputs()[1]
    grads = {}
    for way in ("whole", "loss_parallel", "fused_softmax"):
        model = made()
        if way == "whole":
            loss = F.cross_entropy(model(h), ids, label_smoothing=0.0)
            loss.backward()
        else:
            output = ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False)
            parallelize_module(model, mesh, {"1": output})
            logits = model(h)
            with CommDebugMode() as seen:
                if way == "loss_parallel":
                    with loss_parallel():
                        loss = F.cross_entropy(logits, ids)
                        loss.backward()
                else:
                    loss = fs.cross_entropy(logits, ids)
                    forward = seen.get_total_counts()
                    loss.backward()
            if way == "fused_softmax":
                assert forward == 1
        grads[way] = [(p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad) for p in model.parameters()]
    for way in ("loss_parallel", "fused_softmax"):
        for got, want in zip(grads[way], grads["whole"], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 4])
def test_dtensors(ranks, plain, tmp_path):
    spawn(check, ranks, tmp_path)


def check_rules(rank, ranks, device):
    """The operators as such, of DTensors whose rows are sharded: results and gradients, and nothing is exchanged."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    from fused_softmax.parallel import sharding_rules

    sharding_rules.register()
    mesh, ops = init_device_mesh("cpu", (ranks,)), torch.ops.fused_softmax
    x, ids, _ = inputs()
    options = (None, None, -100)
    rest = (0.0, None, 0.0, None)
    calls = {
        "softmax": (lambda x, i: ops.softmax(x, -1), True),
        "log_softmax": (lambda x, i: ops.log_softmax(x, 1), True),
        "token_logprobs": (lambda x, i: ops.token_logprobs(x, i.unsqueeze(1), None, 0.7, False)[0], True),
        "none": (lambda x, i: ops.cross_entropy(x, i, *options, "none", *rest)[0], True),
        "sum": (lambda x, i: ops.cross_entropy(x, i, *options, "sum", *rest)[0], True),
        "mean": (lambda x, i: ops.cross_entropy(x, i, *options, "mean", *rest)[0], False),
        "over rows": (lambda x, i: ops.softmax(x, 0), False),
    }
    for name, (call, stays) in calls.items():
        whole = x.clone().requires_grad_()
        want = call(whole, ids)
        want.square().sum().backward()
        local = distribute_tensor(x.clone(), mesh, [Shard(0)]).requires_grad_()
        of_rows = distribute_tensor(ids, mesh, [Shard(0)])
        with CommDebugMode() as seen:
            got = call(local, of_rows)
        assert (seen.get_total_counts() == 0) == stays, name
        close(got, want)
        if stays and name != "sum":
            assert got.placements == (Shard(0),), name
        got = got.redistribute(mesh, [Replicate()]) if got.dim() == 0 else got
        got.square().sum().backward()
        close(local.grad, whole.grad)


def test_sharding_rules(plain, tmp_path):
    spawn(check_rules, 2, tmp_path)
