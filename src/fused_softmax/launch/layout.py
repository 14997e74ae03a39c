"""Tensors -> rows -> Problem: how a tensor and a dimension fold into rows (n_rows, n_cols), and how these rows lie.

Everything here is a view or a number, except `rows_of`, which copies what does not fold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..planning.types import Plan, Problem
from .availability import KernelUnavailable
from .folding import alignment_of, merge_dims, stride_of_one
from .torch_private import current_device
from .torch_private import empty_strided_cuda as _empty_strided_cuda

_is_compiling = torch.compiler.is_compiling
MAX_COLS = 2**31 - 2**16  # of one row; offsets between rows have 64 bits
HALVES = (torch.float16, torch.bfloat16)
DTYPE_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


def as_rows(t: Tensor, dim: int) -> Tensor | None:
    """t as (n_rows, n_cols) with contiguous columns and one row stride, without a copy; None where it does not fold."""
    n_cols = t.shape[dim]
    if n_cols > 1 and t.stride(dim) != 1:
        return None
    dims = [(t.shape[d], t.stride(d)) for d in range(t.dim()) if d != dim]
    merged = merge_dims([d for d in dims if d[0] != 1])
    if len(merged) > 1:
        return None
    n_rows, stride = merged[0] if merged else (1, stride_of_one([s for _, s in dims], n_cols))
    return t.as_strided((n_rows, n_cols), (stride, 1))


def rows_of(x: Tensor, n_cols: int) -> Tensor:
    """x as (n_rows, n_cols) with contiguous columns: a view where its strides allow, else a copy. Differentiable.

    A single row keeps the stride of the tensor that it was taken from, so that it is planned as that tensor's rows are;
    `reshape` would forget it.
    """
    if not _is_compiling() and 1 < x.dim() and x.shape[-1] == n_cols == x.numel() and x.stride(-1) == 1:
        if x.dim() == 2:
            return x
        before = x.stride()[:-1]
        kept = before.index(stride_of_one(before, n_cols))
        return x.squeeze(tuple(d for d in range(x.dim() - 1) if d != kept))
    rows = x.reshape(-1, n_cols)
    return rows if n_cols == 1 or rows.stride(1) == 1 else rows.contiguous()


def empty(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Uninitialized memory on like's device, by the shortest way that this torch has."""
    return allocator(like)(tuple(shape), tuple(strides), dtype)


def divisor(n: int) -> tuple[int, int, int]:
    """n, and the multiplier and power of `fast_divmod` for it."""
    power = (n - 1).bit_length()
    return n, -(-(1 << 31 + power) // n), power


Allocator = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]


def allocator(x: Tensor) -> Allocator:
    """new(shape, strides, dtype): uninitialized memory on x's device, by the shortest way that this torch has.

    Shape and strides are tuples and no torch.Size, which that way refuses.
    """
    return allocator_here(x) if not x.is_cuda or current_device() == x.get_device() else _anywhere(x)


def allocator_here(x: Tensor) -> Allocator:
    """`allocator` of a tensor on the current device, or not on a GPU."""
    return _empty_strided_cuda if x.is_cuda and _empty_strided_cuda is not None else _anywhere(x)


def _anywhere(x: Tensor) -> Allocator:
    device = x.device  # what is cached must not keep x alive
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def layout_key(x: Tensor) -> tuple[Any, ...]:
    """What the launches over rows x depend on: all except their number."""
    return x.shape[1], x.stride(), x.dtype, x.data_ptr() & 31, x.get_device()


def expect_rows(*tensors: Tensor) -> None:
    """KernelUnavailable where the columns of (n_rows, n_cols) are not contiguous, or the kernels do not read the dtype.

    A gradient takes what it saved as rows, and hooks of saved tensors may give it back otherwise.
    """
    for t in tensors:
        if t.dtype not in DTYPE_NAMES or (t.shape[1] > 1 and t.stride()[1] != 1):
            raise KernelUnavailable("a tensor came back from a hook of saved tensors with other strides or dtype")


def restored(t: Tensor, dtype: torch.dtype) -> Tensor:
    """A saved vector as it was saved, contiguous and in `dtype`: a hook of saved tensors may give it back otherwise.

    Keys of prepared gradients hold neither, because a launch takes the vector's address alone.
    """
    return t if t.dtype is dtype and t.is_contiguous() else t.to(dtype).contiguous()


