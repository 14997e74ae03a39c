"""The modules beside torch's: constructor, repr, state dict, pickle, results and gradients."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from cases import assert_contract

import fused_softmax as fs
from fused_softmax.torch_ops import softmax as torch_softmax

pytestmark = pytest.mark.interpreted

modules = pytest.mark.parametrize(
    ("ours", "torchs"),
    [(fs.nn.Softmax, torch.nn.Softmax), (fs.nn.LogSoftmax, torch.nn.LogSoftmax)],
    ids=["Softmax", "LogSoftmax"],
)


@modules
def test_the_same_module_but_for_its_kernel(ours, torchs):
    for arguments in ((), (1,), (None,), (-2,)):
        assert repr(ours(*arguments)) == repr(torchs(*arguments))
        assert ours(*arguments).dim == torchs(*arguments).dim
    assert repr(ours(dim=-1)) == repr(torchs(dim=-1))
    assert isinstance(ours(0), torchs)


@modules
def test_state_dicts_go_both_ways(ours, torchs):
    def model(head):
        return torch.nn.Sequential(torch.nn.Linear(4, 6), head(-1))

    mine, theirs = model(ours), model(torchs)
    assert list(mine.state_dict()) == list(theirs.state_dict())
    mine.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(3, 4)
    torch.testing.assert_close(mine(x), theirs(x))
    theirs.load_state_dict(model(ours).state_dict(), strict=True)


@modules
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_results_and_gradients(ours, torchs, dim, monkeypatch):
    ran = []
    forward = torch_softmax.forward_by_kernel
    monkeypatch.setattr(torch_softmax, "forward_by_kernel", lambda *a: (ran.append(a[1]), forward(*a))[1])
    x = torch.randn(4, 3, 7)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, want = ours(dim)(mine), torchs(dim)(theirs)
    assert ran == [dim]
    torch.testing.assert_close(y, want)
    dy = torch.randn_like(y)
    y.backward(dy)
    want.backward(dy)
    torch.testing.assert_close(mine.grad, theirs.grad)
    if torchs is torch.nn.Softmax:
        assert_contract(y.detach(), x, dim)


@modules
def test_copies_and_pickles(ours, torchs):
    x = torch.randn(2, 3)
    for other in (copy.deepcopy(ours(1)), pickle.loads(pickle.dumps(ours(1)))):
        assert type(other) is ours
        torch.testing.assert_close(other(x), torchs(1)(x))


@modules
def test_without_a_dim_it_warns_and_guesses_as_torch_does(ours, torchs):
    x = torch.randn(2, 3)
    with pytest.warns(UserWarning, match="Implicit dimension"):
        y = ours()(x)
    with pytest.warns(UserWarning, match="Implicit dimension"):
        assert torch.equal(y, torchs()(x))
