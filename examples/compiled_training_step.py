"""A training step under torch.compile: each of our functions is one operator in the graph, and nothing breaks it.

    python examples/compiled_training_step.py

The hidden states and the loss are one graph, for every number of tokens.
"""

import os

import torch

import fused_softmax as fs

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
HIDDEN, VOCABULARY = 64, 503
# the default backend of torch.compile needs a C++ compiler on the CPU
backend = os.environ.get("BACKEND", "inductor" if device == "cuda" else "aot_eager")

embedding = torch.nn.Embedding(VOCABULARY, HIDDEN, device=device)
layer = torch.nn.Linear(HIDDEN, HIDDEN, device=device)
parameters = [*embedding.parameters(), *layer.parameters()]
optimizer = torch.optim.AdamW(parameters, lr=1e-2)


def loss_of(tokens: torch.Tensor) -> torch.Tensor:
    """The next-token loss of tokens (length,); the embedding is also the last layer."""
    hidden = torch.tanh(layer(embedding(tokens[:-1])))
    return fs.linear_cross_entropy(hidden, embedding.weight, tokens[1:])


compiled = torch.compile(loss_of, fullgraph=True, dynamic=True, backend=backend)
for length in (17, 33, 26):
    tokens = torch.randint(0, VOCABULARY, (length,), device=device)
    eager = loss_of(tokens)
    optimizer.zero_grad()
    loss = compiled(tokens)
    torch.testing.assert_close(loss, eager)
    loss.backward()
    optimizer.step()
    print(f"{length - 1} tokens: loss {float(loss.detach()):.4f}")
