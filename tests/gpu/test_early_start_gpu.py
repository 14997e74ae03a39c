"""Kernels start before the previous one of their stream ends: their results are those of a device that is idle between.

Each op reads what the launch in front of it has just written, and its input is overwritten right after it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fused_softmax as fs

pytestmark = pytest.mark.gpu

Op = Callable[[torch.Tensor], torch.Tensor]


def gradient_of(op: Op) -> Op:
    def gradient(x: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        y = op(leaf)
        return torch.autograd.grad(y, leaf, torch.ones_like(y) * 0.5)[0]

    return gradient


def targets(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[0], device=x.device) % x.shape[1]


def along(dim: int, *shape: int) -> Op:
    """softmax over a dim of x as a tensor of this shape, one size of which is -1."""
    return lambda x: fs.softmax(x.view(shape), dim)


ROWS: dict[str, Op] = {
    "softmax": lambda x: fs.softmax(x, -1),
    "log_softmax": lambda x: fs.log_softmax(x, -1),
    "logsumexp": lambda x: fs.logsumexp(x, -1),
    "masked": lambda x: fs.masked_softmax(x, causal=True),
    "masked by a mask": lambda x: fs.masked_softmax(x, x > 0, fully_masked="zero"),
    "token_logprobs": lambda x: fs.token_logprobs(x, targets(x)),
    "losses": lambda x: fs.cross_entropy(x, targets(x), reduction="none"),
    "mean": lambda x: fs.cross_entropy(x, targets(x)),
    "sum": lambda x: fs.cross_entropy(x, targets(x), reduction="sum"),
    "strided": lambda x: fs.softmax(x.t(), -1),
    "over rows": lambda x: fs.softmax(x, 0),
}
OPS = ROWS | {f"gradient of {name}": gradient_of(op) for name, op in ROWS.items()}
# n_rows, n_cols: one program and many, one CTA and clusters, aligned rows and others
SHAPES = ((1, 300), (700, 64), (64, 4096), (130, 1001), (512, 8192), (3, 50257), (16, 151936), (2, 700000))
PLANES: dict[str, tuple[Op, int]] = {
    "tile": (along(1, 4, -1, 4096), 4 * 30 * 4096),
    "skewed tile": (along(1, 4, -1, 3001), 4 * 40 * 3001),
    "two reads": (along(0, -1, 24), 24 * 70000),
    "image loss": (
        lambda x: fs.cross_entropy(
            x.view(2, 19, 64, -1), torch.ones(2, 64, x.numel() // 2432, dtype=torch.int64, device=x.device)
        ),
        2 * 19 * 64 * 128,
    ),
}


def written_by_torch(x: torch.Tensor, to: torch.Tensor) -> None:
    torch.add(x, 0.25, out=to)


def written_by_a_copy(x: torch.Tensor, to: torch.Tensor) -> None:
    to.copy_(x)


def written_on_another_stream(x: torch.Tensor, to: torch.Tensor) -> None:
    here, other = torch.cuda.current_stream(), torch.cuda.Stream()
    other.wait_stream(here)
    with torch.cuda.stream(other):
        torch.add(x, 0.5, out=to)
    here.wait_stream(other)


WRITERS = (written_by_torch, written_by_a_copy, written_on_another_stream)


def chain(op: Op, x: torch.Tensor, idle: bool) -> list[torch.Tensor]:
    """What op gives for three inputs, each written right before and overwritten right after."""
    wait = torch.cuda.synchronize if idle else lambda: None
    to, found = torch.zeros_like(x), []
    for write in WRITERS:
        write(x, to)
        wait()
        found.append(op(to))
        wait()
        to.fill_(float("nan"))
        wait()
    return found


def expect_equal(op: Op, x: torch.Tensor) -> None:
    expected = chain(op, x, True)
    torch.cuda.synchronize()
    for _ in range(3):
        got = chain(op, x, False)
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(op, x, False)
    for _ in range(3):
        for t in captured:
            t.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_rows(name, shape):
    if "over rows" in name and shape[1] > 60000:
        pytest.skip("few rows, which the tests of planes have")
    for dtype in (torch.bfloat16, torch.float32):
        expect_equal(OPS[name], torch.randn(shape, device="cuda").to(dtype))


@pytest.mark.parametrize("name", PLANES)
def test_planes(name):
    op, size = PLANES[name]
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(size, device="cuda").to(dtype)
        expect_equal(op, x)
        expect_equal(gradient_of(op), x)


@pytest.mark.parametrize("n_cols", [64, 1000, 8192])
def test_after_a_kernel_that_lets_the_next_one_start(n_cols):
    """The kernel that writes each row's loss lets the next one start at once. That one reads the losses."""
    rows = 40_000_000 // n_cols
    x = torch.randn(rows, n_cols, device="cuda", dtype=torch.bfloat16)
    target = targets(x)
    ops: tuple[Op, ...] = (lambda t: fs.softmax(t, -1), lambda t: fs.logsumexp(t, -1), lambda t: fs.log_softmax(t, 0))
    for op in ops:
        losses = fs.cross_entropy(x, target, reduction="none")
        torch.cuda.synchronize()
        expected = op(losses)
        torch.cuda.synchronize()
        for _ in range(5):
            del losses
            losses = torch.full((rows,), float("nan"), device="cuda")  # what its memory held before
            del losses
            losses = fs.cross_entropy(x, target, reduction="none")
            assert torch.equal(op(losses), expected)
