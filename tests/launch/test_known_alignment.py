"""What a kernel is compiled to know of an address holds at the address of the call, and is not less than it could be.

The interpreter takes any address; a GPU faults where a vector access is not aligned, and reads element by element where
the compiler knows too little. So calls run as on an H200, and each pointer is compared with what its kernel is told.
"""

from __future__ import annotations

import random

import pytest
import torch
from as_on_h200 import calls, field, memory

import fused_softmax as fs
from fused_softmax.launch.masks import SHIFTED

pytestmark = pytest.mark.interpreted
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def launched(monkeypatch):
    return calls(monkeypatch)


def known(launch):
    """(kernel's name, [(address, bytes known to divide it)])."""
    kernel, pointers, _, args = launch
    declared = kernel.declaration.arguments.values()
    addresses = [value for argument, value in zip(declared, args, strict=False) if argument.type is None]
    return kernel.__name__, [(address, by) for address, (_, by) in zip(addresses, pointers, strict=True)]


def rows(draw, dtype, most=300):
    return field(draw, (draw.randint(1, 4), draw.randint(1, most)), dtype)


def other_layout(draw, dtype):
    """Rows whose columns lie apart, a dimension that is not the last, or a crop."""
    a, b = draw.randint(2, 70), draw.randint(2, 70)
    field = memory(dtype, 4 * a * b, draw.choice((0, 0, 1, 8)))
    layouts = (
        (field.view(4 * a, b).t(), -1), (field.view(2 * a, 2 * b)[:, ::2], -1), (field.view(2, 2 * a, b), 1),
        (field.view(2, a, 2 * b)[..., :b], 1), (field.view(2, 2, a, b)[:, :, 1:, 1:].transpose(1, 3), -1),
    )  # fmt: skip
    return draw.choice(layouts)


def expect_known(launched):
    assert launched
    for name, pointers in map(known, launched):
        for address, by in pointers:
            assert type(by) is int and by in (1, 2, 4, 8, 16), (name, by)
            assert address % by == 0, f"{name}: {address % 64} after a multiple of 64, said to be one of {by}"


@pytest.mark.parametrize("op", ["softmax", "log_softmax", "logsumexp", "token_logprobs", "cross_entropy"])
def test_rows(launched, op):
    draw = random.Random(op)
    for _ in range(150):
        x = rows(draw, draw.choice(DTYPES), draw.choice((40, 300, 6000))).requires_grad_()
        ids = torch.zeros(x.shape[0], dtype=torch.int64)
        launched.clear()
        y = getattr(fs, op)(x, *((ids,) if op in ("token_logprobs", "cross_entropy") else (-1,)))
        torch.autograd.grad(y, x, torch.ones_like(y))
        expect_known(launched)


def test_rows_under_masks(launched):
    draw = random.Random("masks")
    for _ in range(300):
        x = rows(draw, draw.choice(DTYPES), draw.choice((40, 300, 6000)))
        dtype, (n_rows, n_cols) = draw.choice((torch.bool, *DTYPES)), x.shape
        pad = draw.choice((0, 0, 1, 4, 16))
        field = memory(dtype, n_rows * (n_cols + pad), draw.choice((0, 0, 1, 2, 8, 16)))
        mask = field.view(n_rows, n_cols + pad)[: draw.choice((1, n_rows)), :n_cols]
        launched.clear()
        x.requires_grad_()
        y = fs.masked_softmax(x, mask, causal=draw.random() < 0.3)
        torch.autograd.grad(y, x, torch.ones_like(y))
        expect_known(launched)


@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
def test_other_layouts(launched, log):
    draw, names = random.Random(log), set()
    for _ in range(250):
        x, dim = other_layout(draw, draw.choice(DTYPES))
        launched.clear()
        (fs.log_softmax if log else fs.softmax)(x, dim)
        expect_known(launched)
        names |= {kernel.__name__ for kernel, *_ in launched}
    assert {"softmax_strided", "softmax_spatial"} <= names


def test_the_strided_kernel_knows_of_aligned_tensors(launched):
    """Without it the kernel reads one number at a time: transposed rows took 3 times as many loads."""
    x = memory(torch.float32, 128 * 64, 0).view(128, 64).t()
    fs.softmax(x, -1)
    ((name, pointers),) = map(known, launched)
    assert (name, [by for _, by in pointers]) == ("softmax_strided", [16, 16])


def test_partial_vectors_are_known(launched):
    """Rows of 6 columns of bfloat16 start at multiples of 4 bytes: the kernel knows that, and no more."""
    fs.softmax(memory(torch.bfloat16, 12, 0).view(2, 6), -1)
    assert [by for _, by in known(launched[0])[1]] == [4, 4]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["the view first", "the storage first"])
def test_a_mask_whose_storage_is_not_aligned_has_a_call_of_its_own(launched, order):
    """A view that starts 24 bytes after an aligned address is read from there on, and no such storage is."""
    view = memory(torch.float32, 64, 0)[6:38]
    alone = torch.frombuffer(bytearray(256), dtype=torch.uint8)
    start = (24 - alone.data_ptr()) % 32
    own = torch.frombuffer(alone.numpy()[start : start + 128], dtype=torch.float32)
    assert view.data_ptr() % 32 == own.data_ptr() % 32 == own.untyped_storage().data_ptr() % 32 == 24
    columns = {}
    for i in order:
        launched.clear()
        fs.masked_softmax(torch.zeros(4, 32), (view, own)[i])
        columns[i] = launched[0][2]["MASK_COLS"]
    assert columns == {0: SHIFTED, 1: 1}