def places(memory: Tensor, *starts: int) -> list[Any]:
    """Pointers to where vectors start in contiguous float32 memory, at these elements."""
    if memory.is_cuda:
        address = memory.data_ptr()
        return [address + 4 * start for start in starts]
    return [memory[start:] for start in starts]


def _itself(t: Tensor) -> Tensor:
    return t


def pointer(x: Tensor) -> Callable[[Tensor], Any]:
    """What makes a launch's pointer of a tensor on x's device: its address, or in the interpreter the tensor."""
    return Tensor.data_ptr if x.is_cuda else _itself


def rows_or_copy(x: Tensor) -> Tensor:
    """`rows_of` over the last dimension, for planning: a meta tensor stands in for a copy."""
    rows = as_rows(x, x.dim() - 1)
    n_cols = x.shape[-1]
    return torch.empty((x.numel() // n_cols, n_cols), dtype=x.dtype, device="meta") if rows is None else rows


def gradient_stride(x: Tensor) -> int:
    """From one row of the gradient of rows x to the next: as in x, where that costs little.

    A vocabulary that is padded to a multiple of 64 and cut to its own width keeps its aligned rows that way.
    """
    n_cols, stride = x.shape[1], x.stride()[0]
    return stride if n_cols < stride <= 2 * n_cols else n_cols


def rows_apart(new: Allocator, n_rows: int, n_cols: int, stride: int, dtype: torch.dtype) -> Tensor:
    """Uninitialized memory for rows that start `stride` elements apart."""
    memory = new((n_rows, stride), (stride, 1), dtype)
    return memory if stride == n_cols else memory[:, :n_cols]


def gradient_buffer(x: Tensor) -> Tensor:
    """Uninitialized memory for the gradient of rows x."""
    n_rows, n_cols = x.shape
    return rows_apart(allocator(x), n_rows, n_cols, gradient_stride(x), x.dtype)


def described_gradient(x: Tensor) -> Tensor:
    """`gradient_buffer` of rows x on the meta device, for planning."""
    return torch.empty_strided(x.shape, (gradient_stride(x), 1), dtype=x.dtype, device="meta")


def problem_of(*tensors: Tensor, batch_invariant: bool = False, backward: bool = False, log: bool = False) -> Problem:
    """The Problem of row tensors (n_rows, n_cols) with contiguous columns; the last is the output.

    A single row has the stride of the tensor that it was taken from, and is planned as that tensor's rows are.
    KernelUnavailable for rows of more than MAX_COLS columns.
    """
    n_cols = tensors[0].shape[1]
    expect_countable(n_cols)
    item = min(t.element_size() for t in tensors)
    full = 16 // item
    phases, vec = set(), alignment_of(n_cols, full)
    for t in tensors:
        first = t.data_ptr() // t.element_size()
        stride = row_stride(t)
        vec = min(vec, alignment_of(first, full), alignment_of(stride, full))
        phases.add((first % full, stride % full))
    in_phase = len(phases) == 1 and not batch_invariant
    dtypes = [DTYPE_NAMES[t.dtype] for t in (tensors[0], tensors[-1])]
    one_dtype = len({t.dtype for t in tensors}) == 1
    # batch invariant: a row has the same bits whether or not there are gaps between rows
    packed = one_dtype and not batch_invariant and all(row_stride(t) == n_cols for t in tensors)
    return Problem(n_cols, dtypes[0], dtypes[1], vec, in_phase=in_phase, backward=backward, log=log, packed=packed)


def expect_countable(n_cols: int) -> None:
    """KernelUnavailable for rows of more columns than the kernels count."""
    if n_cols > MAX_COLS:
        raise KernelUnavailable(f"rows of {n_cols} columns: the kernels count a row's columns in 32 bits")


def row_stride(t: Tensor) -> int:
    """Elements from one row of (n_rows, n_cols) to the next."""
    return t.stride(0)


def run_time_arguments(plan: Plan, tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    """(n_cols, each tensor's stride, phase) in the plan's units, as every row kernel takes them after n_rows."""
    unit = 1 if plan.unaligned else plan.vec
    strides = tuple(row_stride(t) // unit for t in tensors)
    first = tensors[0].data_ptr() // tensors[0].element_size()
    return (tensors[0].shape[1] // unit, *strides, first % plan.vec if plan.unaligned else 0)


def starts(tensors: tuple[Tensor, ...], phase: int) -> tuple[Tensor, ...]:
    """Views that start `phase` elements before each tensor, at an aligned address, within its storage."""
    return tuple(t.as_strided((1,), (1,), t.storage_offset() - phase) for t in tensors) if phase else tensors
