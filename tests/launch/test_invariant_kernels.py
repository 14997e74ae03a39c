"""Within `batch_invariant()` a row alone has the kernel of its batch, whatever the address of the row and of its mask.

Another kernel has other bits: where Triton knows less of an address, it gives a thread other columns. The interpreter
has no such layouts. So these tests compare what an H200 would compile; nothing runs. A softmax over another
dimension has other kernels for other addresses, and merges columns in an order that no layout changes.
"""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from as_on_h200 import calls, field

import fused_softmax as fs

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
def launched(monkeypatch):
    return calls(monkeypatch)


def kernels_of(found, call, x, gradient=True):
    """Those of call(x) and of its gradient."""
    found.clear()
    x = x.detach().requires_grad_(gradient)
    with fs.batch_invariant():
        y = call(x)
        if gradient:
            torch.autograd.grad(y, x, torch.ones_like(y))
    assert len(found) > gradient
    return [(kernel, pointers, {k: v for k, v in meta.items() if k not in FREE}) for kernel, pointers, meta, _ in found]


@pytest.mark.parametrize("op", OF_ROWS)
def test_of_rows(launched, op):
    draw = random.Random(op)
    for _ in range(DRAWS):
        n_rows, n_cols = draw.randint(2, 5), int(2 ** draw.uniform(3, 15)) * draw.choice((1, 2, 8))
        x = field(draw, (n_rows, n_cols), draw.choice(DTYPES))
        row = draw.randrange(n_rows)
        sums = op in ("softmax", "log_softmax")  # of the others' gradients each element is its own
        whole = kernels_of(launched, OF_ROWS[op], x, sums)
        assert kernels_of(launched, OF_ROWS[op], x[row : row + 1], sums) == whole, (x.shape, x.stride(), row)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32, torch.bfloat16], ids=str)
def test_of_rows_under_a_mask(launched, mask_dtype):
    draw = random.Random(str(mask_dtype))
    for _ in range(DRAWS):
        n_cols = int(2 ** draw.uniform(3, 13)) * draw.choice((1, 2, 4, 16))
        batch, heads, queries = draw.randint(2, 3), draw.randint(1, 3), draw.randint(1, 3)
        x = field(draw, (batch, heads, queries, n_cols), draw.choice(DTYPES))
        shape = tuple(1 if draw.random() < 0.4 else n for n in (batch, heads, queries))
        mask = field(draw, (*shape, n_cols), mask_dtype)
        row = draw.randrange(batch)
        of_row = mask if shape[0] == 1 else mask[row : row + 1]
        whole = kernels_of(launched, partial(fs.masked_softmax, mask=mask), x)
        alone = kernels_of(launched, partial(fs.masked_softmax, mask=of_row), x[row : row + 1])
        assert alone == whole, (x.shape, x.stride(), mask.shape, mask.stride(), row)
