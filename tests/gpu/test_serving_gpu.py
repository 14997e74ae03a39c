"""vLLM's function on a GPU: log-probabilities and ranks from one read, and their bits without the other rows."""

from __future__ import annotations

import pytest
import torch

from fused_softmax.torch_ops.token_logprobs import token_logprobs_and_rank

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("n_cols", [100, 1000, 5003, 50257, 151936, 262144])
def test_ranks_of_the_first_ids(n_cols, dtype):
    x = (torch.randn(6 * n_cols + 1, device="cuda") * 3).to(dtype)
    for logits in (x[:-1].view(6, n_cols), x[1:].view(6, n_cols)):  # aligned, and not
        ids = torch.randint(0, n_cols, (6, 2), device="cuda")
        logits[0, ids[0, 0]] = -torch.inf
        logits[1, ::3] = logits[1].max()
        found = token_logprobs_and_rank(logits, ids)
        assert found is not None
        assert torch.equal(found[1], (logits >= logits.gather(1, ids[:, :1])).sum(1))
        expected = torch.log_softmax(logits.double(), 1).gather(1, ids).float()
        torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)
        alone = token_logprobs_and_rank(logits[3:4], ids[3:4])
        assert alone is not None
        assert all(torch.equal(one, rows[3:4]) for one, rows in zip(alone, found, strict=True))


def test_ranks_in_a_graph():
    logits = torch.randn(4, 5003, device="cuda")
    ids = torch.randint(0, 5003, (4, 1), device="cuda")
    token_logprobs_and_rank(logits, ids)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = token_logprobs_and_rank(logits, ids)
    logits.normal_()
    graph.replay()
    assert found is not None and torch.equal(found[1], (logits >= logits.gather(1, ids)).sum(1))
