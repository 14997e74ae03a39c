"""01. Naive passes: softmax as five lines of PyTorch.

Problem
    softmax(x)_i = exp(x_i - max(x)) / sum_j exp(x_j - max(x)), for each of M rows of N columns. Written line by line
    in an eager framework, each line is a kernel. Each kernel reads its operands from memory and writes its result
    back.

Mechanism
    The row's maximum is subtracted first. It cancels in the fraction, so the result is the same, and no exponent is
    above 0: [1000, 999, 998] gives [0.665, 0.245, 0.090], although exp(1000) is infinite in every format. A row with
    +inf or NaN, or with -inf alone, gives NaN.

Resource trade-off
    Nothing stays on chip, so every width works. The price is memory traffic: 5MN + 2M elements read and 3MN + 2M
    written (PASSES counts them line by line). One read and one write of each element, 2MN in all, would be enough. An
    element needs a handful of instructions, which take far less time than its bytes. So bandwidth is the limit, and
    the best speed is about a quarter of the speed of a copy.

Common failure mode
    Without the subtraction of the maximum nothing is wrong below about 88 in float32. Above it exp overflows to inf,
    and inf / inf is NaN. Far below, every exponential underflows to 0, and 0 / 0 is NaN, too.

Measurement
    Five passes and a kernel that reads once, as fractions of the device's measured copy (higher is better):
    $ fused-softmax bench --systems 01_naive,03_driver --widths 1024,4096
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_softmax.lab.reference import naive_softmax

SYSTEM = "01_naive"


@dataclass(frozen=True)
class Pass:
    """One line of naive_softmax; reads and writes are (multiples of MN, multiples of M)."""

    line: str
    reads: tuple[int, int]
    writes: tuple[int, int]


PASSES = (
    Pass("row_max = x.amax(dim=1)", reads=(1, 0), writes=(0, 1)),
    Pass("z = x - row_max[:, None]", reads=(1, 1), writes=(1, 0)),
    Pass("numerator = torch.exp(z)", reads=(1, 0), writes=(1, 0)),
    Pass("denominator = numerator.sum(dim=1)", reads=(1, 0), writes=(0, 1)),
    Pass("return numerator / denominator[:, None]", reads=(1, 1), writes=(1, 0)),
)


def softmax(x: Tensor) -> Tensor:
    """Softmax of the rows of x (n_rows, n_cols), any floating dtype, on any device; the result has x's dtype."""
    return naive_softmax(x)


def without_maximum(x: Tensor) -> Tensor:
    """Two passes fewer, and wrong as soon as one exponential leaves the format."""
    numerator = torch.exp(x)
    return numerator / numerator.sum(dim=1)[:, None]


MISTAKES: dict[str, Callable[[Tensor], Tensor]] = {"the maximum is not subtracted": without_maximum}

if __name__ == "__main__":
    from fused_softmax.lab.lessons import run

    run(1)
