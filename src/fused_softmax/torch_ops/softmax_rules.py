"""What the operators of softmax and log_softmax need next to their kernels: fake kernels, autograd, autocast and vmap.

Each function takes the operator, or its double backward's formula, and returns a rule for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..launch.layout import DTYPE_NAMES
from .library import expect_in_range, past_batch, with_batch


def forward_fake(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    expect_in_range(dim, x.dim())
    out_dtype = x.dtype if dtype is None else dtype
    if not out_dtype.is_floating_point:
        raise NotImplementedError(f"softmax is not implemented for {out_dtype}")
    return x.new_empty(x.shape, dtype=out_dtype)


def backward_fake(dy: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    expect_in_range(dim, y.dim())
    return y.new_empty(y.shape, dtype=input_dtype)


def autocast(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """float32 on CUDA, as torch; from a 16-bit input in the same pass."""
    return lambda x, dim, dtype=None: operator(
        x, dim, torch.float32 if dtype is None and x.dtype in DTYPE_NAMES else dtype
    )


def save_output(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.dim, _ = inputs
    ctx.input_dtype = x.dtype
    ctx.save_for_backward(output)


def gradient_by(operator: Callable[..., Tensor]) -> Callable[..., tuple[Tensor | None, None, None]]:
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, None, None]:
        if dy is None:
            return None, None, None
        (y,) = ctx.saved_tensors
        return operator(dy, y, ctx.dim, ctx.input_dtype), None, None

    return backward


def save_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    dy, y, ctx.dim, _ = inputs
    ctx.save_for_backward(dy, y)


def double_backward(formula: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return *formula(g, *ctx.saved_tensors, ctx.dim), None, None

    return backward


def forward_vmap(operator: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, int]]:
    def rule(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, dim: int, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, int]:
        x = x.movedim(in_dims[0], 0)
        if x.dim() == 1:
            expect_in_range(dim, 0)
            return operator(x.unsqueeze(1), 1, dtype).squeeze(1), 0
        return operator(x, past_batch(dim, x.dim() - 1), dtype), 0

    return rule


def backward_vmap(operator: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, int]]:
    def rule(
        info: Any, in_dims: tuple[Any, ...], dy: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype
    ) -> tuple[Tensor, int]:
        dy, y = with_batch(dy, in_dims[0], info.batch_size), with_batch(y, in_dims[1], info.batch_size)
        if y.dim() == 1:
            return operator(dy.unsqueeze(1), y.unsqueeze(1), 1, input_dtype).squeeze(1), 0
        return operator(dy, y, past_batch(dim, y.dim() - 1), input_dtype), 0

    return rule
