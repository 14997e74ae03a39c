"""09. A row on a cluster: the programs of a thread-block cluster hold a slice each and merge through shared memory.

Problem
    A row on chip (lessons 02 to 05) saves lesson 07's second read. But one program has at most 65,536 registers: a
    row of 65,536 float32 columns spills with any number of warps. Vocabularies are wider.

Mechanism
    From compute capability 9.0 on, up to 16 CTAs on neighboring multiprocessors form a cluster and can write to each
    other's shared memory. A launch with num_ctas=CTAS spreads the tile [CTAS, BLOCK] over them, one line for each
    CTA. Every CTA reduces its line to (line_max, line_sum) and sends both to all others with st.async. It waits until
    the mbarrier has counted all bytes. Then it merges the numbers with lesson 07's formula, in the order of the
    ranks, so all CTAs hold the same bits. Triton before 3.8 cannot reduce over the CTAs of a cluster, so
    kernels/common/cluster.py does it in inline PTX. The exchange is opened before the row is loaded, so the load
    hides the latency of the cluster's own barrier.

Resource trade-off
    The registers of 16 multiprocessors replace the second read. The price is one exchange for each row, in which
    every CTA waits for the slowest. A line is a power of two here, so 151,936 columns lie in 16 x 16,384 lanes, and
    only 10 CTAs are used. With this padding an early kernel reached 0.72 of the copy on an H200, and with even slices
    0.92 (higher is better). Beyond 16 x 32,768 columns a line no longer fits its registers, and this driver refuses.

Common failure mode
    A missing merge. Every CTA's slice then sums to 1 and looks like a softmax. The row sums to the number of CTAs
    that hold a part of it. A slice of -inf, harmless in its row, is NaN. The other failures are races: two exchanges
    through one mbarrier, or an exit before the others' bytes have arrived. No interpreter and few runs show them.

Measurement
    One read on a cluster and two by one program, at widths that fill their lines and at one that does not:
    $ fused-softmax bench --systems 07_online,09_cluster --widths 65536,128256,151936,262144
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_softmax.kernels.common.cluster import cluster_reduce_max_sum, init_cluster_barrier
from fused_softmax.kernels.common.numerics import LOWEST, exp
from fused_softmax.launch.compile import Launch
from fused_softmax.launch.device import describe, interpreting
from fused_softmax.planning.types import DEVICES, Device

SYSTEM = "09_cluster"
LINE = 8192  # columns of a CTA before more CTAs join: 32 a thread at 8 warps
MIN_LINE = 128  # a column for each thread: Triton spreads a smaller tile in two ways, and converting needs the cluster
MAX_LINE = 32768  # 64 columns a thread at 16 warps, of its 128 registers


@triton.jit
def cluster_kernel(
    y_ptr, x_ptr, n_cols, CTAS: tl.constexpr, BLOCK: tl.constexpr, MERGE: tl.constexpr, PTX: tl.constexpr
):
    init_cluster_barrier(CTAS, 2, PTX and MERGE)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, CTAS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # [CTAS, BLOCK], a line a CTA
    mask = cols < n_cols
    x = tl.load(x_ptr + row * n_cols + cols, mask=mask, other=-float("inf")).to(tl.float32)

    # floored, so that a line of -inf, or one beyond the row, adds exactly 0
    line_max = tl.maximum(tl.max(x, axis=1), LOWEST)  # [CTAS]
    numerator = exp(x - line_max[:, None])
    line_sum = tl.sum(numerator, axis=1)
    if MERGE:
        row_max, row_sum = cluster_reduce_max_sum(line_max, line_sum, CTAS, PTX)
    else:
        # the mistake, as code: a line taken for the row
        row_max, row_sum = line_max, line_sum
    scale = exp(line_max - row_max) / row_sum
    tl.store(y_ptr + row * n_cols + cols, (numerator * scale[:, None]).to(y_ptr.dtype.element_ty), mask=mask)


def device_of(x: Tensor) -> Device:
    """The GPU that x is on, or the one that stands in for it: an H200 where kernels are only compiled.

    RuntimeError where it has no clusters.
    """
    if x.is_cuda:
        device = describe(x.device)
        if not isinstance(device, Device) or not device.ptx or device.max_cluster < 2:
            name = device.name if isinstance(device, Device) else device
            raise RuntimeError(f"no thread-block clusters on this device ({name}): they need compute capability 9.0")
        return device
    return DEVICES["interpreter"] if interpreting() else DEVICES["sm_90"]


def launches(x: Tensor, y: Tensor, merge: bool = True) -> list[Launch]:
    """One launch for contiguous x, y (n_rows, n_cols); RuntimeError on a GPU without clusters.

    ValueError where the row is wider than the cluster's lines: 524,288 columns on an H200.
    """
    n_rows, n_cols = x.shape
    device = device_of(x)
    if n_cols > device.max_cluster * MAX_LINE:
        raise ValueError(f"a row of {n_cols} columns does not fit {device.max_cluster} CTAs of {MAX_LINE}")
    if not x.numel():
        return []
    ctas = min(max(2, triton.next_power_of_2(triton.cdiv(n_cols, LINE))), device.max_cluster)
    block = max(MIN_LINE, triton.next_power_of_2(triton.cdiv(n_cols, ctas)))
    num_warps = 4 if block <= 4096 else 8 if block <= LINE else 16
    meta = {"CTAS": ctas, "BLOCK": block, "MERGE": merge, "PTX": device.ptx, "num_warps": num_warps}
    if device.ptx:
        meta["num_ctas"] = ctas
    return [Launch(cluster_kernel, (n_rows,), (y, x, n_cols), meta)]


def softmax(x: Tensor) -> Tensor:
    """Softmax of the rows of x (n_rows, n_cols), float16, bfloat16 or float32; errors as launches()."""
    x = x.contiguous()
    y = torch.empty_like(x)
    for launch in launches(x, y):
        launch()
    return y


def unmerged(x: Tensor) -> Tensor:
    """Every CTA divides its slice by the slice's own sum."""
    y = torch.full_like(x, math.nan)
    for launch in launches(x, y, merge=False):
        launch()
    return y


MISTAKES: dict[str, Callable[[Tensor], Tensor]] = {"every CTA normalises by its own sum": unmerged}

if __name__ == "__main__":
    from fused_softmax.lab.lessons import run

    run(9)
