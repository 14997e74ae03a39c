"""12. The gradient: two reads, one sum, one write.

Problem
    Training needs dx from dy, the gradient of the result. With y = softmax(x), each y_i depends on each x_j, so the
    Jacobian has N x N elements for each row. It must never be built.

Mechanism
    dy_i/dx_j is y_i * (1 if i = j, else 0) - y_i * y_j. Summed against dy this is dx_j = y_j * (dy_j - s), where s =
    sum_i dy_i * y_i is one number for each row. The input x does not appear: the result y is enough, and that is what
    the forward saves. One program loads a row of y and a row of dy, reduces their product, and stores dx. There is no
    exponential. For log_softmax the same steps give dx_j = dy_j - exp(y_j) * sum_i dy_i.

Resource trade-off
    2MN elements are read and MN written. The ceiling is therefore an addition of two tensors, and not a copy. Two rows
    lie on chip at a time, so a width takes twice the registers of the forward. The rows that one multiprocessor can
    hold are half as many. A masked column must hold 0 in both rows, because it is a term of a sum, and no maximum is
    taken.

Common failure mode
    The sum is left out, or it is the sum of dy instead of dy * y. If dy is the same number in every column, dx is 0,
    and both mistakes show at once. A test with dy = 1 that only asks for a finite result sees neither.

Measurement
    The shipped gradient next to PyTorch's, as fractions of the measured addition (higher is better):
    $ fused-softmax bench --op softmax_backward --systems fused_softmax,torch --widths 1024,4096
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_softmax.lab import reference
from fused_softmax.lab.grading.subjects import Subject, upstream
from fused_softmax.lab.traffic import Traffic
from fused_softmax.launch.compile import Launch

SYSTEM = "12_gradient"
MAX_BLOCK = 2**20  # triton's limit on the elements of a block


@triton.jit
def gradient_kernel(dx_ptr, dy_ptr, y_ptr, n_cols, BLOCK: tl.constexpr, SUM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    y = tl.load(y_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)  # [BLOCK]
    dy = tl.load(dy_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
    if SUM == "dy * y":
        row_sum = tl.sum(dy * y, axis=0)
    elif SUM == "dy":
        # the mistakes, as code: the sum of another product, or none
        row_sum = tl.sum(dy, axis=0)
    else:
        row_sum = 0.0
    tl.store(dx_ptr + row * n_cols + cols, y * (dy - row_sum), mask=mask)


def launches(dy: Tensor, y: Tensor, dx: Tensor, row_sum: str = "dy * y") -> list[Launch]:
    """One launch for contiguous dy, y and dx (n_rows, n_cols); ValueError above 2^20 columns."""
    n_rows, n_cols = y.shape
    if n_cols > MAX_BLOCK:
        raise ValueError(f"a row of {n_cols} columns does not fit one block: at most {MAX_BLOCK}")
    if not y.numel():
        return []
    block = triton.next_power_of_2(n_cols)
    meta: dict[str, Any] = {
        "BLOCK": block,
        "SUM": row_sum,
        "num_warps": 16 if block > 4095 else 8 if block > 2047 else 4,
    }
    return [Launch(gradient_kernel, (n_rows,), (dx, dy, y, n_cols), meta)]


def launches_for(x: Tensor) -> list[Launch]:
    """The launch for rows like x: to be compiled, not to be run."""
    return launches(x, torch.empty_like(x), torch.empty_like(x))


def softmax_backward(dy: Tensor, y: Tensor) -> Tensor:
    """dx of y = softmax(x), from dy and y (n_rows, n_cols) of one dtype; ValueError above 2^20 columns."""
    dy, y = dy.contiguous(), y.contiguous()
    dx = torch.empty_like(y)
    for launch in launches(dy, y, dx):
        launch()
    return dx


def with_sum(row_sum: str, dy: Tensor, y: Tensor) -> Tensor:
    """The same kernel with another sum, or with none."""
    dx = torch.full_like(y, math.nan)
    for launch in launches(dy, y, dx, row_sum):
        launch()
    return dx


SUBJECT = Subject(
    "softmax_backward",
    lambda n_rows, n_cols: Traffic(2 * n_rows * n_cols, n_rows * n_cols),
    upstream,
    reference.softmax_backward,
    ("dx",),
    atol=3e-6,
)
MISTAKES: dict[str, Callable[..., Tensor]] = {
    "the row's sum is left out": functools.partial(with_sum, ""),
    "the sum of dy, not of dy * y": functools.partial(with_sum, "dy"),
}

if __name__ == "__main__":
    from fused_softmax.lab.lessons import run

    run(12)
