"""Put our kernels into a transformers model: its loss without logits in training, its softmaxes in generation.

    python examples/patch_transformers.py

`apply_to` replaces lm_head and loss, and says what it did. `patch()` replaces PyTorch's softmax kernels: here those of
eager attention.
"""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import fused_softmax as fs
from fused_softmax.integrations import apply_to

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
config = Qwen2Config(
    vocab_size=999, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True, attn_implementation="eager", bos_token_id=1, eos_token_id=2,
    pad_token_id=0,
)  # fmt: skip
model = Qwen2ForCausalLM(config).to(device)
tokens = torch.randint(3, config.vocab_size, (2, 24), device=device)

# training: the same loss and gradients, and no logits
model.train()
plain = model(input_ids=tokens, labels=tokens)
applied = apply_to(model)
print(applied)
ours = model(input_ids=tokens, labels=tokens)
assert ours.logits is None
torch.testing.assert_close(ours.loss, plain.loss, rtol=1e-4, atol=1e-5)
ours.loss.backward()
applied.undo()
print(f"loss {float(ours.loss.detach()):.4f}, gradient norm {float(model.lm_head.weight.grad.norm()):.4f}")

# generation: the same tokens with and without patch()
model.eval()
options = dict(max_new_tokens=8, do_sample=False)
before = model.generate(tokens, **options)
with fs.patch():
    after = model.generate(tokens, **options)
assert torch.equal(before, after)
print("generated", after[0, tokens.shape[1] :].tolist())
