"""A torch profiler names our ops, and nothing is recorded where none is active."""

from __future__ import annotations

import pytest
import torch

import fused_softmax as fs

pytestmark = pytest.mark.interpreted
IDS = torch.zeros(3, dtype=torch.int64)
CALLS = {
    "softmax": lambda x: fs.softmax(x, -1),
    "log_softmax": lambda x: fs.log_softmax(x, -1),
    "logsumexp": lambda x: fs.logsumexp(x, -1),
    "masked_softmax": lambda x: fs.masked_softmax(x, causal=True),
    "cross_entropy": lambda x: fs.cross_entropy(x, IDS),
    "token_logprobs": lambda x: fs.token_logprobs(x, IDS),
}


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("op", list(CALLS))
def test_a_profile_names_the_op(op, needs_gradient):
    x = torch.randn(3, 5, requires_grad=needs_gradient)
    plain = CALLS[op](x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        profiled = CALLS[op](x)
    assert torch.equal(plain, profiled) and profiled.requires_grad == needs_gradient
    assert [event.count for event in profile.key_averages() if event.key == f"fused_softmax::{op}"] == [1]


@pytest.mark.parametrize("op", list(CALLS))
def test_without_a_profiler_no_range_is_opened(op, monkeypatch):
    def opened(*args):
        raise AssertionError("record_function without a profiler")

    monkeypatch.setattr(torch.profiler, "record_function", opened)
    CALLS[op](torch.randn(3, 5))
