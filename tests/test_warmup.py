"""warmup: what it takes, what it refuses, and that each of its calls is a call of that op."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

import fused_softmax as fs
from fused_softmax.lab.registry import OPS

module = importlib.import_module("fused_softmax.warmup")


@pytest.mark.parametrize(
    ("shapes", "widths"),
    [
        (1000, [1000]),
        ((8, 4, 50257), [50257]),
        (torch.Size((2, 7)), [7]),
        ([1000, 4096], [1000, 4096]),
        ([(8, 50257), (4, 128256)], [50257, 128256]),
    ],
)
def test_widths_of_shapes(shapes, widths):
    assert module._widths(shapes) == widths


def test_a_config_names_its_width_and_dtype():
    given = ({"dtype": torch.float16}, {"torch_dtype": "float16"})
    for config in (SimpleNamespace(vocab_size=9, **kwargs) for kwargs in given):
        assert module._dtypes(None, config) == (torch.float16,)
    assert module._dtypes(None, SimpleNamespace(vocab_size=9)) == module.DTYPES
    assert module._dtypes(torch.float32, SimpleNamespace(vocab_size=9, dtype=torch.float16)) == (torch.float32,)


def test_errors():
    for wrong in ("1000", 1.5, None, [1.5], [True, "x"]):
        with pytest.raises(TypeError, match="warmup"):
            fs.warmup(wrong)
    with pytest.raises(ValueError, match="at least 1"):
        fs.warmup((8, 0))
    with pytest.raises(ValueError, match="softmin"):
        fs.warmup(8, ops="softmin")


def test_without_a_gpu_nothing_is_compiled():
    if not torch.cuda.is_available():
        assert fs.warmup(8) == {}


@pytest.mark.parametrize("op", list(module.CALLS))
def test_a_call_of_each_op(op):
    assert op in OPS
    x = torch.randn(3, 5)
    ids = torch.zeros(3, dtype=torch.int64)
    wanted = {
        "softmax": lambda: torch.softmax(x, -1),
        "log_softmax": lambda: torch.log_softmax(x, -1),
        "logsumexp": lambda: torch.logsumexp(x, -1),
        "masked_softmax": lambda: torch.softmax(x.masked_fill(torch.ones(3, 5).triu(1).bool(), -float("inf")), -1),
        "cross_entropy": lambda: torch.nn.functional.cross_entropy(x, ids),
        "token_logprobs": lambda: torch.log_softmax(x, -1)[:, 0],
    }
    torch.testing.assert_close(module.CALLS[op](x), wanted[op]())
