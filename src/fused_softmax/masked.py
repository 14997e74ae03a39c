"""masked_softmax: attention's softmax, with the mask read where it lies.

    z = scale*x, hidden where the mask or causality says so;  y = exp(z - max(z)) / sum(exp(z - max(z)))

Adding a mask to the scores, or filling them, reads and writes all of them once more, and a causal mask takes memory.
Here a boolean or additive mask is read with its own strides, broadcast ones included, and causality costs no mask at
all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from . import loss_formulas, masked_operators, masked_rows
from .arguments import expect_flag, expect_floating, expect_tensors, real, stands_in
from .launch import DTYPE_NAMES
from .masked_rows import masked_backward as _backward
from .operators import is_compiled, is_plain

FULLY_MASKED = ("nan", "zero")
_MASK_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def masked_softmax(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    fully_masked: str = "nan",
) -> Tensor:
    """softmax(scale*x) over the last dimension, of what the mask and causality leave.

    Args:
        x: (..., Q, K), or (K,); float16, bfloat16 and float32 are ours on a GPU, all else is torch's. Any K.
        mask: broadcasts to x's shape and is not expanded in memory. bool: True keeps a column, as in
            `torch.nn.functional.scaled_dot_product_attention`. Floating: added to scale*x; its gradient is the
            columns' own, summed to its shape.
        scale: a number by which x is multiplied first; unless it is a positive normal number of float32, the call is
            torch's.
        causal: query q sees columns 0 to q, also where Q and K differ (aligned at the top left, as torch's is_causal).
        fully_masked: what a row becomes that sees nothing: "nan", as softmax of -inf is, or "zero", with gradients
            zero.

    Returns: a contiguous tensor of x's shape and dtype. Hidden columns are 0. The gradient of what a boolean mask or
    causality hides is 0 in every row, also in a row of NaN. A row that an additive mask of -inf hides has a gradient of
    NaN, as that of softmax(x + mask) is, unless fully_masked is "zero".

    Raises: ValueError for another fully_masked, for a mask that does not broadcast, or causal of one dimension;
    TypeError for a mask of integers and for arguments of other types; NotImplementedError, as softmax, for x that is
    not floating; RuntimeError, torch's own, for a mask on another device.

    >>> masked_softmax(torch.zeros(2, 2), causal=True)
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """
    if not (isinstance(x, Tensor) and (mask is None or isinstance(mask, Tensor))):
        if stands_in(x, mask):
            return handle_torch_function(
                masked_softmax, (x, mask), x, mask, scale=scale, causal=causal, fully_masked=fully_masked
            )
        expect_tensors("masked_softmax", x=x)
        expect_tensors("masked_softmax", mask=mask)
    if x.dtype not in DTYPE_NAMES:
        expect_floating("masked_softmax", "x", x)
    if type(scale) is not float:
        scale = real("masked_softmax", "scale", scale)
    if type(causal) is not bool:
        expect_flag("masked_softmax", "causal", causal)
    if fully_masked not in FULLY_MASKED:
        raise ValueError(f"fully_masked must be one of {FULLY_MASKED}, not {fully_masked!r}")
    if causal and x.dim() < 2:
        raise ValueError("causal needs queries and columns: x of two dimensions at least")
    if mask is not None:
        if mask.dtype is not torch.bool and not mask.is_floating_point():
            raise TypeError(f"mask must be bool or floating, not {mask.dtype}; mask.bool() keeps what is not 0")
        if mask.dim() > x.dim() or any(m not in (1, n) for m, n in zip(mask.shape[::-1], x.shape[::-1], strict=False)):
            raise ValueError(f"mask {tuple(mask.shape)} does not broadcast to {tuple(x.shape)}")
    zero = fully_masked == "zero"
    ours = masked_rows.scales_by(scale)
    if mask is not None:
        ours = ours and mask.device == x.device and (mask.dtype is torch.bool or mask.dtype in _MASK_DTYPES)
    if ours and is_plain(x) and (mask is None or is_plain(mask)) and masked_rows.takes(x):
        return MaskedSoftmax.apply(x, mask, float(scale), causal, zero)
    if ours and x.dim() and is_compiled(x, mask):
        return masked_operators.masked_softmax(x, mask, float(scale), causal, zero)
    return loss_formulas.masked_softmax(x, mask, scale, causal, zero)


class MaskedSoftmax(torch.autograd.Function):
    """Keeps the output, and a boolean mask, which is the caller's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor | None, scale: float, causal: bool, zero: bool) -> Tensor:
        y = masked_rows.masked_forward(x, mask, scale, causal, zero)
        masked_operators.remember(ctx, y, mask, scale, causal)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> masked_operators.Gradients:
        plain = dy is not None and is_plain(dy)
        return masked_operators.gradients(ctx, dy, _backward if plain else loss_formulas.masked_softmax_gradient)
