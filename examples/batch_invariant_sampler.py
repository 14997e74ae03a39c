"""A sampler whose tokens and log-probabilities do not depend on the other requests of the batch.

    python examples/batch_invariant_sampler.py

A row's bits are the same alone and in a batch, at any place. Each request brings its own random numbers, so its token
does not depend on its place either. The logits have to be batch-invariant, too; here they are given.
"""

import torch

import fused_softmax as fs

device = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = 5003  # rows of 2 bytes a column: most of them start unaligned


def sample(logits: torch.Tensor, noise: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens (B,), their log-probabilities (B,)) of logits (B, V), by Gumbel noise (B, V)."""
    with fs.batch_invariant():
        logprobs = fs.log_softmax(logits / temperature, dim=-1, dtype=torch.float32)
    tokens = (logprobs + noise).argmax(-1)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def noise_of(request: int) -> torch.Tensor:
    """Gumbel noise (V,) of a request, made from its own seed."""
    generator = torch.Generator().manual_seed(request)
    uniform = torch.rand(VOCABULARY, generator=generator).clamp_(1e-10, 1 - 1e-7)
    return -(-uniform.log()).log().to(device)


torch.manual_seed(0)
requests = torch.randn(13, VOCABULARY, device=device).to(torch.bfloat16) * 3
noise = torch.stack([noise_of(i) for i in range(len(requests))])
tokens, logprobs = sample(requests, noise, temperature=0.8)
print("tokens", tokens.tolist())

for i in range(len(requests)):
    alone, logprob = sample(requests[i : i + 1], noise[i : i + 1], temperature=0.8)
    assert torch.equal(alone, tokens[i : i + 1]) and torch.equal(logprob, logprobs[i : i + 1])
order = torch.randperm(len(requests), device=device)
shuffled, _ = sample(requests[order], noise[order], temperature=0.8)
assert torch.equal(shuffled, tokens[order])
print("equal bits alone, together and shuffled")
