"""The plain passes that bound a memory-bound operation on this device: copy, read, add, write.

copy is `y.copy_(x)`; add is `torch.add(a, b, out=c)`. read and write are Triton kernels: torch.sum also pays for its
second stage, and `y.zero_()` writes 2 KB for each program: 3,090 GB/s on an H200 (2^27 bytes), where a kernel has 3,040
with 2 KB for each program and 4,050 with 4 KB. Each is timed as one more entry of the interleaved rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 8192
WRITTEN_WORDS = 1024  # of a program: 4 KB


@triton.jit
def read_kernel(x_ptr, sums_ptr, n_words, WORDS: tl.constexpr):
    """Each program reads WORDS int32 words and stores their sum."""
    program = tl.program_id(0).to(tl.int64)
    words = program * WORDS + tl.arange(0, WORDS)
    tl.store(sums_ptr + program, tl.sum(tl.load(x_ptr + words, mask=words < n_words, other=0), axis=0))


def read(x: Tensor, sums: Tensor) -> None:
    """Read all of a contiguous x whose bytes are a multiple of 4."""
    words = x.view(-1).view(torch.int32)
    read_kernel[(triton.cdiv(words.numel(), WORDS),)](words, sums, words.numel(), WORDS=WORDS, num_warps=8)


@triton.jit
def write_kernel(y_ptr, n_words, WORDS: tl.constexpr):
    """Each program writes WORDS int32 zeros."""
    words = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    tl.store(y_ptr + words, tl.zeros([WORDS], tl.int32), mask=words < n_words)


def write(y: Tensor) -> None:
    """Zero all of a contiguous y whose bytes are a multiple of 4."""
    words = y.view(-1).view(torch.int32)
    write_kernel[(triton.cdiv(words.numel(), WRITTEN_WORDS),)](words, words.numel(), WORDS=WRITTEN_WORDS, num_warps=4)


def ceiling(kind: str, like: Tensor, n_bytes: int | None = None) -> tuple[Callable[..., Any], int]:
    """A callable that takes the case's inputs and makes the plain pass of that kind over tensors of `like`'s size.

    Returns it with the bytes that it moves. Where an op moves fewer (n_bytes), as causal rows do, the pass is over the
    first elements, so that it moves as many: a short pass is slower, byte for byte, than a long one.
    """
    item, tensors = like.element_size(), {"copy": 2, "read": 1, "add": 3, "write": 1}[kind]
    count = like.numel() if n_bytes is None else min(like.numel(), -(-n_bytes // (tensors * item)))
    if not like.is_contiguous():  # the plain pass is over memory without gaps
        given = 2 if kind == "add" else 1
        dense = [torch.zeros_like(like, memory_format=torch.contiguous_format) for _ in range(given)]
        run, moved = ceiling(kind, dense[0], n_bytes)
        return lambda *inputs: run(*dense), moved
    even = count * item // 4 * 4 // item  # elements in whole words
    if kind == "read":
        sums = torch.empty(count * item // 4 // WORDS + 1, dtype=torch.int32, device=like.device)
        return lambda x, *rest: read(x.view(-1)[:even], sums), count * item
    out = torch.empty_like(like).view(-1)[:count]
    if kind == "add":

        def add(a: Tensor, b: Tensor | None = None, *rest: Any) -> Tensor:
            return torch.add(_first(a, count), _first(a if b is None else b, count), out=out)

        return add, 3 * count * item
    if kind == "write":
        return lambda *inputs: write(out[:even]), count * item
    return lambda x, *rest: out.copy_(_first(x, count)), 2 * count * item


def _first(t: Tensor, count: int) -> Tensor:
    return t.view(-1)[:count]


def measured(device: torch.device, n_bytes: int = 2**29) -> dict[str, float]:
    """GB/s of copy, read, add and write over tensors of n_bytes, interleaved, for a run's header."""
    from fused_softmax.lab.timing import EventStopwatch, interleave

    x = torch.zeros(n_bytes // 2, dtype=torch.bfloat16, device=device)
    passes = {kind: ceiling(kind, x) for kind in ("copy", "read", "add", "write")}
    other = torch.zeros_like(x)
    calls = {kind: (lambda run=run: run(x, other)) for kind, (run, _) in passes.items()}
    times = interleave(calls, EventStopwatch(device), 0.05)
    return {kind: passes[kind][1] / times[kind].ms / 1e6 for kind in passes}
