"""A GRPO step: log-probabilities and entropies of the sampled tokens from hidden states, and the clipped loss.

    python examples/grpo_logprobs.py

`linear_token_logprobs` never holds the logits. With TRL no code is needed: `integrations.patch_trl()`.
"""

import torch

import fused_softmax as fs

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
BATCH, LENGTH, HIDDEN, VOCABULARY, TEMPERATURE, CLIP = 4, 8, 32, 503, 0.9, 0.2

trunk = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN)).to(device)
head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False, device=device)
optimizer = torch.optim.AdamW([*trunk.parameters(), *head.parameters()], lr=1e-3)

# what a rollout gives: tokens, which of them are completions, and a reward for each sequence of the group
tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), device=device)
is_completion = (torch.arange(LENGTH - 1, device=device) >= 3).expand(BATCH, -1)
rewards = torch.randn(BATCH, device=device)
advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def statistics() -> fs.TokenStatistics:
    """Log-probabilities and entropies (BATCH, LENGTH - 1) of each next token under the policy's temperature."""
    return fs.linear_token_logprobs(
        trunk(tokens[:, :-1]), head.weight, tokens[:, 1:], temperature=TEMPERATURE, return_entropy=True
    )


with torch.no_grad():
    old = statistics().logprobs
for step in range(3):
    found = statistics()
    ratio = (found.logprobs - old).exp()
    gain = torch.min(ratio * advantages[:, None], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[:, None])
    loss = -(gain * is_completion).sum() / is_completion.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    entropy = (found.entropy.detach() * is_completion).sum() / is_completion.sum()
    print(f"step {step}: loss {float(loss.detach()):+.4f}, entropy {float(entropy):.3f} nats")

# the formula, on all logits
logits = head(trunk(tokens[:, :-1])) / TEMPERATURE
want = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None])[..., 0]
torch.testing.assert_close(statistics().logprobs, want, rtol=1e-4, atol=1e-4)
