"""plan_for asks for the kernel that the call launches: the same function, constexprs and known alignment.

Otherwise it shows a plan that does not run, and does not see that the kernel of the call failed to compile.
"""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from as_on_h200 import calls, field

import fused_softmax as fs
from fused_softmax.launch import compile as compiling

pytestmark = pytest.mark.interpreted
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IDS = torch.zeros(4, dtype=torch.int64)
CALLS = {
    "softmax": lambda x, mask: fs.softmax(x, -1),
    "log_softmax": lambda x, mask: fs.log_softmax(x, -1),
    "logsumexp": lambda x, mask: fs.logsumexp(x, -1),
    "token_logprobs": lambda x, mask: fs.token_logprobs(x, IDS[: len(x)]),
    "cross_entropy": lambda x, mask: fs.cross_entropy(x, IDS[: len(x)]),
    "masked_softmax": lambda x, mask: fs.masked_softmax(x, mask),
}


@pytest.mark.parametrize("op", CALLS)
def test_what_plan_for_asks_is_launched(monkeypatch, op):
    launched, draw, asked = calls(monkeypatch), random.Random(op), []
    monkeypatch.setattr(
        compiling, "compile_failure", lambda kernel, pointers, meta, *_: asked.append((kernel, pointers, meta))
    )
    for _ in range(200):
        shape = draw.randint(1, 4), int(2 ** draw.uniform(0, 13))
        x, backward = field(draw, shape, draw.choice(DTYPES)), draw.random() < 0.5
        mask = None
        if op == "masked_softmax" and draw.random() < 0.7:
            dtype = draw.choice((torch.bool, *DTYPES))
            mask = field(draw, (draw.choice((1, shape[0])), shape[1]), dtype)
        with fs.batch_invariant() if draw.random() < 0.4 else contextlib.nullcontext():
            asked.clear()
            plan = fs.plan_for(x, -1, op=op, backward=backward, mask=mask)
            assert isinstance(plan, fs.Plan)
            launched.clear()
            x = x.detach().requires_grad_(backward)
            y = CALLS[op](x, mask)
            if backward and op != "cross_entropy":  # whose forward writes the gradient
                launched.clear()
                torch.autograd.grad(y, x, torch.ones_like(y))
        kernel, pointers, meta = asked[-1]
        ran = [(k.__name__, p, m) for k, p, m, _ in launched]
        assert (kernel.__name__, pointers, dict(meta)) in ran, (shape, x.stride(), x.dtype, backward, plan)
