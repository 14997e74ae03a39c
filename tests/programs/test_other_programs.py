"""torchtitan's and verl's own names, replaced where their modules import."""

from __future__ import annotations

import importlib

import pytest
import torch

from fused_softmax import integrations

pytestmark = [pytest.mark.extended, pytest.mark.interpreted]


def module_of(name: str):
    """The module, or a skip with the reason: both packages want more than their wheels bring."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} does not import here: {error}")


def test_torchtitans_loss():
    module = module_of("torchtitan.components.loss")
    theirs, config = module.cross_entropy_loss, module.CrossEntropyLoss.Config()
    pred, labels = torch.randn(2, 5, 33, requires_grad=True), torch.randint(0, 33, (2, 5))
    labels[0, 0] = -100
    want, _ = module.CrossEntropyLoss(config)(pred, labels, torch.tensor(9))
    with integrations.patch_torchtitan():
        loss = module.CrossEntropyLoss(config)
        assert loss.fn is integrations.torchtitan_cross_entropy_loss
        got, _ = loss(pred, labels, torch.tensor(9))
    assert module.cross_entropy_loss is theirs
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(t, pred)[0] for t in (got, want)))


def test_verls_logprobs():
    module = module_of("verl.utils.torch_functional")
    logits, labels = torch.randn(2, 5, 33), torch.randint(0, 33, (2, 5))
    want = module.logprobs_from_logits(logits, labels)
    with integrations.patch_verl():
        assert module.logprobs_from_logits is integrations.verl_logprobs_from_logits
        got = module.logprobs_from_logits(logits, labels)
    torch.testing.assert_close(got, want)
