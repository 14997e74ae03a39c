"""The short logarithm of kernels over another dimension, against float64."""

import pytest
import torch
import triton
import triton.language as tl

from fused_softmax.kernels.common.numerics import SMALLEST, short_log

pytestmark = pytest.mark.interpreted

BLOCK = 1 << 16


@triton.jit
def logarithms(x_ptr, y_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y_ptr + at, short_log(tl.load(x_ptr + at)))


def of(x: torch.Tensor) -> torch.Tensor:
    padded = torch.ones(BLOCK)
    padded[: len(x)] = x
    y = torch.empty(BLOCK)
    logarithms[(1,)](padded, y, BLOCK)
    return y[: len(x)]


def test_it_is_right_to_a_rounding():
    torch.manual_seed(0)
    bits = torch.randint(0x00800000, 0x7F800000, (BLOCK,), dtype=torch.int32)  # all positive numbers
    around = torch.randint(0x3F000000, 0x40800000, (BLOCK,), dtype=torch.int32)  # from 0.5 to 4
    near = 0x3F800000 + torch.arange(-BLOCK // 2, BLOCK // 2, dtype=torch.int32)  # next to 1, where log is near 0
    for sample in (bits, around, near):
        x = sample.view(torch.float32)
        y, exact = of(x), x.double().log()
        unit = torch.nextafter(exact.float().abs(), torch.tensor(torch.inf)).double() - exact.float().abs().double()
        error = ((y.double() - exact).abs() / unit).max().item()
        assert error <= 1.1, error


def test_numbers_that_have_no_logarithm():
    smallest = float(SMALLEST.value)
    x = torch.tensor([0.0, smallest / 2, smallest, 1.0, torch.inf, torch.nan])
    y = of(x)
    assert y[0] == y[1] == -torch.inf and y[3] == 0 and y[4] == torch.inf and y[5].isnan()
    assert y[2].item() == pytest.approx(-126 * 0.6931471805599453, rel=1e-6)
