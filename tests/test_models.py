"""Whole programs under patch(): a GPT-2, a BERT and torch's own transformer, tiny, with random weights.

Each runs by torch, by torch under patch(), and by torch in float64, which judges the loss and every gradient of both.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from exactness import assert_as_exact

import fused_softmax as fs
from fused_softmax.launch import softmax as rows
from fused_softmax.torch_ops import softmax as torch_softmax

pytestmark = pytest.mark.interpreted

LAYERS, VOCABULARY = 2, 97


@pytest.fixture
def reached(monkeypatch) -> list[tuple[str, int]]:
    """(entry point of the kernels, columns) as they are called."""
    seen: list[tuple[str, int]] = []

    def watch(module, name: str, argument: int) -> None:
        entry = getattr(module, name)

        def watched(*arguments):
            seen.append((entry.__name__, arguments[argument].shape[arguments[argument + 1]]))
            return entry(*arguments)

        monkeypatch.setattr(module, name, watched)

    # the functions find the entry points in one place, patch() in the other
    watch(torch_softmax, "forward_by_kernel", 0)
    watch(torch_softmax, "backward_by_kernel", 1)
    watch(rows, "softmax_forward", 0)
    watch(rows, "softmax_backward", 1)
    return seen


def gradients(model: torch.nn.Module, loss_of) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    return {
        "loss": loss.detach(),
        **{name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
    }


def judge(model: torch.nn.Module, loss_of) -> None:
    own = gradients(model, loss_of)
    with fs.patch():
        got = gradients(model, loss_of)
    want = gradients(model.double(), loss_of)
    assert list(got) == list(own) == list(want)
    assert len(got) > 10
    for name in own:
        # a gradient is the sum over all tokens of terms that partly cancel: torch's own error says how much
        assert_as_exact(got[name], own[name], want[name], scale=1.0)
        torch.testing.assert_close(got[name], own[name], rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def gpt2(device: str) -> tuple:
    """(model, its loss) on 2 rows of 12 tokens."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=LAYERS, n_head=2, n_embd=32, vocab_size=VOCABULARY, n_positions=24, attn_implementation="eager",
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    tokens = torch.randint(0, VOCABULARY, (2, 12), device=device)
    model = transformers.GPT2LMHeadModel(config).train().to(device)
    return model, lambda model: model(input_ids=tokens, labels=tokens).loss


def bert(device: str) -> tuple:
    """(model, its loss) on 3 rows of 11 tokens, one of them padded."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        num_hidden_layers=LAYERS, num_attention_heads=2, hidden_size=32, intermediate_size=64, vocab_size=VOCABULARY,
        max_position_embeddings=24, attn_implementation="eager", hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    tokens = torch.randint(0, VOCABULARY, (3, 11), device=device)
    mask = torch.ones_like(tokens)
    mask[1, 7:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    model = transformers.BertForMaskedLM(config).train().to(device)
    return model, lambda model: model(input_ids=tokens, attention_mask=mask, labels=labels).loss


@pytest.mark.parametrize(("make", "n_keys"), [(gpt2, 12), (bert, 11)], ids=["gpt2", "bert"])
def test_transformers(make, n_keys, reached):
    judge(*make("cpu"))
    # a softmax over the keys in each layer, a log_softmax over the vocabulary, and their gradients
    assert reached.count(("softmax_forward", n_keys)) == reached.count(("softmax_backward", n_keys)) == LAYERS
    assert reached.count(("softmax_forward", VOCABULARY)) == reached.count(("softmax_backward", VOCABULARY)) == 1


def test_torchs_own_transformer(reached):
    """No package needed: attention that returns its weights takes torch's math path, and so aten::_softmax."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(VOCABULARY, 16)
            self.attend = torch.nn.MultiheadAttention(16, 2, batch_first=True)
            self.head = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, VOCABULARY))
            self.mix = torch.nn.Parameter(torch.randn(3))
            self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(16) for _ in range(3))

        def forward(self, tokens):
            x = self.embed(tokens)
            for weight, norm in zip(torch.softmax(self.mix, 0), self.norms, strict=True):
                y = norm(x)
                x = x + weight * self.attend(y, y, y, need_weights=True)[0]
            return self.head(x)

    tokens = torch.randint(0, VOCABULARY, (2, 9))
    judge(
        Model(),
        lambda model: F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1).flatten(), label_smoothing=0.1),
    )
    assert reached.count(("softmax_forward", 9)) == reached.count(("softmax_backward", 9)) == 3
    assert reached.count(("softmax_forward", 3)) == reached.count(("softmax_backward", 3)) == 1
    assert reached.count(("softmax_forward", VOCABULARY)) == 1


def test_training_ends_where_torchs_does(reached):
    """Twenty steps of Adam: the two runs stay together, with the functional interface as with patch()."""

    def train(softmax) -> tuple[torch.Tensor, float]:
        torch.manual_seed(3)
        w = torch.randn(8, 5, requires_grad=True)
        x, target = torch.randn(32, 8), torch.randint(0, 5, (32,))
        optimizer = torch.optim.Adam([w], lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            loss = -softmax(x @ w, -1).gather(1, target[:, None]).mean()
            loss.backward()
            optimizer.step()
        return w.detach(), loss.item()

    w, loss = train(torch.log_softmax)
    assert reached == []
    with fs.patch():
        patched = train(torch.log_softmax)
    assert len(reached) == 40
    for mine, its_loss in (patched, train(fs.log_softmax)):
        torch.testing.assert_close(mine, w, rtol=1e-3, atol=1e-3)
        assert abs(its_loss - loss) < 1e-4
    assert len(reached) == 80
