"""13. Cross-entropy with its gradient in one pass.

Problem
    A language model's loss reads logits of 4,096 tokens x 128,256 words, 1 GB in bfloat16. PyTorch computes
    log_softmax, keeps it, picks one number of each row, and in the backward reads and writes tensors of that size
    again.

Mechanism
    The loss of a row is lse - x_t, where lse = max + log(sum) and t is the target. Its gradient is softmax(x) -
    onehot(t), divided by the number of rows that count. Both need the same maximum and the same sum. So one program
    reads its row once, stores one number for the loss, and stores the gradient at once, in the forward. The backward
    then only scales. The target's logit is one more load of the row, which finds its sector on chip. The loss is
    computed as log(sum) - (x_t - max). The logits may be 1000, and the loss 0.01: lse - x_t would lose its digits.

Resource trade-off
    MN elements are read and MN written, as in a copy. PyTorch reads and writes several times as many. The price is the
    gradient's memory, which is held from the forward on, and work that is lost if no gradient is asked for. The
    upstream gradient is not known yet: for a mean it is one number, and a scalar can be applied later. A row has as
    little arithmetic as it must: 1 / (sum * count) is one division for the row. With two divisions for each element, a
    third reduction that finds the target's logit, and 8 elements for each of 512 threads, 47 instructions for each
    element bound an earlier version of this kernel, and not memory: `explain` counts 1.5 times the copy's time for them
    on an H200. Now 20 are left, and the kernel alone takes 1.04 times the copy's time (131,072 x 4,096, bfloat16).
    The call also counts rows and adds losses by PyTorch, in 6 kernels of O(M): with 65,536 rows a seventh of the call's
    time. The shipped loss has two kernels of its own for them.

Common failure mode
    The 1 is not subtracted at the target: every logit is then pushed down, and the loss still falls for a while. The
    other failure is the mean. Rows whose target is ignore_index (-100) have no loss and no gradient, and the divisor is
    the number of the other rows. If it is n_rows, training runs, with a learning rate that depends on the padding.

Measurement
    The shipped loss with its gradient next to PyTorch's, as fractions of the measured copy (higher is better):
    $ fused-softmax bench --op cross_entropy --systems fused_softmax,torch --widths 32000,128256
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_softmax.lab.grading.subjects import IGNORED, Subject, exact_loss, logits_and_targets
from fused_softmax.lab.traffic import Traffic
from fused_softmax.launch.compile import Launch

SYSTEM = "13_cross_entropy"
MAX_BLOCK = 2**20  # triton's limit on the elements of a block


@triton.jit
def loss_kernel(
    loss_ptr, dx_ptr, x_ptr, target_ptr, count_ptr, n_cols, BLOCK: tl.constexpr, ONE: tl.constexpr, SKIP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    target = tl.load(target_ptr + row)
    counts = target != -100
    column = tl.minimum(tl.maximum(target, 0), n_cols - 1)
    x_target = tl.load(x_ptr + row * n_cols + column).to(tl.float32)
    x = tl.load(x_ptr + row * n_cols + cols, mask=mask, other=-float("inf")).to(tl.float32)  # [BLOCK]
    row_max = tl.max(x, axis=0)
    numerator = tl.exp(x - row_max)
    row_sum = tl.sum(numerator, axis=0)
    tl.store(loss_ptr + row, tl.where(counts, tl.log(row_sum) - (x_target - row_max), 0.0))
    # what is one number for the row is divided once, and not for each element
    weight = 1.0 / tl.load(count_ptr)
    dx = numerator * (weight / row_sum)
    if ONE:
        dx = tl.where(cols == target, dx - weight, dx)
    if SKIP:
        dx = tl.where(counts, dx, 0.0)  # 0 times NaN would be NaN
    tl.store(dx_ptr + row * n_cols + cols, dx, mask=mask)


def launches(
    x: Tensor, target: Tensor, loss: Tensor, dx: Tensor, count: Tensor, one: bool = True, skip: bool = True
) -> list[Launch]:
    """One launch for contiguous x and dx (n_rows, n_cols), loss (n_rows,) and count () in float32."""
    n_rows, n_cols = x.shape
    if n_cols > MAX_BLOCK:
        raise ValueError(f"a row of {n_cols} columns does not fit one block: at most {MAX_BLOCK}")
    if not x.numel():
        return []
    block = triton.next_power_of_2(n_cols)
    meta: dict[str, Any] = {"BLOCK": block, "ONE": one, "SKIP": skip}
    meta["num_warps"] = 32 if block > 16384 else 8 if block > 4096 else 4
    return [Launch(loss_kernel, (n_rows,), (loss, dx, x, target, count, n_cols), meta)]


def launches_for(x: Tensor) -> list[Launch]:
    """The launch for rows like x: to be compiled, not to be run."""
    rows = x.new_empty(x.shape[0], dtype=torch.float32)
    return launches(x, rows.to(torch.int64), rows, torch.empty_like(x), rows)


def cross_entropy(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(mean loss (), its gradient for x (n_rows, n_cols)); target (n_rows,) int64, -100 for rows that do not count."""
    return _run(x, target)


def _run(x: Tensor, target: Tensor, all_rows: bool = False, **parts: bool) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    dx, rows = torch.empty_like(x), torch.empty(x.shape[0], device=x.device)
    count = torch.full_like(target, len(target)).sum() / len(target) if all_rows else (target != IGNORED).sum()
    count = count.to(torch.float32)
    for launch in launches(x, target, rows, dx, count, **parts):
        launch()
    return rows.sum() / count, dx


SUBJECT = Subject(
    "cross_entropy",
    # a target, its logit and the count for each row, in addition to the logits
    lambda n_rows, n_cols: Traffic(n_rows * n_cols + 3 * n_rows, n_rows * n_cols + n_rows),
    logits_and_targets,
    exact_loss,
    ("loss", "dx"),
    rtol=1e-5,
    atol=1e-6,
    timed=(65536, 4096),
)
MISTAKES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "1 is not subtracted at the target": functools.partial(_run, one=False),
    "rows that do not count have a gradient": functools.partial(_run, skip=False),
    "the mean is over all rows": functools.partial(_run, all_rows=True),
}

if __name__ == "__main__":
    from fused_softmax.lab.lessons import run

    run(13)
