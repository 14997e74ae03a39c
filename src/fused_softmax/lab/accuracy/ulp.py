"""Errors in units in the last place (ULP): the distance between neighboring numbers of a dtype.

A correctly rounded result is at most 0.5 ULP from the exact one.
"""

from __future__ import annotations

import torch
from torch import Tensor

# of a float64, viewed as an integer
_EXPONENT_BITS = 0x7FF0000000000000
FLOAT32_TINY = torch.finfo(torch.float32).smallest_normal


def ulp(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance from `magnitude` (float64) to the next number of `dtype`; constant below the smallest normal one."""
    info = torch.finfo(dtype)
    return _power_of_two(magnitude.abs().clamp(info.smallest_normal, info.max)) * info.eps


def errors(got: Tensor, ref: Tensor, at_least: Tensor | float = 0.0, unit_at_least: float = 0.0) -> Tensor:
    """|got - ref| of each element in ULP of got's dtype at `ref` (float64), or at `at_least` where that is larger.

    No unit is smaller than `unit_at_least`. The error is infinite where only one of the two is NaN, and where an
    infinity is not what rounding gives: an overflow counts as the first number that the dtype does not have.
    """
    info = torch.finfo(got.dtype)
    beyond = 2.0 * float(_power_of_two(torch.tensor(info.max, dtype=torch.float64)))
    given, wanted = got.double(), ref.clamp(-beyond, beyond)
    # the last number before an overflow, and all after it
    overflows = (given == torch.inf) & (wanted >= info.max) | (given == -torch.inf) & (wanted <= -info.max)
    given = torch.where(overflows, given.sign() * beyond, given)
    unit = ulp(
        torch.maximum(wanted.abs(), torch.as_tensor(at_least, dtype=torch.float64, device=ref.device)), got.dtype
    )
    found = (given - wanted).abs() / unit.clamp(min=unit_at_least)
    found = found.where(~(ref.isinf() & given.isfinite() & ~overflows), torch.inf)
    found = found.where(given.isnan() == ref.isnan(), torch.inf)
    return found.where(~ref.isnan() | found.isinf(), 0.0)


def flushed(got: Tensor, ref: Tensor) -> Tensor:
    """Which elements are 0 where rounding gives a number below the smallest normal one of float32."""
    return (got == 0) & (ref.abs() < FLOAT32_TINY) & (ref.to(got.dtype) != 0)


def _power_of_two(magnitude: Tensor) -> Tensor:
    """The largest power of two that is not above `magnitude`, which is normal in float64; exact."""
    return (magnitude.view(torch.int64) & _EXPONENT_BITS).view(torch.float64)
