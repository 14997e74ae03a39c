"""04. Persistent: as many programs as fit on the chip, each with many rows.

Problem
    A program for each row (lessons 02 and 03) loads, waits, computes, stores, ends. While it computes it has no load
    in flight. Only other programs on the same multiprocessor hide its latency.

Mechanism
    Triton's tutorial kernel launches only as many programs as are resident at once. Each takes row i, i + programs, i
    + 2 * programs and so on. This loop can be pipelined: with num_stages the next rows are copied to shared memory
    (cp.async) while the current row is computed. The compiled kernel determines how many programs fit, see
    occupancy(): the least of the limits of registers, shared memory, warps and slots, times the number of
    multiprocessors.

Resource trade-off
    Shared memory hides latency: num_stages stages hold num_stages - 1 blocks there, in addition to the block in
    registers. The tutorial takes 4 stages if a program may have more than 200,000 bytes, otherwise 2. On an H200 (227
    KB) three blocks of 32,768 bfloat16 columns fit, 192 KB, and three blocks of 65,536 do not; in float32 16,384
    columns fit, and 32,768 do not. In the 99 KB of an RTX 5060, 4 stages fit up to 16,384 bfloat16 columns, 2 up to
    32,768, and beyond that only num_stages=1, which holds none.

Common failure mode
    A request for more than the chip has. The launch fails with OutOfResources, at a width and on a device that was
    never tested. Near the limit one program fits on a multiprocessor where lesson 02 had several, and the pipeline
    loses its purpose. The other failure is a missing loop: rows beyond the first grid are never written.

Measurement
    Next to one row per program, up to the width at which the launch fails:
    $ fused-softmax bench --systems 03_driver,04_persistent --widths 1024,4096,32768,65536
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

from fused_softmax.lab.cross_compile import MULTIPROCESSORS, Multiprocessor, Occupancy, Resources, occupancy, resources
from fused_softmax.launch.compile import Launch

SYSTEM = "04_persistent"
TARGET = "sm_90"  # what a machine without a GPU computes the occupancy of
MAX_BLOCK = 2**20  # triton's limit on the elements of a block


@triton.jit
def persistent_kernel(y_ptr, x_ptr, n_rows, n_cols, BLOCK: tl.constexpr, NUM_STAGES: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    for i in tl.range(tl.program_id(0), n_rows, tl.num_programs(0), num_stages=NUM_STAGES):
        row = tl.cast(i, tl.int64)
        x = tl.load(x_ptr + row * n_cols + cols, mask=mask, other=-float("inf")).to(tl.float32)  # [BLOCK]
        numerator = tl.exp(x - tl.max(x, axis=0))
        denominator = tl.sum(numerator, axis=0)
        tl.store(y_ptr + row * n_cols + cols, numerator / denominator, mask=mask)


@functools.cache
def multiprocessor(device: torch.device) -> Multiprocessor:
    """The multiprocessor of a GPU as its driver describes it; of an H200 where `device` is no GPU."""
    described = MULTIPROCESSORS[TARGET]
    if device.type != "cuda":
        return described
    gpu = torch.cuda.get_device_properties(device)
    driver = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return described._replace(
        count=driver["multiprocessor_count"],
        registers=driver["max_num_regs"],
        shared=gpu.shared_memory_per_multiprocessor,
        shared_per_program=driver["max_shared_mem"],
        warps=gpu.max_threads_per_multi_processor // gpu.warp_size,
        warp_size=gpu.warp_size,
    )


def settings(n_cols: int, on: Multiprocessor) -> dict[str, Any]:
    """The tutorial's constexprs and meta-parameters; ValueError above 2^20 columns."""
    if n_cols > MAX_BLOCK:
        raise ValueError(f"a row of {n_cols} columns does not fit one block: at most {MAX_BLOCK}")
    num_stages = 4 if on.shared_per_program > 200_000 else 2
    return {
        "BLOCK": triton.next_power_of_2(n_cols),
        "NUM_STAGES": num_stages,
        "num_warps": 8,
        "num_stages": num_stages,
    }


@functools.cache
def compiled(n_cols: int, dtype: torch.dtype, device: torch.device) -> Resources:
    """What the kernel for this width uses: compiled here on a GPU, cross-compiled for an H200 elsewhere."""
    if device.type != "cuda":
        from fused_softmax.lab.lessons import shown

        return shown.resources(4, [n_cols], str(dtype).removeprefix("torch."), TARGET)[0]
    with torch.cuda.device(device):
        meta = settings(n_cols, multiprocessor(device))
        return resources(persistent_kernel.warmup(dtype, dtype, 1024, n_cols, grid=(1,), **meta))


@functools.cache
def resident(n_cols: int, dtype: torch.dtype, device: torch.device) -> Occupancy:
    """How many programs of this width one multiprocessor holds, and what stops it from holding more."""
    return occupancy(compiled(n_cols, dtype, device), multiprocessor(device))


def launches(x: Tensor, y: Tensor, programs: int | None = None) -> list[Launch]:
    """One launch for contiguous x, y (n_rows, n_cols), of `programs` (None: as many as are resident, or n_rows).

    Raises triton's OutOfResources on a GPU whose shared memory does not hold the stages.
    """
    n_rows, n_cols = x.shape
    on = multiprocessor(x.device)
    meta = settings(n_cols, on)
    if not x.numel():
        return []
    if programs is None:
        programs = on.count
        if x.device.type == "cuda" or n_rows > on.count:  # up to that many rows the occupancy changes nothing
            programs *= max(1, _refuse_if_none(resident(n_cols, x.dtype, x.device), x, on).programs)
    args = (y, x, n_rows, n_cols)
    return [Launch(persistent_kernel, (min(programs, n_rows),), args, meta)]


def _refuse_if_none(fit: Occupancy, x: Tensor, on: Multiprocessor) -> Occupancy:
    # the interpreter has no shared memory to run out of
    if fit.programs == 0 and x.device.type == "cuda":
        from triton.runtime.errors import OutOfResources

        used = compiled(x.shape[1], x.dtype, x.device)
        raise OutOfResources(used.shared_bytes, on.shared_per_program, "shared memory")
    return fit


def softmax(x: Tensor) -> Tensor:
    """Softmax of the rows of x (n_rows, n_cols), float16, bfloat16 or float32; OutOfResources if too wide."""
    x = x.contiguous()
    y = torch.empty_like(x)
    for launch in launches(x, y):
        launch()
    return y


def without_loop(x: Tensor) -> Tensor:
    """A grid of one program, which does its first row and stops."""
    y = torch.full_like(x, math.nan)
    for launch in launches(x[:1], y[:1], programs=1):
        launch()
    return y


MISTAKES: dict[str, Callable[[Tensor], Tensor]] = {"one program, and no loop over rows": without_loop}

if __name__ == "__main__":
    from fused_softmax.lab.lessons import run

    run(4)
