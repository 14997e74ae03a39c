"""The functions that stand in for other packages' own, and what puts them in place, without those packages.

tests/programs runs them in the real packages.
"""

from __future__ import annotations

import copy
import sys
import types

import pytest
import torch

from fused_softmax import integrations
from fused_softmax.integrations.replacing import Name, Replaced
from fused_softmax.torch_ops import token_logprobs as statistics_ops

pytestmark = pytest.mark.interpreted


# --- serving ----------------------------------------------------------------------------------------------------------


def vllms_token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities, ranks of the first ids) as vLLM documents them: float32, and ties count."""
    logprobs = torch.log_softmax(logits.double(), -1).gather(-1, token_ids.long())
    chosen = logits.gather(-1, token_ids[:, :1].long())
    return logprobs.float(), (logits >= chosen).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_token_logprobs_and_ranks_are_vllms(dtype, ids_dtype):
    logits = (torch.randn(5, 131) * 3).to(dtype)
    logits[1, 7] = logits[1].max()  # a tie
    logits[2, ::2] = -torch.inf
    ids = torch.stack([torch.randperm(131)[:4] for _ in range(5)]).to(ids_dtype)
    ids[1, 0], ids[2, 0] = 7, 1
    logprobs, ranks = integrations.compute_token_logprobs(logits, ids, return_rank=True)
    want, want_ranks = vllms_token_logprobs(logits, ids)
    assert logprobs.dtype is torch.float32 and ranks.dtype is torch.int64
    torch.testing.assert_close(logprobs, want)
    assert torch.equal(ranks, want_ranks) and int(ranks[1]) == 2
    assert torch.equal(integrations.compute_token_logprobs(logits, ids), logprobs)


def rows_in(layout: str, n_rows: int, n_cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Random rows that are contiguous, that start off an aligned address, or that are padded."""
    made = torch.Generator().manual_seed(n_cols)
    before, after = {"contiguous": (0, 0), "shifted": (1, 0), "padded": (1, 2)}[layout]
    flat = torch.randn(n_rows * (n_cols + after) + before, generator=made) * 3
    return flat.to(dtype)[before:].view(n_rows, n_cols + after)[:, :n_cols]


CHEAP = {(1, "contiguous"), (31, "shifted"), (1000, "padded"), (5003, "shifted"), (33333, "contiguous")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("n_cols", "layout"),
    [
        (n, layout) if (n, layout) in CHEAP else pytest.param(n, layout, marks=pytest.mark.extended)
        for n in (1, 31, 100, 1000, 5003, 33333)
        for layout in ("contiguous", "shifted", "padded")
    ],
)
def test_ranks_come_from_the_same_read(n_cols, dtype, layout):
    logits = rows_in(layout, 4, n_cols, dtype)
    ids = torch.stack([torch.arange(4) % n_cols, torch.arange(4) * 7 % n_cols], 1)
    logits[0, ids[0, 0]] = -torch.inf  # every column is at least that
    logits[1, ::2] = -torch.inf
    logits[2, n_cols - 1] = logits[2].max()  # a tie
    ids[2, 0] = n_cols - 1
    logits[3, n_cols // 2] = torch.nan
    found = statistics_ops.token_logprobs_and_rank(logits, ids)
    assert found is not None
    want, ranks = vllms_token_logprobs(logits, ids)
    torch.testing.assert_close(found[0], want, equal_nan=True, rtol=1e-4, atol=1e-4)
    assert found[1].dtype is torch.int64 and torch.equal(found[1], ranks)
    for i in range(4):  # the same bits without the other rows
        alone = integrations.compute_token_logprobs(logits[i : i + 1], ids[i : i + 1], return_rank=True)
        assert torch.equal(alone[0].nan_to_num(7.0), found[0][i : i + 1].nan_to_num(7.0))
        assert torch.equal(alone[1], found[1][i : i + 1])


def test_ranks_where_the_kernel_does_not_count(monkeypatch):
    logits, ids = torch.randn(3, 50), torch.tensor([[4, 1], [49, 0], [0, 2]])
    want = vllms_token_logprobs(logits, ids)
    for given in (logits.clone().requires_grad_(), logits.double()):
        assert statistics_ops.token_logprobs_and_rank(given, ids) is None
        logprobs, ranks = integrations.compute_token_logprobs(given, ids, return_rank=True)
        torch.testing.assert_close(logprobs.detach(), want[0])
        assert torch.equal(ranks, want[1])
    with pytest.raises(IndexError):
        integrations.compute_token_logprobs(logits, ids + 1, return_rank=True)
    with pytest.raises(TypeError, match="integers"):
        integrations.compute_token_logprobs(logits, ids.float(), return_rank=True)
    with pytest.raises(ValueError, match="token_ids"):
        integrations.compute_token_logprobs(logits, ids[:2], return_rank=True)
    assert integrations.compute_token_logprobs(logits[:0], ids[:0], return_rank=True)[1].shape == (0,)
    monkeypatch.setattr(statistics_ops.rows, "MOST_RANKED", 49)  # a float32 would not hold a larger rank exactly
    assert statistics_ops.token_logprobs_and_rank(logits, ids) is None
    assert torch.equal(integrations.compute_token_logprobs(logits, ids, return_rank=True)[1], want[1])


def test_token_logprobs_want_two_dimensions():
    with pytest.raises(ValueError, match=r"\(B, V\)"):
        integrations.compute_token_logprobs(torch.zeros(4), torch.zeros(1, 1, dtype=torch.int64))


def test_batch_invariant_log_softmax_has_the_same_bits_alone():
    x = torch.randn(7, 131).to(torch.bfloat16)
    for half_to_float, dtype in ((False, torch.bfloat16), (True, torch.float32)):
        y = integrations.batch_invariant_log_softmax(x, -1, half_to_float)
        assert y.dtype is dtype
        torch.testing.assert_close(y.float(), torch.log_softmax(x.float(), -1), rtol=1e-2, atol=1e-2)
        for i in range(7):
            alone = integrations.batch_invariant_log_softmax(x[i : i + 1].clone(), -1, half_to_float)
            assert torch.equal(alone, y[i : i + 1])
    with pytest.raises(RuntimeError, match="float16 or bfloat16"):
        integrations.batch_invariant_log_softmax(torch.zeros(2, 3), -1, True)


# --- trainers ---------------------------------------------------------------------------------------------------------


def test_trls_temperature_and_mask():
    logits, index = torch.randn(2, 3, 33), torch.randint(0, 33, (2, 3))
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    got = integrations.selective_log_softmax(logits, index, temperature=0.7, row_mask=mask)
    want = torch.log_softmax(logits / 0.7, -1).gather(-1, index[..., None])[..., 0] * mask
    torch.testing.assert_close(got, want)
    assert torch.equal(got == 0, mask == 0)


def test_torchtitans_loss_is_a_sum():
    pred, labels = torch.randn(2, 5, 33, requires_grad=True), torch.randint(0, 33, (2, 5))
    labels[0, 0] = -100
    got = integrations.torchtitan_cross_entropy_loss(pred, labels, global_vocab_size=33)
    want = torch.nn.functional.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(loss, pred)[0] for loss in (got, want)))
    with pytest.raises(NotImplementedError, match="33 of 66 columns"):
        integrations.torchtitan_cross_entropy_loss(pred, labels, global_vocab_size=66)


