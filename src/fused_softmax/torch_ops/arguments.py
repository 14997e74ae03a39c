"""The rules for arguments, and their errors, which are raised before anything is launched or written.

The exception types are torch's. A number is anything that torch accepts as an int or a float: Python's, NumPy's, and
tensors of one element that need no gradient. The functions call these only for arguments of an unusual type, so a usual
call pays for one type check for each argument.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def stands_in(*arguments: Any) -> bool:
    """Whether one of them is no tensor and has a `__torch_function__`, as torch.fx's proxies are: it takes the call."""
    return any(not isinstance(a, Tensor) and hasattr(type(a), "__torch_function__") for a in arguments)


def expect_tensors(function: str, **arguments: Any) -> None:
    """TypeError for an argument that is no tensor."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{function}(): {name} must be a Tensor, not {type(value).__name__}")


def expect_floating(function: str, name: str, x: Tensor) -> None:
    """NotImplementedError, as torch.softmax's, for integers, bools, complex numbers and 8-bit floats."""
    if x.dtype not in FLOATING:
        raise NotImplementedError(
            f"{function}() is not implemented for {x.dtype}: {name} must be float16, bfloat16, float32 or float64; "
            f"cast it first, as in {name}.float()"
        )


def expect_flag(function: str, name: str, value: Any) -> None:
    """TypeError for an argument that is neither True nor False."""
    if type(value) is not bool:
        raise TypeError(f"{function}(): {name} must be True or False, not {value!r}")


def integer(function: str, name: str, value: Any) -> int:
    """value as an int of 64 bits: TypeError if it is no int, or a bool; ValueError if it is larger."""
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    is_bool = isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype is torch.bool)
    try:
        found = None if is_bool else operator.index(value)
    except TypeError:
        found = None
    if found is None:
        raise TypeError(f"{function}(): {name} must be an int, not {value!r}")
    if not -(2**63) <= found < 2**63:
        raise ValueError(f"{function}(): {name} must fit in 64 bits, {found} does not")
    return found


def real(function: str, name: str, value: Any) -> float:
    """value as a float: TypeError if it is no number, a bool, or a tensor that needs a gradient."""
    if isinstance(value, torch.SymFloat):
        return value  # type: ignore[return-value]
    if isinstance(value, Tensor):
        takes = (
            value.dim() == 0 and not value.requires_grad and not value.is_complex() and value.dtype is not torch.bool
        )
    else:
        takes = hasattr(type(value), "__float__") and not isinstance(value, bool)
    if not takes:
        given = repr(value)
        if isinstance(value, Tensor):
            needs = " that requires grad: it gets no gradient, detach() it" if value.requires_grad else ""
            given = f"a Tensor of {value.dtype} and shape {tuple(value.shape)}{needs}"
        raise TypeError(f"{function}(): {name} must be a number, not {given}")
    return float(value)


def finite(function: str, name: str, value: Any) -> float:
    """`real`, and ValueError for NaN and the infinities."""
    found = real(function, name, value)
    if not -math.inf < found < math.inf:  # torch.compile cannot trace math.isfinite of a dynamic number
        raise ValueError(f"{function}(): {name} must be finite, not {found}")
    return found


def other_device_error(name: str, t: Tensor, x_name: str, x: Tensor) -> RuntimeError:
    """The error, in torch's words, for t on another device than x, whose kernel would take t's address."""
    return RuntimeError(
        f"Expected all tensors to be on the same device, but {name} is on {t.device} and {x_name} is on {x.device}"
    )


def expect_layout(name: str, t: Tensor | None, x: Tensor, shape: tuple[int, ...]) -> None:
    """RuntimeError where t's device or shape would have x's kernel read outside of t; None is as it should be.

    The functions that fold tensors see to both; an exported graph may be called with tensors on any device.
    """
    if t is None:
        return
    if t.device != x.device:
        raise other_device_error(name, t, "x", x)
    if t.shape != shape:
        raise RuntimeError(f"{name} must have shape {shape}, not {tuple(t.shape)}")
