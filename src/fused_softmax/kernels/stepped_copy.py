"""A copy of a tensor whose neighbors are all one step apart in memory, such as every second column.

    y[i] = x[i * step]

Neighboring threads read neighbors, so that each sector is read by one access. torch's own copy finds each element's
address by divisions: 1.3e6 float32 numbers two apart take it 4.4 us (H200).
"""

from __future__ import annotations

import triton.language as tl

from .common.arguments import AnyTensor, Count, kernel
from .common.early_start import await_previous


@kernel()
def stepped_copy(
    x_ptr: AnyTensor, y_ptr: AnyTensor,
    n: Count,
    step: Count,  # in elements
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    there = i < n - start
    await_previous(EARLY)
    x = tl.load(x_ptr + start * step + i * tl.cast(step, tl.int64), mask=there)
    tl.store(y_ptr + start + i, x, mask=there)