def test_verls_logprobs():
    logits, labels = torch.randn(2, 5, 33), torch.randint(0, 33, (2, 5))
    want = torch.log_softmax(logits, -1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(integrations.verl_logprobs_from_logits(logits, labels), want)


# --- replacing names --------------------------------------------------------------------------------------------------


@pytest.fixture
def package(monkeypatch) -> types.ModuleType:
    """A package `planted` whose function f(a, b) was imported by name into planted.user."""
    top, user = types.ModuleType("planted"), types.ModuleType("planted.user")
    top.f = user.f = lambda a, b: "theirs"
    monkeypatch.setitem(sys.modules, "planted", top)
    monkeypatch.setitem(sys.modules, "planted.user", user)
    return top


def ours(a, b):
    return "ours"


def test_a_name_is_replaced_where_it_was_imported_too(package, monkeypatch):
    theirs = package.f
    replaced = Replaced("planted", "1.0 to 1.2", [Name("planted", "f", ("a", "b"), ours)])
    assert package.f is ours and sys.modules["planted.user"].f is ours
    assert "replaced f in planted, planted.user" in str(replaced)
    late = types.ModuleType("planted.late")
    late.f = package.f
    monkeypatch.setitem(sys.modules, "planted.late", late)
    replaced.undo()
    assert package.f is theirs and sys.modules["planted.user"].f is theirs and late.f is theirs
    with pytest.raises(RuntimeError, match="already"):
        replaced.undo()


@pytest.mark.parametrize(
    ("module", "name", "parameters", "told"),
    [
        ("planted", "gone", ("a", "b"), r"planted.gone does not exist: this adapter knows planted 1.0 to 1.2"),
        ("planted.missing", "f", ("a", "b"), r"planted.missing.f does not exist"),
        ("planted", "f", ("a",), r"planted.f takes \(a, b\), not \(a\): this adapter knows planted 1.0 to 1.2"),
    ],
)
def test_a_name_that_is_gone_or_other_raises_before_anything_changes(package, module, name, parameters, told):
    theirs = package.f
    names = [Name("planted", "f", ("a", "b"), ours), Name(module, name, parameters, ours)]
    with pytest.raises(RuntimeError, match=told):
        Replaced("planted", "1.0 to 1.2", names)
    assert package.f is theirs


@pytest.mark.parametrize("patch", [integrations.patch_trl, integrations.patch_torchtitan, integrations.patch_verl])
def test_a_package_that_is_not_installed_is_named(patch, monkeypatch):
    name = patch.__name__.removeprefix("patch_")
    for path in [name, *(path for path in sys.modules if path.startswith(f"{name}."))]:
        monkeypatch.setitem(sys.modules, path, None)
    with pytest.raises(RuntimeError, match=rf"does not exist: this adapter knows {name} [\d.]+"):
        patch()


def test_the_error_says_that_a_package_is_not_installed():
    with pytest.raises(RuntimeError, match="knows nosuch 1.0, and nosuch is not installed"):
        Replaced("nosuch", "1.0", [Name("nosuch", "f", ("a",), ours)])


def test_apply_to_names_what_it_needs():
    with pytest.raises(TypeError, match="takes a causal language model of transformers, not Linear"):
        integrations.apply_to(torch.nn.Linear(2, 2))


# --- apply_to ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=67, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).train()


def of(model, **given) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**given).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("n_items", [None, 7, torch.tensor(5)], ids=["mean", "int", "tensor"])
def test_apply_to_gives_the_models_loss_and_gradients(llama, n_items):
    ids = torch.randint(3, 67, (2, 6))
    given = dict(input_ids=ids, labels=ids.masked_fill(torch.arange(6) < 2, -100))
    given |= {} if n_items is None else dict(num_items_in_batch=n_items)
    want, want_gradients = of(llama, **given)
    with integrations.apply_to(llama) as applied:
        assert "(llama): lm_head (weight (67, 16) float32, not tied, no bias, no softcap)" in str(applied)
        assert llama(**given).logits is None
        got, gradients = of(llama, **given)
        assert llama(**given, return_dict=False)[0].item() == pytest.approx(float(want), rel=1e-5)
        # without labels: the model's own forward
        assert llama(input_ids=ids, logits_to_keep=2).logits.shape == (2, 2, 67)
        other = copy.deepcopy(llama)
        assert other.forward.__self__ is other
    assert "forward" not in vars(llama)
    torch.testing.assert_close(got, want)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, want_gradients[name], rtol=1e-4, atol=1e-6)


