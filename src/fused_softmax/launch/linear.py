"""Rows of logits by a matrix product, a chunk at a time, and the gradients of what made them.

    logits = x @ weight.T + bias;  dx = dlogits @ weight;  dweight = sum(dlogits.T @ x);  dbias = sum(dlogits)

A chunk's logits lie in memory that all chunks share. On a GPU its rows start on 128 bytes, and the last columns of an
odd vocabulary have products of their own, as cuBLAS is slow with both together. The user's weight is never copied. No
loss is computed here. Nothing waits for the device, except `of_rows_that_count`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..planning.linear_losses import Chunks, early_rows, even_columns, leaves_out, may_leave_out, plan_chunks
from .layout import HALVES
from .products import add_product, biased_product, product

# float16 has too few digits below 1 for gradients that are divided by the number of targets: they are multiplied by
# this instead, and divided once they are in float32
FLOAT16_SCALE = 1024.0


class Needs(NamedTuple):
    """Which gradients are needed: of the input, the weight and the bias."""

    input: bool
    weight: bool
    bias: bool


NONE = Needs(False, False, False)


class Settings(NamedTuple):
    """How logits are made. compute: the dtype of the products' factors; logits: of the logits, float32 or `compute`.
    accumulate: the dtype of the weight's gradient while chunks are added to it, "float32" or the "weight"'s own."""

    compute: torch.dtype
    logits: torch.dtype
    accumulate: str
    chunk_rows: int | None


class Projection:
    """Rows x (n_rows, hidden), and the weight (n_cols, hidden) and bias (n_cols,) that make logits of them.

    scaled: gradients of the logits come multiplied by FLOAT16_SCALE.
    """

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings, needs: Needs = NONE, *,
        scaled: bool = False,
    ) -> None:  # fmt: skip
        even = even_columns(weight.shape[0], settings.compute.itemsize) if x.is_cuda else weight.shape[0]
        if bias is not None and even < weight.shape[0]:
            # cuBLAS rounds a 16-bit sum of a matrix and a product twice
            settings = settings._replace(logits=torch.promote_types(settings.compute, torch.float32))
        self.settings, self.needs, self.scaled = settings, needs, scaled
        self._memory: Tensor | None = None
        self._early = 0  # rows whose logits are made
        self.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        self.x, self.weight = _as_factor(x, settings.compute), _as_factor(weight, settings.compute)
        self.bias = None if bias is None else bias.to(settings.compute)
        (self.n_rows, hidden), self.n_cols = self.x.shape, self.weight.shape[0]
        # the fewer columns first: what they add to the input's gradient is rounded before the others' is added
        self.columns: tuple[slice, ...] = (slice(0, self.n_cols),)
        if even < self.n_cols:
            self.columns = slice(even, self.n_cols), slice(0, even)
        logit, factor = settings.logits.itemsize, settings.compute.itemsize
        # logits of another dtype than the factors' have a gradient with memory of its own
        self.shares = settings.logits is settings.compute
        row_bytes = self.n_cols * (logit if self.shares or not any(needs) else logit + factor)
        sums = needs.weight and self.sum_dtype(2).itemsize > 2
        spare = self.n_cols * hidden * 4 if sums and self.sum_dtype(1) is not self.sum_dtype(2) else 0
        self.chunks: Chunks = plan_chunks(self.n_rows, self.n_cols, row_bytes, logit, sums, spare, settings.chunk_rows)

    def sum_dtype(self, n_chunks: int) -> torch.dtype:
        """The dtype in which so many chunks add up the weight's gradient."""
        if self.settings.accumulate == "weight" or self.dtypes[1] not in HALVES:
            return self.dtypes[1]
        return torch.float32 if n_chunks > 1 or self.scaled else self.dtypes[1]

    def begin(self) -> None:
        """Queues the logits of the first rows, which `logits` then has: the device has work while the host waits."""
        n = min(early_rows(self.x.shape[1], self.n_cols), self.chunks.rows)
        self._memory, self._early = self._allocated(), n
        self._multiply(slice(0, n), self._memory[:n, : self.n_cols])

    def logits(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(a chunk's rows, its logits, memory for the gradient of these), one chunk after another."""
        rows, early, self._early = self.chunks.rows, self._early, 0
        memory = self._allocated() if self._memory is None else self._memory
        own = memory if self.shares or not any(self.needs) else self.x.new_empty(memory.shape)
        self._memory = None
        for start in range(0, self.n_rows, rows):
            chunk = slice(start, min(start + rows, self.n_rows))
            logits = memory[: chunk.stop - start, : self.n_cols]
            if start or early < chunk.stop:
                first = 0 if start else early
                self._multiply(slice(start + first, chunk.stop), logits[first:])
            yield chunk, logits, own[: chunk.stop - start, : self.n_cols]

    def _allocated(self) -> Tensor:
        """Memory for a chunk's logits."""
        # torch's products on a CPU read what lies between rows, and multiply it by 0: NaN stays NaN. On a GPU a bias is
        # added before the product is rounded only where rows lie one after another
        stride = self.chunks.stride if self.x.is_cuda and self.bias is None else self.n_cols
        return self.x.new_empty((self.chunks.rows, stride), dtype=self.settings.logits)

    def _multiply(self, rows: slice, logits: Tensor) -> None:
        if self.bias is None:
            for columns in self.columns:
                product(self.x[rows], self.weight[columns].t(), logits[:, columns])
        elif self.bias.dtype is logits.dtype and len(self.columns) == 1:
            biased_product(self.x[rows], self.weight.t(), logits, self.bias)
        else:
            logits.copy_(self.bias)
            for columns in self.columns:
                add_product(self.x[rows], self.weight[columns].t(), logits[:, columns])


def _as_factor(t: Tensor, dtype: torch.dtype) -> Tensor:
    """t in dtype, with strides that cuBLAS takes: one of them is 1."""
    t = t.detach().to(dtype)
    return t if 1 in t.stride() and min(t.stride()) > 0 else t.contiguous()


class Gradients:
    """The gradients of a projection's input, weight and bias, summed over its chunks; None for what needs none."""

    def __init__(self, of: Projection, weight: Tensor) -> None:
        self._of, needs, scaled = of, of.needs, of.scaled
        x_dtype, weight_dtype, bias_dtype = of.dtypes
        self._dtypes = x_dtype, weight_dtype, bias_dtype
        wide = torch.promote_types(of.settings.compute, torch.float32)
        self.input = of.x.new_empty(of.x.shape, dtype=wide if scaled else x_dtype) if needs.input else None
        dtype = of.sum_dtype(of.chunks.count)
        self.weight = torch.empty_like(weight, dtype=dtype) if needs.weight else None
        self.bias = of.x.new_zeros(of.n_cols, dtype=wide) if needs.bias else None
        # the largest sum of a row's gradients is about the number of rows; float16 ends at 65,504
        halves = scaled and dtype is torch.float16
        self.weight_alpha = 4.0 / (1 << (max(of.n_rows, 1) - 1).bit_length()) if halves else 1.0
        if of.n_rows == 0 and self.weight is not None:
            self.weight.zero_()

    def add(self, chunk: slice, dlogits: Tensor) -> None:
        of = self._of
        for i, columns in enumerate(of.columns):
            if self.input is not None:
                (add_product if i else product)(dlogits[:, columns], of.weight[columns], self.input[chunk])
            if self.weight is not None:
                sums = add_product if chunk.start else product
                sums(dlogits[:, columns].t(), of.x[chunk], self.weight[columns], self.weight_alpha)
        if self.bias is not None:
            self.bias += dlogits.sum(0, dtype=self.bias.dtype)

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients in the dtypes of what they are of; where they are scaled, as they were summed."""
        if not self._of.scaled:
            if self.weight is not None:
                self.weight = self.weight.to(self._dtypes[1])
            if self.bias is not None:
                self.bias = self.bias.to(self._dtypes[2])
        return self.input, self.weight, self.bias


# --- rows that count --------------------------------------------------------------------------------------------------


def of_rows_that_count(
    x: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings, needs: Needs, counts: Tensor, *,
    scaled: bool = False,
) -> tuple[Projection, Tensor | None]:  # fmt: skip
    """(the projection of the rows that count, these rows, rising); or (of all rows, None) where that takes hardly more.

    The host waits for the device once, to know how many rows count; not where the products are short, nor while a CUDA
    graph is captured. The first rows' logits are queued before it waits, so that the device does not.
    """
    n_rows = counts.shape[0]
    projection = Projection(x, weight, bias, settings, needs, scaled=scaled)
    if not may_leave_out(n_rows, x.shape[1], weight.shape[0]):
        return projection, None
    if not counts.is_cuda:
        n_counting = int(counts.sum())
    elif torch.cuda.is_current_stream_capturing():
        return projection, None
    else:
        answer = torch.empty((), dtype=torch.int64, pin_memory=True)
        answer.copy_(counts.sum(), non_blocking=True)
        known = torch.cuda.Event()
        known.record()
        projection.begin()
        known.synchronize()
        n_counting = int(answer)
    if not leaves_out(n_rows, n_counting):
        return projection, None
    # a stable sort does not wait for the device, and does not change the order
    rows = torch.sort((~counts).to(torch.uint8), stable=True).indices[:n_counting]
    return Projection(x[rows], weight, bias, settings, needs, scaled=scaled), rows


def put_back(part: Tensor, rows: Tensor | None, shape: Sequence[int]) -> Tensor:
    """Zeros of this shape, with `part` in these rows; `part` itself where all rows are in it."""
    return part if rows is None else part.new_zeros(shape).index_copy_(0, rows, part)
