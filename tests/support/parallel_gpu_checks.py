"""Checks of fused_softmax.parallel that need GPUs: torch.compile and CUDA graphs; and all checks of a rank."""

from __future__ import annotations

import torch
from support import parallel_checks as checks

from fused_softmax import parallel

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


def check_results(even, n_rows, n_cols, dtype):
    return lambda rank, ranks, device: checks.check_all(rank, ranks, device, n_rows, n_cols, (dtype,), even)


def check_bits(shapes, *dtypes):
    return lambda rank, ranks, device: checks.check_equal_bits(rank, ranks, device, shapes, dtypes)


def check_compiled(rank, ranks, device):
    """One graph without a break, forward and backward."""
    n_cols = 512 * ranks
    x, target, _ = checks.logits(16, n_cols, torch.bfloat16, device)
    columns = slice(512 * rank, 512 * (rank + 1))
    calls = (
        lambda x: parallel.cross_entropy(x, target),
        lambda x: parallel.cross_entropy(x, target, label_smoothing=0.1, softcap=20.0),
        lambda x: parallel.token_logprobs(x, target.clamp(min=0), return_entropy=True)[0].sum(),
        lambda x: parallel.logsumexp(x).sum(),
        lambda x: parallel.softmax(x).float().square().sum(),
        lambda x: parallel.log_softmax(x, dtype=torch.float32).square().mean(),
    )
    for i, call in enumerate(calls):
        eager, compiled = (x[:, columns].clone().requires_grad_() for _ in range(2))
        want, got = call(eager), torch.compile(call, fullgraph=True)(compiled)
        want.backward()
        got.backward()
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5, msg=lambda m, i=i: f"{i}: {m}")
        torch.testing.assert_close(compiled.grad, eager.grad, rtol=1e-2, atol=1e-5, msg=lambda m, i=i: f"{i}: {m}")


def check_graph(rank, ranks, device):
    """Forward and backward, captured once and replayed on other logits."""
    x, target, _ = checks.logits(16, 512 * ranks, torch.bfloat16, device)
    columns = slice(512 * rank, 512 * (rank + 1))
    local = x[:, columns].clone().requires_grad_()

    def step():
        local.grad = None
        loss = parallel.cross_entropy(local, target)
        loss.backward()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    local.grad = None
    with torch.cuda.graph(graph):
        loss = step()
    written = local.grad
    with torch.no_grad():
        local.copy_(x[:, columns].flip(0))
    graph.replay()
    torch.cuda.synchronize()
    got = loss.clone(), written.clone()
    want = step()
    assert torch.equal(got[0], want) and torch.equal(got[1], local.grad)


PARTS = {
    "uneven shards": check_results(False, 6, 40, FLOAT32),
    "long rows": check_results(True, 64, 16384, BFLOAT16),
    "unaligned rows": check_results(False, 33, 50257, BFLOAT16),
    "bits of long rows": check_bits(((33, 4096), (8, 131072)), BFLOAT16),
    "bits of float32": check_bits(((8, 131072), (5, 72)), FLOAT32),
    "bits of unaligned rows": check_bits(((5, 72),), BFLOAT16),
    "compiled": check_compiled,
    "graph": check_graph,
}


def of_rank(rank, ranks, device, part):
    PARTS[part](rank, ranks, device)
