"""patch_trl() in the TRL that is installed: the functions that it replaces, and its SFT trainer."""

from __future__ import annotations

import importlib

import pytest
import torch

from fused_softmax.integrations import patch_trl, trl_trainers

pytest.importorskip("trl")
utils = importlib.import_module("trl.trainer.utils")
sft = importlib.import_module("trl.trainer.sft_trainer")
# 1.15 and later; 1.14 has a function of that name with other arguments
HEAD = getattr(utils, "_ChunkedLogProbFunction", None) if hasattr(utils, "add_fused_lm_head") else None
LOSS = getattr(sft, "_chunked_cross_entropy_loss", None)
pytestmark = [pytest.mark.extended, pytest.mark.interpreted]


def head_inputs(n_rows: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    tensors = torch.randn(n_rows, 16), torch.randn(50, 16), torch.randn(50)
    return *(t.requires_grad_() for t in tensors), torch.randint(0, 50, (n_rows,))


def test_names_are_replaced_and_restored():
    before = utils.selective_log_softmax, getattr(utils, "_ChunkedLogProbFunction", None), LOSS
    with patch_trl() as replaced:
        assert utils.selective_log_softmax is not before[0]
        assert "selective_log_softmax in trl.trainer.utils" in str(replaced)
        now = getattr(utils, "_ChunkedLogProbFunction", None), getattr(sft, "_chunked_cross_entropy_loss", None)
        assert now != before[1:]
    after = utils.selective_log_softmax, getattr(utils, "_ChunkedLogProbFunction", None)
    assert (*after, getattr(sft, "_chunked_cross_entropy_loss", None)) == before


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_of_logits(temperature):
    logits, index = torch.randn(3, 5, 41), torch.randint(0, 41, (3, 5))
    mask = torch.rand(3, 5) < 0.7
    for name in ("selective_log_softmax", "selective_log_softmax_and_entropy"):
        want = getattr(utils, name)(logits, index, temperature=temperature, row_mask=mask)
        with patch_trl():
            got = getattr(utils, name)(logits, index, temperature=temperature, row_mask=mask)
        torch.testing.assert_close(got, want)


@pytest.mark.skipif(HEAD is None, reason="TRL before 1.15")
@pytest.mark.parametrize(
    "outputs",
    [("log_probs",), ("log_probs", "entropy"), ("log_probs", "entropy", "is_top1"), ("log_probs", "mean_logits"),
     ("log_probs", "log_sum_sq_probs")],
    ids=lambda outputs: outputs[-1],
)  # fmt: skip
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_fused_head(outputs, softcap):
    *tensors, targets = head_inputs()

    def run(head):
        found = head.apply(*tensors, targets, 0.7, 32, softcap, 0.5, outputs)
        loss = sum(t.sum() * k for k, t in enumerate(found[:2], 1) if t is not None)
        return found, torch.autograd.grad(loss, tensors)

    want = run(HEAD)
    with patch_trl():
        got = run(utils._ChunkedLogProbFunction)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(HEAD is None, reason="TRL before 1.15")
def test_a_model_with_a_fused_head():
    """As GRPO, DPO and SFT call it, with positions and a batch without a label."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=67, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    utils.add_fused_lm_head(model, temperature=0.9, outputs=("log_probs", "entropy", "is_top1"))
    ids = torch.randint(3, 67, (2, 8))
    for labels in (ids.masked_fill(torch.arange(8) < 3, -100), torch.full_like(ids, -100)):
        want = model(input_ids=ids, labels=labels, fused_lm_head=True)
        with patch_trl():
            got = model(input_ids=ids, labels=labels, fused_lm_head=True)
        for name in ("loss", "log_probs", "entropy", "is_top1", "label_mask"):
            torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.skipif(LOSS is None, reason="TRL 1.15 and later")
@pytest.mark.parametrize("n_items", [None, 7, torch.tensor(5)])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_chunked_loss(n_items, softcap):
    _, weight, bias, _ = head_inputs()
    hidden, labels = torch.randn(2, 6, 16, requires_grad=True), torch.randint(0, 50, (2, 6))
    labels[0, :3] = -100
    for given in (labels, torch.full_like(labels, -100)):
        options = dict(labels=given, num_items_in_batch=n_items, logit_scale=0.7, lm_head_bias=bias)

        def run(options=options, softcap=softcap):
            found = sft._chunked_cross_entropy_loss(hidden, weight, 4, final_logit_softcapping=softcap, **options)
            return found, torch.autograd.grad(found[0], (hidden, weight, bias))

        want = run()
        with patch_trl():
            got = run()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def tiny(transformers):
    """(a model, a tokenizer of 64 words)."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(64))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config = transformers.LlamaConfig(
        vocab_size=67, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def sft_trainer(datasets, model, tokenizer, options):
    from trl import SFTConfig, SFTTrainer

    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(3, 67, (6 + i % 3,), generator=generator).tolist()} for i in range(8)]
    chunked = {} if LOSS is None else {"loss_type": "chunked_nll"}
    args = SFTConfig(**options, per_device_train_batch_size=2, gradient_accumulation_steps=2, **chunked)
    return SFTTrainer(model, args=args, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer)


def grpo_trainer(datasets, model, tokenizer, options):
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions, **rest):
        return [float(len(set(completion.split()))) for completion in completions]

    args = GRPOConfig(
        **options, per_device_train_batch_size=4, num_generations=4, max_completion_length=6, temperature=0.9,
        num_iterations=2,
    )  # fmt: skip
    rows = datasets.Dataset.from_list([{"prompt": "w1 w2 w3"}, {"prompt": "w4 w5"}])
    return GRPOTrainer(model, reward_funcs=reward, args=args, train_dataset=rows, processing_class=tokenizer)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (sft_trainer, ("loss", "grad_norm", "entropy", "mean_token_accuracy")),
        (grpo_trainer, ("loss", "grad_norm", "entropy")),
    ],
    ids=["SFT", "GRPO"],
)
def test_a_trainer_trains_the_same(make, names, tmp_path, monkeypatch):
    transformers, datasets = pytest.importorskip("transformers"), pytest.importorskip("datasets")
    calls = []

    def watch(name: str) -> None:
        function = getattr(trl_trainers, name)
        monkeypatch.setattr(
            trl_trainers, name, lambda *args, **given: (calls.append(name), function(*args, **given))[1]
        )

    watch("head_statistics")
    watch("token_logprobs")

    def train() -> list[dict[str, float]]:
        torch.manual_seed(0)
        options = dict(
            output_dir=str(tmp_path), max_steps=2, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
            bf16=False, use_cpu=True, learning_rate=1e-2, gradient_checkpointing=False,
        )  # fmt: skip
        trainer = make(datasets, *tiny(transformers), options)
        trainer.train()
        return [{n: float(e[n]) for n in names} for e in trainer.state.log_history if "loss" in e]

    want = train()
    assert not calls
    with patch_trl():
        got = train()
    assert len(got) == 2 and len(calls) >= 3, calls
    for step, wanted in zip(got, want, strict=True):
        assert step == pytest.approx(wanted, rel=1e-3, abs=1e-4)


@pytest.mark.skipif(HEAD is None, reason="TRL before 1.15")
def test_the_benchmark_calls_trls_head_as_it_is():
    from fused_softmax.lab.linear import systems

    hidden, weight, _, targets = head_inputs()
    got, want = (loss(hidden, weight, targets) for loss in (systems.trl(), systems.log_softmax))
    torch.testing.assert_close(got, want)
