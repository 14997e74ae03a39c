"""apply_to on each family of transformers that it knows, and patch() under generate(): tiny models, random weights."""

from __future__ import annotations

import functools

import pytest
import torch

import fused_softmax as fs
from fused_softmax.integrations import apply_to
from fused_softmax.integrations.causal_lm import FAMILIES

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.extended, pytest.mark.interpreted]

SIZES = dict(
    vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
GPT2 = dict(
    n_embd=32, n_layer=2, n_head=4, vocab_size=97, n_positions=64, bos_token_id=1, eos_token_id=2, resid_pdrop=0.0,
    embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
# model_type -> (config, what it is told besides the sizes, what apply_to has to say)
CASES = {
    "llama": ("LlamaConfig", {}, ("not tied", "no softcap")),
    "qwen2": ("Qwen2Config", dict(tie_word_embeddings=True), ("tied to the embedding",)),
    "qwen3": ("Qwen3Config", dict(head_dim=8), ("not tied",)),
    "mistral": ("MistralConfig", {}, ("no bias",)),
    "gemma": ("GemmaConfig", dict(head_dim=8), ("tied to the embedding",)),
    "gemma2": ("Gemma2Config", dict(head_dim=8, final_logit_softcapping=0.25), ("softcap 0.25",)),
    "gemma3_text": ("Gemma3TextConfig", dict(head_dim=8, final_logit_softcapping=0.25), ("softcap 0.25",)),
    "phi": ("PhiConfig", {}, (" bias",)),
    "phi3": ("Phi3Config", {}, ("no bias",)),
    "gpt2": ("GPT2Config", GPT2, ("tied to the embedding",)),
}


@functools.cache
def model_of(family: str):
    config, options, _ = CASES[family]
    given = options if family == "gpt2" else {**SIZES, **options}
    torch.manual_seed(0)
    built = getattr(transformers, config)(**given, attn_implementation="eager")
    return getattr(transformers, FAMILIES[family])(built).train()


def gradients(model, **given) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**given).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def test_every_family_is_tried():
    assert CASES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", CASES)
def test_loss_and_gradients_are_the_models_own(family):
    model, ids = model_of(family), torch.randint(3, 97, (2, 10))
    labels = ids.masked_fill(torch.arange(10) < 3, -100)
    for extra in ({}, {"num_items_in_batch": torch.tensor(9)}):
        given = dict(input_ids=ids, labels=labels, attention_mask=torch.ones_like(ids), **extra)
        want, want_gradients = gradients(model, **given)
        with apply_to(model) as applied:
            assert all(word in str(applied) for word in CASES[family][2]), str(applied)
            assert model(**given).logits is None
            got, found = gradients(model, **given)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, want_gradients[name], rtol=2e-4, atol=2e-6, msg=f"{family} {name}")
    assert "forward" not in vars(model)


def test_a_softcap_that_is_forgotten_is_seen():
    """The comparison above fails for a wrong loss."""
    model, ids = model_of("gemma2"), torch.randint(3, 97, (2, 10))
    given = dict(input_ids=ids, labels=ids)
    want = float(model(**given).loss.detach())
    cap, model.config.final_logit_softcapping = model.config.final_logit_softcapping, None
    try:
        with apply_to(model):
            assert abs(float(model(**given).loss.detach()) - want) > 1e-3
    finally:
        model.config.final_logit_softcapping = cap


@pytest.mark.parametrize("family", CASES)
def test_generate_is_equal_with_and_without(family):
    model = model_of(family).eval()
    prompt = torch.randint(3, 97, (2, 5))
    options = dict(max_new_tokens=6, do_sample=False, output_scores=True, return_dict_in_generate=True)
    want = model.generate(prompt, **options)
    with fs.patch(), fs.stats() as counted:
        got = model.generate(prompt, **options)
    assert "softmax" in str(counted), str(counted)
    with apply_to(model):
        applied = model.generate(prompt, **options)
    model.train()
    for found in (got, applied):
        assert torch.equal(found.sequences, want.sequences)
        for score, wanted in zip(found.scores, want.scores, strict=True):
            torch.testing.assert_close(score, wanted, rtol=1e-4, atol=1e-5)


def test_checkpointed_layers_and_autocast():
    model, ids = model_of("llama"), torch.randint(3, 97, (2, 10))
    want, want_gradients = gradients(model, input_ids=ids, labels=ids)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with apply_to(model):
        got, found = gradients(model, input_ids=ids, labels=ids)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = model(input_ids=ids, labels=ids).loss
    model.gradient_checkpointing_disable()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["lm_head.weight"], want_gradients["lm_head.weight"], rtol=2e-4, atol=2e-6)
    assert rounded.dtype is torch.float32 and abs(float(rounded.detach()) - float(want)) < 5e-2


def test_a_compiled_model_takes_the_loss():
    model, ids = model_of("llama"), torch.randint(3, 97, (2, 10))
    want = float(model(input_ids=ids, labels=ids).loss.detach())
    with apply_to(model):
        loss = torch.compile(model, backend="aot_eager")(input_ids=ids, labels=ids).loss
        loss.backward()
    torch._dynamo.reset()
    assert float(loss.detach()) == pytest.approx(want, rel=1e-5)


def test_adapters_of_peft_outside_and_on_lm_head():
    peft = pytest.importorskip("peft")
    ids = torch.randint(3, 97, (2, 10))

    def adapted(modules: list[str]):
        config = model_of("llama").config
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).train()
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=modules, lora_dropout=0.0))

    model = adapted(["q_proj"])
    want = model(input_ids=ids, labels=ids).loss
    with apply_to(model):
        got = model(input_ids=ids, labels=ids)
        assert got.logits is None
        got.loss.backward()
    torch.testing.assert_close(got.loss.detach(), want.detach())
    with pytest.raises(TypeError, match="lm_head"):
        apply_to(adapted(["lm_head"]))
