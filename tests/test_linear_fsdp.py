"""A weight that FSDP2 has sharded: gathered once, with the gradient that data-parallel training has."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from ranks import spawn

import fused_softmax as fs

pytestmark = pytest.mark.extended

RANKS, ROWS, HIDDEN, CLASSES = 2, 6, 8, 20


class Model(torch.nn.Module):
    """A layer, and a head whose weight the loss takes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(HIDDEN, HIDDEN)
        self.head = torch.nn.Linear(HIDDEN, CLASSES, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).sin()


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    return torch.randn(ROWS, HIDDEN, generator=g), torch.randint(0, CLASSES, (ROWS,), generator=g)


def made() -> Model:
    torch.manual_seed(0)
    return Model()


def averaged() -> dict[str, torch.Tensor]:
    """The gradients of the mean of the ranks' losses, by torch in one process."""
    model = made()
    losses = [F.cross_entropy(model.head(model(x)), target) for x, target in map(batch, range(RANKS))]
    (sum(losses) / RANKS).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def train(rank: int, ranks: int, device: torch.device) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (ranks,))
    model = made()
    fully_shard(model.body, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    x, target = batch(rank)
    hidden = model(x)
    model.reshard()
    assert isinstance(model.head.weight, DTensor)
    loss = fs.linear_cross_entropy(hidden, model.head.weight, target, linear_bias=model.head.bias)
    loss.backward()
    for name, want in averaged().items():
        grad = dict(model.named_parameters())[name].grad
        torch.testing.assert_close(grad.full_tensor(), want, msg=lambda m, name=name: f"{name}: {m}")
    with pytest.raises(TypeError, match="must be this rank's own tensor"):
        fs.linear_cross_entropy(model.head.weight, model.head.weight, target)


def test_a_sharded_weight(tmp_path):
    spawn(train, RANKS, tmp_path)
