"""10. The shipped kernel: slices, chunks and lanes, planned by width.

Problem
    Every lesson is as fast as the copy at some widths and slower at others. Narrow rows leave threads idle (02). Wide
    rows spill (02 to 05), are read twice (07), or are padded to the next power of two (09). Rows of an odd number of
    bfloat16 columns start at any address, and all lessons read them two bytes at a time.

Mechanism
    A row is cut evenly into slices, one for each CTA, and a slice into chunks of VECTORS x VEC columns. VEC columns
    are one access of 16 bytes. CHUNKS is any number, so a slice wastes less than a chunk, and only its last two
    chunks need a mask. Every lane keeps its own (max, sum) over the chunks. So no thread waits for another's loads,
    and the row needs one reduction, or one exchange, at its end. Rows that start anywhere are read in the same
    vectors from their first aligned column on. The head and the tail are shorter than a vector and are separate, one
    element for each lane. The regimes warp, block and cluster are this one kernel with other numbers
    (kernels/softmax_resident.py). Rows that no cluster can hold are read as in lesson 07
    (kernels/softmax_two_pass.py). planning/ computes the numbers from columns, dtype, alignment and device.
    It never sees the number of rows, so a row's bits do not depend on its batch.

Resource trade-off
    Bytes in flight make the speed, and registers hold them. Wide 16-bit rows stay in registers as loaded, and each
    exponential is computed twice: float32 results would take twice the registers and halve the programs on a
    multiprocessor. Registers are capped at a step of occupancy. That alone took 200,019 bfloat16 columns from 0.90 of
    the copy to 0.96 on an H200 (higher is better). Compile-time numbers cost kernels to compile. Widths share a
    kernel if chunks and masks agree, and no width is ever a constant.

Common failure mode
    Columns outside the row. Lanes beyond its end must read as -inf: a 0 there raises the maximum of a row of negative
    numbers and counts in the sum. With whole vectors only, the head and tail are never written. Vectors across the
    row's end are worse: they write into the next row, and tests of one row see nothing.

Measurement
    Next to the lessons' best at four widths, one of them odd; `fused-softmax explain` prints the plan:
    $ fused-softmax bench --systems fused_softmax,03_driver,07_online,08_many_rows --widths 256,4096,50257,151936
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fused_softmax.launch.compile import Launch
from fused_softmax.launch.device import describe, interpreting
from fused_softmax.launch.layout import problem_of
from fused_softmax.launch.softmax import softmax_launch
from fused_softmax.planning.softmax import plan
from fused_softmax.planning.types import DEVICES, Device, Plan

SYSTEM = "fused_softmax"


def device_of(x: Tensor) -> Device:
    """The GPU that x is on, or the one that stands in for it: an H200 where kernels are only compiled.

    RuntimeError, with the reason, where x's GPU has no kernels.
    """
    device = describe(x.device)
    if isinstance(device, Device):
        return device
    if x.is_cuda:
        raise RuntimeError(str(device))
    return DEVICES["interpreter"] if interpreting() else DEVICES["sm_90"]


def planned(x: Tensor, y: Tensor, device: Device | None = None) -> Plan:
    """The plan for x into y, (n_rows, n_cols) with contiguous columns, on their own device or on the one given."""
    return plan(problem_of(x, y), device or device_of(x))


def launches(x: Tensor, y: Tensor, device: Device | None = None) -> list[Launch]:
    """The shipped kernel as planned for x into y, (n_rows, n_cols) with contiguous columns, of any width."""
    if not x.numel():
        return []
    device = device or device_of(x)
    return [softmax_launch((x, y), planned(x, y, device), device=device)]


def softmax(x: Tensor) -> Tensor:
    """Softmax of the rows of x (n_rows, n_cols), float16, bfloat16 or float32, of any width."""
    x = x.contiguous()
    y = torch.empty_like(x)
    for launch in launches(x, y):
        launch()
    return y


def padded_with_zeros(x: Tensor) -> Tensor:
    """The row as its lanes hold it, those beyond its end with 0 instead of -inf."""
    how = planned(x, x)
    lanes = how.ctas * how.chunks * how.vectors_per_chunk * how.vec
    wide = x.new_zeros(x.shape[0], -(-x.shape[1] // lanes) * lanes)
    wide[:, : x.shape[1]] = x
    return softmax(wide)[:, : x.shape[1]].contiguous()


def whole_vectors_only(x: Tensor) -> Tensor:
    """16-byte accesses and nothing else: what they do not cover is neither summed nor written."""
    vec = 16 // x.element_size()
    covered = x.shape[1] // vec * vec
    y = torch.full_like(x, math.nan)
    for launch in launches(x[:, :covered], y[:, :covered]):
        launch()
    return y


MISTAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "lanes beyond the row's end read as 0": padded_with_zeros,
    "whole vectors only: no head, no tail": whole_vectors_only,
}

if __name__ == "__main__":
    from fused_softmax.lab.lessons import run

    run(10)
