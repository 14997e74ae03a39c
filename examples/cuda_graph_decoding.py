"""A decoding step in a CUDA graph: logits, log-probabilities and ranks of the sampled tokens, without host time.

    python examples/cuda_graph_decoding.py

Compile the kernels before the capture, by one eager step. Without a GPU the same step runs eagerly.
"""

import torch

from fused_softmax.integrations import compute_token_logprobs

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
BATCH, HIDDEN, VOCABULARY = 8, 64, 2003

embedding = torch.nn.Embedding(VOCABULARY, HIDDEN, device=device)
cell = torch.nn.GRUCell(HIDDEN, HIDDEN, device=device)
tokens = torch.randint(0, VOCABULARY, (BATCH,), device=device)
state = torch.zeros(BATCH, HIDDEN, device=device)
logprobs = torch.zeros(BATCH, 1, device=device)
ranks = torch.zeros(BATCH, dtype=torch.int64, device=device)


@torch.no_grad()
def step() -> None:
    """Replace tokens, state, logprobs and ranks with those of the next position."""
    state.copy_(cell(embedding(tokens), state))
    logits = state @ embedding.weight.t()
    tokens.copy_(logits.argmax(-1))
    found, rank = compute_token_logprobs(logits, tokens[:, None], return_rank=True)
    logprobs.copy_(found)
    ranks.copy_(rank)


start, beginning = tokens.clone(), state.clone()
step()  # eager: compiles what is not compiled
want = tokens.clone(), logprobs.clone()

run = step
if device == "cuda":
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    run = graph.replay

tokens.copy_(start)
state.copy_(beginning)
run()
assert torch.equal(tokens, want[0])
torch.testing.assert_close(logprobs, want[1])
assert bool((ranks == 1).all()), "the largest logit has rank 1"
for _ in range(4):
    run()
print("tokens", tokens.tolist())
print("log-probabilities", [round(x, 3) for x in logprobs[:, 0].tolist()])
