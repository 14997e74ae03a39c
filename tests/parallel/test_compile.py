"""fused_softmax.parallel under torch.compile, on gloo: one graph, the same results, and NaN where ranks disagree."""

from __future__ import annotations

import pytest
import torch
from support.ranks import spawn

import fused_softmax as fs
from fused_softmax import parallel

pytestmark = pytest.mark.extended


def check(rank, ranks, device):
    made = torch.Generator().manual_seed(0)
    x, ids = 3.0 * torch.randn(6, 40, generator=made), torch.randint(0, 40, (6,), generator=made)
    ids[1] = -100
    start, stop = (0, 13, 40)[rank : rank + 2]
    where = dict(vocab_start=start, vocab_size=40)
    calls = {
        "cross_entropy": lambda x: parallel.cross_entropy(x, ids, **where),
        "smoothed": lambda x: parallel.cross_entropy(x, ids, label_smoothing=0.1, softcap=5.0, z_loss=0.1, **where),
        "logprobs": lambda x: parallel.token_logprobs(x, ids.clamp(min=0), return_entropy=True, **where)[1].sum(),
        "logsumexp": lambda x: parallel.logsumexp(x, **where).sum(),
        "softmax": lambda x: parallel.softmax(x, **where).square().sum(),
        "log_softmax": lambda x: parallel.log_softmax(x, **where).square().sum(),
        "softmax in float32": lambda x: parallel.softmax(x, dtype=torch.float32, **where).square().sum(),
    }
    for name, call in calls.items():
        for dtype in (torch.float32, torch.bfloat16):
            eager, compiled = (x[:, start:stop].to(dtype, copy=True).requires_grad_() for _ in range(2))
            want, got = call(eager), torch.compile(call, fullgraph=True, backend="aot_eager")(compiled)
            want.backward()
            got.backward()
            torch.testing.assert_close(got, want, msg=lambda m, n=name: f"{n}: {m}")
            torch.testing.assert_close(compiled.grad, eager.grad, msg=lambda m, n=name: f"{n}: {m}")
    check_linear(rank)
    local = x[:, :8]
    # the host does not wait for a compiled call's header: the device compares it
    smoothing = 0.25 * rank
    unlike = torch.compile(
        lambda x: parallel.cross_entropy(x, ids.clamp(max=15), label_smoothing=smoothing), backend="aot_eager"
    )
    assert unlike(local).isnan()
    with fs.batch_invariant(), pytest.raises(RuntimeError, match="call it outside of torch.compile"):
        torch.compile(parallel.logsumexp, backend="aot_eager")(local)


def check_linear(rank):
    """A graph break, and the same results."""
    made = torch.Generator().manual_seed(5)
    h, w = torch.randn(7, 16, generator=made), torch.randn(20, 16, generator=made)
    target = torch.randint(0, 40, (7,), generator=made)

    def call(h, w):
        return 3.0 * parallel.linear_cross_entropy(2.0 * h, w, target)

    eager, compiled = ([t.clone().requires_grad_() for t in (h, w)] for _ in range(2))
    want, got = call(*eager), torch.compile(call, backend="aot_eager")(*compiled)
    want.backward()
    got.backward()
    assert torch.equal(got, want) and all(torch.equal(a.grad, b.grad) for a, b in zip(compiled, eager, strict=True))


def test_compiled(monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    spawn(check, 2, tmp_path)
