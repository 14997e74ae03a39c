"""Lesson 04, the puzzle: few programs, many rows.

The grid has a fixed number of programs, which may be less than the number of rows. Program i takes rows i,
i + programs, i + 2 * programs and so on. Each row is read once and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def persistent_kernel(y_ptr, x_ptr, n_rows, n_cols, BLOCK: tl.constexpr, NUM_STAGES: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    # write: the loop over this program's rows (tl.range with num_stages=NUM_STAGES), and a row's softmax in it
    for i in tl.range(tl.program_id(0), n_rows, tl.num_programs(0), num_stages=NUM_STAGES):
        row = tl.cast(i, tl.int64)
        x = tl.load(x_ptr + row * n_cols + cols, mask=mask, other=-float("inf")).to(tl.float32)
        numerator = tl.exp(x - tl.max(x, axis=0))
        denominator = tl.sum(numerator, axis=0)
        tl.store(y_ptr + row * n_cols + cols, numerator / denominator, mask=mask)
    # end


def softmax(x: Tensor) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    n_rows, n_cols = x.shape
    programs = 2  # interpreted: fewer than most inputs have rows
    if x.is_cuda:
        programs = 4 * torch.cuda.get_device_properties(x.device).multi_processor_count
    meta = {"BLOCK": triton.next_power_of_2(n_cols), "NUM_STAGES": 2, "num_warps": 8}
    persistent_kernel[(min(programs, n_rows),)](y, x, n_rows, n_cols, **meta)
    return y
