"""A short list for compute-sanitizer: every regime and op, aligned and not, in allocations that end with the tensor.

    compute-sanitizer --tool memcheck  python tests/gpu/sanitizer_cases.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitizer_cases.py
    compute-sanitizer --tool initcheck python tests/gpu/sanitizer_cases.py

Exact allocations (PYTORCH_NO_CUDA_MEMORY_CACHING=1, set below) let memcheck see an access one element too far.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import torch
import torch.nn.functional as F
from cases import DTYPES, assert_contract, dtype_id, logits, softmax_by

import fused_softmax as fs

CASES = {
    "warp": (1, 33, 1000, 1024),
    "block": (1000, 4097, 8192),
    "cluster": (4096, 8193, 50257),
    "two_pass": (1000, 8191, 20001),
}


# widths of rows that are moved as one piece, of tile, block and cluster, for gradients and losses
OTHERS = (2, 19, 77, 150, 1000, 4097, 8192, 50257)
# and of gradients alone
LONG = (200019, 250001, 262144, 450001, 524288, 700001)


def others(n_cols: int, dtype: torch.dtype) -> None:
    """Gradients, losses, statistics and masks of rows of n_cols columns, each against torch in float32."""
    x, target = logits(6, n_cols, dtype=dtype, device="cuda"), torch.arange(6, device="cuda") * (n_cols - 1) // 5
    for ours, theirs in ((fs.softmax, torch.softmax), (fs.log_softmax, torch.log_softmax)):
        a, b = (t.detach().clone().requires_grad_() for t in (x, x.float()))
        dy = torch.randn(x.shape, device="cuda")
        ours(a, -1).backward(dy.to(dtype))
        theirs(b, -1).backward(dy.to(dtype).float())
        torch.testing.assert_close(a.grad.float(), b.grad, rtol=2e-2, atol=2e-2)
    for options in ({}, {"label_smoothing": 0.1}, {"reduction": "none"}):
        a, b = (t.detach().clone().requires_grad_() for t in (x, x.float()))
        fs.cross_entropy(a, target, **options).sum().backward()
        F.cross_entropy(b, target, **options).sum().backward()
        torch.testing.assert_close(a.grad.float(), b.grad, rtol=2e-2, atol=2e-2)
        fs.cross_entropy(x, target, **options)
    a, b = (t.detach().clone().requires_grad_() for t in (x, x.float()))
    logprob, entropy = fs.token_logprobs(a, target, return_entropy=True)[:2]
    (logprob.sum() + entropy.sum()).backward()
    log_p = torch.log_softmax(b, -1)
    (log_p[torch.arange(6), target].sum() - (log_p.exp() * log_p).sum()).backward()
    torch.testing.assert_close(a.grad.float(), b.grad, rtol=2e-2, atol=2e-2)
    keep = torch.rand(1, n_cols, device="cuda") > 0.3
    for mask in (None, keep, torch.zeros_like(keep, dtype=dtype)):
        a = x.view(2, 3, n_cols).clone().requires_grad_()
        fs.masked_softmax(a, mask, causal=mask is None, scale=0.5).sum().backward()
        assert a.grad.isfinite().all()


def long_rows(n_cols: int, dtype: torch.dtype) -> None:
    """Gradients of rows whose chunks are parked in shared memory, kept from walk to walk, or read late."""
    y, dy = (torch.softmax(logits(3, n_cols, dtype=dtype, device="cuda"), -1) for _ in range(2))
    for name, log in (("softmax", False), ("log_softmax", True)):
        got = getattr(torch.ops.fused_softmax, f"{name}_backward")(dy, y, -1, dtype).float().cpu()
        a, b = y.float().cpu(), dy.float().cpu()  # racecheck finds hazards in torch's own sums of such rows
        want = b - a.exp() * b.sum(-1, keepdim=True) if log else a * (b - (a * b).sum(-1, keepdim=True))
        torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-4)


def main() -> None:
    for n_cols in LONG:
        for dtype in (torch.bfloat16, torch.float32):
            long_rows(n_cols, dtype)
            print("long gradients", n_cols, dtype_id(dtype), flush=True)
    if sys.argv[1:] == ["long"]:
        return
    for n_cols in OTHERS:
        for dtype in DTYPES:
            others(n_cols, dtype)
            print("gradients, losses, masks", n_cols, dtype_id(dtype), flush=True)
    for regime, widths in CASES.items():
        for n_cols in widths:
            for dtype in DTYPES:
                for offset in (0, 1):
                    storage = logits(1, offset + 5 * n_cols, dtype=dtype, device="cuda")[0]
                    x = storage[offset:].view(5, n_cols)
                    y = torch.empty(offset + 5 * n_cols, dtype=dtype, device="cuda")[offset:].view(5, n_cols)
                    assert_contract(softmax_by(regime, x, y), x)
                    print(regime, n_cols, dtype_id(dtype), "unaligned" if offset else "aligned", flush=True)


if __name__ == "__main__":
    main()
