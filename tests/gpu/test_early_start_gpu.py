"""Kernels start before the previous one of their stream ends: their results are those of a device that is idle between.

Each op reads what the launch in front of it has just written, and its input is overwritten right after it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

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
    "masked by a value": lambda x: fs.masked_softmax(x, x[:, :1], fully_masked="zero"),
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


@triton.jit
def late_write(x_ptr, to_ptr, n, BLOCK: tl.constexpr):
    """to = x + 0.75, some 16 us after the next kernel may start."""
    tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    slept = tl.inline_asm_elementwise(
        "nanosleep.u32 500; mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1
    )
    tl.store(to_ptr + at, (slept + 0.75).to(to_ptr.dtype.element_ty), mask=at < n)


def written_late(x: torch.Tensor, to: torch.Tensor) -> None:
    late_write[(triton.cdiv(x.numel(), 4096),)](x, to, x.numel(), BLOCK=4096)


WRITERS = (written_by_torch, written_by_a_copy, written_on_another_stream, written_late)


def chain(op: Op, x: torch.Tensor, idle: bool) -> list[torch.Tensor]:
    """What op gives for four inputs, each written right before and overwritten right after."""
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


def expect_equal(run: Callable[[bool], list[torch.Tensor]]) -> None:
    """run(idle) has the bits of run(True), whose device is idle between the launches: in a stream and in a graph."""
    expected = run(True)
    torch.cuda.synchronize()
    for _ in range(5):
        got = run(False)
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(False)
    for _ in range(5):
        for t in captured:
            t.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


def expect_chains(op: Op, x: torch.Tensor) -> None:
    expect_equal(lambda idle: chain(op, x, idle))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_rows(name, shape):
    if "over rows" in name and shape[1] > 60000:
        pytest.skip("few rows, which the tests of planes have")
    for dtype in (torch.bfloat16, torch.float32):
        expect_chains(OPS[name], torch.randn(shape, device="cuda").to(dtype))


@pytest.mark.parametrize("name", PLANES)
def test_planes(name):
    op, size = PLANES[name]
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(size, device="cuda").to(dtype)
        expect_chains(op, x)
        expect_chains(gradient_of(op), x)


CHAINS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "parts": fs.token_logprobs,
    "two reads": lambda a, ids: fs.softmax(a.view(-1, 8), 0),
    "step": lambda a, ids: gradient_of(lambda x: fs.cross_entropy(x, ids))(a),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chains_of_our_own_kernels(name):
    """No kernel of another library is in between: softmax writes what the next launches read."""
    op = CHAINS[name]
    inputs = [torch.randn(4, 160_000, device="cuda", dtype=torch.bfloat16) * (1 + i) for i in range(8)]
    ids = targets(inputs[0])

    def run(idle: bool) -> list[torch.Tensor]:
        between, found = torch.empty_like(inputs[0]), []
        for i in range(64):
            fs.softmax(inputs[i % 8], -1, out=between)
            if idle:
                torch.cuda.synchronize()
            found.append(op(between, ids))
            if idle:
                torch.cuda.synchronize()
        return found

    expect_equal(run)
