"""What the linear losses ask of a weight: that it is a matrix of numbers, whole, of the input's dtype.

A weight that FSDP2 has sharded is gathered once, and its gradient is averaged over the ranks and scattered. Quantized
weights, and modules in place of weights, are refused: what they hold is not the matrix that makes the logits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, Parameter

from ..launch.linear import Needs, Projection, Settings
from ..launch.torch_private import is_traced
from ..planning.types import Plan
from .arguments import FLOATING, expect_floating, expect_tensors, integer, is_dtensor, other_device_error
from .route import EMPTY, Answer, PlanRequest, unsupported_reason


def expect_matrix(function: str, weight: Any) -> None:
    """TypeError, with a reason, for what is no plain matrix of floating numbers; RuntimeError for other dimensions."""
    if isinstance(weight, Module):
        raise TypeError(
            f"{function}(): linear_weight must be a Tensor, not the module {type(weight).__name__}: pass its .weight. "
            "A module that wraps another one, as LoRA's do, computes more than its weight says: merge the adapter first"
        )
    expect_tensors(function, linear_weight=weight)
    if weight.dtype not in FLOATING:
        raise TypeError(
            f"{function}(): linear_weight is {weight.dtype}, a quantized weight: its bytes are not the matrix that "
            "makes the logits; pass weight.dequantize(), or the floating weight that it was made from"
        )
    if not (type(weight) is Tensor or type(weight) is Parameter or is_dtensor(weight) or is_traced(weight)):
        raise TypeError(
            f"{function}(): linear_weight is a {type(weight).__name__}, a subclass of Tensor that may be quantized or "
            "wrapped by an adapter: only its own class knows what it multiplies by; pass a plain tensor, as "
            "weight.dequantize() or weight.merge() may give one"
        )
    if weight.dim() != 2:
        raise RuntimeError(
            f"{function}(): linear_weight must be (V, H), one row for each class, not {tuple(weight.shape)}"
        )


def settings_of(
    function: str,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    chunk_rows: Any = None,
    accumulate: Any = "float32",
    logits_dtype: Any = None,
) -> Settings:
    """How the logits are made; the errors are those of F.linear."""
    expect_floating(function, "input", input)
    if input.dim() == 0 or input.shape[-1] != weight.shape[1]:
        raise RuntimeError(
            f"{function}(): the last dimension of input {tuple(input.shape)} must be that of linear_weight "
            f"{tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise RuntimeError(f"{function}(): linear_bias must have shape ({weight.shape[0]},), not {tuple(bias.shape)}")
    autocast = _autocast_dtype(input)
    compute = input.dtype if autocast is None else autocast
    for name, t in (("linear_weight", weight), ("linear_bias", bias)):
        if t is not None and t.device != input.device:
            raise other_device_error(name, t, "input", input)
        if t is not None and t.dtype is not input.dtype and (autocast is None or t.dtype is torch.float64):
            raise RuntimeError(f"{function}(): expected {name} to have input's dtype {input.dtype}, not {t.dtype}")
    if chunk_rows is not None:
        chunk_rows = integer(function, "chunk_rows", chunk_rows)
        if chunk_rows < 1:
            raise ValueError(f"{function}(): chunk_rows must be at least 1, or None to plan it, not {chunk_rows}")
    if accumulate not in ("float32", "weight"):
        raise ValueError(f'{function}(): accumulate must be "float32" or "weight", not {accumulate!r}')
    if logits_dtype is None:
        logits_dtype = compute
    elif logits_dtype is not compute and (logits_dtype is not torch.float32 or compute is torch.float64):
        raise ValueError(
            f"{function}(): logits_dtype must be torch.float32 or the product's dtype {compute}, not {logits_dtype}"
        )
    return Settings(compute, logits_dtype, accumulate, chunk_rows)


def all_logits(x: Tensor, weight: Tensor, bias: Tensor | None, how: Settings) -> Tensor:
    """The logits of all rows, by torch."""
    x, weight, bias = x.to(how.compute), weight.to(how.compute), None if bias is None else bias.to(how.compute)
    return F.linear(x, weight, bias).to(how.logits)


def gradients_by_torch(
    dlogits: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, how: Settings, needs: Needs,
    dtypes: tuple[torch.dtype, ...] | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of input, weight and bias that are needed, for the gradient of all logits; in these dtypes, or in
    those of the tensors."""
    if dtypes is None:
        dtypes = x.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype
    wide = torch.promote_types(how.compute, torch.float32)
    with without_autocast(x.device.type):
        dlogits = dlogits.to(wide)
        found = dlogits @ weight.to(wide), dlogits.mT @ x.to(wide), dlogits.sum(0)
    return tuple(t.to(dtype) if n else None for t, n, dtype in zip(found, needs, dtypes, strict=True))


