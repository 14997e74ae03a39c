"""Within `batch_invariant()` a row alone has the kernel of its batch, whatever the address of the row and of its mask.

Another kernel has other bits: where Triton knows less of an address, it gives a thread other columns. The interpreter
has no such layouts. So these tests compare what an H200 would compile; nothing runs. A softmax over another
dimension has other kernels for other addresses, and merges columns in an order that no layout changes.
"""

from __future__ import annotations

import random
import sys
from functools import partial

import pytest
import torch
from tests.support.pretended_gpu import pretend

import fused_softmax as fs
from fused_softmax.launch import compile as compiling
from fused_softmax.launch.device import device_of
from fused_softmax.planning.types import DEVICES

pytestmark = pytest.mark.interpreted
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DRAWS = 60
IDS = torch.zeros(5, dtype=torch.int64)
OF_ROWS = {
    "softmax": lambda x: fs.softmax(x, -1),
    "log_softmax": lambda x: fs.log_softmax(x, -1),
    "logsumexp": lambda x: fs.logsumexp(x, -1),
    "token_logprobs": lambda x: fs.token_logprobs(x, IDS[: len(x)]),
    "cross_entropy": lambda x: fs.cross_entropy(x, IDS[: len(x)], reduction="none"),
}
# how a mask's rows lie is said to the kernel; it decides no access and no layout
FREE = {"MASK_ROWS"}


@pytest.fixture
def compiled(monkeypatch):
    """The kernels that calls on an H200 would launch, as (kernel, pointers, meta-parameters)."""
    pretend(monkeypatch)
    found: list[tuple] = []

    def launched(*args):
        kernel, pointers, meta = args[4:7]
        found.append((kernel, pointers, {name: value for name, value in meta.items() if name not in FREE}))

    monkeypatch.setattr(compiling, "bind", lambda kept: compiling.Binding(launched, kept, ()))
    for module in [m for name, m in sys.modules.items() if name.startswith("fused_softmax.")]:
        if getattr(module, "device_of", None) is device_of:
            monkeypatch.setattr(module, "device_of", lambda tensor: DEVICES["sm_90"])
    return found


def kernels_of(found, call, x, gradient=True):
    """Those of call(x) and of its gradient."""
    found.clear()
    x = x.detach().requires_grad_(gradient)
    with fs.batch_invariant():
        y = call(x)
        if gradient:
            torch.autograd.grad(y, x, torch.ones_like(y))
    assert len(found) > gradient
    return list(found)


def field(draw, shape, dtype):
    """A tensor of this shape that starts up to 8 elements after an aligned address, its rows up to 8 elements apart."""
    pad = draw.choice((0, 0, 0, 1, 2, 4, 8))
    start = draw.choice((0, 0, 1, 2, 4, 8))
    *outer, n_cols = shape
    rows = 1
    for n in outer:
        rows *= n
    memory = torch.zeros(64 + start + rows * (n_cols + pad), dtype=dtype)
    first = (-memory.data_ptr() // memory.element_size()) % 32
    whole = memory[first + start :][: rows * (n_cols + pad)]
    return whole.view(*outer, n_cols + pad)[..., :n_cols]


@pytest.mark.parametrize("op", OF_ROWS)
def test_of_rows(compiled, op):
    draw = random.Random(op)
    for _ in range(DRAWS):
        n_rows, n_cols = draw.randint(2, 5), int(2 ** draw.uniform(3, 15)) * draw.choice((1, 2, 8))
        x = field(draw, (n_rows, n_cols), draw.choice(DTYPES))
        row = draw.randrange(n_rows)
        sums = op in ("softmax", "log_softmax")  # of the others' gradients each element is its own
        whole = kernels_of(compiled, OF_ROWS[op], x, sums)
        assert kernels_of(compiled, OF_ROWS[op], x[row : row + 1], sums) == whole, (x.shape, x.stride(), row)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32, torch.bfloat16], ids=str)
def test_of_rows_under_a_mask(compiled, mask_dtype):
    draw = random.Random(str(mask_dtype))
    for _ in range(DRAWS):
        n_cols = int(2 ** draw.uniform(3, 13)) * draw.choice((1, 2, 4, 16))
        batch, heads, queries = draw.randint(2, 3), draw.randint(1, 3), draw.randint(1, 3)
        x = field(draw, (batch, heads, queries, n_cols), draw.choice(DTYPES))
        shape = tuple(1 if draw.random() < 0.4 else n for n in (batch, heads, queries))
        mask = field(draw, (*shape, n_cols), mask_dtype)
        row = draw.randrange(batch)
        of_row = mask if shape[0] == 1 else mask[row : row + 1]
        whole = kernels_of(compiled, partial(fs.masked_softmax, mask=mask), x)
        alone = kernels_of(compiled, partial(fs.masked_softmax, mask=of_row), x[row : row + 1])
        assert alone == whole, (x.shape, x.stride(), mask.shape, mask.stride(), row)