def test_apply_to_leaves_logits_to_evaluation(llama):
    ids = torch.randint(3, 67, (1, 5))
    llama.eval()
    with integrations.apply_to(llama):
        assert llama(input_ids=ids, labels=ids).logits is not None
    with integrations.apply_to(llama, logits_in_eval=False):
        assert llama(input_ids=ids, labels=ids).logits is None
    llama.train()


def test_apply_to_refuses_what_it_does_not_know(llama):
    with integrations.apply_to(llama) as applied:
        with pytest.raises(RuntimeError, match="already"):
            integrations.apply_to(llama)
    with pytest.raises(RuntimeError, match="undone already"):
        applied.undo()

    class Other(type(llama)):
        def forward(self, input_ids):
            return input_ids

    other = copy.deepcopy(llama)
    other.__class__ = Other
    with pytest.raises(NotImplementedError, match="Other of model_type 'llama' is not known"):
        integrations.apply_to(other)
    wrapped = copy.deepcopy(llama)
    wrapped.lm_head = torch.nn.Sequential(wrapped.lm_head)
    with pytest.raises(TypeError, match="lm_head is a Sequential"):
        integrations.apply_to(wrapped)
    hooked = copy.deepcopy(llama)
    hooked.lm_head.register_forward_hook(lambda *given: None)
    with pytest.raises(RuntimeError, match="hooks"):
        integrations.apply_to(hooked)
    special = copy.deepcopy(llama)
    special.loss_function = ours
    with pytest.raises(NotImplementedError, match="ours"):
        integrations.apply_to(special)
    for model in (other, wrapped, hooked, special):
        assert "forward" not in vars(model)


def test_apply_to_raises_where_the_forward_has_another_signature(llama, monkeypatch):
    def forward(self, input_ids, labels=None):
        return None

    monkeypatch.setattr(type(llama), "forward", forward)
    with pytest.raises(RuntimeError, match=r"has no logits_to_keep, \*\*kwargs in transformers .* knows versions 5"):
        integrations.apply_to(llama)


def test_apply_to_sees_what_comes_before_and_after_it(llama):
    ids = torch.randint(3, 67, (2, 6))
    prepared = copy.deepcopy(llama)
    prepared.forward = prepared.forward
    with pytest.raises(RuntimeError, match="prepare"):
        integrations.apply_to(prepared)
    seen = copy.deepcopy(llama)
    seen.lm_head.register_full_backward_hook(lambda *given: None)
    with pytest.raises(RuntimeError, match="hooks"):
        integrations.apply_to(seen)
    later = copy.deepcopy(llama)
    applied = integrations.apply_to(later)
    later.lm_head.register_forward_hook(lambda *given: None)
    with pytest.raises(RuntimeError, match="hooks"):
        later(input_ids=ids, labels=ids)
    later.forward = later.forward
    with pytest.raises(ValueError, match="the user's own"), applied:
        raise ValueError("the user's own")


def test_undo_says_what_it_could_not_restore(package):
    replaced = Replaced("planted", "1.0 to 1.2", [Name("planted", "f", ("a", "b"), ours)])
    package.f = sys.modules["planted.user"].f = lambda a, b: "another's"
    with pytest.raises(RuntimeError, match="something else replaced it"):
        replaced.undo()
    assert package.f(1, 2) == "another's"