def needed_gradients(*tensors: Tensor | None) -> list[bool]:
    """Which of the tensors need a gradient. An exported program is told of all: nothing requires one while it is made,
    and what it is called with may."""
    if is_exporting():
        return [t is not None for t in tensors]
    enabled = torch.is_grad_enabled()
    return [enabled and t is not None and t.requires_grad for t in tensors]


def is_exporting() -> bool:
    """Whether torch.export traces; False where this torch does not tell."""
    return bool(getattr(torch.compiler, "is_exporting", bool)())


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Autocast off, on devices that have it: a meta tensor's has none."""
    return nullcontext() if device_type == "meta" else torch.autocast(device_type, enabled=False)


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast makes of F.linear's arguments, or None where it leaves them alone."""
    device = x.device.type
    if device == "meta" or x.dtype is torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


# --- plan_for ---------------------------------------------------------------------------------------------------------


def planned_linear(asked: PlanRequest, op: str, plan: Callable[[Tensor, Tensor], Plan | str]) -> Answer:
    """What a linear loss runs on a chunk's logits. plan(logits, on): the plan for these logits, a meta tensor."""
    weight, x = asked.linear_weight, asked.x
    if weight is None:
        raise ValueError(f'plan_for(op="{op}") needs linear_weight, which makes the logits of x')
    expect_matrix(op, weight)
    expect_tensors(op, input=x)
    how = settings_of(op, x, weight, None)
    if not x.numel() or not weight.numel():
        return EMPTY
    reason = unsupported_reason(x, how.logits)
    if reason is not None:
        return f"the logits' rows are computed by PyTorch's formulas: {reason}"
    rows = torch.empty((x.numel() // x.shape[-1], x.shape[-1]), dtype=x.dtype, device="meta")
    on_meta = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
    chunks = Projection(rows, on_meta, None, how, Needs(asked.backward, asked.backward, False)).chunks
    stride = chunks.stride if x.is_cuda else weight.shape[0]
    logits = torch.empty((chunks.rows, stride), dtype=how.logits, device="meta")[:, : weight.shape[0]]
    found = plan(logits, x)
    if isinstance(found, str):
        return found
    return replace(found, why=f"{chunks.count} chunk(s) of at most {chunks.rows} rows of logits: {found.why}")


# --- weights that are sharded over ranks ------------------------------------------------------------------------------


def gathered(t: Tensor) -> Tensor:
    """t itself; of a DTensor, the whole tensor, whose gradient is averaged over the mesh, as FSDP2's gradients are.

    Where all ranks compute the same, as tensor parallelism does, the average is what each of them has.
    """
    if not is_dtensor(t):
        return t
    placements = sys.modules["torch.distributed.tensor"].Partial
    mesh = t.device_mesh  # type: ignore[attr-defined]
    full = t.full_tensor(grad_placements=[placements()] * mesh.ndim)  # type: ignore[attr-defined]
    return _Averaged.apply(full, mesh.size())


class _Averaged(torch.autograd.Function):
    """t, whose gradient is divided by the number of ranks: not every backend can average while it reduces."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, n_ranks: int) -> Tensor:
        ctx.n_ranks = n_ranks
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g / ctx.n_ranks, None
