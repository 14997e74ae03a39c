"""03. Driver and heuristics: the host decides, and the kernel gets arguments.

Problem
    A kernel cannot know how its tensor lies in memory, nor how many threads fit its width. The kernel of lesson 02
    assumed contiguous rows and 4 warps for every width. A narrow slice of a wide tensor had to be copied first, and a
    wide row gave each thread more values than it has registers for.

Mechanism
    The driver (host) reads shapes and strides, chooses BLOCK and the warps, allocates the output, and launches. The
    operator (kernel) does arithmetic on the pointers that it gets. Row strides are run-time arguments. BLOCK is a
    constexpr, a part of the compiled code: one binary for each value. A launch also takes META_PARAMETERS. The
    heuristic: 4 warps, 8 if BLOCK > 2047, 16 if BLOCK > 4095.

Resource trade-off
    More warps split a row into fewer registers for each thread, and have more loads in flight. But reductions then go
    through shared memory and a barrier, and fewer programs fit on a multiprocessor. Each constexpr value is one more
    compilation. Each run-time value is one more register, and one fact less for the compiler: with a stride that is
    not a multiple of 16 it must load element by element.

Common failure mode
    The use of n_cols as the row stride. Everything is right until someone passes a slice. Row 0 is then right, and
    every later row is read from the wrong place, without an error.

Measurement
    A fixed number of 4 warps next to the heuristic:
    $ fused-softmax bench --systems 02_one_row,03_driver --widths 1024,8192,32768
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_softmax.launch.compile import Launch

SYSTEM = "03_driver"
MAX_BLOCK = 2**20  # triton's limit on the elements of a block
META_PARAMETERS = {
    "grid": "how many programs: one a row here",
    "num_warps": "warps of 32 threads (64 on AMD's Instinct) that share one program",
    "num_stages": "how many steps of a loop are in flight; this kernel has no loop",
    "num_ctas": "blocks of a thread-block cluster that share one program; above 1 from sm_90 on",
    "maxnreg": "registers a thread at most; what does not fit is spilled",
    "enable_fp_fusion": "whether a multiplication and an addition may become one fused operation",
}


@triton.jit
def strided_row_kernel(y_ptr, x_ptr, y_row_stride, x_row_stride, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * x_row_stride + cols, mask=mask, other=-float("inf")).to(tl.float32)  # [BLOCK]
    numerator = tl.exp(x - tl.max(x, axis=0))
    denominator = tl.sum(numerator, axis=0)
    tl.store(y_ptr + row * y_row_stride + cols, numerator / denominator, mask=mask)


def launch_settings(n_cols: int) -> dict[str, int]:
    """BLOCK and num_warps for a width, by the write-ups' ladder; ValueError above 2^20 columns."""
    if n_cols > MAX_BLOCK:
        raise ValueError(f"a row of {n_cols} columns does not fit one block: at most {MAX_BLOCK}")
    block = triton.next_power_of_2(n_cols)
    return {"BLOCK": block, "num_warps": 16 if block > 4095 else 8 if block > 2047 else 4}


def launches(x: Tensor, y: Tensor, **meta: Any) -> list[Launch]:
    """One launch for x, y (n_rows, n_cols) whose columns are adjacent; `meta` overrides the launch's settings."""
    n_rows, n_cols = x.shape
    if not x.numel():
        return []
    args = (y, x, y.stride(0), x.stride(0), n_cols)
    return [Launch(strided_row_kernel, (n_rows,), args, {**launch_settings(n_cols), **meta})]


def softmax(x: Tensor) -> Tensor:
    """Softmax of the rows of x (n_rows, n_cols), float16, bfloat16 or float32; slices are read where they lie."""
    if x.stride(1) != 1:
        x = x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for launch in launches(x, y):
        launch()
    return y


def stride_ignored(x: Tensor) -> Tensor:
    """Rows of x as a slice of a wider tensor, read as if that slice were contiguous."""
    n_rows, n_cols = x.shape
    wider = torch.zeros(n_rows, n_cols + 1, dtype=x.dtype, device=x.device)
    wider[:, :n_cols] = x
    y = torch.full_like(x, math.nan)
    args = (y, wider[:, :n_cols], n_cols, n_cols, n_cols)
    Launch(strided_row_kernel, (n_rows,), args, launch_settings(n_cols))()
    return y


MISTAKES: dict[str, Callable[[Tensor], Tensor]] = {"the row stride is taken for n_cols": stride_ignored}

if __name__ == "__main__":
    from fused_softmax.lab.lessons import run

    run(3)
