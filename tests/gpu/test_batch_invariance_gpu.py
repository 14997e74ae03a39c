"""Within `batch_invariant()` a random row's bits are those that it has in its batch, wherever row and mask start."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

import fused_softmax as fs

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DRAWS = 6


def field(rng: random.Random, *shape: int) -> torch.Tensor:
    """Random numbers; they start 0 to 8 elements after an aligned address, and rows have as many after them."""
    *outer, n_cols = shape
    padded = n_cols + rng.choice((0, 0, 1, 2, 8))
    start, n = rng.choice((0, 0, 1, 2, 4, 8)), padded
    for size in outer:
        n *= size
    return torch.randn(start + n, device="cuda")[start:].view(*outer, padded)[..., :n_cols]


def as_laid(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """t in another dtype, at the same places of memory of its own."""
    start = t.storage_offset()
    memory = torch.empty(start + t.stride(0) * t.shape[0], device="cuda", dtype=dtype)
    return memory.as_strided(t.shape, t.stride(), start).copy_(t > 0 if dtype is torch.bool else t)


def expect_same_bits(call: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> None:
    """call(whole)[i] is call(row i), and so is its gradient; tensors of one item are for all of them."""
    with fs.batch_invariant():
        x = tensors[0].detach().requires_grad_()
        y = call(x, *tensors[1:])
        dy = torch.randn_like(y)
        (dx,) = torch.autograd.grad(y, x, dy)
        for i in range(x.shape[0]):
            alone = x[i : i + 1].detach().requires_grad_()
            got = call(alone, *(t[i : i + 1] if t.shape[0] > 1 else t for t in tensors[1:]))
            (gradient,) = torch.autograd.grad(got, alone, dy[i : i + 1])
            assert torch.equal(got, y[i : i + 1]), (x.shape, x.stride(), [t.stride() for t in tensors], i)
            assert torch.equal(gradient, dx[i : i + 1]), (x.shape, x.stride(), [t.stride() for t in tensors], i)


@pytest.mark.parametrize("mask_dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_scores(dtype, mask_dtype):
    rng = random.Random(f"{dtype} {mask_dtype}")
    for _ in range(DRAWS):
        n_cols = int(2 ** rng.uniform(3, 14)) * rng.choice((1, 2, 2, 4))
        batch, heads, queries = rng.randint(2, 3), rng.randint(1, 2), rng.randint(1, 2)
        shape = (batch if rng.random() < 0.7 else 1, rng.choice((1, heads)), rng.choice((1, queries)))
        x, mask = (field(rng, *dims, n_cols) for dims in ((batch, heads, queries), shape))
        expect_same_bits(fs.masked_softmax, as_laid(x, dtype), as_laid(mask, mask_dtype))


@pytest.mark.parametrize("op", [fs.softmax, fs.log_softmax, fs.logsumexp], ids=lambda op: op.__name__)
def test_rows(op):
    rng = random.Random(op.__name__)
    for _ in range(DRAWS):
        n_cols = int(2 ** rng.uniform(3, 16)) * rng.choice((1, 2, 4))
        x = field(rng, rng.randint(2, 4), n_cols)
        expect_same_bits(lambda x: op(x, -1), as_laid(x, rng.choice(DTYPES)))
