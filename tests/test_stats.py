"""stats counts every op by the path that it takes, only while it is asked for; the log has a record for each reason."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fused_softmax as fs
from fused_softmax import functional, losses
from fused_softmax.lab.registry import OPS
from fused_softmax.launch import availability
from fused_softmax.torch_ops import aten_kernels

ROOT = Path(__file__).resolve().parents[1]
X = torch.linspace(-2, 2, 24).view(3, 8)
IDS = torch.tensor([1, 2, 3])
CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "softmax": fs.softmax,
    "log_softmax": fs.log_softmax,
    "logsumexp": lambda x: fs.logsumexp(x, 1),
    "masked_softmax": fs.masked_softmax,
    "cross_entropy": lambda x: fs.cross_entropy(x, IDS),
    "token_logprobs": lambda x: fs.token_logprobs(x, IDS),
}


@pytest.mark.interpreted
@pytest.mark.parametrize("op", CALLS)
def test_a_call_is_counted_by_op_and_path(op: str):
    with fs.stats() as counted:
        CALLS[op](X)
        CALLS[op](X)
        CALLS[op](X.double())
    assert counted.calls == {(op, "warp"): 2, (op, "torch"): 1}
    assert [why for why in counted.reasons[op] if "float64" in why]
    assert op in str(counted) and "warp" in str(counted)


@pytest.mark.interpreted
def test_every_op_of_the_registry_is_counted():
    # a new op enters torch_ops from functional or losses, and stats lists the functions
    entered = {name for module in (functional, losses) for name in vars(module) if name.endswith("_of")}
    for op in OPS:
        assert f"{op.removeprefix('log_')}_of" in entered, op


@pytest.mark.interpreted
def test_patched_calls_and_modules_are_counted():
    x = X.clone().requires_grad_()
    with fs.stats() as counted, fs.patch():
        torch.softmax(x, -1).sum().backward()
        fs.nn.LogSoftmax(-1)(X)
    assert counted.calls == {
        ("softmax, patched", "warp"): 1,
        ("softmax gradient, patched", "warp"): 1,
        ("log_softmax", "warp"): 1,
    }


def test_nothing_is_counted_or_kept_afterwards():
    before = functional.softmax_of, losses.cross_entropy_of
    with fs.stats() as outer:
        with fs.stats() as inner:
            fs.softmax(X)
        fs.softmax(X)
    fs.softmax(X)
    assert sum(inner.calls.values()) == 1 and sum(outer.calls.values()) == 2
    assert before == (functional.softmax_of, losses.cross_entropy_of)
    assert aten_kernels.watch is None
    assert str(fs.stats()) == "no calls"


def test_an_error_is_raised_and_not_counted():
    with fs.stats() as counted, pytest.raises(IndexError):
        fs.softmax(X, 7)
    assert not counted.calls


def test_calls_of_other_threads_are_counted():
    with fs.stats() as counted:
        threads = [threading.Thread(target=fs.softmax, args=(X,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum(counted.calls.values()) == 4


def test_a_fallback_is_logged_once_for_each_reason(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(availability, "_noted", set())
    with caplog.at_level(logging.INFO, "fused_softmax"):
        for _ in range(3):
            fs.softmax(X.double())
    records = [r for r in caplog.records if r.name == "fused_softmax"]
    assert len(records) == 1 and "float64" in records[0].getMessage() and records[0].levelname == "INFO"


def test_a_kernel_that_is_ready_is_logged(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "fused_softmax"):
        availability.note_kernel("softmax_resident", {"num_warps": 4}, 0, 0.25)
    assert [r.getMessage() for r in caplog.records] == ["softmax_resident is ready on cuda:0 after 0.250 s"]


@pytest.mark.extended
def test_without_a_handler_nothing_is_printed():
    code = "import torch, fused_softmax; fused_softmax.softmax(torch.zeros(2, dtype=torch.float64))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT / "src")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.interpreted
def test_out_and_several_dimensions_are_counted_as_their_ops():
    x = X.view(3, 2, 4)
    with fs.stats() as counted:
        fs.log_softmax(X, -1, out=torch.empty_like(X))
        fs.logsumexp(x, (0, 1))
        fs.logsumexp(x.double(), (0, 1))
        fs.logsumexp(x, (2,))
    assert counted.calls == {
        ("log_softmax", "warp"): 1, ("logsumexp", "called"): 1, ("logsumexp", "torch"): 1, ("logsumexp", "warp"): 1
    }  # fmt: skip
