"""Hugging Face's Trainer with our loss, in two ways.

    python examples/trainer.py

`apply_to(model)` never makes the logits. `compute_loss_func=causal_lm_loss` works for every model that returns logits.
Both divide by num_items_in_batch, so accumulated batches count each token once.
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from fused_softmax.integrations import apply_to, causal_lm_loss

config = LlamaConfig(
    vocab_size=999, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip


def data(n: int = 16) -> list[dict[str, torch.Tensor]]:
    """Sequences whose first tokens have no label: fewer in some than in others."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(n):
        ids = torch.randint(3, config.vocab_size, (12,), generator=generator)
        rows.append({"input_ids": ids, "labels": ids.masked_fill(torch.arange(12) < i % 5, -100)})
    return rows


def train(way: str) -> list[float]:
    """The loss of each step."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    if way == "apply_to":
        print(apply_to(model))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1,
            learning_rate=1e-3, report_to=[], save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        loss = causal_lm_loss if way == "compute_loss_func" else None
        trainer = Trainer(model, args, train_dataset=data(), compute_loss_func=loss)
        trainer.train()
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


losses = {way: train(way) for way in ("plain", "apply_to", "compute_loss_func")}
for way, found in losses.items():
    print(f"{way:18} {found}")
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses["plain"]), rtol=1e-3, atol=1e-3)
